"""Rows of texts for the tests of Ray, and how their vectors are compared."""

from typing import Any

import numpy as np
from conftest import WORDS


def text_of(row: int) -> str:
    """Words of some length, which differ from those of other rows."""
    rng = np.random.default_rng(row)
    return " ".join(rng.choice(WORDS, 1 + row % 11)) + f" {row}"


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)  # float32, in other batches


def matrix(column: Any) -> np.ndarray:
    """The vectors of a column `[rows, width]`."""
    combined = column.combine_chunks()
    return combined.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
