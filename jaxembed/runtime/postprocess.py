"""Compares, scores, ranks and encodes what models give, on the host: vectors, logits, weights of
terms, and several vectors a text.

Uses no device and no HTTP.
"""

import base64
from collections.abc import Collection
from typing import Literal

import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxembed.data.spec import ScoreFunction
from jaxembed.data.work import Ragged, SparseRows

Ties = Literal["first", "last"]  # which of equal logits is ranked higher
PRODUCT_BYTES = 4 << 20  # of the products of a query with some rows, held at once


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
    with the least index. A row that is short enough is kept as it is."""
    indices, values = list(rows.indices), list(rows.values)
    for number, weights in enumerate(values):
        if len(weights) > most:
            chosen = np.sort(np.argsort(-np.abs(weights), kind="stable")[:most])
            indices[number], values[number] = indices[number][chosen], weights[chosen]
    return SparseRows(rows.width, indices, values)


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
    each = [
        np.array([np.linalg.norm(values.astype(np.float64)) for values in one.values])
        for one in (rows, others)
    ]
    lengths = np.outer(each[0], each[1])
    found = products(rows, others) / np.where(lengths > 0, lengths, 1.0)
    return np.clip(found, -1.0, 1.0).astype(np.float32)


def maxsim(
    query: Float[np.ndarray, "vectors dim"], documents: Ragged
) -> Float[np.ndarray, " documents"]:
    """MaxSim of the query and each document, float32: the sum over the query's vectors of the
    highest dot product with one of the document's vectors (Khattab and Zaharia, ColBERT,
    arXiv:2004.12832, equation 3).

    `documents` has an array of float32 `[vectors, dim]` for each document, whose length and order
    do not matter to the others. Vectors are taken as they are, normalised or not. A document
    without vectors scores -inf, below all others. A query without vectors scores 0 with every
    document that has vectors. Finite vectors whose products are finite never give NaN.

    Products of at most PRODUCT_BYTES are held at once, and the maxima of these. They are computed
    in the threads of numpy's BLAS, with the interpreter's lock released.
    """
    scores = np.full(len(documents), -np.inf, np.float32)
    filled = np.flatnonzero(np.diff(documents.offsets))  # the documents with vectors
    if not len(filled):
        return scores
    starts = documents.offsets[filled]  # ascending: between them lies no other document
    rows = max(PRODUCT_BYTES // (4 * max(len(query), 1)), 1)  # whose products fit a block
    buffer = np.empty(len(query) * min(rows, len(documents.values)), np.float32)
    carried = np.full(len(query), -np.inf, np.float32)  # the maxima of an unfinished document
    end = documents.offsets[-1]
    for row in range(starts[0], end, rows):
        block = documents.values[row : min(row + rows, end)]
        products = buffer[: len(query) * len(block)].reshape(len(query), len(block))
        np.matmul(query, block.T, out=products)
        first = np.searchsorted(starts, row, side="right") - 1
        after = np.searchsorted(starts, row + len(block))
        cuts = np.maximum(starts[first:after] - row, 0)
        maxima = np.maximum.reduceat(products, cuts, axis=1)  # [vectors, documents of the block]
        if starts[first] < row:
            np.maximum(maxima[:, 0], carried, out=maxima[:, 0])
        carried = maxima[:, -1]
        # The last document may go on in the next block, which then replaces its score.
        scores[filled[first:after]] = maxima.sum(axis=0, dtype=np.float64)
    return scores


def _lengths(vectors: np.ndarray) -> np.ndarray:
    """The Euclidean length of each row, in float64 because squares can overflow float32."""
    squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    return np.sqrt(squares, out=squares)
