"""Compares our server with an older commit of itself, which runs twice as a control.

The difference between the two equal servers shows which differences are noise. All three run and
take turns as in `bench_peers`, while the other two are idle. The older commit runs in this
environment, from a checkout.

    git worktree add ../before v0.1.0
    python -m benchmarks.bench_before ../before
    python -m benchmarks.bench_before ../before --rounds 9 -- --dtype float32
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import bench_peers, report, servers

NOW, BEFORE, CONTROL = "now", "before", "before, again"
IDLE_SHARE = 0.1  # of a core; a server that uses less compiles and times nothing any more


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout of the older commit")
    bench_peers.add_arguments(parser)
    args = parser.parse_args(arguments[:at])
    args.flags = arguments[at + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the three servers in turns, and print and write the results."""
    args = parse(argv)
    flags = [*bench_peers.FLAGS, *args.flags]
    checkouts = {NOW: report.ROOT, BEFORE: args.before, CONTROL: args.before}
    with ExitStack() as stack:
        running = {}
        for name, checkout in checkouts.items():
            server = servers.jaxembed(None, flags, checkout, until=servers.COMPILED)
            running[name] = stack.enter_context(server)
            while running[name].idle_share() > IDLE_SHARE:
                pass
        rows, idle = bench_peers.measure(running, args)
    table = bench_peers.summary(rows)
    ratios = [
        {"server": name} | row
        for name in (NOW, CONTROL)
        for row in bench_peers.ratios_of(rows, name, BEFORE)
    ]
    report.show(table, f"all-MiniLM-L6-v2, {report.device_name()}, medians of rounds")
    report.show(ratios, f"times better than {report.commit(args.before)}")
    facts = {
        "model": "all-MiniLM-L6-v2",
        "before": report.commit(args.before),
        "bulk": args.bulk,
        "flags": flags,
        "idle_cpu": idle,
        "ratios": ratios,
        "summary": table,
        "results": rows,
    }
    report.finish("bench_before", argv, facts, args.out)


if __name__ == "__main__":
    main()
