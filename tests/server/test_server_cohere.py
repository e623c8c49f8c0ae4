"""/v1/rerank and /v2/rerank, one body and two answers, and /classify in Infinity's words."""

import numpy as np
import pytest
from fake_embedder import CLASSIFIER, GENERATOR, RERANKER, FakeEmbedder, logits
from test_server_app import fetch_json
from test_server_openai import ask

from jaxembed.data.inputs import Pair, Text
from jaxembed.errors import BackendError, Overloaded
from jaxembed.runtime.postprocess import scores

PATHS = ["/v1/rerank", "/v2/rerank"]
QUERY = "a b c"
DOCUMENTS = ["x", "a", "a b", {"text": "b"}, "a b c"]  # 0, 1, 2, 1, 3 words are in the query
ORDER = [4, 2, 1, 3, 0]
SCORES = 1 / (1 + np.exp(-np.array([2, 1, 0, 0, -1])))


def rerank(path="/v1/rerank", embedder=None, config=None, status=None, **fields):
    body = {"query": QUERY, "documents": DOCUMENTS, **fields}
    embedder = embedder or FakeEmbedder(spec=RERANKER)
    return ask(body, path=path, embedder=embedder, config=config, status=status)


def indices(body):
    return [item["index"] for item in body["results"]]


@pytest.mark.parametrize("path", PATHS)
def test_documents_come_best_first_and_equals_in_their_order(path):
    _, body = rerank(path, status=200)
    assert indices(body) == ORDER
    got = [item["relevance_score"] for item in body["results"]]
    np.testing.assert_allclose(got, SCORES, rtol=1e-6)
    assert got[0] == float(str(np.float32(SCORES[0])))  # the shortest form of float32
    assert list(body["results"][0]) == ["index", "relevance_score"]


def test_the_answer_of_jina():
    response, body = rerank(model="test/fake")
    assert (body["object"], body["model"]) == ("rerank", "test/fake")
    assert body["id"] == f"rerank-{response.headers['x-request-id']}"
    assert isinstance(body["created"], int)
    assert body["usage"] == {"prompt_tokens": 23, "total_tokens": 23}  # 5 queries of 3, 8 words


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"truncation": True}, {"truncation": False}])
def test_the_answer_of_voyage(fields):
    response, body = rerank(return_documents=True, **fields)
    order = ORDER[: fields.get("top_k")]
    texts = [item if isinstance(item, str) else item["text"] for item in DOCUMENTS]
    assert body == {
        "object": "list",
        "data": [
            {"index": i, "relevance_score": pytest.approx(score), "document": texts[i]}
            for i, score in zip(order, SCORES, strict=False)
        ],
        "model": "test/fake",
        "usage": {"prompt_tokens": 23, "total_tokens": 23},
    }
    assert response.headers["x-compute-tokens"] == "23"
    _, body = rerank(**fields)
    assert list(body["data"][0]) == ["index", "relevance_score"]


def test_the_answer_of_cohere():
    response, body = rerank("/v2/rerank")
    assert set(body) == {"id", "results", "meta"}
    assert body["id"] == response.headers["x-request-id"]
    assert response.headers["x-compute-tokens"] == "23"
    assert response.headers["x-compute-characters"] == str(5 * 5 + 11)
    assert response.headers["x-inference-time"] == "3"
    assert body["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": 23, "output_tokens": 0},
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("top_n", "count"), [(1, 1), (3, 3), (5, 5), (6, 5), (10**30, 5), (0, 5), (None, 5)]
)
def test_top_n_cuts_the_list_and_null_or_0_does_not(top_n, count, path):
    _, body = rerank(path, top_n=top_n)
    assert indices(body) == ORDER[:count]


@pytest.mark.parametrize("path", PATHS)
def test_documents_come_back_as_objects_when_asked_for(path):
    documents = ["", "é" * 100_000, {"text": "x", "title": "t"}]
    _, body = rerank(path, documents=documents, return_documents=True)
    texts = [documents[k] if k < 2 else "x" for k in indices(body)]
    assert [item["document"] for item in body["results"]] == [{"text": text} for text in texts]
    for given in (False, None):
        _, body = rerank(path, return_documents=given)
        assert all("document" not in item for item in body["results"])


@pytest.mark.parametrize("path", [*PATHS, "/rerank"])
def test_documents_whose_scores_are_all_1_are_still_ranked(path, monkeypatch):
    monkeypatch.setattr("fake_embedder.logits", lambda item, _: np.float32([len(item.second)]))
    texts = ["a" * 40, "a" * 60, "a" * 50]
    _, body = rerank(path, query="q", documents=texts)
    assert indices(body) == [1, 2, 0]
    assert [item["relevance_score"] for item in body["results"]] == [1, 1, 1]
    asked = {"query": "q", "texts": texts}
    _, body = ask(asked, path="/rerank", embedder=FakeEmbedder(spec=RERANKER))
    assert [item["index"] for item in body] == [1, 2, 0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("given", "limit"), [(None, None), (0, None), (7, 7)])
def test_options_reach_the_embedder(given, limit, path):
    embedder = FakeEmbedder(spec=GENERATOR)
    rerank(path, embedder, truncate=False, instruction="Find cats", max_tokens_per_doc=given)
    (options,) = embedder.requested
    assert options.truncate is False
    assert options.instruction == "Find cats"
    assert options.max_document_tokens == limit


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"instruction": "x"}, "instruction"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", 1]}, "documents[1]"),
        ({"documents": [{"title": "u"}]}, "documents[0]"),
        ({"documents": ["a", {"image": "data:image/png;base64,aaaa"}]}, "takes texts and no"),
        ({"top_n": -1}, "top_n"),
        ({"overlap_tokens": -1}, "overlap_tokens"),
        ({"rank_fields": ["title", "text"]}, "rank_fields"),
        ({"max_chunks_per_doc": 65}, "max_chunks_per_doc"),
        ({"max_tokens_per_query": 5}, "max_tokens_per_query"),
        ({"relevant_spans": {"mode": "enabled"}}, "relevant_spans"),
    ],
)
def test_a_bad_value_is_a_400_that_names_the_field(fields, param, path):
    _, body = rerank(path, **fields, status=400)
    if path == "/v1/rerank" and " " not in param:
        assert body["error"]["param"] == param
    else:
        assert param in str(body)
    assert path == "/v1/rerank" or list(body) == ["message"]


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (Overloaded("Model is overloaded"), 429),
        (BackendError("the batch failed"), 503),
        (ZeroDivisionError("secret"), 500),
    ],
)
def test_failures_in_the_dialect_of_cohere(failure, status):
    response, body = rerank("/v2/rerank", FakeEmbedder(failure, RERANKER), status=status)
    assert list(body) == ["message"]
    assert body["message"].startswith("internal error" if status == 500 else str(failure))
    assert "secret" not in body["message"]
    assert ("retry-after" in response.headers) == isinstance(failure, Overloaded)


@pytest.mark.parametrize(("path", "status"), [("/v2/nothing", 404), ("/v2/rerank", 405)])
def test_what_is_not_there_is_said_in_words_of_cohere_under_v2(path, status):
    assert list(fetch_json(path, status=status)[1]) == ["message"]


LABELLED = ["/classify", "/v1/classify"]


def classify(body, spec=CLASSIFIER, path="/classify", status=200):
    return ask(body, path=path, embedder=FakeEmbedder(spec=spec), status=status)


@pytest.mark.parametrize("path", LABELLED)
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a", [Text("a")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([["a", "b"], "c"], [Pair("a", "b"), Text("c")]),
    ],
)
def test_each_input_gets_every_label_best_first(given, wanted, path):
    response, body = classify({"input": given, "model": "test/fake"}, path=path)
    assert (body["object"], body["model"]) == ("classify", "test/fake")
    tokens = sum(2 if isinstance(item, Pair) else 1 for item in wanted)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert body["id"] == f"classify-{response.headers['x-request-id']}"
    assert isinstance(body["created"], int)
    found = scores(np.stack([logits(item, 3) for item in wanted]), "softmax")
    for row, labels in zip(found, body["data"], strict=True):
        order = np.argsort(-row)
        assert [item["label"] for item in labels] == [CLASSIFIER.labels[k] for k in order]
        np.testing.assert_allclose([item["score"] for item in labels], row[order], rtol=1e-6)
    assert response.headers["x-compute-tokens"] == str(tokens)


def test_a_reranker_has_one_label():
    _, body = classify({"input": [["a", "a"]]}, spec=RERANKER)
    assert body["data"] == [[{"score": 0.5, "label": "LABEL_0"}]]


@pytest.mark.parametrize("path", LABELLED)
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [["", ""]]}, 400, "input[0]"),
        ({"input": [["a", "b", "c"]]}, 400, "input[0]"),
        ({"input": [1]}, 400, "input[0]"),
        ({"input": "a", "model": "x"}, 404, "model"),
    ],
)
def test_errors_are_those_of_openai(body, status, param, path):
    _, answer = classify(body, path=path, status=status)
    assert answer["detail"] == answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_a_failed_batch_is_a_503_and_a_wrong_model_a_400():
    failing = FakeEmbedder(BackendError("the batch failed"), CLASSIFIER)
    ask({"input": "a"}, path="/classify", embedder=failing, status=503)
    _, answer = ask({"input": "a"}, path="/classify", status=400)
    assert "`test/fake` is an embedding model" in answer["error"]["message"]
