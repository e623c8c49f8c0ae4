"""The routes of Text Embeddings Inference: shapes, headers and words."""

import asyncio

import numpy as np
import pytest
from fake_embedder import DIM, MAX_TOKENS, FakeEmbedder, vector
from test_server_openai import ask, unit

from jaxembed.config import ServerConfig
from jaxembed.errors import (
    BackendError,
    InvalidInput,
    Overloaded,
    ShuttingDown,
    TokenizerError,
)
from jaxembed.inputs import Text, Tokens
from jaxembed.server.app import create_app

TIMES = (
    "x-compute-time",
    "x-total-time",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
)


@pytest.mark.parametrize("path", ["/embed", "/", "/invocations"])
def test_embed_answers_a_list_of_normalised_vectors(path):
    response, body = ask({"inputs": ["a", "b b"]}, path=path)
    assert response.status_code == 200
    np.testing.assert_allclose(body, [unit(Text("a")), unit(Text("b b"))], rtol=1e-6)


def test_embed_of_one_text_or_one_id_list_is_still_a_list():
    _, body = ask({"inputs": "a"}, path="/embed")
    np.testing.assert_allclose(body, [unit(Text("a"))], rtol=1e-6)
    _, body = ask({"inputs": [1, 2]}, path="/embed")
    np.testing.assert_allclose(body, [unit(Tokens([1, 2]))], rtol=1e-6)


def test_embed_carries_the_headers_of_tei():
    response, _ = ask({"inputs": ["áb", "c d"]}, path="/embed")
    assert response.headers["x-compute-type"] == "cpu+float32"
    assert response.headers["x-compute-characters"] == "5"
    assert response.headers["x-compute-tokens"] == "3"
    assert all(response.headers[name].isdigit() for name in TIMES)
    assert response.headers["x-queue-time"] == "2"
    assert "x-truncated-inputs" not in response.headers


def test_compute_type_names_the_device():
    embedder = FakeEmbedder()
    embedder.device, embedder.dtype = "NVIDIA H200", "bfloat16"
    response, _ = ask({"inputs": "a"}, path="/embed", embedder=embedder)
    assert response.headers["x-compute-type"] == "nvidia-h200+bfloat16"


def test_embed_leaves_vectors_alone_when_told():
    _, body = ask({"inputs": "a", "normalize": False, "dimensions": 3}, path="/embed")
    np.testing.assert_array_equal(np.array(body, np.float32)[0], vector(Text("a"))[:3])


def test_embed_gives_octets():
    accept = {"accept": "application/octet-stream"}
    response, body = ask({"inputs": ["a", "b"]}, path="/embed", headers=accept)
    assert response.headers["x-embedding-shape"] == f"2,{DIM}"
    assert len(body) == 2 * DIM * 4


@pytest.mark.parametrize("side", ["Left", "left", "Right", "right"])
def test_truncation_direction_reaches_the_embedder(side):
    embedder = FakeEmbedder()
    ask({"inputs": "a", "truncation_direction": side}, path="/embed", embedder=embedder)
    assert embedder.asked[0].truncation_side == side.lower()


def test_embed_all_answers_a_matrix_for_each_input():
    response, body = ask({"inputs": ["a", "b c d"]}, path="/embed_all")
    assert [np.shape(matrix) for matrix in body] == [(1, DIM), (3, DIM)]
    assert response.headers["x-compute-tokens"] == "4"


def test_similarity_answers_a_cosine_for_each_sentence():
    inputs = {"source_sentence": "a", "sentences": ["a", "b"]}
    response, body = ask({"inputs": inputs}, path="/similarity")
    np.testing.assert_allclose(body, [1, unit(Text("a")) @ unit(Text("b"))], rtol=1e-5)
    assert response.headers["x-compute-characters"] == "3"


def test_similarity_counts_the_source_into_the_batch():
    inputs = {"source_sentence": "a", "sentences": ["a", "b"]}
    config = ServerConfig(max_client_batch_size=2)
    response, body = ask({"inputs": inputs}, path="/similarity", config=config)
    assert response.status_code == 422
    assert body["error"].startswith("batch size 3 > maximum allowed batch size 2")


def test_tokenize_answers_pieces_with_all_their_keys():
    response, body = ask({"inputs": "hé"}, path="/tokenize")
    assert body == [
        [
            {"id": 1, "text": "[CLS]", "special": True, "start": None, "stop": None},
            {"id": 7, "text": "hé", "special": False, "start": 0, "stop": 3},
        ]
    ]
    assert "x-compute-type" not in response.headers


@pytest.mark.parametrize(("ids", "texts"), [([1, 2], ["1 2"]), ([[1], [2, 3]], ["1", "2 3"])])
def test_decode_takes_one_sequence_or_several(ids, texts):
    _, body = ask({"ids": ids}, path="/decode")
    assert body == texts


def test_info_has_the_keys_of_tei_in_their_order():
    async def go():
        config = ServerConfig(served_model_names=("mine",))
        client = create_app(FakeEmbedder(), config).test_client()
        return await (await client.get("/info")).get_json()

    body = asyncio.run(go())
    assert list(body) == [
        "model_id",
        "model_sha",
        "model_dtype",
        "served_model_name",
        "model_type",
        "max_concurrent_requests",
        "max_input_length",
        "max_batch_tokens",
        "max_batch_requests",
        "max_client_batch_size",
        "auto_truncate",
        "tokenization_workers",
        "version",
        "sha",
        "docker_label",
        "jaxembed",
    ]
    assert body["model_type"] == {"embedding": {"pooling": "last_token"}}
    assert body["served_model_name"] == "mine"
    assert body["max_input_length"] == MAX_TOKENS


def test_vertex_answers_each_instance():
    body = {"instances": [{"inputs": "a"}, {"inputs": ["b", "c"], "normalize": False}]}
    embedder = FakeEmbedder()
    _, answer = ask(body, path="/vertex", embedder=embedder)
    assert [np.shape(prediction) for prediction in answer["predictions"]] == [(1, DIM), (2, DIM)]
    text = embedder.telemetry.exposition().decode()
    assert 'te_request_success{method="single"} 1.0' in text
    assert 'te_request_success{method="batch"} 1.0' in text


def test_vertex_answers_with_its_first_failure():
    body = {"instances": [{"inputs": "a"}, {"inputs": ""}, {"inputs": "b"}]}
    response, answer = ask(body, path="/vertex")
    assert response.status_code == 400
    assert answer["error_type"] == "Empty"
    assert ask({"instances": []}, path="/vertex")[1] == {"predictions": []}


def test_vertex_runs_nothing_of_a_request_with_an_instance_it_cannot_read():
    embedder = FakeEmbedder()
    body = {"instances": [{"inputs": "a"}, {"input": "b"}]}
    assert ask(body, path="/vertex", embedder=embedder)[0].status_code == 422
    assert embedder.asked == []


def test_vertex_counts_the_inputs_of_all_instances():
    body = {"instances": [{"inputs": ["a"] * 1500}] * 2}
    response, answer = ask(body, path="/vertex")
    assert response.status_code == 422
    assert "batch size 3000 > maximum allowed batch size 2048" in answer["error"]


EMPTY = "Input validation error: `inputs` cannot be empty"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        ("/embed", {"inputs": []}, 400, "Empty", EMPTY),
        ("/embed", {"inputs": ""}, 400, "Empty", EMPTY),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty", EMPTY),
        ("/embed_all", {"inputs": [[1], []]}, 400, "Empty", EMPTY),
        ("/tokenize", {"inputs": []}, 400, "Empty", "`inputs` cannot be empty"),
        ("/tokenize", {"inputs": ["a", ""]}, 400, "Empty", EMPTY),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": []}},
            400,
            "Empty",
            "`inputs.sentences` cannot be empty",
        ),
        (
            "/similarity",
            {"inputs": {"source_sentence": "", "sentences": ["a"]}},
            400,
            "Empty",
            EMPTY,
        ),
        (
            "/decode",
            {"ids": [[1], []]},
            400,
            "Empty",
            "Input validation error: `input_ids` cannot be empty",
        ),
        (
            "/decode",
            {"ids": []},
            400,
            "Empty",
            "Input validation error: `input_ids` cannot be empty",
        ),
        (
            "/embed",
            {"inputs": "a", "dimensions": 0},
            422,
            "Validation",
            "Input validation error: `dimensions` should be positive",
        ),
        (
            "/embed",
            {"inputs": "a", "dimensions": DIM + 1},
            422,
            "Validation",
            "Input validation error: `dimensions` should be smaller than the maximum embedding "
            "dimension.",
        ),
        (
            "/embed",
            {"inputs": " ".join("x" * 20), "truncate": False},
            422,
            "Validation",
            "Input validation error: `inputs` must have less than 16 tokens. Given: 20",
        ),
        ("/embed_sparse", {}, 424, "Backend", "Backend error: Model is not an embedding model with "
         "SPLADE pooling"),
        ("/predict", {}, 424, "Backend", "Backend error: Model is not a classifier model"),
        ("/rerank", {}, 424, "Backend", "Backend error: model is not a re-ranker model"),
    ],
)  # fmt: skip
def test_errors_have_the_status_type_and_words_of_tei(path, body, status, kind, message):
    response, answer = ask(body, path=path)
    assert response.status_code == status
    assert answer == {"error": message, "error_type": kind}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/embed", {}, "inputs"),
        ("/embed", {"inputs": ["a", 1]}, "$.inputs[1]"),
        ("/embed", {"inputs": "a", "dimensions": -1}, "$.dimensions"),
        ("/embed", {"inputs": "a", "truncation_direction": None}, "$.truncation_direction"),
        ("/embed", {"inputs": "a", "normalize": None}, "$.normalize"),
        ("/tokenize", {"inputs": [1]}, "$.inputs[0]"),
        ("/decode", {"ids": [1, [2]]}, "$.ids[1]"),
        ("/decode", {"ids": ["a"]}, "$.ids[0]"),
        ("/vertex", {"instances": 3}, "$.instances"),
    ],
)
def test_a_wrong_shape_is_a_422_that_names_the_path(path, body, place):
    response, answer = ask(body, path=path)
    assert response.status_code == 422
    assert answer["error_type"] == "Validation"
    assert answer["error"].startswith("Failed to deserialize the JSON body into the target type: ")
    assert place in answer["error"]


def test_broken_json_is_a_400():
    response, answer = ask(None, path="/embed", raw=b'{"inputs":')
    assert response.status_code == 400
    assert answer["error"].startswith("Failed to parse the request body as JSON: ")


@pytest.mark.parametrize(
    ("failure", "status", "kind", "start"),
    [
        (Overloaded("Model is overloaded"), 429, "Overloaded", "Model is overloaded"),
        (ShuttingDown("shutting down"), 503, "Unhealthy", "shutting down"),
        (BackendError("the batch failed"), 424, "Backend", "Backend error: the batch failed"),
        (TokenizerError("tokenizer error odd text"), 422, "Tokenizer", "tokenizer error odd text"),
        (InvalidInput("no such prompt"), 422, "Validation", "no such prompt"),
        (ZeroDivisionError("secret"), 500, "Backend", "internal error"),
    ],
)
@pytest.mark.parametrize("path", ["/embed", "/tokenize", "/vertex"])
def test_failures_have_the_status_and_type_of_tei(failure, status, kind, start, path):
    body = {"instances": [{"inputs": "a"}]} if path == "/vertex" else {"inputs": "a"}
    response, answer = ask(body, path=path, embedder=FakeEmbedder(failure))
    assert response.status_code == status
    assert answer["error_type"] == kind
    assert answer["error"].startswith(start)
    assert "secret" not in answer["error"]
