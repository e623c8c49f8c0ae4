"""MaxSim is that of a loop in float64; blocks, neighbours, order and repetition do not matter."""

import tracemalloc

import numpy as np
import pytest

from jaxembed.data.work import Ragged
from jaxembed.runtime import postprocess as module
from jaxembed.runtime.postprocess import maxsim

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
    """Random vectors of length one."""
    vectors = random.normal(size=(count, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def ragged(documents: list[np.ndarray]) -> Ragged:
    offsets = np.cumsum([0, *map(len, documents)])
    return Ragged(np.concatenate(documents), offsets)


def reference(query: np.ndarray, documents: list[np.ndarray]) -> np.ndarray:
    """MaxSim in float64, one vector after the other."""
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


def test_a_score_by_hand():
    query = np.array([[1, 0], [0, 2]], np.float32)
    documents = [
        np.array([[3, 1], [1, 4]], np.float32),  # 3 + 8
        np.array([[-1, -2]], np.float32),  # -1 - 4: without a floor of zero
        np.array([[0, 0]], np.float32),
    ]
    assert maxsim(query, ragged(documents)).tolist() == [11, -5, 0]


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


def test_a_document_without_vectors_scores_below_all_others(query):
    worst = -1e3 * query[:1]
    scores = maxsim(query, ragged([worst, worst[:0], worst]))
    assert scores[1] == -np.inf
    assert np.isfinite(scores[[0, 2]]).all()
    assert maxsim(query, ragged([worst[:0]] * 2)).tolist() == [-np.inf] * 2


def test_no_documents_are_no_scores(query):
    none = Ragged(np.zeros((0, DIM), np.float32), np.zeros(1, np.int64))
    scores = maxsim(query, none)
    assert (scores.shape, scores.dtype) == ((0,), np.float32)


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
