"""A server in a process of its own."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 60.0
QUICK = (str(Path(__file__).with_name("quick.py")),)  # the program that starts in less time


@contextmanager
def served(
    *arguments: str, program: Sequence[str] = ("-m", "jaxembed.cli")
) -> Iterator[tuple[str, int]]:
    """Serve with these arguments, on the CPU and on any port: (url, pid). At the end it must stop
    cleanly at SIGTERM, which a test may send before."""
    with subprocess.Popen(
        [sys.executable, *program, "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "listening" in line).split()[-1]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield url, process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
