"""One HTTP request and its response: the body as it arrives, the headers, and the memory reserved
for both. Handlers use these classes and not Quart's, whose steps around a handler take much of the
processor time of a short request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

from werkzeug.exceptions import RequestEntityTooLarge

from jaxembed.engine.admission import Reservation
from jaxembed.errors import InvalidInput, Overloaded
from jaxembed.memory import KIB, MIB
from jaxembed.observability.tracing import Trace, Tracer, as_current, current_trace
from jaxembed.server.http.connection import SEND_S, abort_connection
from jaxembed.server.http.time_limit import in_time

COPIES = 3  # bytes of memory per byte of a body, for its raw and its decoded form
MAX_DISCARDED = 256 * MIB  # bytes of a discarded body that are still read
WATCH_S = 0.01  # seconds; see `Watches`
# Bytes of a response that need no reserved memory, so that a full server can send errors, and with
# HTTP/1 no time limit but that of `Connection`.
SMALL_ANSWER = 8 * KIB
MAX_SENT = 256 * KIB  # bytes of a response in one piece
SEND_TIMEOUT_S = 600  # seconds that a client may take to read a whole response
CLIENT_GONE = "client_disconnected"  # the error of a trace whose client disconnected

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_current: ContextVar["Exchange"] = ContextVar("exchange")

current_exchange = _current.get
"""Returns the Exchange that the current asyncio task handles. Raises LookupError outside of one."""


class Response:
    """A response to an HTTP request.

    `body` is bytes, or an iterator of pieces that is read while the client reads the response.
    `headers` are values by name in lower case. All handlers return it; Quart's types do not allow
    that, so the type of blueprints is Any.
    """

    def __init__(
        self,
        body: bytes | AsyncIterator[bytes] = b"",
        status: int = 200,
        *,
        content_type: str = "text/html; charset=utf-8",
        headers: Mapping[str, str] | None = None,
    ):
        self.body = body
        self.status = status
        self.headers = {**(headers or {}), "content-type": content_type}
        if isinstance(body, bytes):
            self.headers["content-length"] = str(len(body))

    async def read(self) -> bytes:
        """Return the whole body."""
        if isinstance(self.body, bytes):
            return self.body
        return b"".join([part async for part in self.body])


class Body:
    """The body of a request, which is taken from the client while it is read.

    `receive` is ASGI's function. Memory is reserved for the request before its bytes are kept.
    `on_received` is called when the whole body has arrived. If the client disconnects, reading
    raises CancelledError.
    """

    def __init__(self, receive: Receive, reservation: Reservation, on_received: Callable[[], None]):
        self.reservation = reservation
        self.is_received = False  # whether the whole body has arrived
        self.is_abandoned = False  # whether the client has disconnected
        self.is_answered = asyncio.Event()  # set when the last piece of the response is being sent
        self._dropped = 0  # bytes
        self._receive = receive
        self._on_received = on_received

    async def read(self, limit: int) -> bytes | bytearray:
        """Return the whole body. Raises RequestEntityTooLarge if it has more than `limit` bytes,
        and Overloaded or RequestTooLarge if no memory can be reserved."""
        body: bytes | bytearray = b""
        while not self.is_received:
            piece = await self._take()
            await self.reservation.make_room(COPIES * len(piece))
            self.reservation.charge(COPIES * len(piece))
            if len(body) + len(piece) > limit:
                raise RequestEntityTooLarge
            if self.is_received and not body:
                return piece
            body = body or bytearray()  # a bytearray grows in place
            body += piece
        return body

    async def _take(self) -> bytes:
        """Return the next piece, which may be empty. Raises CancelledError if the client has
        disconnected."""
        message = await self._receive()
        if message["type"] != "http.request":
            self.is_abandoned = True
            raise asyncio.CancelledError
        if not message.get("more_body"):
            self.is_received = True
            self._on_received()
        return message.get("body", b"")

    async def discard(self, pause_s: float) -> None:
        """Drop the rest of the body as it arrives, until more than MAX_DISCARDED bytes are dropped
        or the client sends nothing for `pause_s` seconds."""
        with suppress(TimeoutError):
            while not self.is_received and self._dropped <= MAX_DISCARDED:
                self._dropped += len(await in_time(self._take(), pause_s))

    async def watch(self) -> None:
        """Drop the rest of the body, and return when the client disconnects. Until the request is
        answered, only MAX_DISCARDED bytes are dropped."""
        try:
            while True:
                if self._dropped > MAX_DISCARDED:
                    await self.is_answered.wait()
                self._dropped += len(await self._take())
        except asyncio.CancelledError:
            if not self.is_abandoned:
                raise


class Watches:
    """The requests whose clients are watched if they are not answered soon after their bodies have
    arrived. They share a timer of the event loop, because most are answered before."""

    def __init__(self) -> None:
        self._is_running = False
        self._new: list[Exchange] = []  # added since the timer last expired
        self._old: list[Exchange] = []  # added before

    def add(self, exchange: "Exchange") -> None:
        """Have a request watched in WATCH_S to twice WATCH_S seconds."""
        self._new.append(exchange)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_later(WATCH_S, self._expire)

    def _expire(self) -> None:
        due, self._old, self._new = self._old, self._new, []
        for exchange in due:
            exchange.watch_late()
        self._is_running = bool(self._old)
        if self._is_running:
            asyncio.get_running_loop().call_later(WATCH_S, self._expire)


class Exchange:
    """One request, its response and the memory reserved for both.

    A task of its own handles it, and is cancelled if the client disconnects. A second task looks
    for that. It starts some time after the whole body has arrived, because starting a task takes
    time that a short request need not spend, or with the response if that is ready before.
    """

    def __init__(self, app: Any, scope: Any):
        """`app` is a Server, and `scope` ASGI's description of the request."""
        self.app = app
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        # values by name in lower case; of a repeated header the first one
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        self.body: Body
        self.request_id = "-"
        self.closes = False  # whether the connection is closed after the response
        self.meter: Any = None  # the Meter of the request
        self.started_at: float | None = None  # time.monotonic(), if there is an audit log
        self.status: int | None = None  # of the response
        # The API key: its name for the audit log, and a key of the key file with its quota.
        self.key_name: str | None = None
        self.key: Any = None
        self.quota: Any = None
        self._task = cast(asyncio.Task, asyncio.current_task())
        self._watching: asyncio.Task | None = None
        self._is_over = False

    async def __call__(self, receive: Receive, send: Send) -> None:
        """Handle the request. Returns early if the client disconnects. Raises CancelledError if the
        server cancels the task."""
        _current.set(self)
        unanswered = self.app.unanswered
        with self.app.capacity.request() as reservation:
            if not self.path.startswith("/"):
                # The target is an absolute URL, or has no path. `*` and other texts match no route.
                target = self.scope["raw_path"].decode("ascii")
                _, is_url, rest = target.partition("://")
                self.path = unquote(rest.partition("/")[2] if is_url else target)
            self.path = "/" + self.path.lstrip("/")
            self.body = Body(receive, reservation, self._watch_soon)
            unanswered.add(self._task)
            try:
                tracer = self.app.service.tracer
                if trace := tracer and tracer.begin(self.scope):
                    await self._trace(tracer, trace, send)
                else:
                    await self._answer(send)
            except asyncio.CancelledError:
                if not self.body.is_abandoned:
                    raise  # the server cancelled the task
                self._task.uncancel()
            finally:
                unanswered.discard(self._task)
                self._is_over = True
                self.body.is_answered.set()
                self._take_rest()
                self._stop_watching()

    def _watch_soon(self) -> None:
        """Watch for the end of the client, unless the request is answered soon."""
        if self._watching is None:
            self.app.watches.add(self)

    def watch_late(self) -> None:
        """Watch for the end of the client if the request is still being answered."""
        if self._watching is None and not self._is_over:
            self._watch()

    def _watch(self) -> None:
        """Start a task that ends when the client disconnects, and then cancels this one."""
        self._watching = asyncio.create_task(self.body.watch())
        self._watching.add_done_callback(self._give_up)

    def _take_rest(self) -> None:
        """Drop the rest of the body, because Hypercorn waits until it is taken. A client that has
        disconnected sends nothing more."""
        body = self.body
        if not body.is_received and not body.is_abandoned and self._watching is None:
            self._watch()

    def _give_up(self, watching: asyncio.Task) -> None:
        if not watching.cancelled():  # the client disconnected, or receiving failed
            self._task.cancel()

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.remove_done_callback(self._give_up)
            if self.body.is_received:  # if not, the rest must be taken
                self._watching.cancel()

    async def _trace(self, tracer: Tracer, trace: Trace, send: Send) -> None:
        """Handle a sampled request, and end its trace."""
        try:
            with as_current(trace):
                await self._answer(send)
        except asyncio.CancelledError:
            if self.body.is_abandoned:
                trace.error = CLIENT_GONE
            raise
        finally:
            tracer.end(trace, self.app.route_of(self))

    async def _answer(self, send: Send) -> None:
        """Handle the request and send its response. If `Server.expire` cancels the request, the
        response is a 503. If the client does not read the response in SEND_TIMEOUT_S seconds, the
        connection is aborted."""
        try:
            response = await self.app.respond(self)
        except asyncio.CancelledError:
            if self.body.is_abandoned or not self.app.expired:
                raise
            self._task.uncancel()
            response = await self.app.refuse_late(self)
        self._take_rest()  # the client may send it before it reads the response
        is_small = isinstance(response.body, bytes) and len(response.body) <= SMALL_ANSWER
        if is_small and self.scope["http_version"] < "2":  # `Connection` limits the time of a piece
            await self._send(send, response)
            return
        try:
            await in_time(self._send(partial(send_in_time, send), response), SEND_TIMEOUT_S)
        except TimeoutError:
            abort_connection()

    async def _send(self, send: Send, response: Response) -> None:
        """Send the response in pieces. If no memory can be reserved for a body that is not
        streamed, send an empty 503 instead."""
        status, headers, body = response.status, response.headers, response.body
        is_whole = isinstance(body, bytes)
        data = body if isinstance(body, bytes) else b""
        if len(data) > SMALL_ANSWER:
            try:
                await self.body.reservation.make_room(len(data) - self.body.reservation.bytes)
                self.body.reservation.cover(len(data))
            except (Overloaded, InvalidInput):  # no memory for the response
                status, data = 503, b""
                headers = {
                    "x-request-id": self.request_id,
                    "content-length": "0",
                    "retry-after": "1",
                }
        if (trace := current_trace()) is not None:
            trace.status, trace.request_id = status, headers.get("x-request-id")
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        if not is_whole:
            async for part in cast(AsyncIterator[bytes], body):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        start = 0
        while len(data) - start > MAX_SENT:
            part = data[start : start + MAX_SENT]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            start += MAX_SENT
        self.body.is_answered.set()
        await send({"type": "http.response.body", "body": data[start:], "more_body": False})


async def send_in_time(send: Send, message: Any) -> None:
    """Send a message of ASGI. Raises TimeoutError if the client does not take it in SEND_S
    seconds."""
    await in_time(cast(Coroutine, send(message)), SEND_S)
