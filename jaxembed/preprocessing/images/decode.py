"""Decodes image files to RGB pixels, and converts images that Python programs hold.

The size and the structure of a file are checked before it is decoded, because a small file can take
much time and memory. Needs Pillow, of the extra `images`.
"""

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
from jaxembed.errors import InvalidImage, counted
from jaxembed.platform.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_PIXELS = 50_000_000
LONGEST_SIDE = 65_535  # pixels: the limit of the JPEG format
# Images with transparency or 16 bits are converted in bands of this many pixels, because Pillow
# holds the interpreter lock while it converts a band.
BAND = 256 * 1024
# The supported formats, a part of those that Pillow reads, and the peak bytes of memory for each
# pixel while an image is decoded. Measured maxima: 12.0 for a progressive JPEG in CMYK, 8.8 for a
# PNG with transparency, 18.2 for a lossless WebP, 5.7 for a GIF, 5.0 for a BMP, 9.6 for a TIFF of
# 16 bits.
BYTES_A_PIXEL = {"JPEG": 12, "PNG": 9, "WEBP": 20, "GIF": 6, "BMP": 9, "TIFF": 10}
FORMATS = tuple(BYTES_A_PIXEL)
MAX_BYTES = max(BYTES_A_PIXEL.values()) * MAX_PIXELS
SPARE_TILE = 1024 * 1024  # a tile of a TIFF may have so many pixels more than the image
READABLE = "a JPEG, PNG, WebP, GIF, BMP or TIFF file"
WIDE = ("I;16", "I;16L", "I;16B", "I;16N")  # Pillow's modes of 16 bits
UNBOUNDED = ("I", "F")  # Pillow's modes of 32 bits, whose values have no known range
ACCEPTED = "a path, bytes, a Pillow image or a uint8 array [height, width, 3]"
SHOWN_BYTES = 16  # a message shows so many bytes of a file
WHITE_16 = 65_535  # white as a 16-bit value
PER_LEVEL = 257  # an 8-bit value v is 257 * v as a 16-bit value: 65,535 / 255

# Limits of what takes decoders long, however small the image is. A JPEG consists of segments and a
# PNG of chunks. Each scan of a JPEG covers all pixels; a progressive JPEG has about ten scans.
MAX_FILE_PARTS = 10_000
MAX_SCANS = 100
JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"  # the first bytes of these formats
SCAN, END = 0xDA, 0xD9  # JPEG markers: start of a scan, end of an image
ALONE = (0x01, 0xD8)  # JPEG markers without a length; _MARKER skips restart markers (D0 to D7)
TILE_SIDES = (322, 323)  # the tags TileWidth and TileLength of a TIFF
TIFF_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 16: "Q", 17: "q"}  # by TIFF type
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


@dataclass(frozen=True)
class _TiffForm:
    """The layout of a TIFF's directory: positions and sizes in bytes, and formats for `struct`."""

    first: int  # position in the file of the offset of the directory
    offset: str  # format of an offset
    count: str  # format of the number of entries, which precedes the entries
    entry: int  # size of an entry
    tag: str  # format of the first two fields of an entry: its tag, and the type of its value
    value: int  # position in an entry of the value, or of its offset if the value does not fit


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
"""The layout of a TIFF file by its first four bytes: the byte order and the version."""


@dataclass(frozen=True)
class ImageFacts:
    """What the header of an image says: its width and height in pixels, its format in lower case,
    such as "jpeg", and the bits of a pixel, which are those of all channels together."""

    width: int
    height: int
    format: str
    bit_depth: int


def image_facts(data: bytes) -> ImageFacts:
    """Read the header of an image file, without decoding the image.

    Raises InvalidImage if the file is not an image of one of the FORMATS, is damaged, or exceeds a
    limit such as MAX_PIXELS or LONGEST_SIDE; and ConfigError if Pillow is not installed.
    """
    with _opened(data, MAX_PIXELS) as image:
        # These modes have other numbers of bits than 8 for each channel.
        bits_of_mode = {"1": 1, **dict.fromkeys(WIDE, 16), **dict.fromkeys(UNBOUNDED, 32)}
        return ImageFacts(
            image.width,
            image.height,
            format=_format(image).lower(),
            bit_depth=bits_of_mode.get(image.mode, 8 * len(image.getbands())),
        )


def image_size(data: bytes) -> tuple[int, int, int]:
    """Return the height and width of an image in pixels, from its header, and an estimate of the
    peak bytes of memory of `decode_image`, including its result. Raises InvalidImage if the file is
    not an image, is damaged or exceeds a limit, and ConfigError if Pillow is not installed."""
    with _opened(data, MAX_PIXELS) as image:
        pixels = max(image.height * image.width, tile_pixels(data))
        return image.height, image.width, pixels * BYTES_A_PIXEL[_format(image)]


def _format(image: Picture) -> str:
    """Return the format of an opened file, one of FORMATS. A JPEG with further images in its file,
    which Pillow calls an MPO, is a JPEG."""
    return "JPEG" if image.format == "MPO" else str(image.format)


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Picture:
    """Decode an image file of at most `max_pixels` to a Pillow image in mode RGB.

    If there are several frames, the first is decoded. The image is rotated according to its EXIF
    orientation tag, transparent pixels are put on white, and 16-bit values are rounded to 8 bits.
    Raises InvalidImage if the file is not an image, is damaged, exceeds a limit or has values of 32
    bits, whose range is unknown; and ConfigError if Pillow is not installed.
    """
    with _opened(data, max_pixels) as image:
        image.load()
        return _in_rgb(image)


def to_pillow(colours: np.ndarray) -> Picture:
    """Convert RGB values, uint8 `[height, width, 3]`, to a Pillow image."""
    from PIL import Image

    return Image.fromarray(colours)


def to_rgb_array(image: Picture) -> np.ndarray:
    """Convert a Pillow image to RGB values, uint8 `[height, width, 3]`, without changing the image.
    Rotation, transparent pixels and 16-bit values are handled as in `decode_image`. Raises
    InvalidImage for 32-bit values, whose range is unknown."""
    return np.asarray(_in_rgb(image.copy()))


def read_image(source: Any) -> ImageInput:
    """Convert an image to an input of a model. `source` is the path or the bytes of an image file,
    a Pillow image, or RGB values, uint8 `[height, width, 3]`. Files are read, but not decoded.

    Raises OSError for a file that cannot be read, and InvalidImage for a `source` of another type.
    """
    if isinstance(source, ImageInput):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return ImageInput(bytes(source))
    if isinstance(source, str) and "://" in source:
        raise InvalidImage(f"{source!r:.80} is a URL; expected {ACCEPTED}")
    if isinstance(source, str | PathLike):
        return ImageInput(Path(source).read_bytes())
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise InvalidImage(
                f"an image is an array of {source.dtype} {list(source.shape)}; expected {ACCEPTED}"
            )
        return ImageInput(np.ascontiguousarray(source))
    # Recognize a Pillow image without importing Pillow.
    if hasattr(source, "convert") and hasattr(source, "mode"):
        return ImageInput(to_rgb_array(source))
    raise InvalidImage(f"an image is a {type(source).__name__}; expected {ACCEPTED}")


def _in_rgb(image: Picture) -> Picture:
    """Convert a Pillow image to mode RGB. It is rotated according to its EXIF orientation tag,
    transparent pixels are put on white, and 16-bit values are rounded to 8 bits. To save memory
    `image` itself may be changed. Raises InvalidImage for 32-bit values."""
    from PIL import Image, ImageOps  # imported here, because only models of images need Pillow

    if image.mode in UNBOUNDED:
        raise InvalidImage(
            f"the image has values of 32 bits (mode {image.mode}), whose range is not known; save "
            "it with 8 or 16 bits"
        )
    with suppress(Exception):  # Pillow raises many kinds; damaged EXIF names no orientation
        ImageOps.exif_transpose(image, in_place=True)
    is_wide = image.mode in WIDE
    if not is_wide and not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    result = Image.new("RGB", image.size)
    rows = max(BAND // image.width, 1)  # the number of rows in a band
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        if is_wide:  # round 16 bits to 8, and make the transparent value white
            values = np.asarray(band).astype(np.uint32)
            # A 16-bit PNG may name one value that is transparent.
            if (transparent := band.info.get("transparency")) is not None:
                values[values == transparent] = WHITE_16
            band = Image.fromarray(((values + PER_LEVEL // 2) // PER_LEVEL).astype(np.uint8))
        else:
            white = Image.new("RGBA", band.size, (255, 255, 255, 255))
            band = Image.alpha_composite(white, band.convert("RGBA"))
        result.paste(band.convert("RGB"), (0, top))
    return result


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Any]:
    """Open an image file, check its size and structure, and yield the Pillow image before decoding.

    Raises InvalidImage if the file is not an image, is damaged or exceeds a limit, and also in
    place of any error of Pillow in the block. Raises ConfigError if Pillow is not installed.
    """
    require("images", "images")
    from PIL import Image  # imported here, because only models of images need Pillow

    for parts, _ in enumerate(_parts_of(data), start=1):
        if parts > MAX_FILE_PARTS:
            raise InvalidImage(f"the image has over {MAX_FILE_PARTS} parts; save it again")
    _silence()
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            height, width = image.height, image.width
            pixels, tile = height * width, tile_pixels(data)
            if height < 1 or width < 1:
                raise InvalidImage(f"the image has {height} rows and {width} columns of pixels")
            if pixels > max_pixels:
                raise InvalidImage(
                    f"the image has {pixels} pixels ({width} by {height}); the limit is "
                    f"{max_pixels}"
                )
            if max(height, width) > LONGEST_SIDE:
                raise InvalidImage(
                    f"the image is {width} by {height} pixels; the limit for a side is "
                    f"{LONGEST_SIDE}: crop or resize it"
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
        raise InvalidImage(
            f"the image has too many pixels; the limit is {max_pixels}: resize it"
        ) from error
    except Image.UnidentifiedImageError as error:
        raise InvalidImage(f"{_shown(data)} is not an image; expected {READABLE}") from error
    except Exception as error:  # Pillow raises a dozen classes of errors for damaged files
        raise InvalidImage(f"{_shown(data)} is a damaged image; expected {READABLE}") from error


@cache
def _silence() -> None:
    """Turn off the warnings of Pillow and libtiff about damaged files, which would fill standard
    error and Python's list of past warnings. Errors are still raised."""
    from PIL import Image

    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL.TiffImagePlugin").setLevel(logging.CRITICAL)
    with suppress(OSError, AttributeError):  # this Pillow may have no libtiff
        library = ctypes.CDLL(Image.core.__file__)
        library.TIFFSetErrorHandler(None)
        library.TIFFSetWarningHandler(None)


def _shown(data: bytes) -> str:
    """Describe a file for a message: its size and its first bytes."""
    return f"a file of {counted(len(data), 'byte')} that begins with {data[:SHOWN_BYTES]!r}"


def tile_pixels(data: bytes) -> int:
    """Return the number of pixels in a tile of a TIFF file; 0 for TIFFs in strips and other files.

    Decoders allocate memory for whole tiles, however small the image is; strips are cut to the
    image. If a tag occurs several times, the largest of the values is used, because libtiff reads
    the first value and Pillow the last.
    """
    layout = TIFF_FORMS.get(data[:4])
    if layout is None:
        return 0
    sides = {tag: 0 for tag in TILE_SIDES}
    with suppress(struct.error):  # the file ends early, and the decoder will refuse it
        (directory,) = struct.unpack_from(layout.offset, data, layout.first)
        (entry_count,) = struct.unpack_from(layout.count, data, directory)
        directory += struct.calcsize(layout.count)
        for position in range(directory, directory + entry_count * layout.entry, layout.entry):
            tag, kind = struct.unpack_from(layout.tag, data, position)
            if tag in sides and kind in TIFF_INTEGERS:
                integer = layout.tag[0] + TIFF_INTEGERS[kind]  # with the file's byte order
                position += layout.value
                # A value that is larger than an offset does not fit: the entry holds its offset.
                if struct.calcsize(integer) > struct.calcsize(layout.offset):
                    (position,) = struct.unpack_from(layout.offset, data, position)
                sides[tag] = max(sides[tag], *struct.unpack_from(integer, data, position))
    return math.prod(sides.values())


def _parts_of(data: bytes) -> Iterator[int]:
    """Yield the position of the end of each chunk of a PNG, or of each segment of the first image
    in a JPEG file, which may be followed by other images or videos. Yields nothing for other
    formats. Raises InvalidImage for a JPEG with more than MAX_SCANS scans."""
    position, scans = len(PNG), 0
    if data.startswith(PNG):
        while position + 8 <= len(data) and data[position + 4 : position + 8] != b"IEND":
            # Each chunk has 12 bytes besides its content: the length, a name and a checksum.
            position += 12 + int.from_bytes(data[position : position + 4])
            yield position
    if not data.startswith(JPEG):
        return
    position = len(JPEG)
    # If the whole file has few scans, so has its first image, and only the segments before the
    # first scan need to be counted.
    has_few_scans = data.count(bytes((0xFF, SCAN))) <= MAX_SCANS
    while (marker := _MARKER.search(data, position)) is not None:
        kind = marker[0][1]
        if kind == END or (kind == SCAN and has_few_scans):
            return
        scans += kind == SCAN
        if scans > MAX_SCANS:
            raise InvalidImage(f"the image has over {MAX_SCANS} scans; save it again")
        position = marker.end()
        if kind not in ALONE:
            position += int.from_bytes(data[position : position + 2])
        yield position
