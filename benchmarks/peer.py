"""Runs a program of `peers/` in an environment of its own, and asks it over pipes."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import report

ENDED_S = 10.0  # that a program has to end when its input does


class Peer:
    """A program that answers each line of its input with a line of JSON."""

    def __init__(self, name: str, process: subprocess.Popen):
        self.name = name
        self._process = process

    def ask(self, line: str) -> Any:
        """Send a line to the process and return its answer. Raises RuntimeError if it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} has ended; its errors are above")
        return json.loads(answer)


@contextmanager
def running(name: str, python: Path, program: Path) -> Iterator[Peer]:
    """Start a program with the Python of its environment; end its process after."""
    process = subprocess.Popen(
        [str(python), str(program)],
        cwd=report.ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Peer(name, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends, and so do the processes of its pool
            try:
                process.wait(ENDED_S)
            except subprocess.TimeoutExpired:
                process.terminate()
