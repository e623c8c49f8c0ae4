"""How far two results are apart, and whether that is within the bounds. Runs no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from jaxembed.spec import DType, Task
from jaxembed.verify.reference import Computed
from jaxembed.verify.texts import InputGroup

# Cosine distances. float32: tests/parity/test_minilm.py and test_qwen3.py. The others are ten times
# what tests/parity/test_minilm.py and tests/test_replica.py allow a model of two to six layers,
# since what is rounded in each layer adds up.
COSINE_BOUNDS: dict[DType, float] = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-4}

# Of logits, as a share of the largest one, and of the lengths of vectors. float32:
# tests/parity/test_qwen3.py. A cosine distance d is a relative error of sqrt(2 d): the others.
RELATIVE_BOUNDS: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}

NEIGHBOURS = 10
MOST_RANKED = 1000  # texts, whose cosines are a matrix
TIE = 1e-6  # similarities and logits that are nearer than this have no order


@dataclass(frozen=True)
class Agreement:
    """How what was computed in a dtype agrees with the reference, over all groups."""

    dtype: DType
    task: Task
    distances: np.ndarray  # of each input: cosine distance, or of its logits relative to all
    lengths: np.ndarray  # of each vector: how far its length is from the reference's, relative
    rank: float  # see `describe_rank`

    @cached_property
    def worst(self) -> int:
        """The input that is furthest off; one that is not finite before all others."""
        return int(np.argmax(np.where(np.isnan(self.distances), np.inf, self.distances)))

    @property
    def bound(self) -> float:
        return (COSINE_BOUNDS if self.task == "embed" else RELATIVE_BOUNDS)[self.dtype]

    @property
    def within_bounds(self) -> bool:
        lengths_agree = (self.lengths <= RELATIVE_BOUNDS[self.dtype]).all()
        return bool((self.distances <= self.bound).all() and lengths_agree)  # nan is not


def agreement(
    dtype: DType, task: Task, got: Sequence[Computed], wanted: Sequence[Computed]
) -> Agreement:
    """Compare the results of the same inputs."""
    pairs = [(one.outputs, other.outputs) for one, other in zip(got, wanted, strict=True)]
    if task == "embed":
        distances = np.concatenate([cosine_distances(*pair) for pair in pairs])
        lengths = np.concatenate([length_differences(*pair) for pair in pairs])
        rank = shared_neighbours(*pairs[0])
    else:
        distances = np.concatenate([logit_differences(*pair) for pair in pairs])
        lengths = np.zeros(0)
        rank = min((same_order if task == "rerank" else same_best)(*pair) for pair in pairs)
    return Agreement(dtype, task, distances, lengths, rank)


def different_tokens(got: Sequence[Computed], wanted: Sequence[Computed]) -> list[tuple[int, int]]:
    """Group and input of each whose token ids are others."""
    return [
        (group, number)
        for group, (one, other) in enumerate(zip(got, wanted, strict=True))
        for number, ids in enumerate(one.ids)
        if ids != other.ids[number]
    ]


def locate(index: int, groups: Sequence[InputGroup]) -> tuple[int, int]:
    """The group and the place in it of an input, from its place among all inputs."""
    for number, group in enumerate(groups):
        if index < len(group.inputs):
            return number, index
        index -= len(group.inputs)
    raise IndexError(index)


def cosine_distances(
    got: Float[np.ndarray, "rows dim"], wanted: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """Of each row, in float64, where 1e-12 still counts. Two zero vectors agree."""
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    products = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    cosines = (got * wanted).sum(axis=1) / np.where(products == 0, 1, products)
    both_zero = ~got.any(axis=1) & ~wanted.any(axis=1)
    return np.where(both_zero, 0.0, np.maximum(1 - cosines, 0.0))


def length_differences(
    got: Float[np.ndarray, "rows dim"], wanted: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """Of each row, as a share of the wanted length."""
    lengths = np.linalg.norm(wanted.astype(np.float64), axis=1)
    return np.abs(np.linalg.norm(got.astype(np.float64), axis=1) - lengths) / (lengths + 1e-30)


def logit_differences(
    got: Float[np.ndarray, "rows labels"], wanted: Float[np.ndarray, "rows labels"]
) -> Float[np.ndarray, " rows"]:
    """The largest of each row, as a share of the largest logit of all, or of one: the terms that a
    logit is the sum of are of that size even where they cancel."""
    return np.abs(got - wanted).max(axis=1).astype(np.float64) / max(np.abs(wanted).max(), 1)


def shared_neighbours(
    got: Float[np.ndarray, "rows dim"], wanted: Float[np.ndarray, "rows dim"]
) -> float:
    """Of each text's nearest ten the share that is so in the reference, at worst."""
    count = min(NEIGHBOURS, len(got) - 1)
    if count < 1:
        return 1.0
    ours, theirs = (_similarities(vectors[:MOST_RANKED]) for vectors in (got, wanted))
    nearest = np.argsort(-ours, axis=1, kind="stable")[:, :count]
    least = -np.sort(-theirs, axis=1)[:, count - 1 : count]  # of the reference's own
    return float((np.take_along_axis(theirs, nearest, axis=1) >= least - TIE).mean(axis=1).min())


def same_order(
    got: Float[np.ndarray, "rows labels"], wanted: Float[np.ndarray, "rows labels"]
) -> float:
    """Of any two documents the share that is ranked as in the reference."""
    ours, theirs = (
        np.subtract.outer(logits[:MOST_RANKED, 0], logits[:MOST_RANKED, 0])
        for logits in (got, wanted)
    )
    ordered = np.abs(theirs) > TIE
    return float((ours * theirs > 0)[ordered].mean()) if ordered.any() else 1.0


def same_best(
    got: Float[np.ndarray, "rows labels"], wanted: Float[np.ndarray, "rows labels"]
) -> float:
    """The share of inputs that have the same best label."""
    return float((got.argmax(axis=1) == wanted.argmax(axis=1)).mean())


def _similarities(vectors: np.ndarray) -> np.ndarray:
    """Cosines, of a text with itself less than any."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled = vectors / np.where(lengths == 0, 1, lengths)
    cosines = scaled @ scaled.T
    np.fill_diagonal(cosines, -2)
    return cosines
