"""Resizes images, cuts them into the patches that a backbone takes, and finds the places of their
tokens, bit for bit as transformers' processors on Pillow do. Needs Pillow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from jaxembed.data.spec import ImageRules
from jaxembed.errors import InvalidImage
from jaxembed.preprocessing.images.decode import MAX_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SCALES = 1e-6, 100.0  # bounds of the scale of an image that keeps its aspect ratio
SCALE_STEP = 1e-5  # the search for the scale ends when its bounds are closer than this
MAX_ASPECT = 200  # longer side / shorter side, where the rules have an area


def prepare_image(image: Picture, rules: ImageRules) -> np.ndarray:
    """Resize a Pillow image in mode RGB, and cut it into patches: uint8 `[tokens, token_bytes]`.

    The tokens are row by row, and so are the patches of a token, the pixels of a patch, and the
    three colours of a pixel. Raises InvalidImage for an image that is so long and narrow that
    resizing takes too much memory, or that the model does not accept.
    """
    from PIL import Image  # only models of images need it

    height, width = resized_size(image.height, image.width, rules)
    resized = np.asarray(image.resize((width, height), Image.Resampling[rules.resample.upper()]))
    if rules.crop is not None:
        crop_height, crop_width = rules.crop
        top, left = (height - crop_height) // 2, (width - crop_width) // 2
        resized = resized[top : top + crop_height, left : left + crop_width]
    return patches(resized, rules.patch, rules.merge)


def resized_size(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """Return the height and width that an image is resized to, in pixels, before `rules.crop` cuts
    out its middle. `height` and `width` are those of the image. Raises InvalidImage for one that is
    too long and narrow."""
    if rules.size is not None:
        return rules.size
    if rules.most_patches is not None:
        # Whole patches, at the largest scale at which the image has at most `most_patches`.
        # A binary search finds the scale. At the lowest scale the image has one patch.
        low, high = SCALES
        grid = 1, 1
        while high - low >= SCALE_STEP:
            scale = (low + high) / 2
            rows, columns = (max(math.ceil(x * scale / rules.patch), 1) for x in (height, width))
            if rows * columns <= rules.most_patches:
                low, grid = scale, (rows, columns)
            else:
                high = scale
        return grid[0] * rules.patch, grid[1] * rules.patch
    if rules.area is not None:
        return size_within(height, width, rules.token_side, rules.area)
    assert rules.shortest is not None
    short, long = sorted((height, width))
    longer = int(rules.shortest * long / short)  # rounded down
    high, wide = (rules.shortest, longer) if height <= width else (longer, rules.shortest)
    if high * wide > MAX_PIXELS:
        raise InvalidImage(
            f"the image is {width} by {height} pixels, and would be resized to {wide} by {high}, "
            f"more than {MAX_PIXELS} pixels; crop it"
        )
    return high, wide


def size_within(height: int, width: int, side: int, area: tuple[int, int]) -> tuple[int, int]:
    """Return a height and width for an image of this height and width, in pixels: multiples of
    `side`, with about the image's aspect ratio. Their product is within `area`, a minimum and a
    maximum number of pixels.

    This is smart_resize of transformers' Qwen2VLImageProcessor. For a long and narrow image the
    product may be outside the area. Raises InvalidImage for an aspect ratio over MAX_ASPECT.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidImage(
            f"the image is {width} by {height} pixels, and the model accepts no image whose longer "
            f"side is over {MAX_ASPECT} times the shorter; crop it"
        )
    min_pixels, max_pixels = area
    high, wide = (round(length / side) * side for length in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high, wide = (max(side, math.floor(x / shrink / side) * side) for x in (height, width))
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(x * grow / side) * side for x in (height, width))
    return high, wide


def patches(colours: np.ndarray, size: int, merge: int = 1) -> np.ndarray:
    """Cut RGB values, uint8 `[height, width, 3]`, into patches of `size` by `size` pixels, and
    group them in tokens of `merge` by `merge` patches. Returns uint8 `[tokens, token_bytes]`: the
    tokens row by row, and so the patches of a token, and the pixels of a patch with their three
    colours. Height and width are multiples of `size * merge`."""
    height, width, channels = colours.shape
    side = size * merge
    grid = colours.reshape(height // side, merge, size, width // side, merge, size, channels)
    # rows of tokens, tokens, rows of patches, patches, rows of pixels, pixels, colours
    return grid.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, side * side * channels)


def image_positions(height: int, width: int, rules: ImageRules) -> np.ndarray:
    """Return the position of each token of an image, int32 `[tokens, place_numbers]`, for rules
    whose `place_numbers` is not 0. `height` and `width` are those of the image in pixels.

    With an `area` in the rules the numbers are those of `mrope_positions`. Else there are four: the
    token's row and column, and the image's numbers of rows and columns of tokens. Tokens around
    the patches have zeros.
    """
    height, width = resized_size(height, width, rules)
    rows, columns = height // rules.token_side, width // rules.token_side
    around = len(rules.before), len(rules.after)  # tokens before and after the patches
    if rules.area is not None:
        return mrope_positions(rows, columns, *around)
    # For a backbone that interpolates its position embeddings.
    positions = np.empty((rows, columns, 4), np.int32)
    positions[..., 0] = np.arange(rows)[:, None]
    positions[..., 1] = np.arange(columns)
    positions[..., 2:] = rows, columns
    return np.pad(positions.reshape(-1, 4), (around, (0, 0)))


def mrope_positions(rows: int, columns: int, before: int, after: int) -> np.ndarray:
    """Return the positions of an image's tokens and of the text tokens around it, for Qwen2-VL's
    rotation of heads: int32 `[before + rows * columns + after, 3]`. The image has `rows` by
    `columns` tokens; `before` and `after` are the numbers of text tokens.

    The three numbers are relative: added to the index of a token in its sequence they give its
    time, row and column (Wang et al. 2024, arXiv:2409.12191). For a text token all three are its
    position in the text, where an image takes as many positions as its longer side has tokens. The
    time of an image's tokens is the position where the image begins, and rows and columns count
    from there.
    """
    row, column = (indices.reshape(-1) for indices in np.indices((rows, columns)))
    # relative to the indices of the tokens
    image = np.stack([np.zeros_like(row), row, column], axis=1) - np.arange(rows * columns)[:, None]
    positions = np.zeros((before + rows * columns + after, 3), np.int32)
    positions[before : before + rows * columns] = image
    positions[before + rows * columns :] = max(rows, columns) - rows * columns
    return positions
