"""Renders pages of PDF files. `images/pdf.py` starts this module as a process, and may kill it.

The module imports neither numpy nor JAX, so that the process starts in about 0.1 s and takes 25 MB.

A request is a line of JSON on standard input, and the answer is a line of JSON on standard output.
Standard error is a file that both processes share, because every system passes standard error on to
a child process. It holds the PDF file, and after that the colours of the last page.
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

POINTS_AN_INCH = 72  # lengths in a PDF file are in points
COLOURS = 3  # a pixel has a byte for each colour
_PASSWORD = 4  # PDFium's error code FPDF_ERR_PASSWORD


def main() -> None:
    """Answer requests until standard input closes. `sys.argv[1]` is the memory limit in bytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    shared, replies = os.dup(sys.stderr.fileno()), os.dup(sys.stdout.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # discard what libraries print
        os.dup2(nowhere, stream.fileno())
    if sys.platform == "linux":
        # Limit the memory of this process. The memory that maps the shared file does not count,
        # because the system can write it to disk.
        import resource  # imported here, because Windows does not have this module

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = int(sys.argv[1]), soft, hard
        lowest = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    renderer = _Renderer(shared)
    os.write(replies, b"{}\n")  # tell the other process that this one is ready
    while True:
        os.write(replies, json.dumps(renderer.answer(json.loads(requests.get()))).encode() + b"\n")


def _receive(requests: "SimpleQueue[bytes]") -> None:
    """Queue the requests. When standard input closes, end the process, even during a rendering."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


class _Renderer:
    """The open PDF file and the colours of its last page, both in the shared file."""

    def __init__(self, shared: int):
        self._shared_file = shared  # file descriptor
        self._document: Any = None
        self._colours_at = 0  # offset of the colours in the shared file
        self._pixels: Any = None  # a mapping of the colours, reused for pages of the same size

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request and return the answer. `request["do"]` names the method, and the other
        items are its arguments. If there is an error, the answer is a message under the key
        "refused" for an error of the PDF file, or "failed" for an error of this machine."""
        try:
            return getattr(self, f"_{request.pop('do')}")(**request)
        except InvalidImage as error:
            return {"refused": str(error)}
        except OSError as error:
            return {"failed": error.strerror or str(error)}
        except Exception as error:  # the PDF file is the likely cause, even of a MemoryError
            return {"refused": f"it cannot be rendered: {type(error).__name__}: {error}"}

    def _open(self, size: int, colours_at: int) -> dict[str, int]:
        """Open the PDF file, the first `size` bytes of the shared file. Returns the number of its
        pages. `colours_at` is the offset of colours in the shared file. Raises InvalidImage if the
        PDF file is damaged or encrypted."""
        self._colours_at = colours_at
        # Some failures leave PDFium's error code as it was, which might be _PASSWORD. An empty
        # file, which fails, sets another code first.
        pypdfium2.raw.FPDF_LoadMemDocument(b"", 0, None)
        data = self._mapped(at=0, size=size) if size else b""
        try:
            self._document = pypdfium2.PdfDocument(data)
            # Show what forms are filled with. PDFium needs this call before a page is loaded.
            self._document.init_forms()
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

    def _text(self, page: int, max_text: int) -> dict[str, str]:
        """Return the text of a page, without white space around it. Raises InvalidImage if the page
        is damaged or has more than `max_text` characters."""
        try:
            with closing(self._document[page]) as opened, closing(opened.get_textpage()) as found:
                if (count := found.count_chars()) > max_text:
                    raise InvalidImage(f"the page has {count} characters; the limit is {max_text}")
                text = found.get_text_range()
        except pypdfium2.PdfiumError as error:
            raise InvalidImage(f"the page is damaged: {error}") from error
        # PDFium writes U+FFFE for a hyphen at the end of a line
        return {"text": text.replace("\r\n", "\n").replace("\ufffe", "-").strip()}

    def _bitmap(self, width: int, height: int, format: int, rev_byteorder: bool) -> Any:
        """Return a PDFium bitmap whose pixels are in the shared file. The arguments are those of
        pypdfium2's `bitmap_maker`. Raises OSError if the disk is full."""
        size = width * height * COLOURS
        if self._pixels is None or len(self._pixels) != size:
            # Make the shared file long enough.
            if hasattr(os, "posix_fallocate"):
                # This reserves space on the disk: writing to a mapping without space would crash.
                os.posix_fallocate(self._shared_file, self._colours_at, size)
            elif os.fstat(self._shared_file).st_size < self._colours_at + size:
                # Only lengthen the file: a mapped file must not become shorter.
                os.ftruncate(self._shared_file, self._colours_at + size)
            self._pixels = self._mapped(self._colours_at, size)
        return pypdfium2.PdfBitmap.new_native(width, height, format, rev_byteorder, self._pixels)

    def _mapped(self, at: int, size: int) -> Any:
        """Map `size` bytes of the shared file, from the offset `at`, as a ctypes array."""
        return (ctypes.c_ubyte * size).from_buffer(mmap.mmap(self._shared_file, size, offset=at))


if __name__ == "__main__":
    main()
