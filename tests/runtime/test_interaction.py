"""Documents compared with a query by their outputs: empty ones, and long ones in windows."""

import asyncio
from functools import cache

import numpy as np
import pytest
from conftest import TOWERS, save_tiny
from sparse_matrix import as_dense
from test_late_interaction import late
from test_server_openai import ask
from test_windows import QUERY, ROUTES, _reranker, assert_each_window_is_admitted, prose  # noqa: F401

from jaxembed import Embedder
from jaxembed.data.spec import DenseLayer, NormalizeLayer, PerToken, Pooled
from jaxembed.errors import EmptyInput, InputTooLong, InvalidInput
from jaxembed.preprocessing.windows import overlap_of, windows
from jaxembed.runtime.options import Chunk, ScoreOptions

LIMIT = 100
TOWER = TOWERS["bert"]["config"] | {"max_positions": LIMIT}
M3 = {
    "heads": {
        "dense": Pooled(("cls",), (NormalizeLayer(),)),
        "token_weights": PerToken((DenseLayer(32, 1, activation="relu"),), skipped_ids=(2, 3)),
        "multi_vector": PerToken((NormalizeLayer(),), drops_first=True),
    },
    "max_input_tokens": LIMIT,
    "prompts": {},
}
DENSE = {"heads": {"dense": Pooled(("mean",))}, "max_input_tokens": LIMIT}  # not normalised
PROMPTED = {"prompts": {"query": "", "document": "the red "}, "include_prompt": False}
MODELS = {  # the fields of a spec, and how many tokens are around a document
    "colbert": (late(document_length=LIMIT) | {"max_input_tokens": LIMIT}, 3),
    "m3": (M3, 2),
    "m3, prompted": (M3 | PROMPTED, 4),
    "dense": (DENSE, 3),
}
SHORT = late(document_length=60) | {"max_input_tokens": 60}


@pytest.fixture(name="opened", scope="module")
def _opened(tmp_path_factory, load_model):
    """The model of MODELS with a name, or one of short documents, opened once."""

    @cache
    def opened(name: str) -> Embedder:
        fields = SHORT if name == "short" else MODELS[name][0]
        path = save_tiny(tmp_path_factory.mktemp("model") / "tiny", config=TOWER, **fields)
        return load_model(path, 2, 100)

    return opened


def similarity(embedder: Embedder, query: str, document: str) -> float:
    """The mean of the similarities of all outputs, in float64."""
    names = embedder.spec.representations
    one = embedder.encode_outputs(query, names, role="query", normalize=True)
    other = embedder.encode_outputs(document, names, role="document", normalize=True)
    found = []
    if "dense" in names:
        found.append(float(one["dense"][0].astype(float) @ other["dense"][0]))
    if "sparse" in names:
        found.append(float(as_dense(one["sparse"])[0].astype(float) @ as_dense(other["sparse"])[0]))
    if "multi_vector" in names:
        tokens = one["multi_vector"][0].astype(float) @ other["multi_vector"][0].T
        found.append(tokens.max(axis=1).mean())
    return float(np.mean(found))


@pytest.mark.parametrize("name", MODELS)
def test_the_best_window_of_a_long_document_counts(opened, name):
    embedder, room = opened(name), LIMIT - MODELS[name][1]
    documents = ["a cat", prose(300, 1), prose(room, 2), prose(room + 1, 3)]
    ranked = embedder.rerank(QUERY, documents, max_chunks=64)
    assert sorted(one.index for one in ranked) == [0, 1, 2, 3]
    assert [one.score for one in ranked] == sorted((r.score for r in ranked), reverse=True)
    for one in ranked:
        words = documents[one.index].split()
        bounds = windows(len(words), room, overlap_of(room, None))
        scores = [similarity(embedder, QUERY, " ".join(words[a:b])) for a, b in bounds]
        best = int(np.argmax(scores))
        assert one.score == pytest.approx(scores[best], rel=1e-5, abs=1e-6)
        first, last = bounds[best]
        start = len(" ".join([*words[:first], ""]))
        assert one.chunk == Chunk(best, start, start + len(" ".join(words[first:last])))
    cut = {one.index: one for one in embedder.rerank(QUERY, documents)}
    assert all(one.score >= cut[one.index].score - 1e-5 for one in ranked)
    assert all(one.chunk is None for one in cut.values())


@pytest.mark.parametrize("name", MODELS)
def test_the_rows_of_a_window_are_those_of_its_text(opened, name):
    """Special tokens, the marker and the prompt stand in each."""
    embedder, room = opened(name), LIMIT - MODELS[name][1]
    words = prose(250, 4).split()
    options = ScoreOptions(max_chunks=64, overlap_tokens=10)
    _, request, _ = embedder.model.tasks.compare(QUERY, [" ".join(words)], options)
    got = request.prepare(embedder.model.main.processor, None, request.items).work.encodings
    parts = [" ".join(words[a:b]) for a, b in windows(len(words), room, 10)]
    _, request, _ = embedder.model.tasks.compare(QUERY, parts, ScoreOptions())
    wanted = request.prepare(embedder.model.main.processor, None, request.items).work.encodings
    assert [one.ids.tolist() for one in got] == [one.ids.tolist() for one in wanted]
    assert [one.spans for one in got] == [one.spans for one in wanted]


def test_a_dense_embedder_ranks_by_the_cosines_of_its_vectors(opened):
    embedder, documents = opened("dense"), ["a cat", prose(20, 1), "", "the dog", prose(300, 2)]
    query = embedder.encode_query(QUERY, normalize=True).astype(float)
    vectors = embedder.encode_document(["a cat", *documents[1:2], "x", *documents[3:]])
    lengths = np.linalg.norm(vectors.astype(float), axis=1)
    assert lengths.min() > 1.1  # so that products of what `encode` gives would be no cosines
    wanted = vectors.astype(float) @ query / lengths
    wanted[2] = -1
    assert not np.allclose(wanted[0], embedder.encode("a cat", normalize=True) @ query)  # prompts
    ranked = embedder.rerank(QUERY, documents)
    assert ranked == asyncio.run(embedder.rerank_async(QUERY, documents))
    assert ranked == embedder.rerank(QUERY, documents, raw_scores=True)
    order = np.argsort(-wanted, kind="stable").tolist()
    assert [one.index for one in ranked] == order
    np.testing.assert_allclose([one.score for one in ranked], wanted[order], rtol=0, atol=1e-6)
    for path, field in ROUTES.items():
        body = {"query": QUERY, field: documents, "top_n": 3}
        response, answer = ask(body, path=path, embedder=embedder.model, status=200)
        results = answer["results"] if isinstance(answer, dict) else answer
        assert [one["index"] for one in results] == order[:3]
        scores = [one.get("relevance_score", one.get("score")) for one in results]
        np.testing.assert_allclose(scores, wanted[order[:3]], rtol=0, atol=1e-6)
        assert response.headers["x-score-source"] == "embeddings"
        assert response.headers["x-truncated-inputs"] == "1"
        body |= {"max_chunks_per_doc": 64, field: ["a cat", prose(300, 1), ""]}
        _, answer = ask(body, path=path, embedder=opened("colbert").model, status=200)
        results = answer["results"] if isinstance(answer, dict) else answer
        assert all("chunk" in one for one in results)
    assert embedder.rerank(QUERY, []) == []


@pytest.mark.parametrize("name", ["colbert", "m3", "dense"])
def test_pairs_have_the_scores_of_rerank(opened, name):
    embedder, documents = opened(name), ["a cat", prose(20, 1), "", "the dog"]
    pairs = [(query, text) for text in documents for query in (QUERY, "dog", "red")]
    for raw_scores in (False, True):
        wanted = {
            (query, documents[one.index]): one.score
            for query in (QUERY, "dog", "red")
            for one in embedder.rerank(query, documents, raw_scores=raw_scores)
        }
        got = embedder.score(pairs, raw_scores=raw_scores)
        np.testing.assert_allclose(got, [wanted[pair] for pair in pairs], rtol=1e-5, atol=1e-6)
        again = asyncio.run(embedder.score_async(pairs, raw_scores=raw_scores))
        np.testing.assert_allclose(again, got, rtol=1e-5, atol=1e-6)
    assert embedder.score([]).tolist() == []


def test_a_pair_that_cannot_be_scored_is_named_by_its_index(opened):
    embedder = opened("dense")
    pairs = [("cat", "a"), ("dog", "a"), (prose(300), "a"), ("cat", "a"), (prose(300), "b")]
    with pytest.raises(InputTooLong) as refused:
        embedder.score(pairs, truncate=False)
    assert (refused.value.field, refused.value.index) == ("query", 2)
    with pytest.raises(InputTooLong) as refused:
        embedder.score([("cat", "a"), ("cat", prose(300))], truncate=False)
    assert (refused.value.field, refused.value.index) == (None, 1)
    with pytest.raises(EmptyInput) as refused:
        embedder.score([("cat", "a"), ("", "a")])
    assert refused.value.index == 1
    with pytest.raises(TypeError, match="no option `max_chunks`"):
        embedder.score([("cat", "a")], max_chunks=2)


@pytest.mark.parametrize("name", ["colbert", "m3", "dense"])
def test_an_empty_document_is_ranked_last(opened, name):
    embedder = opened(name)
    documents = ["", "a cat", "", prose(300, 1), " "]
    for options in ({}, {"max_chunks": 3}):
        ranked = embedder.rerank(QUERY, documents, **options)
        assert [one.index for one in ranked[-2:]] == [0, 2]
        assert [one.score for one in ranked[-2:]] == [-1, -1]
        assert all(one.score > -1 for one in ranked[:-2])
        wanted = {one.index: one.score for one in embedder.rerank(QUERY, documents[1::2])}
        if not options:
            scores = {one.index: one.score for one in ranked}
            assert [scores[1], scores[3]] == pytest.approx([wanted[0], wanted[1]], rel=1e-6)
    assert [one.score for one in embedder.rerank(QUERY, ["", ""])] == [-1, -1]


@pytest.mark.parametrize(("path", "field"), ROUTES.items())
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_chunks_per_doc": 65}, "`max_chunks_per_doc` must be from 1 to 64"),
        ({"max_chunks_per_doc": -1}, "`max_chunks_per_doc` must be from 1 to 64"),
        ({"max_chunks_per_doc": "2"}, "max_chunks_per_doc"),
        ({"max_chunks_per_doc": 2, "overlap_tokens": -1}, "`overlap_tokens` must be 0 or more"),
        ({"max_chunks_per_doc": 2, "long_documents": "truncate"}, "contradicts"),
        ({"long_documents": "mean"}, "long_documents"),
        ({"max_chunks_per_doc": 2, "aggregation": "mean"}, "best window gives the score"),
        ({"instruction": "x"}, "`instruction` is for models that score pairs"),
        ({"max_tokens_per_doc": 8}, "`max_tokens_per_doc` is for models that score pairs"),
        ({"dimensions": 8}, "`dimensions` of 8 is not supported"),
        ({"top_n": -1}, "`top_n` must be 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_by_name(opened, reranker, path, field, asked, words):
    embedders = [opened("colbert"), opened("dense")]
    if "is for models that score pairs" not in words and "dimensions" not in asked:
        embedders.append(reranker)
    for embedder in embedders:
        body = {"query": QUERY, field: ["a cat"], **asked}
        response, answer = ask(body, path=path, embedder=embedder.model)
        assert response.status_code in (400, 422)
        assert words in str(answer)


def test_a_document_that_is_cut_is_refused_where_nothing_may_be(opened):
    for name in ("colbert", "m3"):
        with pytest.raises(InputTooLong) as refused:
            opened(name).rerank(QUERY, ["cat", prose(300)], max_chunks=2, truncate=False)
        assert refused.value.index == 1
        assert opened(name).rerank(QUERY, [prose(300)], max_chunks=5, truncate=False)
    with pytest.raises(InvalidInput, match="cannot be truncated on the left"):
        opened("m3").rerank(QUERY, ["cat"], max_chunks=2, truncation_side="left")


def test_windows_need_room(opened):
    with pytest.raises(InvalidInput, match="has too little room for a document: 57") as refused:
        opened("short").rerank(QUERY, ["cat"], max_chunks=2)
    assert refused.value.field == "max_chunks_per_doc"


def test_each_window_is_admitted(opened):
    embedder = opened("colbert")
    _, request, _ = embedder.model.tasks.compare(QUERY, [prose(2000)], ScoreOptions(max_chunks=64))
    assert_each_window_is_admitted(embedder, request, LIMIT - 3, LIMIT)
