"""Compares, scores, ranks and encodes the outputs of models on the host: dense vectors, logits,
sparse embeddings and multi-vector embeddings."""

from binascii import b2a_base64
from collections.abc import Collection
from typing import Literal

import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxembed.data.spec import ScoreFunction
from jaxembed.data.work import Ragged, SparseRows

Ties = Literal["first", "last"]  # whether the first or the last of equal logits is ranked higher
PRODUCT_BYTES = 4 << 20  # bytes of dot products that `maxsim` holds at a time


def similarity(
    source: Float[np.ndarray, " dim"], others: Float[np.ndarray, "rows dim"]
) -> Float[np.ndarray, " rows"]:
    """Return the cosine similarity of `source` to each of `others`; 0 for a zero vector."""
    products = np.einsum("nd,d->n", others, source, dtype=np.float64)
    divisors = _lengths(others) * _lengths(source[None, :])
    cosines = products / np.where(divisors > 0, divisors, 1.0)
    return np.clip(cosines, -1.0, 1.0).astype(np.float32)


def scores(
    logits: Float[np.ndarray, "rows labels"], score_function: ScoreFunction
) -> Float[np.ndarray, "rows labels"]:
    """Convert logits to scores from 0 to 1: by the sigmoid, or by the softmax of each row. Cosines
    are scores already."""
    if score_function == "cosine":
        return logits
    exact = logits.astype(np.float64)
    if score_function == "sigmoid":
        return np.exp(-np.logaddexp(0, -exact)).astype(np.float32)  # exp(-x) alone could overflow
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def rank(logits: Float[np.ndarray, " n"], ties: Ties = "first") -> Int[np.ndarray, " n"]:
    """Return the indices that sort the logits from the highest to the lowest.

    `ties` says which of equal logits comes first: the one with the lowest index ("first") or with
    the highest index ("last"). Use logits rather than scores, because different logits far from
    zero can have the same score.
    """
    if ties == "first":
        return np.argsort(-logits, kind="stable")
    return np.argsort(logits, kind="stable")[::-1]


def to_bytes(vectors: Shaped[np.ndarray, "..."]) -> bytes:
    """Return the bytes of the vectors, row after row, in their dtype and little-endian."""
    return vectors.tobytes()  # all platforms of JAX are little-endian


def to_base64(vectors: Shaped[np.ndarray, "..."]) -> str:
    """Encode the bytes of vectors, row after row, in standard base64.

    OpenAI's clients decode float32 vectors in this form, and Voyage's clients decode any dtype.
    """
    return b2a_base64(to_bytes(vectors), newline=False).decode("ascii")


def term_weights(
    weights: Float[np.ndarray, " tokens"],
    ids: Int[np.ndarray, " tokens"],
    lengths: Int[np.ndarray, " texts"],
    *,
    skipped: Collection[int],
    vocab_size: int,
) -> SparseRows:
    """Return the weight of each term in each text: the largest weight of the term's tokens there.

    It is the lexical weight of BGE-M3 (Chen et al. 2024, arXiv:2402.03216, section 3.2). `weights`
    and `ids` hold the tokens of all texts, one text after the other, and `lengths` the number of
    tokens of each text. Tokens with an id in `skipped` or a weight of 0 or less are left out.
    """
    counted = (weights > 0) & ~np.isin(ids, list(skipped))
    text_of = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)[counted]
    # indices in the flattened matrix of the weights `[texts, terms]`
    flat, values = text_of * vocab_size + ids[counted], weights[counted]
    order = np.argsort(flat, kind="stable")
    flat, values = flat[order], values[order]
    firsts = np.flatnonzero(np.diff(flat, prepend=-1))  # the first of each run of equal indices
    largest = np.maximum.reduceat(values, firsts) if len(firsts) else values
    return SparseRows.from_flat(flat[firsts], largest, len(lengths), vocab_size)


def keep_largest(rows: SparseRows, max_terms: int) -> SparseRows:
    """Keep at most `max_terms` values of each row: the values of the largest magnitude.

    Of values with the same magnitude, those with the lowest indices are kept.
    """
    indices, values = list(rows.indices), list(rows.values)
    for index, weights in enumerate(values):
        if len(weights) > max_terms:
            chosen = np.sort(np.argsort(-np.abs(weights), kind="stable")[:max_terms])
            indices[index], values[index] = indices[index][chosen], weights[chosen]
    return SparseRows(rows.width, indices, values)


def products(rows: SparseRows, others: SparseRows) -> Float[np.ndarray, "rows others"]:
    """Return the inner product of each row with each of `others`, summed in float64."""
    result = np.zeros((len(rows), len(others)), np.float32)
    values, indices, offsets = others.csr
    filled = np.diff(offsets) > 0
    dense = np.zeros(rows.width)
    for index, (columns, weights) in enumerate(zip(rows.indices, rows.values, strict=True)):
        dense[columns] = weights
        if filled.any():
            result[index, filled] = np.add.reduceat(values * dense[indices], offsets[:-1][filled])
        dense[columns] = 0
    return result


def cosines(rows: SparseRows, others: SparseRows) -> Float[np.ndarray, "rows others"]:
    """Return the cosine similarity of each row to each of `others`; 0 if a row is empty."""
    norms = [
        np.array([np.linalg.norm(values.astype(np.float64)) for values in matrix.values])
        for matrix in (rows, others)
    ]
    divisors = np.outer(norms[0], norms[1])
    result = products(rows, others) / np.where(divisors > 0, divisors, 1.0)
    return np.clip(result, -1.0, 1.0).astype(np.float32)


def maxsim(
    query: Float[np.ndarray, "vectors dim"], documents: Ragged
) -> Float[np.ndarray, " documents"]:
    """Return the MaxSim score of each document, float32: the sum, over the query's vectors, of the
    highest dot product with a vector of the document.

    Source: Khattab and Zaharia 2020, ColBERT, arXiv:2004.12832, equation 3. `documents` has float32
    `[vectors, dim]` for each document. A score does not depend on the other documents. Vectors are
    not normalised here. A document without vectors scores -inf. A query without vectors scores 0
    with every document that has vectors. If all dot products are finite, no score is NaN.

    Dot products are computed in blocks of at most PRODUCT_BYTES, by numpy's BLAS, without the
    interpreter lock.
    """
    scores = np.full(len(documents), -np.inf, np.float32)
    filled = np.flatnonzero(np.diff(documents.offsets))  # the documents with vectors
    if not len(filled):
        return scores
    starts = documents.offsets[filled]  # ascending; the documents between these are empty
    size = max(PRODUCT_BYTES // (4 * max(len(query), 1)), 1)  # vectors in a block
    buffer = np.empty(len(query) * min(size, len(documents.values)), np.float32)
    carried = np.full(len(query), -np.inf, np.float32)  # the maxima of an unfinished document
    end = documents.offsets[-1]
    for block_start in range(starts[0], end, size):
        block = documents.values[block_start : min(block_start + size, end)]
        products = buffer[: len(query) * len(block)].reshape(len(query), len(block))
        np.matmul(query, block.T, out=products)
        first = np.searchsorted(starts, block_start, side="right") - 1
        after = np.searchsorted(starts, block_start + len(block))
        # where the documents from `first` to `after` begin in the block
        cuts = np.maximum(starts[first:after] - block_start, 0)
        maxima = np.maximum.reduceat(products, cuts, axis=1)  # [vectors, documents of the block]
        if starts[first] < block_start:  # the first document began in an earlier block
            np.maximum(maxima[:, 0], carried, out=maxima[:, 0])
        carried = maxima[:, -1]
        # The last document may go on in the next block, which then replaces its score.
        scores[filled[first:after]] = maxima.sum(axis=0, dtype=np.float64)
    return scores


def _lengths(vectors: np.ndarray) -> np.ndarray:
    """Return the Euclidean length of each row, in float64 because squares can overflow float32."""
    squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    return np.sqrt(squares, out=squares)
