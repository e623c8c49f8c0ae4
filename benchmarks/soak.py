"""Checks whether a server's memory stays constant over many requests.

A server in a process of its own answers single queries over 32 connections; every twentieth request
is a bulk of 32 texts, and half of them ask for floats, half for base64. Memory is steady after some
thousand requests, so the result is the slope of the second half, in bytes a request.

    python -m benchmarks.soak                                # all-MiniLM-L6-v2, 200,000 requests
    python -m benchmarks.soak --requests 20000 -- --null-model
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import psutil

from benchmarks import report, servers
from benchmarks.load import Connection, Connections, Target
from benchmarks.servers import Server
from benchmarks.workloads import Texts

CONNECTIONS = 32
BULK = 32  # texts
BULK_EVERY = 20  # requests
ROWS = 20  # of the table
MIB = 1024**2


def main(argv: Sequence[str] | None = None) -> None:
    """Send the requests, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    servers.add_arguments(parser)
    parser.add_argument("--requests", type=int, default=200_000)
    args = report.parse(parser, argv, takes_flags=True)
    with servers.jaxembed(args.model, args.flags) as server:
        requests = mixed(server.target, Texts(args))
        rows = [row_of(server, 0)]
        for k in range(1, ROWS + 1):
            end = args.requests * k // ROWS
            asyncio.run(ask_all(server.target, islice(requests, end - rows[-1]["requests"])))
            rows.append(row_of(server, end))
    slope = slope_of(rows[len(rows) // 2 :])
    print(f"second half: {slope:+.1f} bytes a request")
    facts = {"model": args.model, "flags": args.flags, "bytes_per_request": slope}
    report.finish(args, facts | {"results": rows})


def mixed(target: Target, texts: Texts) -> Iterator[bytes]:
    """Yield single and bulk requests in both encodings, without end."""
    encodings = ("float", "base64")
    singles = [texts.requests(target, 1, encoding) for encoding in encodings]
    bulks = [texts.requests(target, BULK, encoding) for encoding in encodings]
    for k in count():
        streams = bulks if k % BULK_EVERY == 0 else singles
        yield next(streams[k // BULK_EVERY % 2])


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


def row_of(server: Server, requests: int) -> dict[str, Any]:
    """Measure the memory of the server after so many requests, print it, and return the row."""
    row = {
        "requests": requests,
        "resident_mib": psutil.Process(server.process.pid).memory_info().rss / MIB,
    }
    print("  ".join(f"{name} {value:,.0f}" for name, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
