"""Connections: subclasses of Hypercorn's classes that do less work per request, and limit the
memory and the work that a client can cause.

Only this file, http1.py and server.py use private names of Hypercorn and Quart, and pyproject.toml
admits only tested versions of Hypercorn, Quart, h2 and httptools. Each item of this list can be
deleted when the library does what follows it:

- `use_connections`: Hypercorn has settings for the classes of connections and of protocols.
- `protocol_send`: Hypercorn limits how long a client may take to read, and sends without a lock.
- `IdleTimer`, `_idle_timeout`, `_task_group`: Hypercorn's idle timer is a timer of the event loop,
  and also runs before the first request of an HTTP/2 connection.
- `_read_data`: Hypercorn closes a connection that its client has closed, also while a response
  waits to be sent, and ends a connection and its tasks when received data causes an error. h2
  refuses a frame that is too long when the head of the frame arrives.
- `_close`, `_initiate_server_close`: Hypercorn limits how long a client may take to read the last
  bytes.
- `Http1`, in http1.py: Hypercorn parses HTTP/1.1 by httptools, and ignores upgrades and tunnels.
- `Http2`: Hypercorn ignores tunnels and priorities, and lets other tasks run while it handles many
  HTTP/2 frames.
- `Routes`, in server.py: Quart finds routes without encoding the host name.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

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
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol

from jaxembed.memory import KIB, MIB
from jaxembed.server.http.http1 import TARGET, Http1
from jaxembed.server.http.time_limit import in_time

logger = logging.getLogger(__name__)

# The maximum memory of an open connection, apart from what is reserved for its requests: buffers of
# asyncio and Hypercorn, and for HTTP/2 buffers of a hundred streams with small responses.
CONNECTION_BYTES = 4 * MIB
FRAME_HEAD = 9  # bytes in front of each frame of HTTP/2
SEND_S = 60  # seconds that a client may take to read one piece of a response
CLOSE_TIMEOUT_S = 60  # seconds that a client may take to read the last bytes of a connection

_connection: ContextVar["Connection | None"] = ContextVar("connection", default=None)


def abort_connection() -> None:
    """Close the connection of the current request now, and drop unsent bytes."""
    if connection := _connection.get():
        connection.abort()


SLICE_BYTES = 2 * KIB  # bytes of HTTP/2 handled at once; h2 takes 10 ms for 140 small frames
# Maximum streams of a connection that have bytes to send. A client that resets streams and reads
# nothing can have more of them than the limit on open streams. Hypercorn fails at a thousand.
MAX_STREAMS = 200
# Maximum bytes of the table that compresses response headers: the default of RFC 9113, even if the
# client allows more, because each response searches the whole table.
MAX_TABLE = 4 * KIB
_METHOD = re.compile(rb"[\w!#$%&'*+.^`|~-]+")


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
        and TARGET.fullmatch(head[b":path"]) is not None
    )


def use_connections() -> None:
    """Make Hypercorn use the connection and protocol classes of this file."""
    hypercorn.asyncio.run.TCPServer = Connection  # pyright: ignore[reportPrivateImportUsage]
    hypercorn.protocol.H11Protocol = Http1  # pyright: ignore[reportPrivateImportUsage]
    hypercorn.protocol.H2Protocol = Http2  # pyright: ignore[reportPrivateImportUsage]


class Connection(TCPServer):
    """A client's connection, which ends when the client closes it.

    Hypercorn's TCPServer would also wait for its keep_alive_timeout, here 75 s: at 300 connections
    a second, the sockets would use up the file descriptors of the process.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.idle = IdleTimer(self.config.keep_alive_timeout)
        self.idle_task: Any = self.idle  # Hypercorn's name for the timer
        self._telling: asyncio.Task | None = None  # the last task that `abort` has started

    async def run(self) -> None:
        _connection.set(self)
        watch = self.loop.create_task(self._close_at_shutdown())
        try:
            await super().run()
        finally:
            watch.cancel()

    async def protocol_send(self, event: Event) -> None:
        """Send the bytes of an event, and wait until the transport has room for more. If the client
        is gone or does not read for SEND_S seconds, the connection is aborted."""
        if isinstance(event, Updated):
            if event.idle:
                await self.idle.restart(self._task_group, self._idle_timeout)
            else:
                await self.idle.stop()
            return
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        transport = self.writer.transport
        try:
            if event.data:
                self.writer.write(event.data)
            if transport.get_write_buffer_size() or transport.is_closing():
                await in_time(self.writer.drain(), SEND_S)  # ConnectionError: the client is gone
        except (TimeoutError, ConnectionError, RuntimeError):
            self.abort()

    async def _initiate_server_close(self) -> None:
        await super()._initiate_server_close()
        await self._close()

    async def _close(self) -> None:
        """Close the connection, or abort it if the client does not read the last bytes in
        CLOSE_TIMEOUT_S seconds."""
        with suppress(TimeoutError):
            await in_time(super()._close(), CLOSE_TIMEOUT_S)
        # a client that does not read would keep the connection open forever
        self.writer.transport.abort()

    def abort(self) -> None:
        """Close the connection now, drop unsent bytes, and tell its requests.

        Telling a request of HTTP/2 can wait until it has taken its body, so a task does it. Nothing
        cancels that task or the reading task: Hypercorn forgets a request before it is told, and a
        request that is never told would wait for its client until SEND_S is over.
        """
        self.writer.transport.abort()
        self._telling = self.loop.create_task(self.protocol.handle(Closed()))

    async def _read_data(self) -> None:
        """Handle received bytes until the client closes the connection. Also stop when an HTTP/2
        frame is too long, because h2 checks the length only after the whole frame has arrived."""
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
        except Exception as error:  # Hypercorn would stop the sending task and wait for it forever
            logger.error("a connection was closed because its data caused an error: %.200r", error)
        await self.protocol.handle(Closed())
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
    takes 40 us per request because it starts and cancels tasks.

    Starting and stopping it changes only the time at which it expires, because each request does
    both. The event loop's timer runs on, and is set again when it expires too early.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._expires_at: float | None = None  # by the loop's clock; None: it is stopped
        self._timer: asyncio.TimerHandle | None = None
        self._action: Callable[[], object] = lambda: None
        self._ended = False

    @property
    def running(self) -> bool:
        return self._expires_at is not None

    async def restart(self, tasks: Any, action: Callable[[], Awaitable[None]]) -> None:
        """Restart the timer, unless `end` was called. When the timer expires, it runs `action` in
        `tasks`, Hypercorn's TaskGroup."""
        if self._ended:
            return
        loop = asyncio.get_running_loop()
        self._expires_at = loop.time() + self._seconds
        if self._timer is None:
            self._action = partial(tasks.spawn, action)
            self._timer = loop.call_at(self._expires_at, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the action if it is time for it, or set the loop's timer again."""
        self._timer, expires_at = None, self._expires_at
        if expires_at is None:
            return
        if expires_at > loop.time():
            self._timer = loop.call_at(expires_at, self._expire, loop)
        else:
            self._action()

    async def stop(self) -> None:
        self._expires_at = None

    async def end(self) -> None:
        """Stop the timer for good, so that `restart` does nothing."""
        self._ended, self._expires_at = True, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
