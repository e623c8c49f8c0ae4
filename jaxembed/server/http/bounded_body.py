"""The body of a request as it arrives, in bounded memory. Knows no server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from jaxembed.engine.admission import Held
from jaxembed.errors import InvalidInput, Overloaded
from jaxembed.memory import KIB, MIB

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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_complete.wait()
