"""Starts a server for a benchmark, ours or Infinity, measures loads on it, and ends it."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import load, report, workloads
from benchmarks.load import Load, Target
from jaxembed.checkpoints.hub import DEFAULT_MODEL_PACKAGE

START_S = 240.0
POLL_S = 0.01
SERVED = "benchmark"
BEFORE, CONTROL = "before", "before, again"  # servers of an older commit, which runs twice
METRICS = ("jaxembed_compile_count", "jaxembed_bucket_timings")
COMPILED = "buckets compiled in"  # text in our server's log when every bucket is compiled
TIMED = "buckets timed"  # text in our server's log when every bucket is timed


@dataclass(frozen=True)
class Server:
    """A server that is starting or running."""

    url: str
    process: subprocess.Popen
    target: Target
    log: list[str] = field(default_factory=list)  # the lines that it has written
    started_at: float = field(default_factory=time.monotonic)

    def until(self, happened: Callable[[], bool]) -> float:
        """Wait until `happened()`. Returns the seconds since the start of the process.

        Raises TimeoutError, with the last lines of the log, if it takes too long or the process
        ends.
        """
        while not happened():
            elapsed = time.monotonic() - self.started_at
            if elapsed > START_S or self.process.poll() is not None:
                lines = "\n".join(self.log[-20:])
                raise TimeoutError(f"the server did not come up in {elapsed:.0f} s:\n{lines}")
            time.sleep(POLL_S)
        return time.monotonic() - self.started_at

    def says(self, text: str) -> bool:
        """Whether the log contains a text."""
        return any(text in line for line in self.log)

    def answers(self, path: str, body: bytes | None = None) -> bool:
        """Whether the server answers a request with status 200."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=START_S) as answer:
                answer.read()
                return True
        except OSError:  # also of another status
            return False

    def metrics(self) -> dict[str, float]:
        """The METRICS of our server: what it has compiled and timed so far."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=START_S) as answer:
            lines = [line.split() for line in answer.read().decode().splitlines()]
        return {line[0]: float(line[1]) for line in lines if line and line[0] in METRICS}

    def cpu_s(self) -> tuple[float, float]:
        """The CPU seconds of the process, and of its child processes."""
        process = psutil.Process(self.process.pid)
        own, *others = (p.cpu_times() for p in (process, *process.children(recursive=True)))
        return own.user + own.system, sum(t.user + t.system for t in others)

    def measure(
        self, loads: Sequence[tuple[Load, Iterator[bytes]]], seconds: float, seed: int = 0
    ) -> list[dict[str, Any]]:
        """Run loads at once. Returns a row for each, with the share of a core that the client
        used."""
        start, cpu = time.perf_counter(), time.process_time()
        rows = asyncio.run(load.run(self.target, loads, seconds, seed))
        share = (time.process_time() - cpu) / (time.perf_counter() - start)
        return [row | {"client_cpu": share} for row in rows]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of our server's model, and of the texts that are sent to it."""
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    workloads.add_arguments(parser)
    parser.add_argument("--texts", type=int, default=8192, help="different ones in bulk")


@contextmanager
def starting(
    model: str | None, flags: Sequence[str] = (), checkout: Path = report.ROOT
) -> Iterator[Server]:
    """Start our server from a checkout, and end it after the context."""
    port = free_port()
    command = [sys.executable, "-m", "jaxembed.cli", "serve", *([model] if model else [])]
    command += ["--port", str(port), "--served-model-name", SERVED, *flags]
    with running(command, port, "/v1/embeddings", checkout) as server:
        yield server


@contextmanager
def jaxembed(
    model: str | None,
    flags: Sequence[str] = (),
    checkout: Path = report.ROOT,
    until: str = TIMED,
) -> Iterator[Server]:
    """Run our server, and wait until it is ready and its log contains `until`: by default until
    every bucket is compiled and timed. Raises TimeoutError."""
    with starting(model, flags, checkout) as server:
        server.until(lambda: server.says(until))
        server.until(lambda: server.answers("/ready"))
        yield server


def jaxembed_before(
    model: str | None, flags: Sequence[str], checkout: Path
) -> dict[str, AbstractContextManager[Server]]:
    """Two equal servers of an older commit: the difference between them is the noise."""
    return {name: jaxembed(model, flags, checkout) for name in (BEFORE, CONTROL)}


@contextmanager
def infinity(environment: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Run Infinity's torch engine with all-MiniLM-L6-v2 from an environment that has both.

    Raises TimeoutError if it takes too long to start.
    """
    port = free_port()
    command = [str(environment / "bin" / "infinity_emb"), "v2", "--served-model-name", SERVED]
    command += ["--model-id", str(packaged_model(environment)), "--engine", "torch"]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port), *flags]
    with running(command, port, "/embeddings") as server:
        server.until(lambda: server.answers("/models"))
        yield server


def packaged_model(environment: Path) -> Path:
    """Files of all-MiniLM-L6-v2 in an environment. Raises FileNotFoundError."""
    pattern = f"lib/python3*/site-packages/{DEFAULT_MODEL_PACKAGE}/model"
    for folder in environment.glob(pattern):
        return folder
    raise FileNotFoundError(f"no {pattern} in {environment}: make bench-peers installs it")


@contextmanager
def running(
    command: Sequence[str], port: int, route: str, folder: Path = report.ROOT
) -> Iterator[Server]:
    """Run a process that will serve embeddings on a route of a port, and end it after."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    url = f"http://127.0.0.1:{port}"
    server = Server(url, process, Target(url + route, SERVED))

    def read() -> None:
        for line in process.stdout or ():
            server.log.append(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield server
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
