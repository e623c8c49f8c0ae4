"""Pages over HTTP: ranked by a query, and their vectors beside those of queries."""

import base64

import numpy as np
import pytest
from dual_sources import picture, png
from page_sources import PAGE, SPACE, write_pages
from test_server_images import post

from jaxembed import Embedder, EngineConfig

pytest.importorskip("PIL")

FILES = [png(picture(1)), png(picture(2, 40, 60)), png(picture(3, 9, 20))]
URIS = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in FILES]
CONFIG = EngineConfig(dtype="float32", devices=1, max_batch_tokens=256)
RERANKS = pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])


@pytest.fixture(name="colpali", scope="module")
def _colpali(tmp_path_factory):
    folder = write_pages(tmp_path_factory.mktemp("colpali"))
    cache = tmp_path_factory.mktemp("cache")
    with Embedder(str(folder), cache_dir=cache, config=CONFIG) as embedder:
        yield embedder


def test_the_tokens_of_pages_are_named(colpali):
    body = {"input": [{"image": URIS[0]}], "return_multivector": True, "return_tokens": True}
    (found,) = post(colpali, body)["data"]
    assert found["tokens"] == ["<image>"] * 16 + ["<bos>", "Describe", "the", "image", ".", "\n"]


@RERANKS
def test_pages_are_ranked_by_a_query(colpali, path):
    body = {"query": "w1 w2", "documents": [{"image": uri} for uri in URIS], "top_n": 2}
    found = post(colpali, body, path)["results"]
    wanted = colpali.rerank("w1 w2", images=FILES, top_n=2)
    assert [one["index"] for one in found] == [one.index for one in wanted]
    scores = [one["relevance_score"] for one in found]
    np.testing.assert_allclose(scores, [one.score for one in wanted], atol=2e-6)


def test_documents_that_are_no_pages_are_refused(colpali):
    answer = post(colpali, {"query": "w1", "documents": ["a text"]}, "/v1/rerank", 400)
    assert "takes images as documents" in answer["error"]["message"]
    body = {"query": "w1", "documents": [{"image": URIS[0]}], "return_documents": True}
    answer = post(colpali, body, "/v1/rerank", 400)
    assert "`return_documents` supports only texts" in answer["error"]["message"]
    for document in ({}, {"text": "a", "image": URIS[0]}):
        answer = post(colpali, {"query": "w1", "documents": [document]}, "/v1/rerank", 400)
        assert "an object with either `text` or `image`" in answer["error"]["message"]


def test_a_broken_page_is_named_by_its_place(colpali):
    documents = [{"image": URIS[0]}, {"image": "data:image/png;base64,aaaa"}]
    answer = post(colpali, {"query": "w1", "documents": documents}, "/v1/rerank", 400)
    assert "documents[1]" in answer["error"]["message"]


def test_a_model_of_texts_and_images_ranks_both(clip):
    documents = ["w1", {"image": URIS[0]}, "w2 w3", {"text": "w4"}]
    found = post(clip, {"query": "w1 w2", "documents": documents}, "/v1/rerank")["results"]
    vectors = clip.encode(["w1 w2", "w1", "w2 w3", "w4"], images=FILES[:1]).astype(float)
    wanted = vectors[[1, 4, 2, 3]] @ vectors[0]
    assert [one["index"] for one in found] == np.argsort(-wanted).tolist()
    np.testing.assert_allclose(
        [one["relevance_score"] for one in found], np.sort(wanted)[::-1], atol=2e-6
    )
    body = {"query": "w1", "documents": [URIS[0]]}
    assert "send it as an image" in str(post(clip, body, "/v1/rerank", 400))


def test_vectors_of_queries_and_pages_in_one_request(colpali):
    wanted = colpali.encode_multi(["w1 w2"], images=FILES[:2])
    inputs = ["w1 w2", *({"type": "image", "url": uri} for uri in URIS[:2])]
    found = post(colpali, {"inputs": inputs}, "/embed_multi")
    assert [np.shape(one) for one in found][1:] == [(PAGE, SPACE)] * 2
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_voyages_route_says_that_it_answers_dense_vectors(colpali):
    for part in ({"type": "text", "text": "a"}, {"type": "image_base64", "image_base64": URIS[0]}):
        body = {"inputs": [{"content": [part]}]}
        answer = post(colpali, body, "/v1/multimodalembeddings", 400)
        assert "has no dense output" in str(answer)


def test_an_image_that_comes_as_a_text_is_refused(colpali, clip):
    for model, more in ((clip, {}), (colpali, {"return_multivector": True})):
        answer = post(model, {"input": ["w1", URIS[0]]} | more, status=400)
        assert "is a data URI of an image; send it as an image" in str(answer)
        assert answer["error"]["param"] == "input[1]"


def test_similarity_takes_no_text_for_a_page(colpali):
    inputs = {"source_sentence": "w1", "sentences": ["w1 w2"]}
    answer = post(colpali, {"inputs": inputs}, "/similarity", 422)
    assert "takes images as documents" in str(answer)
