"""Encodes float32 vectors in fewer bytes, as sentence-transformers does.

The formulas and the order of the bits are those of `quantize_embeddings` in sentence-transformers
5.2 and later (`util/quantization.py`), so each of the two libraries can read vectors that the other
has encoded. The caller truncates and normalises the vectors first.
"""

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Shaped

from jaxembed.errors import InvalidInput

EmbeddingDtype = Literal["float", "float16", "int8", "uint8", "binary", "ubinary"]
DTYPES: tuple[EmbeddingDtype, ...] = get_args(EmbeddingDtype)

STEPS = 255  # number of steps between the 256 values of a byte
INFINITE_HALF = 65520  # the least value that float16, up to 65504, rounds to infinity
NEEDS_RANGES: tuple[EmbeddingDtype, ...] = ("int8", "uint8")  # dtypes that need calibration ranges


def embedding_dtype(value: object, field: str = "output_dtype") -> EmbeddingDtype:
    """Return `value` if it is the name of a dtype. Raises InvalidInput for any other value; `field`
    is the field of the request that has the value."""
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
    """Encode float32 vectors as `dtype`, and return a C-contiguous array.

    `float` keeps the values, and `float16` rounds each to the nearest. `uint8` maps a value x to
    floor(255 (x - low) / (high - low)), limited to 0 to 255, where low and high are the range of
    the dimension; `int8` is the `uint8` value minus 128. `ubinary` has one bit per dimension, 1 if
    x > 0. The first dimension is the highest bit of the first byte, and zeros fill the last byte,
    so `width` is dim / 8 rounded up. `binary` is each `ubinary` byte minus 128, as int8.

    `ranges` are the lowest and the highest value of each dimension, measured on vectors that were
    truncated and normalised in the same way. Raises ValueError if `dtype` needs ranges and none are
    given, and InvalidInput for a value that float16 cannot hold.
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
            # Flipping the highest bit of a byte and reading the byte as int8 subtracts 128.
            return (np.packbits(vectors > 0, axis=-1) ^ 0x80).view(np.int8)


def _levels(vectors: np.ndarray, ranges: np.ndarray | None) -> np.ndarray:
    """Return the level of each value in the range of its dimension, a whole number from 0 to 255 as
    float32. A dimension whose range is a single value has steps of 1. Raises ValueError without
    ranges."""
    if ranges is None:
        raise ValueError("int8 and uint8 need ranges")
    low, high = ranges.astype(np.float32, copy=False)
    steps = (high - low) / np.float32(STEPS)
    steps[steps == 0] = 1
    levels = vectors - low
    with np.errstate(over="ignore"):  # dividing by a tiny step may overflow; clipped below
        levels /= steps
    np.floor(levels, out=levels)
    return np.clip(levels, 0, STEPS, out=levels)
