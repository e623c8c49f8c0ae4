"""Scores documents of several vectors against a query of several vectors, on the host.

Uses no device and no HTTP.
"""

import numpy as np
from jaxtyping import Float

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
