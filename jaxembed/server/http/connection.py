"""HTTP connections and requests: subclasses of Hypercorn's and Quart's classes that do less work
per request, and limit the memory and the work that a client can cause.

Only this file uses private names of these libraries, and pyproject.toml admits only tested versions
of Hypercorn, Quart and h2. On Python 3.11, Hypercorn 0.18 and Quart 0.22 start seven tasks per
request and write a response in two pieces; with this file they start two tasks and write one piece.
Each item of this list can be deleted when the library does what follows it:

- `use_connections`: Hypercorn has a setting for the class of connections.
- `protocol_send`, `_write_held`: Hypercorn writes the head and the body of a response in one piece
  (saves 5 % of the processor time of a `/ping`, give or take 5 %).
- `IdleTimer`, `_idle_timeout`, `_task_group`: Hypercorn's idle timer is a timer of the event loop
  (saves 8 %), and also runs before the first request of an HTTP/2 connection.
- `_read_data`: Hypercorn closes a connection that its client has closed, also while a response
  waits to be sent, and ends a connection and its tasks when received data causes an error. h2
  refuses a frame that is too long when the head of the frame arrives.
- `_close`, `_initiate_server_close`: Hypercorn limits how long a client may take to read the last
  bytes.
- `Http1`, `Http2`: Hypercorn ignores upgrades, tunnels and priorities, and lets other tasks run
  while it handles many HTTP/2 frames.
- `Exchange`: Quart handles a request in the task that Hypercorn started for it (saves 7 %), has a
  public name for `_create_request_from_scope`, and makes the sender of a body wait.
- `Routes`: Quart finds routes without encoding the host name.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, cast
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

from jaxembed.engine.admission import Reservation
from jaxembed.errors import InvalidInput, Overloaded
from jaxembed.memory import KIB, MIB
from jaxembed.observability.tracing import Trace, Tracer, as_current, current_trace

logger = logging.getLogger(__name__)

# The maximum memory of an open connection, apart from what is reserved for its requests: buffers of
# asyncio, h11 and Hypercorn, and for HTTP/2 buffers of a hundred streams with small responses.
CONNECTION_BYTES = 4 * MIB
SMALL_ANSWER = 8 * KIB  # bytes; up to this no memory is reserved, so a full server can send errors
FRAME_HEAD = 9  # bytes in front of each frame of HTTP/2
MAX_SENT = 256 * KIB  # bytes of a response in one piece
SEND_S = 60  # seconds that a client may take to read one piece of a response
SEND_TIMEOUT_S = 600  # seconds that a client may take to read a whole response
CLOSE_TIMEOUT_S = 60  # seconds that a client may take to read the last bytes of a connection
MAX_HELD = 64 * KIB  # bytes of a response that are joined before a write
CLIENT_GONE = "client_disconnected"  # the error of a trace whose client disconnected

_connection: ContextVar["Connection | None"] = ContextVar("connection", default=None)

SLICE_BYTES = 2 * KIB  # bytes of HTTP/2 handled at once; h2 takes 10 ms for 140 small frames
# Maximum streams of a connection that have bytes to send. A client that resets streams and reads
# nothing can have more of them than the limit on open streams. Hypercorn fails at a thousand.
MAX_STREAMS = 200
# Maximum bytes of the table that compresses response headers: the default of RFC 9113, even if the
# client allows more, because each response searches the whole table.
MAX_TABLE = 4 * KIB
_METHOD = re.compile(rb"[\w!#$%&'*+.^`|~-]+")
_TARGET = re.compile(rb"[!-~]+")

COPIES = 3  # bytes of memory per byte of a body, for its raw and its decoded form
MAX_UNREAD = 64 * KIB  # bytes of a body that may be unread before the sender waits
MAX_DISCARDED = 256 * MIB  # bytes of a discarded body that are still read


class BoundedBody:
    """The body of a request as it arrives, in bounded memory.

    The sender waits while MAX_UNREAD bytes are unread. Memory is reserved for the request before
    its bytes are kept. `discard` drops the unread bytes and all later ones. Iterating yields the
    body in pieces, and raises Overloaded or RequestTooLarge if memory could not be reserved.
    """

    def __init__(self, reservation: Reservation):
        self.reservation = reservation
        self.is_received = False  # whether the whole body has arrived
        self._unread = bytearray()
        self._refusal: Exception | None = None  # why no memory could be reserved
        self._has_news = asyncio.Event()  # set when bytes, the end or a refusal arrive
        self._has_room = asyncio.Event()
        self._is_over = asyncio.Event()  # set when no further bytes are waited for
        self._discarded: int | None = None  # bytes discarded; None before `discard`
        self._is_answered = asyncio.Event()

    async def receive(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Take messages from ASGI's function `receive`, and keep the pieces of the body that the
        messages carry. Returns when the client disconnects."""
        while (message := await receive())["type"] == "http.request":
            if data := message.get("body"):
                await self.put(data)
            if not message.get("more_body"):
                self.is_received = True
                self._is_over.set()
                self._has_news.set()

    async def put(self, data: bytes) -> None:
        """Keep a piece of the body, and wait while MAX_UNREAD bytes or more are unread.

        If memory cannot be reserved, discard the body, so that iterating raises the error. Once
        more than MAX_DISCARDED bytes are discarded, wait until the request is answered.
        """
        if self._discarded is None:
            try:
                self.reservation.charge(COPIES * len(data))
            except (Overloaded, InvalidInput) as error:
                self._refusal = error
                self.discard()
            else:
                self._unread += data
            self._has_news.set()
        while self._discarded is None and len(self._unread) >= MAX_UNREAD:
            self._has_room.clear()
            await self._has_room.wait()
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED:
                self._is_over.set()
                await self._is_answered.wait()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they arrive, until the body is complete."""
        while True:
            if not self._is_over.is_set():
                await self._has_news.wait()
            if self._refusal is not None:
                raise self._refusal
            if not self._unread and self._is_over.is_set():
                return
            data = bytes(self._unread)
            self._unread.clear()
            self._has_news.clear()
            self._has_room.set()
            yield data

    def discard(self) -> None:
        """Drop the unread bytes, release their memory, and drop all bytes that arrive later."""
        if self._discarded is None:
            self._discarded = 0
            self._has_room.set()
            if self._unread:
                self.reservation.charge(-COPIES * len(self._unread))
                self._unread.clear()

    def mark_answered(self) -> None:
        """Mark the request as answered, and discard the rest of its body. ASGI queues the message
        that the client disconnected behind that rest."""
        self.discard()
        self._is_answered.set()

    async def end(self, pause_s: float) -> None:
        """Wait until a discarded body has arrived, or more than MAX_DISCARDED bytes are discarded,
        or the client sends nothing for `pause_s` seconds."""
        last_count = None
        while self._discarded != last_count and not self._is_over.is_set():
            last_count = self._discarded
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_over.wait()


class Http2(H2Protocol):
    """HTTP/2 without tunnels and priorities.

    It refuses CONNECT, and requests whose method or path has bytes that HTTP/1.1 does not allow. It
    ignores priorities, as RFC 9113, section 5.3.2 allows, because Hypercorn would keep priorities
    of streams that are never opened.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        del self.connection.local_settings[SettingCodes.ENABLE_CONNECT_PROTOCOL]
        receive = self.connection.receive_data
        # `filter` is lazy, as needed: the check of an event depends on the events handled before
        self.connection.receive_data = lambda data: filter(  # pyright: ignore[reportAttributeAccessIssue]
            self._is_for_hypercorn, receive(data)
        )

    async def handle(self, event: Event) -> None:
        """Handle an event. Received bytes are handled in slices, between which other tasks run."""
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        for start in range(0, len(event.data), SLICE_BYTES):
            await super().handle(RawData(event.data[start : start + SLICE_BYTES]))
            await asyncio.sleep(0)  # let other tasks run

    def _is_for_hypercorn(self, event: H2Event) -> bool:
        """Return whether Hypercorn shall handle the event. For False, the event has been handled
        here: a priority, a malformed or surplus request, or a part of a body that is not needed."""
        match event:
            case PriorityUpdated():
                return False
            case RemoteSettingsChanged() if self.connection.encoder.header_table_size > MAX_TABLE:
                self.connection.encoder.header_table_size = MAX_TABLE
            case RequestReceived() if (
                self.context.terminated.is_set() or len(self.stream_buffers) >= MAX_STREAMS
            ):  # after REFUSED_STREAM the client may send the request again, elsewhere or later
                self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
                return False
            case RequestReceived() if not _is_well_formed(dict(event.headers)):
                headers = [(b":status", b"400"), (b"content-length", b"0")]
                with suppress(ProtocolError):  # the client has closed the stream already
                    self.connection.send_headers(event.stream_id, headers, end_stream=True)
                return False
            case DataReceived() if event.stream_id not in self.streams:
                # the response is complete, so the rest of the body is not needed
                length = event.flow_controlled_length
                self.connection.acknowledge_received_data(length, event.stream_id)
                self._reset(event.stream_id, ErrorCodes.NO_ERROR)
                return False
        return True

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        with suppress(ProtocolError):  # the client has closed the stream already
            self.connection.reset_stream(stream_id, code)


def _is_well_formed(head: dict[bytes, bytes]) -> bool:
    """Return whether HTTP/1.1 allows the method and the path in `head`, which maps the names of a
    request's headers to their values. False for CONNECT."""
    method = head[b":method"]
    return (
        method.upper() != b"CONNECT"
        and _METHOD.fullmatch(method) is not None
        and _TARGET.fullmatch(head[b":path"]) is not None
    )


def use_connections() -> None:
    """Make Hypercorn use the connection and protocol classes of this file."""
    hypercorn.asyncio.run.TCPServer = Connection  # pyright: ignore[reportPrivateImportUsage]
    hypercorn.protocol.H11Protocol = Http1  # pyright: ignore[reportPrivateImportUsage]
    hypercorn.protocol.H2Protocol = Http2  # pyright: ignore[reportPrivateImportUsage]


class Connection(TCPServer):
    """A client's connection. Bytes sent in one turn of the event loop are written in one piece.

    The connection ends when the client closes it. Hypercorn's TCPServer would also wait for its
    keep_alive_timeout, here 75 s: at 300 connections a second, the sockets would use up the file
    descriptors of the process.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.idle = IdleTimer(self.config.keep_alive_timeout)
        self.idle_task: Any = self.idle  # Hypercorn's name for the timer
        self._held: list[bytes] = []  # bytes to write soon, in one piece
        self._bytes_held = 0
        self._reading: asyncio.Task | None = None  # runs `_read_data`
        self._is_lost = False  # whether `abort` has cancelled the reading task

    async def run(self) -> None:
        _connection.set(self)
        watch = self.loop.create_task(self._close_at_shutdown())
        try:
            await super().run()
        finally:
            watch.cancel()

    async def protocol_send(self, event: Event) -> None:
        """Send the bytes of an event, and wait until the transport has room for more.

        Small pieces are joined, and written before the next turn of the event loop. If the client
        is gone or does not read for SEND_S seconds, the connection is aborted.
        """
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        if event.data:
            if not self._held:
                self.loop.call_soon(self._write_held)
            self._held.append(event.data)
            self._bytes_held += len(event.data)
            if self._bytes_held >= MAX_HELD:
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
        data, self._held, self._bytes_held = b"".join(self._held), [], 0
        if data:
            with suppress(ConnectionError, RuntimeError):  # the reader sees the close
                self.writer.write(data)

    async def _initiate_server_close(self) -> None:
        self._write_held()
        await super()._initiate_server_close()
        await self._close()

    async def _close(self) -> None:
        """Close the connection, or abort it if the client does not read the last bytes in
        CLOSE_TIMEOUT_S seconds."""
        self._write_held()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super()._close()
        self.abort()  # a client that does not read would keep the connection open forever

    def abort(self) -> None:
        """Close the connection now, drop unsent bytes, and cancel the reading task.

        If the client has pipelined requests, the reading task waits until a response is sent before
        it handles the next request. Now no response is sent, so it would wait forever.
        """
        self.writer.transport.abort()
        reading = None if self._is_lost else self._reading
        if reading is not None and reading is not asyncio.current_task():
            self._is_lost = True
            reading.cancel()

    async def _read_data(self) -> None:
        """Handle received bytes until the client closes the connection. Also stop when an HTTP/2
        frame is too long, because h2 checks the length only after the whole frame has arrived."""
        reading = self._reading = cast(asyncio.Task, asyncio.current_task())
        max_frame_bytes = FRAME_HEAD + self.config.h2_max_inbound_frame_size
        try:
            while not self.reader.at_eof():
                protocol = self.protocol.protocol
                if isinstance(protocol, Http2):
                    if len(protocol.connection.incoming_buffer._data) > max_frame_bytes:
                        break
                    # Hypercorn starts the idle timer only after the first request
                    if not protocol.streams and not self.idle.running:
                        await self.idle.restart(self._task_group, self._idle_timeout)
                try:
                    data = await self.reader.read(MAX_RECV)
                except OSError:
                    break
                await self.protocol.handle(RawData(data))
            await self.protocol.handle(Closed())
        except asyncio.CancelledError:
            if not self._is_lost:  # not cancelled by `abort`
                raise
            reading.uncancel()
            await self.protocol.handle(Closed())
        except Exception as error:  # Hypercorn would stop the sending task and wait for it forever
            logger.error("a connection was closed because its data caused an error: %.200r", error)
            await self.protocol.handle(Closed())
        self._reading = None
        await self.idle.end()

    async def _idle_timeout(self) -> None:
        if self.idle.running:  # False: a request arrived just as the timer expired
            await asyncio.shield(self._initiate_server_close())

    async def _close_at_shutdown(self) -> None:
        await self.context.terminated.wait()
        if self.idle.running:
            await self._initiate_server_close()


class IdleTimer:
    """The timer that closes an idle connection. It replaces Hypercorn's AsyncioSingleTask, which
    takes 40 us per request because it starts and cancels tasks."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def running(self) -> bool:
        return self._timer is not None

    async def restart(self, tasks: Any, action: Callable[[], Awaitable[None]]) -> None:
        """Restart the timer, unless `end` was called. When the timer expires, it runs `action` in
        `tasks`, Hypercorn's TaskGroup."""
        await self.stop()
        if not self._ended:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, tasks.spawn, action)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def end(self) -> None:
        """Stop the timer for good, so that `restart` does nothing."""
        self._ended = True
        await self.stop()


class Http1(H11Protocol):
    """HTTP/1.1 that ignores `Upgrade`, as RFC 9110, section 7.8 allows. There are no websockets,
    and a client that wants HTTP/2 begins with HTTP/2."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Raise H2ProtocolAssumedError for the preface of HTTP/2."""
        if event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0":
            preface = b"PRI * HTTP/2.0\r\n\r\n"
            raise H2ProtocolAssumedError(preface + self.connection.trailing_data[0])

    async def _create_stream(self, request: h11.Request) -> None:
        """Remove the header Upgrade, so that Hypercorn opens no websocket."""
        if b"upgrade" in [name for name, _ in request.headers]:
            request = h11.Request(
                method=request.method,
                headers=[header for header in request.headers if header[0] != b"upgrade"],
                target=request.target,
                http_version=request.http_version,
            )
        await super()._create_stream(request)


class Routes(QuartMap):
    """Finds routes by path alone. Quart's QuartMap also encodes the host name, and fails for host
    names that are not valid in DNS."""

    def bind_to_request(
        self, request: BaseRequestWebsocket, subdomain: str | None, server_name: str | None
    ) -> MapAdapter:
        return self.bind(
            "", url_scheme=request.scheme, default_method=request.method, path_info=request.path
        )


class Exchange(ASGIHTTPConnection):
    """One request, its response and the memory reserved for both.

    The task that Hypercorn started handles the request. A second task receives the body until the
    client disconnects, and then cancels the first task.
    """

    app: Any  # a Server
    _body: BoundedBody

    async def __call__(self, receive: Any, send: Any) -> None:
        """Handle the request while a second task receives its body. The second task ends when the
        client disconnects, and then cancels the task that handles the request."""
        task = cast(asyncio.Task, asyncio.current_task())
        with self.app.capacity.request() as reservation:
            if not self.scope["path"].startswith("/"):
                # The target is an absolute URL, or has no path. `*` and other texts match no route.
                target = self.scope["raw_path"].decode("ascii")
                _, is_url, rest = target.partition("://")
                self.scope["path"] = "/" + unquote(rest.partition("/")[2] if is_url else target)
            request = self._create_request_from_scope(send)
            body = self._body = BoundedBody(reservation)
            request.body = body  # pyright: ignore[reportAttributeAccessIssue]
            receiving = asyncio.create_task(body.receive(receive))

            def give_up(done: asyncio.Task) -> None:
                if not done.cancelled():  # the client disconnected, or receiving failed
                    task.cancel()

            receiving.add_done_callback(give_up)
            self.app.unanswered.add(task)
            task.add_done_callback(self.app.unanswered.discard)
            try:
                tracer = self.app.service.tracer
                if trace := tracer and tracer.begin(self.scope):
                    await self._trace(tracer, trace, request, send)
                else:
                    await self.handle_request(request, send)
            except asyncio.CancelledError:
                if not receiving.done() or receiving.cancelled():
                    raise  # the server cancelled the task
                task.uncancel()
                receiving.result()  # raises if receiving failed
            finally:
                receiving.remove_done_callback(give_up)
                body.mark_answered()
                if body.is_received:  # if not, `receiving` must take the rest, or Hypercorn waits
                    receiving.cancel()

    async def _trace(self, tracer: Tracer, trace: Trace, request: Request, send: Any) -> None:
        """Handle a sampled request, and end its trace."""
        try:
            with as_current(trace):
                await self.handle_request(request, send)
        except asyncio.CancelledError:
            trace.error = CLIENT_GONE
            raise
        finally:
            tracer.end(trace, None if request.url_rule is None else request.url_rule.rule)

    async def handle_request(self, request: Request, send: Any) -> None:
        """Handle the request and send its response. If `Server.expire` cancels the request, the
        response is a 503. If the client does not read the response in SEND_TIMEOUT_S seconds, the
        connection is aborted."""
        try:
            response = await self.app.handle_request(request)
        except asyncio.CancelledError:
            if not self.app.expired:
                raise  # the client disconnected
            cast(asyncio.Task, asyncio.current_task()).uncancel()
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
        """Send the response in pieces. If no memory can be reserved for a body that is not
        streamed, send an empty 503 instead."""
        status, headers = response.status_code, encode_headers(response.headers)
        body, data = response.response, b""
        if isinstance(body, DataBody):
            data = body.data
            try:
                self._body.reservation.cover(len(data) if len(data) > SMALL_ANSWER else 0)
            except (Overloaded, InvalidInput):  # no memory for the response
                status, data = 503, b""
                request_ids = [header for header in headers if header[0] == b"x-request-id"]
                headers = [*request_ids, (b"content-length", b"0"), (b"retry-after", b"1")]
        if (trace := current_trace()) is not None:
            trace.status, trace.request_id = status, response.headers.get("x-request-id")
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if not isinstance(body, DataBody):
            async with body as parts:
                async for part in parts:
                    await _send_part(send, part)
        start = 0
        while len(data) - start > MAX_SENT:
            await _send_part(send, data[start : start + MAX_SENT])
            start += MAX_SENT
        self._body.mark_answered()
        await _send_part(send, data[start:], more=False)


async def _send_part(send: Any, part: bytes, *, more: bool = True) -> None:
    """Send a piece of the body; `more` says whether further pieces follow. Raises TimeoutError if
    the client does not take it in SEND_S seconds."""
    async with asyncio.timeout(SEND_S):
        await send({"type": "http.response.body", "body": part, "more_body": more})
