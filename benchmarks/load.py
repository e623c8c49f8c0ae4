"""Generates load on an embedding server: sends prepared requests and times the answers.

A closed loop sends the next request when the last is answered. An open loop sends at random times
that are drawn beforehand, whether or not earlier requests are answered, so that a slow server does
not get fewer requests. Latency is from when a request is due to the last byte of its answer.
Answers are read but not parsed, so that the clients use little of the machine that they share with
the server. Knows nothing of models.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson


@dataclass(frozen=True)
class Target:
    """The URL of an OpenAI-compatible embeddings route, and the model's name there."""

    url: str
    model: str

    def request(self, texts: Sequence[str], encoding: str = "base64") -> bytes:
        """The bytes of an HTTP request for the embeddings of these texts."""
        parts = urlsplit(self.url)
        body = {"model": self.model, "input": list(texts), "encoding_format": encoding}
        payload = orjson.dumps(body)
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


class Connection:
    """One HTTP/1.1 connection that is kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    async def ask(self, request: bytes) -> bytes:
        """Send a request and return the body of its answer. Raises OSError if it is not a 200."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").lower().split("\r\n")
        fields = dict(line.split(":", 1) for line in lines if line)
        if "content-length" in fields:
            body = await self._reader.readexactly(int(fields["content-length"]))
        else:
            body = b"".join([part async for part in self._chunks()])
        if status.split()[1] != "200":
            raise OSError(f"{status}: {body[:200].decode(errors='replace')}")
        return body

    async def _chunks(self):
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readuntil(b"\r\n")

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        await self._writer.wait_closed()


class Connections:
    """The connections to a server, a context manager that closes all of them."""

    def __init__(self, target: Target):
        self._target = target
        self._opened: list[Connection] = []

    async def open(self) -> Connection:
        """Open another connection."""
        parts = urlsplit(self._target.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        self._opened.append(Connection(reader, writer))
        return self._opened[-1]

    async def __aenter__(self) -> "Connections":
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._opened:
            await connection.close()


Ask = Callable[[Connection, float], Awaitable[None]]  # given also the time when it is due


@dataclass(frozen=True)
class Closed:
    """A closed loop: clients with a connection each, which send one request after the other."""

    name: str
    texts: int  # in one request
    connections: int

    async def run(self, connections: Connections, ask: Ask, seconds: float, seed: int) -> None:
        """Send requests for `seconds`, and wait for the last answers."""
        opened = [await connections.open() for _ in range(self.connections)]
        end = time.perf_counter() + seconds

        async def client(connection: Connection) -> None:
            while (now := time.perf_counter()) < end:
                await ask(connection, now)

        await asyncio.gather(*map(client, opened))


@dataclass(frozen=True)
class Open:
    """An open loop: requests at random times, whether or not earlier ones are answered."""

    name: str
    texts: int  # in one request
    per_s: float  # mean number of requests a second, with exponential gaps

    async def run(self, connections: Connections, ask: Ask, seconds: float, seed: int) -> None:
        """Send requests for `seconds`, and wait for the last answers."""
        gaps = np.random.default_rng(seed).exponential(
            1 / self.per_s, int(self.per_s * seconds * 2) + 20
        )
        times, start = np.cumsum(gaps), time.perf_counter()
        idle: list[Connection] = []

        async def one(due: float) -> None:
            await asyncio.sleep(due - time.perf_counter())
            connection = idle.pop() if idle else await connections.open()
            await ask(connection, due)
            idle.append(connection)

        await asyncio.gather(*(one(start + at) for at in times[times < seconds]))


Load = Closed | Open


async def run(
    target: Target, loads: Sequence[tuple[Load, Iterator[bytes]]], seconds: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Run all loads at once for `seconds`, and wait for the last answers.

    Each load has an iterator of its requests, which must not end. Returns a row for each load:
    texts a second, and percentiles of the latency in milliseconds. Raises OSError at the first
    request that fails.
    """

    async def one(load: Load, requests: Iterator[bytes]) -> dict[str, Any]:
        ms: list[float] = []

        async def ask(connection: Connection, due: float) -> None:
            await connection.ask(next(requests))
            ms.append((time.perf_counter() - due) * 1000)

        async with Connections(target) as connections:
            start = time.perf_counter()
            await load.run(connections, ask, seconds, seed)
            elapsed_s = time.perf_counter() - start
        return {
            "load": load.name,
            "requests": len(ms),
            "texts_per_s": len(ms) * load.texts / elapsed_s,
            **{f"p{q}_ms": float(np.percentile(ms, q)) for q in (50, 99)},
        }

    return await asyncio.gather(*(one(load, requests) for load, requests in loads))
