"""Late chunking over HTTP: what a body says of chunks, in the words of Jina, Voyage and ours."""

import base64

import numpy as np
import pytest
from conftest import open_tiny, save_tiny
from test_late import PARTS
from test_server_openai import ask
from test_windows import prose

from jaxembed import ChunkedText, ChunkSize
from jaxembed.config import ServerConfig
from jaxembed.data.spec import DenseLayer, NormalizeLayer

TEXT = " ".join(PARTS)
PLACES = [[0, 11], [12, 22], [23, 41]]
CONTEXTUALIZED = "/v1/contextualizedembeddings"
PRECISION = 1e-6  # numbers of JSON, and batches of other rows


@pytest.fixture(name="post")
def _post(embedder):
    def post(path="/v1/embeddings", headers=None, config=None, status=None, **body):
        options = {"headers": headers, "config": config, "status": status}
        return ask(body, path=path, embedder=embedder.model, **options)

    return post


def vectors(answer) -> np.ndarray:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]])


def wanted(embedder, *texts, **options) -> np.ndarray:
    found = embedder.encode_chunks(texts, normalize=True, **options)
    return np.concatenate([one.vectors for one in found])


def close(got, other):
    np.testing.assert_allclose(got, other, atol=PRECISION)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_the_strings_of_a_list_are_the_chunks_of_one_text(post, embedder, path):
    response, answer = post(path, input=PARTS, late_chunking=True, status=200)
    close(vectors(answer), wanted(embedder, PARTS))
    assert all(list(one) == ["object", "embedding", "index"] for one in answer["data"])
    assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    assert response.headers["x-late-windows"] == "1"
    assert response.headers["x-compute-tokens"] == "12"
    objects = [{"text": part} for part in PARTS]
    assert post(path, input=objects, late_chunking=True)[1] == answer


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_chunks_are_places_in_a_text(post, embedder, nested, listed):
    response, answer = post(input=[TEXT] if listed else TEXT, chunks=[PLACES] if nested else PLACES)
    assert response.status_code == 200
    close(vectors(answer), wanted(embedder, PARTS))
    places = [(one["input_index"], one["start"], one["end"]) for one in answer["data"]]
    assert places == [(0, *place) for place in PLACES]
    assert answer["usage"]["total_tokens"] == 12


def test_several_texts_have_chunks_of_their_own(post, embedder):
    texts, chunks = [TEXT, "a 🙂 cat"], [PLACES, [[0, 1], [5, 8]]]
    response, answer = post(input=texts, chunks=chunks, offset_unit="utf-16", status=200)
    second = ChunkedText(texts[1], [(0, 1), (4, 7)])
    close(vectors(answer), wanted(embedder, PARTS, second))
    assert [one["input_index"] for one in answer["data"]] == [0, 0, 0, 1, 1]
    assert (answer["data"][4]["start"], answer["data"][4]["end"]) == (5, 8)
    assert response.headers["x-late-windows"] == "2"
    assert response.headers["x-compute-characters"] == "48"


def test_a_chunk_size_divides_each_text(post, embedder):
    texts = [prose(30), "the cat", prose(200, 1)]
    response, answer = post(input=texts, chunk_size=10, chunk_overlap=4, status=200)
    divided = [ChunkedText(text, ChunkSize(10, 4)) for text in texts]
    close(vectors(answer), wanted(embedder, *divided))
    first = [one for one in answer["data"] if one["input_index"] == 0]
    assert (first[0]["start"], first[-1]["end"]) == (0, len(texts[0]))
    words = [len(texts[0][one["start"] : one["end"]].split()) for one in first]
    assert words == [10, 10, 10, 10, 6]
    assert answer["usage"]["total_tokens"] == 32 + 4 + 202  # overlaps once
    assert int(response.headers["x-late-windows"]) > 3


def test_vectors_of_chunks_are_encoded_as_others(post, embedder):
    plain = wanted(embedder, PARTS)
    fields = {"input": PARTS, "late_chunking": True}
    _, coded = post(**fields, encoding_format="base64", dimensions=8)
    got = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded["data"]]
    close(got, wanted(embedder, PARTS, dimensions=8))
    response, bits = post(**fields, output_dtype="ubinary")
    assert response.headers["x-embedding-dtype"] == "ubinary"
    np.testing.assert_array_equal(vectors(bits), np.packbits(plain > 0, axis=1))
    response, data = post(**fields, headers={"accept": "application/octet-stream"})
    assert response.headers["x-embedding-shape"] == "3,32"
    close(np.frombuffer(data, "<f4").reshape(3, 32), plain)


def test_a_long_text_is_run_in_windows_or_refused(post, embedder):
    parts = [prose(40), prose(40, 1)]
    response, answer = post(input=parts, late_chunking=True)
    assert response.headers["x-late-windows"] == "2"
    assert answer["usage"]["total_tokens"] == 82
    assert "x-truncated-inputs" not in response.headers
    _, answer = post(input=parts, late_chunking=True, truncate=False, status=400)
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "Given: 82" in answer["detail"]


LATE = {"input": PARTS, "late_chunking": True}
DIVIDED = {"inputs": [["a", "b"]], "enable_auto_chunking": True}


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (LATE | {"chunks": PLACES}, "chunks", "`late_chunking` and `chunks` both define"),
        ({"input": TEXT, "chunks": PLACES, "chunk_size": 9}, "chunk_size", "both define the"),
        ({"input": TEXT, "chunk_overlap": 5}, "chunk_overlap", "requires `chunk_size`"),
        (LATE | {"offset_unit": "utf-8"}, "offset_unit", "requires `chunks` or `chunk_size`"),
        ({"input": TEXT, "chunk_size": 10, "chunk_overlap": 6}, "chunk_overlap", "from 0 to 5"),
        ({"input": [5, 6], "late_chunking": True}, "input", "only texts can have chunks"),
        ({"input": TEXT, "chunk_size": 0}, "chunk_size", "must be 8 tokens or more. Given: 0"),
        ({"input": ["a", " ", "b"], "late_chunking": True}, "input[1]", "has no tokens"),
        ({"input": ["a", "b"], "chunks": PLACES}, "chunks", "texts: 2. Number of lists: 1"),
        ({"input": TEXT, "chunks": [[[0, 1], 2]]}, "chunks[0][1]", "two integers"),
        ({"input": [TEXT, "a"], "chunks": [PLACES, []]}, "chunks[1]", "each text needs one"),
        ({"input": TEXT, "chunks": [[0, 11], [12, 12]]}, "chunks[1]", "is not a range of its text"),
        (
            {"input": TEXT, "chunks": [[0, 11], [12, 10**20]]},
            "chunks[1]",
            "end <= 41, in code-points",
        ),
        ({"input": TEXT, "chunks": [[12, 22], [0, 11]]}, "chunks[1]", "starts before the previous"),
        ({"inputs": []}, "inputs", "`inputs` cannot be empty"),
        ({"inputs": [["a"], []]}, "inputs[1]", "cannot be empty"),
        ({"inputs": [["a"]], "chunk_size": 10}, "chunk_size", "requires `enable_auto_chunking`"),
        ({"inputs": [["a"], ["b", ""]]}, "inputs[1][1]", "cannot be empty"),
        ({"inputs": [["a"], ["b", " "]]}, "inputs[1][1]", "has no tokens"),
        ({"inputs": [["a"], "b"]}, "inputs[1]", "must be a list of the chunks"),
        (DIVIDED, "inputs[0]", "2 chunks; with `enable_auto_chunking` a document must be one"),
        ({"inputs": [["a"]], "output_dimension": 99}, "output_dimension", "from 1 to 32"),
        ({"inputs": [["a"]], "late_chunking": True}, "late_chunking", "is not supported"),
        ({}, None, "missing required field `inputs`"),
    ],
)
def test_what_is_wrong_with_chunks_or_documents_is_named(post, body, field, words):
    path = "/v1/embeddings" if "input" in body else CONTEXTUALIZED
    _, answer = post(path, **body, status=400)
    assert answer["error"]["param"] == field
    assert words in answer["detail"]


def test_more_chunks_than_a_request_may_have_inputs_are_refused(post):
    limit = ServerConfig(max_client_batch_size=2)
    for path, body in (
        ("/v1/embeddings", {"input": TEXT, "chunks": PLACES}),
        ("/v1/embeddings", LATE),
        (CONTEXTUALIZED, {"inputs": [["a", "b"], ["c"]]}),
    ):
        _, answer = post(path, **body, config=limit, status=400)
        assert "batch size 3 > maximum allowed batch size 2" in answer["detail"]


@pytest.mark.parametrize("path", ["/embed", "/v2/embed", "/embed_all"])
@pytest.mark.parametrize(
    ("field", "value"), [("late_chunking", True), ("chunks", PLACES), ("chunk_size", 10)]
)
def test_other_routes_refuse_chunks_by_name(post, path, field, value):
    key = "texts" if path == "/v2/embed" else "inputs"
    response, answer = post(path, **{key: [TEXT], field: value})
    assert response.status_code in (400, 422)
    assert "only /v1/embeddings and /embeddings support chunks" in str(answer)


def test_a_model_that_pools_otherwise_is_refused_by_name():
    for path, body in (("/v1/embeddings", LATE), (CONTEXTUALIZED, {"inputs": [PARTS]})):
        _, answer = ask(body, path=path, status=400)  # it pools the last token
        assert "the pooling of this model is lasttoken" in answer["detail"]


def of_documents(answer) -> list[np.ndarray]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    assert all(one["object"] == "list" for one in answer["data"])
    return [vectors(one) for one in answer["data"]]


def test_each_document_has_a_vector_of_each_chunk(post, embedder):
    documents = [PARTS, ["a cat"], PARTS[:2]]
    response, answer = post(CONTEXTUALIZED, inputs=documents, model=None, input_type=None)
    assert list(answer) == ["object", "data", "model", "usage"]
    assert (answer["object"], answer["model"]) == ("list", embedder.name)
    assert answer["usage"] == {"prompt_tokens": 24, "total_tokens": 24}
    for got, document in zip(of_documents(answer), documents, strict=True):
        close(got, wanted(embedder, document))
    assert all(list(one) == ["object", "embedding", "index"] for one in answer["data"][0]["data"])
    assert response.headers["x-late-windows"] == "3"


def test_documents_are_divided_if_asked_for(post, embedder):
    texts = [prose(30), "the cat"]
    fields = {"input_type": "document", "enable_auto_chunking": True}
    sizes = fields | {"chunk_size": 10, "chunk_overlap": 4}
    response, answer = post(CONTEXTUALIZED, inputs=[[text] for text in texts], **sizes)
    assert response.headers["x-prompt-name"] == "passage"
    found = [ChunkedText(text, ChunkSize(10, 4)) for text in texts]
    close(np.concatenate(of_documents(answer)), wanted(embedder, *found, prompt_name="passage"))
    shown = [[one["text"] for one in document["data"]] for document in answer["data"]]
    assert [len(text.split()) for text in shown[0]] == [10, 10, 10, 10, 6]
    assert shown[1] == ["the cat"]
    assert post(CONTEXTUALIZED, inputs=texts, **sizes)[1] == answer
    _, whole = post(CONTEXTUALIZED, inputs=texts, **fields)  # of 512 tokens
    assert [len(document["data"]) for document in whole["data"]] == [1, 1]


def test_a_query_may_be_a_string(post, embedder):
    _, answer = post(CONTEXTUALIZED, inputs=["the cat", "a dog"], input_type="query", status=200)
    close(np.concatenate(of_documents(answer)), embedder.encode_query(["the cat", "a dog"]))


def test_a_large_body_and_a_large_answer_come_whole(post, embedder):
    documents = [[prose(7, k), prose(5, k + 1), "a"] for k in range(600)]
    _, answer = post(CONTEXTUALIZED, inputs=documents, encoding_format="float", status=200)
    got = of_documents(answer)
    assert [len(one) for one in got] == [3] * 600
    close(got[599], wanted(embedder, documents[599]))


def test_a_layer_that_is_not_linear_names_the_chunk_that_is_too_long(tmp_path):
    path = save_tiny(tmp_path / "tiny", modules=(DenseLayer(32, 12), NormalizeLayer()))
    with open_tiny(path, tmp_path, (1, 64)) as embedder:
        for path, body, field in (
            ("/v1/embeddings", {"input": ["a", prose(100)], "late_chunking": True}, "input[1]"),
            ("/v1/embeddings", {"input": ["a", prose(100)], "chunk_size": 90}, "input[1]"),
            (CONTEXTUALIZED, {"inputs": [["a"], ["a", prose(100)]]}, "inputs[1][1]"),
        ):
            _, answer = ask(body, path=path, embedder=embedder.model, status=400)
            assert answer["error"]["param"] == field
            assert f"`{field}` has" in answer["detail"]
