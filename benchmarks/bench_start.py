"""How long a server takes from its command to its first answer, cold and warm, on what, and what a
lone query takes in the seconds after that.

Cold: an empty cache folder, so the checkpoint is converted and every bucket compiled. Warm: the
same folder again, where nothing should compile. Times are from the start of the process:

    port        a connection is accepted (the server listens before it loads)
    http        a request is answered at all: the model is loaded
    ready       /ready says 200: every request has a compiled bucket
    embeddings  a /v1/embeddings request, sent as soon as there is a port, is answered
    all         every bucket is compiled

From the moment /ready says 200 lone queries are sent at random times, `--per-s` of them a second:
`after` has their p50 and p99 second by second, and as multiples of the steady p50, which is taken
later, in seconds in which nothing was compiled and no bucket timed.

Then the same steps one by one in a process of their own, without a server (`stages`), and what the
server logged, with times. `compiled` is jaxembed_compile_count once all is done: 0 when warm.

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
    stages = [start.get("stages", {}) for start in starts]
    names = dict.fromkeys(name for of_start in stages for name in of_start)
    return [
        {"stage": name, "median_s": float(np.median([s[name] for s in stages if name in s]))}
        for name in names  # a cold start may choose another grid, and so compile others first
    ]


def after_rows(starts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The seconds after ready, each the median over the starts."""
    seconds = min(len(start["after"]) for start in starts)
    return [
        {
            name: float(np.median([start["after"][k][name] for start in starts]))
            for name in starts[0]["after"][k]
        }
        for k in range(seconds)
    ]


def cold_and_warm(args: Namespace) -> Iterator[dict[str, Any]]:
    """A start on an empty cache and one on what it left there, each with its stages."""
    with tempfile.TemporaryDirectory() as staged, tempfile.TemporaryDirectory() as served:
        for kind in ("cold", "warm"):
            found = {"start": kind} | serve_once(args, Path(served))
            if not args.no_stages:
                found["stages"] = stages_once(args, Path(staged))
            yield found


def serve_once(args: Namespace, cache_dir: Path) -> dict[str, Any]:
    """Start a server, watch it to its last bucket, stop it."""
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
    """Single queries at random times, one connection each while another waits."""
    query = Open("query", 1, per_s)
    requests = texts.requests(target, 1, "base64")
    return asyncio.run(load.run(target, [(query, requests)], seconds))[0]


def steady(watch: Watch, target: Target, texts: Texts, args: Namespace) -> float:
    """The p50 of a lone query in seconds in which nothing was compiled and no bucket timed; the
    last of several tries where some bucket was timed in each."""
    p50_ms = float("nan")
    for _ in range(STEADY_TRIES):
        before = watch.metrics()
        seconds = min(STEADY_S, args.after_s)
        p50_ms = lone(target, texts, args.per_s, seconds).row()["p50_ms"]
        if watch.metrics() == before:
            break
    return p50_ms


def by_second(sample: load.Sample, steady_ms: float) -> list[dict[str, Any]]:
    """p50, p99 and the number of queries due in each second, and the p50 over the steady one."""
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
    try:
        socket.create_connection(("127.0.0.1", port), CONNECT_S).close()
    except OSError:
        return False
    return True


def stages_once(args: Namespace, cache_dir: Path) -> dict[str, float]:
    """The stages of a start in a process of their own, seconds each."""
    command = [sys.executable, "-m", "benchmarks.start_stages", str(cache_dir)]
    command += [args.model] if args.model else []
    spawned = dict(os.environ) | {"STARTED_AT": repr(time.time())}
    done = subprocess.run(
        command, cwd=report.ROOT, env=spawned, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
