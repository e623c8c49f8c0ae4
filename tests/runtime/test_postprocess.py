"""Vectors cut, normalised, compared and encoded; logits made scores and ranked."""

import base64

import numpy as np
import pytest

from jaxembed.runtime.postprocess import (
    rank,
    scores,
    similarity,
    to_base64,
    to_bytes,
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
    logits = np.array(
        [[-1e30, 0.0, -200.0], [3e38, -3e38, 0.0], [-100.0, -11.0, 100.0]], np.float32
    )
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


def test_base64_is_little_endian_float32(dense):
    decoded = np.frombuffer(base64.b64decode(to_base64(dense[1])), "<f4")
    np.testing.assert_array_equal(decoded, dense[1])
    np.testing.assert_array_equal(np.frombuffer(to_bytes(dense), "<f4").reshape(5, 12), dense)
