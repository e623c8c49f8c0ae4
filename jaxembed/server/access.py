"""What happens to every request around its handler: its id, CORS, the API key. Knows no route."""

import hmac
import random
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from quart import Response, g, request
from werkzeug.exceptions import BadRequest

from jaxembed.config import ServerConfig
from jaxembed.server.body import discard_body
from jaxembed.server.errors import REPOSITORY, Unauthorized
from jaxembed.server.service import current_service

OPEN_ROUTES = {
    "/",
    "/health",
    "/livez",
    "/ready",
    "/ping",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/api-doc/openapi.json",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # hosts that can only mean this machine
REQUEST_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)


async def name_request() -> None:
    """The client's id for the request if it sent a sane one, else one of ours."""
    given = request.headers.get("x-request-id", "")
    g.request_id = given if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


async def check_length() -> None:
    """Refuse a body with two lengths: proxies disagree about which counts, so that a part of it may
    pass for another client's request. RFC 9112, section 6.3."""
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        g.closes = True
        raise BadRequest("send `Content-Length` or `Transfer-Encoding`, not both")


async def answer_preflight() -> Response | None:
    """A browser asks before it sends a key, so this comes before `check_key`."""
    asked = request.method == "OPTIONS" and "access-control-request-method" in request.headers
    if asked and _allowed_origins(current_service().config):
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Priority, X-Request-Id",
            "Access-Control-Max-Age": "600",
        }
        return Response(b"", 204, headers=headers)
    return None


async def check_key() -> None:
    """Raises Unauthorized unless the route is open, no key is set, or the request carries one."""
    keys = current_service().config.api_keys
    if not keys or _is_open() or request.path.startswith(REPOSITORY):
        return
    if not _carries_one_of(keys):
        raise Unauthorized("missing or wrong API key; send it as `Authorization: Bearer <key>`")


async def check_admin_key() -> None:
    """Raises Unauthorized unless the request carries the admin key, or there is none: then only
    the admin port, which is this machine's, has routes that need it, and no page may use them."""
    key = current_service().config.admin_key
    if key is None:
        if "origin" in request.headers or _host() not in LOOPBACK:
            raise Unauthorized(
                f"the admin port takes requests for {', '.join(LOOPBACK)} from programs, not from "
                "pages in a browser; for those set --admin-key"
            )
    elif not _carries_one_of((key,)):
        raise Unauthorized(
            "missing or wrong admin key; send it as `Authorization: Bearer <key>` (an API key does "
            "not do)"
        )


def _host() -> str:
    """The host that the client asked for, without its port. A page that was sent here by a name of
    its own (DNS rebinding) names that."""
    return urlsplit(f"//{request.host}").hostname or ""


def _carries_one_of(keys: Sequence[str]) -> bool:
    """Whether the request carries one of the keys; it takes as long whichever it is."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Quart decodes headers as latin-1: this gives back the bytes the client sent.
    given_key = given.strip().encode("latin-1", "replace")
    matches = [hmac.compare_digest(given_key, key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


async def finish(response: Response) -> Response:
    """Headers of every answer, errors included."""
    service = current_service()
    if response.status_code >= 400:
        await discard_body()
    response.headers.add("x-request-id", g.get("request_id", "-"))
    _allow_origin(response, _allowed_origins(service.config))
    if g.get("closes"):
        response.headers["Connection"] = "close"
    if service.models.draining and request.http_version.startswith("1"):
        response.headers["Connection"] = "close"  # the next request should find another server
    return response


def _is_open() -> bool:
    if request.method not in ("GET", "HEAD", "OPTIONS"):
        return False
    return request.path in OPEN_ROUTES or request.path.startswith("/docs/")


def _allowed_origins(config: ServerConfig) -> tuple[str, ...]:
    """Those asked for, else all of them if requests need a key: without one any page that a user
    opens could use the server on the user's machine."""
    return config.cors_allow_origins or (("*",) if config.api_keys else ())


def _allow_origin(response: Response, allowed: tuple[str, ...]) -> None:
    if not allowed:
        return
    if "*" in allowed:
        response.headers.add("Access-Control-Allow-Origin", "*")
    else:
        response.headers["Vary"] = "Origin"
        origin = request.headers.get("origin")
        if origin in allowed:
            response.headers["Access-Control-Allow-Origin"] = origin
    response.headers.add("Access-Control-Expose-Headers", "*")
