"""Vectors in fewer bytes: the values of sentence-transformers, and what real clients decode."""

from typing import get_args

import numpy as np
import pytest

from jaxembed.errors import InvalidInput
from jaxembed.quantise import EmbeddingDtype, embedding_dtype, quantise

# What sentence_transformers 6.2.0's quantize_embeddings gave for VECTORS and RANGES. The values of
# the first dimension are below, on, within and above the range; the last dimension never varied.
RANGES = np.array([[-0.5, -1.0, 0.0, 0.25], [0.5, 1.0, 0.75, 0.25]], np.float32)
VECTORS = np.array(
    [
        [-0.75, 0.0, -0.0, 0.25],
        [-0.5, 0.999, 0.3, 0.9],
        [0.1, -1.0, 0.75, 1.5],
        [0.5, 0.5, 1e-30, -3.0],
        [0.75, -0.25, 0.5, 400.0],
    ],
    np.float32,
)
UINT8 = [[0, 127, 0, 0], [0, 254, 102, 0], [153, 0, 255, 1], [254, 191, 0, 0], [255, 95, 170, 255]]
UBINARY = [[16], [112], [176], [224], [176]]


@pytest.fixture(name="vectors")
def _vectors():
    return np.random.default_rng(0).normal(size=(7, 21)).astype(np.float32)


@pytest.fixture(name="ranges")
def _ranges(vectors):
    return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def test_bytes_are_those_of_sentence_transformers():
    np.testing.assert_array_equal(quantise(VECTORS, "uint8", RANGES), UINT8)
    np.testing.assert_array_equal(quantise(VECTORS, "int8", RANGES), np.subtract(UINT8, 128))
    np.testing.assert_array_equal(quantise(VECTORS, "ubinary"), UBINARY)
    np.testing.assert_array_equal(quantise(VECTORS, "binary"), np.subtract(UBINARY, 128))


@pytest.mark.parametrize("dtype", get_args(EmbeddingDtype))
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_each_dtype_has_its_type_and_width(vectors, ranges, dtype, rows):
    numpy_names = {"float": "float32", "binary": "int8", "ubinary": "uint8"}
    encoded = quantise(vectors[:rows], dtype, ranges)
    assert encoded.dtype == numpy_names.get(dtype, dtype)
    assert encoded.shape == (rows, 3 if "binary" in dtype else 21)
    assert encoded.flags.c_contiguous


@pytest.mark.parametrize("dtype", get_args(EmbeddingDtype))
def test_a_vector_is_the_same_in_any_batch_and_memory_order(vectors, ranges, dtype):
    copies = vectors.copy(), ranges.copy()
    together = quantise(np.asfortranarray(vectors), dtype, ranges)
    alone = [quantise(vectors[i : i + 1], dtype, ranges)[0] for i in range(len(vectors))]
    np.testing.assert_array_equal(together, alone)
    assert together.flags.c_contiguous
    np.testing.assert_array_equal(vectors, copies[0])  # what is given stays as it is
    np.testing.assert_array_equal(ranges, copies[1])


def test_whole_bytes_need_ranges(vectors):
    with pytest.raises(ValueError, match="need ranges"):
        quantise(vectors, "int8")


def test_float16_holds_what_rounds_to_its_largest_value():
    edge = np.nextafter(np.float32(65520), np.float32(0))
    np.testing.assert_array_equal(quantise(np.array([[edge, -edge]]), "float16"), [[65504, -65504]])
    for value in (65520, -65520):
        with pytest.raises(InvalidInput, match="values up to 65504, and a vector has 65520") as one:
            quantise(np.array([[1.0, value]], np.float32), "float16")
        assert one.value.field == "output_dtype"


def test_an_unknown_dtype_is_refused_with_those_that_there_are():
    wanted = "`dtype` must be one of float, float16, int8, uint8, binary, ubinary. Given: "
    for name in ("float32", "int4", "", None, 8, ["binary"], "x" * 1000):
        with pytest.raises(InvalidInput, match=wanted) as refused:
            embedding_dtype(name, "dtype")
        assert refused.value.field == "dtype"
        assert len(str(refused.value)) < 140
