"""From the bytes of a PDF file to the colours of its pages. Needs pypdfium2, of the extra `pdf`."""

import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from jaxembed.errors import ConfigError, InvalidImage
from jaxembed.images.decode import MOST_PIXELS

PDF_DPI = 150  # an A4 page has 1240 by 1754 pixels
POINTS_AN_INCH = 72  # what a PDF file counts lengths in
MOST_PAGES = 10_000  # of a file
_PASSWORD = 4  # FPDF_ERR_PASSWORD
_alone = threading.Lock()  # PDFium is not thread-safe


class PdfFile:
    """A PDF file, whose pages are rendered one at a time."""

    def __init__(self, data: bytes):
        """Raises InvalidImage for a file that is broken or encrypted, or has no pages or more than
        MOST_PAGES; and ConfigError without pypdfium2."""
        pdfium = _pdfium()
        with _alone:
            # a failure of its own kind, for a failure without a code has that of the last one
            pdfium.raw.FPDF_LoadMemDocument(b"", 0, None)
            try:
                self._document = pdfium.PdfDocument(data)
                self._document.init_forms()  # before the pages: shows what forms are filled with
                self.pages = len(self._document)
            except pdfium.PdfiumError as error:
                if error.err_code == _PASSWORD:
                    raise InvalidImage(
                        "the PDF file is encrypted, and its password is not known; save it without"
                    ) from error
                raise InvalidImage(
                    f"a file of {len(data)} bytes is no PDF file, or a damaged one: {error}"
                ) from error
        if self.pages > MOST_PAGES:
            self.close()
            raise InvalidImage(
                f"the PDF file has {self.pages} pages, of at most {MOST_PAGES}; divide it"
            )

    def render(self, page: int, dpi: int, most_pixels: int = MOST_PIXELS) -> np.ndarray:
        """The colours of a page, counted from 0, on white: uint8 `[height, width, 3]`. Annotations
        and forms are drawn.

        Raises InvalidImage for a page that is damaged or has more than `most_pixels`.
        """
        with _alone, self._opened(page) as opened:
            scale = dpi / POINTS_AN_INCH
            width, height = (math.ceil(side * scale) for side in opened.get_size())
            if width < 1 or height < 1:
                raise InvalidImage(f"the page has {height} rows and {width} columns of pixels")
            if width * height > most_pixels:
                raise InvalidImage(
                    f"the page has {width * height} pixels ({width} by {height}) at {dpi} dpi, of "
                    f"at most {most_pixels}; choose a lower --pdf-dpi"
                )
            with closing(opened.render(scale=scale, rev_byteorder=True)) as bitmap:
                return bitmap.to_numpy().copy()  # PDFium takes its memory back

    def close(self) -> None:
        """Let go of the file."""
        with _alone:
            self._document.close()

    @contextmanager
    def _opened(self, page: int) -> Iterator[Any]:
        try:
            opened = self._document[page]
        except _pdfium().PdfiumError as error:
            raise InvalidImage(f"the page is damaged: {error}") from error
        with closing(opened):
            yield opened


def require_pdfium() -> None:
    """Raise ConfigError unless pypdfium2 is installed."""
    _pdfium()


def _pdfium() -> Any:
    try:
        import pypdfium2  # only PDF files need it
    except ImportError:
        raise ConfigError(
            "pages of PDF files are rendered by pypdfium2, which is not installed: "
            "pip install 'jaxembed[pdf]'"
        ) from None
    return pypdfium2
