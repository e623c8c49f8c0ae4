"""The routes of Text Embeddings Inference: shapes, headers and words."""

import numpy as np
import pytest
from fake_embedder import DIM, ROUTES, FakeEmbedder
from test_server_openai import ask, unit

from jaxembed.data.inputs import Text
from jaxembed.errors import (
    BackendError,
    DeviceStuck,
    InvalidInput,
    Overloaded,
    ShuttingDown,
    TokenizerError,
)
from jaxembed.server.registry.models import Models

TIMES = [f"x-{name}-time" for name in ("compute", "total", "tokenization", "queue", "inference")]


def test_embed_carries_the_headers_of_tei():
    response, _ = ask({"inputs": ["áb", "c d"]}, path="/embed")
    assert response.headers["x-compute-type"] == "cpu+float32"
    assert response.headers["x-compute-characters"] == "5"
    assert response.headers["x-compute-tokens"] == "3"
    assert all(response.headers[name].isdigit() for name in TIMES)
    assert response.headers["x-queue-time"] == "2"
    assert "x-truncated-inputs" not in response.headers


@pytest.mark.parametrize(
    "path", ["/embed", "/embed_all", "/similarity", "/tokenize", "/decode", "/predict", "/rerank"]
)
def test_a_body_may_name_its_model_among_several(path):
    body, spec = ROUTES[path]
    failing = FakeEmbedder(InvalidInput("the second model was asked"), spec, name="second")
    models = Models([FakeEmbedder(spec=spec), failing])
    ask({**body, "model": "test/fake"}, path=path, models=models, status=200)
    _, answer = ask({**body, "model": "second"}, path=path, models=models, status=422)
    assert answer["error"] == "the second model was asked"
    _, answer = ask({**body, "model": "third"}, path=path, models=models, status=404)
    assert "this server has test/fake, second" in answer["error"]
    _, answer = ask(body, path=path, models=models, status=422)
    assert "`model` must name one of test/fake, second" in answer["error"]


def test_embed_all_answers_a_matrix_for_each_input():
    response, body = ask({"inputs": ["a", "b c d"]}, path="/embed_all")
    assert [np.shape(matrix) for matrix in body] == [(1, DIM), (3, DIM)]
    assert response.headers["x-compute-tokens"] == "4"


def test_similarity_answers_a_cosine_for_each_sentence():
    inputs = {"source_sentence": "a", "sentences": ["a", "b"]}
    response, body = ask({"inputs": inputs}, path="/similarity")
    np.testing.assert_allclose(body, [1, unit(Text("a")) @ unit(Text("b"))], rtol=1e-5)
    assert response.headers["x-compute-characters"] == "3"


@pytest.mark.parametrize(
    ("sentences", "place"), [(["", "b"], "source_sentence"), (["a", "b", ""], "sentences[1]")]
)
def test_similarity_names_the_sentence_that_is_empty(sentences, place):
    inputs = {"source_sentence": sentences[0], "sentences": sentences[1:]}
    _, body = ask({"inputs": inputs}, path="/similarity", status=400)
    assert f"`inputs.{place}` cannot be empty" in body["error"]


def test_tokenize_answers_pieces_with_all_their_keys():
    response, body = ask({"inputs": "hé"}, path="/tokenize")
    first = {"id": 1, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert body == [[first, {"id": 7, "text": "hé", "special": False, "start": 0, "stop": 3}]]
    assert "x-compute-type" not in response.headers


def test_tokenize_refuses_a_prompt_in_words():
    _, body = ask({"inputs": "a", "prompt": "b"}, path="/tokenize", status=422)
    assert '`prompt` of "b" is not supported' in body["error"]


def test_decode_takes_one_sequence_or_several():
    for ids, texts in (([1, 2], ["1 2"]), ([[1], [2, 3]], ["1", "2 3"])):
        assert ask({"ids": ids}, path="/decode")[1] == texts


INVALID = "Input validation error: "
EMPTY = "`inputs` cannot be empty"


def compared(source: str, *sentences: str) -> dict:
    return {"inputs": {"source_sentence": source, "sentences": list(sentences)}}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/embed", {"inputs": ""}, INVALID + EMPTY),
        ("/embed", {"inputs": ["a", ""]}, INVALID + EMPTY),
        ("/embed_all", {"inputs": [[1], []]}, INVALID + EMPTY),
        ("/tokenize", {"inputs": []}, EMPTY),
        ("/tokenize", {"inputs": ["a", ""]}, INVALID + EMPTY),
        ("/similarity", compared("a"), "`inputs.sentences` cannot be empty"),
        ("/similarity", compared("", "a"), INVALID + "`inputs.source_sentence` cannot be empty"),
        ("/decode", {"ids": []}, INVALID + "`ids` cannot be empty"),
        ("/rerank", {"query": "q", "texts": []}, "`texts` cannot be empty"),
        ("/rerank", {"query": "", "texts": ["a"]}, INVALID + "`query` cannot be empty"),
        ("/predict", {"inputs": ""}, INVALID + EMPTY),
        ("/predict", {"inputs": []}, INVALID + EMPTY),
        ("/predict", {"inputs": ["", ""]}, INVALID + EMPTY),
        ("/predict", {"inputs": [["a"], [""]]}, INVALID + EMPTY),
    ],
)
def test_what_is_empty_is_a_400_in_the_words_of_tei(path, body, message):
    _, answer = ask(body, path=path, embedder=FakeEmbedder(spec=ROUTES[path][1]), status=400)
    assert answer == {"error": message, "error_type": "Empty"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 0}, "`dimensions` should be positive"),
        ({"dimensions": DIM + 1}, "`dimensions` should be smaller than the maximum embedding dim"),
        (
            {"inputs": " ".join("x" * 20), "truncate": False},
            "`inputs` must have less than 16 tokens. Given: 20. Let the request truncate ",
        ),
    ],
)
def test_what_is_not_valid_is_a_422_in_the_words_of_tei(fields, message):
    _, answer = ask({"inputs": "a"} | fields, path="/embed", status=422)
    assert answer["error_type"] == "Validation"
    assert answer["error"].startswith(INVALID + message)


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/embed", {}, "inputs"),
        ("/embed", {"inputs": ["a", 1]}, "$.inputs[1]"),
        ("/embed", {"inputs": ["a", [10**12]]}, "got 1000000000000 - at `$.inputs[1][0]`"),
        ("/embed", {"inputs": "a" * 70_000, "dimensions": -1}, "got -1 - at `$.dimensions`"),
        ("/embed", {"inputs": [*[7] * 40_000, -5]}, "got -5 - at `$.inputs[40000]`"),
        ("/embed", {"inputs": [-(10**99)]}, f"got -1{'0' * 38}... - at `$.inputs[0]`"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "$.truncation_direction"),
        ("/tokenize", {"inputs": [1]}, "$.inputs[0]"),
        ("/decode", {"ids": [1, [2]]}, "$.ids[1]"),
        ("/rerank", {"query": "q"}, "`texts` (or `documents`"),
        ("/rerank", {"query": "q", "texts": ["a", 1]}, "$.texts[1]"),
        ("/rerank", {"query": "q", "texts": ["a"], "truncation_direction": "up"}, "$.trunc"),
        ("/rerank", {"query": "q", "documents": [{"title": "u"}]}, "$.documents[0]"),
        ("/rerank", [1], "Expected `object`"),
        ("/predict", {"inputs": ["a", "b", "c"]}, "got 3 texts - at `$.inputs`"),
        ("/predict", {"inputs": [["a"], ["a", "b", "c"]]}, "$.inputs[1]"),
        ("/predict", {"inputs": ["a", ["b"]]}, "$.inputs[0]"),
        ("/predict", {"inputs": [[1]]}, "$.inputs[0][0]"),
    ],
)
def test_a_wrong_shape_is_a_422_that_names_the_path(path, body, place):
    _, answer = ask(body, path=path, embedder=FakeEmbedder(spec=ROUTES[path][1]), status=422)
    assert answer["error_type"] == "Validation"
    assert answer["error"].startswith("Failed to deserialize the JSON body into the target type: ")
    assert place in answer["error"]


@pytest.mark.parametrize(
    "path", ["/embed", "/embed_all", "/tokenize", "/decode", "/rerank", "/predict"]
)
def test_null_in_an_optional_field_is_its_default(path):
    body, spec = ROUTES[path]
    fields = ("truncate", "truncation_direction", "normalize", "dimensions", "prompt_name")
    fields += ("add_special_tokens", "skip_special_tokens", "raw_scores")
    body, embedder = dict.fromkeys(fields) | body, FakeEmbedder(spec=spec)
    _, answer = ask(body, path=path, embedder=embedder, status=200)
    assert answer == ask(ROUTES[path][0], path=path, embedder=embedder)[1]


FAILING = ["/embed", "/tokenize", "/vertex", "/rerank", "/predict", "/invocations"]


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
@pytest.mark.parametrize("path", FAILING)
def test_failures_have_the_status_and_type_of_tei(failure, status, kind, start, path):
    body, spec = ROUTES[path]
    _, answer = ask(body, path=path, embedder=FakeEmbedder(failure, spec), status=status)
    assert answer["error_type"] == kind
    assert answer["error"].startswith(start)
    assert "secret" not in answer["error"]
