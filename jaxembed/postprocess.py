"""Shapes float32 vectors and logits on the host: cut, normalise, compare, rank, encode.

Knows no device and no HTTP.
"""

import base64
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jaxembed.spec import ScoreFunction

Ties = Literal["first", "last"]  # which of equal ones is ranked higher


def shape_vectors(
    dense: Float[np.ndarray, "rows width"], *, dimensions: int | None, normalize: bool
) -> Float[np.ndarray, "rows dim"]:
    """The first `dimensions` of each vector as C-contiguous float32, at length one if asked.

    Cut first, so that a shortened vector has length one too. A zero vector stays zero.
    """
    cut = np.ascontiguousarray(dense[:, :dimensions], dtype=np.float32)
    if not normalize:
        return cut
    lengths = _lengths(cut)[:, None]
    # Divided in float64 and rounded once, in numpy's small buffers rather than a second matrix.
    return np.divide(
        cut, np.where(lengths > 0, lengths, 1.0), out=np.empty_like(cut), casting="same_kind"
    )


def similarity(
    source: Float[np.ndarray, " dim"], others: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """Cosine of the angle between `source` and each of `others`; 0 where one is a zero vector."""
    products = np.einsum("nd,d->n", others, source, dtype=np.float64)
    lengths = _lengths(others) * _lengths(source[None, :])
    cosines = products / np.where(lengths > 0, lengths, 1.0)
    return np.clip(cosines, -1.0, 1.0).astype(np.float32)


def scores(
    logits: Float[np.ndarray, "rows labels"], score_function: ScoreFunction
) -> Float[np.ndarray, "rows labels"]:
    """Scores from 0 to 1, of each logit by itself or adding up to one in a row."""
    exact = logits.astype(np.float64)
    if score_function == "sigmoid":
        return np.exp(-np.logaddexp(0, -exact)).astype(np.float32)  # 1 + exp(-x) could overflow
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def rank(logits: Float[np.ndarray, " n"], ties: Ties = "first") -> Int[np.ndarray, " n"]:
    """Indices from the highest logit to the lowest; of equal ones the first or the last first.

    By logits, not scores: far from zero different logits have the same score.
    """
    if ties == "first":
        return np.argsort(-logits, kind="stable")
    return np.argsort(logits, kind="stable")[::-1]


def to_bytes(vectors: Float[np.ndarray, "..."]) -> bytes:
    """Little-endian float32, row after row, whatever this machine's byte order."""
    return np.ascontiguousarray(vectors, dtype="<f4").tobytes()


def to_base64(row: Float[np.ndarray, " dim"]) -> str:
    """Standard alphabet with padding, over little-endian float32: what OpenAI's clients decode."""
    return base64.b64encode(to_bytes(row)).decode("ascii")


def _lengths(vectors: np.ndarray) -> np.ndarray:
    """Euclidean length of each row, [rows] float64: squares of large float32 values overflow."""
    return np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
