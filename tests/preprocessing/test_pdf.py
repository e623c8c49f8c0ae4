"""Pages of PDF files as images, and the process that renders them."""

import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import psutil
import pytest
from fakes import WAIT_S, until
from pdf_sources import crowded, doubled, endless, pdf

from jaxembed.errors import ConfigError, InvalidImage
from jaxembed.preprocessing.images import pdf as pdf_module
from jaxembed.preprocessing.images.pdf import PdfFile

pytest.importorskip("pypdfium2")

RED, BLUE = (255, 0, 0), (0, 0, 255)
SOON_S = 0.3  # a time limit that hostile pages are to reach


@pytest.fixture(name="opened")
def _opened(closed) -> Callable[[bytes], PdfFile]:
    def opened(data: bytes) -> PdfFile:
        file = PdfFile(BytesIO(data))
        closed.callback(file.close)
        return file

    return opened


def process_of(file: PdfFile) -> psutil.Process:
    assert file._renderer is not None
    assert file._renderer._process is not None
    return psutil.Process(file._renderer._process.pid)


def is_running(file: PdfFile) -> bool:
    assert file._renderer is not None
    return file._renderer._is_running


def is_blue(page: np.ndarray) -> bool:
    return bool((page == np.uint8(BLUE)).all())


@pytest.mark.parametrize(("dpi", "sides"), [(72, (72, 36)), (150, (150, 75)), (100, (100, 50))])
def test_each_page_has_its_colours_at_the_resolution_asked_for(opened, dpi, sides):
    file = opened(pdf([RED, BLUE]))
    assert file.pages == 2
    for page, colour in enumerate((RED, BLUE)):
        found = file.render(page, dpi)
        assert (found.shape, found.dtype) == ((*sides, 3), np.uint8)
        np.testing.assert_array_equal(found, np.broadcast_to(np.uint8(colour), found.shape))
    file.close()
    file = opened(pdf([RED], width=35, height=71))
    assert file.render(0, 100).shape == (99, 49, 3)  # whole pixels


@pytest.mark.parametrize("data", [b"", b"no file", pdf([RED])[:60], pdf([])])
def test_a_broken_file_is_refused_even_after_an_encrypted_one(opened, data):
    with pytest.raises(InvalidImage, match="is encrypted"):
        opened(pdf([RED], encrypted=True))
    with pytest.raises(InvalidImage, match=f"a file of {len(data)} bytes is not a PDF file, or is"):
        opened(data)


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        ("MAX_PAGES", 3, "has 4 pages; the limit is 3: divide it"),
        ("MAX_PDF_BYTES", 300, "larger than the limit of 300 bytes"),
    ],
)
def test_a_file_with_too_many_pages_or_bytes_is_refused(opened, limit, most, message, monkeypatch):
    monkeypatch.setattr(pdf_module, limit, most)
    with pytest.raises(InvalidImage, match=message):
        opened(pdf([RED] * 4))


def test_a_page_that_is_too_large_for_an_image_is_refused_with_the_flag_that_helps(opened):
    for width, height, dpi, message in (
        (14_400, 14_400, 144, r"829440000 pixels \(28800 by 28800\) at 144 dpi.*--pdf-dpi"),
        (0.4, 24_000_000, 150, "1 by 50000000 pixels at 150 dpi; the limit for a side is 65535"),
    ):
        file = opened(pdf([RED], width=width, height=height))
        with pytest.raises(InvalidImage, match=message):
            file.render(0, dpi)


def test_a_damaged_page_is_refused_and_the_others_are_not(opened):
    damaged = pdf([RED, BLUE]).replace(b"/Type /Page /Parent", b"/Type /Pake /Parent", 1)
    file = opened(damaged)
    with pytest.raises(InvalidImage, match="the page is damaged"):
        file.render(0, 72)
    assert file.render(1, 72)[0, 0].tolist() == list(BLUE)


@pytest.mark.parametrize("hostile", [endless, doubled, crowded])
def test_a_page_that_takes_too_long_is_refused_and_the_next_page_and_file_are_rendered(
    opened, hostile
):
    file = opened(hostile([RED, BLUE]))
    file.timeout_s = SOON_S
    with pytest.raises(InvalidImage, match=r"page takes more than 0\.3 s.* raise --pdf-timeout"):
        file.render(0, 72)
    file.timeout_s = WAIT_S
    assert is_blue(file.render(1, 72))
    file.close()
    file = opened(pdf([BLUE]))
    assert is_blue(file.render(0, 72))


@pytest.fixture(name="no_idle_process")
def _no_idle_process(monkeypatch):
    """Files that are opened have a new process, which no later file has."""
    monkeypatch.setattr(pdf_module, "_idle", deque(maxlen=0))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
@pytest.mark.usefixtures("no_idle_process")
def test_a_page_that_takes_too_much_memory_is_refused_and_the_next_is_rendered(opened, monkeypatch):
    monkeypatch.setattr(pdf_module, "MAX_MEMORY", 100_000_000)
    file = opened(doubled([RED, BLUE]))
    with pytest.raises(InvalidImage, match=r"crashed \(SIGABRT\): .* more than 0\.1 GB of"):
        file.render(0, 72)
    assert is_blue(file.render(1, 72))


def amid_a_page(file: PdfFile, act: Callable[[], object]) -> threading.Thread:
    """Have a thread act once PDFium is busy with the next page."""
    process = process_of(file)
    before = sum(process.cpu_times()[:2])

    def wait_and_act() -> None:
        until(lambda: sum(process.cpu_times()[:2]) > before + 0.05)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_a_process_that_is_killed_amid_a_page_is_replaced(opened):
    file = opened(endless([RED, BLUE]))
    killing = amid_a_page(file, process_of(file).kill)
    with pytest.raises(InvalidImage, match=r"rendering the page crashed \(SIGKILL\)"):
        file.render(0, 72)
    killing.join()
    assert is_blue(file.render(1, 72))


def test_a_process_that_is_stopped_is_replaced(opened):
    file = opened(pdf([RED, BLUE]))
    process_of(file).suspend()
    file.timeout_s = SOON_S
    with pytest.raises(InvalidImage, match="rendering the page takes more than"):
        file.render(0, 72)
    file.timeout_s = WAIT_S
    assert is_blue(file.render(1, 72))
    process_of(file).suspend()
    file.timeout_s = SOON_S
    file.close()  # which the process does not do
    file = opened(pdf([BLUE]))
    assert is_blue(file.render(0, 72))
    process = process_of(file)
    file.close()
    process.suspend()  # it is kept for the next file
    with pytest.raises(InvalidImage, match=r"opening the file takes more than 0\.3 seconds"):
        PdfFile(BytesIO(pdf([BLUE])), SOON_S)


def test_after_an_interrupt_a_page_has_its_own_colours(opened):
    class Interrupted(SimpleQueue):
        def get(self, timeout: float) -> bytes:
            raise KeyboardInterrupt

    file = opened(pdf([RED, BLUE]))
    process_of(file).suspend()  # it answers nothing
    file._renderer._replies = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        file.render(0, 72)
    assert is_blue(file.render(1, 72))


BROKEN = """
import sys
print("{}", flush=True)
for request in sys.stdin:
    print(open("reply").read(), flush=True)
"""


@pytest.mark.parametrize(
    "reply",
    [
        "no JSON",
        '{"pages": "1"}',
        '{"pages": 0}',
        '{"pages": 1, "height": 0, "width": 5}',
        '{"pages": 1, "height": 60000, "width": 60000}',
        '{"pages": 1, "height": 100, "width": 100}',  # bytes that it did not write
        "x" * 10_000_000,
        "{}\n" * 1_000_000,
    ],
)
@pytest.mark.usefixtures("no_idle_process")
def test_replies_that_make_no_sense_are_refused(opened, reply, tmp_path, monkeypatch):
    (tmp_path / "reply").write_text(reply)
    (tmp_path / "broken_renderer.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pdf_module, "_MODULE", "broken_renderer")
    with pytest.raises(InvalidImage, match=r"crashed \(its reply is malformed\)"):
        opened(pdf([BLUE])).render(0, 72)


def test_a_process_is_kept_for_the_next_file_and_lets_go_of_the_last_one(opened):
    file = opened(pdf([RED]) + b"%" * 10_000_000)
    process, renderer = process_of(file), file._renderer
    file.render(0, 72)
    file.close()
    assert renderer is not None
    assert os.fstat(renderer._shared_file.fileno()).st_size == 0
    assert not [one for one in process.memory_maps(grouped=False) if "deleted" in one.path]
    file = opened(pdf([BLUE]))
    assert process_of(file) == process
    assert is_blue(file.render(0, 72))


def test_threads_share_files(opened):
    files = [opened(pdf([RED, BLUE] * 4)), opened(pdf([BLUE, RED] * 4))]
    assert process_of(files[0]) != process_of(files[1])
    with ThreadPoolExecutor(8) as threads:
        pages = threads.map(lambda k: files[k % 2].render(k // 2 % 8, 72), range(80))
        assert [is_blue(page) for page in pages] == [(k + k // 2) % 2 == 1 for k in range(80)]


START = """
import io, sys
sys.path[:0] = sys.argv[1:]
from pdf_sources import endless, pdf
from jaxembed.preprocessing.images.pdf import PdfFile
"""


def script(code: str, *paths: str | Path) -> list[str]:
    """A command that runs code beside the modules of the tests, as a program outside of Python's
    path does."""
    return [sys.executable, "-P", "-W", "error", "-c", START + code, *map(str, paths), TESTS]


TESTS = str(Path(__file__).parents[1])
RENDERS = "file = PdfFile(io.BytesIO(pdf([(0, 0, 255)]))); print(file.render(0, 72)[0, 0])"
HANGS = """
file = PdfFile(io.BytesIO(endless([(0, 0, 255)])))
print(file._renderer._process.pid, flush=True)
file.render(0, 72)
"""


@pytest.fixture(name="hanging")
def _hanging() -> Iterator[tuple[subprocess.Popen, psutil.Process]]:
    """A process that waits for a page, and the process that renders it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        script(HANGS), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        until(lambda: child.cpu_times().user > 0.3)  # it takes a third of that to start
        yield process, child
        process.kill()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, also where nobody waits for orphans."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_process_ends_amid_a_page_with_the_one_that_started_it(hanging):
    process, child = hanging
    process.kill()
    process.wait(WAIT_S)
    until(lambda: has_ended(child))


@pytest.mark.parametrize("closing", ["", "; del file"])
def test_an_interpreter_exits_without_a_word_whatever_is_open(closing):
    done = subprocess.run(script(RENDERS + closing), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[  0   0 255]\n", "")


def test_the_working_directory_is_not_searched_for_modules(tmp_path):
    for name in ("ctypes", "json", "jaxembed"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the working directory')")
    done = subprocess.run(script(RENDERS), capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "[  0   0 255]\n", done.stderr


@pytest.mark.usefixtures("no_idle_process")
def test_a_process_that_does_not_start_is_told_with_the_reason(opened, monkeypatch):
    monkeypatch.setattr(pdf_module, "_MODULE", "no_such_module")
    with pytest.raises(ConfigError, match=r"does not start: exit status 1, .*No module named no_s"):
        opened(pdf([RED]))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ConfigError, match=r"'/no/such/python' cannot be started: .* No such file"):
        opened(pdf([RED]))


@pytest.mark.usefixtures("no_idle_process")
def test_without_a_temporary_folder_the_variable_that_names_one_is_told(
    opened, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"cannot write the temporary file .*: No .*TMPDIR"):
        opened(pdf([RED]))


@pytest.mark.skipif(sys.platform != "linux", reason="room is reserved before it is written to")
def test_a_full_disk_is_no_fault_of_a_page(opened):
    file = opened(pdf([RED, BLUE]))
    process_of(file).rlimit(psutil.RLIMIT_FSIZE, (10_000, 10_000))
    with pytest.raises(ConfigError, match="File too large; set the environment variable TMPDIR"):
        file.render(0, 72)
    process_of(file).kill()
    until(lambda: not is_running(file))
    assert is_blue(file.render(1, 72))
