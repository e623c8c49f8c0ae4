"""Compares, scores, ranks and encodes float32 vectors and logits on the host.

Uses no device and no HTTP.
"""

import base64
from typing import Literal

import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxembed.data.spec import ScoreFunction

Ties = Literal["first", "last"]  # which of equal logits is ranked higher


def similarity(
    source: Float[np.ndarray, " dim"], others: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """The cosine similarity of `source` and each of `others`; 0 if one of them is a zero vector."""
    products = np.einsum("nd,d->n", others, source, dtype=np.float64)
    lengths = _lengths(others) * _lengths(source[None, :])
    cosines = products / np.where(lengths > 0, lengths, 1.0)
    return np.clip(cosines, -1.0, 1.0).astype(np.float32)


def scores(
    logits: Float[np.ndarray, "rows labels"], score_function: ScoreFunction
) -> Float[np.ndarray, "rows labels"]:
    """Scores from 0 to 1: the sigmoid of each logit, or the softmax of each row."""
    exact = logits.astype(np.float64)
    if score_function == "sigmoid":
        return np.exp(-np.logaddexp(0, -exact)).astype(np.float32)  # 1 + exp(-x) could overflow
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def rank(logits: Float[np.ndarray, " n"], ties: Ties = "first") -> Int[np.ndarray, " n"]:
    """The indices that sort the logits from the highest to the lowest.

    `ties` says which of equal logits comes first: the first or the last. Scores would not do,
    because different logits far from zero have the same score.
    """
    if ties == "first":
        return np.argsort(-logits, kind="stable")
    return np.argsort(logits, kind="stable")[::-1]


def to_bytes(vectors: Shaped[np.ndarray, "..."]) -> bytes:
    """The bytes of the vectors, row after row, of their own dtype, little-endian everywhere."""
    return np.ascontiguousarray(vectors, dtype=vectors.dtype.newbyteorder("<")).tobytes()


def to_base64(vectors: Shaped[np.ndarray, "..."]) -> str:
    """The bytes of a vector, or of several row after row, in standard base64, as OpenAI's clients
    decode those of float32, and Voyage's those of any dtype."""
    return base64.b64encode(to_bytes(vectors)).decode("ascii")


def _lengths(vectors: np.ndarray) -> np.ndarray:
    """The Euclidean length of each row, in float64 because squares can overflow float32."""
    squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    return np.sqrt(squares, out=squares)
