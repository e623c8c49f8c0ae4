"""From the bytes of an image file to its colours. Needs Pillow, of the extra `images`."""

from __future__ import annotations

import ctypes
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxembed.errors import InvalidImage
from jaxembed.platform.extras import require
from jaxembed.preprocessing.images.parts import check_parts, tile_pixels

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
SHOWN_BYTES = 16
WHITE_16 = 65_535
PER_LEVEL = 257  # 16-bit values for each 8-bit one: 65,535 / 255


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

    check_parts(data)
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
