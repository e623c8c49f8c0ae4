"""From the colours of an image to the patches of a tower, bit for bit as transformers' processors
on Pillow make them, and the places of the tokens. Needs Pillow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from jaxembed.data.spec import ImageRules
from jaxembed.errors import InvalidImage
from jaxembed.preprocessing.images.decode import MOST_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SCALES = 1e-6, 100.0  # the bounds of how much an image is scaled that keeps its shape
SCALE_STEP = 1e-5  # of the search between them, which ends when the bounds are closer
MOST_ASPECT = 200  # of the longer side to the shorter one, where the rules have an area


def prepare_image(image: Picture, rules: ImageRules) -> np.ndarray:
    """The patches of an image, uint8 `[tokens, token_bytes]`, row by row. The patches of a token
    follow each other row by row, too, as do the pixels of a patch, and the three colours of a
    pixel. `image` is one of Pillow in mode RGB.

    Raises InvalidImage for one that is so long and narrow that resizing would take too much memory,
    or that the model does not take.
    """
    from PIL import Image  # only models of images need it

    height, width = resized_size(image.height, image.width, rules)
    resample = Image.Resampling[rules.resample.upper()]
    resized = np.asarray(image.resize((width, height), resample))
    if rules.crop is not None:
        high, wide = rules.crop
        top, left = (height - high) // 2, (width - wide) // 2
        resized = resized[top : top + high, left : left + wide]
    return patches(resized, rules.patch, rules.merge)


def resized_size(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """The height and width that an image is resized to, before its middle is cut out. Raises
    InvalidImage for one that is too long and narrow."""
    if rules.size is not None:
        return rules.size
    if rules.most_patches is not None:
        # Whole patches, at the largest scale that a search by halves finds at which an image has at
        # most so many of them. At the lowest scale it has one.
        low, high = SCALES
        found = 1, 1
        while high - low >= SCALE_STEP:
            scale = (low + high) / 2
            rows, columns = (max(math.ceil(x * scale / rules.patch), 1) for x in (height, width))
            if rows * columns <= rules.most_patches:
                low, found = scale, (rows, columns)
            else:
                high = scale
        return found[0] * rules.patch, found[1] * rules.patch
    if rules.area is not None:
        return size_within(height, width, rules.token_side, rules.area)
    assert rules.shortest is not None
    short, long = sorted((height, width))
    longer = int(rules.shortest * long / short)  # cut, not rounded
    high, wide = (rules.shortest, longer) if height <= width else (longer, rules.shortest)
    if high * wide > MOST_PIXELS:
        raise InvalidImage(
            f"the image is {width} by {height} pixels, and would be resized to {wide} by {high}, "
            f"more than {MOST_PIXELS} pixels; cut it"
        )
    return high, wide


def size_within(height: int, width: int, side: int, area: tuple[int, int]) -> tuple[int, int]:
    """The height and width, in multiples of `side`, whose product is in the area and whose ratio is
    about that of the image: as smart_resize of transformers' Qwen2VLImageProcessor, which leaves
    the area for long and narrow images. Raises InvalidImage for a ratio over MOST_ASPECT."""
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise InvalidImage(
            f"the image is {width} by {height} pixels, and the model takes none whose one side is "
            f"over {MOST_ASPECT} times the other; cut it"
        )
    least, most = area
    high, wide = (round(one / side) * side for one in (height, width))
    if high * wide > most:
        shrink = math.sqrt(height * width / most)
        high, wide = (max(side, math.floor(x / shrink / side) * side) for x in (height, width))
    elif high * wide < least:
        grow = math.sqrt(least / (height * width))
        high, wide = (math.ceil(x * grow / side) * side for x in (height, width))
    return high, wide


def patches(colours: np.ndarray, size: int, merge: int = 1) -> np.ndarray:
    """The patches of `size` by `size` pixels, in blocks of `merge` by `merge`, as `prepare_image`
    gives them; the sides are multiples of a block's."""
    height, width, colour = colours.shape
    block = size * merge
    grid = colours.reshape(height // block, merge, size, width // block, merge, size, colour)
    return grid.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, block * block * colour)


def image_places(height: int, width: int, rules: ImageRules) -> np.ndarray:
    """Where the tokens of an image lie, int32 `[tokens, place_numbers]`, by rules that have such
    numbers. `height` and `width` count the image's pixels. Tokens around the patches have zeros,
    unless the rules have an `area`."""
    height, width = resized_size(height, width, rules)
    rows, columns = height // rules.token_side, width // rules.token_side
    around = len(rules.before), len(rules.after)
    if rules.area is not None:
        return page_places(rows, columns, *around)
    # For a tower that resizes its positions: row and column of each patch, and how many rows and
    # columns there are.
    places = np.empty((rows, columns, 4), np.int32)
    places[..., 0] = np.arange(rows)[:, None]
    places[..., 1] = np.arange(columns)
    places[..., 2:] = rows, columns
    return np.pad(places.reshape(-1, 4), (around, (0, 0)))


def page_places(rows: int, columns: int, before: int, after: int) -> np.ndarray:
    """The places of an image in the middle of a text, int32 `[before + rows * columns + after, 3]`.

    Added to the position of a token in its sequence, the numbers give its time, row and column, by
    which Qwen2-VL rotates heads (Wang et al. 2024, arXiv:2409.12191). All three of a token of text
    are its place in the text, where an image takes as many places as the longer of its sides. The
    time of an image's tokens is where it begins; row and column count from there.
    """
    row, column = (one.reshape(-1) for one in np.indices((rows, columns)))
    image = np.stack([np.zeros_like(row), row, column], axis=1) - np.arange(rows * columns)[:, None]
    places = np.zeros((before + rows * columns + after, 3), np.int32)
    places[before : before + rows * columns] = image
    places[before + rows * columns :] = max(rows, columns) - rows * columns
    return places
