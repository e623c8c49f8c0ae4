"""The steps around each request's handler: request id, CORS, API keys and the audit log."""

import hmac
import ipaddress
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from werkzeug.exceptions import BadRequest

from jaxembed.engine.quota import Quota, RateState
from jaxembed.server.auth.keyring import ApiKey
from jaxembed.server.auth.permissions import open_account, use_key
from jaxembed.server.errors import REPOSITORY, Unauthorized
from jaxembed.server.http.exchange import Exchange, Response, current_exchange
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
        self._needs_key = bool(config.api_keys) or service.has_keys
        # The default is all origins if requests need a key, else none. Without keys, any web page
        # that a user opens could call a server on the user's machine if all origins were allowed.
        self._origins = config.cors_allow_origins or (("*",) if self._needs_key else ())

    async def begin(self, exchange: Exchange) -> Response | None:
        """Check the head of a request before its handler, and give the request its id.

        Returns the response to a CORS preflight request, or None for any other request. Raises
        BadRequest for headers that RFC 9112 forbids but the HTTP libraries accept, and the errors
        of `_check_key`.
        """
        if self._service.audit is not None:
            exchange.started_at = time.monotonic()
            open_account(None)  # `use_key` may replace the account by one with a quota
        sent_id = exchange.headers.get("x-request-id", "")
        exchange.request_id = (
            sent_id if REQUEST_ID.fullmatch(sent_id) else f"{random.getrandbits(128):032x}"
        )
        headers = exchange.headers
        host = headers.get("host", "")
        if HOST.fullmatch(host) is None:  # RFC 9112, section 3.2
            raise BadRequest(
                "`Host` must be a host name or an IP address, with an optional port after a colon; "
                f"got `{host[:LONGEST_HOST]}`"
            )
        # RFC 9112, section 6.3: proxies disagree about which header counts, so a part of the body
        # could be read as another client's request (request smuggling).
        if "content-length" in headers and "transfer-encoding" in headers:
            exchange.closes = True
            raise BadRequest("send `Content-Length` or `Transfer-Encoding`, not both")
        if not self._is_public:
            return None
        is_preflight = exchange.method == "OPTIONS" and "access-control-request-method" in headers
        if is_preflight and self._origins:
            allowed = {
                "access-control-allow-methods": "GET, POST",
                "access-control-allow-headers": "Authorization, Content-Type, X-Priority, "
                "X-Request-Id",
                "access-control-max-age": "600",
            }
            return Response(b"", 204, headers=allowed)
        needs_none = _asks_open_route(exchange) or exchange.path.startswith(REPOSITORY)
        if self._needs_key and not needs_none:
            await self._check_key(exchange)
        return None

    async def _check_key(self, exchange: Exchange) -> None:
        """Check the API key of the request. Raises the errors of `identify`."""

        def note(name: str, key: ApiKey | None, quota: Quota | None) -> None:
            exchange.key_name = name
            if quota is not None:
                exchange.key, exchange.quota = key, quota
                open_account(quota)

        identify(self._service, sent_key(exchange), exchange.method, exchange.path, note)

    async def finish(self, exchange: Exchange, response: Response) -> None:
        """Add the headers that all responses have, errors included. If it is an error, discard the
        rest of the request's body first."""
        service, headers = self._service, response.headers
        if response.status >= 400:
            await discard_body()
        headers["x-request-id"] = exchange.request_id
        if exchange.quota is not None:
            for state in await self._rate_states(exchange):  # OpenAI's header names
                headers[f"x-ratelimit-limit-{state.kind}"] = str(state.limit)
                headers[f"x-ratelimit-remaining-{state.kind}"] = str(state.remaining)
                headers[f"x-ratelimit-reset-{state.kind}"] = format_duration(state.reset_s)
        exchange.status = response.status
        if "*" in self._origins:
            headers["access-control-allow-origin"] = "*"
        elif self._origins:
            headers["vary"] = ", ".join([*filter(None, [headers.get("vary")]), "Origin"])
            origin = exchange.headers.get("origin", "")
            if origin in self._origins:
                headers["access-control-allow-origin"] = origin
        if self._origins:
            headers["access-control-expose-headers"] = "*"
        # while the server drains, the client's next request should reach another server
        is_http1 = exchange.scope["http_version"].startswith("1")
        if exchange.closes or (service.models.draining and is_http1):
            headers["connection"] = "close"

    async def _rate_states(self, exchange: Exchange) -> Sequence[RateState]:
        """Return the states of the limits per minute of the request's key."""
        return exchange.quota.states()

    def write_audit(self, exchange: Exchange, *, expired: bool) -> None:
        """Write a line about the request to the audit log, unless it reads an open route. The line
        names the key, and has no text of the request. `expired` says whether `Server.expire` has
        cancelled requests, which are answered with 503."""
        audit = self._service.audit
        if audit is None or exchange.started_at is None or _asks_open_route(exchange):
            return
        account = exchange.body.reservation.account
        assert account is not None
        audit.write(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "key": exchange.key_name,
                "method": exchange.method[:LONGEST_METHOD],
                "route": exchange.path[:LONGEST_PATH],
                "model": ", ".join(sorted(account.models)) or None,
                "inputs": account.inputs,
                "tokens": account.tokens,
                "status": exchange.status or (503 if expired else GONE_STATUS),
                "ms": round(1000 * (time.monotonic() - exchange.started_at), 1),
                "request_id": exchange.request_id,
            }
        )


def identify(
    service: Service,
    sent: bytes,
    method: str,
    path: str,
    note: Callable[[str, ApiKey | None, Quota | None], object],
) -> None:
    """Check the API key that a request has sent, and count the request for the quota of the key.

    `note` is called with the name of the key and, for a valid key of the key file, the key and its
    quota, before the request may be refused. Raises Unauthorized if the key is missing, unknown or
    expired. For a key of the key file, raises also Forbidden and QuotaExceeded.
    """
    keyring = service.keyring
    if keyring is not None and sent and (key := keyring.find(sent)):
        quota = keyring.quota(key)
        note(key.name, None, None)
        if key.is_expired(keyring.now()):
            quota.refuse("expired")  # counts the refusal
            raise Unauthorized(
                f"the key `{key.name}` has expired: it was valid until {key.expires}"
            )
        note(key.name, key, quota)
        use_key(key, quota, method, path)
        return
    if not _is_one_of(sent, service.config.api_keys):
        if keyring is not None:
            keyring.unknown += 1
        raise Unauthorized("missing or wrong API key; send it as `Authorization: Bearer <key>`")
    note(KEY_FLAG, None, None)


async def check_admin_key() -> None:
    """Raise Unauthorized if the admin key of the request is missing or wrong.

    If the server has no admin key, only the admin port has routes that call this function, and the
    port listens on loopback. In that case, raise Unauthorized for requests from web pages, and for
    requests whose `Host` is not a loopback name.
    """
    exchange, key = current_exchange(), current_service().config.admin_key
    if key is None:
        # In an attack by DNS rebinding, `Host` has the name of the web page, not a loopback name.
        host = HOST.fullmatch(exchange.headers.get("host", ""))
        name = "" if host is None else host["name"].strip("[]").lower()
        if "origin" in exchange.headers or not is_loopback(name):
            raise Unauthorized(
                "without --admin-key the admin port refuses web pages, and accepts only requests "
                "whose host is 127.0.0.1, localhost or ::1; set --admin-key to accept others"
            )
        return
    if not _is_one_of(sent_key(exchange), (key,)):
        raise Unauthorized(
            "missing or wrong admin key; send it as `Authorization: Bearer <key>` (an API key is "
            "not accepted here)"
        )
    exchange.key_name = ADMIN_FLAG


def is_loopback(host: str) -> bool:
    """Return whether a host name or an IP address always means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_one_of(sent_key: bytes, keys: Sequence[str]) -> bool:
    """Return whether the sent key is one of the keys. How long this takes does not reveal which key
    it is."""
    return any([hmac.compare_digest(sent_key, key.encode()) for key in keys])  # compares with all


def sent_key(exchange: Exchange) -> bytes:
    """Return the key in `Authorization: Bearer <key>`; empty if the request has none."""
    scheme, _, sent_key = exchange.headers.get("authorization", "").partition(" ")
    # headers are decoded as latin-1; encoding restores the bytes that the client sent
    return sent_key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _asks_open_route(exchange: Exchange) -> bool:
    """Return whether the request reads an open route, which needs no key."""
    return exchange.method in ("GET", "HEAD", "OPTIONS") and is_open(exchange.path)


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
