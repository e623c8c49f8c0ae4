"""/rerank and /predict of TEI: forms of input, order, ties, words."""

import numpy as np
import pytest
from fake_embedder import CLASSIFIER, RERANKER, SPEC, FakeEmbedder, logits
from test_server_openai import ask
from test_server_tei import TIMES

from jaxembed.config import ServerConfig
from jaxembed.data.inputs import Pair, Text
from jaxembed.runtime.postprocess import scores

QUERY = "a b c"
TEXTS = ["x", "a", "a b", "b", "a b c"]  # of which 0, 1, 2, 1, 3 words are in the query


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rerank(body, **arguments):
    return ask(body, path="/rerank", embedder=FakeEmbedder(spec=RERANKER), **arguments)


def predict(inputs, spec=CLASSIFIER, **fields):
    return ask({"inputs": inputs, **fields}, path="/predict", embedder=FakeEmbedder(spec=spec))


def test_rerank_sorts_by_score_and_puts_the_later_of_equals_first():
    _, body = rerank({"query": QUERY, "texts": TEXTS}, status=200)
    assert [item["index"] for item in body] == [4, 2, 3, 1, 0]
    np.testing.assert_allclose(
        [item["score"] for item in body], sigmoid(np.array([2, 1, 0, 0, -1])), rtol=1e-6
    )
    assert list(body[0]) == ["index", "score"]


@pytest.mark.parametrize("field", ["top_n", "top_k"])
def test_rerank_gives_as_many_as_asked_for(field):
    for most, wanted in ((2, [4, 2]), (9, [4, 2, 3, 1, 0]), (0, [4, 2, 3, 1, 0])):
        _, body = rerank({"query": QUERY, "texts": TEXTS, field: most}, status=200)
        assert [item["index"] for item in body] == wanted
    _, body = rerank({"query": QUERY, "texts": TEXTS, field: -1}, status=422)
    assert f"`{field}` must be 1 or more" in body["error"]
    _, body = rerank({"query": QUERY, "texts": TEXTS, "top_n": 2, "top_k": 3}, status=422)
    assert "contradict each other" in body["error"]


def test_rerank_cuts_texts_to_the_tokens_asked_for():
    embedder = FakeEmbedder(spec=RERANKER)
    for given, wanted in ((3, 3), (0, None), (None, None)):
        body = {"query": QUERY, "texts": TEXTS, "max_tokens_per_doc": given}
        ask(body, path="/rerank", embedder=embedder, status=200)
        assert embedder.requested[-1].max_document_tokens == wanted
    assert "x-score-source" not in ask(body, path="/rerank", embedder=embedder)[0].headers


def test_rerank_gives_texts_between_index_and_score():
    _, body = rerank({"query": QUERY, "texts": ["x", "a é"], "return_text": True})
    assert list(body[0]) == ["index", "text", "score"]
    assert [item["text"] for item in body] == ["a é", "x"]


def test_rerank_has_the_headers_of_embed():
    response, _ = rerank({"query": "á", "texts": ["b c", "d"]})
    assert response.headers["x-compute-type"] == "cpu+float32"
    assert response.headers["x-compute-characters"] == "6"  # the query counts for each text
    assert response.headers["x-compute-tokens"] == "5"
    assert all(response.headers[name].isdigit() for name in TIMES)


def test_rerank_says_how_many_texts_were_cut():
    texts = ["a", "b " * 20, "c " * 20]
    response, _ = rerank({"query": "a", "texts": texts})
    assert response.headers["x-truncated-inputs"] == "2"
    _, body = rerank({"query": "a", "texts": texts, "truncate": False}, status=422)
    assert "must have less than 16 tokens. Given: 21" in body["error"]


def test_rerank_takes_the_body_of_jina_and_answers_as_jina():
    _, body = rerank({"query": QUERY, "documents": TEXTS, "top_n": 3}, status=200)
    assert [item["index"] for item in body["results"]] == [4, 2, 1]
    assert body["model"] == "test/fake"
    response, body = rerank({"query": QUERY, "documents": []})
    assert (response.status_code, body["error_type"]) == (400, "Empty")


def test_one_side_of_a_pair_may_be_empty_but_no_query():
    assert rerank({"query": "a", "texts": [""]})[0].status_code == 200
    assert predict(["", "a"])[0].status_code == 200


@pytest.mark.parametrize(
    ("inputs", "wanted"), [("a", Text("a")), (["a"], Text("a")), (["a", "b"], Pair("a", "b"))]
)
def test_predict_answers_one_input_with_a_flat_list(inputs, wanted):
    response, body = predict(inputs)
    found = scores(logits(wanted, 3)[None], "softmax")[0]
    assert [item["label"] for item in body] == [
        CLASSIFIER.labels[k] for k in np.argsort(found)[::-1]
    ]
    np.testing.assert_allclose([item["score"] for item in body], np.sort(found)[::-1], rtol=1e-6)
    assert list(body[0]) == ["score", "label"]
    assert response.headers["x-compute-characters"] == str(len("".join(inputs)))


def test_predict_answers_a_batch_with_a_list_of_lists():
    embedder = FakeEmbedder(spec=CLASSIFIER)
    response, body = ask({"inputs": [["a"], ["b", "c"]]}, path="/predict", embedder=embedder)
    assert body == [predict("a")[1], predict(["b", "c"])[1]]
    assert response.headers["x-compute-tokens"] == "3"
    text = embedder.telemetry.exposition().decode()
    assert 'te_request_success{method="batch"} 1.0' in text
    assert len(predict([["a"]])[1]) == 1  # a batch of one is a list of one list


def test_predict_puts_the_later_of_equal_labels_first(monkeypatch):
    monkeypatch.setattr("fake_embedder.logits", lambda item, labels: np.float32([1, 2, 1]))
    _, body = predict("a")
    assert [item["label"] for item in body] == ["fair", "good", "bad"]


EMPTY = "Input validation error: `inputs` cannot be empty"
EMPTY_QUERY = "Input validation error: `query` cannot be empty"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/rerank", {"query": "q", "texts": []}, "`texts` cannot be empty"),
        ("/rerank", {"query": "", "texts": ["a"]}, EMPTY_QUERY),
        ("/predict", {"inputs": ""}, EMPTY),
        ("/predict", {"inputs": []}, EMPTY),
        ("/predict", {"inputs": ["", ""]}, EMPTY),
        ("/predict", {"inputs": [["a"], [""]]}, EMPTY),
    ],
)
def test_nothing_to_score_is_a_400(path, body, message):
    _, answer = ask(body, path=path, embedder=FakeEmbedder(spec=RERANKER), status=400)
    assert answer == {"error": message, "error_type": "Empty"}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
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
    _, answer = ask(body, path=path, embedder=FakeEmbedder(spec=RERANKER), status=422)
    assert answer["error_type"] == "Validation"
    assert place in answer["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": "q", "texts": ["a", "b"]}),
        ("/rerank", {"query": "q", "documents": ["a", "b"]}),
        ("/predict", {"inputs": [["a", "c"], ["b"]]}),
    ],
)
def test_every_text_counts_into_the_batch(path, body):
    embedder = FakeEmbedder(spec=RERANKER)
    config = ServerConfig(max_client_batch_size=1)
    _, answer = ask(body, path=path, embedder=embedder, config=config, status=422)
    assert answer["error"].startswith("batch size 2 > maximum allowed batch size 1")


@pytest.mark.parametrize(
    ("path", "body", "spec", "words"),
    [
        (
            "/rerank",
            {"query": "q", "texts": ["a"]},
            CLASSIFIER,
            "model is not a re-ranker model: `test/fake` is a classifier",
        ),
        (
            "/predict",
            {"inputs": "a"},
            SPEC,
            "Model is not a classifier model: `test/fake` is an embedding model",
        ),
    ],
)
def test_a_model_that_cannot_answers_424_and_says_what_it_is(path, body, spec, words):
    _, answer = ask(body, path=path, embedder=FakeEmbedder(spec=spec), status=424)
    assert answer["error_type"] == "Backend"
    assert answer["error"].startswith(f"Backend error: {words}")
