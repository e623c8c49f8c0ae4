"""Forwards requests from a front-end process to the app of the engine's process.

All messages of ASGI cross the connection one by one: the engine's process asks for each piece of a
body, and waits until the client has taken each part of the response.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import orjson

from jaxembed.server.front import frames
from jaxembed.server.front.client import GONE, EngineClient
from jaxembed.server.front.frames import ProtocolError
from jaxembed.server.front.link import Link
from jaxembed.server.http.connection import abort_connection
from jaxembed.server.http.exchange import MAX_DISCARDED, send_in_time

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Forwarder:
    """The requests that a front-end process has forwarded and that are not answered yet."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._open: dict[int, tuple[asyncio.Queue[Any], ForwardedBody]] = {}
        self._feeding: set[asyncio.Task[None]] = set()

    def take(self, frame: frames.Wanted | frames.Head | frames.Part | frames.Ended) -> None:
        """Hand a frame to the request that it belongs to."""
        queue, body = self._open.get(frame.call, (None, None))
        if isinstance(frame, frames.Wanted) and body is not None:
            body.wanted.release()  # also while a part of the response waits to be sent
        elif queue is not None:
            queue.put_nowait(frame)

    def end(self) -> None:
        """Fail all requests, because the engine's process has ended."""
        for queue, _ in self._open.values():
            queue.put_nowait(None)

    async def __call__(
        self,
        scope: Any,
        receive: Receive,
        send: Send,
        *,
        is_cut: bool = False,
        is_expired: Callable[[], bool] = lambda: False,
    ) -> None:
        """Forward a request, and send its response to the client: 503 if the engine's process has
        ended or, with `is_cut`, does not answer. So if the task is cancelled while `is_expired`
        returns true."""
        call, queue = self._client.number(), asyncio.Queue[Any]()
        if is_cut or self._client.link is None or not self._client.link.is_open:
            await _refuse(send)
            return
        body = ForwardedBody(self._client, call, receive)
        self._open[call] = queue, body
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
        task = cast(asyncio.Task, asyncio.current_task())
        feeding = asyncio.create_task(body.feed(task))
        self._feeding.add(feeding)
        feeding.add_done_callback(self._feeding.discard)
        try:
            is_begun = await self._respond(call, queue, body, partial(send_in_time, send))
        except TimeoutError:  # the client does not read
            is_begun = True
        except asyncio.CancelledError:
            if not (body.is_abandoned or is_expired()):
                raise
            task.uncancel()
            is_begun = False
        finally:
            del self._open[call]
            self._client.send(frames.Gone(call))
            body.is_answered = True
            body.drop_rest()
            if body.is_received:
                feeding.cancel()
        if is_begun is None or body.is_abandoned:  # it is complete, or nobody waits for it
            return  # an HTTP/2 connection goes on for other requests
        if is_begun:
            abort_connection()  # the response cannot be completed
        else:
            await _refuse(send)

    async def _respond(
        self, call: int, queue: asyncio.Queue[Any], body: "ForwardedBody", send: Send
    ) -> bool | None:
        """Send the response of a request as it comes. Returns None when it is complete, or else
        whether it has begun, if no more comes."""
        is_begun = False
        while True:
            frame = await queue.get()
            if isinstance(frame, frames.Head):
                is_begun = True
                start = {"type": "http.response.start", "status": frame.status}
                await send(start | {"headers": frame.headers})
            elif isinstance(frame, frames.Part):
                if not frame.more:
                    body.drop_rest()  # Hypercorn waits for that before it ends a stream
                part = {"body": frame.body, "more_body": frame.more}
                await send({"type": "http.response.body"} | part)
                if not frame.more:
                    return None
            else:
                return is_begun
            self._client.send(frames.Sent(call))


class ForwardedBody:
    """The body of a forwarded request, whose pieces are sent when `wanted` is released. After
    `drop_rest` the rest of it is taken and dropped, because Hypercorn waits until it is taken."""

    def __init__(self, client: EngineClient, call: int, receive: Receive):
        self.wanted = asyncio.Semaphore(0)
        self.is_received = False  # whether all of it has arrived
        self.is_abandoned = False  # whether the client has disconnected
        self.is_answered = False  # whether the response is complete or given up
        self._client, self._call, self._receive = client, call, receive
        self._is_over = False

    def drop_rest(self) -> None:
        """Drop what has not arrived yet."""
        self._is_over = True
        self.wanted.release()

    async def feed(self, task: asyncio.Task) -> None:
        """Send or drop pieces until the client disconnects, or much was dropped. If the client
        disconnects, `task`, which answers it, is cancelled."""
        dropped = 0
        while dropped <= MAX_DISCARDED:
            if not self._is_over:
                await self.wanted.acquire()
            message = await self._receive()
            if message["type"] != "http.request":
                self.is_abandoned = True
                self._client.send(frames.Gone(self._call))
                if not self.is_answered:
                    task.cancel()
                return
            body, more = message.get("body", b""), message.get("more_body", False)
            self.is_received = not more
            if self._is_over:
                dropped += len(body)
            else:
                self._client.send(frames.Piece(self._call, body, more))


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
        pieces, sent = self._pieces[call], self._sent[call]

        async def receive() -> Any:
            nonlocal is_gone
            if is_gone:
                return {"type": "http.disconnect"}
            self._link.send(frames.Wanted(call))
            piece = await pieces.get()
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
            await sent.get()

        try:
            await self._app(scope, receive, send)
        finally:
            del self._tasks[call], self._pieces[call], self._sent[call]
            self._link.send(frames.Ended(call))
