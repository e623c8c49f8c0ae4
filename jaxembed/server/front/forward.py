"""Forwards requests from a front-end process to the app of the engine's process.

All messages of ASGI cross the connection one by one: the engine's process asks for each piece of a
body, and waits until the client has taken each part of the response.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from jaxembed.server.front import frames
from jaxembed.server.front.client import GONE, EngineClient
from jaxembed.server.front.frames import ProtocolError
from jaxembed.server.front.link import Link
from jaxembed.server.http.connection import abort_connection

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Forwarder:
    """The requests that a front-end process has forwarded and that are not answered yet."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._open: dict[int, asyncio.Queue[Any]] = {}

    def take(self, frame: frames.Wanted | frames.Head | frames.Part | frames.Ended) -> None:
        """Hand a frame to the request that it belongs to."""
        queue = self._open.get(frame.call)
        if queue is not None:
            queue.put_nowait(frame)

    def end(self) -> None:
        """Fail all requests, because the engine's process has ended."""
        for queue in self._open.values():
            queue.put_nowait(None)

    async def __call__(
        self, scope: Any, receive: Receive, send: Send, *, is_cut: bool = False
    ) -> None:
        """Forward a request, and send its response to the client: 503 if the engine's process has
        ended or, with `is_cut`, does not answer."""
        call, queue = self._client.number(), asyncio.Queue[Any]()
        if is_cut or self._client.link is None or not self._client.link.is_open:
            await _refuse(send)
            return
        self._open[call] = queue
        client = scope.get("client")
        self._client.send(
            frames.Forward(
                call,
                scope["method"],
                scope["path"],
                scope["raw_path"],
                scope["query_string"],
                [(bytes(name), bytes(value)) for name, value in scope["headers"]],
                scope["http_version"],
                scope["scheme"],
                None if client is None else (str(client[0]), int(client[1] or 0)),
            )
        )
        wanted = asyncio.Semaphore(0)
        feeding = asyncio.create_task(self._feed(call, wanted, receive))
        is_begun = False
        try:
            while True:
                frame = await queue.get()
                if isinstance(frame, frames.Wanted):
                    wanted.release()
                elif isinstance(frame, frames.Head):
                    is_begun = True
                    headers = frame.headers
                    head = {"type": "http.response.start", "status": frame.status}
                    await send(head | {"headers": headers})
                    self._client.send(frames.Sent(call))
                elif isinstance(frame, frames.Part):
                    body = {"body": frame.body, "more_body": frame.more}
                    await send({"type": "http.response.body"} | body)
                    self._client.send(frames.Sent(call))
                    if not frame.more:
                        return
                else:
                    break
        finally:
            del self._open[call]
            self._client.send(frames.Gone(call))
            feeding.cancel()
        if is_begun:
            abort_connection()  # the response cannot be completed
        else:
            await _refuse(send)

    async def _feed(self, call: int, wanted: asyncio.Semaphore, receive: Receive) -> None:
        """Send pieces of the body when they are wanted, and tell when the client disconnects."""
        while True:
            await wanted.acquire()
            message = await receive()
            if message["type"] != "http.request":
                self._client.send(frames.Gone(call))
                return
            body, more = message.get("body", b""), message.get("more_body", False)
            self._client.send(frames.Piece(call, body, more))


async def _refuse(send: Send) -> None:
    """Answer a request with 503, because the engine's process has ended or dropped it."""
    body = orjson.dumps({"error": GONE, "error_type": "Unhealthy"})
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Handler:
    """The forwarded requests of one front-end process, which the engine's process handles. `app` is
    its ASGI app."""

    def __init__(self, app: Any, link: Link):
        self._app, self._link = app, link
        self._pieces: dict[int, asyncio.Queue[Any]] = {}
        self._sent: dict[int, asyncio.Queue[None]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, frame: frames.Forward) -> None:
        """Handle a request. Raises ProtocolError if its number is in use."""
        call = frame.call
        if call in self._tasks:
            raise ProtocolError("a request was forwarded twice")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": frame.method,
            "path": frame.path,
            "raw_path": frame.raw_path,
            "query_string": frame.query,
            "headers": frame.headers,
            "http_version": frame.http_version,
            "scheme": frame.scheme,
            "root_path": "",
            "client": frame.client,
            "server": None,
            "extensions": {},
        }
        self._pieces[call], self._sent[call] = asyncio.Queue(), asyncio.Queue()
        self._tasks[call] = asyncio.create_task(self._handle(call, scope))

    def take(self, frame: frames.Piece | frames.Gone | frames.Sent) -> None:
        """Hand a frame to the request that it belongs to."""
        if isinstance(frame, frames.Sent):
            if frame.call in self._sent:
                self._sent[frame.call].put_nowait(None)
        elif frame.call in self._pieces:
            self._pieces[frame.call].put_nowait(frame)
            if isinstance(frame, frames.Gone):  # a response that is being sent waits no longer
                self._sent[frame.call].put_nowait(None)

    def end(self) -> None:
        """The front-end process has ended: its clients have disconnected."""
        for call in list(self._tasks):
            self.take(frames.Gone(call))

    async def _handle(self, call: int, scope: Any) -> None:
        is_gone = False

        async def receive() -> Any:
            nonlocal is_gone
            if is_gone:
                return {"type": "http.disconnect"}
            self._link.send(frames.Wanted(call))
            piece = await self._pieces[call].get()
            if isinstance(piece, frames.Gone):
                is_gone = True
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": piece.body, "more_body": piece.more}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
                self._link.send(frames.Head(call, message["status"], headers))
            elif message["type"] == "http.response.body":
                body, more = message.get("body", b""), message.get("more_body", False)
                self._link.send(frames.Part(call, body, more))
            await self._sent[call].get()

        try:
            await self._app(scope, receive, send)
        finally:
            del self._tasks[call], self._pieces[call], self._sent[call]
            self._link.send(frames.Ended(call))
