"""From the bytes of an image file, whose parts are counted first, to its colours; and images as
programs have them. Needs Pillow, of the extra `images`."""

from __future__ import annotations

import ctypes
import logging
import math
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxembed.data.inputs import Image as ImageInput
from jaxembed.errors import InvalidImage
from jaxembed.platform.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MOST_PIXELS = 50_000_000
LONGEST_SIDE = 65_535  # pixels: as of a JPEG
BAND = 256 * 1024  # pixels that change at a time: Pillow holds the interpreter meanwhile
# The formats that are read, never all that Pillow knows, and the bytes of memory that a pixel takes
# at most while they are decoded. Measured maxima: 12.0 of a progressive JPEG in CMYK, 8.8 of a PNG
# with transparency, 18.2 of a lossless WebP, 5.7 of a GIF, 5.0 of a BMP, 9.6 of a TIFF of 16 bits.
BYTES_A_PIXEL = {"JPEG": 12, "PNG": 9, "WEBP": 20, "GIF": 6, "BMP": 9, "TIFF": 10}
FORMATS = tuple(BYTES_A_PIXEL)
MOST_BYTES = max(BYTES_A_PIXEL.values()) * MOST_PIXELS
SPARE_TILE = 1024 * 1024  # pixels that a tile of a TIFF may have more than its image
READABLE = "a file of JPEG, PNG, WebP, GIF, BMP or TIFF"
WIDE = ("I;16", "I;16L", "I;16B", "I;16N")  # modes of 16 bits
UNBOUNDED = ("I", "F")  # modes whose values have no known range
ACCEPTED = "a path, bytes, a Pillow image or a uint8 array [height, width, 3]"
SHOWN_BYTES = 16
WHITE_16 = 65_535
PER_LEVEL = 257  # 16-bit values for each 8-bit one: 65,535 / 255

# Some decoders take long for each part of a file, however small the image is.
MOST_FILE_PARTS = 10_000  # segments of a JPEG, or chunks of a PNG
MOST_SCANS = 100  # of a JPEG; a progressive one has about ten, and each goes over all pixels
JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
SCAN, END = 0xDA, 0xD9  # the markers with which a scan begins and an image ends
ALONE = (0x01, 0xD8)  # markers without a length; those within a scan are none here
TILE_SIDES = (322, 323)  # the tags TileWidth and TileLength of a TIFF
TIFF_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 16: "Q", 17: "q"}  # by their type
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


@dataclass(frozen=True)
class _TiffForm:
    """Where the entries of a TIFF's directory are, in bytes and as formats of struct."""

    first: int  # where the offset of the directory is
    offset: str
    count: str  # of the entries, before the first of them
    entry: int  # the size of one
    tag: str  # of an entry, and the type of its value
    value: int  # where in an entry its value is, or the offset of a value that is larger than one


TIFF_FORMS = {
    order + version.to_bytes(2, "little" if sign == "<" else "big"): _TiffForm(
        first, sign + offset, sign + count, entry, f"{sign}HH", value
    )
    for order, sign in ((b"II", "<"), (b"MM", ">"))
    for version, first, offset, count, entry, value in (
        (42, 4, "I", "H", 12, 8),
        (43, 8, "Q", "Q", 20, 12),  # BigTIFF
    )
}
"""By the bytes that a file begins with."""


@dataclass(frozen=True)
class ImageFacts:
    """What the header of an image says: its sides in pixels, the format in small letters, and the
    bits of a pixel."""

    width: int
    height: int
    format: str
    bit_depth: int


def image_facts(data: bytes) -> ImageFacts:
    """What the header of an image says, without decoding it.

    Raises InvalidImage, also for one of more than MOST_PIXELS; and ConfigError without Pillow.
    """
    with _opened(data, MOST_PIXELS) as image:
        depth = {"1": 1, **dict.fromkeys(WIDE, 16), **dict.fromkeys(UNBOUNDED, 32)}
        bits = depth.get(image.mode, 8 * len(image.getbands()))
        return ImageFacts(image.width, image.height, image.format.lower(), bits)


def image_size(data: bytes) -> tuple[int, int, int]:
    """The height and width of an image in pixels, and the bytes of memory that `decode_image` takes
    at most, its result included. Raises as `image_facts`."""
    with _opened(data, MOST_PIXELS) as image:
        pixels = max(image.height * image.width, tile_pixels(data))
        return image.height, image.width, pixels * BYTES_A_PIXEL[image.format]


def decode_image(data: bytes, most_pixels: int = MOST_PIXELS) -> Picture:
    """The colours of an image, as an image of Pillow in mode RGB.

    Of several frames it is the first. It is turned as its EXIF tag says, and what is transparent is
    put on white; 16-bit values are rounded to 8. Raises InvalidImage and ConfigError as
    `image_facts`.
    """
    with _opened(data, most_pixels) as image:
        image.load()
        return _in_rgb(image)


def picture_of(colours: np.ndarray) -> Picture:
    """The image of Pillow that has these colours, uint8 `[height, width, 3]`."""
    from PIL import Image

    return Image.fromarray(colours)


def colours_of(image: Picture) -> np.ndarray:
    """The colours of an image of Pillow, uint8 `[height, width, 3]`, as `decode_image` gives them.
    The image stays as it is. Raises InvalidImage for values of an unknown range."""
    return np.asarray(_in_rgb(image.copy()))


def read_image(source: Any) -> ImageInput:
    """The image in a file, of its bytes, of an image of Pillow, or of an array of colours, uint8
    `[height, width, 3]`. Raises OSError for a file that cannot be read, and InvalidImage."""
    if isinstance(source, ImageInput):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return ImageInput(bytes(source))
    if isinstance(source, str | PathLike):
        return ImageInput(Path(source).read_bytes())
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise InvalidImage(
                f"an image is an array of {source.dtype} {list(source.shape)}; wanted {ACCEPTED}"
            )
        return ImageInput(np.ascontiguousarray(source))
    if hasattr(source, "convert") and hasattr(source, "mode"):  # without importing Pillow
        return ImageInput(colours_of(source))
    raise InvalidImage(f"an image is a {type(source).__name__}; wanted {ACCEPTED}")


def _in_rgb(image: Picture) -> Picture:
    """As `decode_image`. The image may be changed, because a copy would take as much memory."""
    from PIL import Image, ImageOps  # only models of images need it

    if image.mode in UNBOUNDED:
        raise InvalidImage(
            f"the image has values of 32 bits (mode {image.mode}), whose range is not known; save "
            "it with 8 or 16 bits"
        )
    ImageOps.exif_transpose(image, in_place=True)
    is_wide = image.mode in WIDE
    if not is_wide and not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    whole = Image.new("RGB", image.size)
    rows = max(BAND // image.width, 1)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        if is_wide:  # 16 bits become 8, and a transparent value white
            wide = np.asarray(band).astype(np.uint32)
            if (transparent := band.info.get("transparency")) is not None:  # a value of a PNG
                wide[wide == transparent] = WHITE_16
            band = Image.fromarray(((wide + PER_LEVEL // 2) // PER_LEVEL).astype(np.uint8))
        else:
            white = Image.new("RGBA", band.size, (255, 255, 255, 255))
            band = Image.alpha_composite(white, band.convert("RGBA"))
        whole.paste(band.convert("RGB"), (0, top))
    return whole


@contextmanager
def _opened(data: bytes, most_pixels: int) -> Iterator[Any]:
    """The image, not decoded yet. Whatever goes wrong with the file becomes InvalidImage."""
    require("images", "images")
    from PIL import Image  # only models of images need it

    for parts, _ in enumerate(_parts_of(data), start=1):
        if parts > MOST_FILE_PARTS:
            raise InvalidImage(f"the image has over {MOST_FILE_PARTS} parts; save it anew")
    _silence()
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            height, width = image.height, image.width
            pixels, tile = height * width, tile_pixels(data)
            if height < 1 or width < 1:
                raise InvalidImage(f"the image has {height} rows and {width} columns of pixels")
            if pixels > most_pixels:
                raise InvalidImage(
                    f"the image has {pixels} pixels ({width} by {height}), of at most {most_pixels}"
                )
            if max(height, width) > LONGEST_SIDE:
                raise InvalidImage(
                    f"the image is {width} by {height} pixels, of at most {LONGEST_SIDE} on a "
                    "side; cut it"
                )
            if tile > pixels + SPARE_TILE:
                raise InvalidImage(
                    f"the image has {pixels} pixels, and its tiles have {tile} each; save it with "
                    "smaller tiles"
                )
            yield image
    except InvalidImage:
        raise
    except Image.DecompressionBombError as error:
        raise InvalidImage(f"the image has too many pixels, of at most {most_pixels}") from error
    except Image.UnidentifiedImageError as error:
        raise InvalidImage(f"{_shown(data)} is no image; wanted {READABLE}") from error
    except Exception as error:  # Pillow raises a dozen kinds for what is damaged
        raise InvalidImage(f"{_shown(data)} is a damaged image; wanted {READABLE}") from error


@cache
def _silence() -> None:
    """Keep Pillow and libtiff from writing to standard error what is wrong with a file, and Python
    from remembering each such warning. What matters is raised as well."""
    from PIL import Image

    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL.TiffImagePlugin").setLevel(logging.CRITICAL)
    with suppress(OSError, AttributeError):  # a Pillow without libtiff
        library = ctypes.CDLL(Image.core.__file__)
        library.TIFFSetErrorHandler(None)
        library.TIFFSetWarningHandler(None)


def _shown(data: bytes) -> str:
    return f"a file of {len(data)} bytes that begins with {data[:SHOWN_BYTES]!r}"


def tile_pixels(data: bytes) -> int:
    """The pixels of a tile of a TIFF; 0 for other files. A decoder takes memory for a whole tile,
    however small the image is; strips it cuts to the image.

    Of a tag that comes several times the largest value counts: libtiff reads the first, Pillow the
    last.
    """
    form = TIFF_FORMS.get(data[:4])
    if form is None:
        return 0
    sides = {tag: 0 for tag in TILE_SIDES}
    with suppress(struct.error):  # of a file that ends early, which the decoder refuses
        (start,) = struct.unpack_from(form.offset, data, form.first)
        (entries,) = struct.unpack_from(form.count, data, start)
        start += struct.calcsize(form.count)
        for at in range(start, start + entries * form.entry, form.entry):
            tag, kind = struct.unpack_from(form.tag, data, at)
            if tag in sides and kind in TIFF_INTEGERS:
                integer = form.tag[0] + TIFF_INTEGERS[kind]
                at += form.value
                if struct.calcsize(integer) > struct.calcsize(form.offset):
                    (at,) = struct.unpack_from(form.offset, data, at)
                sides[tag] = max(sides[tag], *struct.unpack_from(integer, data, at))
    return math.prod(sides.values())


def _parts_of(data: bytes) -> Iterator[int]:
    """Where each chunk of a PNG ends, or each segment of the first image of a JPEG, which further
    ones and videos may follow. Raises InvalidImage for more scans than real JPEGs have."""
    at, scans = len(PNG), 0
    if data.startswith(PNG):
        while at + 8 <= len(data) and data[at + 4 : at + 8] != b"IEND":
            at += 12 + int.from_bytes(data[at : at + 4])  # with its length, name and checksum
            yield at
    if not data.startswith(JPEG):
        return
    at = len(JPEG)
    has_few = data.count(bytes((0xFF, SCAN))) <= MOST_SCANS  # then segments before them are enough
    while (found := _MARKER.search(data, at)) is not None:
        kind = found[0][1]
        if kind == END or (kind == SCAN and has_few):
            return
        scans += kind == SCAN
        if scans > MOST_SCANS:
            raise InvalidImage(f"the image has over {MOST_SCANS} scans; save it anew")
        at = found.end()
        if kind not in ALONE:
            at += int.from_bytes(data[at : at + 2])
        yield at
