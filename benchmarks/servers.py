"""Starts a server for a benchmark, waits until it is ready, and ends it: ours or Infinity."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import report
from benchmarks.load import Target
from jaxembed.checkpoints.hub import DEFAULT_MODEL_PACKAGE

START_S = 240.0
POLL_S = 0.01
SERVED = "benchmark"
METRICS = (
    "jaxembed_compile_count",
    "jaxembed_compile_cache_hits",
    "jaxembed_compile_seconds",
    "jaxembed_bucket_timings",
)
COMPILED = "buckets compiled in"  # text in our server's log when every bucket is compiled
TIMED = "buckets timed"  # text in our server's log when every bucket is timed


@dataclass(frozen=True)
class Server:
    """A running server."""

    target: Target
    process: psutil.Process
    metrics: Callable[[], dict[str, float]] = dict  # its METRICS: what it compiled and timed

    def cpu_s(self) -> float:
        """The CPU time in seconds that it has used, with its child processes."""
        times = [p.cpu_times() for p in (self.process, *self.process.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def engine_cpu_s(self) -> float:
        """The CPU time in seconds that it has used, without that of its child processes."""
        times = self.process.cpu_times()
        return times.user + times.system

    def idle_share(self, seconds: float = 3.0) -> float:
        """The share of a core that it uses while idle. Sleeps for `seconds` to measure it."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds


@contextmanager
def jaxembed(
    model: str | None,
    flags: Sequence[str] = (),
    checkout: Path = report.ROOT,
    until: str = TIMED,
) -> Iterator[Server]:
    """Run our server from a checkout, and end it after the context.

    It waits until the log contains `until`: by default until every bucket is compiled and timed.
    Raises TimeoutError, with the last lines of the log, if it takes too long.
    """
    port = free_port()
    command = [sys.executable, "-m", "jaxembed.cli", "serve", *([model] if model else [])]
    command += ["--port", str(port), "--served-model-name", SERVED, *flags]
    with running(command, checkout) as (process, started_at, log):
        watch = Watch(f"http://127.0.0.1:{port}", process, started_at, START_S, log)
        watch.until(lambda: any(until in line for _, line in log))
        watch.until(lambda: watch.status("/ready") == 200)
        target = Target(f"http://127.0.0.1:{port}/v1/embeddings", SERVED)
        yield Server(target, psutil.Process(process.pid), watch.metrics)


@contextmanager
def infinity(environment: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Run Infinity's torch engine with all-MiniLM-L6-v2 from an environment that has both.

    Raises TimeoutError if it takes too long to start.
    """
    port = free_port()
    command = [str(environment / "bin" / "infinity_emb"), "v2"]
    command += ["--model-id", str(packaged_model(environment)), "--engine", "torch"]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port), *flags]
    with running(command) as (process, started_at, log):
        watch = Watch(f"http://127.0.0.1:{port}", process, started_at, START_S, log)
        watch.until(lambda: watch.status("/models") == 200)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/models") as answer:
            name = json.load(answer)["data"][0]["id"]
        target = Target(f"http://127.0.0.1:{port}/embeddings", name)
        yield Server(target, psutil.Process(process.pid))


def packaged_model(environment: Path) -> Path:
    """Files of all-MiniLM-L6-v2 in an environment. Raises FileNotFoundError."""
    pattern = f"lib/python3*/site-packages/{DEFAULT_MODEL_PACKAGE}/model"
    for folder in environment.glob(pattern):
        return folder
    raise FileNotFoundError(f"no {pattern} in {environment}: make bench-peers installs it")


class Watch:
    """Sends requests to a server that is starting, whose process and log it knows."""

    def __init__(
        self, url: str, process: subprocess.Popen, started_at: float, timeout_s: float, log: list
    ):
        self._url = url
        self._process = process
        self._started_at = started_at
        self._timeout_s = timeout_s
        self._log = log

    def until(self, happened: Callable[[], bool]) -> float:
        """Wait until `happened()`. Returns the seconds since the start of the process.

        Raises TimeoutError if it takes too long or the process ends.
        """
        while not happened():
            elapsed = time.monotonic() - self._started_at
            if elapsed > self._timeout_s or self._process.poll() is not None:
                lines = "\n".join(line for _, line in self._log[-20:])
                raise TimeoutError(f"the server did not come up in {elapsed:.0f} s:\n{lines}")
            time.sleep(POLL_S)
        return time.monotonic() - self._started_at

    def status(self, path: str, body: bytes | None = None) -> int | None:
        """Send a request and return the status of its answer; None if there is none."""
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
        """Whether the server answers a request for an embedding."""
        body = json.dumps({"model": SERVED, "input": "how long does a start take?"}).encode()
        return self.status("/v1/embeddings", body) == 200

    def metrics(self) -> dict[str, float]:
        """The server's METRICS: what it has compiled and timed so far."""
        with urllib.request.urlopen(self._url + "/metrics", timeout=self._timeout_s) as answer:
            lines = [line.split() for line in answer.read().decode().splitlines()]
        return {line[0]: float(line[1]) for line in lines if line and line[0] in METRICS}


@contextmanager
def running(
    command: Sequence[str], folder: Path = report.ROOT
) -> Iterator[tuple[subprocess.Popen, float, list[tuple[float, str]]]]:
    """Run a process, and end it after the context.

    Yields the process, the time of its start (time.monotonic()), and its log: a list that grows by
    the lines it writes, each with the seconds since the start.
    """
    started_at = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
