"""Resizes images, cuts them into the patches that a backbone takes, and computes the id of each
token and its place in its image. The results equal those of transformers' processors bit for bit.
Needs Pillow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from jaxembed.data.spec import ImageRules, Tiles
from jaxembed.errors import InvalidImage
from jaxembed.preprocessing.images.decode import MAX_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SCALES = 1e-6, 100.0  # the scales between which `resized_size` searches
SCALE_STEP = 1e-5  # the search ends when its bounds are closer than this
MAX_ASPECT = 200  # maximum of longer side / shorter side, if the rules have an `area`


def prepare_image(image: Picture, rules: ImageRules) -> np.ndarray:
    """Resize a Pillow image in mode RGB, and cut it into patches: uint8 `[tokens, token_bytes]`.

    The tiles of the image, the tokens of a tile or image, the patches of a token and the pixels of
    a patch are in the order of rows from top to bottom, and from left to right in a row. Raises
    InvalidImage for an image that is too long and narrow: resizing would take too much memory, or
    the model does not accept it.
    """
    size = resized_size(image.height, image.width, rules)
    if rules.first_area is not None:
        image = _resize(image, first_size(image.height, image.width, rules), rules)
    if rules.tiles is not None:
        image = _resize(image, _scaled(image.height, image.width, rules.tiles), rules)
        image = _resize(image, size, rules)
        return _tile_patches(image, _resize(image, rules.made, rules), rules)
    resized = np.asarray(_resize(image, size, rules))
    if rules.crop is not None:
        crop_height, crop_width = rules.crop
        margins = ((side - kept) / 2 for side, kept in zip(size, rules.crop, strict=True))
        top, left = (round(one) if rules.rounds_crop else int(one) for one in margins)
        resized = resized[top : top + crop_height, left : left + crop_width]
    return patches(resized, rules.patch, rules.merge)


def _resize(image: Picture, size: tuple[int, int], rules: ImageRules) -> Picture:
    """Return the image in the `size`, height and width."""
    from PIL import Image  # imported here, because only models of images need Pillow

    height, width = size
    return image.resize((width, height), Image.Resampling[rules.resample.upper()])


def _tile_patches(image: Picture, whole: Picture, rules: ImageRules) -> np.ndarray:
    """Return the patches of an image of whole tiles, tile by tile, and of the tile `whole`."""
    colours, (side, _) = np.asarray(image), rules.made
    corners = [
        (top, left) for top in range(0, image.height, side) for left in range(0, image.width, side)
    ]
    made = np.empty(
        (len(corners) + 1, (side // rules.token_side) ** 2, rules.token_bytes), np.uint8
    )
    for number, (top, left) in enumerate(corners):
        tile = colours[top : top + side, left : left + side]
        made[number] = patches(tile, rules.patch, rules.merge)
    made[-1] = patches(np.asarray(whole), rules.patch, rules.merge)
    return made.reshape(-1, rules.token_bytes)


def image_ids(height: int, width: int, rules: ImageRules) -> list[int]:
    """Return the ids of the tokens of an image of `height` by `width` pixels before resizing, and
    of the tokens around the image and its tiles. Raises InvalidImage as `prepare_image` does."""
    high, wide = rules.crop or resized_size(height, width, rules)
    if rules.tiles is None:
        tokens = [rules.token_id] * (high // rules.token_side * (wide // rules.token_side))
        return [*rules.before, *tokens, *rules.after]
    side, _ = rules.made
    tile = [rules.token_id] * (side // rules.token_side) ** 2
    ids = [*rules.before]
    for row, names in enumerate(rules.tiles.names[: high // side]):
        ids += rules.tiles.row_end if row else ()
        for name in names[: wide // side]:
            ids += [*name, *tile]
    return [*ids, *rules.tiles.whole, *tile, *rules.after]


def resized_size(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """Return the height and width in pixels that an image of `height` by `width` pixels is resized
    to, before `rules.crop` cuts out its middle. Raises InvalidImage if the image is too long and
    narrow."""
    if rules.tiles is not None:
        return _whole_tiles(*_scaled(height, width, rules.tiles), rules.made[0])
    if rules.size is not None:
        return rules.size
    if rules.most_patches is not None:
        # A binary search finds the largest scale at which the image has at most `most_patches`
        # patches, if its sides are rounded up to whole patches. At the lowest scale it has one.
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
        height, width = first_size(height, width, rules)
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


def first_size(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """Return the height and width that an image is resized to first; those of the image without a
    `first_area`. This is smart_resize of qwen_vl_utils: sides have at least a token before the
    pixels are counted. With `clamps_aspect` the longer one has at most MAX_ASPECT times the length
    of the other, as in GME's code; otherwise this raises InvalidImage for a larger aspect ratio."""
    if rules.first_area is None:
        return height, width
    if not rules.clamps_aspect:
        _check_aspect(height, width)
    side = rules.token_side
    high, wide = _whole_tokens(height, width, side, rules.first_area, least=side)
    return min(high, MAX_ASPECT * wide), min(wide, MAX_ASPECT * high)


def size_within(height: int, width: int, side: int, area: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width that an image of `height` by `width` pixels is resized to.

    Both are multiples of `side`, and the aspect ratio stays about the same. The number of pixels is
    between the two numbers of `area`; if the image is long and narrow it may be outside. This is
    smart_resize of transformers' Qwen2VLImageProcessor. Raises InvalidImage for an aspect ratio
    over MAX_ASPECT.
    """
    _check_aspect(height, width)
    return _whole_tokens(height, width, side, area, least=0)


def _check_aspect(height: int, width: int) -> None:
    """Raise InvalidImage for an aspect ratio over MAX_ASPECT."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidImage(
            f"the image is {width} by {height} pixels, and the model accepts no image whose longer "
            f"side is over {MAX_ASPECT} times the shorter; crop it"
        )


def _whole_tokens(
    height: int, width: int, side: int, area: tuple[int, int], *, least: int
) -> tuple[int, int]:
    """Return the height and width of `size_within`, whatever the aspect ratio, with sides of at
    least `least` pixels before the pixels are counted."""
    min_pixels, max_pixels = area
    high, wide = (max(round(length / side) * side, least) for length in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high, wide = (max(side, math.floor(x / shrink / side) * side) for x in (height, width))
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(x * grow / side) * side for x in (height, width))
    return high, wide


def _scaled(height: int, width: int, tiles: Tiles) -> tuple[int, int]:
    """Return the height and width of an image whose longer side is resized to `tiles.longest`. This
    is _resize_output_size_rescale_to_max_len of transformers' Idefics3ImageProcessor."""
    aspect = width / height
    if width >= height:
        high, wide = int(tiles.longest / aspect), tiles.longest
        high += high % 2
    else:
        high, wide = tiles.longest, int(tiles.longest * aspect)
        wide += wide % 2
    return max(high, 1), max(wide, 1)


def _whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the height and width, rounded up to tiles of `side` by `side` pixels, the longer side
    first. This is resize_for_vision_encoder of transformers' Idefics3ImageProcessor."""
    aspect = width / height
    if width >= height:
        wide = math.ceil(width / side) * side
        return math.ceil(int(wide / aspect) / side) * side, wide
    high = math.ceil(height / side) * side
    return high, math.ceil(int(high * aspect) / side) * side


def max_tokens(rules: ImageRules) -> int:
    """Return the maximum number of tokens of an image whose rules have `tiles` or an `area`, with
    the tokens around it. With an area, narrow images can exceed the maximum, because their shorter
    side has at least one token."""
    if rules.tiles is not None:
        return len(image_ids(1, 1, rules))  # no shape has more tiles than a square
    assert rules.area is not None
    min_tokens, max_tokens = (pixels / rules.token_side**2 for pixels in rules.area)
    stretch = math.sqrt(MAX_ASPECT)
    # tokens of the narrowest image, enlarged to the minimum area with its sides rounded up
    enlarged = (math.sqrt(min_tokens) / stretch + 1) * (math.sqrt(min_tokens) * stretch + 1)
    in_image = max(max_tokens, math.sqrt(max_tokens) * stretch, enlarged)
    return len(rules.before) + math.floor(in_image) + len(rules.after)


def patches(colours: np.ndarray, size: int, merge: int = 1) -> np.ndarray:
    """Cut RGB values, uint8 `[height, width, 3]`, into patches of `size` by `size` pixels, and
    group the patches in tokens of `merge` by `merge` patches. What is left at the right and the
    bottom is left out, as by a convolution. Returns uint8 `[tokens, token_bytes]`. Tokens, the
    patches of a token and the pixels of a patch are in the order of rows; the three colours of a
    pixel are side by side."""
    side, channels = size * merge, colours.shape[2]
    rows, columns = (length // side for length in colours.shape[:2])
    grid = colours[: rows * side, : columns * side]
    grid = grid.reshape(rows, merge, size, columns, merge, size, channels)
    # The new order of axes is: rows of tokens, tokens, rows of patches in a token, patches, rows of
    # pixels in a patch, pixels, colours.
    return grid.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, side * side * channels)


def image_positions(height: int, width: int, rules: ImageRules) -> np.ndarray:
    """Return the place of each token in an image of `height` by `width` pixels before resizing.

    The result is int32 `[tokens, place_numbers]`, and includes the tokens around the patches. If
    the rules have an `area`, `mrope_positions` describes the first three numbers; if there are
    five, the others are the image's numbers of rows and columns of tokens. For other rules, with a
    `place_numbers` of 4, they are the token's row and column, and the image's numbers of rows and
    columns of tokens; the tokens around the patches have zeros.
    """
    height, width = resized_size(height, width, rules)
    rows, columns = height // rules.token_side, width // rules.token_side
    around = len(rules.before), len(rules.after)  # tokens before and after the patches
    if rules.area is not None:
        places = mrope_positions(rows, columns, *around)
        sides = (rows, columns)[: rules.place_numbers - places.shape[1]]
        return np.hstack([places, np.full((len(places), len(sides)), sides, np.int32)])
    # Such places are for backbones that resize their table of position embeddings to the image.
    positions = np.empty((rows, columns, 4), np.int32)
    positions[..., 0] = np.arange(rows)[:, None]
    positions[..., 1] = np.arange(columns)
    positions[..., 2:] = rows, columns
    return np.pad(positions.reshape(-1, 4), (around, (0, 0)))


def mrope_positions(rows: int, columns: int, before: int, after: int) -> np.ndarray:
    """Return three numbers for each token of an image and of the texts around it, for Qwen2-VL's
    rotary positions: int32 `[before + rows * columns + after, 3]`.

    The image has `rows` by `columns` tokens; `before` and `after` are the numbers of text tokens.
    The numbers plus the index of the token in its sequence are the token's time, row and column
    (Wang et al. 2024, arXiv:2409.12191). For a text token all three sums are its position, where
    the image counts as so many positions as its longer side has tokens. For the image's tokens the
    time is the position p at which the image begins, row r of the image has p + r, and column c has
    p + c.
    """
    row, column = (indices.reshape(-1) for indices in np.indices((rows, columns)))
    # Subtract the index of each token, because the numbers are added to it later.
    image = np.stack([np.zeros_like(row), row, column], axis=1) - np.arange(rows * columns)[:, None]
    positions = np.zeros((before + rows * columns + after, 3), np.int32)
    positions[before : before + rows * columns] = image
    positions[before + rows * columns :] = max(rows, columns) - rows * columns
    return positions
