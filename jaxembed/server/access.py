"""The steps around each request's handler: request id, CORS, API keys and the audit log."""

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
KEY_FLAG, ADMIN_FLAG = "--api-key", "--admin-key"  # key names in the audit log
GONE_STATUS = 499  # audit-log status of a client that disconnected before the response
LONGEST_PATH, LONGEST_METHOD = 200, 20  # maximum characters in the audit log
LONGEST_HOST = 255  # maximum characters in an error message
HOST = re.compile(  # a DNS name, an IPv4 or an IPv6 address, with an optional port
    r"(?P<name>[\w!$%&'()*+,;=~-]{0,63}(?:\.[\w!$%&'()*+,;=~-]{1,63})*\.?|\[[\da-f:.]+\])(?::\d*)?",
    re.ASCII | re.IGNORECASE,
)
REQUEST_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)


class Access:
    """The steps before and after the handlers of one app.

    With `is_public`, they check API keys and answer CORS preflight requests. The admin app is not
    public; its routes call `check_admin_key`.
    """

    def __init__(self, service: Service, *, is_public: bool):
        self._service = service
        self._is_public = is_public
        config = service.config
        self._needs_key = bool(config.api_keys) or service.keyring is not None
        # The default is all origins if requests need a key, else none. Without keys, any web page
        # that a user opens could call a server on the user's machine if all origins were allowed.
        self._origins = config.cors_allow_origins or (("*",) if self._needs_key else ())

    async def begin(self) -> Response | None:
        """Check the head of a request before its handler, and give the request its id.

        Returns the response to a CORS preflight request, or None for any other request. Raises
        BadRequest for headers that RFC 9112 forbids but the HTTP libraries accept, and the errors
        of `_check_key`.
        """
        if self._service.audit is not None:
            g.started_at = time.monotonic()
            open_account(None)  # `use_key` may replace the account by one with a quota
        name_request()
        headers = request.headers
        host = headers.get("host", "")
        if HOST.fullmatch(host) is None:  # RFC 9112, section 3.2
            raise BadRequest(
                "`Host` must be a host name or an IP address, with an optional port after a colon; "
                f"got `{host[:LONGEST_HOST]}`"
            )
        # RFC 9112, section 6.3: proxies disagree about which header counts, so a part of the body
        # could be read as another client's request (request smuggling).
        if "content-length" in headers and "transfer-encoding" in headers:
            g.closes = True
            raise BadRequest("send `Content-Length` or `Transfer-Encoding`, not both")
        if not self._is_public:
            return None
        is_preflight = request.method == "OPTIONS" and "access-control-request-method" in headers
        if is_preflight and self._origins:
            allowed = {
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Priority, "
                "X-Request-Id",
                "Access-Control-Max-Age": "600",
            }
            return Response(b"", 204, headers=allowed)
        if self._needs_key and not (_asks_open_route() or request.path.startswith(REPOSITORY)):
            self._check_key()
        return None

    def _check_key(self) -> None:
        """Check the API key of the request.

        Raises Unauthorized if the key is missing, unknown or expired. For a key of the key file,
        raises also Forbidden and QuotaExceeded.
        """
        keyring = self._service.keyring
        if keyring is not None and (sent_key := _sent_key()) and (key := keyring.find(sent_key)):
            quota = keyring.quota(key)
            g.key_name = key.name
            if key.is_expired(keyring.now()):
                quota.refuse("expired")  # counts the refusal
                raise Unauthorized(
                    f"the key `{key.name}` has expired: it was valid until {key.expires}"
                )
            use_key(key, quota)
            return
        if not _carries_one_of(self._service.config.api_keys):
            if keyring is not None:
                keyring.unknown += 1
            raise Unauthorized("missing or wrong API key; send it as `Authorization: Bearer <key>`")
        g.key_name = KEY_FLAG

    async def finish(self, response: Response) -> Response:
        """Add the headers that all responses have, errors included, and return the response. If it
        is an error, discard the rest of the request's body first."""
        service, headers = self._service, response.headers
        if response.status_code >= 400:
            await discard_body()
        headers.add("x-request-id", g.get("request_id", "-"))
        if service.keyring is not None and (quota := g.get("quota")) is not None:
            for state in quota.states():  # OpenAI's header names
                headers.add(f"x-ratelimit-limit-{state.kind}", str(state.limit))
                headers.add(f"x-ratelimit-remaining-{state.kind}", str(state.remaining))
                headers.add(f"x-ratelimit-reset-{state.kind}", format_duration(state.reset_s))
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
        # while the server drains, the client's next request should reach another server
        if g.get("closes") or (service.models.draining and request.http_version.startswith("1")):
            headers["Connection"] = "close"
        return response

    async def write_audit(self, error: BaseException | None) -> None:
        """Write a line about the request to the audit log, unless it reads an open route. The line
        names the key, and has no text of the request. Quart passes `error`, which is not used."""
        audit = self._service.audit
        if audit is None or "started_at" not in g or _asks_open_route():
            return
        account = cast(BoundedBody, request.body).reservation.account
        assert account is not None
        # `Server.expire` cancels a request and answers it with 503
        is_expired = current_app.expired  # pyright: ignore[reportAttributeAccessIssue]
        audit.write(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "key": g.get("key_name"),
                "method": request.method[:LONGEST_METHOD],
                "route": request.path[:LONGEST_PATH],
                "model": ", ".join(sorted(account.models)) or None,
                "inputs": account.inputs,
                "tokens": account.tokens,
                "status": g.get("status", 503 if is_expired else GONE_STATUS),
                "ms": round(1000 * (time.monotonic() - g.started_at), 1),
                "request_id": g.get("request_id", "-"),
            }
        )


def name_request() -> None:
    """Set `g.request_id` to the header `X-Request-Id` of the request if that is valid, else to a
    random id."""
    sent_id = request.headers.get("x-request-id", "")
    g.request_id = sent_id if REQUEST_ID.fullmatch(sent_id) else f"{random.getrandbits(128):032x}"


async def check_admin_key() -> None:
    """Raise Unauthorized if the admin key of the request is missing or wrong.

    If the server has no admin key, only the admin port has routes that call this function, and the
    port listens on loopback. In that case, raise Unauthorized for requests from web pages, and for
    requests whose `Host` is not a loopback name.
    """
    key = current_service().config.admin_key
    if key is None:
        # In an attack by DNS rebinding, `Host` has the name of the web page, not a loopback name.
        host = HOST.fullmatch(request.headers.get("host", ""))
        name = "" if host is None else host["name"].strip("[]").lower()
        if "origin" in request.headers or not is_loopback(name):
            raise Unauthorized(
                "without --admin-key the admin port refuses web pages, and accepts only requests "
                "whose host is 127.0.0.1, localhost or ::1; set --admin-key to accept others"
            )
        return
    if not _carries_one_of((key,)):
        raise Unauthorized(
            "missing or wrong admin key; send it as `Authorization: Bearer <key>` (an API key is "
            "not accepted here)"
        )
    g.key_name = ADMIN_FLAG


def is_loopback(host: str) -> bool:
    """Return whether a host name or an IP address always means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _carries_one_of(keys: Sequence[str]) -> bool:
    """Return whether the request carries one of the keys. How long this takes does not reveal which
    key it is."""
    sent_key = _sent_key()
    return any([hmac.compare_digest(sent_key, key.encode()) for key in keys])  # compares with all


def _sent_key() -> bytes:
    """Return the key in `Authorization: Bearer <key>`; empty if the request has none."""
    scheme, _, sent_key = request.headers.get("authorization", "").partition(" ")
    # Quart decodes headers as latin-1; encoding restores the bytes that the client sent.
    return sent_key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def _asks_open_route() -> bool:
    """Return whether the request reads an open route, which needs no key."""
    return request.method in ("GET", "HEAD", "OPTIONS") and is_open(request.path)


def is_open(path: str) -> bool:
    """Return whether reading a path needs no key, and is not traced or audited."""
    return path in OPEN_ROUTES or path.startswith("/docs/")


def format_duration(seconds: float) -> str:
    """Format a duration as OpenAI does: `120ms`, `8.64s`, `6m0s`. It is rounded up to a
    millisecond."""
    milliseconds = math.ceil(round(1000 * seconds, 3))
    minutes, rest_ms = divmod(milliseconds, 60_000)
    if not minutes and rest_ms < 1000:
        return f"{rest_ms}ms"
    return f"{minutes}m" * (minutes > 0) + f"{rest_ms / 1000:g}s"
