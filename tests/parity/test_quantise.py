"""Vectors in fewer bytes, beside sentence-transformers' `quantize_embeddings`."""

import numpy as np
import pytest
from sentence_transformers.util import quantize_embeddings

from jaxembed.quantise import quantise


@pytest.mark.parametrize("dim", [1, 7, 8, 384, 1001])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
def test_every_byte_is_the_same(dtype, dim):
    random = np.random.default_rng(dim)
    calibration, vectors = random.normal(size=(2, 500, dim)).astype(np.float32)
    vectors[::7] = calibration[::7]  # so that some values are on the ends of their range
    vectors[::5, ::3] = 0
    calibration[:, dim // 2] = 0.25  # a dimension that never varied
    ranges = np.stack([calibration.min(axis=0), calibration.max(axis=0)])
    reference = quantize_embeddings(vectors, dtype, ranges=ranges)
    ours = quantise(vectors, dtype, ranges)
    assert ours.dtype == reference.dtype
    np.testing.assert_array_equal(ours, reference)
