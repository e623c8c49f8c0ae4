"""Real servers made slow on purpose: the doctor names the cause that was planted, and on a healthy
one it names none.

Tests share their machine with others, which the doctor may find as well: "something else uses the
machine" may stand before what was planted, and on the healthy server only where this test sees the
same.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from jaxembed.models import native
from jaxembed.platform.cores import MAX_WAITED
from jaxembed.runtime.diagnostics.facts import Examination
from jaxembed.runtime.diagnostics.findings import OTHERS_SHARE
from jaxembed.runtime.diagnostics.machine import has_avx512_bf16, machine_counts
from jaxembed.tools.doctor.probe import ask

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0  # for what must happen: reached only when it doesn't
TUNED_GLIBC = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}
POLL_S = 0.2  # asked again and again without a pause, the server would have work
BUSY = "something else uses the machine"
GRID = "[[1, 16], [16, 16], [1, 32], [1, 64], [16, 64]]"
SERVE = "from jaxembed.cli import main; main()"
ON_ONE_CORE = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {SERVE}"
PR_SET_THP_DISABLE = 41  # prctl.h
WITHOUT_HUGE_PAGES = (
    f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_THP_DISABLE}, 1, 0, 0, 0); {SERVE}"
)
# Of each row length only what is needed first is ever compiled.
SERVE_COLD = (
    "import threading\n"
    "from jaxembed.engine.replica import Replica\n"
    "usual = Replica.lower\n"
    "def lower(self, bucket, for_any):\n"
    "    if bucket.rows > 1: threading.Event().wait()\n"
    "    return usual(self, bucket, for_any)\n"
    f"Replica.lower = lower\n{SERVE}"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="it plants by ways of Linux"),
]
on_two_cores = pytest.mark.skipif(os.cpu_count() == 1, reason="there is one core only")
with_native_kernels = pytest.mark.skipif(
    not has_avx512_bf16() or native.find_compiler() is None,
    reason="this machine has no native kernels",
)


class Served:
    def __init__(self, process: subprocess.Popen, url: str):
        self.url = url
        self.process = psutil.Process(process.pid)

    def examination(self) -> Examination:
        (one,) = ask(self.url, None).values()
        return one

    def wait_compiled(self, log: list[str]) -> None:
        """Until every bucket is."""
        while True:
            programs = self.examination().facts.programs
            if programs.ready and programs.compiled == programs.buckets:
                return
            assert self.process.is_running(), "".join(log)
            time.sleep(POLL_S)

    def post(self, texts: list[str]) -> int:
        """The status of a request; the vectors are left unread."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=WAIT_S)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json", "Accept": "application/octet-stream"}
            connection.request("POST", "/embed", json.dumps({"inputs": texts}), headers)
            return connection.getresponse().status

    def asked(self, count: int, text: str = "the cat sat") -> None:
        """Lone queries, one after the other."""
        for _ in range(count):
            assert self.post([text]) == 200

    def named(self, cause: str) -> None:
        """Wait until the doctor names the cause, and hold it against what else it names: nothing
        worse but that the machine is busy."""
        causes: list[str] = []
        deadline = time.monotonic() + WAIT_S
        while cause not in causes:
            assert time.monotonic() < deadline, causes
            time.sleep(POLL_S)
            causes = [finding.cause for finding in self.examination().findings]
        assert set(causes[: causes.index(cause)]) <= {BUSY}


def iter_until(lines: Iterable[str], words: str) -> Iterator[str]:
    for line in lines:
        yield line
        if words in line:
            return


@pytest.fixture(name="cache", scope="module")
def _cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(name="serve")
def _serve(tiny_checkpoint, cache):
    """Start a server of a tiny model with these flags, and a grid of few buckets unless `grid` is
    None. With `compiled` every bucket is compiled when it is there."""

    @contextlib.contextmanager
    def serve(
        *flags: str,
        grid: str | None = GRID,
        program: str = SERVE,
        compiled: bool = True,
        **environment: str,
    ) -> Iterator[Served]:
        if grid is not None:
            (cache / "buckets.json").write_text(f'{{"buckets": {grid}}}')
            flags = (*flags, "--buckets", str(cache / "buckets.json"))
        command = [sys.executable, "-c", program, "serve", str(tiny_checkpoint), "--port", "0"]
        process = subprocess.Popen(
            [*command, "--cache-dir", str(cache), *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
        )
        with contextlib.ExitStack() as stack:
            stack.callback(process.stderr.close)
            stack.callback(process.wait)
            stack.callback(process.kill)
            log = list(iter_until(process.stderr, "listening on"))
            assert "listening on" in log[-1], "".join(log)
            served = Served(process, log[-1].split()[-1])
            rest = threading.Thread(target=log.extend, args=(process.stderr,))
            rest.start()
            stack.callback(rest.join)
            stack.callback(process.kill)
            if compiled:
                served.wait_compiled(log)
            yield served

    return serve


def test_a_healthy_idle_server_has_no_finding(serve):
    started_at, busy_before = time.monotonic(), machine_counts()["busy"]
    with serve(grid=None) as served:
        served.asked(20)
        command = [sys.executable, "-m", "jaxembed.cli", "doctor", served.url, "--probe"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=WAIT_S)
        examination = served.examination()
        others_s = machine_counts()["busy"] - busy_before - sum(served.process.cpu_times()[:2])
    causes = [finding.cause for finding in examination.findings]
    if BUSY in causes:  # is it? Timings may have been taken while it was
        seconds = (time.monotonic() - started_at) * len(os.sched_getaffinity(0))
        is_busy = others_s / seconds > OTHERS_SHARE / 2
        assert is_busy or examination.facts.programs.lost_share > MAX_WAITED
        causes.remove(BUSY)
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Nothing is wrong with this server." in done.stdout
    assert causes == []
    assert "Probe: 20 single queries were answered" in done.stdout


@pytest.mark.parametrize(
    ("cause", "flags", "options"),
    [
        pytest.param(
            *("the native kernels are not used", ["--kernels", "xla", "--dtype", "bfloat16"], {}),
            marks=with_native_kernels,
        ),
        pytest.param(
            "bfloat16 would be faster",
            ["--dtype", "float32"],
            {},
            marks=pytest.mark.skipif(not has_avx512_bf16(), reason="no bfloat16 on this CPU"),
        ),
        pytest.param(
            "the process may use only one core", [], {"program": ON_ONE_CORE}, marks=on_two_cores
        ),
        ("freed memory is not kept for the next batch", [], TUNED_GLIBC),
        ("huge pages are off", [], {"program": WITHOUT_HUGE_PAGES}),
    ],
)
def test_how_a_server_was_started(serve, cause, flags, options):
    with serve(*flags, **options) as served:
        served.named(cause)


def test_a_cold_start(serve):
    with serve(program=SERVE_COLD, compiled=False) as served:
        served.named("not every bucket is compiled")
        assert served.examination().bound_by == "compiling"


@pytest.mark.parametrize(
    ("cause", "grid", "text"),
    [
        ("the buckets do not fit the traffic", "[[1, 64], [4, 64]]", "the cat sat"),
        ("texts are truncated", GRID, "the cat sat on a red mat " * 30),
    ],
)
def test_lone_queries(serve, cause, grid, text):
    with serve(grid=grid) as served:
        served.asked(20, text)
        served.named(cause)
