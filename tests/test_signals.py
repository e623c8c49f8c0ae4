"""A signal ends the server while it loads, also where the system's default is to ignore it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no SIGTERM on Windows")

LOADING = """
import hashlib, sys, threading
from jaxembed import cli, embedder

class Loading:
    def __init__(self, *_, **__):
        print("loading", flush=True)
        {wait}

embedder.Embedder = Loading
sys.argv = ["jaxembed", "serve", "--port", "0", "--cache-dir", sys.argv[1]]
cli.main()
"""
IN_PYTHON = "threading.Event().wait()"
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # no signal interrupts it

SERVING = """
import logging, sys, threading
from fake_embedder import FakeEmbedder
from jaxembed.config import ServerConfig
from jaxembed.server.models import Models
from jaxembed.server.run import run
from jaxembed.signals import end_at_signals

class Slow(FakeEmbedder):
    def drain(self):
        print("draining", flush=True)
        import signal
        signal.raise_signal(signal.SIGTERM)
        threading.Event().wait()  # a drain that takes its time

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
end_at_signals()
run(Models([Slow()]), ServerConfig(port=0))
"""


# As for process 1, to which signals without a handler do nothing.
IGNORING_SIGNALS = ["sh", "-c", 'trap "" TERM INT; exec "$@"', "sh"]


def start(program, *arguments):
    here = Path(__file__).parent
    return subprocess.Popen(
        [*IGNORING_SIGNALS, sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_line(process, word):
    while word not in (line := process.stdout.readline()):
        assert line, "the process ended early"


@pytest.mark.parametrize(
    ("wait", "number", "status"),
    [(IN_PYTHON, signal.SIGINT, 130), (IN_C, signal.SIGTERM, 143)],
)
def test_a_signal_ends_a_server_that_loads(tmp_path, wait, number, status):
    with start(LOADING.format(wait=wait), str(tmp_path / "cache")) as process:
        try:
            wait_for_line(process, "loading")
            process.send_signal(number)
            assert process.wait(60) == status
            assert f"{number.name}: exiting at once\n" in process.stdout.read()
        finally:
            process.kill()


def test_a_log_that_takes_nothing_holds_up_no_signal(tmp_path):
    """As where nobody reads the pipe, and another thread waits for room in it."""
    wait = "import logging; logging.root.handlers[0].acquire(); threading.Event().wait()"
    with start(LOADING.format(wait=wait), str(tmp_path / "cache")) as process:
        try:
            wait_for_line(process, "loading")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()


def test_a_second_signal_ends_a_server_that_drains():
    with start(SERVING) as process:
        try:
            wait_for_line(process, "listening on")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
            assert "SIGTERM: exiting at once\n" in process.stdout.read()
        finally:
            process.kill()
