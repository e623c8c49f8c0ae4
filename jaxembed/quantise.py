"""Encodes float32 vectors in fewer bytes, as sentence-transformers does.

The formulas and the order of the bits are those of `quantize_embeddings` in sentence-transformers
from 5.2 on (`util/quantization.py`), so that each can read what the other wrote. Vectors are
truncated and normalised before.
"""

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Shaped

from jaxembed.errors import InvalidInput

EmbeddingDtype = Literal["float", "float16", "int8", "uint8", "binary", "ubinary"]
DTYPES: tuple[EmbeddingDtype, ...] = get_args(EmbeddingDtype)

STEPS = 255  # between the lowest and the highest of the 256 values of a byte
INFINITE_HALF = 65520  # rounds to infinity in float16, whose largest value is 65504
NEEDS_RANGES: tuple[EmbeddingDtype, ...] = ("int8", "uint8")


def embedding_dtype(value: object, field: str = "output_dtype") -> EmbeddingDtype:
    """Check that a value is the name of a dtype, and return it. Raises InvalidInput, for the
    request's `field`, if it is not."""
    if value in DTYPES:
        return value
    raise InvalidInput(
        f"`{field}` must be one of {', '.join(DTYPES)}. Given: {repr(value)[:40]}", field=field
    )


def quantise(
    vectors: Float[np.ndarray, "rows dim"],
    dtype: EmbeddingDtype,
    ranges: Float[np.ndarray, "2 dim"] | None = None,
) -> Shaped[np.ndarray, "rows width"]:
    """Encode float32 vectors as `dtype`, C-contiguous; `float` leaves them as they are.

    `float16` rounds to the nearest value. `uint8` is floor(255 (x - low) / (high - low)), limited
    to 0 to 255, and `int8` is that minus 128. `ubinary` has a bit for each dimension, which is 1
    where x > 0: the first dimension is the highest bit of the first byte, and zeros fill up the
    last byte, so that `width` is dim / 8 rounded up. `binary` is these bytes minus 128, as int8.

    `ranges` are the lowest and the highest value of each dimension, of vectors that were truncated
    and normalised in the same way. Raises ValueError if `dtype` needs ranges and there are none,
    and InvalidInput for a value that float16 cannot hold.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    match dtype:
        case "float":
            return vectors
        case "float16":
            largest = max(vectors.max(initial=0), -vectors.min(initial=0))
            if largest >= INFINITE_HALF:
                raise InvalidInput(
                    "`output_dtype` of float16 holds values up to 65504, and a vector has "
                    f"{largest:.6g}; ask for normalised vectors, or for float",
                    field="output_dtype",
                )
            return vectors.astype(np.float16)
        case "uint8":
            return _levels(vectors, ranges).astype(np.uint8)
        case "int8":
            return (_levels(vectors, ranges) - 128).astype(np.int8)
        case "ubinary":
            return np.packbits(vectors > 0, axis=-1)
        case "binary":
            # The highest bit is flipped, which takes 128 from a byte that is then read as int8.
            return (np.packbits(vectors > 0, axis=-1) ^ 0x80).view(np.int8)


def _levels(vectors: np.ndarray, ranges: np.ndarray | None) -> np.ndarray:
    """Map each value to its level in the range of its dimension: whole numbers from 0 to 255, as
    float32. A dimension that never varied has steps of 1. Raises ValueError without ranges."""
    if ranges is None:
        raise ValueError("int8 and uint8 need ranges")
    low, high = ranges.astype(np.float32, copy=False)
    steps = (high - low) / np.float32(STEPS)
    steps[steps == 0] = 1
    levels = vectors - low
    with np.errstate(over="ignore"):  # far outside the range of a dimension that hardly varied
        levels /= steps
    np.floor(levels, out=levels)
    return np.clip(levels, 0, STEPS, out=levels)
