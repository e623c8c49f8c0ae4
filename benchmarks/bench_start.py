"""Measures how long a server takes to its first answer, cold and warm, and a lone query after that.

A cold start has an empty cache folder, so that the checkpoint is converted and every bucket
compiled. A warm start has the same folder again, and should compile nothing. Times are from the
start of the process:

    port        a connection is accepted (the server listens before it loads)
    http        any request is answered: the model is loaded
    ready       /ready answers 200: every request has a compiled bucket
    embeddings  a /v1/embeddings request, sent as soon as there is a port, is answered
    all         every bucket is compiled

When /ready answers 200, lone queries are sent at random times, `--per-s` of them a second. `after`
has their p50 and p99 for each second, and the p50 as a multiple of the steady one. The steady p50
is measured later, in seconds in which nothing was compiled and no bucket timed.

The same steps are also timed one by one in a process of their own, without a server (`stages`), and
the server's log is shown with times. `compiled` is jaxembed_compile_count at the end: 0 when warm.

    python -m benchmarks.bench_start
    python -m benchmarks.bench_start --repeat 3 MODEL -- --max-batch-tokens 2048
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import load, report, workloads
from benchmarks.bench_http import Texts
from benchmarks.load import Open, Target
from benchmarks.servers import COMPILED, SERVED, Watch, free_port, running

CONNECT_S = 1.0
STEADY_S = 5.0
STEADY_TRIES = 6


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--repeat", type=int, default=1, help="cold starts, and as many warm ones")
    parser.add_argument("--timeout-s", type=float, default=240)
    parser.add_argument("--no-stages", action="store_true", help="only the server")
    parser.add_argument("--after-s", type=float, default=30.0, help="of lone queries once ready")
    parser.add_argument("--per-s", type=float, default=20.0, help="lone queries a second")
    parser.add_argument("--texts", type=int, default=2048, help="different queries")
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    args = parser.parse_args(arguments[:at])
    args.flags = arguments[at + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure cold and warm starts, and print and write the results."""
    args = parse(argv)
    starts = [start for _ in range(args.repeat) for start in cold_and_warm(args)]
    hidden = ("log", "stages", "after")
    keys = dict.fromkeys(key for start in starts for key in start if key not in hidden)
    report.show([{key: start.get(key) for key in keys} for start in starts], "starts, seconds")
    for kind in ("cold", "warm"):
        of_kind = [start for start in starts if start["start"] == kind]
        report.show(after_rows(of_kind), f"a lone query after ready, {kind}, median of starts")
        report.show(stage_rows(of_kind), f"stages without a server, {kind}, seconds")
        print(f"\nlog of the last {kind} start")
        for at, line in of_kind[-1]["log"]:
            print(f"{at:8.3f}  {line}")
    facts = {"model": args.model, "flags": args.flags, "starts": starts}
    report.finish("bench_start", argv, facts, args.out)


def stage_rows(starts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The seconds of each stage, the median over the starts."""
    stages = [start.get("stages", {}) for start in starts]
    names = dict.fromkeys(name for of_start in stages for name in of_start)
    return [
        {"stage": name, "median_s": float(np.median([s[name] for s in stages if name in s]))}
        for name in names  # stages differ: a cold start may choose another grid
    ]


def after_rows(starts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each second after ready, medians over the starts."""
    seconds = min(len(start["after"]) for start in starts)
    return [
        {
            name: float(np.median([start["after"][k][name] for start in starts]))
            for name in starts[0]["after"][k]
        }
        for k in range(seconds)
    ]


def cold_and_warm(args: Namespace) -> Iterator[dict[str, Any]]:
    """Measure a start with an empty cache, and one with the cache that the first one left."""
    with tempfile.TemporaryDirectory() as staged, tempfile.TemporaryDirectory() as served:
        for kind in ("cold", "warm"):
            result = {"start": kind} | serve_once(args, Path(served))
            if not args.no_stages:
                result["stages"] = stages_once(args, Path(staged))
            yield result


def serve_once(args: Namespace, cache_dir: Path) -> dict[str, Any]:
    """Start a server, measure it until its last bucket is compiled, and stop it."""
    port = free_port()
    command = [sys.executable, "-m", "jaxembed.cli", "serve", *([args.model] if args.model else [])]
    command += ["--port", str(port), "--cache-dir", str(cache_dir)]
    command += ["--served-model-name", SERVED, *args.flags]
    texts = Texts(args)
    with running(command) as (process, started_at, log):
        url = f"http://127.0.0.1:{port}"
        watch = Watch(url, process, started_at, args.timeout_s, log)
        first = {}
        port_s = watch.until(lambda: connects(port))
        asking = threading.Thread(
            target=lambda: first.update(s=watch.until(watch.embeds)), daemon=True
        )
        asking.start()
        http_s = watch.until(lambda: watch.status("/livez") is not None)
        ready_s = watch.until(lambda: watch.status("/ready") == 200)
        target = Target(url + "/v1/embeddings", SERVED)
        queries = lone(target, texts, args.per_s, args.after_s)
        asking.join(args.timeout_s)
        watch.until(lambda: any(COMPILED in line for _, line in log))
        steady_ms = steady(watch, target, texts, args)
        metrics = watch.metrics()
    after = by_second(queries, steady_ms)
    return {
        "port_s": port_s,
        "http_s": http_s,
        "ready_s": ready_s,
        "embeddings_s": first.get("s"),
        "all_s": next(at for at, line in log if COMPILED in line),
        "steady_p50_ms": steady_ms,
        "worst_second": max((row["times_steady"] for row in after), default=None),
        "compiled": metrics.get("jaxembed_compile_count"),
        "cache_hits": metrics.get("jaxembed_compile_cache_hits"),
        "compile_s": metrics.get("jaxembed_compile_seconds"),
        "timings": metrics.get("jaxembed_bucket_timings"),
        "after": after,
        "log": list(log),
    }


def lone(target: Target, texts: Texts, per_s: float, seconds: float) -> load.Sample:
    """Send single queries at random times, each on a connection that is not in use."""
    query = Open("query", 1, per_s)
    requests = texts.requests(target, 1, "base64")
    return asyncio.run(load.run(target, [(query, requests)], seconds))[0]


def steady(watch: Watch, target: Target, texts: Texts, args: Namespace) -> float:
    """The p50 in milliseconds of lone queries while nothing is compiled and no bucket timed.

    It is the last of STEADY_TRIES tries if something was timed during each.
    """
    p50_ms = float("nan")
    for _ in range(STEADY_TRIES):
        before = watch.metrics()
        seconds = min(STEADY_S, args.after_s)
        p50_ms = lone(target, texts, args.per_s, seconds).row()["p50_ms"]
        if watch.metrics() == before:
            break
    return p50_ms


def by_second(sample: load.Sample, steady_ms: float) -> list[dict[str, Any]]:
    """Count the queries due in each second, with p50, p99, and p50 over the steady one."""
    due, ms = np.array(sample.due_s), np.array(sample.latencies_s) * 1000
    rows = []
    for second in range(int(due.max()) + 1 if len(due) else 0):
        own = ms[(due >= second) & (due < second + 1)]
        if len(own):
            p50, p99 = np.percentile(own, [50, 99])
            rows.append(
                {
                    "second": second,
                    "queries": len(own),
                    "p50_ms": float(p50),
                    "p99_ms": float(p99),
                    "times_steady": float(p50 / steady_ms),
                }
            )
    return rows


def connects(port: int) -> bool:
    """Whether a port of this machine accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), CONNECT_S).close()
    except OSError:
        return False
    return True


def stages_once(args: Namespace, cache_dir: Path) -> dict[str, float]:
    """Run the stages of a start in a new process. Returns the seconds of each."""
    command = [sys.executable, "-m", "benchmarks.start_stages", str(cache_dir)]
    command += [args.model] if args.model else []
    spawned = dict(os.environ) | {"STARTED_AT": repr(time.time())}
    process = subprocess.run(
        command, cwd=report.ROOT, env=spawned, capture_output=True, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
