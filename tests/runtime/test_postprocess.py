"""Vectors cut, normalised, compared and encoded; logits made scores and ranked; weights of terms;
MaxSim, which is that of a loop in float64: blocks, neighbours and order do not matter."""

import tracemalloc

import numpy as np
import pytest
from sparse_matrix import as_dense
from test_sparse import mostly_zero

from jaxembed.data.work import Ragged, to_sparse_rows
from jaxembed.runtime import postprocess as module
from jaxembed.runtime.postprocess import (
    cosines,
    keep_largest,
    maxsim,
    products,
    rank,
    scores,
    similarity,
    term_weights,
)
from jaxembed.runtime.requests import shape_vectors


@pytest.fixture(name="dense")
def _dense():
    return np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)


@pytest.mark.parametrize("dimensions", [None, 1, 7, 12])
def test_vectors_are_cut_first_and_then_normalised(dense, dimensions):
    shaped = shape_vectors(dense, dimensions=dimensions, normalize=True)
    cut = dense[:, :dimensions].astype(np.float64)
    wanted = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_array_equal(shaped, wanted.astype(np.float32))
    assert shaped.dtype == np.float32
    assert shaped.flags.c_contiguous
    plain = shape_vectors(dense, dimensions=dimensions, normalize=False)
    np.testing.assert_array_equal(plain, dense[:, :dimensions])


def test_huge_and_tiny_vectors_get_length_one_and_zeros_stay_zero():
    dense = np.array([[1e38] * 4, [1e-38] * 4, [0] * 4], np.float32)
    shaped = shape_vectors(dense, dimensions=None, normalize=True)
    np.testing.assert_allclose(shaped, [[0.5] * 4, [0.5] * 4, [0] * 4], rtol=1e-6)
    assert shape_vectors(dense[:0], dimensions=2, normalize=True).shape == (0, 2)


def test_similarity_is_the_cosine(dense):
    others = np.stack([dense[0], -dense[0], np.zeros(12, np.float32)])
    np.testing.assert_allclose(similarity(dense[0], others), [1, -1, 0], rtol=1e-6)
    lengths = np.linalg.norm(dense, axis=1)
    wanted = dense[1:] @ dense[0] / (lengths[1:] * lengths[0])
    np.testing.assert_allclose(similarity(dense[0], dense[1:]), wanted, rtol=1e-5)


def test_scores_of_labels_add_up_to_one_or_stand_alone(dense):
    logits = dense[:, :3]
    powers = np.exp(logits)
    softmax = scores(logits, "softmax")
    np.testing.assert_allclose(softmax, powers / powers.sum(axis=1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(scores(logits, "sigmoid"), 1 / (1 + np.exp(-logits)), rtol=1e-6)
    assert softmax.dtype == np.float32


def test_huge_logits_give_scores_without_overflow():
    """TEI's softmax gives NaN here; a score far from 0.5 keeps its precision."""
    logits = np.array([[-1e30, 0, -200], [3e38, -3e38, 0], [-100, -11, 100]], np.float32)
    softmax = scores(logits, "softmax")
    np.testing.assert_allclose(softmax, [[0, 1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-30)
    sigmoid = scores(logits, "sigmoid")
    np.testing.assert_array_equal(sigmoid[1], [1, 0, 0.5])
    np.testing.assert_allclose(sigmoid[2, 1:], [1.670142e-5, 1], rtol=1e-6)


def test_ranks_are_descending_and_ties_keep_their_order_or_turn_it_around():
    values = np.array([0.5, 2, 0.5, -1, 2, 0.5], np.float32)
    assert rank(values).tolist() == [1, 4, 0, 2, 5, 3]
    assert rank(values, ties="last").tolist() == [4, 1, 5, 2, 0, 3]
    assert rank(np.zeros(0, np.float32)).tolist() == []


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


@pytest.mark.parametrize("empty", [[4], [0, 3, 6]])
def test_products_and_cosines_are_those_of_the_rows(empty):
    rows, others = mostly_zero(3, 40, 0.3, seed=1), mostly_zero(7, 40, 0.3, seed=2)
    rows[2] = others[empty] = 0
    others[1] = 3 * rows[0]
    sparse = to_sparse_rows(rows), to_sparse_rows(others)
    got, wanted = products(*sparse), rows.astype(float) @ others.T
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)
    got = cosines(*sparse)
    assert (got.dtype, got[0, 1]) == (np.float32, pytest.approx(1, rel=1e-6))
    assert not got[2].any()
    assert not got[:, empty].any()
    lengths = np.outer(*(np.linalg.norm(one.astype(float), axis=1) for one in (rows, others)))
    wanted /= np.where(lengths > 0, lengths, 1)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


LENGTHS = (7, 0, 1, 40, 0, 0, 3, 180, 12, 0)
DIM = 24
# float32: a product of vectors of length one is off by some 1e-7, and these errors are random.
TOLERANCE = 1e-6


@pytest.fixture(name="random")
def _random():
    return np.random.default_rng(0)


@pytest.fixture(name="query")
def _query(random):
    return unit(random, 9)


@pytest.fixture(name="documents")
def _documents(random):
    return [unit(random, length) for length in LENGTHS]


def unit(random, count: int, dim: int = DIM) -> np.ndarray:
    vectors = random.normal(size=(count, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def ragged(documents: list[np.ndarray]) -> Ragged:
    offsets = np.cumsum([0, *map(len, documents)])
    return Ragged(np.concatenate(documents), offsets)


def reference(query: np.ndarray, documents: list[np.ndarray]) -> np.ndarray:
    return np.array(
        [
            sum(max(float(q @ v) for v in one) for q in query.astype(np.float64))
            if len(one)
            else -np.inf
            for one in (document.astype(np.float64) for document in documents)
        ]
    )


def test_scores_are_those_of_a_loop_in_float64(query, documents):
    scores = maxsim(query, ragged(documents))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, reference(query, documents), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 40, 41, 179, 243, 244])
def test_scores_do_not_depend_on_the_blocks(query, documents, rows, monkeypatch):
    whole = maxsim(query, ragged(documents))
    monkeypatch.setattr(module, "PRODUCT_BYTES", 4 * len(query) * rows)
    np.testing.assert_allclose(maxsim(query, ragged(documents)), whole, rtol=0, atol=TOLERANCE)


def test_rows_outside_the_documents_do_not_count(query, documents):
    whole = ragged(documents)
    part = Ragged(whole.values, whole.offsets[2:-2])
    huge = part.values.copy()
    huge[: part.offsets[0]] = huge[part.offsets[-1] :] = np.inf
    wanted = maxsim(query, whole)[2:-2]
    found = maxsim(query, Ragged(huge, part.offsets))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def test_a_document_without_vectors_scores_below_all_others_and_none_have_no_score(query):
    worst = -1e3 * query[:1]
    scores = maxsim(query, ragged([worst, worst[:0], worst]))
    assert scores[1] == -np.inf
    assert np.isfinite(scores[[0, 2]]).all()
    assert maxsim(query, ragged([worst[:0]] * 2)).tolist() == [-np.inf] * 2
    none = maxsim(query, Ragged(worst[:0], np.zeros(1, np.int64)))
    assert (none.shape, none.dtype) == ((0,), np.float32)


@pytest.mark.parametrize("lengths", [(1,) * 20_000, (20_000,), (200,) * 100])
def test_memory_is_bounded_by_the_block(lengths, random, monkeypatch):
    monkeypatch.setattr(module, "PRODUCT_BYTES", 1 << 16)
    query, documents = unit(random, 32), ragged([unit(random, length) for length in lengths])
    tracemalloc.start()
    try:
        scores = maxsim(query, documents)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The products, at most as many maxima, their sums; a score and two integers a document.
    assert peak < 3 * module.PRODUCT_BYTES + 40 * len(lengths)
    assert np.isfinite(scores).all()
