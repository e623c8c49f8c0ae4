"""From the colours of an image to the patches of a tower, bit for bit as transformers' processors
on Pillow make them. Needs Pillow."""

import numpy as np

from jaxembed.errors import InvalidImage
from jaxembed.images.decode import MOST_PIXELS
from jaxembed.spec import ImageRules


def prepare_image(colours: np.ndarray, rules: ImageRules) -> np.ndarray:
    """The patches of an image, uint8 `[patches, patch_bytes]`, row by row. `colours` is uint8
    `[height, width, 3]`. In a patch pixels follow each other row by row, and the three colours of a
    pixel.

    Raises InvalidImage for one that is so long and narrow that resizing would take too much memory.
    """
    from PIL import Image  # only models of images need it

    rows, columns, _ = colours.shape
    height, width = resized_size(rows, columns, rules)
    if height * width > MOST_PIXELS:
        raise InvalidImage(
            f"the image is {columns} by {rows} pixels, and would be resized "
            f"to {width} by {height}, more than {MOST_PIXELS} pixels; cut it"
        )
    resample = Image.Resampling[rules.resample.upper()]
    resized = np.asarray(Image.fromarray(colours).resize((width, height), resample))
    if rules.crop is not None:
        high, wide = rules.crop
        top, left = (height - high) // 2, (width - wide) // 2
        resized = resized[top : top + high, left : left + wide]
    return patches(resized, rules.patch)


def resized_size(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    """The height and width that an image is resized to, before its middle is cut out."""
    if rules.size is not None:
        return rules.size
    assert rules.shortest is not None
    short, long = sorted((height, width))
    longer = int(rules.shortest * long / short)  # cut, not rounded
    return (rules.shortest, longer) if height <= width else (longer, rules.shortest)


def patches(colours: np.ndarray, size: int) -> np.ndarray:
    """The patches of `size` by `size` pixels, as `prepare_image` gives them; the sides are
    multiples of the size."""
    height, width, colour = colours.shape
    grid = colours.reshape(height // size, size, width // size, size, colour)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, size * size * colour)
