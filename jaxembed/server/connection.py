"""A client's connection and a request on it: Hypercorn's and Quart's, with less work for each
request. Knows no route.

On Python 3.11 Hypercorn 0.18 and Quart 0.22 start seven tasks for a request and write its answer in
two pieces. Here it is two tasks and one piece.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Closed, Event, RawData
from quart import Response
from quart.asgi import ASGIHTTPConnection
from quart.typing import ResponseTypes
from quart.utils import encode_headers
from quart.wrappers.response import DataBody

SEND_TIMEOUT_S = 600  # Quart's minute cuts a large answer to a slow reader
CLOSE_TIMEOUT_S = 60  # for what is written already to reach a client, after the last answer
MOST_HELD = 64 * 1024  # bytes of an answer that wait for the rest of it


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

    async def run(self) -> None:
        watch = self.loop.create_task(self._close_at_shutdown())
        try:
            await super().run()
        finally:
            watch.cancel()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
        elif len(event.data) < MOST_HELD:
            await self._hold(event.data)
        else:
            self._write_held()
            await super().protocol_send(event)

    async def _hold(self, data: bytes) -> None:
        """Write it before the loop's next turn; wait while the client does not read."""
        if not data:
            return
        if not self._held:
            self.loop.call_soon(self._write_held)
        self._held.append(data)
        self._bytes_held += len(data)
        if self._bytes_held >= MOST_HELD:
            self._write_held()
        try:
            await self.writer.drain()
        except ConnectionError:
            await self.protocol.handle(Closed())

    def _write_held(self) -> None:
        held, self._held, self._bytes_held = b"".join(self._held), [], 0
        if held:
            with contextlib.suppress(ConnectionError, RuntimeError):  # closed: the reader sees it
                self.writer.write(held)

    async def _initiate_server_close(self) -> None:
        self._write_held()
        await super()._initiate_server_close()

    async def _close(self) -> None:
        self._write_held()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super()._close()
        self.writer.transport.abort()  # a client that does not read would hold it for good

    async def _read_data(self) -> None:
        await super()._read_data()
        self.idle.end()

    async def _idle_timeout(self) -> None:
        if self.idle.running:  # no request has come in the turn in which the time was up
            await asyncio.shield(self._initiate_server_close())

    async def _close_at_shutdown(self) -> None:
        await self.context.terminated.wait()
        if self.idle.running:
            await self._initiate_server_close()


class IdleTimer:
    """In place of Hypercorn's AsyncioSingleTask, which starts and cancels tasks at every request:
    40 us."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def running(self) -> bool:
        return self._timer is not None

    async def restart(self, tasks: Any, action: Callable[[], Awaitable[None]]) -> None:
        """Spawn the action in Hypercorn's TaskGroup once the time has passed."""
        await self.stop()
        if not self._ended:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, tasks.spawn, action)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Stop for good."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()


class Exchange(ASGIHTTPConnection):
    """A request and its answer. The task that Hypercorn started handles it, and a second one waits
    for the client to go away, which cancels the first."""

    async def __call__(self, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        request = self._create_request_from_scope(send)
        watch = asyncio.create_task(self.handle_messages(request, receive))
        watch.add_done_callback(lambda done: done.cancelled() or task.cancel())
        try:
            await self.handle_request(request, send)
        except asyncio.CancelledError:
            if not watch.done() or watch.cancelled():
                raise
            task.uncancel()
            watch.result()
        finally:
            watch.cancel()

    async def _send_response(self, send: Any, response: ResponseTypes) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEND_TIMEOUT_S):
                if isinstance(response, Response) and isinstance(response.response, DataBody):
                    await _send_whole(send, response, response.response.data)
                else:
                    await super()._send_response(send, response)


async def _send_whole(send: Any, response: Response, body: bytes) -> None:
    headers = encode_headers(response.headers)
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
