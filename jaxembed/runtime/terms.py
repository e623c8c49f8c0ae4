"""Weights of terms on the host: made of tokens' weights, cut to the largest, multiplied.

Uses no device and no HTTP.
"""

from collections.abc import Collection

import numpy as np
from jaxtyping import Float, Int

from jaxembed.data.work import SparseRows


def terms_of_tokens(
    weights: Float[np.ndarray, " tokens"],
    ids: Int[np.ndarray, " tokens"],
    lengths: Int[np.ndarray, " texts"],
    *,
    skipped: Collection[int],
    vocab_size: int,
) -> SparseRows:
    """The weight of each term in each text: the largest of its tokens', as in BGE-M3 (Chen et al.
    2024, arXiv:2402.03216, section 3.2).

    The texts' tokens are one after the other, `lengths` of each. Tokens whose id is `skipped` or
    whose weight is not over 0 give no term.
    """
    counted = (weights > 0) & ~np.isin(ids, list(skipped))
    text_of = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)[counted]
    places, own = text_of * vocab_size + ids[counted], weights[counted]
    order = np.argsort(places, kind="stable")
    places, own = places[order], own[order]
    first = np.flatnonzero(np.diff(places, prepend=-1))
    largest = np.maximum.reduceat(own, first) if len(first) else own
    return SparseRows.of_places(places[first], largest, len(lengths), vocab_size)


def most_active(rows: SparseRows, most: int) -> SparseRows:
    """The rows with at most `most` values each, those of the largest magnitude; of equal ones those
    with the least index."""
    chosen = [np.sort(np.argsort(-np.abs(one), kind="stable")[:most]) for one in rows.values]
    indices = [one[k] for one, k in zip(rows.indices, chosen, strict=True)]
    return SparseRows(
        rows.width, indices, [one[k] for one, k in zip(rows.values, chosen, strict=True)]
    )


def products(rows: SparseRows, others: SparseRows) -> Float[np.ndarray, "rows others"]:
    """The inner product of each row with each of the others, summed in float64."""
    found = np.zeros((len(rows), len(others)), np.float32)
    values, indices, offsets = others.csr
    held = np.diff(offsets) > 0
    dense = np.zeros(rows.width)
    for number, (own, weights) in enumerate(zip(rows.indices, rows.values, strict=True)):
        dense[own] = weights
        if held.any():
            found[number, held] = np.add.reduceat(values * dense[indices], offsets[:-1][held])
        dense[own] = 0
    return found


def cosines(rows: SparseRows, others: SparseRows) -> Float[np.ndarray, "rows others"]:
    """The cosine similarity of each row with each of the others; 0 if one of them has no values."""
    lengths = np.outer(_lengths(rows), _lengths(others))
    found = products(rows, others) / np.where(lengths > 0, lengths, 1.0)
    return np.clip(found, -1.0, 1.0).astype(np.float32)


def _lengths(rows: SparseRows) -> np.ndarray:
    """The Euclidean length of each row, in float64."""
    return np.array([np.linalg.norm(values.astype(np.float64)) for values in rows.values])
