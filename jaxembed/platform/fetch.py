"""Reads a URL, and reports failures in one line."""

import http.client
import urllib.error
import urllib.request

from jaxembed.errors import ConfigError, Unanswered

FETCH_S = 10.0  # timeout in seconds


def fetch(
    url: str, expectation: str, *, body: bytes | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """Send a GET request, or a POST request with `body`, and return the body of the response.

    Raises ConfigError if the response is an HTTP error, and Unanswered if there is no HTTP
    response. The messages give the reason and end with `expectation`, a clause that says what the
    URL should be.
    """
    try:
        request = urllib.request.Request(url, body, headers or {})
        with urllib.request.urlopen(request, timeout=FETCH_S) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        error.close()  # the error holds the connection
        raise ConfigError(f"cannot read {url}: {_reason(error)}; {expectation}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unanswered(f"cannot read {url}: {_reason(error)}; {expectation}") from error


def _reason(error: Exception) -> str:
    """Return the reason why a URL could not be read, as text for a message."""
    if isinstance(error, urllib.error.HTTPError):  # the phrase is Python's: a response may lack it
        return f"HTTP {error.code} {http.client.responses.get(error.code, '')}".rstrip()
    if isinstance(error, http.client.InvalidURL) or type(error) is ValueError:
        return "it is not a URL"
    if isinstance(error, http.client.HTTPException):
        return "the response is not HTTP"
    cause = getattr(error, "reason", error)
    return getattr(cause, "strerror", None) or str(cause)
