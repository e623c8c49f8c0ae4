"""Static embeddings: conversion by the rules of two libraries, and the engine on the host."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sources
import tokenizers
from sources import NORMALIZE, WORDS, write_static

from benchmarks.parameters import random_parameters
from converters import convert
from jaxembed import Embedder, EngineConfig
from jaxembed.checkpoints.source import ModelSource
from jaxembed.config import TextConfig
from jaxembed.data.inputs import Text, Tokens
from jaxembed.data.spec import NO_LIMIT, DenseLayer, ModelSpec, NormalizeLayer, Pooled
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.engine.host import HostEngine
from jaxembed.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    InputTooLong,
    InvalidInput,
    NotFinite,
    UnsupportedModel,
)
from jaxembed.models import native
from jaxembed.models.static import BLOCK_BYTES, StaticEmbeddings, numpy_means
from jaxembed.observability.metrics import Telemetry
from jaxembed.preprocessing import text as text_module
from jaxembed.runtime.options import EncodeOptions
from jaxembed.runtime.routes import plan_engine
from jaxembed.tools.tune.cost import load_measured

WIDTH, UNKNOWN = 8, WORDS.index("[UNK]")
TABLE = np.random.default_rng(0).standard_normal((len(WORDS), WIDTH)).astype(np.float32)
OF_SENTENCE_TRANSFORMERS = {"embedding.weight": TABLE}
OF_MODEL2VEC = {"embeddings": TABLE}


def ids_of(text: str) -> list[int]:
    return sources.wordpiece().encode(text, add_special_tokens=False).ids


def mean_of(ids: list[int], table: np.ndarray = TABLE) -> np.ndarray:
    return table[ids].mean(axis=0, dtype=np.float64)


def spec_of(vocab_size: int = 50, width: int = WIDTH, modules=(), **changes) -> ModelSpec:
    fields = {
        "architecture": "static",
        "config": {"vocab_size": vocab_size, "hidden_size": width},
        "heads": {"dense": Pooled(("mean",), modules)},
        "max_input_tokens": NO_LIMIT,
        "hidden_size": width,
        "dtype": "float32",
        "source": "static",
        "content_hash": "",
    }
    return ModelSpec(**(fields | changes))


@pytest.fixture(name="load")
def _load(tmp_path, closed) -> Callable[..., Embedder]:
    def load(source: Path, config: EngineConfig | None = None) -> Embedder:
        embedder = Embedder(str(source), cache_dir=tmp_path / "cache", config=config)
        return closed.enter_context(embedder)

    return load


@pytest.fixture(name="start")
def _start(closed) -> Callable[..., HostEngine]:
    def start(parameters=None) -> HostEngine:
        spec = spec_of()
        model = StaticEmbeddings(spec, parameters or random_parameters(spec))
        engine = HostEngine(model, Telemetry())
        closed.callback(engine.close)
        engine.start()
        return engine

    return start


def batch_of(count: int, length: int = 4) -> list[Encoding]:
    return [Encoding(np.full(length, 1 + k % 40, np.int32)) for k in range(count)]


def test_modules_json_says_what_is_normalised(tmp_path, load):
    normalized = (NORMALIZE, "1_Normalize")
    source = write_static(tmp_path / "a", OF_MODEL2VEC, normalized, normalize=False)
    assert np.linalg.norm(load(source).encode("hello world")) == pytest.approx(1, abs=1e-6)
    source = write_static(tmp_path / "b", OF_MODEL2VEC, normalize=True)
    sources.write_modules(source, (sources.STATIC, "."))
    np.testing.assert_allclose(load(source).encode("a"), TABLE[ids_of("a")[0]])


def test_with_modules_json_unknown_tokens_count_and_nothing_is_cut(tmp_path, load):
    source = write_static(tmp_path / "source", OF_MODEL2VEC, (NORMALIZE, "1_N"), max_length=4)
    embedder = load(source)
    text = "hello ☃ " * 40
    wanted = mean_of(ids_of(text))
    assert UNKNOWN in ids_of(text)
    got = embedder.encode(text, normalize=False)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert embedder.max_input_tokens == NO_LIMIT


def test_without_modules_json_unknown_tokens_are_dropped(tmp_path, load):
    embedder = load(write_static(tmp_path / "source", OF_MODEL2VEC, normalize=False))
    wanted = mean_of(ids_of("hello world"))
    np.testing.assert_allclose(embedder.encode("hello ☃ world"), wanted, rtol=1e-6)
    assert not embedder.encode("☃ ☃").any()
    ids = embedder.model.tasks.embed([Tokens([UNKNOWN, 4])], EncodeOptions())
    np.testing.assert_array_equal(embedder.model.run(ids).dense[0], TABLE[4])


def test_without_modules_json_texts_are_cut_by_tokens_and_by_characters(tmp_path, load):
    source = write_static(tmp_path / "source", OF_MODEL2VEC, normalize=False, max_length=4)
    embedder = load(source)
    median = int(np.median([len(token) for token in sources.wordpiece().get_vocab()]))
    text = "a hello a a world a"
    assert median == 5, "else the characters of this text are cut too"
    np.testing.assert_allclose(embedder.encode(text), mean_of(ids_of(text)[:4]), rtol=1e-6)
    long = "hello hello hello world"  # of whose 20 characters the last word has one, unknown
    np.testing.assert_allclose(embedder.encode(long), TABLE[ids_of("hello")[0]], rtol=1e-6)
    with pytest.raises(InputTooLong):
        embedder.encode(long, truncate=False)
    with pytest.raises(InputTooLong):
        embedder.encode(text, truncate=False)
    assert embedder.encode(["", "☃"]).tolist() == [[0.0] * WIDTH] * 2


@pytest.mark.parametrize(("asked", "limit"), [({}, 512), ({"max_length": None}, NO_LIMIT)])
def test_the_limit_of_model2vec_is_512_tokens_unless_config_json_has_one(asked, limit, tmp_path):
    source = write_static(tmp_path / "source", OF_MODEL2VEC, normalize=False, **asked)
    assert convert(source, tmp_path / "out").max_input_tokens == limit


def test_truncation_in_tokenizer_json_is_the_limit_as_in_sentence_transformers(tmp_path, load):
    source = write_static(tmp_path / "source", OF_SENTENCE_TRANSFORMERS)
    path = source / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    embedder = load(source)
    assert embedder.max_input_tokens == 3
    text = "a b hello world"
    np.testing.assert_allclose(embedder.encode(text), mean_of(ids_of(text)[:3]), rtol=1e-6)
    tokenizer.enable_truncation(3, direction="left")
    tokenizer.save(str(path))
    with pytest.raises(UnsupportedModel, match="truncation from the left"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.float64])
def test_tables_of_other_dtypes_are_read(dtype, tmp_path, load):
    table = (40 * TABLE).astype(dtype)
    embedder = load(write_static(tmp_path / "source", {"embeddings": table}, normalize=False))
    wanted = mean_of(ids_of("hello world"), table.astype(np.float32))
    np.testing.assert_allclose(embedder.encode("hello world"), wanted, rtol=1e-6)
    assert embedder.dtype == "float32"


OUTSIDE = {"embeddings": TABLE[:4], "mapping": np.full(len(WORDS), 4)}
FLOATS = {"embeddings": TABLE, "mapping": np.zeros(11)}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"table": TABLE}, {}, "missing: embedding.weight or embeddings"),
        ({"embedding.weight": TABLE, "extra": TABLE}, {}, "unused: extra"),
        ({"embedding.weight": TABLE[0]}, {}, "wanted two axes"),
        ({"embeddings": TABLE, "weights": np.ones(3)}, {}, r"weights: wanted shape \(11,\)"),
        (FLOATS, {}, "mapping: wanted one of int32, int64, got"),
        ({"embeddings": TABLE.astype(np.int64)}, {}, "wanted one of"),
        (OUTSIDE, {}, "mapping has row 4, embeddings only 4 rows"),
        ({"embedding.weight": TABLE[:-1]}, {}, "ids up to 10, and the model has only 10"),
        (OF_MODEL2VEC, {"head_config": {"labels": ["a"]}}, "head_config"),
        *((OF_MODEL2VEC, {"max_length": one}, "max_length is") for one in (0, -1, "512", True)),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tensors, config, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        convert(write_static(tmp_path / "source", tensors, **config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "modules", [(), (DenseLayer(WIDTH, 5), NormalizeLayer(), DenseLayer(5, 6, activation="gelu"))]
)
@pytest.mark.parametrize("in_c", [True, False])
def test_a_sequence_has_the_same_vector_alone_and_in_any_batch(modules, in_c, native_means):
    spec = spec_of(modules=modules)
    means = native_means if in_c else numpy_means
    model = StaticEmbeddings(spec, random_parameters(spec), means)
    draw = np.random.default_rng(2)
    lengths = [1, 300, 7, 0, 2 * BLOCK_BYTES // (4 * WIDTH) + 5, 7, 64]
    encodings = [Encoding(draw.integers(0, 50, n, np.int32)) for n in lengths]
    together = model.compute(work_from_encodings(encodings))["dense"]
    for encoding, vector in zip(encodings, together, strict=True):
        alone = model.compute(work_from_encodings([encoding]))["dense"][0]
        np.testing.assert_array_equal(alone, vector)


def exact_means(table, ids, bounds, block) -> np.ndarray:
    """What `numpy_means` promises, one addition at a time."""
    means = np.zeros((len(bounds), table.shape[1]), np.float32)
    for mean, (start, end) in zip(means, bounds, strict=True):
        sums = []
        for at in range(start, end, block):
            sums.append(np.zeros(table.shape[1], np.float32))
            for one in np.clip(ids[at : min(at + block, end)], 0, len(table) - 1):
                sums[-1] += table[one]
        if sums:
            total = np.zeros(table.shape[1])  # which is exact for one block
            for part in sums:
                total += part
            mean[:] = total.astype(np.float32) / np.float32(end - start)
    return means


@pytest.fixture(name="native_means", scope="module")
def _native_means(tmp_path_factory):
    if native.find_compiler() is None:
        pytest.skip("there is no C compiler")
    return native.load_means(tmp_path_factory.mktemp("means"))


@pytest.mark.parametrize(
    ("width", "seed"),
    [
        *((width, width) for width in (1, 3, 8, 31, 300)),
        *(pytest.param(width, 0, marks=pytest.mark.numerics) for width in (2, 256, 515)),
    ],
)
def test_means_have_the_same_bits_in_c_in_numpy_and_added_one_by_one(native_means, width, seed):
    draw = np.random.default_rng(seed)
    rows, tokens, block = int(draw.integers(1, 90)), 700, int(draw.integers(1, 60))
    scales = 10.0 ** draw.integers(-20, 20, (rows, width))
    table = (draw.standard_normal((rows, width)) * scales).astype(np.float32)
    table[draw.integers(rows)] = -0.0
    ids = draw.integers(-3, rows + 3, tokens, np.int32)
    ends = np.sort(draw.integers(0, tokens + 1, 20))
    ragged = np.stack([[0, *ends], [*ends, tokens]], axis=1)  # back to back, some empty
    inside = np.sort(draw.integers(0, tokens + 1, (20, 2)), axis=1)  # overlapping and nested
    starts = draw.integers(0, tokens - block, 6)
    lengths = np.array([0, 1, block - 1, block, block + 1, 2 * block])
    edges = np.stack([starts, np.minimum(starts + lengths, tokens)], axis=1)
    bounds = draw.permutation(np.concatenate([ragged, inside, edges, [[0, tokens], [9, 3]]]))
    wanted = exact_means(table, ids, bounds, block)
    for means in (numpy_means, native_means):
        got = means(table, ids, bounds, block)
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def test_the_library_takes_views_and_refuses_slots_beyond_the_ids(native_means):
    ids, bounds = np.arange(20, dtype=np.int32)[::2], np.array([[0, 3], [2, 10]], np.int32)
    got = native_means(TABLE[:, ::2], ids, bounds, 4)
    np.testing.assert_array_equal(got, numpy_means(TABLE[:, ::2], ids, bounds, 4))
    assert native_means(TABLE, ids, bounds[:0], 4).shape == (0, WIDTH)
    for beyond in ([-1, 2], [3, 11]):
        with pytest.raises(ValueError, match="beyond the ids, of which there are 10"):
            native_means(TABLE, ids, np.array([beyond]), 4)


def test_without_a_library_numpy_computes_the_same(source, load, monkeypatch, caplog):
    texts = ["hello world", " ", "a b"] * 40
    wanted = load(source).encode(texts)

    def refuse(cache_dir: Path):
        raise native.NativeUnavailable("there is no C compiler")

    monkeypatch.setattr(native, "load_means", refuse)
    with caplog.at_level(logging.INFO):
        np.testing.assert_array_equal(load(source).encode(texts), wanted)
    assert "run in numpy, which is slower: there is no C compiler" in caplog.text


def test_parameters_of_another_model_are_refused():
    with pytest.raises(CheckpointError, match="table: expected shape"):
        StaticEmbeddings(spec_of(), {"table": np.ones((3, WIDTH), np.float32)})


def test_a_closed_engine_computes_no_more(start):
    engine = start()
    assert engine.compute(work_from_encodings(batch_of(30)))["dense"].shape == (30, WIDTH)
    assert engine.tokens_per_s > 0
    assert engine.temporary_bytes == 0
    engine.close()
    assert not engine.ready
    with pytest.raises(BackendError, match="closed"):
        engine.compute(work_from_encodings(batch_of(1)))


def test_a_failure_fails_only_its_request(start, caplog):
    parameters = random_parameters(spec_of())
    parameters["table"][7] = np.inf
    engine = start(parameters)
    with pytest.raises(NotFinite, match="not finite"):
        engine.compute(work_from_encodings([Encoding(np.array([7], np.int32))]))
    assert engine.snapshot().failures == (1,)
    engine.compute(work_from_encodings(batch_of(1)))
    assert engine.snapshot().failures == (0,)
    assert engine.healthy


def test_an_internal_error_is_told_in_the_log_alone(start, caplog, monkeypatch):
    engine = start()
    monkeypatch.setattr(engine._model, "compute", lambda work: 1 / 0)
    with pytest.raises(BackendError, match="an internal error"):
        engine.compute(work_from_encodings(batch_of(100)))
    assert "ZeroDivisionError" in caplog.text


@pytest.fixture(name="source")
def _source(tmp_path) -> Path:
    source = write_static(tmp_path / "source", OF_SENTENCE_TRANSFORMERS, (NORMALIZE, "1_N"))
    prompts = {"prompts": {"query": "hello "}}
    sources.write_json(source / "config_sentence_transformers.json", prompts)
    return source


def test_more_tokens_than_estimated_are_admitted_before_they_are_computed(source, load):
    embedder = load(source)
    texts = ["a a a a"] * 200  # the estimate is 3 tokens, there are 4
    request = embedder.model.tasks.embed([Text(text) for text in texts], EncodeOptions())
    computed, told = [], []
    engine, runner = embedder.model.main.engine, embedder.model.runner
    compute = engine.compute
    engine.compute = lambda work: (computed.append(work.tokens), compute(work))[1]
    permit = SimpleNamespace(correct=lambda cost: told.append((cost.tokens, sum(computed))))
    asyncio.run(runner.run_async(request, permit))
    assert told[-1][0] == sum(computed) == 800
    assert all(tokens > before for tokens, before in told)


def test_texts_that_nothing_cuts_are_refused_when_they_are_huge(source, load, monkeypatch):
    monkeypatch.setattr(text_module, "MAX_READ_CHARACTERS", 100)
    embedder = load(source)
    embedder.encode("hello " * 16)
    with pytest.raises(InvalidInput, match="120 characters, and the limit is 100") as caught:
        embedder.encode(["a", "hello " * 20])
    assert caught.value.index == 1


def test_max_input_length_cuts(source, load):
    embedder = load(source, EngineConfig(max_input_tokens=2))
    text = "a b hello world"
    np.testing.assert_array_equal(embedder.encode(text), embedder.encode("a b"))
    with pytest.raises(InputTooLong):
        embedder.encode(text, truncate=False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(buckets=Path("buckets.json")), "--buckets buckets.json"),
        (EngineConfig(null_model=True), "--null-model"),
    ],
)
def test_settings_that_need_buckets_or_a_device_are_refused(config, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        plan_engine(spec_of(), config, tmp_path)


def test_there_is_nothing_to_tune(source, tmp_path):
    with pytest.raises(ConfigError, match="nothing to tune"):
        load_measured(
            ModelSource(str(source), cache_dir=tmp_path), config=EngineConfig(), text=TextConfig()
        )


def test_documents_are_ranked_whole_and_in_windows_alike(load, tmp_path):
    """What a model drops of a text it drops of a window, too; an empty document is ranked last."""
    embedder = load(write_static(tmp_path / "source", OF_MODEL2VEC, normalize=False))
    documents = ["the cat", "the qqq cat sat", "", "a dog"]
    assert UNKNOWN in ids_of(documents[1])
    ranked = embedder.rerank("cat", documents)
    vectors = embedder.encode(["cat", *documents[:2], documents[3]], normalize=True).astype(float)
    wanted = np.insert(vectors[1:] @ vectors[0], 2, -1)
    got = np.zeros(len(documents))
    for one in ranked:
        got[one.index] = one.score
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    in_windows = embedder.rerank("cat", documents, max_chunks=2)
    assert [(one.index, one.score) for one in in_windows] == [(k.index, k.score) for k in ranked]
