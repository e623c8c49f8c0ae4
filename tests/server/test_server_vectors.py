"""Vectors in every dtype, on every route that answers them."""

import base64
from typing import get_args

import numpy as np
import pytest
from fake_embedder import DIM, SPEC, FakeEmbedder, vector
from test_server_openai import ask

from jaxembed.checkpoints.ranges import StoredRanges, VectorKind
from jaxembed.data.inputs import Text
from jaxembed.quantise import EmbeddingDtype, quantise
from jaxembed.runtime.requests import shape_vectors

TEXTS = ["hello world", "a", "b"]
OCTETS = {"accept": "application/octet-stream"}
OPENAI = ("/v1/embeddings", "/embeddings")
TEI = ("/embed", "/", "/invocations")
NUMPY = {"float": "<f4", "float16": "<f2", "binary": "i1", "ubinary": "u1", "int8": "i1"}
dtypes = pytest.mark.parametrize("dtype", get_args(EmbeddingDtype))


def calibrated(*dimensions: int) -> FakeEmbedder:
    embedder = FakeEmbedder()
    for width in dimensions:
        kind = VectorKind("", ("lasttoken",), None, width)
        low, high = [-0.75] * width, [0.5] * width
        embedder.ranges[kind] = StoredRanges(kind, SPEC.content_hash, 100, low, high)
    return embedder


def wanted(dtype: EmbeddingDtype, dimensions: int = DIM) -> np.ndarray:
    rows = np.stack([vector(Text(text)) for text in TEXTS])
    ranges = np.array([[-0.75] * dimensions, [0.5] * dimensions], np.float32)
    return quantise(shape_vectors(rows, dimensions=dimensions, normalize=True), dtype, ranges)


def body_for(path: str, **fields) -> dict:
    return {"input" if path in OPENAI else "inputs": TEXTS, **fields}


def rows_of(path: str, answer) -> list:
    return [item["embedding"] for item in answer["data"]] if path in OPENAI else answer


@dtypes
@pytest.mark.parametrize("path", [*OPENAI, *TEI])
def test_json_has_the_numbers_and_octets_the_bytes_of_the_dtype(path, dtype):
    asked = {"path": path, "embedder": calibrated(DIM), "status": 200}
    response, answer = ask(body_for(path, output_dtype=dtype), **asked)
    assert response.headers["x-embedding-dtype"] == dtype
    rows = rows_of(path, answer)
    np.testing.assert_array_equal(np.array(rows, wanted(dtype).dtype), wanted(dtype))
    kind = float if "float" in dtype else int
    assert all(type(number) is kind for row in rows for number in row)
    response, answer = ask(body_for(path, output_dtype=dtype), headers=OCTETS, **asked)
    assert response.headers["x-embedding-dtype"] == dtype
    shape = tuple(map(int, response.headers["x-embedding-shape"].split(",")))
    rows = np.frombuffer(answer, NUMPY.get(dtype, dtype)).reshape(shape)
    np.testing.assert_array_equal(rows, wanted(dtype))


@dtypes
@pytest.mark.parametrize("path", OPENAI)
def test_base64_is_read_by_the_client_of_voyage(path, dtype):
    """It asks for base64 by itself and gives the bytes to numpy as what `output_dtype` was."""
    body = body_for(path, output_dtype=dtype, encoding_format="base64", output_dimension=5)
    _, answer = ask(body, path=path, embedder=calibrated(5))
    for packed, row in zip(rows_of(path, answer), wanted(dtype, 5), strict=True):
        got = np.frombuffer(base64.b64decode(packed), NUMPY.get(dtype, dtype))
        np.testing.assert_array_equal(got, row)


@pytest.mark.parametrize("dtype", ["float", "float16", "binary", "ubinary"])
def test_token_vectors_have_it_each(dtype):
    _, plain = ask({"inputs": TEXTS}, path="/embed_all")
    response, answer = ask({"inputs": TEXTS, "output_dtype": dtype}, path="/embed_all")
    assert response.headers["x-embedding-dtype"] == dtype
    for got, floats in zip(answer, plain, strict=True):
        np.testing.assert_array_equal(got, quantise(np.array(floats, np.float32), dtype))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/embed_all"])
@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"output_dtype": ["binary"]}, "binary"),
        ({"embedding_type": "ubinary"}, "ubinary"),
        ({"encoding_type": "binary"}, "binary"),
        ({"embed_dtype": "float16"}, "float16"),
        ({"embed_dtype": "float32"}, "float"),
        ({"output_dtype": None, "embedding_type": "", "encoding_type": []}, None),
        ({"output_dtype": "binary", "embedding_type": ["binary"], "embed_dtype": None}, "binary"),
    ],
)
def test_each_name_of_the_field_is_taken(path, fields, dtype):
    embedder = FakeEmbedder()
    response, _ = ask(body_for(path, **fields), path=path, embedder=embedder, status=200)
    assert response.headers.get("x-embedding-dtype") == dtype
    assert embedder.requested[0].output_dtype == (dtype or "float")


@pytest.mark.parametrize(("path", "status"), [("/v1/embeddings", 400), ("/embed", 422)])
@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        (
            {"output_dtype": "int4"},
            "output_dtype",
            "must be one of float, float16, int8, uint8, binary, ubinary. Given: 'int4'",
        ),
        ({"encoding_type": ["float", "int8"]}, "encoding_type", "Given: ['float', 'int8']"),
        ({"embed_dtype": "bfloat16"}, "embed_dtype", "Given: 'bfloat16'"),
        (
            {"output_dtype": "int8", "embedding_type": "binary"},
            "output_dtype",
            "`output_dtype` of int8 and `embedding_type` of binary contradict each other",
        ),
        (
            {"encoding_type": "int8", "dimensions": 3},
            "output_dtype",
            "are none: run `jaxembed calibrate test/fake TEXTS --dimensions 3` with the flags",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(path, status, fields, field, message):
    embedder = calibrated(DIM)
    _, answer = ask(body_for(path, **fields), path=path, embedder=embedder, status=status)
    assert message in (answer["error"]["message"] if path in OPENAI else answer["error"])
    if path in OPENAI:
        assert answer["error"]["param"] == field
    assert not embedder.requested
