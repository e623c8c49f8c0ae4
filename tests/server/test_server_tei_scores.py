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


def rerank(status=200, embedder=None, **body):
    embedder = embedder or FakeEmbedder(spec=RERANKER)
    body = {"query": QUERY} | ({} if "documents" in body else {"texts": TEXTS}) | body
    return ask(body, path="/rerank", embedder=embedder, status=status)


def predict(inputs, embedder=None):
    embedder = embedder or FakeEmbedder(spec=CLASSIFIER)
    return ask({"inputs": inputs}, path="/predict", embedder=embedder, status=200)


def test_rerank_sorts_by_score_and_puts_the_later_of_equals_first():
    _, body = rerank()
    assert [item["index"] for item in body] == [4, 2, 3, 1, 0]
    wanted = 1 / (1 + np.exp(-np.array([2, 1, 0, 0, -1])))
    np.testing.assert_allclose([item["score"] for item in body], wanted, rtol=1e-6)
    assert list(body[0]) == ["index", "score"]


@pytest.mark.parametrize("field", ["top_n", "top_k"])
def test_rerank_gives_as_many_as_asked_for(field):
    for most, wanted in ((2, [4, 2]), (9, [4, 2, 3, 1, 0]), (0, [4, 2, 3, 1, 0])):
        assert [item["index"] for item in rerank(**{field: most})[1]] == wanted
    assert f"`{field}` must be 1 or more" in rerank(422, **{field: -1})[1]["error"]
    assert "contradict each other" in rerank(422, top_n=2, top_k=3)[1]["error"]


def test_rerank_refuses_texts_and_documents_at_once():
    _, body = rerank(422, texts=["a"], documents=["b"])
    assert "send either `texts` or `documents`" in body["error"]
    assert rerank(texts=["a"], documents=None)[1][0]["index"] == 0


def test_rerank_cuts_texts_to_the_tokens_asked_for():
    embedder = FakeEmbedder(spec=RERANKER)
    for given, wanted in ((3, 3), (0, None), (None, None)):
        response, _ = rerank(embedder=embedder, max_tokens_per_doc=given)
        assert embedder.requested[-1].max_document_tokens == wanted
    assert "x-score-source" not in response.headers


def test_rerank_gives_texts_between_index_and_score_and_has_the_headers_of_embed():
    response, body = rerank(query="á", texts=["b c", "d á"], return_text=True)
    assert list(body[0]) == ["index", "text", "score"]
    assert [item["text"] for item in body] == ["d á", "b c"]
    assert response.headers["x-compute-type"] == "cpu+float32"
    assert response.headers["x-compute-characters"] == "8"  # the query counts for each text
    assert response.headers["x-compute-tokens"] == "6"
    assert all(response.headers[name].isdigit() for name in TIMES)


def test_rerank_says_how_many_texts_were_cut():
    asked = {"query": "a", "texts": ["a", "b " * 20, "c " * 20]}
    assert rerank(**asked)[0].headers["x-truncated-inputs"] == "2"
    _, body = rerank(422, **asked, truncate=False)
    assert "must have less than 16 tokens. Given: 21" in body["error"]


def test_rerank_takes_the_body_of_jina_and_answers_as_jina():
    _, body = rerank(documents=TEXTS, top_n=3)
    assert [item["index"] for item in body["results"]] == [4, 2, 1]
    assert body["model"] == "test/fake"
    assert rerank(400, documents=[])[1]["error_type"] == "Empty"


def test_one_side_of_a_pair_may_be_empty_but_no_query():
    rerank(query="a", texts=[""])
    predict(["", "a"])


@pytest.mark.parametrize(
    ("inputs", "wanted"), [("a", Text("a")), (["a"], Text("a")), (["a", "b"], Pair("a", "b"))]
)
def test_predict_answers_one_input_with_a_flat_list(inputs, wanted):
    response, body = predict(inputs)
    found = scores(logits(wanted, 3)[None], "softmax")[0]
    order = np.argsort(-found)
    assert [item["label"] for item in body] == [CLASSIFIER.labels[k] for k in order]
    np.testing.assert_allclose([item["score"] for item in body], found[order], rtol=1e-6)
    assert list(body[0]) == ["score", "label"]
    assert response.headers["x-compute-characters"] == str(len("".join(inputs)))


def test_predict_answers_a_batch_with_a_list_of_lists():
    embedder = FakeEmbedder(spec=CLASSIFIER)
    response, body = predict([["a"], ["b", "c"]], embedder)
    assert body == [predict("a")[1], predict(["b", "c"])[1]]
    assert response.headers["x-compute-tokens"] == "3"
    text = embedder.telemetry.exposition().decode()
    assert 'te_request_success{method="batch"} 1.0' in text
    assert len(predict([["a"]])[1]) == 1  # a batch of one is a list of one list


def test_predict_puts_the_later_of_equal_labels_first(monkeypatch):
    monkeypatch.setattr("fake_embedder.logits", lambda item, labels: np.float32([1, 2, 1]))
    _, body = predict("a")
    assert [item["label"] for item in body] == ["fair", "good", "bad"]


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


def test_a_model_that_cannot_answers_424_and_says_what_it_is():
    for path, body, spec, words in (
        ("/rerank", {"query": "q", "texts": ["a"]}, CLASSIFIER, "a re-ranker model: {} classifier"),
        ("/predict", {"inputs": "a"}, SPEC, "a classifier model: {}n embedding model"),
    ):
        _, answer = ask(body, path=path, embedder=FakeEmbedder(spec=spec), status=424)
        assert answer["error_type"] == "Backend"
        assert (
            answer["error"]
            .lower()
            .startswith("backend error: model is not " + words.format("`test/fake` is a"))
        )
