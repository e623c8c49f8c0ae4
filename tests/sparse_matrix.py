"""Sparse outputs as plain matrices."""

import numpy as np

from jaxembed.data.work import SparseRows


def as_dense(rows: SparseRows) -> np.ndarray:
    """The matrix of sparse rows, which are checked."""
    matrix = np.zeros((len(rows), rows.width), np.float32)
    for row, indices, values in zip(matrix, rows.indices, rows.values, strict=True):
        assert (np.diff(indices) > 0).all()
        assert (values != 0).all()
        assert (indices.dtype, values.dtype) == (np.int32, np.float32)
        row[indices] = values
    return matrix
