"""A client's connection and a request on it: Hypercorn's and Quart's classes with less work for
each request and with limits on the memory that a client can make it hold. Knows no route.

Whatever jaxembed uses of other libraries' private parts is here, which is why pyproject.toml admits
only the versions of Hypercorn, Quart and h2 that were tested. On Python 3.11 Hypercorn 0.18 and
Quart 0.22 start seven tasks for a request and write its answer in two pieces; here it is two tasks
and one piece. What of this could go, and after which change of theirs:

- `use_connections`: Hypercorn takes a class of connections as a setting.
- `protocol_send`, `_send`, `_write_held`: Hypercorn writes the head and the body of an answer in
  one piece (saves 5 % of the processor time of a `/ping`, give or take 5 %).
- `IdleTimer`, `_idle_timeout`, `_task_group`: Hypercorn's idle timer is one of the loop (8 %), and
  runs before the first request of HTTP/2 too.
- `_read_data`: Hypercorn closes what its client has closed, also while it waits for an answer to be
  read, and ends a connection, and all that waits for it, when its data leads to an error.
- `_close`, `_initiate_server_close`: Hypercorn limits how long a client may take to read the last
  bytes.
- `_read_next` and the `_data` of h2: h2 refuses a frame that is too long when its head has come.
- `Exchange`: Quart handles a request in the task that Hypercorn started for it (two tasks save
  7 %), has a public name for `_create_request_from_scope`, and lets the sender of a body wait.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any
from urllib.parse import unquote

import hypercorn.asyncio.run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Closed, Event, RawData
from quart import Request, Response
from quart.asgi import ASGIHTTPConnection
from quart.utils import encode_headers
from quart.wrappers.response import DataBody

from jaxembed.errors import InvalidInput, Overloaded
from jaxembed.memory import KIB, MIB
from jaxembed.observability.tracing import as_current, current_trace
from jaxembed.server.http.bounded_body import BoundedBody
from jaxembed.server.http.protocols import Http2, use_protocols

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


def use_connections() -> None:
    """Make Hypercorn serve each of its clients with a `Connection`."""
    use_protocols()
    hypercorn.asyncio.run.TCPServer = Connection  # pyright: ignore[reportPrivateImportUsage]


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
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        try:
            self._send(event.data)
            await self._drain()
        except (ConnectionError, RuntimeError):
            self.abort()

    def _send(self, data: bytes) -> None:
        """Write the data: a small piece together with others before the loop's next turn."""
        if not data:
            return
        if not self._held:
            self.loop.call_soon(self._write_held)
        self._held.append(data)
        self._bytes_held += len(data)
        if self._bytes_held >= MOST_HELD:
            self._write_held()

    async def _drain(self) -> None:
        """Wait until there is room for more; end the connection of a client that does not read."""
        if not self.writer.transport.get_write_buffer_size():
            await self.writer.drain()  # raises ConnectionError if the client is gone
            return
        try:
            async with asyncio.timeout(SEND_S):
                await self.writer.drain()
        except TimeoutError:
            self.abort()

    def _write_held(self) -> None:
        held, self._held, self._bytes_held = b"".join(self._held), [], 0
        if held:
            with contextlib.suppress(ConnectionError, RuntimeError):  # the reader sees the close
                self.writer.write(held)

    async def _initiate_server_close(self) -> None:
        self._write_held()
        await super()._initiate_server_close()
        await self._close()

    async def _close(self) -> None:
        self._write_held()
        with contextlib.suppress(TimeoutError):
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
        self._reading = asyncio.current_task()
        self.reader.read = partial(  # pyright: ignore[reportAttributeAccessIssue]
            self._read_next, self.reader.read
        )
        try:
            await super()._read_data()
        except asyncio.CancelledError:
            if not self._is_lost or self._reading is None:
                raise
            self._reading.uncancel()
            await self.protocol.handle(Closed())
        except Exception as error:  # else Hypercorn would stop what sends, and wait for it for ever
            logger.error("a connection was closed, because its data led to %.200r", error)
            await self.protocol.handle(Closed())
        self._reading = None
        self.idle.end()

    async def _read_next(self, read: Callable[[int], Awaitable[bytes]], count: int) -> bytes:
        """The next bytes of the client. Raises ConnectionError for a frame of HTTP/2 that is too
        long: h2 checks the length only when all of it has come. Also starts the idle timer before
        the first request, where Hypercorn takes a connection of HTTP/2 for busy."""
        protocol = self.protocol.protocol
        if not isinstance(protocol, Http2):
            return await read(count)
        longest = FRAME_HEAD + self.config.h2_max_inbound_frame_size
        if len(protocol.connection.incoming_buffer._data) > longest:
            raise ConnectionError("an HTTP/2 frame is longer than allowed")
        if not protocol.streams and not self.idle.running:
            await self.idle.restart(self._task_group, self._idle_timeout)
        return await read(count)

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
        await self.stop()
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


class Exchange(ASGIHTTPConnection):
    """A request, its answer and the memory that they hold. The task that Hypercorn started handles
    the request; a second task waits for the client to go away, and then cancels the first."""

    _body: BoundedBody
    _is_received = False  # all of the body

    async def __call__(self, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self.app.capacity.request() as held:  # pyright: ignore[reportAttributeAccessIssue]
            if not self.scope["path"].startswith("/"):
                self.scope["path"] = _path_of(self.scope["raw_path"].decode("ascii"))
            request = self._create_request_from_scope(send)
            self._body = BoundedBody(held)
            request.body = self._body  # pyright: ignore[reportAttributeAccessIssue]
            watch = asyncio.create_task(self._receive(receive))

            def give_up(done: asyncio.Task) -> None:
                if not done.cancelled():
                    task.cancel()

            watch.add_done_callback(give_up)
            try:
                await self.handle_request(request, send)
            except asyncio.CancelledError:
                if not watch.done() or watch.cancelled():
                    raise
                task.uncancel()
                watch.result()
            finally:
                watch.remove_done_callback(give_up)
                self._body.end_answer()
                if self._is_received:  # else Hypercorn's reader waits until the rest is taken
                    watch.cancel()

    async def _receive(self, receive: Any) -> None:
        """Collect the body as it arrives; return when the client is gone."""
        while (message := await receive())["type"] == "http.request":
            if data := message.get("body"):
                await self._body.put(data)
            if not message.get("more_body"):
                self._is_received = True
                self._body.set_complete()

    async def handle_request(self, request: Request, send: Any) -> None:
        """Answer the request, and trace it if it is sampled."""
        tracer = self.app.service.tracer  # pyright: ignore[reportAttributeAccessIssue]
        trace = tracer and tracer.begin(self.scope)
        if not (tracer and trace):
            await self._answer(request, send)
            return
        try:
            with as_current(trace):
                await self._answer(request, send)
        except asyncio.CancelledError:
            trace.error = CLIENT_GONE
            raise
        finally:
            tracer.end(trace, None if request.url_rule is None else request.url_rule.rule)

    async def _answer(self, request: Request, send: Any) -> None:
        """Answer the request, as fast as its client reads; close the connection if it does not
        read."""
        response = await self.app.handle_request(request)
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


def _path_of(target: str) -> str:
    """The path of a request target that begins with something else: it may be a whole URL, or a
    query alone. That of `*` and of nonsense has no route."""
    _, is_url, rest = target.partition("://")
    return "/" + unquote(rest.partition("/")[2] if is_url else target)


async def _send_part(send: Any, part: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(SEND_S):
        await send({"type": "http.response.body", "body": part, "more_body": more})
