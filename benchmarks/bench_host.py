"""Measures the host's work for a request: the server with its null model, which uses no device.

The server runs in one process and the clients in another, on the same cores. `server_us` and
`text_us` are microseconds of CPU time of the server, with all its threads, for a request and for a
text. They are reliable on a busy machine too, unlike requests per second. `nothing` asks /livez,
whose route does nothing; it shows the cost of Hypercorn, Quart and our steps around every route.
`ids` sends about as many token ids as the texts have tokens, so that nothing is tokenized.

While bulk runs, /livez is asked at random times. It needs only the event loop, so its latency
beyond the one without load shows how long the loop was busy with other work: `lag`.

    python -m benchmarks.bench_host
    python -m benchmarks.bench_host --only queries,bulk --seconds 5
    python -m benchmarks.bench_host --only parts
    python -m benchmarks.bench_host --before ../before --rounds 9

`--only parts` divides the time of a lone query, at 32 connections. It is compared with `/livez` and
with a query whose answer is in the cache, for which nothing is queued and no engine thread wakes.

`--front-ends` measures one more server of this version, with so many front-end processes: its CPU
time as a whole, and that of the front ends and of the engine's process.

With `--before`, a checkout of an older commit runs twice beside ours, and the three take turns; the
ratio of the two equal servers shows which differences are noise.

A measurement during which the server compiled something or timed a bucket is repeated.

The interpreter of one front-end process can use at most one core. `server_cores` near 1 means that
it is saturated; the tokenizer's threads may add more.
"""

import asyncio
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import load, report, servers, workloads
from benchmarks.bench_http import Texts
from benchmarks.load import Closed, Load, Open, Target
from benchmarks.servers import Server

NOW, BEFORE, CONTROL, FRONT_ENDS = "now", "before", "before, again", "front ends"
FLAGS = ("--null-model", "--accept-bare-token-ids")
PARTS = "parts"  # the scenario that needs a server with a cache
CACHE_FLAGS = ("--cache-bytes", str(2**26))
ROUTE, CACHED, QUERY = "/livez", "cached query", "query"
WARM_S = 1.0
PROBES_PER_S = 100.0
TRIES = 4  # of a row, until nothing was compiled or timed during one
PROBE = Open("lag", 0, PROBES_PER_S)
CHARACTERS = 5  # of an English token, roughly
MAX_IDS = 256  # of a text
LAST_ID = 40  # the last token id of small vocabularies

Requests = Callable[[Target, int], Iterator[bytes]]


def scenarios(texts: Texts) -> dict[str, list[tuple[str, Load, Requests]]]:
    """The measurements of each scenario by name: encoding, load, and what makes its requests."""

    def of(encoding: str) -> Requests:
        return lambda target, count: texts.requests(target, count, encoding)

    def loads(name: str, count: int, connections: int) -> list[tuple[str, Load, Requests]]:
        one = Closed(name, count, connections)
        return [(encoding, one, of(encoding)) for encoding in ("float", "base64")]

    return {
        "nothing": [("", Closed("nothing", 0, 32), probes)],
        "queries": [*loads("1 connection", 1, 1), *loads("32 connections", 1, 32)],
        "bulk": [*loads("bulk of 32", 32, 4), *loads("bulk of 256", 256, 4)],
        "ids": [("base64", Closed("bulk of 256, ids", 256, 4), ids_of(texts))],
    }


def probes(target: Target, _: int) -> Iterator[bytes]:
    """Requests for /livez, without end."""
    host = urlsplit(target.url).netloc
    return cycle([f"GET /livez HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()])


def parts_of(texts: Texts) -> list[tuple[str, bool, Load, Requests]]:
    """What divides a query's time: name, whether the server has a cache, load and requests."""

    def queries(target: Target, count: int) -> Iterator[bytes]:
        return texts.requests(target, count, "base64")

    def one_query(target: Target, count: int) -> Iterator[bytes]:
        return cycle([next(queries(target, count))])

    connections = 32
    return [
        (ROUTE, False, Closed(ROUTE, 0, connections), probes),
        (CACHED, True, Closed(CACHED, 1, connections), one_query),
        (QUERY, False, Closed(QUERY, 1, connections), queries),
    ]


def ids_of(texts: Texts) -> Requests:
    """A function that makes requests of random token ids, about as many as the bulk texts have."""

    def requests(target: Target, count: int) -> Iterator[bytes]:
        draw = np.random.default_rng(0)
        lengths = [min(len(text) // CHARACTERS + 2, MAX_IDS) for text in texts.bulk]
        ids = [draw.integers(workloads.FIRST_ID, LAST_ID, length).tolist() for length in lengths]
        parts = [ids[k : k + count] for k in range(0, max(len(ids) - count, 0) + 1, count)]
        return cycle([target.request(part, "base64") for part in parts])

    return requests


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="whose tokenizer; default: all-MiniLM-L6-v2")
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=8192, help="different ones in bulk")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--only", default="nothing,queries,bulk,ids")
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--front-ends", type=int, default=0, help="of one more server")
    parser.add_argument("--rounds", type=int, default=9, help="with --before, and of the parts")
    args = parser.parse_args(arguments[:at])
    args.flags = arguments[at + 1 :]
    args.only = args.only.split(",")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the scenarios on a null model, and print and write the results."""
    args = parse(argv)
    checkouts = {NOW: report.ROOT}
    if args.before:
        checkouts |= {BEFORE: args.before, CONTROL: args.before}
    with ExitStack() as stack:
        flags = [*FLAGS, *args.flags]
        running = {
            name: stack.enter_context(servers.jaxembed(args.model, flags, checkout))
            for name, checkout in checkouts.items()
        }
        if args.front_ends:
            more = [*flags, "--front-ends", str(args.front_ends)]
            running[FRONT_ENDS] = stack.enter_context(servers.jaxembed(args.model, more))
        idle_ms = lag(running[NOW], args.seconds)
        rows = measure_all(running, args)
        parts = measure_parts(running[NOW], args) if PARTS in args.only else []
    report.show(rows, f"null model, {report.device_name()}, {os.cpu_count()} cores")
    print(f"/livez beside no load: p50 {idle_ms['p50_ms']:.2f} ms, p99 {idle_ms['p99_ms']:.2f} ms")
    facts: dict[str, Any] = {"model": args.model, "flags": args.flags, "idle": idle_ms}
    if args.before:
        ratios = ratios_of(rows)
        report.show(ratios, f"server_us, divided by that of {report.commit(args.before)}")
        facts |= {"before": report.commit(args.before), "ratios": ratios}
    if args.front_ends:
        facts |= {"front_ends": args.front_ends}
    if parts:
        report.show(parts, "CPU time of the server for a lone query by its parts, in microseconds")
        facts |= {"parts": parts}
    report.finish("bench_host", argv, facts | {"results": rows, "seconds": args.seconds}, args.out)


def measure_all(running: dict[str, Server], args: Namespace) -> list[dict[str, Any]]:
    """Measure the scenarios on each server, by turns if there are several. Returns the rows."""
    by_name, rows = scenarios(Texts(args)), []
    for number in range(args.rounds if len(running) > 1 else 1):
        for name in args.only:
            if name == PARTS:
                continue
            for encoding, one, requests in by_name[name]:
                for title, server in running.items():
                    row = undisturbed(
                        server,
                        partial(measure, server, encoding, one, requests, args.seconds),
                        TRIES,
                    )
                    rows.append({"round": number, "server": title} | row)
    return rows


def measure_parts(server: Server, args: Namespace) -> list[dict[str, Any]]:
    """Measure what divides a lone query's time, by turns; return medians, `least` and `most`."""
    flags, parts = [*FLAGS, *CACHE_FLAGS, *args.flags], parts_of(Texts(args))
    measured: dict[str, list[float]] = {name: [] for name, *_ in parts}
    with servers.jaxembed(args.model, flags) as caching:
        for _ in range(args.rounds):
            for name, cached, one, requests in parts:
                asked = caching if cached else server
                run = partial(measure, asked, "base64", one, requests, args.seconds)
                measured[name].append(undisturbed(asked, run, TRIES)["server_us"])
    cached_us, query_us = np.array(measured[CACHED]), np.array(measured[QUERY])
    rows = {
        f"{ROUTE}: connection, HTTP/1.1, Quart": measured[ROUTE],
        "query from the cache: connection, HTTP/1.1, JSON, tokenizer, answer": cached_us,
        "queue and engine threads: the rest": query_us - cached_us,
        "a query": query_us,
    }
    return [
        {"part": name, "us": float(np.median(us)), "least": float(min(us)), "most": float(max(us))}
        for name, us in rows.items()
    ]


def ratios_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The CPU time of a request, of each server divided by that of the older commit: median, least
    and most of the rounds. Of a server with front ends also that of each kind of process."""
    table = []
    for load_name, encoding in dict.fromkeys((row["load"], row["encoding"]) for row in rows):
        measured: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row in rows:
            if (row["load"], row["encoding"]) == (load_name, encoding):
                of_parts = ("front_us", "engine_us") if row["server"] == FRONT_ENDS else ()
                for part in ("server_us", *of_parts):
                    measured[row["server"], part].append(row[part])
        before = np.array(measured.pop((BEFORE, "server_us")))
        for (title, part), values in measured.items():
            ratios = np.array(values) / before
            spread = {"least": float(ratios.min()), "most": float(ratios.max())}
            middle = float(np.median(values) / np.median(before))
            about = {"load": load_name, "encoding": encoding, "server": title, "part": part}
            table.append(about | {"medians": middle} | spread)
    return table


def undisturbed(
    server: Server, measured: Callable[[], dict[str, Any]], tries: int
) -> dict[str, Any]:
    """Call `measured` until the server compiled and timed nothing during a call; return its row.

    Raises RuntimeError if it did in each of `tries` calls.
    """
    before: dict[str, float] = {}
    for _ in range(tries):
        before = server.metrics()
        row = measured()
        if server.metrics() == before:
            return row
    raise RuntimeError(f"the server compiled or timed a bucket in each of {tries} tries: {before}")


def lag(server: Server, seconds: float) -> dict[str, float]:
    """The latency of /livez without any other load, in milliseconds."""
    return _lag(asyncio.run(load.run(server.target, [_probe(server)], seconds))[0])


def measure(
    server: Server, encoding: str, one: Load, requests: Requests, seconds: float
) -> dict[str, Any]:
    """Measure a load, and return its row. Under bulk the lag of the event loop is probed too."""
    bulk = one.texts > 1
    pairs = [(one, requests(server.target, one.texts)), *([_probe(server)] if bulk else [])]
    asyncio.run(load.run(server.target, pairs[:1], min(WARM_S, seconds)))
    start, client, served = time.perf_counter(), time.process_time(), server.cpu_s()
    engine = server.engine_cpu_s()
    samples = asyncio.run(load.run(server.target, pairs, seconds))
    elapsed = time.perf_counter() - start
    served_s, engine_s = server.cpu_s() - served, server.engine_cpu_s() - engine
    client_s = time.process_time() - client
    row = samples[0].row()
    count = row["requests"]
    return {
        "load": one.name,
        "encoding": encoding,
        "requests": count,
        "requests_per_s": count / samples[0].elapsed_s,
        "texts_per_s": row["texts_per_s"] or None,
        "p50_ms": row["p50_ms"],
        "p99_ms": row["p99_ms"],
        "server_us": 1e6 * served_s / count,
        "engine_us": 1e6 * engine_s / count,
        "front_us": 1e6 * (served_s - engine_s) / count,
        "text_us": 1e6 * served_s / (count * one.texts) if one.texts else None,
        "server_cores": served_s / elapsed,
        "client_cores": client_s / elapsed,
        **({f"lag_{name}": ms for name, ms in _lag(samples[1]).items()} if bulk else {}),
    }


def _probe(server: Server) -> tuple[Load, Iterator[bytes]]:
    return PROBE, probes(server.target, 0)


def _lag(sample: load.Sample) -> dict[str, float]:
    row = replace(sample, load=PROBE).row()
    return {name: row[name] for name in ("p50_ms", "p99_ms", "worst_ms")}


if __name__ == "__main__":
    main()
