"""POST /similarity of models without a dense output, by the formulas."""

from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
import sources
from conftest import open_tiny, save_tiny
from sparse_matrix import as_dense
from test_late_interaction import HEAD, ID, LENGTH, late
from test_server_openai import ask
from test_splade import weights_of_terms

from jaxembed import Embedder

SENTENCES = ["world a", "hello hello", "unhappy ab world", "a"]
SOURCE = "hello a"
CAT, TEXTS = "what is a cat", ["cat", "a cat sat on mat", "dog " * 30, "red dog runs"]


@pytest.fixture(name="opened", scope="module")
def _opened(tmp_path_factory):
    """Embedder(path) in float32 with one bucket."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("similarity")
        yield lambda path: stack.enter_context(open_tiny(path, folder, (2, 24)))


@pytest.fixture(name="splade", scope="module")
def _splade(opened, tmp_path_factory) -> Embedder:
    return opened(sources.write_splade(tmp_path_factory.mktemp("splade") / "source"))


@pytest.fixture(name="routed", scope="module")
def _routed(opened, tmp_path_factory) -> Embedder:
    """Its queries have fixed weights of terms."""
    folder = tmp_path_factory.mktemp("router") / "source"
    return opened(sources.write_sparse_router(folder, weights_of_terms()))


@pytest.fixture(name="colbert", scope="module")
def _colbert(opened, tmp_path_factory) -> Embedder:
    return opened(save_tiny(tmp_path_factory.mktemp("colbert") / "checkpoint", **late()))


def similarities(embedder: Embedder, source: str, sentences: list[str], **parameters) -> list:
    inputs = {"source_sentence": source, "sentences": sentences}
    body = {"inputs": inputs, "parameters": parameters}
    _, answer = ask(body, path="/similarity", embedder=embedder.model, status=200)
    return answer


def cosines(source: np.ndarray, others: np.ndarray) -> np.ndarray:
    source, others = source.astype(float), others.astype(float)
    return others @ source / np.linalg.norm(source) / np.linalg.norm(others, axis=1)


def test_of_sparse_outputs_it_is_the_cosine_of_the_weights(splade):
    weights = as_dense(splade.encode_sparse([SOURCE, *SENTENCES]))
    got = similarities(splade, SOURCE, [*SENTENCES, SOURCE])
    np.testing.assert_allclose(got[:-1], cosines(weights[0], weights[1:]), rtol=1e-6)
    assert got[-1] == pytest.approx(1, rel=1e-6)


def test_the_source_of_a_routed_model_is_a_query(routed):
    query = as_dense(routed.encode_sparse(SOURCE, role="query"))[0]
    documents = as_dense(routed.encode_sparse(SENTENCES, role="document"))
    got = similarities(routed, SOURCE, SENTENCES)
    np.testing.assert_allclose(got, cosines(query, documents), rtol=1e-6)


def test_a_text_without_terms_is_similar_to_nothing(routed):
    """The weight of that word is 0."""
    assert not len(routed.encode_sparse("world", role="query").indices[0])
    assert similarities(routed, "world", SENTENCES) == [0] * len(SENTENCES)


def mean_max(query: np.ndarray, documents) -> list[float]:
    return [(query.astype(float) @ one.T).max(axis=1).mean() for one in documents]


def test_of_several_vectors_it_is_the_mean_of_the_best_products(colbert):
    query = colbert.encode_multi(CAT, role="query")[0]
    documents = colbert.encode_multi(TEXTS, role="document")
    got = similarities(colbert, CAT, TEXTS)
    np.testing.assert_allclose(got, mean_max(query, documents), rtol=1e-5, atol=1e-6)
    by_name = {one.index: one.score for one in colbert.rerank(CAT, TEXTS)}
    np.testing.assert_allclose(got, [by_name[k] for k in range(len(TEXTS))], rtol=1e-6)


def test_the_answer_counts_what_was_run_and_cut(colbert):
    body = {"inputs": {"source_sentence": CAT, "sentences": TEXTS}}
    response, _ = ask(body, path="/similarity", embedder=colbert.model)
    counts = [len(text.split()) + 3 for text in (CAT, *TEXTS)]  # a document has room for 10
    assert int(response.headers["x-compute-tokens"]) == sum(min(one, 10) for one in counts)
    assert response.headers["x-truncated-inputs"] == "1"


@pytest.mark.parametrize(
    ("role", "tokens"),
    [
        ("query", ["[CLS]", "what", "a", "cat", "on", "mat", "[SEP]", *["[MASK]"] * (LENGTH - 7)]),
        ("document", ["[CLS]", "the", "a", "cat", "mat", "[SEP]"]),  # `on` has no vector
    ],
)
def test_each_vector_of_a_text_is_named_by_its_token(opened, tmp_path, role, tokens):
    """Markers and fillers too, and the tokens that documents have no vector of are left out."""
    head = msgspec.structs.replace(HEAD, skipped_ids=(ID["on"],))
    fields = late() | {"heads": {"multi_vector": head}}
    embedder = opened(save_tiny(tmp_path / "checkpoint", **fields))
    body = {"input": "a cat on mat", "input_type": role, "return_tokens": True}
    _, answer = ask(body, embedder=embedder.model)
    (item,) = answer["data"]
    assert item["tokens"] == tokens
    assert len(item["embeddings"]) == len(tokens)
