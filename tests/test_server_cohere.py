"""/v1/rerank and /v2/rerank: one body, two answers; and Cohere's own client."""

import asyncio

import httpx
import numpy as np
import pytest
from fake_embedder import CLASSIFIER, GENERATOR, RERANKER, FakeEmbedder
from test_server_app import fetch_json
from test_server_openai import ask
from test_server_run import serving

from jaxembed.config import ServerConfig
from jaxembed.errors import BackendError, NotFinite, Overloaded, ShuttingDown

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


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
@pytest.mark.parametrize("fields", [{}, {"top_k": None, "truncation": None}, {"top_n": 2}])
def test_clients_of_voyage_find_the_results_where_they_look(path, fields):
    _, body = rerank(path, return_documents=True, **fields)
    assert body["data"] == body["results"]
    assert body["data"][0]["document"] == {"text": "a b c"}


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
    assert body["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": 23, "output_tokens": 0},
    }


@pytest.mark.parametrize("path", PATHS)
def test_answers_have_the_headers_of_tei(path):
    response, _ = rerank(path)
    assert response.headers["x-compute-tokens"] == "23"
    assert response.headers["x-compute-characters"] == str(5 * 5 + 11)
    assert response.headers["x-inference-time"] == "3"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("top_n", "count"), [(1, 1), (3, 3), (5, 5), (6, 5), (10**30, 5), (0, 5), (None, 5)]
)
def test_top_n_cuts_the_list_and_null_or_0_does_not(top_n, count, path):
    _, body = rerank(path, top_n=top_n)
    assert indices(body) == ORDER[:count]


@pytest.mark.parametrize("path", PATHS)
def test_documents_come_back_as_objects_when_asked_for(path):
    documents = ["a é", {"text": "x", "title": "t"}]
    _, body = rerank(path, documents=documents, return_documents=True)
    assert [item["document"] for item in body["results"]] == [{"text": "a é"}, {"text": "x"}]
    for given in (False, None):
        _, body = rerank(path, return_documents=given)
        assert all("document" not in item for item in body["results"])


def test_long_documents_come_back_whole():
    documents = ["a " * 100_000, "é" * 100_000, "a b"]
    _, body = rerank(documents=documents, return_documents=True)
    assert {item["document"]["text"] for item in body["results"]} == set(documents)


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
def test_raw_scores_are_logits(path):
    _, body = rerank(path, raw_scores=True)
    assert [item["relevance_score"] for item in body["results"]] == [2, 1, 0, 0, -1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("given", "limit"), [(None, None), (0, None), (7, 7)])
def test_options_reach_the_embedder(given, limit, path):
    embedder = FakeEmbedder(spec=GENERATOR)
    rerank(path, embedder, truncate=False, instruction="Find cats", max_tokens_per_doc=given)
    (options,) = embedder.asked
    assert options.truncate is False
    assert options.instruction == "Find cats"
    assert options.max_document_tokens == limit


@pytest.mark.parametrize("path", PATHS)
def test_an_instruction_that_the_model_refuses_is_named(path):
    _, body = rerank(path, FakeEmbedder(spec=RERANKER), instruction="x", status=400)
    assert "`instruction`" in str(body)


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_ask_for_nothing_are_taken(path):
    nothing = {
        "rank_fields": ["text"],
        "max_chunks_per_doc": 1,
        "overlap_tokens": 0,
        "max_tokens_per_query": 0,
        "relevant_spans": {"mode": "disabled"},
    }
    for fields in (nothing, dict.fromkeys(nothing), {"rank_fields": []}):
        assert rerank(path, priority=1, user="me", more=[1], **fields)[0].status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"query": 1}, "query"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", 1]}, "documents[1]"),
        ({"documents": [{"title": "u"}]}, "documents[0]"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": 1.5}, "top_n"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"rank_fields": ["title", "text"]}, "rank_fields"),
        ({"max_chunks_per_doc": 65}, "max_chunks_per_doc"),
        ({"overlap_tokens": -1}, "overlap_tokens"),
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


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_document_is_scored(path):
    _, body = rerank(path, documents=["", "a"])
    assert indices(body) == [1, 0]


@pytest.mark.parametrize("path", PATHS)
def test_documents_count_into_the_batch(path):
    _, body = rerank(path, config=ServerConfig(max_client_batch_size=4), status=400)
    assert "batch size 5 > maximum allowed batch size 4" in str(body)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (Overloaded("Model is overloaded"), 429, "overloaded"),
        (ShuttingDown("shutting down"), 503, "shutting_down"),
        (BackendError("the batch failed"), 503, None),
        (NotFinite("a score is NaN"), 503, None),
        (ZeroDivisionError("secret"), 500, None),
    ],
)
def test_failures_in_both_dialects(failure, status, code):
    _, body = rerank("/v1/rerank", FakeEmbedder(failure, RERANKER), status=status)
    assert body["error"]["code"] == code
    response, body = rerank("/v2/rerank", FakeEmbedder(failure, RERANKER), status=status)
    assert list(body) == ["message"]
    assert body["message"].startswith("internal error" if status == 500 else str(failure))
    assert "secret" not in body["message"]
    assert ("retry-after" in response.headers) == isinstance(failure, Overloaded)


@pytest.mark.parametrize("path", PATHS)
def test_a_classifier_says_what_it_is(path):
    _, body = rerank(path, FakeEmbedder(spec=CLASSIFIER), status=400)
    assert "`test/fake` is a classifier" in str(body)


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_a_404(path):
    _, body = rerank(path, model="rerank-v3.5", status=404)
    assert "this server has test/fake" in str(body)


@pytest.mark.parametrize(("method", "path", "status"), [
    ("POST", "/v2/nothing", 404), ("GET", "/v2/rerank", 405),
])  # fmt: skip
def test_what_is_not_there_is_said_in_words_of_cohere_under_v2(method, path, status):
    assert list(fetch_json(path, method, status=status)[1]) == ["message"]


@pytest.fixture(name="cohere")
def _cohere():
    return pytest.importorskip("cohere", reason="Cohere's client is not installed")


def with_client(kind, ask_client, embedder=None):
    """What `ask_client` gets from a server on loopback through one of Cohere's clients."""

    async def go():
        embedder_ = embedder or FakeEmbedder(spec=RERANKER)
        async with (
            serving(embedder_) as (plain, _, _),
            httpx.AsyncClient(trust_env=False) as transport,
        ):
            client = kind(
                api_key="none", base_url=str(plain.base_url), httpx_client=transport, max_retries=0
            )
            return await ask_client(client)

    return asyncio.run(go())


def test_the_client_of_cohere_reads_v2(cohere):
    async def go(client):
        return await client.rerank(
            model="test/fake",
            query=QUERY,
            documents=["x", "a", "a b"],
            top_n=2,
            max_tokens_per_doc=512,
            priority=0,
        )

    answer = with_client(cohere.AsyncClientV2, go)
    assert [item.index for item in answer.results] == [2, 1]
    assert answer.results[0].relevance_score == pytest.approx(SCORES[1])
    assert answer.meta.billed_units.search_units == 1
    assert answer.meta.tokens.input_tokens == 13
    assert answer.meta.api_version.version == "2"
    assert answer.id


def test_the_client_of_cohere_reads_v1(cohere):
    async def go(client):
        return await client.rerank(
            model="test/fake",
            query=QUERY,
            documents=DOCUMENTS,
            rank_fields=["text"],
            return_documents=True,
        )

    answer = with_client(cohere.AsyncClient, go)
    assert [item.index for item in answer.results] == ORDER
    assert answer.results[3].document.text == "b"


@pytest.mark.parametrize("kind", ["AsyncClient", "AsyncClientV2"])
def test_the_client_of_cohere_raises_its_own_errors(cohere, kind):
    async def go(client):
        with pytest.raises(cohere.NotFoundError) as unknown:
            await client.rerank(model="x", query=QUERY, documents=["a"])
        with pytest.raises(cohere.BadRequestError) as empty:
            await client.rerank(model="test/fake", query="", documents=["a"])
        return unknown.value.body, empty.value.body

    unknown, empty = with_client(getattr(cohere, kind), go)
    assert "this server has test/fake" in str(unknown)
    assert "`query` cannot be empty" in str(empty)
    if kind == "AsyncClientV2":
        assert list(unknown) == ["message"]


def test_the_client_of_cohere_sees_overload(cohere):
    async def go(client):
        with pytest.raises(cohere.TooManyRequestsError, match="overloaded"):
            await client.rerank(model="test/fake", query=QUERY, documents=["a"])

    failing = FakeEmbedder(Overloaded("Model is overloaded"), RERANKER)
    with_client(cohere.AsyncClientV2, go, failing)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_the_document_that_is_too_long_is_named(path):
    documents = ["a", " ".join("x" * 20)]
    _, body = rerank(path, documents=documents, truncate=False, status=400)
    message = body["message"] if path == "/v2/rerank" else body["error"]["message"]
    assert "`documents[1]` must have less than 16 tokens" in message
