"""Renders the pages of PDF files in another process, so that a file that crashes or blocks the
renderer does no harm to this process. Needs the extra `pdf`."""

import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any

import msgspec
import numpy as np

from jaxembed.errors import ConfigError, InvalidImage
from jaxembed.platform.extras import require
from jaxembed.preprocessing.images.decode import LONGEST_SIDE, MAX_PIXELS

PDF_DPI = 150  # an A4 page has 1240 by 1755 pixels
PDF_TIMEOUT_S = 30.0  # the time limit for each page, and for opening a file
MAX_PAGES = 10_000  # maximum pages of a file
MAX_PDF_BYTES = 10**9
# The limit for the memory of the rendering process, in bytes. PDFium puts images and groups of
# transparent objects into bitmaps of 4 bytes a pixel: the limit allows ten bitmaps of MAX_PIXELS.
MAX_MEMORY = 4 * 10 * MAX_PIXELS
# Settings of glibc, with thresholds in bytes: memory of images is kept for the next page, in huge
# pages. If the memory were mapped again for each page, page faults would take a third of the time
# of a scanned page.
KEEPS_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
    ":glibc.malloc.hugetlb=1"
}
START_S = 60.0  # the time limit for starting the process, even on a busy machine
MAX_TEXT = 100_000  # characters of a page, which JSON spells in up to six bytes each
MAX_REPLY_BYTES = 65_536 + 6 * MAX_TEXT
COPIED_BYTES = 16 * 2**20  # a PDF file is copied in pieces of this size
OPENING, RENDERING, CLOSING = "opening the file", "rendering the page", "closing the file"
READING = "reading the text of the page"
MALFORMED_REPLY = "its reply is malformed"
_MODULE = "jaxembed.preprocessing.images.pdf_renderer"


class PdfFile:
    """A PDF file, whose pages are rendered one at a time in another process.

    A small file can keep PDFium busy for hours, exhaust memory or crash PDFium. Then only the
    rendering process ends, and a new process is started for the next page. Each open file has a
    process, so that files do not wait for each other. One process of closed files is kept for the
    next file. Threads may share a file, but only one thread at a time renders a page of it.
    """

    def __init__(self, file: Any, timeout_s: float = PDF_TIMEOUT_S):
        """Read the binary file object `file` to its end, and open the PDF file in a rendering
        process. `timeout_s` is the time limit for opening the file and for each page.

        Raises InvalidImage for a file that is damaged, encrypted or too large, takes too long, or
        has no pages or more than MAX_PAGES. Raises ConfigError if pypdfium2 is not installed, the
        disk is full, or no process can be started.
        """
        require("pdf", "PDF files")
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        try:  # use the process of a closed file
            self._renderer: _Renderer | None = _idle.pop()
        except IndexError:
            self._renderer = _Renderer()
        try:
            self._renderer.load(file)
            self.pages = self._renderer.open(timeout_s)
            if self.pages > MAX_PAGES:
                raise InvalidImage(
                    f"the PDF file has {self.pages} pages; the limit is {MAX_PAGES}: divide it"
                )
        except BaseException:
            self.close()
            raise

    def render(self, page: int, dpi: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """Render a page on white, with annotations and forms. Returns RGB values, uint8
        `[height, width, 3]`. `page` is the index of the page, from 0.

        Raises InvalidImage for a page that is damaged, has more than `max_pixels`, or takes too
        long or too much memory; and ConfigError if the disk is full or no process can be started.
        """
        with self._lock:
            assert self._renderer is not None, "the file is closed"
            return self._renderer.render(page, dpi, max_pixels, self.timeout_s)

    def text(self, page: int) -> str:
        """Return the text of a page, "" if it has none. `page` is the index of the page, from 0.
        Raises the errors of `render`, also for a text of more than MAX_TEXT characters."""
        with self._lock:
            assert self._renderer is not None, "the file is closed"
            return self._renderer.text(page, self.timeout_s)

    def close(self) -> None:
        """Close the file, and keep its rendering process for the next file."""
        with self._lock:
            renderer, self._renderer = self._renderer, None
            if renderer is not None:
                renderer.unload(self.timeout_s)
                _idle.append(renderer)


class _Reply(msgspec.Struct):
    """The answer of the rendering process to a request."""

    pages: int = 0
    height: int = 0
    width: int = 0
    text: str = ""
    refused: str | None = None  # what is wrong with the PDF file
    failed: str | None = None  # what is wrong with this machine


class _Renderer:
    """A rendering process, and a temporary file that it shares with this process. The shared file
    holds a PDF file, and after it the colours of the last page. A rendering process that fails is
    killed, and another one is started for the next page. Only one thread at a time may use this."""

    def __init__(self) -> None:
        try:
            self._shared_file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the finalizer closes it
        except OSError as error:
            raise _unwritable(error.strerror) from error
        weakref.finalize(self, self._shared_file.close)
        self._size = 0  # the size of the PDF file in bytes
        self._colours: mmap.mmap | None = None  # the mapping is reused for pages of the same size
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: SimpleQueue[bytes] = SimpleQueue()
        self._end: Callable[[], object] = lambda: None  # kills the process

    def load(self, file: Any) -> None:
        """Copy a PDF file, a binary file object, into the shared file. Raises InvalidImage if it is
        larger than MAX_PDF_BYTES, and ConfigError if the disk is full."""
        while chunk := file.read(COPIED_BYTES):
            self._size += len(chunk)
            if self._size > MAX_PDF_BYTES:
                raise InvalidImage(
                    f"the PDF file is larger than the limit of {MAX_PDF_BYTES} bytes; divide it"
                )
            remaining = memoryview(chunk)
            try:
                while remaining:  # `write` may write only a part, because the file has no buffer
                    remaining = remaining[self._shared_file.write(remaining) :]
            except OSError as error:
                raise _unwritable(error.strerror) from error

    def open(self, timeout_s: float) -> int:
        """Open the PDF file, in a new process if none is running. Returns the number of pages.
        Raises InvalidImage if the file cannot be opened in `timeout_s`, and ConfigError if no
        process can be started or the disk is full."""
        if not self._is_running:
            self._start()
        request = {"do": "open", "size": self._size, "colours_at": self._colours_at}
        pages = self._ask(request, timeout_s, OPENING).pages
        if pages < 1:
            raise self._malformed_reply(OPENING)
        return pages

    def render(self, page: int, dpi: int, max_pixels: int, timeout_s: float) -> np.ndarray:
        """Render a page as `PdfFile.render` does, in a new process if none is running."""
        if not self._is_running:
            self.open(timeout_s)
        request = {
            "do": "render",
            "page": page,
            "dpi": dpi,
            "max_pixels": max_pixels,
            "longest_side": LONGEST_SIDE,
        }
        reply = self._ask(request, timeout_s, RENDERING)
        if min(reply.height, reply.width) < 1 or reply.height * reply.width > max_pixels:
            raise self._malformed_reply(RENDERING)
        shape = reply.height, reply.width, 3
        size = math.prod(shape)
        if self._colours is None or len(self._colours) != size:
            try:
                self._colours = mmap.mmap(self._shared_file.fileno(), size, offset=self._colours_at)
            except ValueError as error:  # the shared file is shorter than the reply says
                raise self._malformed_reply(RENDERING) from error
        return np.frombuffer(self._colours, np.uint8).reshape(shape).copy()

    def text(self, page: int, timeout_s: float) -> str:
        """Return the text of a page as `PdfFile.text` does, in a new process if none is running."""
        if not self._is_running:
            self.open(timeout_s)
        request = {"do": "text", "page": page, "max_text": MAX_TEXT}
        return self._ask(request, timeout_s, READING).text

    def unload(self, timeout_s: float) -> None:
        """Close the PDF file, and empty the shared file."""
        if self._is_running:
            with suppress(InvalidImage):  # if the process fails, `_ask` has killed it
                self._ask({"do": "close"}, timeout_s, CLOSING)
        self._size, self._colours = 0, None
        self._shared_file.seek(0)
        self._shared_file.truncate()

    @property
    def _colours_at(self) -> int:
        """The offset of the colours in the shared file: the first after the PDF file at which a
        memory mapping may start."""
        return -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        """Start a rendering process, which searches modules in the same folders as this process.
        Raises ConfigError if it does not start."""
        self._end()
        error_offset = self._shared_file.seek(
            0, os.SEEK_END
        )  # from here on the process writes the errors of its start
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        try:
            self._process = subprocess.Popen(
                # -P: search modules only in PYTHONPATH, not in the working directory as well
                [sys.executable, "-P", "-m", _MODULE, str(MAX_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._shared_file,
                env=KEEPS_MEMORY | os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            raise ConfigError(f"{sys.executable!r} cannot be started: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)
        self._replies = SimpleQueue()
        threading.Thread(
            target=_receive,
            args=(self._process.stdout, self._replies),
            name="pdf-replies",
            daemon=True,
        ).start()
        try:
            self._exchange(b"", START_S)  # wait until the process is ready
        except (TimeoutError, _ProcessLost) as error:
            self._shared_file.seek(error_offset)
            error_lines = (
                self._shared_file.read(MAX_REPLY_BYTES).decode(errors="replace").splitlines()
            )
            raise ConfigError(
                f"the process that renders pages of PDF files does not start: {error}"
                + "".join(f", {line}" for line in error_lines[-1:])
            ) from error

    def _ask(self, request: dict[str, Any], timeout_s: float, doing: str) -> _Reply:
        """Send a request, and return the reply. `doing` is the name of the step in messages.

        Raises InvalidImage if the process refuses the PDF file, takes too long or ends, and
        ConfigError if it reports an error of this machine, such as a full disk.
        """
        try:
            reply = self._exchange(msgspec.json.encode(request) + b"\n", timeout_s)
        except TimeoutError as error:
            raise InvalidImage(
                f"{doing} {error}; raise --pdf-timeout if you trust the file, or leave it out"
            ) from error
        except _ProcessLost as error:
            raise _crash(doing, str(error)) from error
        if reply.failed is not None:
            raise _unwritable(reply.failed)
        if reply.refused is not None:
            raise InvalidImage(reply.refused)
        return reply

    def _exchange(self, request: bytes, timeout_s: float) -> _Reply:
        """Send `request`, a line of JSON, to the process, and wait for the reply. If `request` is
        empty, only wait for the reply that the process sends when it is ready.

        Raises TimeoutError, and _ProcessLost if the process ended or its reply is malformed. After
        any error the process is killed.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        line = b""
        try:
            with suppress(OSError):  # if the process has ended, an empty reply follows
                process.stdin.write(request)
                process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
            return msgspec.json.decode(line, type=_Reply)
        # Kill the process even after an interrupt: a late reply would be taken for the next one.
        except BaseException as error:
            self._end()
            if isinstance(error, Empty):
                raise TimeoutError(f"takes more than {timeout_s:g} seconds") from None
            if isinstance(error, msgspec.MsgspecError):
                reason = MALFORMED_REPLY
                if not line:
                    reason = f"exit status {process.returncode}"
                    with suppress(ValueError):  # raised if no signal has ended the process
                        reason = signal.Signals(-process.returncode).name
                raise _ProcessLost(reason) from error
            raise

    def _malformed_reply(self, doing: str) -> InvalidImage:
        """Kill the process after a reply with impossible values, because its memory may be
        corrupted. Returns the error to raise."""
        self._end()
        return _crash(doing, MALFORMED_REPLY)


class _ProcessLost(Exception):
    """The rendering process ended, or its reply is malformed. The message says which of the two."""


def _crash(doing: str, how: str) -> InvalidImage:
    """Return the error for a crash of the rendering process. `doing` is the step in which it
    crashed, and `how` is how it ended."""
    return InvalidImage(
        f"{doing} crashed ({how}): the file is damaged, or needs more than "
        f"{MAX_MEMORY / 10**9:g} GB of memory; save it again, or choose a lower --pdf-dpi"
    )


def _receive(output: IO[bytes], replies: "SimpleQueue[bytes]") -> None:
    """Queue the lines that a process writes to `output`, and an empty line when it ends. If two
    lines wait in the queue, although there is at most one request, stop as if it had ended."""
    with output:
        while replies.qsize() < 2 and (line := output.readline(MAX_REPLY_BYTES)):
            replies.put(line)
    replies.put(b"")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, wait until it has ended, and close its standard input."""
    assert process.stdin is not None
    process.kill()
    process.wait()
    with suppress(OSError):  # raised if the process did not read a request
        process.stdin.close()


def _unwritable(reason: str | None) -> ConfigError:
    """Return the error to raise if the temporary file cannot be written."""
    return ConfigError(
        f"cannot write the temporary file for pages of PDF files: {reason}; set the environment "
        "variable TMPDIR to a directory that has room"
    )


# The process of a closed file is kept for the next file, because starting one takes 0.1 s.
_idle: deque[_Renderer] = deque(maxlen=1)
