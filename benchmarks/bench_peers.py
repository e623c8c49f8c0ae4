"""Compares our server with Infinity (torch) over HTTP: same weights, texts, cores and clients.

Both servers run and take turns; one is idle while the other is measured. In every round each gets
single queries on one connection, bulk requests on four, and queries at random times while bulk
runs. Which of them goes first alternates. Ratios are taken within a round, so that disturbances of
the machine hit both servers; the median of the rounds counts.

    python -m benchmarks.bench_peers --infinity .venv-peers
    python -m benchmarks.bench_peers -- --dtype float32            # flags of jaxembed serve

Answers are requested in base64, as OpenAI's own client does. `idle_cpu` is the share of a core that
a server uses while it is idle, and so takes from the other. Neither server caches texts.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report, servers, workloads
from benchmarks.bench_http import BULK_CONNECTIONS, Texts, run
from benchmarks.load import Closed, Load, Open
from benchmarks.servers import Server

OURS, PEER = "jaxembed", "infinity"
# Bulk has more tokens under way than our server admits on a CPU by default; Infinity has no limit.
FLAGS = ("--max-queue-tokens", "1000000")
# The ratios of our server to the peer: scenario, load, figure, and whether more of it is better.
RATIOS = {
    "bulk texts/s": ("bulk", "bulk", "texts_per_s", True),
    "lone query p50": ("lone", "query", "p50_ms", False),
    "query p50 under bulk": ("under bulk", "query", "p50_ms", False),
    "query p99 under bulk": ("under bulk", "query", "p99_ms", False),
}
PACKAGES = ("infinity_emb", "torch", "transformers", "sentence-transformers")


def scenarios(texts: int, per_s: float) -> dict[str, list[Load]]:
    """The loads of each scenario, which run at the same time, by name.

    Bulk requests have `texts` texts; under bulk there are `per_s` queries a second.
    """
    bulk = Closed("bulk", texts, BULK_CONNECTIONS)
    return {
        "lone": [Closed("query", 1, 1)],
        "bulk": [bulk],
        "under bulk": [Open("query", 1, per_s), bulk],
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the texts, the loads and the rounds."""
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=8192, help="different ones in bulk")
    parser.add_argument("--bulk", type=int, default=256, help="texts of a bulk request")
    parser.add_argument("--per-s", type=float, default=10.0, help="queries under bulk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", default="3,4,8", help="lone, bulk, and under bulk")


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--infinity", type=Path, default=report.ROOT / ".venv-peers")
    parser.add_argument("--infinity-dtype", default="auto", help="float32 with auto, on a CPU")
    add_arguments(parser)
    args = parser.parse_args(arguments[:at])
    args.flags = arguments[at + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both servers in turns, and print and write the results."""
    args = parse(argv)
    peer_flags = ["--dtype", args.infinity_dtype]
    with (
        servers.infinity(args.infinity, peer_flags) as peer,
        servers.jaxembed(None, [*FLAGS, *args.flags]) as ours,
    ):
        rows, idle = measure({OURS: ours, PEER: peer}, args)
    table, ratios = summary(rows), ratios_of(rows, OURS, PEER)
    report.show(table, f"all-MiniLM-L6-v2, {report.device_name()}, medians of rounds")
    report.show(ratios, "times better than Infinity")
    facts = {
        "model": "all-MiniLM-L6-v2",
        "bulk": args.bulk,
        "flags": {OURS: [*FLAGS, *args.flags], PEER: peer_flags},
        "peer_versions": report.versions_in(args.infinity, PACKAGES),
        "idle_cpu": idle,
        "ratios": ratios,
        "summary": table,
        "results": rows,
    }
    report.finish("bench_peers", argv, facts, args.out)


def measure(
    running: dict[str, Server], args: Namespace
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure the servers in turns.

    Returns a row for each round, server, scenario and load, and by server the share of a core that
    it uses while idle.
    """
    texts = Texts(args)
    loads_of = scenarios(args.bulk, args.per_s)
    seconds = dict(zip(loads_of, map(float, args.seconds.split(",")), strict=True))
    for server in running.values():
        for loads in loads_of.values():
            run(server.target, texts, loads, "base64", 1.0)
    idle = {name: server.idle_share() for name, server in running.items()}
    rows = []
    for number in range(args.rounds):
        order = list(running) if number % 2 else list(reversed(running))
        for scenario, loads in loads_of.items():
            for name in order:
                about = {"round": number, "server": name, "scenario": scenario}
                results = run(
                    running[name].target, texts, loads, "base64", seconds[scenario], seed=number
                )
                rows += [about | row for row in results]
                print(".", end="", flush=True)
    print()
    return rows, idle


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians over the rounds for each server, scenario and load."""
    keys = dict.fromkeys((r["scenario"], r["load"], r["server"]) for r in rows)
    figures = ("texts_per_s", "p50_ms", "p95_ms", "p99_ms", "worst_ms", "client_cpu")
    table = []
    for scenario, load, server in keys:
        own = [
            r for r in rows if (r["scenario"], r["load"], r["server"]) == (scenario, load, server)
        ]
        about = {"scenario": scenario, "load": load, "server": server}
        about["requests"] = sum(r["requests"] for r in own)
        table.append(about | {name: float(np.median([r[name] for r in own])) for name in figures})
    return table


def ratios_of(rows: Sequence[dict[str, Any]], one: str, other: str) -> list[dict[str, Any]]:
    """How many times better one server is than another: median, worst and best of the rounds."""
    table = []
    for title, (scenario, load, figure, more_is_better) in RATIOS.items():
        values = {
            (r["round"], r["server"]): r[figure]
            for r in rows
            if (r["scenario"], r["load"]) == (scenario, load)
        }
        rounds = sorted({number for number, _ in values})
        ratios = np.array([values[n, one] / values[n, other] for n in rounds])
        ratios = ratios if more_is_better else 1 / ratios
        about = {"figure": title, "rounds": len(rounds), "median": float(np.median(ratios))}
        table.append(about | {"least": float(ratios.min()), "most": float(ratios.max())})
    return table


if __name__ == "__main__":
    main()
