"""Pages of PDF files as images."""

import sys

import numpy as np
import pytest
from pdf_sources import pdf

from jaxembed.errors import ConfigError, InvalidImage
from jaxembed.images import pdf as pdf_module
from jaxembed.images.pdf import PdfFile

pytest.importorskip("pypdfium2")

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.mark.parametrize(("dpi", "sides"), [(72, (72, 36)), (150, (150, 75)), (100, (100, 50))])
def test_each_page_has_its_colours_at_the_resolution_asked_for(dpi, sides):
    file = PdfFile(pdf([RED, BLUE]))
    assert file.pages == 2
    for page, colour in enumerate((RED, BLUE)):
        found = file.render(page, dpi)
        assert (found.shape, found.dtype) == ((*sides, 3), np.uint8)
        np.testing.assert_array_equal(found, np.broadcast_to(np.uint8(colour), found.shape))
    file.close()


def test_sides_that_are_no_whole_pixels_are_rounded_up():
    file = PdfFile(pdf([RED], width=35, height=71))
    assert file.render(0, 100).shape == (99, 49, 3)
    file.close()


@pytest.mark.parametrize("data", [b"", b"no file", pdf([RED])[:60], pdf([])])
def test_a_broken_file_is_refused_even_after_an_encrypted_one(data):
    with pytest.raises(InvalidImage, match="is encrypted"):
        PdfFile(pdf([RED], encrypted=True))
    with pytest.raises(InvalidImage, match=f"a file of {len(data)} bytes is no PDF file, or a"):
        PdfFile(data)


def test_a_file_with_too_many_pages_is_refused(monkeypatch):
    monkeypatch.setattr(pdf_module, "MOST_PAGES", 3)
    with pytest.raises(InvalidImage, match="has 4 pages, of at most 3; divide it"):
        PdfFile(pdf([RED] * 4))


def test_a_page_of_too_many_pixels_is_refused_with_the_flag_that_helps():
    file = PdfFile(pdf([RED], width=14_400, height=14_400))
    with pytest.raises(
        InvalidImage, match=r"829440000 pixels \(28800 by 28800\) at 144 dpi"
    ) as told:
        file.render(0, 144)
    assert "--pdf-dpi" in str(told.value)
    assert file.render(0, 1).shape == (200, 200, 3)
    file.close()


def test_a_damaged_page_is_refused_and_the_others_are_not():
    damaged = pdf([RED, BLUE]).replace(b"/Type /Page /Parent", b"/Type /Pake /Parent", 1)
    file = PdfFile(damaged)
    with pytest.raises(InvalidImage, match="the page is damaged"):
        file.render(0, 72)
    assert file.render(1, 72)[0, 0].tolist() == list(BLUE)
    file.close()


def test_without_the_package_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxembed\[pdf\]'"):
        PdfFile(pdf([RED]))
