"""Runs a program of `peers/` in an environment of its own, and asks it over pipes."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report

PROGRAMS = Path(__file__).parent / "peers"
ENDED_S = 10.0  # that a program has to end when its input does


@dataclass(frozen=True)
class Contestant:
    """A library, and the form of the model that it runs."""

    name: str
    environment: Path  # a virtual environment
    library: str  # a name of the program
    job: dict[str, Any] = field(default_factory=dict)  # what else the program is told


class Peer:
    """A contestant in its process."""

    def __init__(self, contestant: Contestant, process: subprocess.Popen, job: dict[str, Any]):
        self.name, self._process = contestant.name, process
        job = {"library": contestant.library, "threads": os.cpu_count()} | job | contestant.job
        self.versions: dict[str, str] = self._ask(job)
        self.batch, self.seconds_of = 0, {}

    def seconds(self, method: str, *arguments: Any) -> float:
        """Call a method of the library. Returns the seconds that it took."""
        return self._ask([method, *arguments])

    def vectors(self) -> np.ndarray:
        """The embeddings of the last call, float64 `[vectors, dim]`, normalised."""
        count, encoded = self._ask(["vectors"])
        flat = np.frombuffer(base64.b64decode(encoded), "<f4").astype(np.float64)
        vectors = flat.reshape(count, -1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def choose(self, batches: Sequence[int], method: str, *arguments: Any) -> None:
        """Choose the batch size with which a method is fastest, of two calls with each."""
        runs = [
            {batch: self.seconds(method, batch, *arguments) for batch in batches} for _ in range(2)
        ]
        self.seconds_of = {batch: min(run[batch] for run in runs) for batch in batches}
        self.batch = min(batches, key=lambda batch: self.seconds_of[batch])
        print(f"{self.name}: seconds by batch size {self.seconds_of}", flush=True)

    def _ask(self, value: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} has ended; its errors are above")
        return json.loads(answer)


@contextmanager
def running(contestant: Contestant, program: str, **job: Any) -> Iterator[Peer]:
    """Run a program of `peers/` with the Python of the contestant's environment, and tell it the
    job; end its process after.

    Raises RuntimeError if the process ends by itself.
    """
    process = subprocess.Popen(
        [str(contestant.environment / "bin" / "python"), str(PROGRAMS / program)],
        cwd=report.ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Peer(contestant, process, job)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends, and so do the processes of its pool
            try:
                process.wait(ENDED_S)
            except subprocess.TimeoutExpired:
                process.terminate()


def about(peers: Sequence[Peer]) -> dict[str, Any]:
    """The versions of peers, and their seconds by batch size, as facts for JSON."""
    return {
        "versions": {one.name: one.versions for one in peers},
        "batches": {one.name: one.seconds_of for one in peers},
    }
