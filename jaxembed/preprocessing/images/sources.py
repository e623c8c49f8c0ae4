"""Images as programs have them: files, bytes, arrays, and Pillow's own."""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxembed.data.inputs import Image
from jaxembed.errors import InvalidImage
from jaxembed.preprocessing.images.decode import colours_of

ACCEPTED = "a path, bytes, a Pillow image or a uint8 array [height, width, 3]"


def read_image(source: Any) -> Image:
    """The image in a file, of its bytes, of an image of Pillow, or of an array of colours, uint8
    `[height, width, 3]`. Raises OSError for a file that cannot be read, and InvalidImage."""
    if isinstance(source, Image):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return Image(bytes(source))
    if isinstance(source, str | PathLike):
        return Image(Path(source).read_bytes())
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise InvalidImage(
                f"an image is an array of {source.dtype} {list(source.shape)}; wanted {ACCEPTED}"
            )
        return Image(np.ascontiguousarray(source))
    if hasattr(source, "convert") and hasattr(source, "mode"):  # without importing Pillow
        return Image(colours_of(source))
    raise InvalidImage(f"an image is a {type(source).__name__}; wanted {ACCEPTED}")
