"""A client's connection and a request on it: Hypercorn's and Quart's classes with less work for
each request and with limits on the memory that a client can make it hold. Knows no route.

On Python 3.11 Hypercorn 0.18 and Quart 0.22 start seven tasks for a request and write its answer in
two pieces. Here it is two tasks and one piece. Of the processor time of a `/ping` one piece saves
5 %, the timer 8 %, two tasks 7 %, each give or take 5 %. Neither library documents what is
overridden here, so pyproject.toml admits only the versions that were tested. This file could go
when Hypercorn takes a class of connections as a setting, closes what its client has closed and
expects data after an answer, and when Quart lets the sender of a body wait.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h2 import H2Protocol
from quart import Response
from quart.asgi import ASGIHTTPConnection
from quart.typing import ResponseTypes
from quart.utils import encode_headers
from quart.wrappers.request import Body
from quart.wrappers.response import DataBody

from jaxembed.engine.admission import Held
from jaxembed.errors import InvalidInput, Overloaded
from jaxembed.memory import KIB, MIB

COPIES = 3  # times its length that a body takes, raw and decoded; up to 5 for texts with emojis
MOST_UNREAD = 64 * KIB  # bytes of a body that wait for its reader
MOST_DISCARDED = 256 * MIB  # bytes of a discarded body, after which its client is read no more
# Memory of an open connection beside what its requests are charged for, at most: the buffers of
# asyncio, h11 and Hypercorn, and with HTTP/2 those of a hundred streams, with small answers.
CONNECTION_BYTES = 4 * MIB
SMALL_ANSWER = 8 * KIB  # bytes that need no room: probes and refusals are answered by a full server
MOST_FRAMES = 2 * KIB  # bytes of HTTP/2 that are read at once: 140 small frames take h2 10 ms
FRAME_HEAD = 9  # bytes in front of each frame of HTTP/2
MOST_SENT = 256 * KIB  # bytes of an answer that are sent at once
SEND_S = 60  # that a client has to take MOST_SENT bytes
SEND_TIMEOUT_S = 600  # that a client has to take a whole answer
CLOSE_TIMEOUT_S = 60  # that written bytes have to reach the client after the last answer
MOST_HELD = 64 * KIB  # bytes of an answer that wait for the rest of it

_connection: ContextVar["Connection | None"] = ContextVar("connection", default=None)


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
            await self.writer.drain()
        except (ConnectionError, RuntimeError):
            await self._lose()

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

    async def _lose(self) -> None:
        """End the connection of a client that is gone. Where requests were sent ahead, Hypercorn
        waits for an answer to be read before it looks at the next request: it would wait for
        ever."""
        await self.protocol.handle(Closed())
        reading = None if self._is_lost else self._reading
        if reading is not None and reading is not asyncio.current_task():
            self._is_lost = True
            reading.cancel()

    def _write_held(self) -> None:
        held, self._held, self._bytes_held = b"".join(self._held), [], 0
        if held:
            with contextlib.suppress(ConnectionError, RuntimeError):  # the reader sees the close
                self.writer.write(held)

    async def _initiate_server_close(self) -> None:
        self._write_held()
        await super()._initiate_server_close()

    async def _close(self) -> None:
        self._write_held()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super()._close()
        self.abort()  # or a client that does not read would keep it open for ever

    def abort(self) -> None:
        """Close the connection now, and drop what waits to be sent."""
        self.writer.transport.abort()

    async def _read_data(self) -> None:
        self._reading = asyncio.current_task()
        self.reader.read = partial(  # pyright: ignore[reportAttributeAccessIssue]
            self._read_next, self.reader.read
        )
        try:
            await super()._read_data()
        except KeyError:  # Hypercorn's HTTP/2, of a body that goes on after its answer was sent
            await self.protocol.handle(Closed())
        except asyncio.CancelledError:
            if not self._is_lost or self._reading is None:
                raise
            self._reading.uncancel()
        self._reading = None
        self.idle.end()

    async def _read_next(self, read: Callable[[int], Awaitable[bytes]], count: int) -> bytes:
        """The next bytes of the client; of HTTP/2 only a few, because h2 spends time on each frame
        however small. Raises ConnectionError for a frame that is too long: h2 checks the length
        only when all of it has come. Also starts the idle timer before the first request, where
        Hypercorn takes a connection of HTTP/2 for busy."""
        protocol = self.protocol.protocol
        if not isinstance(protocol, H2Protocol):
            return await read(count)
        longest = FRAME_HEAD + self.config.h2_max_inbound_frame_size
        if len(protocol.connection.incoming_buffer._data) > longest:
            raise ConnectionError("an HTTP/2 frame is longer than allowed")
        if not protocol.streams and not self.idle.running:
            await self.idle.restart(self._task_group, self._idle_timeout)
        await asyncio.sleep(0)  # reading what has come already would let no other task run
        return await read(min(count, MOST_FRAMES))

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


class BoundedBody(Body):
    """The body of a request as it arrives: the sender waits while much of it is unread.

    The memory that it will take is charged to `held`, the request's, before it is kept. `discard`
    throws away what is unread and all that follows.
    """

    def __init__(self, held: Held):
        super().__init__(None, None)
        self.held = held
        self._has_room = asyncio.Event()
        self._discarded: int | None = None  # bytes, after `discard`
        self._is_answered = asyncio.Event()

    async def put(self, data: bytes) -> None:
        """Keep a piece of the body; wait while too many bytes are unread."""
        if self._discarded is None:
            self._keep(data)
        while self._discarded is None and len(self._data) >= MOST_UNREAD:
            self._has_room.clear()
            await self._has_room.wait()
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > MOST_DISCARDED:
                self.set_complete()
                await self._is_answered.wait()

    def _keep(self, data: bytes) -> None:
        try:
            self.held.charge(COPIES * len(data))
        except (Overloaded, InvalidInput) as error:
            self._must_raise = error
            self.discard()
            self._has_data.set()
        else:
            self.append(data)

    async def __anext__(self) -> bytes:
        if not self._complete.is_set():
            await self._has_data.wait()
        data = await super().__anext__()
        self._has_room.set()
        return data

    def discard(self) -> None:
        """Throw away what is unread and what still comes."""
        if self._discarded is None:
            self._discarded = 0
            self.held.charge(-COPIES * len(self._data))
            self.clear()
            self._has_room.set()

    def end_answer(self) -> None:
        """Discard at once all that still comes: Hypercorn queues the end of the connection behind
        it."""
        self.discard()
        self._is_answered.set()

    async def end(self, pause_s: float) -> None:
        """Wait until the client has sent all of a discarded body, or more than will be discarded,
        or nothing for `pause_s` seconds."""
        before = None
        while self._discarded != before and not self._complete.is_set():
            before = self._discarded
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._complete.wait()


class Exchange(ASGIHTTPConnection):
    """A request, its answer and the memory that they hold. The task that Hypercorn started handles
    the request; a second task waits for the client to go away, and then cancels the first."""

    _body: BoundedBody
    _is_received = False  # all of the body

    async def __call__(self, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self.app.capacity.request() as held:  # pyright: ignore[reportAttributeAccessIssue]
            request = self._create_request_from_scope(send)
            request.body = self._body = BoundedBody(held)
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

    async def _send_response(self, send: Any, response: ResponseTypes) -> None:
        """Send the response as fast as its client reads; close the connection if it does not
        read."""
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
