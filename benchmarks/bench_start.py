"""How long a server takes from its command to its first answer, cold and warm, and on what.

Cold: an empty cache folder, so the checkpoint is converted and every bucket compiled. Warm: the
same folder again, where nothing should compile. Times are from the start of the process:

    port        a connection is accepted (the server listens before it loads)
    http        a request is answered at all: the model is loaded
    ready       /ready says 200: every request has a compiled bucket
    embeddings  a /v1/embeddings request, sent as soon as there is a port, is answered
    all         every bucket is compiled

Then the same steps one by one in a process of their own, without a server (`stages`), and what the
server logged, with times. `compiled` is jaxembed_compile_count once all is done: 0 when warm.

    python -m benchmarks.bench_start
    python -m benchmarks.bench_start --repeat 3 MODEL -- --max-batch-tokens 2048
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report

POLL_S = 0.01
SERVED = "benchmark"
METRICS = ("jaxembed_compile_count", "jaxembed_compile_cache_hits", "jaxembed_compile_seconds")


def parse(argv: Sequence[str] | None) -> Namespace:
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--repeat", type=int, default=1, help="cold starts, and as many warm ones")
    parser.add_argument("--timeout-s", type=float, default=240)
    parser.add_argument("--no-stages", action="store_true", help="only the server")
    report.add_arguments(parser)
    args = parser.parse_args(arguments[:at])
    args.flags = arguments[at + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    starts = [start for _ in range(args.repeat) for start in cold_and_warm(args)]
    keys = dict.fromkeys(key for start in starts for key in start if key not in ("log", "stages"))
    report.show([{key: start.get(key) for key in keys} for start in starts], "starts, seconds")
    for kind in ("cold", "warm"):
        of_kind = [start for start in starts if start["start"] == kind]
        report.show(stage_rows(of_kind), f"stages without a server, {kind}, seconds")
        print(f"\nlog of the last {kind} start")
        for at, line in of_kind[-1]["log"]:
            print(f"{at:8.3f}  {line}")
    facts = {"model": args.model, "flags": args.flags, "starts": starts}
    report.finish("bench_start", argv, facts, args.out)


def stage_rows(starts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for start in starts for name in start.get("stages", {}))
    return [
        {"stage": name, "median_s": float(np.median([s["stages"][name] for s in starts]))}
        for name in names
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
    with running(command) as (process, started_at, log):
        watch = Watch(f"http://127.0.0.1:{port}", process, started_at, args.timeout_s, log)
        first = {}
        port_s = watch.until(lambda: connects(port))
        asking = threading.Thread(
            target=lambda: first.update(s=watch.until(watch.embeds)), daemon=True
        )
        asking.start()
        http_s = watch.until(lambda: watch.status("/livez") is not None)
        ready_s = watch.until(lambda: watch.status("/ready") == 200)
        asking.join(args.timeout_s)
        all_s = watch.until(lambda: any("buckets compiled in" in line for _, line in log))
        metrics = watch.metrics()
    return {
        "port_s": port_s,
        "http_s": http_s,
        "ready_s": ready_s,
        "embeddings_s": first.get("s"),
        "all_s": all_s,
        "compiled": metrics.get("jaxembed_compile_count"),
        "cache_hits": metrics.get("jaxembed_compile_cache_hits"),
        "compile_s": metrics.get("jaxembed_compile_seconds"),
        "log": list(log),
    }


class Watch:
    """Asks a server that is starting."""

    def __init__(
        self, url: str, process: subprocess.Popen, started_at: float, timeout_s: float, log: list
    ):
        self._url = url
        self._process = process
        self._started_at = started_at
        self._timeout_s = timeout_s
        self._log = log

    def until(self, happened: Callable[[], bool]) -> float:
        """Seconds from the start of the process to when it happened."""
        while not happened():
            elapsed = time.monotonic() - self._started_at
            if elapsed > self._timeout_s or self._process.poll() is not None:
                lines = "\n".join(line for _, line in self._log[-20:])
                raise TimeoutError(f"the server did not come up in {elapsed:.0f} s:\n{lines}")
            time.sleep(POLL_S)
        return time.monotonic() - self._started_at

    def status(self, path: str, body: bytes | None = None) -> int | None:
        """The status of a request; None if there is no answer."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                answer.read()
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def embeds(self) -> bool:
        body = json.dumps({"model": SERVED, "input": "how long does a start take?"}).encode()
        return self.status("/v1/embeddings", body) == 200

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self._url + "/metrics", timeout=self._timeout_s) as answer:
            lines = [line.split() for line in answer.read().decode().splitlines()]
        return {line[0]: float(line[1]) for line in lines if line and line[0] in METRICS}


@contextmanager
def running(
    command: Sequence[str],
) -> Iterator[tuple[subprocess.Popen, float, list[tuple[float, str]]]]:
    """A process, when it started, and the lines it writes, with the seconds at which each came.
    Ends it after."""
    started_at = time.monotonic()
    process = subprocess.Popen(
        command, cwd=report.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log: list[tuple[float, str]] = []

    def read() -> None:
        for line in process.stdout or ():
            log.append((time.monotonic() - started_at, line.rstrip()))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process, started_at, log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        if process.stdout is not None:
            process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
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
