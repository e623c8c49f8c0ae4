"""Scores documents of several vectors against a query of several vectors, on the host.

Uses no device and no HTTP.
"""

import numpy as np
from jaxtyping import Float, Int

from jaxembed.data.work import Ragged

PRODUCT_BYTES = 4 << 20  # of the products of the query with some rows, held at once


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
    rows = _rows_at_once(len(query))
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


def alignment(
    query: Float[np.ndarray, "vectors dim"], document: Float[np.ndarray, "others dim"]
) -> tuple[Int[np.ndarray, " vectors"], Float[np.ndarray, " vectors"]]:
    """For each vector of the query, the index of the document's vector with the highest dot
    product, and that product, float32. The products add up to `maxsim`; of vectors whose products
    differ by less than float32 rounds, any may be named.

    Products of at most PRODUCT_BYTES are held at once. Raises ValueError if the document has no
    vectors and the query has some.
    """
    matches = np.empty(len(query), np.int64)
    similarities = np.empty(len(query), np.float32)
    rows = _rows_at_once(len(document))
    for row in range(0, len(query), rows):
        products = query[row : row + rows] @ document.T
        matches[row : row + rows] = products.argmax(axis=1)
        similarities[row : row + rows] = products.max(axis=1)
    return matches, similarities


def _rows_at_once(others: int) -> int:
    """How many rows' products with `others` vectors fit into a block; one at least."""
    return max(PRODUCT_BYTES // (4 * max(others, 1)), 1)
