"""What happens to every request around its handler: its id, CORS, the API key, the audit log. Knows
no route."""

import hmac
import ipaddress
import math
import random
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

from quart import Response, current_app, g, request
from werkzeug.exceptions import BadRequest

from jaxembed.server.auth.permissions import open_account, use_key
from jaxembed.server.errors import REPOSITORY, Unauthorized
from jaxembed.server.http.connection import BoundedBody
from jaxembed.server.pipeline.body import discard_body
from jaxembed.server.service import Service, current_service

OPEN_ROUTES = {
    "/",
    "/health",
    "/livez",
    "/ready",
    "/ping",
    "/metrics",
    "/docs",
    "/playground",
    "/openapi.json",
    "/api-doc/openapi.json",
}
KEY_FLAG, ADMIN_FLAG = "--api-key", "--admin-key"  # stand for the name of a key in the audit log
GONE_STATUS = 499  # in the audit log, for a client that did not wait for its answer
LONGEST_PATH, LONGEST_METHOD = 200, 20  # characters, in the audit log
LONGEST_HOST = 255  # characters, in a message
HOST = re.compile(  # a name whose parts DNS could hold, or an address of IPv4 or IPv6; and a port
    r"(?P<name>[\w!$%&'()*+,;=~-]{0,63}(?:\.[\w!$%&'()*+,;=~-]{1,63})*\.?|\[[\da-f:.]+\])(?::\d*)?",
    re.ASCII | re.IGNORECASE,
)
REQUEST_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)


class Access:
    """What happens before and after the handlers of an app. Only one that `is_public` checks API
    keys and answers what browsers ask first: the admin port has a key of its own, which its routes
    check."""

    def __init__(self, service: Service, *, is_public: bool):
        self._service = service
        self._is_public = is_public
        config = service.config
        self._needs_key = bool(config.api_keys) or service.keyring is not None
        # Those asked for, else all of them if requests need a key: without one any page that a
        # user opens could use the server on the user's machine.
        self._origins = config.cors_allow_origins or (("*",) if self._needs_key else ())

    async def begin(self) -> Response | None:
        """Name the request, and refuse it or answer it at once if its head says so: what RFC 9112
        forbids and the libraries let pass, a browser's question before it sends a key, and what
        `_check_key` refuses. Raises BadRequest, and as `_check_key`."""
        if self._service.audit is not None:
            g.started_at = time.monotonic()
            open_account(None)
        name_request()
        headers = request.headers
        host = headers.get("host", "")
        if HOST.fullmatch(host) is None:  # RFC 9112, section 3.2
            raise BadRequest(
                f"`Host` must be a name or an address, and may have a port after a colon; got "
                f"`{host[:LONGEST_HOST]}`"
            )
        # RFC 9112, section 6.3: proxies disagree about which counts, so that a part of the body may
        # pass for another client's request.
        if "content-length" in headers and "transfer-encoding" in headers:
            g.closes = True
            raise BadRequest("send `Content-Length` or `Transfer-Encoding`, not both")
        if not self._is_public:
            return None
        asks_first = request.method == "OPTIONS" and "access-control-request-method" in headers
        if asks_first and self._origins:
            allowed = {
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Priority, "
                "X-Request-Id",
                "Access-Control-Max-Age": "600",
            }
            return Response(b"", 204, headers=allowed)
        path = request.path
        if self._needs_key and not (_asks_open_route() or path.startswith(REPOSITORY)):
            self._check_key()
        return None

    def _check_key(self) -> None:
        """Raises Unauthorized unless the request carries a key; and what `use_key` does for one of
        the key file."""
        keyring = self._service.keyring
        if keyring is not None and (given := _given_key()) and (key := keyring.find(given)):
            quota = keyring.quota(key)
            g.key_name = key.name
            if key.is_expired(keyring.now()):
                quota.refuse("expired")
                raise Unauthorized(
                    f"the key `{key.name}` has expired: it was valid to {key.expires}"
                )
            use_key(key, quota)
            return
        if not _carries_one_of(self._service.config.api_keys):
            if keyring is not None:
                keyring.unknown += 1
            raise Unauthorized("missing or wrong API key; send it as `Authorization: Bearer <key>`")
        g.key_name = KEY_FLAG

    async def finish(self, response: Response) -> Response:
        """Headers of every answer, errors included."""
        service, headers = self._service, response.headers
        if response.status_code >= 400:
            await discard_body()
        headers.add("x-request-id", g.get("request_id", "-"))
        if service.keyring is not None and (quota := g.get("quota")) is not None:
            for state in quota.states():  # as OpenAI names the limits a minute of a key
                headers.add(f"x-ratelimit-limit-{state.kind}", str(state.limit))
                headers.add(f"x-ratelimit-remaining-{state.kind}", str(state.remaining))
                headers.add(f"x-ratelimit-reset-{state.kind}", duration(state.reset_s))
        if service.audit is not None:
            g.status = response.status_code
        if "*" in self._origins:
            headers.add("Access-Control-Allow-Origin", "*")
        elif self._origins:
            headers.add("Vary", "Origin")
            origin = request.headers.get("origin")
            if origin in self._origins:
                headers["Access-Control-Allow-Origin"] = origin
        if self._origins:
            headers.add("Access-Control-Expose-Headers", "*")
        # the next request of a connection should find another server when this one ends
        if g.get("closes") or (service.models.draining and request.http_version.startswith("1")):
            headers["Connection"] = "close"
        return response

    async def write_audit(self, error: BaseException | None) -> None:
        """Write the line of the audit log about the request, unless its route is open. Its texts
        are not in it, and its key is by name."""
        audit = self._service.audit
        if audit is None or "started_at" not in g or _asks_open_route():
            return
        account = cast(BoundedBody, request.body).held.account
        assert account is not None
        # Server.expire cancels what it answers with 503
        is_late = current_app.expired  # pyright: ignore[reportAttributeAccessIssue]
        audit.write(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "key": g.get("key_name"),
                "method": request.method[:LONGEST_METHOD],
                "route": request.path[:LONGEST_PATH],
                "model": ", ".join(sorted(account.models)) or None,
                "inputs": account.inputs,
                "tokens": account.tokens,
                "status": g.get("status", 503 if is_late else GONE_STATUS),
                "ms": round(1000 * (time.monotonic() - g.started_at), 1),
                "request_id": g.get("request_id", "-"),
            }
        )


def name_request() -> None:
    """The client's id for the request if it sent a sane one, else one of ours."""
    given = request.headers.get("x-request-id", "")
    g.request_id = given if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


async def check_admin_key() -> None:
    """Raises Unauthorized unless the request carries the admin key, or there is none: then only
    the admin port, which is this machine's, has routes that need it, and no page may use them."""
    key = current_service().config.admin_key
    if key is None:
        # A page that was sent here by a name of its own (DNS rebinding) names that.
        host = HOST.fullmatch(request.headers.get("host", ""))
        name = "" if host is None else host["name"].strip("[]").lower()
        if "origin" in request.headers or not is_loopback(name):
            raise Unauthorized(
                "the admin port takes requests for 127.0.0.1, localhost or ::1 from programs, not "
                "from pages in a browser; for those set --admin-key"
            )
        return
    if not _carries_one_of((key,)):
        raise Unauthorized(
            "missing or wrong admin key; send it as `Authorization: Bearer <key>` (an API key does "
            "not do)"
        )
    g.key_name = ADMIN_FLAG


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _carries_one_of(keys: Sequence[str]) -> bool:
    """Whether the request carries one of the keys; it takes as long whichever it is."""
    given = _given_key()
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    return any(matches)


def _given_key() -> bytes:
    """The key that the request carries; empty if it carries none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Quart decodes headers as latin-1: this gives back the bytes the client sent.
    return given.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def _asks_open_route() -> bool:
    return request.method in ("GET", "HEAD", "OPTIONS") and is_open(request.path)


def is_open(path: str) -> bool:
    """Whether the path is that of a route that needs no key: it is neither traced nor audited."""
    return path in OPEN_ROUTES or path.startswith("/docs/")


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: `120ms`, `8.64s`, `6m0s`, rounded up."""
    thousandths = math.ceil(round(1000 * seconds, 3))
    minutes, rest = divmod(thousandths, 60_000)
    if not minutes and rest < 1000:
        return f"{rest}ms"
    return f"{minutes}m" * (minutes > 0) + f"{rest / 1000:g}s"
