"""The routes of Text Embeddings Inference: shapes, headers and words."""

import numpy as np
import pytest
from fake_embedder import CLASSIFIER, DIM, RERANKER, SPEC, FakeEmbedder, vector
from test_server_openai import ask, unit

from jaxembed.config import ServerConfig
from jaxembed.errors import (
    BackendError,
    DeviceStuck,
    InputTooLong,
    InvalidInput,
    Overloaded,
    ShuttingDown,
    TokenizerError,
)
from jaxembed.inputs import Text, Tokens
from jaxembed.server.models import Models

TIMES = (
    "x-compute-time",
    "x-total-time",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
)


def test_embed_answers_a_list_of_normalised_vectors():
    _, body = ask({"inputs": ["a", "b b"]}, path="/embed", status=200)
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
    embedder.plan.device_name, embedder.plan.dtype = "NVIDIA H200", "bfloat16"
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "a b"}),
        ("/embed_all", {"inputs": "a b"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("/tokenize", {"inputs": "a"}),
        ("/decode", {"ids": [1]}),
    ],
)
def test_a_body_may_name_its_model_among_several(path, body):
    failing = FakeEmbedder(InvalidInput("the second model was asked"))
    failing.name = "second"
    models = Models([FakeEmbedder(), failing])
    assert ask({**body, "model": "test/fake"}, path=path, models=models)[0].status_code == 200
    response, answer = ask({**body, "model": "second"}, path=path, models=models)
    assert (response.status_code, answer["error"]) == (422, "the second model was asked")
    _, answer = ask({**body, "model": "third"}, path=path, models=models, status=404)
    assert "this server has test/fake, second" in answer["error"]
    _, answer = ask(body, path=path, models=models, status=422)
    assert "`model` must say which: test/fake, second" in answer["error"]


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
    _, body = ask({"inputs": inputs}, path="/similarity", config=config, status=422)
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


INVALID = "Input validation error: "
EMPTY = "`inputs` cannot be empty"


def compared(source: str, *sentences: str) -> dict:
    return {"inputs": {"source_sentence": source, "sentences": list(sentences)}}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/embed", {"inputs": []}, INVALID + EMPTY),
        ("/embed", {"inputs": ""}, INVALID + EMPTY),
        ("/embed", {"inputs": ["a", ""]}, INVALID + EMPTY),
        ("/embed_all", {"inputs": [[1], []]}, INVALID + EMPTY),
        ("/tokenize", {"inputs": []}, EMPTY),
        ("/tokenize", {"inputs": ["a", ""]}, INVALID + EMPTY),
        ("/similarity", compared("a"), "`inputs.sentences` cannot be empty"),
        ("/similarity", compared("", "a"), INVALID + EMPTY),
        ("/decode", {"ids": [[1], []]}, INVALID + "`ids` cannot be empty"),
        ("/decode", {"ids": []}, INVALID + "`ids` cannot be empty"),
    ],
)
def test_what_is_empty_is_a_400_in_the_words_of_tei(path, body, message):
    assert ask(body, path=path, status=400)[1] == {"error": message, "error_type": "Empty"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 0}, "`dimensions` should be positive"),
        (
            {"dimensions": DIM + 1},
            "`dimensions` should be smaller than the maximum embedding dimension. "
            f"Wanted: {DIM} or less. Given: {DIM + 1}",
        ),
        (
            {"inputs": " ".join("x" * 20), "truncate": False},
            "`inputs` must have less than 16 tokens. Given: 20. "
            "Send `truncate: true` or start the server with --auto-truncate true",
        ),
    ],
)
def test_what_is_not_valid_is_a_422_in_the_words_of_tei(fields, message):
    _, answer = ask({"inputs": "a"} | fields, path="/embed", status=422)
    assert answer == {"error": INVALID + message, "error_type": "Validation"}


def test_a_model_without_sparse_outputs_is_a_424_in_the_words_of_tei():
    message = "Backend error: Model is not an embedding model with SPLADE pooling"
    _, answer = ask({"inputs": "a"}, path="/embed_sparse", status=424)
    assert answer == {"error": message, "error_type": "Backend"}


def test_of_an_input_that_was_not_read_to_its_end_the_count_is_a_lower_bound():
    embedder = FakeEmbedder(InputTooLong(16, 40, exact=False))
    _, answer = ask({"inputs": "a", "truncate": False}, path="/embed", embedder=embedder)
    assert answer["error"].startswith(
        "Input validation error: `inputs` must have less than 16 tokens. Given: at least 40. Send"
    )


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/embed", {}, "inputs"),
        ("/embed", {"inputs": ["a", 1]}, "$.inputs[1]"),
        ("/embed", {"inputs": "a", "dimensions": -1}, "got -1 - at `$.dimensions`"),
        ("/embed", {"inputs": [7, -5]}, "got -5 - at `$.inputs[1]`"),
        ("/embed", {"inputs": ["a", [10**12]]}, "got 1000000000000 - at `$.inputs[1][0]`"),
        ("/embed", {"inputs": "a" * 70_000, "dimensions": -1}, "got -1 - at `$.dimensions`"),
        ("/embed", {"inputs": [*[7] * 40_000, -5]}, "got -5 - at `$.inputs[40000]`"),
        ("/embed", {"inputs": [-(10**99)]}, f"got -1{'0' * 38}... - at `$.inputs[0]`"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "$.truncation_direction"),
        ("/embed", {"inputs": "a", "normalize": "yes"}, "$.normalize"),
        ("/tokenize", {"inputs": [1]}, "$.inputs[0]"),
        ("/decode", {"ids": [1, [2]]}, "$.ids[1]"),
        ("/decode", {"ids": ["a"]}, "$.ids[0]"),
    ],
)
def test_a_wrong_shape_is_a_422_that_names_the_path(path, body, place):
    _, answer = ask(body, path=path, status=422)
    assert answer["error_type"] == "Validation"
    assert answer["error"].startswith("Failed to deserialize the JSON body into the target type: ")
    assert place in answer["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "a b"}),
        ("/embed_all", {"inputs": "a b"}),
        ("/tokenize", {"inputs": "a b"}),
        ("/decode", {"ids": [1, 2]}),
    ],
)
def test_null_in_an_optional_field_is_its_default(path, body):
    fields = ("truncate", "truncation_direction", "normalize", "dimensions", "prompt_name")
    nulls = dict.fromkeys((*fields, "add_special_tokens", "skip_special_tokens"))
    _, answer = ask(body | nulls, path=path, status=200)
    assert answer == ask(body, path=path)[1]


def test_broken_json_is_a_400():
    _, answer = ask(None, path="/embed", raw=b'{"inputs":', status=400)
    assert answer["error"].startswith("Failed to parse the request body as JSON: ")


FAILING = [
    ("/embed", {"inputs": "a"}, SPEC),
    ("/tokenize", {"inputs": "a"}, SPEC),
    ("/vertex", {"instances": [{"inputs": "a"}]}, SPEC),
    ("/rerank", {"query": "q", "texts": ["a"]}, RERANKER),
    ("/predict", {"inputs": "a"}, CLASSIFIER),
    ("/invocations", {"query": "q", "texts": ["a"]}, RERANKER),
]


@pytest.mark.parametrize(
    ("failure", "status", "kind", "start"),
    [
        (Overloaded("Model is overloaded"), 429, "Overloaded", "Model is overloaded"),
        (ShuttingDown("shutting down"), 503, "Unhealthy", "shutting down"),
        (DeviceStuck(), 503, "Unhealthy", "the device does not return from a call"),
        (BackendError("the batch failed"), 424, "Backend", "Backend error: the batch failed"),
        (TokenizerError("odd text"), 422, "Tokenizer", "tokenizer error odd text"),
        (InvalidInput("no such prompt"), 422, "Validation", "no such prompt"),
        (ZeroDivisionError("secret"), 500, "Backend", "internal error"),
    ],
)
@pytest.mark.parametrize(("path", "body", "spec"), FAILING)
def test_failures_have_the_status_and_type_of_tei(failure, status, kind, start, path, body, spec):
    _, answer = ask(body, path=path, embedder=FakeEmbedder(failure, spec), status=status)
    assert answer["error_type"] == kind
    assert answer["error"].startswith(start)
    assert "secret" not in answer["error"]
