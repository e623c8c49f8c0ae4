"""The clients of a storm: some behave well, others disconnect, send slowly or send garbage."""

import asyncio
from contextlib import suppress
from random import Random

from .corpus import Ask, Corpus
from .ledger import Ledger, QueuedSequence
from .wire import Http1, Http2, Lost, Message

PATIENCE_S = 60.0  # time limit of an action
HUGE_HEADER_BYTES = 200_000
DAWDLE_S = 0.01


class Client:
    """One client. Its n-th action depends only on its seed and n."""

    def __init__(self, seed: str, port: int, corpus: Corpus, ledger: Ledger):
        self._random = Random(seed)
        self._port = port
        self._corpus = corpus
        self._ledger = ledger
        self._kept: Http1 | None = None
        self._opened: list[Http1] = []  # in this action
        self._actions = {self._ask_in_turn: 12, self._pipeline: 3, self._multiplex: 4}
        self._actions |= {self._vanish: 4, self._vanish_in_answer: 1, self._half_close: 1}
        self._actions |= {self._dawdle: 1, self._say_too_little: 1, self._say_nonsense: 3}

    async def act(self) -> None:
        """Do the next action. An action without an end, or a lost connection, is a violation."""
        (action,) = self._random.choices(list(self._actions), list(self._actions.values()))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await action()
        except TimeoutError:
            self._ledger.violate(None, f"{action.__name__} had no end within {PATIENCE_S} s")
        except Lost as lost:  # before any request was sent
            if self._ledger.signalled_at is None:
                self._ledger.violate(None, f"{action.__name__}: {lost}")
        finally:
            for wire in self._opened:
                if wire is not self._kept:
                    await wire.close()
            self._opened.clear()

    async def close(self) -> None:
        if self._kept is not None:
            await self._kept.close()
            self._kept = None

    def _draw(self) -> Ask:
        return self._corpus.draw(self._random)

    async def _open(self) -> Http1:
        wire = await Http1.open(self._port)
        self._opened.append(wire)
        return wire

    async def _ask_in_turn(self) -> None:
        """Send requests one after the other on a connection that is kept open."""
        for _ in range(self._random.randint(1, 4)):
            if self._kept is None:
                self._kept = await self._open()
            entry = self._ledger.sent(self._draw())
            if not await self._finish(entry, self._kept, entry.ask.message.http1()):
                await self.close()

    async def _pipeline(self) -> None:
        """Send several requests at once on one HTTP/1.1 connection; answers come in order."""
        wire = await self._open()
        asks = [self._draw() for _ in range(self._random.randint(2, 5))]
        asks = [ask for ask in asks if ask.refused != 413]  # a 413 may close the connection
        entries = [self._ledger.sent(ask) for ask in asks]
        with suppress(Lost):  # a lost connection is noticed when answers are read
            await wire.send(b"".join(ask.message.http1() for ask in asks))
        for entry in entries:
            await self._finish(entry, wire)

    async def _multiplex(self) -> None:
        """Send several requests at once on one HTTP/2 connection, and reset some streams."""
        wire = Http2(await self._open())
        streams = []
        try:
            for _ in range(self._random.randint(1, 6)):
                entry = self._ledger.sent(self._draw())
                try:
                    streams.append((entry, *await wire.ask(entry.ask.message)))
                except Lost as lost:
                    self._ledger.lost(entry, lost)
            for entry, stream, reply in streams:
                if self._random.random() < 0.2 and not reply.done():
                    self._ledger.vanished(entry)
                    await wire.reset(stream)
                    continue
                try:
                    self._ledger.answered(entry, await reply)
                except Lost as lost:
                    self._ledger.lost(entry, lost)
        finally:
            await wire.close()

    async def _vanish(self) -> None:
        """Disconnect before the whole body is sent, after it, or while the server waits for more
        than there is."""
        message = self._draw().message
        size = len(message.body or b"")
        data = self._random.choice(
            [message.http1()[: -size // 2 or None], message.http1(), message.http1(size + 100)]
        )
        wire = await self._open()
        entry = self._ledger.sent(Ask("vanishing", Message("/")))
        with suppress(Lost):
            await wire.send(data)
            await asyncio.sleep(self._random.choice([0.0, 0.0, 0.002, 0.02]))
        wire.abort()
        self._ledger.vanished(entry)

    async def _vanish_in_answer(self) -> None:
        """Disconnect after the first bytes of the answer."""
        wire = await self._open()
        entry = self._ledger.sent(self._draw())
        with suppress(Lost, OSError):
            await wire.send(entry.ask.message.http1())
            await wire.reader.read(10)
        wire.abort()
        self._ledger.vanished(entry)

    async def _half_close(self) -> None:
        """Close the sending side and read the answer; the server may treat it as a disconnect."""
        wire = await self._open()
        entry = self._ledger.sent(self._draw())
        try:
            await wire.send(entry.ask.message.http1())
            wire.half_close()
            self._ledger.answered(entry, await wire.reply())
        except (Lost, OSError):
            self._ledger.vanished(entry)

    async def _dawdle(self) -> None:
        """Send a request slowly; it must be answered."""
        wire = await self._open()
        entry = self._ledger.sent(self._draw())
        data = entry.ask.message.http1()
        step = max(len(data) // 20, 1)
        with suppress(Lost):  # a 413 is answered before the body is sent
            for at in range(0, len(data), step):
                await wire.send(data[at : at + step])
                await asyncio.sleep(DAWDLE_S)
        await self._finish(entry, wire)

    async def _say_too_little(self) -> None:
        """Send a body longer than its Content-Length: broken JSON, then garbage."""
        message = Message("/embed", b'{"inputs": "a cat", "model": "e"}')
        data = message.http1(length=len(message.body or b"") - 5)
        wire = await self._open()
        entry = self._ledger.sent(Ask("short length", message, refused=400, err="validation"))
        await self._finish(entry, wire, data)
        await wire.rest()

    async def _say_nonsense(self) -> None:
        """Send random bytes, a header that is too long, or broken frames of HTTP/2: the server must
        answer with a 4xx, or close the connection."""
        message = self._corpus.plain().message
        message.headers["x-huge"] = "a" * HUGE_HEADER_BYTES
        noise = self._random.randbytes(self._random.randint(1, 2000))
        http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        data = self._random.choice([noise + b"\r\n\r\n", message.http1(), http2 + noise])
        wire = await self._open()
        with suppress(Lost, OSError):
            await wire.send(data)
            wire.half_close()
        answer = await wire.rest()
        if answer and not (data.startswith(http2) or answer.startswith(b"HTTP/1.1 4")):
            self._ledger.violate(None, f"nonsense was answered with {answer[:100]!r}")
        self._ledger.outcomes["nonsense refused" if answer else "nonsense closed"] += 1

    async def _finish(self, entry: QueuedSequence, wire: Http1, data: bytes = b"") -> bool:
        """Send the rest of a request and read its answer.

        Returns whether the connection can be used again.
        """
        try:
            await wire.send(data)
            reply = await wire.reply()
        except Lost as lost:
            self._ledger.lost(entry, lost)
            return False
        self._ledger.answered(entry, reply)
        return reply.headers.get("connection", "").lower() != "close"
