"""Checks whether a server's memory stays constant over many requests.

A server in a process of its own answers single queries over 32 connections; every twentieth request
is a bulk of 32 texts, and half of them ask for floats, half for base64. Memory is steady after some
thousand requests, so the result is the slope of the second half, in bytes a request.

    python -m benchmarks.soak                                # all-MiniLM-L6-v2, 200,000 requests
    python -m benchmarks.soak --requests 20000 -- --null-model
"""

import asyncio
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np

from benchmarks import report, servers, workloads
from benchmarks.bench_http import Texts
from benchmarks.load import Connection, Connections, Target
from benchmarks.servers import Server

CONNECTIONS = 32
BULK = 32  # texts
BULK_EVERY = 20  # requests
ROWS = 20  # of the table
MIB = 1024**2


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=8192, help="different ones in bulk")
    parser.add_argument("--requests", type=int, default=200_000)
    args = parser.parse_args(arguments[:at])
    args.flags = arguments[at + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Send the requests, and print and write the results."""
    args = parse(argv)
    with servers.jaxembed(args.model, args.flags) as server:
        rows = list(soak(server, mixed(server.target, Texts(args)), args.requests))
    slope = slope_of(rows[len(rows) // 2 :])
    print(f"second half: {slope:+.1f} bytes a request")
    facts = {"model": args.model, "flags": args.flags, "bytes_per_request": slope}
    report.finish("soak", argv, facts | {"results": rows}, args.out)


def mixed(target: Target, texts: Texts) -> Iterator[bytes]:
    """Yield single and bulk requests in both encodings, without end."""
    encodings = ("float", "base64")
    singles = [texts.requests(target, 1, encoding) for encoding in encodings]
    bulks = [texts.requests(target, BULK, encoding) for encoding in encodings]
    for k in count():
        streams = bulks if k % BULK_EVERY == 0 else singles
        yield next(streams[k // BULK_EVERY % 2])


def soak(server: Server, requests: Iterator[bytes], total: int) -> Iterator[dict[str, Any]]:
    """Send all requests. Yields and prints a row after each twentieth of them."""
    start, sent = time.perf_counter(), 0
    yield _row(server, sent, start)
    for k in range(1, ROWS + 1):
        part = total * k // ROWS - sent
        asyncio.run(ask_all(server.target, islice(requests, part)))
        sent += part
        yield _row(server, sent, start)


async def ask_all(target: Target, requests: Iterator[bytes]) -> None:
    """Send each request once, over all connections. Raises OSError at the first that fails."""

    async def client(connection: Connection) -> None:
        for request in requests:
            await connection.ask(request)

    async with Connections(target) as connections:
        pool = [await connections.open() for _ in range(CONNECTIONS)]
        await asyncio.gather(*map(client, pool))


def slope_of(rows: Sequence[dict[str, Any]]) -> float:
    """The bytes that each request adds to resident memory, by least squares."""
    requests = [row["requests"] for row in rows]
    return float(np.polyfit(requests, [row["resident_mib"] * MIB for row in rows], 1)[0])


def _row(server: Server, requests: int, start: float) -> dict[str, Any]:
    """Measure the memory, threads and files of the server, print them, and return the row."""
    row = {
        "requests": requests,
        "seconds": time.perf_counter() - start,
        "resident_mib": server.process.memory_info().rss / MIB,
        "threads": server.process.num_threads(),
        "files": server.process.num_fds(),
    }
    print("  ".join(f"{name} {value:,.0f}" for name, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
