"""Measures how far two results differ, and whether that is within the bounds. Runs no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from jaxembed.data.spec import DType, Task
from jaxembed.tools.verify.reference import Computed
from jaxembed.tools.verify.texts import InputGroup

# Bounds of the cosine distance. The one of float32 is from tests/parity/test_minilm.py and
# test_qwen3.py. The others are ten times what tests/parity/test_minilm.py and
# tests/engine/test_replica.py allow a model of two to six layers, because the rounding errors of
# the layers add up.
COSINE_BOUNDS: dict[DType, float] = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-4}

# Bounds of the relative error of logits (relative to the largest one) and of vector lengths. The
# one of float32 is from tests/parity/test_qwen3.py. The others follow from the bounds above: a
# cosine distance d is a relative error of sqrt(2 d).
RELATIVE_BOUNDS: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}

NEIGHBOURS = 10
MOST_RANKED = 1000  # texts; the matrix of their similarities grows with the square
TIE = 1e-6  # similarities and logits that differ by less than this count as equal


@dataclass(frozen=True)
class Agreement:
    """How the results in one dtype agree with the reference, over all groups."""

    dtype: DType
    task: Task
    # float64 [inputs]: the cosine distance of embeddings, the relative difference of logits
    distances: np.ndarray
    # float64 [inputs]: the relative difference of the vectors' lengths; empty for logits
    lengths: np.ndarray
    # embed: share of shared neighbours; rerank: of pairs in the same order; classify: of equal best
    # labels
    rank: float

    @cached_property
    def worst(self) -> int:
        """The index of the input with the largest distance; NaN counts as the largest."""
        return int(np.argmax(np.where(np.isnan(self.distances), np.inf, self.distances)))

    @property
    def bound(self) -> float:
        """The largest distance that is allowed in this dtype."""
        return (COSINE_BOUNDS if self.task == "embed" else RELATIVE_BOUNDS)[self.dtype]

    @property
    def within_bounds(self) -> bool:
        """Whether all distances and lengths keep to their bounds; NaN does not."""
        lengths_agree = (self.lengths <= RELATIVE_BOUNDS[self.dtype]).all()
        return bool((self.distances <= self.bound).all() and lengths_agree)


def agreement(
    dtype: DType, task: Task, got: Sequence[Computed], expected: Sequence[Computed]
) -> Agreement:
    """Compare the results of each group with the reference's results of the same inputs."""
    pairs = [(one.outputs, other.outputs) for one, other in zip(got, expected, strict=True)]
    if task == "embed":
        distances = np.concatenate([cosine_distances(*pair) for pair in pairs])
        lengths = np.concatenate([length_differences(*pair) for pair in pairs])
        rank = shared_neighbours(*pairs[0])
    else:
        # a logit is a sum of terms of about the largest one's size, even if they cancel
        differences = [
            np.abs(ours - theirs).max(axis=1).astype(np.float64) / max(np.abs(theirs).max(), 1)
            for ours, theirs in pairs
        ]
        distances, lengths = np.concatenate(differences), np.zeros(0)
        rank = min((same_order if task == "rerank" else same_best)(*pair) for pair in pairs)
    return Agreement(dtype, task, distances, lengths, rank)


def locate(index: int, groups: Sequence[InputGroup]) -> tuple[int, int]:
    """Convert an index among all inputs to a group and the index in it.

    Raises IndexError if there are fewer inputs.
    """
    for number, group in enumerate(groups):
        if index < len(group.inputs):
            return number, index
        index -= len(group.inputs)
    raise IndexError(index)


def cosine_distances(
    got: Float[np.ndarray, "rows dim"], expected: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """The cosine distance of each row, 0 to 2. Two zero vectors have distance 0.

    It is computed in float64, so that distances down to 1e-12 are right.
    """
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    products = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (got * expected).sum(axis=1) / np.where(products == 0, 1, products)
    both_zero = ~got.any(axis=1) & ~expected.any(axis=1)
    return np.where(both_zero, 0.0, np.maximum(1 - cosines, 0.0))


def length_differences(
    got: Float[np.ndarray, "rows dim"], expected: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """The relative difference of the vectors' lengths, for each row."""
    lengths = np.linalg.norm(expected.astype(np.float64), axis=1)
    return np.abs(np.linalg.norm(got.astype(np.float64), axis=1) - lengths) / (lengths + 1e-30)


def shared_neighbours(
    got: Float[np.ndarray, "rows dim"], expected: Float[np.ndarray, "rows dim"]
) -> float:
    """The share of a text's nearest NEIGHBOURS that the reference has too: the worst of all texts.

    Texts as similar as the reference's last neighbour, within TIE, count as neighbours.
    """
    count = min(NEIGHBOURS, len(got) - 1)
    if count < 1:
        return 1.0
    ours, theirs = (_similarities(vectors[:MOST_RANKED]) for vectors in (got, expected))
    nearest = np.argsort(-ours, axis=1, kind="stable")[:, :count]
    # the similarity of the reference's last neighbour
    least = -np.sort(-theirs, axis=1)[:, count - 1 : count]
    return float((np.take_along_axis(theirs, nearest, axis=1) >= least - TIE).mean(axis=1).min())


def same_order(
    got: Float[np.ndarray, "rows labels"], expected: Float[np.ndarray, "rows labels"]
) -> float:
    """The share of pairs of documents that are in the same order as in the reference.

    Pairs whose logits differ by less than TIE in the reference are left out.
    """
    ours, theirs = (
        np.subtract.outer(logits[:MOST_RANKED, 0], logits[:MOST_RANKED, 0])
        for logits in (got, expected)
    )
    ordered = np.abs(theirs) > TIE
    return float((ours * theirs > 0)[ordered].mean()) if ordered.any() else 1.0


def same_best(
    got: Float[np.ndarray, "rows labels"], expected: Float[np.ndarray, "rows labels"]
) -> float:
    """The share of inputs that have the same best label."""
    return float((got.argmax(axis=1) == expected.argmax(axis=1)).mean())


def _similarities(vectors: np.ndarray) -> np.ndarray:
    """The matrix of cosine similarities; that of a text with itself is -2, less than any other."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled = vectors / np.where(lengths == 0, 1, lengths)
    cosines = scaled @ scaled.T
    np.fill_diagonal(cosines, -2)
    return cosines
