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
from jaxembed import cli
from jaxembed.runtime import model

class Loading:
    def __init__(self, *_, **__):
        print("loading", flush=True)
        {wait}

model.LoadedModel = Loading
sys.argv = ["jaxembed", "serve", "--port", "0", "--cache-dir", sys.argv[1]]
cli.main()
"""
IN_PYTHON = "threading.Event().wait()"
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # no signal interrupts it

SERVING = """
import logging, sys, threading
from fake_embedder import FakeEmbedder
from jaxembed.config import ServerConfig
from jaxembed.server.registry.models import Models
from jaxembed.server.run import run
from jaxembed.platform.signals import end_at_signals

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

EMBEDDING = """
import sys, threading
from types import SimpleNamespace
from jaxembed import cli
from jaxembed.bulk import computations, destination, run
from jaxembed.cli import embed

def run_job(computation, rows, output, **_):
    with destination.destination(output).writing("part-00000.parquet") as path:
        path.write_text("the first half")
        print("embedding", path.name, flush=True)
        {wait}

model = SimpleNamespace(telemetry=None)
embed.load_for_outputs = lambda *_: SimpleNamespace(model=model, close=lambda: None)
computations.EmbedRows = lambda *_: SimpleNamespace(describe=lambda: {{"task": "embed"}})
run.run_job = run_job
sys.argv = ["jaxembed", "embed", *sys.argv[1:]]
cli.main()
"""


# As for process 1, to which signals without a handler do nothing.
IGNORING_SIGNALS = ["sh", "-c", 'trap "" TERM INT; exec "$@"', "sh"]


def start(program, *arguments):
    here = Path(__file__).parents[1]
    return subprocess.Popen(
        [*IGNORING_SIGNALS, sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process, word, number):
    """The status of a program that gets a signal once it says a word, and what it says after."""
    with process:
        try:
            while word not in (line := process.stdout.readline()):
                assert line, "the process ended early"
            process.send_signal(number)
            return process.wait(60), process.stdout.read()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("wait", "number", "status"), [(IN_PYTHON, signal.SIGINT, 130), (IN_C, signal.SIGTERM, 143)]
)
def test_a_signal_ends_a_server_that_loads(tmp_path, wait, number, status):
    process = start(LOADING.format(wait=wait), str(tmp_path / "cache"))
    found, said = ended(process, "loading", number)
    assert found == status
    assert f"{number.name}: exiting at once\n" in said


@pytest.mark.parametrize("wait", ["import hashlib; " + IN_C, IN_PYTHON])
def test_an_interrupted_job_ends_at_once_and_can_go_on(tmp_path, wait):
    source, out = tmp_path / "in.txt", tmp_path / "out"
    source.write_text("the cat\n")
    process = start(EMBEDDING.format(wait=wait), str(source), "-o", str(out))
    status, said = ended(process, "embedding .part-00000.", signal.SIGINT)
    assert status == 130
    assert f"run the same command again to continue after the finished parts in {out}\n" in said
    assert list(out.iterdir()) == []


def test_a_log_that_takes_nothing_holds_up_no_signal(tmp_path):
    """As where nobody reads the pipe, and another thread waits for room in it."""
    wait = "import logging; logging.root.handlers[0].acquire(); threading.Event().wait()"
    process = start(LOADING.format(wait=wait), str(tmp_path / "cache"))
    assert ended(process, "loading", signal.SIGTERM)[0] == 143


def test_a_second_signal_ends_a_server_that_drains():
    status, said = ended(start(SERVING), "listening on", signal.SIGTERM)
    assert status == 143
    assert "SIGTERM: exiting at once\n" in said
