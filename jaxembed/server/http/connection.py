"""A client's connection and a request on it: Hypercorn's and Quart's classes with less work for
each request and with limits on the memory and the work that a client can ask for. Knows no route.

Whatever jaxembed uses of other libraries' private parts is here, which is why pyproject.toml admits
only the versions of Hypercorn, Quart and h2 that were tested. On Python 3.11 Hypercorn 0.18 and
Quart 0.22 start seven tasks for a request and write its answer in two pieces; here it is two tasks
and one piece. What of this could go, and after which change of theirs:

- `use_connections`: Hypercorn takes a class of connections as a setting.
- `protocol_send`, `_write_held`: Hypercorn writes the head and the body of an answer in
  one piece (saves 5 % of the processor time of a `/ping`, give or take 5 %).
- `IdleTimer`, `_idle_timeout`, `_task_group`: Hypercorn's idle timer is one of the loop (8 %), and
  runs before the first request of HTTP/2 too.
- `_read_data`: Hypercorn closes what its client has closed, also while it waits for an answer to be
  read, and ends a connection, and all that waits for it, when its data leads to an error; and h2
  refuses a frame that is too long when its head has come, so that nobody looks at its `_data`.
- `_close`, `_initiate_server_close`: Hypercorn limits how long a client may take to read the last
  bytes.
- `Http1`, `Http2`: Hypercorn takes no upgrades, tunnels and priorities, and looks at no more than
  some frames of HTTP/2 at once.
- `Exchange`: Quart handles a request in the task that Hypercorn started for it (two tasks save
  7 %), has a public name for `_create_request_from_scope`, and lets the sender of a body wait.
- `Routes`: Quart finds routes without encoding the name of the host.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

import h11
import hypercorn.asyncio.run
import hypercorn.protocol
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
)
from h2.events import Event as H2Event
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from quart import Request, Response
from quart.asgi import ASGIHTTPConnection
from quart.routing import QuartMap
from quart.utils import encode_headers
from quart.wrappers.base import BaseRequestWebsocket
from quart.wrappers.response import DataBody
from werkzeug.routing import MapAdapter

from jaxembed.engine.admission import Held
from jaxembed.errors import InvalidInput, Overloaded
from jaxembed.memory import KIB, MIB
from jaxembed.observability.tracing import Trace, Tracer, as_current, current_trace

logger = logging.getLogger(__name__)

# Memory of an open connection beside what its requests are charged for, at most: the buffers of
# asyncio, h11 and Hypercorn, and with HTTP/2 those of a hundred streams, with small answers.
CONNECTION_BYTES = 4 * MIB
SMALL_ANSWER = 8 * KIB  # bytes that need no room: probes and refusals are answered by a full server
FRAME_HEAD = 9  # bytes in front of each frame of HTTP/2
MOST_SENT = 256 * KIB  # bytes of an answer that are sent at once
SEND_S = 60  # that a client has to take MOST_SENT bytes
SEND_TIMEOUT_S = 600  # that a client has to take a whole answer
CLOSE_TIMEOUT_S = 60  # that written bytes have to reach the client after the last answer
MOST_HELD = 64 * KIB  # bytes of an answer that wait for the rest of it
CLIENT_GONE = "client_disconnected"  # the error of a trace whose client left before its answer

_connection: ContextVar["Connection | None"] = ContextVar("connection", default=None)

MOST_FRAMES = 2 * KIB  # bytes of HTTP/2 that are handled at once: 140 small frames take h2 10 ms
# Streams of a connection with something to send. A client that resets streams and reads nothing can
# have more of them than it may open at a time; Hypercorn fails when there are a thousand.
MOST_STREAMS = 200
# Bytes of response headers that are kept to be named by number: the default of RFC 9113, whatever a
# client allows. All of them are looked through for each response.
MOST_TABLE = 4 * KIB
_METHOD = re.compile(rb"[\w!#$%&'*+.^`|~-]+")
_TARGET = re.compile(rb"[!-~]+")

COPIES = 3  # times its length that a body takes, raw and decoded; up to 5 for texts with emojis
MOST_UNREAD = 64 * KIB  # bytes of a body that wait for its reader
MOST_DISCARDED = 256 * MIB  # bytes of a discarded body, after which its client is read no more


class BoundedBody:
    """The body of a request as it arrives: the sender waits while much of it is unread.

    The memory that it will take is charged to `held`, the request's, before it is kept. `discard`
    throws away what is unread and all that follows. Iterating gives the body in pieces, or raises
    the error for which it was not kept.
    """

    def __init__(self, held: Held):
        self.held = held
        self.is_received = False  # all that the client has sent
        self._unread = bytearray()
        self._refusal: Exception | None = None
        self._has_news = asyncio.Event()  # bytes, the end or a refusal
        self._has_room = asyncio.Event()
        self._is_complete = asyncio.Event()
        self._discarded: int | None = None  # bytes, after `discard`
        self._is_answered = asyncio.Event()

    async def receive(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Keep the body as it arrives; return when the client is gone."""
        while (message := await receive())["type"] == "http.request":
            if data := message.get("body"):
                await self.put(data)
            if not message.get("more_body"):
                self.is_received = True
                self._is_complete.set()
                self._has_news.set()

    async def put(self, data: bytes) -> None:
        """Keep a piece of the body; wait while too many bytes are unread."""
        if self._discarded is None:
            try:
                self.held.charge(COPIES * len(data))
            except (Overloaded, InvalidInput) as error:
                self._refusal = error
                self.discard()
            else:
                self._unread += data
            self._has_news.set()
        while self._discarded is None and len(self._unread) >= MOST_UNREAD:
            self._has_room.clear()
            await self._has_room.wait()
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > MOST_DISCARDED:
                self._is_complete.set()
                await self._is_answered.wait()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if not self._is_complete.is_set():
                await self._has_news.wait()
            if self._refusal is not None:
                raise self._refusal
            if not self._unread and self._is_complete.is_set():
                return
            data = bytes(self._unread)
            self._unread.clear()
            self._has_news.clear()
            self._has_room.set()
            yield data

    def discard(self) -> None:
        """Throw away what is unread and what still comes."""
        if self._discarded is None:
            self._discarded = 0
            self._has_room.set()
            if self._unread:
                self.held.charge(-COPIES * len(self._unread))
                self._unread.clear()

    def end_answer(self) -> None:
        """Discard at once all that still comes: the end of the connection is queued behind it."""
        if self._discarded is None:
            self.discard()
        self._is_answered.set()

    async def end(self, pause_s: float) -> None:
        """Wait until the client has sent all of a discarded body, or more than will be discarded,
        or nothing for `pause_s` seconds."""
        before = None
        while self._discarded != before and not self._is_complete.is_set():
            before = self._discarded
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_complete.wait()


class Http2(H2Protocol):
    """HTTP/2 that refuses tunnels (CONNECT) and heads with bytes that HTTP/1.1 does not allow, and
    ignores priorities, as RFC 9113, section 5.3.2 allows: Hypercorn keeps those of streams that are
    never opened."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        del self.connection.local_settings[SettingCodes.ENABLE_CONNECT_PROTOCOL]
        receive = self.connection.receive_data
        # lazily: what came before an event is handled when the event is looked at
        self.connection.receive_data = lambda data: filter(  # pyright: ignore[reportAttributeAccessIssue]
            self._is_taken, receive(data)
        )

    async def handle(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        for first in range(0, len(event.data), MOST_FRAMES):
            await super().handle(RawData(event.data[first : first + MOST_FRAMES]))
            await asyncio.sleep(0)  # else no other task would run while there are more

    def _is_taken(self, event: H2Event) -> bool:
        """Whether Hypercorn is to handle the event; what else there is to do about it is done."""
        match event:
            case PriorityUpdated():
                return False
            case RemoteSettingsChanged() if self.connection.encoder.header_table_size > MOST_TABLE:
                self.connection.encoder.header_table_size = MOST_TABLE
            case RequestReceived() if (
                self.context.terminated.is_set() or len(self.stream_buffers) >= MOST_STREAMS
            ):  # to be sent again elsewhere or later
                self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
                return False
            case RequestReceived() if not _is_well_formed(dict(event.headers)):
                headers = [(b":status", b"400"), (b"content-length", b"0")]
                with suppress(ProtocolError):  # the client has closed the stream already
                    self.connection.send_headers(event.stream_id, headers, end_stream=True)
                return False
            case DataReceived() if event.stream_id not in self.streams:
                # the answer is complete: no more of the body is wanted
                length = event.flow_controlled_length
                self.connection.acknowledge_received_data(length, event.stream_id)
                self._reset(event.stream_id, ErrorCodes.NO_ERROR)
                return False
        return True

    def _reset(self, stream_id: int, why: ErrorCodes) -> None:
        with suppress(ProtocolError):  # the client has closed the stream already
            self.connection.reset_stream(stream_id, why)


def _is_well_formed(head: dict[bytes, bytes]) -> bool:
    method = head[b":method"]
    return (
        method.upper() != b"CONNECT"
        and _METHOD.fullmatch(method) is not None
        and _TARGET.fullmatch(head[b":path"]) is not None
    )


def use_connections() -> None:
    """Make Hypercorn serve each of its clients with a `Connection`, and speak by our protocols."""
    hypercorn.asyncio.run.TCPServer = Connection  # pyright: ignore[reportPrivateImportUsage]
    hypercorn.protocol.H11Protocol = Http1  # pyright: ignore[reportPrivateImportUsage]
    hypercorn.protocol.H2Protocol = Http2  # pyright: ignore[reportPrivateImportUsage]


class Connection(TCPServer):
    """Hypercorn's connection. What is sent in one turn of the event loop leaves in one piece.

    It ends when its client has closed it: Hypercorn keeps it, socket and all, until
    keep_alive_timeout has passed as well. At 300 connections a second and 75 s that is every file
    descriptor a process may have.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.idle = IdleTimer(self.config.keep_alive_timeout)
        self.idle_task: Any = self.idle  # where Hypercorn looks for it
        self._held: list[bytes] = []
        self._bytes_held = 0
        self._reading: asyncio.Task | None = None
        self._is_lost = False

    async def run(self) -> None:
        _connection.set(self)
        watch = self.loop.create_task(self._close_at_shutdown())
        try:
            await super().run()
        finally:
            watch.cancel()

    async def protocol_send(self, event: Event) -> None:
        """Send the bytes, a small piece together with others before the loop's next turn, and wait
        until there is room for more. The connection of a client that does not read is ended."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        if event.data:
            if not self._held:
                self.loop.call_soon(self._write_held)
            self._held.append(event.data)
            self._bytes_held += len(event.data)
            if self._bytes_held >= MOST_HELD:
                self._write_held()
        try:
            if not self.writer.transport.get_write_buffer_size():
                await self.writer.drain()  # raises ConnectionError if the client is gone
                return
            async with asyncio.timeout(SEND_S):
                await self.writer.drain()
        except (TimeoutError, ConnectionError, RuntimeError):
            self.abort()

    def _write_held(self) -> None:
        held, self._held, self._bytes_held = b"".join(self._held), [], 0
        if held:
            with suppress(ConnectionError, RuntimeError):  # the reader sees the close
                self.writer.write(held)

    async def _initiate_server_close(self) -> None:
        self._write_held()
        await super()._initiate_server_close()
        await self._close()

    async def _close(self) -> None:
        self._write_held()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super()._close()
        self.abort()  # or a client that does not read would keep it open for ever

    def abort(self) -> None:
        """Close the connection now, and drop what waits to be sent. Where requests were sent ahead,
        Hypercorn waits for an answer to be read before it looks at the next request: it would wait
        for ever."""
        self.writer.transport.abort()
        reading = None if self._is_lost else self._reading
        if reading is not None and reading is not asyncio.current_task():
            self._is_lost = True
            reading.cancel()

    async def _read_data(self) -> None:
        """Handle what the client sends, until it closes the connection or sends a frame of HTTP/2
        that is too long: h2 checks the length only when all of it has come."""
        reading = self._reading = asyncio.current_task()
        assert reading is not None
        longest = FRAME_HEAD + self.config.h2_max_inbound_frame_size
        try:
            while not self.reader.at_eof():
                protocol = self.protocol.protocol
                if isinstance(protocol, Http2):
                    if len(protocol.connection.incoming_buffer._data) > longest:
                        break
                    # before the first request Hypercorn takes the connection for busy
                    if not protocol.streams and not self.idle.running:
                        await self.idle.restart(self._task_group, self._idle_timeout)
                try:
                    data = await self.reader.read(MAX_RECV)
                except OSError:
                    break
                await self.protocol.handle(RawData(data))
            await self.protocol.handle(Closed())
        except asyncio.CancelledError:
            if not self._is_lost:
                raise
            reading.uncancel()
            await self.protocol.handle(Closed())
        except Exception as error:  # else Hypercorn would stop what sends, and wait for it for ever
            logger.error("a connection was closed, because its data led to %.200r", error)
            await self.protocol.handle(Closed())
        self._reading = None
        self.idle.end()

    async def _idle_timeout(self) -> None:
        if self.idle.running:  # no request has come in the turn in which the time was up
            await asyncio.shield(self._initiate_server_close())

    async def _close_at_shutdown(self) -> None:
        await self.context.terminated.wait()
        if self.idle.running:
            await self._initiate_server_close()


class IdleTimer:
    """A timer in place of Hypercorn's AsyncioSingleTask, which starts and cancels tasks at every
    request and so takes 40 us."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def running(self) -> bool:
        return self._timer is not None

    async def restart(self, tasks: Any, action: Callable[[], Awaitable[None]]) -> None:
        """Start the timer anew: after the time it spawns the action in Hypercorn's TaskGroup."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._ended:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, tasks.spawn, action)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Stop the timer, so that it cannot be started again."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()


class Http1(H11Protocol):
    """HTTP/1.1 that ignores `Upgrade`, as RFC 9110, section 7.8 allows: there are no websockets,
    and a client that wants HTTP/2 begins with it."""

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0":
            begun = b"PRI * HTTP/2.0\r\n\r\n"
            raise H2ProtocolAssumedError(begun + self.connection.trailing_data[0])

    async def _create_stream(self, request: h11.Request) -> None:
        if b"upgrade" in [name for name, _ in request.headers]:
            request = h11.Request(
                method=request.method,
                headers=[header for header in request.headers if header[0] != b"upgrade"],
                target=request.target,
                http_version=request.http_version,
            )
        await super()._create_stream(request)


class Routes(QuartMap):
    """Finds routes by path alone. Quart's own also encodes the name of the host, and fails on one
    that no name server could hold."""

    def bind_to_request(
        self, request: BaseRequestWebsocket, subdomain: str | None, server_name: str | None
    ) -> MapAdapter:
        return self.bind(
            "", url_scheme=request.scheme, default_method=request.method, path_info=request.path
        )


class Exchange(ASGIHTTPConnection):
    """A request, its answer and the memory that they hold. The task that Hypercorn started handles
    the request; a second task waits for the client to go away, and then cancels the first."""

    app: Any  # a Server
    _body: BoundedBody

    async def __call__(self, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self.app.capacity.request() as held:
            if not self.scope["path"].startswith("/"):
                # a whole URL, or a query alone; that of `*` and of nonsense has no route
                target = self.scope["raw_path"].decode("ascii")
                _, is_url, rest = target.partition("://")
                self.scope["path"] = "/" + unquote(rest.partition("/")[2] if is_url else target)
            request = self._create_request_from_scope(send)
            body = self._body = BoundedBody(held)
            request.body = body  # pyright: ignore[reportAttributeAccessIssue]
            watch = asyncio.create_task(body.receive(receive))

            def give_up(done: asyncio.Task) -> None:
                if not done.cancelled():
                    task.cancel()

            watch.add_done_callback(give_up)
            self.app.unanswered.add(task)
            task.add_done_callback(self.app.unanswered.discard)
            try:
                tracer = self.app.service.tracer
                if trace := tracer and tracer.begin(self.scope):
                    await self._trace(tracer, trace, request, send)
                else:
                    await self.handle_request(request, send)
            except asyncio.CancelledError:
                if not watch.done() or watch.cancelled():
                    raise
                task.uncancel()
                watch.result()
            finally:
                watch.remove_done_callback(give_up)
                body.end_answer()
                if body.is_received:  # else Hypercorn's reader waits until the rest is taken
                    watch.cancel()

    async def _trace(self, tracer: Tracer, trace: Trace, request: Request, send: Any) -> None:
        """Answer the request, which is sampled, and trace it."""
        try:
            with as_current(trace):
                await self.handle_request(request, send)
        except asyncio.CancelledError:
            trace.error = CLIENT_GONE
            raise
        finally:
            tracer.end(trace, None if request.url_rule is None else request.url_rule.rule)

    async def handle_request(self, request: Request, send: Any) -> None:
        """Answer the request, as fast as its client reads; close the connection if it does not
        read."""
        try:
            response = await self.app.handle_request(request)
        except asyncio.CancelledError:
            if not self.app.expired:
                raise  # the client is gone
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            response = await self.app.refuse_late(request)
        self._body.discard()
        assert isinstance(response, Response)
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(send, response)
        except TimeoutError:
            if connection := _connection.get():
                connection.abort()

    async def _send(self, send: Any, response: Response) -> None:
        status, headers = response.status_code, encode_headers(response.headers)
        body, whole = response.response, b""
        if isinstance(body, DataBody):
            whole = body.data
            try:
                self._body.held.cover(len(whole) if len(whole) > SMALL_ANSWER else 0)
            except (Overloaded, InvalidInput):  # no room even for an answer
                status, whole = 503, b""
                named = [header for header in headers if header[0] == b"x-request-id"]
                headers = [*named, (b"content-length", b"0"), (b"retry-after", b"1")]
        if (trace := current_trace()) is not None:
            trace.status, trace.request_id = status, response.headers.get("x-request-id")
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if not isinstance(body, DataBody):
            async with body as parts:
                async for part in parts:
                    await _send_part(send, part)
        first = 0
        while len(whole) - first > MOST_SENT:
            await _send_part(send, whole[first : first + MOST_SENT])
            first += MOST_SENT
        self._body.end_answer()
        await _send_part(send, whole[first:], more=False)


async def _send_part(send: Any, part: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(SEND_S):
        await send({"type": "http.response.body", "body": part, "more_body": more})
