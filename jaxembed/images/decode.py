"""From the bytes of an image file to its colours. Needs Pillow, of the extra `images`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np

from jaxembed.errors import ConfigError, InvalidImage
from jaxembed.images.parts import check_parts

MOST_PIXELS = 50_000_000
LONGEST_SIDE = 65_535  # pixels: as of a JPEG
BAND = 256  # rows that are put on white at a time: Pillow holds the interpreter meanwhile
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # never all that Pillow knows
READABLE = "a file of JPEG, PNG, WebP, GIF, BMP or TIFF"
WIDE = ("I;16", "I;16L", "I;16B", "I;16N")  # modes of 16 bits
UNBOUNDED = ("I", "F")  # modes whose values have no known range
SHOWN_BYTES = 16
WHITE_16 = 65_535
PER_LEVEL = 257  # 16-bit values for each 8-bit one: 65,535 / 255


def image_size(data: bytes, most_pixels: int = MOST_PIXELS) -> tuple[int, int]:
    """The height and width of an image in pixels, as its header says, without decoding it.

    Raises InvalidImage, also for one of more than `most_pixels`; and ConfigError without Pillow.
    """
    with _opened(data, most_pixels) as image:
        return image.height, image.width


@dataclass(frozen=True)
class ImageFacts:
    """What the header of an image says: its sides in pixels, the format in small letters, and the
    bits of a pixel."""

    width: int
    height: int
    format: str
    bit_depth: int


def image_facts(data: bytes) -> ImageFacts:
    """What the header of an image says, without decoding it. Raises as `image_size`."""
    with _opened(data, MOST_PIXELS) as image:
        depth = {"1": 1, **dict.fromkeys(WIDE, 16), **dict.fromkeys(UNBOUNDED, 32)}
        bits = depth.get(image.mode, 8 * len(image.getbands()))
        return ImageFacts(image.width, image.height, image.format.lower(), bits)


def decode_image(data: bytes, most_pixels: int = MOST_PIXELS) -> np.ndarray:
    """The colours of an image, uint8 `[height, width, 3]`: red, green and blue.

    Of several frames it is the first. It is turned as its EXIF tag says, and what is transparent is
    put on white; 16-bit values are rounded to 8. Raises InvalidImage and ConfigError as
    `image_size`.
    """
    with _opened(data, most_pixels) as image:
        image.load()
        return colours_of(image)


def colours_of(image: Any) -> np.ndarray:
    """The colours of an image of Pillow, as `decode_image` gives them. Raises InvalidImage for
    values of an unknown range."""
    from PIL import Image, ImageOps  # only models of images need it

    if image.mode in UNBOUNDED:
        raise InvalidImage(
            f"the image has values of 32 bits (mode {image.mode}), whose range is not known; save "
            "it with 8 or 16 bits"
        )
    image = ImageOps.exif_transpose(image)
    if image.mode in WIDE:
        wide = np.asarray(image).astype(np.uint32)
        if (transparent := image.info.get("transparency")) is not None:  # a value of a PNG
            wide[wide == transparent] = WHITE_16
        image = Image.fromarray(((wide + PER_LEVEL // 2) // PER_LEVEL).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", (image.width, BAND), (255, 255, 255, 255))
        for top in range(0, image.height, BAND):
            band = image.crop((0, top, image.width, min(top + BAND, image.height)))
            under = white.crop((0, 0, *band.size))
            image.paste(Image.alpha_composite(under, band), (0, top))
    return np.array(image.convert("RGB"))


def require_pillow() -> None:
    """Raise ConfigError unless Pillow is installed."""
    if find_spec("PIL") is None:
        raise ConfigError(
            "images are decoded by Pillow, which is not installed: pip install 'jaxembed[images]'"
        )


@contextmanager
def _opened(data: bytes, most_pixels: int) -> Iterator[Any]:
    """The image, not decoded yet. Whatever goes wrong with the file becomes InvalidImage."""
    require_pillow()
    from PIL import Image  # only models of images need it

    check_parts(data)
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_size(image.height, image.width, most_pixels)
            yield image
    except InvalidImage:
        raise
    except Image.DecompressionBombError as error:
        raise InvalidImage(f"the image has too many pixels, of at most {most_pixels}") from error
    except Image.UnidentifiedImageError as error:
        raise InvalidImage(f"{_shown(data)} is no image; wanted {READABLE}") from error
    except Exception as error:  # Pillow raises a dozen kinds for what is damaged
        raise InvalidImage(f"{_shown(data)} is a damaged image; wanted {READABLE}") from error


def _check_size(height: int, width: int, most_pixels: int) -> None:
    if height < 1 or width < 1:
        raise InvalidImage(f"the image has {height} rows and {width} columns of pixels")
    if height * width > most_pixels:
        raise InvalidImage(
            f"the image has {height * width} pixels ({width} by {height}), of at most {most_pixels}"
        )
    if max(height, width) > LONGEST_SIDE:
        raise InvalidImage(
            f"the image is {width} by {height} pixels, of at most {LONGEST_SIDE} on a side; cut it"
        )


def _shown(data: bytes) -> str:
    return f"a file of {len(data)} bytes that begins with {data[:SHOWN_BYTES]!r}"
