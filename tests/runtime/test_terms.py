"""Weights of terms on the host."""

import numpy as np
import pytest
from sparse_matrix import as_dense
from test_sparse import mostly_zero

from jaxembed.data.work import to_sparse_rows
from jaxembed.runtime.postprocess import cosines, keep_largest, products, term_weights

WEIGHTS = np.array([9, 0.5, 0.25, 0.75, 0, 8, 7, -1, 0.1], np.float32)
IDS = np.array([0, 5, 6, 5, 7, 2, 0, 6, 2], np.int32)


def test_a_term_has_the_largest_weight_of_its_tokens():
    """Skipped ids, zeros and negative weights give none; equal ids of two texts stay apart."""
    lengths = np.array([6, 0, 3])
    rows = term_weights(WEIGHTS, IDS, lengths, skipped=(0, 2), vocab_size=10)
    wanted = np.zeros((3, 10), np.float32)
    wanted[0, 5], wanted[0, 6] = 0.75, 0.25
    np.testing.assert_array_equal(as_dense(rows), wanted)


def test_scipy_takes_the_rows():
    pytest.importorskip("scipy")
    matrix = mostly_zero(5, 9, 0.3)
    matrix[:, -1] = 0
    np.testing.assert_array_equal(to_sparse_rows(matrix).to_scipy().toarray(), matrix)


@pytest.mark.parametrize("max_terms", [1, 3, 100])
def test_the_largest_values_are_kept(max_terms):
    matrix = mostly_zero(6, 30, 0.4)
    matrix[0, [3, 7, 9]] = -5, 5, 5  # of equal magnitudes the first
    wanted = np.zeros_like(matrix)
    for row, kept in zip(matrix, wanted, strict=True):
        chosen = np.argsort(-np.abs(row), kind="stable")[:max_terms]
        kept[chosen] = row[chosen]
    np.testing.assert_array_equal(as_dense(keep_largest(to_sparse_rows(matrix), max_terms)), wanted)


def test_products_are_those_of_the_matrices():
    rows, others = mostly_zero(3, 40, 0.3, seed=1), mostly_zero(7, 40, 0.3, seed=2)
    others[[0, 3, 6]] = 0
    got = products(to_sparse_rows(rows), to_sparse_rows(others))
    np.testing.assert_allclose(got, rows.astype(np.float64) @ others.T, rtol=1e-6, atol=1e-7)


def test_cosines_are_those_of_the_rows():
    rows, others = mostly_zero(3, 40, 0.3, seed=1), mostly_zero(7, 40, 0.3, seed=2)
    rows[2] = others[4] = 0
    others[1] = 3 * rows[0]
    got = cosines(to_sparse_rows(rows), to_sparse_rows(others))
    assert (got.dtype, got[0, 1]) == (np.float32, pytest.approx(1, rel=1e-6))
    assert not got[2].any()
    assert not got[:, 4].any()
    lengths = np.outer(*(np.linalg.norm(one.astype(float), axis=1) for one in (rows, others)))
    wanted = rows.astype(float) @ others.T / np.where(lengths > 0, lengths, 1)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)
