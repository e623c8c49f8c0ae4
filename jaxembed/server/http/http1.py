"""HTTP/1.1 for Hypercorn by httptools, whose parser is written in C. It takes the place of
Hypercorn's H11Protocol and HTTPStream, which are written in Python and take more processor time."""

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from urllib.parse import unquote
from wsgiref.handlers import format_date_time

import httptools
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.utils import suppress_body

from jaxembed.memory import KIB

PREFACE = b"PRI * HTTP/2.0\r\n\r\n"  # how a client that speaks HTTP/2 begins
SLICE_BYTES = 4 * KIB  # bytes parsed at once; they may hold a hundred small requests
MAX_HEADERS = 256  # of a request, trailers included: a small one takes many times its bytes
TARGET = re.compile(rb"[!-~]+")

SERVER = (b"server", b"hypercorn-h11")  # the name that Hypercorn gives to HTTP/1.1
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BAD_REQUEST, HEAD_TOO_LARGE, FAILED, NOT_IMPLEMENTED, BAD_VERSION = 400, 431, 500, 501, 505
REASONS = {
    BAD_REQUEST: "this is no request that HTTP/1.1 allows (RFC 9112): it needs one Host, line ends "
    "of CR LF, a known method, and a body of one valid length; TLS needs a proxy in front",
    HEAD_TOO_LARGE: "the request line and the headers are too long",
    FAILED: "internal error: this is a bug in jaxembed; the server's log has the details",
    NOT_IMPLEMENTED: "CONNECT, and transfer codings other than `chunked`, are not supported",
    BAD_VERSION: "only HTTP/1.0, HTTP/1.1 and HTTP/2 are supported",
}

Headers = list[tuple[bytes, bytes]]
KNOWN = {b"connection", b"content-length", b"expect", b"host", b"transfer-encoding"}


@dataclass(eq=False)
class Request:
    """The head of a request as it was parsed, and how far the request and its response are."""

    method: bytes
    target: bytes
    version: str
    headers: Headers  # names in lower case
    known: dict[bytes, list[bytes]]  # the values of the headers in KNOWN, in lower case
    messages: "Messages" = field(init=False)  # what the app gets
    is_received: bool = False  # whether the whole body has arrived
    is_over: bool = False  # whether the response is complete or the connection is closed
    head: bytes = b""  # of the response, until it is sent
    status: int | None = None  # of the response; None before it begins
    is_chunked: bool = False  # whether the response is sent in chunks
    keeps_alive: bool = True  # whether the connection may be used again

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of a header in KNOWN, in lower case."""
        return self.known.get(name, [])


class Messages:
    """The messages of ASGI for the app that handles a request, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._has_ended = False

    def end(self) -> None:
        """Add the last message."""
        self._has_ended = True
        self.put({"type": "http.disconnect"})

    def put(self, message: Any) -> None:
        """Add a message."""
        self._waiting.append(message)
        self._wake()

    async def get(self) -> Any:
        """Return the next message, and wait for it if needed."""
        while not self._waiting:
            await self._change()
        message = self._waiting.popleft()
        self._wake()
        return message

    async def room(self, limit: int) -> None:
        """Wait until fewer than `limit` messages wait, or the last one was added."""
        while len(self._waiting) >= limit and not self._has_ended:
            await self._change()

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():  # it may be cancelled
                    waiter.set_result(None)


class Http1:
    """One connection of HTTP/1.1, with the interface of Hypercorn's protocols.

    Requests are handled one after another. It ignores `Upgrade`, as RFC 9110, section 7.8 allows,
    and refuses tunnels (CONNECT). A client that begins with HTTP/2 gets Hypercorn's HTTP/2.
    """

    def __init__(
        self,
        app: Any,
        config: Any,
        context: Any,
        task_group: Any,
        connection_state: Any,
        ssl: bool,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        send: Callable[[Event], Awaitable[None]],
    ):
        self._app = app
        self._config = config
        self._context = context
        self._tasks = task_group
        self._state = connection_state
        self._scheme = "https" if ssl else "http"
        self._client, self._server = client, server
        self._send = send
        self._begun = b""  # received bytes that may be the beginning of PREFACE
        self._is_first = True  # whether no other bytes were received
        self._is_closed = False  # whether no further bytes are handled
        self._unfinished = 0  # bytes parsed since the parser has found anything
        self._request: Request | None = None  # the request in progress
        self._is_free = asyncio.Event()  # set when no request is in progress
        self._is_free.set()
        # What the parser has found: requests, pieces of bodies, and for the end of a body whether
        # the connection may be used again.
        self._found: deque[Request | bytes | bool] = deque()
        self._target, self._headers, self._known = b"", [], {}
        self._left = 0  # bytes of the body that are still to come, if its length is declared
        self._parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # `lenient_chunked_length` lets a body with two lengths pass, because `Access.begin` refuses
        # it with a message. `lenient_data_after_close` lets bytes pass that follow the last request
        # of a connection; they are dropped when it is closed.
        parser.set_dangerous_leniencies(lenient_chunked_length=True, lenient_data_after_close=True)
        return parser

    async def initiate(self) -> None:
        """Do nothing: HTTP/1.1 has no greeting."""

    async def handle(self, event: Event) -> None:
        """Handle received bytes, or the end of the connection. Raises H2ProtocolAssumedError if the
        client begins with HTTP/2; then Hypercorn's ProtocolWrapper goes on with HTTP/2."""
        if isinstance(event, Closed):
            self._is_closed = True
            if self._request is not None:
                await self._end(self._request)
        elif isinstance(event, RawData) and not self._is_closed:
            await self._receive(event.data)

    async def _receive(self, data: bytes) -> None:
        """Parse received bytes, and handle what they hold."""
        if self._is_first:
            data = self._begun + data
            if data.startswith(PREFACE):
                raise H2ProtocolAssumedError(data)
            if PREFACE.startswith(data):
                self._begun = data
                return
            self._is_first = False
        start = 0
        while start < len(data) and not self._is_closed:
            # the declared rest of a body is one piece; other bytes may hold many requests
            piece = data[start : start + max(SLICE_BYTES, self._left)]
            start += len(piece)
            refusal = self._parse(piece)
            self._unfinished = 0 if self._found else self._unfinished + len(piece)
            await self._handle_found()
            is_long = self._unfinished > self._config.h11_max_incomplete_size
            if refusal is None and (is_long or len(self._headers) > MAX_HEADERS):
                refusal = HEAD_TOO_LARGE
            if refusal is not None:
                if self._request is not None and self._request.is_received:
                    await self._is_free.wait()  # its response comes first
                if not self._is_closed:
                    await self._refuse(refusal)

    def _parse(self, data: bytes) -> int | None:
        """Parse bytes. Returns the status of the response if they are not HTTP, else None."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # After the head of a request with `Upgrade`, the parser takes no body and stops.
                # Parse the head again without that header, and then the rest.
                while not isinstance(request := self._found.pop(), Request):
                    pass
                if request.method == b"CONNECT":
                    return NOT_IMPLEMENTED
                version = request.version.encode()
                lines = [b"%b %b HTTP/%b" % (request.method, request.target, version)]
                lines += [b"%b: %b" % pair for pair in request.headers if pair[0] != b"upgrade"]
                data = b"\r\n".join([*lines, b"", data[upgrade.args[0] :]])
                self._parser = self._new_parser()
            except httptools.HttpParserError:
                return BAD_REQUEST
            else:
                return None

    # The next methods are called by the parser.

    def on_message_begin(self) -> None:
        self._target, self._headers, self._known = b"", [], {}

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name, value = name.lower(), value.strip(b" \t")
        self._headers.append((name, value))
        if name in KNOWN:
            self._known.setdefault(name, []).append(value.lower())

    def on_headers_complete(self) -> None:
        method, version = self._parser.get_method(), self._parser.get_http_version()
        request = Request(method, self._target, version, self._headers, self._known)
        self._headers, self._known = [], {}  # of trailers, which are ignored
        lengths = [] if request.values(b"transfer-encoding") else request.values(b"content-length")
        self._left = next((int(length) for length in lengths if length.isdigit()), 0)
        self._found.append(request)

    def on_body(self, data: bytes) -> None:
        self._left = max(self._left - len(data), 0)
        self._found.append(data)

    def on_message_complete(self) -> None:
        self._found.append(self._parser.should_keep_alive())

    async def _handle_found(self) -> None:
        """Handle what the parser has found. Waits for the response to a request before it handles
        the next request, and while the app has not taken earlier pieces of a body."""
        while self._found and not self._is_closed:
            found = self._found.popleft()
            if isinstance(found, Request):
                await self._is_free.wait()
                if self._is_closed:
                    return
                if (refusal := refusal_of(found)) is not None:
                    await self._refuse(refusal)
                else:
                    await self._begin(found)
                continue
            request, body = self._request, b"" if isinstance(found, bool) else found
            if isinstance(found, bytes) and self._found and isinstance(self._found[0], bool):
                found = self._found.popleft()  # the end comes with the last piece
            if request is not None and not request.is_over:
                if isinstance(found, bool):
                    request.is_received = True
                    request.keeps_alive &= found
                more = not request.is_received
                await request.messages.room(self._config.max_app_queue_size)
                request.messages.put({"type": "http.request", "body": body, "more_body": more})

    async def _begin(self, request: Request) -> None:
        """Let the app handle a request."""
        tokens = b",".join(request.values(b"connection")).split(b",")
        request.keeps_alive = request.version == "1.1" and b"close" not in map(bytes.strip, tokens)
        path, _, query = request.target.partition(b"?")
        scope = {
            "type": "http",
            "http_version": request.version,
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": request.method.decode(),
            "scheme": self._scheme,
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": request.headers,
            "client": self._client,
            "server": self._server,
            "state": self._state.copy(),
            "extensions": {},
        }
        request.messages = Messages()
        self._tasks.spawn(self._run, request, scope)
        self._request = request
        self._is_free.clear()
        await self._send(Updated(idle=False))
        if request.version == "1.1" and b"100-continue" in request.values(b"expect"):
            await self._send(RawData(CONTINUE))

    async def _run(self, request: Request, scope: Any) -> None:
        """Run the app for a request."""
        try:
            await self._app(
                scope, request.messages.get, partial(self._respond, request), None, None
            )
        except Exception:
            await self._config.log.exception("Error in ASGI Framework")
        finally:
            await self._respond(request, None)

    async def _respond(self, request: Request, message: Any) -> None:
        """Send what an ASGI message of the app says; None means that the app has ended. If it has
        not sent a whole response before, it has failed."""
        if request.is_over:
            return
        if message is None:
            if request.status is None:
                await self._send(RawData(self._error(FAILED)))
            request.keeps_alive = False
            await self._end(request)
        elif message["type"] == "http.response.start":
            self._start_response(request, message["status"], message["headers"])
        else:
            more, data = message.get("more_body", False), message.get("body", b"")
            if suppress_body(request.method.decode(), request.status or 0):
                data = b""
            elif request.is_chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
                data += b"" if more else b"0\r\n\r\n"
            data, request.head = request.head + data, b""
            if data:
                await self._send(RawData(data))
            if not more:
                await self._end(request)

    def _start_response(self, request: Request, status: int, headers: Headers) -> None:
        """Keep the head of a response until the first piece of its body is sent. Raises ValueError
        for a header with a line break."""
        fields = dict(headers)
        # the rest of a body would be taken for the next request
        request.keeps_alive &= request.is_received
        more = [(b"date", date_of(int(time.time()))), SERVER]
        if b"content-length" not in fields:
            request.is_chunked = request.version == "1.1"
            if request.is_chunked:
                more.append((b"transfer-encoding", b"chunked"))
            else:
                request.keeps_alive = False
        if fields.get(b"connection") == b"close":
            request.keeps_alive = False
        elif not request.keeps_alive:
            more.append((b"connection", b"close"))
        request.head, request.status = head_of(status, [*headers, *more]), status

    async def _end(self, request: Request) -> None:
        """Handle the end of a response or of the connection: tell the app, and close the connection
        unless it can be used again."""
        if request.is_over:
            return
        request.is_over, self._request = True, None
        was_closed = self._is_closed
        is_reusable = request.is_received and request.keeps_alive
        self._is_closed |= not is_reusable or self._context.terminated.is_set()
        self._is_free.set()
        if not self._is_closed:
            await self._send(Updated(idle=True))
        elif not was_closed:
            await self._send(Closed())
        request.messages.end()

    async def _refuse(self, status: int) -> None:
        """Answer bytes that are no valid request with an error, and close the connection."""
        self._is_closed = True
        request = self._request
        if request is None or request.status is None:
            await self._send(RawData(self._error(status)))
        await self._send(Closed())
        if request is not None:
            await self._end(request)

    def _error(self, status: int) -> bytes:
        """Return a response that says why, and that the connection is closed."""
        body = REASONS[status].encode()
        headers = [
            (b"content-type", b"text/plain"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"date", date_of(int(time.time()))),
            SERVER,
        ]
        return head_of(status, headers) + body


@lru_cache(maxsize=2)
def date_of(second: int) -> bytes:
    """Return the value of the header `date` for a time in seconds since 1970."""
    return format_date_time(second).encode()


def refusal_of(request: Request) -> int | None:
    """Return the status of the response to a request that HTTP/1.1 does not allow, else None."""
    coding, hosts = request.values(b"transfer-encoding"), len(request.values(b"host"))
    if len(request.headers) > MAX_HEADERS:
        return HEAD_TOO_LARGE
    if request.version not in ("1.0", "1.1"):
        return BAD_VERSION
    if coding not in ([], [b"chunked"]):
        return NOT_IMPLEMENTED
    # RFC 9112, section 3.2: a request of HTTP/1.1 has one `Host`
    if hosts > 1 or (hosts == 0 and request.version == "1.1"):
        return BAD_REQUEST
    return None if TARGET.fullmatch(request.target) else BAD_REQUEST


def head_of(status: int, headers: Headers) -> bytes:
    """Return the head of a response. Raises ValueError for a header with a line break."""
    lines = b"\r\n".join([b"%b: %b" % pair for pair in headers])
    head = b"HTTP/1.1 %d \r\n%b\r\n\r\n" % (status, lines)
    if head.count(b"\n") != len(headers) + 2 or head.count(b"\r") != len(headers) + 2:
        raise ValueError("a response header has a line break")
    return head
