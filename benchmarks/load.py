"""Generates load on an embedding server: sends prepared requests and times the answers.

A closed loop sends the next request when the last is answered. An open loop sends at random times
that are drawn beforehand, whether or not earlier requests are answered, so that a slow server does
not get fewer requests. Latency is from when a request is due to the last byte of its answer.
Answers are read but not parsed, so that the clients use little of the machine that they share with
the server. Knows nothing of models.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Closed:
    """A closed loop: clients with a connection each, which send one request after the other."""

    name: str
    texts: int  # in one request
    connections: int


@dataclass(frozen=True)
class Open:
    """An open loop: requests at random times, whether or not earlier ones are answered."""

    name: str
    texts: int  # in one request
    per_s: float  # mean number of requests a second, with exponential gaps


Load = Closed | Open


@dataclass(frozen=True)
class Sample:
    """The latencies of one load."""

    load: Load
    due_s: list[float]  # when each request was due, from the start
    latencies_s: list[float]
    elapsed_s: float  # until the last answer

    def row(self) -> dict[str, Any]:
        """The figures of the load: latency percentiles in milliseconds, and texts a second."""
        ms = np.array(self.latencies_s) * 1000
        return {
            "load": self.load.name,
            "loop": "closed" if isinstance(self.load, Closed) else "open",
            "connections": getattr(self.load, "connections", None),
            "per_s": getattr(self.load, "per_s", None),
            "texts": self.load.texts,
            "requests": len(ms),
            "texts_per_s": len(ms) * self.load.texts / self.elapsed_s,
            **{f"p{q}_ms": float(np.percentile(ms, q)) for q in (50, 95, 99)},
            "worst_ms": float(ms.max()),
        }


async def run(
    target: Target, loads: Sequence[tuple[Load, Iterator[bytes]]], seconds: float, seed: int = 0
) -> list[Sample]:
    """Run all loads at once for `seconds`, and wait for the last answers. Returns a sample each.

    Each load has an iterator of its requests, which must not end. Raises OSError at the first
    request that fails.
    """
    calls = {Closed: _closed, Open: _open}
    jobs = [calls[type(load)](target, load, requests, seconds, seed) for load, requests in loads]
    return await asyncio.gather(*jobs)


async def _closed(
    target: Target, load: Closed, requests: Iterator[bytes], seconds: float, _: int
) -> Sample:
    dues: list[float] = []
    latencies: list[float] = []

    async def client(connection: Connection, start: float) -> None:
        while (due := time.perf_counter()) < start + seconds:
            await connection.ask(next(requests))
            dues.append(due - start)
            latencies.append(time.perf_counter() - due)

    async with Connections(target) as connections:
        ready = [await connections.open() for _ in range(load.connections)]
        start = time.perf_counter()
        await asyncio.gather(*(client(connection, start) for connection in ready))
        return Sample(load, dues, latencies, time.perf_counter() - start)


async def _open(
    target: Target, load: Open, requests: Iterator[bytes], seconds: float, seed: int
) -> Sample:
    idle: list[Connection] = []
    dues: list[float] = []
    latencies: list[float] = []

    async def one(due: float, start: float, connections: Connections) -> None:
        await asyncio.sleep(due - time.perf_counter())
        connection = idle.pop() if idle else await connections.open()
        await connection.ask(next(requests))
        dues.append(due - start)
        latencies.append(time.perf_counter() - due)
        idle.append(connection)

    async with Connections(target) as connections:
        start = time.perf_counter()
        times = start + arrivals(load.per_s, seconds, seed)
        await asyncio.gather(*(one(due, start, connections) for due in times))
        return Sample(load, dues, latencies, time.perf_counter() - start)


def arrivals(per_s: float, seconds: float, seed: int = 0) -> np.ndarray:
    """Draw the times of requests in seconds, sorted, from a Poisson process with this rate."""
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.exponential(1 / per_s, int(per_s * seconds * 2) + 20))
    return times[times < seconds]
