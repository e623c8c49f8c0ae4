"""Sparse encoders: their conversion, and the weights that they give, from the formulas.

tests/parity/test_splade.py compares them with sentence-transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import sources
from safetensors.numpy import load_file
from sparse_matrix import as_dense

from converters import convert, folders_read, outline, outline_routes
from converters.families import bert
from jaxembed import Embedder, EngineConfig
from jaxembed.checkpoints import hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.data.spec import NO_LIMIT, Vocabulary
from jaxembed.errors import CheckpointError, ConfigError, ConversionError, UnsupportedModel
from jaxembed.tools.verify import verification

TEXTS = ["hello world", "a", "unhappy hello ab hello world a a", "un", "world"]
TERMS = len(sources.WORDS)
POOLING = "1_SpladePooling/config.json"
OF_MODEL = "config_sentence_transformers.json"

Make = Callable[..., Embedder]


@pytest.fixture(name="make")
def _make(load_model) -> Make:
    """Embedder(source) with one bucket of two rows, where texts are packed."""
    return lambda source, **options: load_model(source, 2, 24, **options)


def refused(source: Path) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        outline(source)
    return str(caught.value)


def test_small_logits_and_special_tokens_keep_their_weights(make, tmp_path):
    """log(1 + 1e-9) is 0 in float32, log1p(1e-9) is not."""
    head = {name: np.zeros_like(one) for name, one in sources.masked_lm_tensors().items()}
    bias = np.array([1, 1, 1, 1, 0, *[1e-9] * (TERMS - 5)], np.float32)
    head["cls.predictions.bias"][:] = bias
    embedder = make(sources.write_splade(tmp_path / "source", head))
    (got,) = as_dense(embedder.compute(["hello"], ["sparse"])["sparse"])
    np.testing.assert_allclose(got, np.log1p(bias.astype(np.float64)), rtol=1e-6)


def test_the_number_of_weights_of_a_sparse_encoder_is_read(tmp_path):
    spec = outline(sources.write_splade(tmp_path / "source", most=7, chunk_size=2)).spec
    head = spec.head
    assert isinstance(head, Vocabulary)
    assert head.max_active == 7
    assert spec.pooling == ("splade",)


@pytest.mark.parametrize(
    "kinds",
    [
        ("models.MLMTransformer", "models.SpladePooling"),
        ("models.MLMTransformer.MLMTransformer", "models.SpladePooling.SpladePooling"),
        ("modules.mlm_transformer.MLMTransformer", "modules.splade_pooling.SpladePooling"),
    ],
)
def test_older_names_of_the_modules_are_read(tmp_path, kinds):
    source = sources.write_splade(tmp_path / "source")
    before = outline(source).spec
    (source / "sentence_bert_config.json").unlink()
    first, second = (f"sentence_transformers.sparse_encoder.{kind}" for kind in kinds)
    sources.write_modules(source, (first, ""), (second, "1_SpladePooling"))
    assert outline(source).spec == before


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (POOLING, {"pooling_strategy": "mean"}, "'mean' is not supported; known: max, sum"),
        (POOLING, {"activation_function": "gelu"}, "activation_function 'gelu' is not supported"),
        (POOLING, {"top_k": 5}, "SpladePooling with top_k is not supported"),
        (POOLING, {"embedding_dimension": 12}, "embedding_dimension is 12, the model's vocab_size"),
        (POOLING, {"word_embedding_dimension": 12}, "dimension is 12, the model's vocab_size 11"),
        (POOLING, {"pooling_strategy": 3}, "pooling_strategy"),
        (POOLING, {"chunk_size": "all"}, "chunk_size"),
        (POOLING, {"embedding_dimension": "wide"}, "embedding_dimension"),
        (OF_MODEL, {"max_active_dims": 0}, "max_active_dims"),
        (OF_MODEL, {"max_active_dims": "many"}, "max_active_dims"),
        (OF_MODEL, {"model_type": "SentenceTransformer"}, "is not supported; known: SparseEncoder"),
        # hidden states are no logits
        ("sentence_bert_config.json", {"transformer_task": None}, "modules transformer, splade a"),
    ],
)
def test_settings_that_are_not_known_are_refused(tmp_path, file, fields, message):
    source = sources.write_splade(tmp_path / "source")
    sources.change_json(source / file, **fields)
    with pytest.raises(CheckpointError, match=message):
        outline(source)


AUTO_ENCODER = "sentence_transformers.sparse_encoder.models.SparseAutoEncoder"


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((AUTO_ENCODER,), "SparseAutoEncoder"),
        ((sources.POOLING,), "modules masked_lm, pooling are not supported"),
        ((sources.SPLADE, sources.NORMALIZE), "modules masked_lm, splade, normalize are not supp"),
    ],
)
def test_other_modules_after_a_masked_lm_are_refused(tmp_path, kinds, message):
    source = sources.write_splade(tmp_path / "source")
    later = [(kind, "1_SpladePooling") for kind in kinds]
    sources.write_modules(source, (sources.TRANSFORMER, ""), *later)
    assert message in refused(source)


def test_a_family_whose_head_is_not_known_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bert, "FAMILY", replace(bert.FAMILY, masked_lm=None))
    message = refused(sources.write_splade(tmp_path / "source"))
    assert "that of 'bert' is not supported; known: albert, camembert, distilbert" in message


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({}, "missing: cls.predictions.transform.dense.weight"),
        ({"tie_word_embeddings": False}, "missing: cls.predictions.decoder.weight"),
    ],
)
def test_a_head_that_is_not_stored_is_missing(tmp_path, config, missing):
    source = sources.write_splade(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    if not config:
        tensors = {name: one for name, one in tensors.items() if not name.startswith("cls.")}
    sources.write_weights(source, tensors)
    sources.change_json(source / "config.json", **config)
    with pytest.raises(ConversionError, match=missing):
        convert(source, tmp_path / "out", progress=lambda steps: steps)


def weights_of_terms() -> np.ndarray:
    weights = np.arange(TERMS, dtype=np.float32) / 4
    weights[sources.WORDS.index("world")] = 0
    return weights


def test_a_query_has_the_weight_of_each_term_once(make, tmp_path):
    """Of its own tokens, without special ones; a term that weighs nothing is not there."""
    source = sources.write_sparse_router(tmp_path / "source", weights_of_terms())
    texts = ["hello world hello", "", "a hello", "world"]
    rows = make(source).compute(texts, ["sparse", "tokens"], route="query")
    hello, a = sources.WORDS.index("hello"), sources.WORDS.index("a")
    got = rows["sparse"]
    assert [indices.tolist() for indices in got.indices] == [[hello], [], [hello, a], []]
    assert [values.tolist() for values in got.values] == [[hello / 4], [], [hello / 4, a / 4], []]
    assert {one.dtype for one in got.indices} == {np.dtype(np.int32)}
    assert {one.dtype for one in got.values} == {np.dtype(np.float32)}
    assert got.width == TERMS
    assert rows["tokens"][0].tolist() == [[hello / 4], [0], [hello / 4]]


def test_a_query_is_cut_at_the_limit_of_its_tokenizer(make, tmp_path):
    source = sources.write_sparse_router(tmp_path / "source", weights_of_terms())
    config = source / "query_0_SparseStaticEmbedding" / "tokenizer_config.json"
    sources.write_json(config, {"model_max_length": 2})
    texts = ["a hello hello un", "hello un a"]
    (first, second) = make(source).compute(texts, ["sparse"], route="query")["sparse"].indices
    assert first.tolist() == [sources.WORDS.index("hello"), sources.WORDS.index("a")]
    assert second.tolist() == [sources.WORDS.index("hello"), sources.WORDS.index("un")]
    sources.write_json(config, {"model_max_length": 1e30})
    routes, _ = outline_routes(source)
    assert routes["query"].spec.max_input_tokens == NO_LIMIT


@pytest.mark.parametrize("beside", [True, False])
def test_weights_by_token_are_read(make, tmp_path, beside):
    source = sources.write_sparse_router(tmp_path / "source", weights_of_terms())
    folder = source / "query_0_SparseStaticEmbedding"
    (folder / "model.safetensors").unlink()
    sources.write_json(folder / "config.json", {"path": "idf.json"})
    sources.write_json((folder if beside else source) / "idf.json", {"hello": 2.5, "##b": 1})
    assert folders_read(source) == [folder.name]
    rows = make(source).compute(["hello a", "ab"], ["sparse"], route="query")["sparse"]
    assert [values.tolist() for values in rows.values] == [[2.5], [1.0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "its weights, idf.json, is missing or empty"),
        ({"hello": "much"}, "the weight of 'hello' is \"much\", wanted a finite number"),
        ({"hello": float("inf")}, "the weight of 'hello' is Infinity, wanted a finite number"),
        ({"hello": True}, "the weight of 'hello' is true, wanted a finite number"),
        ({"greetings": 1}, "'greetings' is not a token of the tokenizer"),
    ],
)
def test_weights_by_token_that_cannot_be_read_are_refused(tmp_path, content, message):
    source = sources.write_sparse_router(tmp_path / "source", weights_of_terms())
    folder = source / "query_0_SparseStaticEmbedding"
    sources.write_json(folder / "config.json", {"path": "idf.json"})
    sources.write_json(folder / "idf.json", content)
    with pytest.raises(CheckpointError) as caught:
        outline_routes(source)
    assert message in str(caught.value)
    sources.change_json(folder / "config.json", power=2)
    with pytest.raises(UnsupportedModel, match="SparseStaticEmbedding with power is not supported"):
        outline_routes(source)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (np.ones((TERMS, 2), np.float32), ConversionError, "wanted one value a term, got shape"),
        (np.ones(TERMS - 2, np.float32), CheckpointError, "ids up to 10, and the model has only 9"),
        (np.ones(TERMS + 2, np.float32), UnsupportedModel, "13 of query, 11 of document"),
    ],
)
def test_weights_of_another_shape_are_refused(tmp_path, weights, error, message):
    source = sources.write_sparse_router(tmp_path / "source", weights)
    with pytest.raises(error, match=message):
        outline_routes(source)


def test_routes_of_different_outputs_are_refused(tmp_path):
    source = sources.write_sparse_router(tmp_path / "source", weights_of_terms())
    query = sources.write_route(source, "query", 1, hidden_size=TERMS + 1)
    document = [(sources.TRANSFORMER, "document_0_Transformer")]
    document += [(sources.SPLADE, "document_1_SpladePooling")]
    sources.write_router_config(source, {"query": query, "document": document}, ())
    (source / OF_MODEL).unlink()
    with pytest.raises(UnsupportedModel, match="dense of query, sparse of document"):
        outline_routes(source)


def raw(folder: Path) -> Path:
    """A masked language model as its authors publish it, without files of sentence-transformers."""
    source = sources.write_masked_lm(folder)
    (source / "sentence_bert_config.json").unlink()
    sources.write_json(source / "tokenizer_config.json", {"model_max_length": 16})
    return source


def test_a_masked_lm_is_a_sparse_encoder_where_that_is_asked_for(make, tmp_path):
    """With the weights of one that says so by itself; otherwise it embeds, as ever."""
    source = raw(tmp_path / "raw")
    wanted = make(sources.write_splade(tmp_path / "said")).compute(TEXTS, ["sparse"])["sparse"]
    asked = make(source, pooling="splade")
    got = asked.compute(TEXTS, ["sparse"])["sparse"]
    np.testing.assert_array_equal(as_dense(got), as_dense(wanted))
    assert list(asked.spec.heads) == ["sparse"]
    assert list(outline(source).spec.heads) == ["dense"]


def test_sparse_encoders_may_be_asked_to_be_what_they_are(tmp_path):
    source = sources.write_sparse_router(tmp_path / "source", weights_of_terms())
    (plain, _), (asked, _) = outline_routes(source), outline_routes(source, splade=True)
    assert [one.spec for one in plain.values()] == [one.spec for one in asked.values()]


def test_what_is_converted_as_a_sparse_encoder_stays_one(make, tmp_path):
    cached = {"cache_dir": tmp_path / "cache"}
    source = ModelSource(str(raw(tmp_path / "raw")), pooling="splade", **cached)
    spec = hub.convert_model(source, tmp_path / "out")
    assert spec.primary == "sparse"
    assert hub.resolve(ModelSource(str(tmp_path / "out"), **cached)) == tmp_path / "out"
    assert hub.resolve(ModelSource(str(tmp_path / "out"), pooling="splade", **cached)).is_dir()
    described = hub.describe_model(source).main
    assert described == msgspec.structs.replace(spec, content_hash="", written_by=None)
    with pytest.raises(ConfigError, match="--pooling cls: this checkpoint has no pooling"):
        make(tmp_path / "out", pooling="cls")


def test_what_is_converted_without_its_head_cannot_be_a_sparse_encoder(tmp_path):
    hub.convert_model(ModelSource(str(raw(tmp_path / "raw"))), tmp_path / "out")
    asked = ModelSource(str(tmp_path / "out"), cache_dir=tmp_path / "cache", pooling="splade")
    with pytest.raises(CheckpointError, match="give --pooling splade when converting its source"):
        hub.resolve(asked)


def test_other_models_cannot_be_asked_to_be_sparse_encoders(tmp_path):
    embedder = sources.write_sentence_bert(tmp_path / "embedder")
    backbone = sources.write_bert(tmp_path / "tower")
    nameless = sources.write_bert(tmp_path / "nameless", architectures=None)
    for source, message in [
        (embedder, "modules.json of .* names other modules"),
        (backbone, "config.json of .* names BertModel; known: classes ...ForMaskedLM"),
        (nameless, "names no class"),
    ]:
        with pytest.raises(UnsupportedModel, match=message):
            outline_routes(source, splade=True)


def test_verify_refuses_sparse_encoders_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "check_installed", lambda: None)
    model = str(sources.write_splade(tmp_path / "source"))
    source = ModelSource(model, cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match="is a sparse encoder; only vectors and"):
        verification.verify_model(source, [], config=EngineConfig())
