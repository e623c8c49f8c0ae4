"""Reads a URL, with errors in one line. Knows nothing of what is there."""

import http.client
import urllib.error
import urllib.request
from http import HTTPStatus

from jaxembed.errors import ConfigError, Unanswered

FETCH_S = 10.0


def fetch(
    url: str, wanted: str, *, body: bytes | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """What is there; a `body` is posted. Raises ConfigError for an error as the answer and
    Unanswered for none, which say why and end with what was `wanted`."""
    try:
        request = urllib.request.Request(url, body, headers or {})
        with urllib.request.urlopen(request, timeout=FETCH_S) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise ConfigError(f"cannot read {url}: {_reason(error)}; {wanted}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unanswered(f"cannot read {url}: {_reason(error)}; {wanted}") from error


def _reason(error: Exception) -> str:
    """Why a URL could not be read. Servers of HTTP/1.1 may leave the status without a phrase."""
    if isinstance(error, urllib.error.HTTPError):
        known = error.code in [status.value for status in HTTPStatus]
        return f"HTTP {error.code} {HTTPStatus(error.code).phrase if known else ''}".rstrip()
    if isinstance(error, http.client.InvalidURL) or type(error) is ValueError:
        return "it is no URL"
    if isinstance(error, http.client.HTTPException):
        return "what answers does not speak HTTP"
    cause = getattr(error, "reason", error)
    return getattr(cause, "strerror", None) or str(cause)
