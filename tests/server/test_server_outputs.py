"""Dense, sparse and multi-vector outputs over HTTP, of a model that gives all three."""

import base64
import json

import msgspec
import numpy as np
import pytest
from fake_embedder import DIM, M3, MAX_TOKENS, SPEC, FakeEmbedder
from sparse_matrix import as_dense
from test_m3 import TEXTS, _embedder, _files  # noqa: F401, fixtures
from test_server_openai import ask

from jaxembed.data.inputs import Text
from jaxembed.data.spec import Vocabulary
from jaxembed.data.work import SparseRows
from jaxembed.runtime.options import Embeddings, EncodeOptions
from jaxembed.runtime.requests import TERM_BYTES, TERMS_A_TOKEN, excess_bytes
from jaxembed.server.routes import tei

ALL = ["dense", "sparse", "multi_vector"]
SPARSE = msgspec.structs.replace(SPEC, heads={"sparse": Vocabulary(MAX_TOKENS, DIM)})
SEVERAL_VECTORS = msgspec.structs.replace(M3, heads={"multi_vector": M3.heads["multi_vector"]})


QUERY = {"texts": ["a"], "input_type": "query"}
OCTETS = {"accept": "application/octet-stream"}


@pytest.fixture(name="post")
def _post(embedder):
    def post(path="/v1/embeddings", headers=None, status=None, **body):
        return ask(body, path=path, embedder=embedder.model, headers=headers, status=status)

    return post


def terms_of(items: list[dict], width: int) -> np.ndarray:
    """The sparse embeddings of an answer as a matrix."""
    rows = [item["sparse_embedding"] for item in items]
    indices = [np.array(row["indices"], np.int32) for row in rows]
    values = [np.array(row["values"], np.float32) for row in rows]
    return as_dense(SparseRows(width, indices, values))


def test_one_request_answers_all_outputs(embedder, post):
    wanted = embedder.encode_outputs(TEXTS, ALL, normalize=True)
    response, body = post(input=TEXTS, outputs=ALL, status=200)
    for number, item in enumerate(body["data"]):
        assert list(item) == ["object", "embedding", "sparse_embedding", "embeddings", "index"]
        np.testing.assert_allclose(item["embedding"], wanted["dense"][number], rtol=1e-6)
        np.testing.assert_allclose(item["embeddings"], wanted["multi_vector"][number], rtol=1e-6)
    width = wanted["sparse"].width
    np.testing.assert_array_equal(terms_of(body["data"], width), as_dense(wanted["sparse"]))
    assert body["usage"]["total_tokens"] == int(response.headers["x-compute-tokens"])


def test_base64_holds_the_matrix_and_its_shape_is_beside_it(embedder, post):
    outputs = ["dense", "multi_vector"]
    (item,) = post(input="a world", outputs=outputs, encoding_format="base64")[1]["data"]
    wanted = embedder.encode_outputs("a world", outputs, normalize=True)
    matrix = np.frombuffer(base64.b64decode(item["embeddings"]), "<f4").reshape(item["shape"])
    np.testing.assert_array_equal(matrix, wanted["multi_vector"][0])
    vector = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, wanted["dense"][0])


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/embeddings", {"return_multivector": True}), ("/v1/multi-vector", {})]
)
def test_jina_asks_for_several_vectors_by_its_own_names(embedder, post, path, more):
    (item,) = post(path, input=["a world"], dimensions=3, **more)[1]["data"]
    assert item["embedding"] is None
    wanted = embedder.encode_multi("a world", dimensions=3, normalize=True)[0]
    np.testing.assert_allclose(item["embeddings"], wanted, rtol=1e-6)


def test_terms_may_be_named_and_few_and_what_was_not_asked_for_is_empty(post):
    asked = {"input": "hello a", "outputs": ["sparse"], "max_active_dims": 1, "return_tokens": True}
    for form, nothing in (("float", None), ("base64", "")):  # which OpenAI's client decodes
        (item,) = post(**asked, encoding_format=form)[1]["data"]
        assert list(item) == ["object", "embedding", "sparse_embedding", "index"]
        assert item["embedding"] == nothing
        found = item["sparse_embedding"]
        assert len(found["indices"]) == len(found["values"]) == len(found["tokens"]) == 1
        assert found["tokens"][0] in ("hello", "a")


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_the_token_of_each_of_several_vectors_is_named(post, encoding_format):
    """The model has no vector for the first token."""
    asked = {"input": TEXTS, "outputs": ["multi_vector", "sparse"]}
    _, body = post(**asked, encoding_format=encoding_format, return_tokens=True)
    assert [" ".join(item["tokens"]) for item in body["data"]] == [
        "hello world un ##happy a ##b a [SEP]",
        "world [SEP]",
        "a hello [SEP]",
        "a a a [SEP]",
    ]
    assert all("tokens" in item["sparse_embedding"] for item in body["data"])
    assert "tokens" not in post(**asked, return_tokens=False)[1]["data"][0]


def test_embed_multi_answers_numbers_or_bytes(embedder, post):
    wanted = embedder.encode_multi(TEXTS)
    _, body = post("/embed_multi", inputs=TEXTS)
    for got, rows in zip(body, wanted, strict=True):
        np.testing.assert_allclose(got, rows, rtol=1e-6)
    response, raw = post("/embed_multi", inputs=TEXTS, headers=OCTETS)
    counts, width = response.headers["x-embedding-shape"].split(";")
    assert counts == ",".join(str(len(rows)) for rows in wanted)
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4").reshape(-1, int(width)), wanted.values)
    response, body = post("/embed_multi", inputs=TEXTS, output_dtype="ubinary")
    assert response.headers["x-embedding-dtype"] == "ubinary"
    np.testing.assert_array_equal(body[0], np.packbits(wanted[0] > 0, axis=1))


def by_formula(embedder, query: str, documents: list[str]) -> dict[str, np.ndarray]:
    """The similarities of each output, in float64."""
    one = embedder.encode_outputs(query, ALL, role="query")
    others = embedder.encode_outputs(documents, ALL, role="document")
    tokens = [rows.astype(float) @ one["multi_vector"][0].T for rows in others["multi_vector"]]
    return {
        "dense": others["dense"].astype(float) @ one["dense"][0],
        "sparse": as_dense(others["sparse"]).astype(float) @ as_dense(one["sparse"])[0],
        "multi_vector": np.array([found.max(axis=0).mean() for found in tokens]),
    }


@pytest.mark.parametrize("weights", [None, [0.4, 0.2, 0.4], [0, 0, 1], [1, 0, 0]])
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_by_the_weighted_similarities(embedder, post, path, weights):
    parts = by_formula(embedder, "hello a", TEXTS)
    shares = np.array(weights or [1, 1, 1]) / sum(weights or [1, 1, 1])
    wanted = np.array([parts[name] for name in ALL]).T @ shares
    _, body = post(path, query="hello a", documents=TEXTS, weights=weights, status=200)
    order = [item["index"] for item in body["results"]]
    assert order == np.argsort(-wanted, kind="stable").tolist()
    scores = [item["relevance_score"] for item in body["results"]]
    np.testing.assert_allclose(scores, wanted[order], rtol=1e-5, atol=1e-6)


def test_the_raw_score_of_several_vectors_is_the_sum(embedder, post):
    asked = {"path": "/rerank", "query": "hello a", "texts": TEXTS, "weights": [0, 0, 1]}
    (_, means), (_, sums) = post(**asked), post(**asked, raw_scores=True)
    count = len(embedder.encode_multi("hello a", role="query")[0])
    for one, other in zip(means, sums, strict=True):
        assert one["index"] == other["index"]
        assert other["score"] == pytest.approx(count * one["score"], rel=1e-5)


REFUSED = {  # by the route: what a body has beside what it must have, and the field that is named
    "/v1/embeddings": [
        ({"outputs": ["dense", "colour"]}, "outputs"),
        ({"outputs": ["dense"], "return_multivector": True}, "return_multivector"),
        ({"return_tokens": True}, "return_tokens"),
        ({"max_active_dims": 3}, "max_active_dims"),
        ({"outputs": ["sparse"], "max_active_dims": 0}, "max_active_dims"),
        ({"outputs": ["sparse"], "dimensions": 2}, "dimensions"),
        ({"outputs": ["sparse"], "output_dimension": 2}, "output_dimension"),
        ({"outputs": ["multi_vector"], "output_dimension": 200}, "output_dimension"),
        ({"input": ["a", "b"], "outputs": ["sparse"], "late_chunking": True}, None),
        ({"outputs": ["sparse"], "output_dtype": "ubinary"}, "output_dtype"),
    ],
    "/v1/rerank": [
        ({"weights": [1, 2]}, "weights"),
        ({"weights": [0, 0, 0]}, "weights"),
        ({"weights": [-1, 1, 1]}, "weights"),
        ({"instruction": "x"}, "instruction"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ({"max_chunks_per_doc": 5}, "max_chunks_per_doc"),
    ],
    "/v2/embed": [({"output_dimension": 200}, "output_dimension")],
}
NEEDED = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"]},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_makes_no_sense_is_refused_by_name(post, path):
    for fields, field in REFUSED[path]:
        _, answer = post(path, **(NEEDED[path] | fields), status=400)
        if path == "/v2/embed":
            assert answer["message"].startswith(f"`{field}` must be")
        elif field:
            assert field in answer["error"]["message"], fields
            assert answer["error"]["param"].startswith(field), fields


@pytest.mark.parametrize("count", [33, 100_000])
def test_a_list_of_many_names_is_refused_by_its_own_name(post, count):
    _, answer = post(input="a", outputs=["dense"] * count, status=400)
    assert answer["error"]["param"] == "outputs"
    assert answer["detail"].startswith("Expected at most 32 items, got ")
    assert answer["detail"].endswith(" - at `$.outputs`")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/embeddings", {"outputs": ["sparse"]}),
        ("/v1/embeddings", {"outputs": ["dense", "multi_vector"]}),
        ("/v1/embeddings", {"return_multivector": True}),
        ("/v1/multi-vector", {}),
    ],
)
def test_raw_bytes_are_of_the_dense_vector_alone(post, path, asked):
    _, answer = post(path, input="a", headers=OCTETS, status=400, **asked)
    assert answer["error"]["param"] == "outputs"
    assert "`Accept: application/octet-stream` supports only the dense output" in answer["detail"]


@pytest.mark.parametrize("most", [1, 3, 100])
def test_embed_sparse_answers_as_tei_in_slices(embedder, post, monkeypatch, most):
    monkeypatch.setattr(tei, "SLICE_TERMS", most)
    texts = [*TEXTS, '"', "."]  # unknown, so without terms
    response, body = post("/embed_sparse", inputs=texts, return_tokens=True)
    assert response.headers["x-compute-tokens"].isdigit()
    assert [] in body
    rows, name_terms = embedder.encode_sparse(texts), embedder.model.main.processor.term_names
    for terms, indices, values in zip(body, rows.indices, rows.values, strict=True):
        assert [term["index"] for term in terms] == indices.tolist()
        np.testing.assert_allclose([term["value"] for term in terms], values, rtol=1e-6)
        assert [term["token"] for term in terms] == name_terms(indices)
    _, plain = post("/embed_sparse", inputs=texts)
    assert plain == [[{k: one[k] for k in ("index", "value")} for one in row] for row in body]


@pytest.mark.parametrize("path", ["/embed_sparse", "/embed_multi"])
def test_a_model_without_the_output_is_refused_in_teis_words(path):
    _, body = ask({"inputs": "a"}, path=path, status=424)
    assert body["error"].startswith("Backend error: Model is not an embedding model with")


async def test_no_slice_has_more_terms_than_one_turn_writes():
    row = [np.arange(10_000, dtype=np.int32)], [np.ones(10_000, np.float32)]
    values = {"sparse": SparseRows(10_000, *row)}
    times = dict.fromkeys(("tokenization_s", "queue_s", "inference_s"), 0.0)
    answer = Embeddings(values, num_tokens=np.ones(1, np.int64), truncated=0, **times)
    parts = [part async for part in tei._terms(answer, None)]
    assert max(part.count(b"{") for part in parts) == tei.SLICE_TERMS
    assert len(json.loads(b"".join(parts))[0]) == 10_000


@pytest.mark.parametrize(("path", "only"), [("/embed_sparse", ALL[1]), ("/embed_multi", ALL[2])])
def test_a_route_of_one_output_takes_no_other_as_outputs(post, path, only):
    for name in ALL:
        _, body = post(path, inputs="a", outputs=[name], status=200 if name == only else 422)
        assert name == only or "`outputs` of " in body["error"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embed", {"texts": ["a"]}, "only multi_vector"),
        ("/v2/embed", QUERY | {"embedding_types": ["float"]}, "only multi_vector"),
        ("/v2/embed", QUERY | {"embedding_types": ["int8"]}, "only multi_vector"),
        ("/embed", {"inputs": "a"}, "only multi_vector; send the request to /embed_multi"),
        ("/v1/embeddings", {"input": ["a", "b"], "late_chunking": True}, None),
        ("/v1/contextualizedembeddings", {"inputs": [["a", "b"]]}, None),
    ],
)
def test_a_model_without_dense_vectors_is_refused_where_they_are_answered(path, body, words):
    response, answer = ask(body, path=path, embedder=FakeEmbedder(spec=SEVERAL_VECTORS))
    assert response.status_code == (424 if path == "/embed" else 400)
    if words is None:  # it is no field's fault
        assert "the outputs of this model are multi_vector" in answer["error"]["message"]
        assert answer["error"]["param"] is None
    else:
        assert f"has no dense output, {words}" in str(answer)


def test_embed_names_the_route_of_a_model_of_weights():
    _, answer = ask({"inputs": "a"}, path="/embed", embedder=FakeEmbedder(spec=SPARSE), status=424)
    wanted = "test/fake has no dense output, only sparse; send the request to /embed_sparse"
    assert answer["error"].endswith(wanted)


def test_weights_of_more_terms_than_texts_have_are_counted_once_they_are_known(embedder):
    request = embedder.model.tasks.embed([Text("a")], EncodeOptions(outputs=frozenset({"sparse"})))
    answer = embedder.model.run(request)
    assert excess_bytes(answer) == 0
    row = [np.arange(1000, dtype=np.int32)], [np.ones(1000, np.float32)]
    many = msgspec.structs.replace(answer, values={"sparse": SparseRows(1000, *row)})
    usual = TERMS_A_TOKEN * int(answer.num_tokens.sum())
    assert excess_bytes(many) == TERM_BYTES * (1000 - usual)


def test_an_answer_that_is_too_large_is_refused_and_let_go(embedder, post, monkeypatch):
    monkeypatch.setattr("jaxembed.runtime.runner.excess_bytes", lambda answer: 10**12)
    _, body = post("/embed_sparse", inputs="a", status=422)
    assert "send less at a time or raise --max-queue-bytes" in body["error"]
    assert embedder.model.admission.capacity.bytes == 0


def test_raw_bytes_of_more_inputs_than_a_header_holds_are_refused(post, monkeypatch):
    monkeypatch.setattr(tei, "MAX_SHAPE_CHARACTERS", 4)
    _, body = post("/embed_multi", inputs=["a"] * 3, headers=OCTETS, status=422)
    assert "send fewer inputs or accept JSON" in body["error"]
    post("/embed_multi", inputs=["a"] * 3, status=200)
