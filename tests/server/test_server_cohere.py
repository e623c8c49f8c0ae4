"""/v1/rerank and /v2/rerank: one body, two answers."""

import numpy as np
import pytest
from fake_embedder import GENERATOR, RERANKER, FakeEmbedder
from test_server_app import fetch_json
from test_server_openai import ask

from jaxembed.errors import BackendError, Overloaded

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
    assert body["object"] == "rerank"
    assert body["model"] == "test/fake"
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
    embedder = FakeEmbedder(spec=RERANKER)
    texts = ["a" * 40, "a" * 60, "a" * 50]
    _, body = ask({"query": "q", "documents": texts}, path=path, embedder=embedder)
    assert indices(body) == [1, 2, 0]
    assert [item["relevance_score"] for item in body["results"]] == [1, 1, 1]
    _, body = ask({"query": "q", "texts": texts}, path="/rerank", embedder=embedder)
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
    if path == "/v1/rerank":
        assert body["error"]["param"] == param
    else:
        assert list(body) == ["message"]
        assert param in body["message"]


@pytest.mark.parametrize("path", PATHS)
def test_images_for_a_reranker_of_texts_are_refused(path):
    _, body = rerank(path, documents=["a", {"image": "data:image/png;base64,aaaa"}], status=400)
    assert "takes texts and no images" in str(body)


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


@pytest.mark.parametrize(("method", "path", "status"), [
    ("POST", "/v2/nothing", 404), ("GET", "/v2/rerank", 405),
])  # fmt: skip
def test_what_is_not_there_is_said_in_words_of_cohere_under_v2(method, path, status):
    assert list(fetch_json(path, method, status=status)[1]) == ["message"]
