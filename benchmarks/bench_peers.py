"""Measures our server over HTTP, beside Infinity (torch): same weights, texts, cores and clients.

With `--before` an older commit of ours takes Infinity's place, and runs twice. All servers run and
take turns; the others are idle while one is measured. In every round each gets
single queries on one connection, bulk requests on four, and queries at random times while bulk
runs. Which of them goes first alternates. Ratios are taken within a round, so that disturbances of
the machine hit both servers; the median of the rounds counts.

    python -m benchmarks.bench_peers --infinity .venv-peers
    python -m benchmarks.bench_peers --alone -- --dtype float32    # flags of jaxembed serve
    python -m benchmarks.bench_peers --before ../before    # a checkout, as by `git worktree add`

Single texts are MS MARCO's queries; bulk requests hold texts of the mix `mixed`. A text is sent
again only after all others were. Answers are requested in base64, as OpenAI's own client does.
Neither server caches texts. Columns: p50 and p99 are latencies from when a request was due to the
last byte of its answer; `client_cpu` is the share of one core that the load generator used.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report, servers
from benchmarks.load import Closed, Load, Open
from benchmarks.servers import BEFORE, CONTROL, Server
from benchmarks.workloads import Texts

OURS, PEER = "jaxembed", "infinity"
# Bulk has more tokens under way than our server admits on a CPU by default; Infinity has no limit.
FLAGS = ("--max-queue-tokens", "1000000")
WARM_S = 1.0
# The ratios of our server to the peer: scenario, load, figure, and whether more of it is better.
RATIOS = {
    "bulk texts/s": ("bulk", "bulk", "texts_per_s", True),
    "lone query p50": ("lone", "query", "p50_ms", False),
    "query p50 under bulk": ("under bulk", "query", "p50_ms", False),
    "query p99 under bulk": ("under bulk", "query", "p99_ms", False),
}
PACKAGES = ("infinity_emb", "torch", "transformers", "sentence-transformers")


BULK = Closed("bulk", 256, 4)
SCENARIOS: dict[str, list[Load]] = {  # the loads of each, which run at the same time
    "lone": [Closed("query", 1, 1)],
    "bulk": [BULK],
    "under bulk": [Open("query", 1, 10.0), BULK],
}


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = report.parser(__file__, __doc__)
    servers.add_arguments(parser)
    parser.add_argument("--infinity", type=Path, default=report.ROOT / ".venv-peers")
    parser.add_argument("--alone", action="store_true", help="without Infinity")
    parser.add_argument("--before", type=Path, help="a checkout of an older commit, in its place")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", default="3,4,8", help="lone, bulk, and under bulk")
    args = report.parse(parser, argv, takes_flags=True)
    if args.model and not args.alone and not args.before:
        parser.error("Infinity serves all-MiniLM-L6-v2; for another model add --alone or --before")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the servers in turns, and print and write the results."""
    args = parse(argv)
    flags = [*FLAGS, *args.flags]
    started = {OURS: servers.jaxembed(args.model, flags)}
    if args.before:
        started |= servers.jaxembed_before(args.model, flags, args.before)
    elif not args.alone:
        started[PEER] = servers.infinity(args.infinity)
    with ExitStack() as stack:
        running = {name: stack.enter_context(server) for name, server in started.items()}
        rows = measure(running, args)
    model = args.model or "all-MiniLM-L6-v2"
    facts: dict[str, Any] = {"model": model, "bulk": BULK.texts, "flags": flags}
    facts |= {"summary": summary(rows), "results": rows}
    report.show(facts["summary"], f"{model}, {report.device_name()}, medians of rounds")
    if args.before:
        facts |= {"before": report.commit(args.before)}
        facts |= {"ratios": ratios_of(rows, OURS, BEFORE) + ratios_of(rows, CONTROL, BEFORE)}
        report.show(facts["ratios"], f"times better than {facts['before']}")
    elif not args.alone:
        facts |= {"peer_versions": report.versions(PACKAGES, args.infinity)}
        facts |= {"ratios": ratios_of(rows, OURS, PEER)}
        report.show(facts["ratios"], "times better than Infinity")
    report.finish(args, facts)


def measure(running: dict[str, Server], args: Namespace) -> list[dict[str, Any]]:
    """Measure the servers in turns. Returns a row for each round, server, scenario and load."""
    texts, rows = Texts(args), []
    seconds_of = dict(zip(SCENARIOS, map(float, args.seconds.split(",")), strict=True))

    def measured(server: Server, scenario: str, seconds: float, seed: int = 0):
        loads = [
            (one, texts.requests(server.target, one.texts, "base64")) for one in SCENARIOS[scenario]
        ]
        return server.measure(loads, seconds, seed)

    for server in running.values():
        for scenario in SCENARIOS:
            measured(server, scenario, WARM_S)
    for number in range(args.rounds):
        for scenario, seconds in seconds_of.items():
            for name in running if number % 2 else reversed(running):
                about = {"round": number, "server": name, "scenario": scenario}
                found = measured(running[name], scenario, seconds, seed=number)
                rows += [about | row for row in found]
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians over the rounds for each server, scenario and load."""
    of: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        of.setdefault((row["scenario"], row["load"], row["server"]), []).append(row)
    figures = ("texts_per_s", "p50_ms", "p99_ms", "client_cpu")
    return [
        dict(zip(("scenario", "load", "server"), key, strict=True))
        | {name: float(np.median([row[name] for row in own])) for name in figures}
        for key, own in of.items()
    ]


def ratios_of(rows: Sequence[dict[str, Any]], one: str, other: str) -> list[dict[str, Any]]:
    """How many times better one server is than another: median, worst and best of the rounds."""
    table = []
    for title, (scenario, load, figure, more_is_better) in RATIOS.items():
        ours, theirs = (
            np.array([row[figure] for row in rows if about.items() <= row.items()])
            for about in ({"scenario": scenario, "load": load, "server": s} for s in (one, other))
        )
        ratios = ours / theirs if more_is_better else theirs / ours
        table.append({"server": one, "figure": title, **report.spread(ratios, "median")})
    return table


if __name__ == "__main__":
    main()
