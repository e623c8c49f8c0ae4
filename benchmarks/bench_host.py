"""Measures the host's work for a request: the server with its null model, which uses no device.

The server runs in one process and the clients in another, on the same cores. `server_us` and
`text_us` are microseconds of CPU time of the server, with all its threads, for a request and for a
text. They are reliable on a busy machine too, unlike requests per second. `engine_us` is the part
of the server's first process, `front_us` that of its front ends.

    python -m benchmarks.bench_host
    python -m benchmarks.bench_host --only queries --seconds 5
    python -m benchmarks.bench_host --before ../before --front-ends 1 --rounds 9

`--front-ends` measures one more server of this version, with so many front-end processes.

With `--before`, a checkout of an older commit runs twice beside ours, and they take turns; the
ratio of the two equal servers shows which differences are noise.

A measurement during which the server compiled something or timed a bucket is repeated.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report, servers
from benchmarks.load import Closed
from benchmarks.servers import BEFORE, Server
from benchmarks.workloads import Texts

NOW, FRONT_ENDS = "now", "front ends"
FLAGS = ("--null-model",)
WARM_S = 1.0
TRIES = 4  # of a row, until nothing was compiled or timed during one
SCENARIOS = {
    "queries": (Closed("1 connection", 1, 1), Closed("32 connections", 1, 32)),
    "bulk": (Closed("bulk of 32", 32, 4), Closed("bulk of 256", 256, 4)),
}


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = report.parser(__file__, __doc__)
    servers.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--only", default=",".join(SCENARIOS))
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--front-ends", type=int, default=0, help="of one more server")
    parser.add_argument("--rounds", type=int, default=9, help="if there are several servers")
    return report.parse(parser, argv, takes_flags=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the scenarios on a null model, and print and write the results."""
    args = parse(argv)
    flags = [*FLAGS, *args.flags]
    started = {NOW: servers.jaxembed(args.model, flags)}
    if args.before:
        started |= servers.jaxembed_before(args.model, flags, args.before)
    if args.front_ends:
        more = [*flags, "--front-ends", str(args.front_ends)]
        started[FRONT_ENDS] = servers.jaxembed(args.model, more)
    with ExitStack() as stack:
        running = {name: stack.enter_context(server) for name, server in started.items()}
        rows = measure_all(running, args)
    report.show(rows, f"null model, {report.device_name()}")
    facts: dict[str, Any] = {"model": args.model, "flags": args.flags, "seconds": args.seconds}
    if args.before:
        facts |= {"before": report.commit(args.before), "ratios": ratios_of(rows)}
        report.show(facts["ratios"], f"CPU time, divided by that of {facts['before']}")
    report.finish(args, facts | {"front_ends": args.front_ends, "results": rows})


def measure_all(running: dict[str, Server], args: Namespace) -> list[dict[str, Any]]:
    """Measure the scenarios on each server, by turns if there are several. Returns the rows."""
    texts, rows = Texts(args), []
    for number in range(args.rounds if len(running) > 1 else 1):
        for load in (load for name in args.only.split(",") for load in SCENARIOS[name]):
            for encoding in ("float", "base64"):
                for title, server in running.items():
                    requests = texts.requests(server.target, load.texts, encoding)
                    about = {"round": number, "server": title, "encoding": encoding}
                    rows.append(about | measure(server, load, requests, args.seconds))
    return rows


def measure(
    server: Server, load: Closed, requests: Iterator[bytes], seconds: float
) -> dict[str, Any]:
    """Measure a load until the server compiled and timed nothing meanwhile, and return its row.

    Raises RuntimeError if it did in each of TRIES tries.
    """
    server.measure([(load, requests)], min(WARM_S, seconds))
    for _ in range(TRIES):
        metrics, before = server.metrics(), server.cpu_s()
        (row,) = server.measure([(load, requests)], seconds)
        engine, front = np.subtract(server.cpu_s(), before) * 1e6 / row["requests"]
        if server.metrics() == metrics:
            return row | {
                "server_us": engine + front,
                "engine_us": engine,
                "front_us": front,
                "text_us": (engine + front) / load.texts,
            }
    raise RuntimeError(f"the server compiled or timed a bucket in each of {TRIES} tries")


def ratios_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The CPU time of a request, of each server divided by that of the older commit in the same
    round. Of a server with front ends also that of each kind of process."""
    by: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        of_load = by.setdefault((row["load"], row["encoding"]), {})
        of_load.setdefault(row["server"], []).append(row)
    table = []
    for (load, encoding), of_server in by.items():
        before = np.array([row["server_us"] for row in of_server.pop(BEFORE)])
        for server, own in of_server.items():
            for part in ("server_us", *(("front_us", "engine_us") if server == FRONT_ENDS else ())):
                us = np.array([row[part] for row in own])
                about = {"load": load, "encoding": encoding, "server": server, "part": part}
                table.append(about | report.spread(us / before))
    return table


if __name__ == "__main__":
    main()
