"""Renders pages of PDF files. `images/pdf.py` starts this module as a process, and may kill it.

The module imports neither numpy nor JAX, so that the process starts in about 0.1 s and takes 25 MB.

A request is a line of JSON on standard input, and its answer a line of JSON on standard output.
Standard error is the file that both processes share, because every system passes it on to a child:
the PDF file is at its start, and the colours of the last page are behind it.
"""

import ctypes
import json
import math
import mmap
import os
import signal
import sys
import threading
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import pypdfium2

from jaxembed.errors import InvalidImage, counted

POINTS_AN_INCH = 72  # a PDF file counts lengths in points
COLOURS = 3  # bytes of a pixel
_PASSWORD = 4  # FPDF_ERR_PASSWORD


def main() -> None:
    """Answer requests until standard input closes. `sys.argv[1]` is the memory limit in bytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    shared, replies = os.dup(sys.stderr.fileno()), os.dup(sys.stdout.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what libraries print is discarded
        os.dup2(nowhere, stream.fileno())
    if sys.platform == "linux":
        # Limit the memory of this process. The shared file does not count: the system can write its
        # pages to disk.
        import resource  # Windows has none

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = int(sys.argv[1]), soft, hard
        lowest = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    renderer = _Renderer(shared)
    os.write(replies, b"{}\n")  # ready
    while True:
        os.write(replies, json.dumps(renderer.answer(json.loads(requests.get()))).encode() + b"\n")


def _receive(requests: "SimpleQueue[bytes]") -> None:
    """Queue the requests. Once standard input closes, end the process, even while it renders."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


class _Renderer:
    """The open PDF file and the colours of its last page, both in the shared file."""

    def __init__(self, shared: int):
        self._shared_file = shared  # file descriptor
        self._document: Any = None
        self._colours_at = 0  # offset of the colours in the shared file
        self._pixels: Any = None  # reused for pages of the same size: saves page faults

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request and return its answer. `request["do"]` names the method, and the other
        items are its arguments. An answer may be an error: `refused` of the PDF file, `failed` of
        this machine."""
        try:
            return getattr(self, f"_{request.pop('do')}")(**request)
        except InvalidImage as error:
            return {"refused": str(error)}
        except OSError as error:
            return {"failed": error.strerror or str(error)}
        except Exception as error:  # also MemoryError: the file is the likely cause
            return {"refused": f"it cannot be rendered: {type(error).__name__}: {error}"}

    def _open(self, size: int, colours_at: int) -> dict[str, int]:
        """Open the PDF file, the first `size` bytes of the shared file. Returns the number of its
        pages. `colours_at` is the offset of colours in the shared file. Raises InvalidImage."""
        self._colours_at = colours_at
        # Fail on purpose, to set PDFium's error code: a failure that sets none keeps the last one.
        pypdfium2.raw.FPDF_LoadMemDocument(b"", 0, None)
        data = self._mapped(at=0, size=size) if size else b""
        try:
            self._document = pypdfium2.PdfDocument(data)
            self._document.init_forms()  # before the pages: shows what forms are filled with
        except pypdfium2.PdfiumError as error:
            if error.err_code == _PASSWORD:
                raise InvalidImage(
                    "the PDF file is encrypted; save it without a password"
                ) from error
            raise InvalidImage(
                f"a file of {counted(size, 'byte')} is not a PDF file, or is damaged: {error}"
            ) from error
        return {"pages": len(self._document)}

    def _close(self) -> dict[str, int]:
        """Close the PDF file, and drop the mapping of colours."""
        if self._document is not None:
            self._document.close()
        self._document = self._pixels = None
        return {}

    def _render(self, page: int, dpi: int, max_pixels: int, longest_side: int) -> dict[str, int]:
        """Write the colours of a page into the shared file. Returns its height and width in pixels.
        Raises InvalidImage if the page is damaged or too large."""
        try:
            with closing(self._document[page]) as opened:
                scale = dpi / POINTS_AN_INCH
                width, height = (math.ceil(side * scale) for side in opened.get_size())
                if width < 1 or height < 1:
                    raise InvalidImage(f"the page has {height} rows and {width} columns of pixels")
                if width * height > max_pixels:
                    raise InvalidImage(
                        f"the page has {width * height} pixels ({width} by {height}) at {dpi} dpi; "
                        f"the limit is {max_pixels}: choose a lower --pdf-dpi"
                    )
                if max(width, height) > longest_side:
                    raise InvalidImage(
                        f"the page is {width} by {height} pixels at {dpi} dpi; the limit for a "
                        f"side is {longest_side}: choose a lower --pdf-dpi"
                    )
                opened.render(scale=scale, rev_byteorder=True, bitmap_maker=self._bitmap).close()
        except pypdfium2.PdfiumError as error:
            raise InvalidImage(f"the page is damaged: {error}") from error
        return {"height": height, "width": width}

    def _bitmap(self, width: int, height: int, format: int, rev_byteorder: bool) -> Any:
        """Return a PDFium bitmap whose pixels are in the shared file. The arguments are those of
        pypdfium2's `bitmap_maker`. Raises OSError if the disk is full."""
        size = width * height * COLOURS
        if self._pixels is None or len(self._pixels) != size:
            # Make the shared file long enough.
            if hasattr(os, "posix_fallocate"):  # else writing to a full disk would crash
                os.posix_fallocate(self._shared_file, self._colours_at, size)
            elif os.fstat(self._shared_file).st_size < self._colours_at + size:
                # only then: a mapped file must not become shorter
                os.ftruncate(self._shared_file, self._colours_at + size)
            self._pixels = self._mapped(self._colours_at, size)
        return pypdfium2.PdfBitmap.new_native(width, height, format, rev_byteorder, self._pixels)

    def _mapped(self, at: int, size: int) -> Any:
        """Map `size` bytes of the shared file, from the offset `at`, as an array of ctypes."""
        return (ctypes.c_ubyte * size).from_buffer(mmap.mmap(self._shared_file, size, offset=at))


if __name__ == "__main__":
    main()
