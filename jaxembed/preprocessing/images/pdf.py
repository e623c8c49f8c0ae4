"""From a PDF file to the colours of its pages, which another process renders. Needs pypdfium2, of
the extra `pdf`."""

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
from jaxembed.preprocessing.images.decode import LONGEST_SIDE, MOST_PIXELS

PDF_DPI = 150  # an A4 page has 1240 by 1755 pixels
PDF_TIMEOUT_S = 30.0  # for each page, and for opening a file
MOST_PAGES = 10_000  # of a file
MOST_PDF_BYTES = 10**9
# Bytes of memory of the process that renders. PDFium puts images and groups of transparent objects
# into bitmaps of 4 bytes a pixel: room for ten of a page of MOST_PIXELS.
MOST_MEMORY = 4 * 10 * MOST_PIXELS
# For glibc: keep the memory of images, in huge pages. Mapping it anew for each takes a third of the
# time of a scanned page, for page faults. Thresholds in bytes.
KEEPS_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
    ":glibc.malloc.hugetlb=1"
}
START_S = 60.0  # for starting the process, on a busy machine
MOST_REPLY_BYTES = 65_536
COPIED_BYTES = 16 * 2**20  # of a PDF file at a time
OPENING, RENDERING, CLOSING = "opening the file", "rendering the page", "closing the file"
NONSENSE = "its answer makes no sense"
_MODULE = "jaxembed.preprocessing.images.pdf_renderer"


class PdfFile:
    """A PDF file, whose pages are rendered one at a time in a process of its own.

    A small file can keep PDFium busy for hours, make it take all memory or crash it. That ends its
    process alone, and the next page has a new one. Each open file has a process, so that none waits
    for another one; when it is closed, one process is kept for the next file. Threads may share a
    file, and wait for each other.
    """

    def __init__(self, file: Any, timeout_s: float = PDF_TIMEOUT_S):
        """`file` is binary and is read to its end. `timeout_s` is for opening it and for each page.

        Raises InvalidImage for a file that is broken, encrypted or too large, takes too long, or
        has no pages or more than MOST_PAGES; and ConfigError without pypdfium2 or room on the disk.
        """
        require("pdf", "PDF files")
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        try:
            self._renderer: _Renderer | None = _idle.pop()
        except IndexError:
            self._renderer = _Renderer()
        try:
            self._renderer.load(file)
            self.pages = self._renderer.open(timeout_s)
            if self.pages > MOST_PAGES:
                raise InvalidImage(
                    f"the PDF file has {self.pages} pages, of at most {MOST_PAGES}; divide it"
                )
        except BaseException:
            self.close()
            raise

    def render(self, page: int, dpi: int, most_pixels: int = MOST_PIXELS) -> np.ndarray:
        """The colours of a page, counted from 0, on white: uint8 `[height, width, 3]`. Annotations
        and forms are drawn.

        Raises InvalidImage for a page that is damaged, has more than `most_pixels`, or takes too
        long or too much memory; and ConfigError without room on the disk.
        """
        with self._lock:
            assert self._renderer is not None, "the file is closed"
            return self._renderer.render(page, dpi, most_pixels, self.timeout_s)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            renderer, self._renderer = self._renderer, None
            if renderer is not None:
                renderer.unload(self.timeout_s)
                _idle.append(renderer)


class _Reply(msgspec.Struct):
    """What the process that renders answers."""

    pages: int = 0
    height: int = 0
    width: int = 0
    refused: str | None = None  # what is wrong with the PDF file
    failed: str | None = None  # what is wrong with this machine


class _Renderer:
    """A process that renders pages, and the file that it shares with this one: a PDF file, and
    behind it the colours of a page. A process that fails is ended, and the next page has another
    one. One thread at a time may use it."""

    def __init__(self) -> None:
        try:
            self._shared = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - kept
        except OSError as error:
            raise _unwritable(error.strerror) from error
        weakref.finalize(self, self._shared.close)
        self._size = 0  # of the PDF file
        self._colours: mmap.mmap | None = None  # kept for pages of the same size: quicker to copy
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: SimpleQueue[bytes] = SimpleQueue()
        self._end: Callable[[], object] = lambda: None  # ends the process

    def load(self, file: Any) -> None:
        """Copy a PDF file into the shared file. Raises InvalidImage for one that is too large, and
        ConfigError without room on the disk."""
        while chunk := file.read(COPIED_BYTES):
            self._size += len(chunk)
            if self._size > MOST_PDF_BYTES:
                raise InvalidImage(
                    f"the PDF file has more than {MOST_PDF_BYTES} bytes, the most that is read; "
                    "divide it"
                )
            left = memoryview(chunk)
            try:
                while left:
                    left = left[self._shared.write(left) :]
            except OSError as error:
                raise _unwritable(error.strerror) from error

    def open(self, timeout_s: float) -> int:
        """Open the PDF file, in a new process if need be, and count its pages."""
        if not self._is_running:
            self._start()
        asked = {"do": "open", "size": self._size, "colours_at": self._colours_at}
        pages = self._ask(asked, timeout_s, OPENING).pages
        if pages < 1:
            raise self._nonsense(OPENING)
        return pages

    def render(self, page: int, dpi: int, most_pixels: int, timeout_s: float) -> np.ndarray:
        """As `PdfFile.render`."""
        if not self._is_running:
            self.open(timeout_s)
        bounds = {"most_pixels": most_pixels, "longest_side": LONGEST_SIDE}
        asked = {"do": "render", "page": page, "dpi": dpi, **bounds}
        found = self._ask(asked, timeout_s, RENDERING)
        if min(found.height, found.width) < 1 or found.height * found.width > most_pixels:
            raise self._nonsense(RENDERING)
        shape = found.height, found.width, 3
        size = math.prod(shape)
        if self._colours is None or len(self._colours) != size:
            try:
                self._colours = mmap.mmap(self._shared.fileno(), size, offset=self._colours_at)
            except ValueError as error:  # the file has fewer bytes
                raise self._nonsense(RENDERING) from error
        return np.frombuffer(self._colours, np.uint8).reshape(shape).copy()

    def unload(self, timeout_s: float) -> None:
        """Let go of the PDF file."""
        if self._is_running:
            with suppress(InvalidImage):  # the process is ended then
                self._ask({"do": "close"}, timeout_s, CLOSING)
        self._size, self._colours = 0, None
        self._shared.seek(0)
        self._shared.truncate()

    @property
    def _colours_at(self) -> int:
        """Where colours begin in the shared file: where a mapping may."""
        return -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        """Start a process that finds modules where this one does. Raises ConfigError."""
        self._end()
        said_at = self._shared.seek(0, os.SEEK_END)  # where it writes why it does not start
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        try:
            self._process = subprocess.Popen(
                # -P: the working directory is searched only if this process searches it
                [sys.executable, "-P", "-m", _MODULE, str(MOST_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._shared,
                env=KEEPS_MEMORY | os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            raise ConfigError(f"{sys.executable!r} cannot be started: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)
        self._replies = SimpleQueue()
        receiving = self._process.stdout, self._replies
        threading.Thread(target=_receive, args=receiving, name="pdf-replies", daemon=True).start()
        try:
            self._exchange(b"", START_S)
        except (TimeoutError, _ProcessLost) as error:
            self._shared.seek(said_at)
            said = self._shared.read(MOST_REPLY_BYTES).decode(errors="replace").splitlines()
            raise ConfigError(
                f"the process that renders pages of PDF files does not start: {error}"
                + "".join(f", {line}" for line in said[-1:])
            ) from error

    def _ask(self, request: dict[str, Any], timeout_s: float, doing: str) -> _Reply:
        """The answer to a request.

        Raises InvalidImage with what the process refused or what happened to it, and ConfigError
        for what is wrong with this machine.
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
        """What the process answers. Raises TimeoutError and _ProcessLost, and has ended it then, as
        at any other error."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        line = b""
        try:
            with suppress(OSError):  # it has ended, and so have its replies
                process.stdin.write(request)
                process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
            return msgspec.json.decode(line, type=_Reply)
        except BaseException as error:  # an interrupt, too: it would answer later
            self._end()
            if isinstance(error, Empty):
                raise TimeoutError(f"takes more than {timeout_s:g} seconds") from None
            if isinstance(error, msgspec.MsgspecError):
                how = NONSENSE
                if not line:
                    how = f"exit status {process.returncode}"
                    with suppress(ValueError):  # of a process that no signal has ended
                        how = signal.Signals(-process.returncode).name
                raise _ProcessLost(how) from error
            raise

    def _nonsense(self, doing: str) -> InvalidImage:
        """The error for an answer that cannot be: the memory of the process may be corrupted, so
        this ends it."""
        self._end()
        return _crash(doing, NONSENSE)


class _ProcessLost(Exception):
    """A process ended, or its answer is none; the message says which."""


def _crash(doing: str, how: str) -> InvalidImage:
    return InvalidImage(
        f"{doing} crashed ({how}): the file is damaged, or needs more than "
        f"{MOST_MEMORY / 10**9:g} GB of memory; save it anew, or choose a lower --pdf-dpi"
    )


def _receive(output: IO[bytes], replies: "SimpleQueue[bytes]") -> None:
    """Queue the lines that a process writes, and nothing when it ends or writes unasked."""
    with output:
        while replies.qsize() < 2 and (line := output.readline(MOST_REPLY_BYTES)):
            replies.put(line)
    replies.put(b"")


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.kill()
    process.wait()
    with suppress(OSError):  # a request that it did not take
        process.stdin.close()


def _unwritable(reason: str | None) -> ConfigError:
    return ConfigError(
        f"pages of PDF files go through a temporary file, which cannot be written: {reason}; name "
        "a folder that has room by the environment variable TMPDIR"
    )


_idle: deque[_Renderer] = deque(maxlen=1)  # kept for the next file: starting one takes 0.1 s
