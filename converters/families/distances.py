"""Converts tables of biases by bucket of distance to tables by distance, for MPNet and T5."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from converters.weights import Shape, Tensor, Transform


def bucket(
    distance: Int[np.ndarray, " distances"], buckets: int, reach: int
) -> Int[np.ndarray, " distances"]:
    """The bucket of a distance, from the position of the query to that of the key.

    Small distances have a bucket each, larger ones share them, and from `reach` on all have the
    last one of their side. Raffel et al. 2020, arXiv:1910.10683. The values are those of
    relative_position_bucket in transformers' MPNet and T5.
    """
    side = buckets // 2
    exact = side // 2
    size = np.abs(distance)
    doublings = np.log2(np.maximum(size, exact) / exact)  # exact for powers of two
    shared = exact + np.floor(doublings * (side - exact) / np.log2(reach / exact)).astype(np.int64)
    return np.where(size < exact, size, np.minimum(shared, side - 1)) + side * (distance > 0)


def by_distance(buckets: int, reach: int) -> Transform:
    """A transform from the biases of buckets, `[buckets, heads]`, to those of distances, `[heads, 2
    * reach + 1]`, from -reach to reach."""

    def apply(table: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(table[bucket(np.arange(-reach, reach + 1), buckets, reach)].T)

    def misfits(sources: Sequence[Tensor], shape: Shape) -> list[str]:
        wanted = (buckets, shape[0])
        return [
            f"{source.name}: wanted shape {wanted}, got {source.shape}"
            for source in sources
            if source.shape != wanted
        ]

    return Transform(apply, misfits)
