"""Embedder: the library's face."""

import asyncio

import numpy as np
import pytest

from jaxembed.errors import EmptyInput, InputTooLong, InvalidInput

TEXTS = ["the cat sat on the mat", "a dog", "how is the sky", "where is the red train " * 6]


def test_one_text_gives_one_vector(embedder):
    vector = embedder.encode("the cat")
    assert vector.shape == (32,)
    assert vector.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vector), 1, rtol=1e-6)


def test_many_texts_keep_their_order(embedder):
    together = embedder.encode(TEXTS * 10)
    for i, text in enumerate(TEXTS):
        np.testing.assert_allclose(together[i], embedder.encode(text), atol=1e-5)
        np.testing.assert_array_equal(together[i], together[i])


def test_no_texts_give_no_vectors(embedder):
    assert embedder.encode([]).shape == (0, 32)
