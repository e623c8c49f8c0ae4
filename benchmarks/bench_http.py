"""Measures the latency and the throughput of a server over HTTP under several loads.

It starts our server in a process of its own, or uses a running server with OpenAI's /v1/embeddings.
Single texts are MS MARCO's queries; bulk requests hold texts of the mix `mixed`. A text is sent
again only after all others were. `open` loads send at random times, whether or not earlier requests
are answered; the others send the next request when the last one is answered.

    python -m benchmarks.bench_http                                # all-MiniLM-L6-v2
    python -m benchmarks.bench_http MODEL -- --dtype float32       # flags of jaxembed serve
    python -m benchmarks.bench_http --url http://host:8080/v1/embeddings --name MODEL

Columns: p50, p95, p99 and worst latency in milliseconds, from when a request was due to the last
byte of its answer; `client_cpu` is the share of one core that the load generator used.
"""

import asyncio
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from typing import Any

from benchmarks import load, report, servers, workloads
from benchmarks.load import Closed, Load, Open, Target

BULK_CONNECTIONS = 4
WARM_S = 1.0


def scenarios(per_s: float, bulk_per_s: float) -> dict[str, list[Load]]:
    """The loads of each scenario, which run at the same time, by name."""
    return {
        "1 connection": [Closed("query", 1, 1)],
        "32 connections": [Closed("query", 1, 32)],
        "open": [Open("query", 1, per_s)],
        "bulk of 32": [Closed("bulk", 32, BULK_CONNECTIONS)],
        "bulk of 256": [Closed("bulk", 256, BULK_CONNECTIONS)],
        "under bulk": [Open("query", 1, bulk_per_s), Closed("bulk", 256, BULK_CONNECTIONS)],
    }


class Texts:
    """Single texts and bulk texts; no text is in both."""

    def __init__(self, args: Namespace):
        self.bulk = workloads.texts("mixed", args.texts, data=args.data, seed=args.seed)
        others = workloads.texts("queries", args.texts, data=args.data, seed=args.seed)
        self.single = sorted(set(others) - set(self.bulk)) or others

    def requests(self, target: Target, texts: int, encoding: str) -> Iterator[bytes]:
        """Yield requests of this many texts each, without end."""
        pool = self.single if texts == 1 else self.bulk
        parts = [pool[k : k + texts] for k in range(0, max(len(pool) - texts, 0) + 1, texts)]
        return cycle([target.request(part, encoding) for part in parts])


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--url", help="of a server that runs, with its route")
    parser.add_argument("--name", default="", help="of the model there")
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=8192, help="different ones in bulk")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each scenario")
    parser.add_argument("--only", help="scenarios by commas, such as '1 connection,bulk of 256'")
    parser.add_argument("--encodings", default="float,base64")
    parser.add_argument("--per-s", type=float, default=50.0, help="queries, open loop")
    parser.add_argument("--bulk-per-s", type=float, default=5.0, help="queries under bulk")
    args = parser.parse_args(arguments[:at])
    args.flags = arguments[at + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the scenarios on a server, and print and write the results."""
    args = parse(argv)
    texts = Texts(args)
    with ExitStack() as stack:
        if args.url:
            target = Target(args.url, args.name)
        else:
            target = stack.enter_context(servers.jaxembed(args.model, args.flags)).target
        rows = measure(target, texts, args)
    report.show(rows, f"{args.url or args.model or 'all-MiniLM-L6-v2'}, {report.device_name()}")
    facts = {"model": args.model, "url": args.url, "flags": args.flags, "results": rows}
    report.finish("bench_http", argv, facts | {"seconds": args.seconds}, args.out)


def measure(target: Target, texts: Texts, args: Namespace) -> list[dict[str, Any]]:
    """Measure the scenarios and encodings that the arguments name, after a short warm-up each."""
    loads = scenarios(args.per_s, args.bulk_per_s)
    rows = []
    for name in args.only.split(",") if args.only else loads:
        for encoding in args.encodings.split(","):
            run(target, texts, loads[name], encoding, min(WARM_S, args.seconds))
            about = {"scenario": name, "encoding": encoding}
            rows += [about | row for row in run(target, texts, loads[name], encoding, args.seconds)]
    return rows


def run(
    target: Target,
    texts: Texts,
    loads: Sequence[Load],
    encoding: str,
    seconds: float,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Run all loads at once for `seconds`. Returns a row of figures for each."""
    pairs = [(one, texts.requests(target, one.texts, encoding)) for one in loads]
    start, cpu = time.perf_counter(), time.process_time()
    samples = asyncio.run(load.run(target, pairs, seconds, seed))
    share = (time.process_time() - cpu) / (time.perf_counter() - start)
    return [sample.row() | {"client_cpu": share} for sample in samples]


if __name__ == "__main__":
    main()
