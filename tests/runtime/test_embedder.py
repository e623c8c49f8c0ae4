"""Embedder: the library's face, and what the server asks of it."""

import asyncio
import inspect
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import LIMIT, WORDS, save_tiny
from fakes import WAIT_S, is_work_in, until
from jax.experimental.compilation_cache import compilation_cache

from jaxembed import Embedder, EngineConfig, Label, Ranked, TextConfig
from jaxembed.data.inputs import Input, Pair, Text, Tokens
from jaxembed.data.spec import DenseLayer, PairTemplate, Pooled
from jaxembed.engine import compiles
from jaxembed.engine.build import scheduler_of
from jaxembed.engine.replica import Replica
from jaxembed.errors import (
    BackendError,
    ConfigError,
    EmptyInput,
    InputTooLong,
    InvalidInput,
    Overloaded,
    ShuttingDown,
    TokenizerError,
    WrongTask,
)
from jaxembed.preprocessing.text import PIECE_BYTES
from jaxembed.preprocessing.tokenizer import INPUTS_A_JOB
from jaxembed.runtime.options import Embeddings, EncodeOptions, ScoreOptions, Scores
from jaxembed.runtime.requests import EncodeRequest
from jaxembed.runtime.runner import RequestRunner

TEXTS = ["the cat sat on the mat", "a dog", "how is the sky", "where is the red train " * 6]


async def embed(embedder: Embedder, inputs: Sequence[Input], options=None) -> Embeddings:
    model = embedder.model
    return await model.answer(model.tasks.embed(inputs, options or EncodeOptions()))


async def score(scorer: Embedder, inputs: Sequence[Text | Pair], **options) -> Scores:
    model = scorer.model
    return await model.answer(model.tasks.score(inputs, ScoreOptions(**options)))


async def rerank(reranker: Embedder, query: str, documents: Sequence[str]) -> Scores:
    model = reranker.model
    return await model.answer(model.tasks.rerank(query, documents, ScoreOptions()))


@pytest.fixture(name="config", scope="module")
def _config(grid_file) -> EngineConfig:
    return EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)


@pytest.fixture(name="open_embedder")
def _open_embedder(tiny_checkpoint, config, tmp_path, closed):
    """Embedders that are closed at the end; one small bucket grid unless told otherwise."""

    def open_embedder(path=tiny_checkpoint, text=None, **fields) -> Embedder:
        options = {"cache_dir": tmp_path, "config": replace(config, **fields), "text": text}
        return closed.enter_context(Embedder(str(path), **options))

    return open_embedder


class Reservation:
    """Holds a device back: batches of work that start wait until `gate` is set."""

    def __init__(self, monkeypatch):
        self.entered = threading.Event()
        self.gate = threading.Event()
        usual = Replica.run

        def run(replica, bucket, planes, outputs, **options):
            if is_work_in(planes):
                self.entered.set()
                assert self.gate.wait(WAIT_S)
            return usual(replica, bucket, planes, outputs, **options)

        monkeypatch.setattr(Replica, "run", run)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, WAIT_S)


@pytest.fixture(name="reservation")
def _held(monkeypatch):
    for device in jax.local_devices():  # one batch at a time: what comes after the held one waits
        monkeypatch.setattr(scheduler_of(device), "permits", 1)
    reservation = Reservation(monkeypatch)
    yield reservation
    reservation.gate.set()


def series(embedder) -> dict[str, float]:
    lines = embedder.model.telemetry.exposition().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def queue_of(embedder) -> tuple[int, int]:
    state = embedder.model.main.engine.snapshot()
    return state.waiting_inputs, state.waiting_tokens


def test_many_texts_keep_their_order(embedder):
    together = embedder.encode(TEXTS * 300)  # several chunks for the tokenizer
    assert together.shape == (1200, 32)
    assert together.flags.c_contiguous
    for i, text in enumerate(TEXTS):
        np.testing.assert_allclose(together[i::4], together[i][None].repeat(300, 0), atol=1e-5)
        np.testing.assert_allclose(together[i], embedder.encode(text), atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 1e-2


def test_no_texts_give_no_vectors(embedder):
    assert embedder.encode([]).shape == (0, 32)
    assert embedder.encode([], dimensions=5).shape == (0, 5)
    assert asyncio.run(embedder.encode_async([])).shape == (0, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model: model.encode("a", dimension=8),
            r"encode\(\) has no option `dimension`; did you mean `dimensions`\? Its options are: "
            "images, instruction, prompt, prompt_name, route, truncate, truncation_side, ",
        ),
        (lambda model: model.encode("a", batch_size=8), r"encode\(\) has no .* `batch_size`\. "),
        (lambda model: model.encode("a", outputs=["dense"]), "no option `outputs`"),
        (lambda model: model.encode_chunks([["a"]], truncation_side="left"), "truncation_side`"),
        (lambda model: model.rerank("a", ["b"], top_k=1), "`top_k`; did you mean `top_n`"),
        (lambda model: asyncio.run(model.encode_query_async("a", foo=1)), "query_async.* `foo`"),
    ],
)
def test_an_option_that_a_method_lacks_is_refused_with_those_it_has(embedder, call, message):
    with pytest.raises(TypeError, match=message):
        call(embedder)


@pytest.mark.parametrize("texts", [None, 7, b"cat", {"cat": 1}, {"cat", "dog"}])
def test_what_is_no_list_of_texts_is_refused_by_its_type(embedder, texts):
    for call in (embedder.encode, embedder.encode_query, embedder.encode_document):
        with pytest.raises(TypeError, match=rf"got a {type(texts).__name__}; expected a string or"):
            call(texts)


@pytest.mark.parametrize("item", [None, 7, 1.5, ["cat"], ("cat", "dog"), {"text": "cat"}])
def test_an_input_that_is_neither_a_text_nor_an_image_is_refused_with_its_index(embedder, item):
    wanted = rf"is a {type(item).__name__}; expected a text or an image"
    with pytest.raises(InvalidInput, match=wanted) as refused:
        embedder.encode(["cat", item])
    assert refused.value.index == 1


def test_the_help_of_each_method_lists_its_options():
    methods = [name for name in vars(Embedder) if name.endswith("_async")]
    assert len(methods) == 12
    for name in methods:
        sync, twin = getattr(Embedder, name.removesuffix("_async")), getattr(Embedder, name)
        options = inspect.signature(sync).parameters
        assert options == inspect.signature(twin).parameters
        assert inspect.iscoroutinefunction(twin)
        assert not any(one.kind is one.VAR_KEYWORD for one in options.values())
        assert "    priority: " in sync.__doc__
    assert inspect.signature(Embedder.encode).parameters["dimensions"].default is None


@pytest.fixture(name="new_process")
def _new_process(monkeypatch):
    """JAX keeps no programs, as in a process that has set nothing."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_programs_are_kept_unless_told_otherwise(tiny_checkpoint, config, tmp_path, new_process):
    arguments = {"cache_dir": tmp_path, "config": config}
    Embedder(str(tiny_checkpoint), compile_cache=False, **arguments).close()
    assert jax.config.jax_compilation_cache_dir is None
    Embedder(str(tiny_checkpoint), **arguments).close()
    assert list((tmp_path / "programs").glob("*/*-cache"))
    chosen = jax.config.jax_compilation_cache_dir
    arguments["cache_dir"] = tmp_path / "other"
    Embedder(str(tiny_checkpoint), **arguments).close()
    assert jax.config.jax_compilation_cache_dir == chosen


def test_programs_have_the_same_names_in_every_directory_and_kind_of_device(tmp_path, new_process):
    """So machines can share them; those of accelerators lie apart from those of the CPU."""
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    names = []
    for folder in ("a", "b"):
        jax.config.update("jax_compilation_cache_dir", None)
        compiles.keep_programs(tmp_path / folder)
        compiles.keep_programs_of(jax.local_devices()[0])
        lowered = jax.jit(lambda x: 2 * x).lower(np.ones(7, np.float32))
        compiles.compile_lowered(lowered, {})
        (kept,) = (tmp_path / folder / "programs").glob("*/*-cache")
        names.append(kept.name)
        compiles.keep_programs_of(device)
        apart = Path(jax.config.jax_compilation_cache_dir)
        assert apart == tmp_path / folder / "programs" / "nvidia-h100-80gb-hbm3"
    assert names[0] == names[1]


def test_a_cache_that_is_not_written_stops_nothing(open_embedder, new_process, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(compiles, "make_private", refuse)
    assert open_embedder().encode("the cat").shape == (32,)
    assert "compiled programs are not saved" in caplog.text


def test_options_that_are_equal_and_of_other_types_are_not_mixed_up(embedder):
    with pytest.raises(TypeError, match=r"`dimensions` of 8\.0 is not an integer"):
        embedder.encode("the cat", dimensions=8.0)
    assert embedder.encode("the cat", dimensions=8).shape == (8,)


def test_queries_and_documents_get_their_prompts(embedder):
    """The tiny checkpoint has prompts for `query` and `passage`."""
    plain, document = embedder.encode("red sky"), embedder.encode("the red sky")
    for got, wanted in (
        (embedder.encode_query("red sky"), embedder.encode("what is red sky")),
        (embedder.encode_document("red sky"), document),
        (embedder.encode_query("red sky", prompt=""), plain),
        (embedder.encode_query("red sky", prompt_name="passage"), document),
        (embedder.encode("red sky", prompt="the "), document),
    ):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.abs(document - plain).max() > 1e-3


def test_async_and_sync_agree(embedder):
    options = {"dimensions": 5, "normalize": False}
    for got, wanted in (
        (embedder.encode_async(TEXTS), embedder.encode(TEXTS)),
        (embedder.encode_query_async(TEXTS), embedder.encode_query(TEXTS)),
        (embedder.encode_document_async("a", **options), embedder.encode_document("a", **options)),
    ):
        np.testing.assert_allclose(asyncio.run(got), wanted, atol=1e-5)
    assert wanted.shape == (5,)


@pytest.mark.parametrize("dimensions", [0, -1, 33])
def test_dimensions_the_model_does_not_have_are_refused(embedder, dimensions):
    with pytest.raises(InvalidInput, match=f"from 1 to 32.*Given: {dimensions}") as raised:
        embedder.encode("cat", dimensions=dimensions)
    assert raised.value.field == "dimensions"


def test_normalizing_is_the_checkpoints_choice_unless_asked(embedder, open_embedder, tmp_path):
    raw = embedder.encode(TEXTS, normalize=False)
    lengths = np.linalg.norm(raw, axis=1)
    assert np.abs(lengths - 1).min() > 1e-2
    np.testing.assert_allclose(embedder.encode(TEXTS), raw / lengths[:, None], atol=1e-5)
    plain = open_embedder(save_tiny(tmp_path / "plain", modules=()))
    np.testing.assert_allclose(plain.encode(TEXTS), raw, atol=1e-5)
    unit = plain.encode(TEXTS, normalize=True)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)


def test_a_long_text_is_cut_or_refused(embedder):
    long = "cat " * 100
    np.testing.assert_allclose(embedder.encode(long), embedder.encode("cat " * 62), atol=1e-5)
    with pytest.raises(InputTooLong, match="102 tokens, the limit is 64"):
        embedder.encode(long, truncate=False)
    ends = embedder.encode("dog " * 50 + "cat " * 62, truncation_side="left")
    np.testing.assert_allclose(ends, embedder.encode("cat " * 62), atol=1e-5)


def test_another_pooling_can_be_asked_for_and_leaves_the_other_heads(tmp_path, config):
    head = Pooled(("mean",))
    path = save_tiny(tmp_path / "tiny", heads={"dense": head, "logits": head})
    with Embedder(str(path), pooling="cls", cache_dir=tmp_path, config=config) as embedder:
        assert embedder.spec.heads == {"dense": Pooled(("cls",)), "logits": head}
        both = embedder.compute(["a cat"], ["dense", "logits"])
        assert np.abs(both["dense"] - both["logits"]).max() > 1e-3


def test_another_pooling_is_refused_where_it_has_no_place(tmp_path):
    config = EngineConfig(null_model=True)
    both = save_tiny(tmp_path / "both", pooling=("cls", "mean"))
    with pytest.raises(ConfigError, match="--pooling mean: this checkpoint concatenates"):
        Embedder(str(both), pooling="mean", cache_dir=tmp_path, config=config)
    scorer = save_scorer(tmp_path / "scorer")
    with pytest.raises(ConfigError, match="--pooling mean is for embedding models; this is a rera"):
        Embedder(str(scorer), pooling="mean", cache_dir=tmp_path, config=config)


def test_answer_takes_texts_pairs_and_tokens_and_tells_their_figures(embedder):
    inputs = [Text("a dog"), Pair("cat", "dog"), Tokens([2, 7, 3]), Text("cat " * 100)]
    answer = asyncio.run(embed(embedder, inputs))
    assert answer.dense.shape == (4, 32)
    assert answer.num_tokens.tolist() == [4, 5, 3, LIMIT]
    assert answer.truncated == 1
    assert answer.values.keys() == {"dense"}
    assert min(answer.tokenization_s, answer.queue_s, answer.inference_s) > 0
    assert (embedder.model.admission.inputs, embedder.model.admission.tokens) == (0, 0)


def test_cancelling_a_call_takes_its_queued_work_along(embedder, reservation):
    async def scenario():
        first = asyncio.create_task(embedder.encode_async("cat"))
        await reservation.wait_entered()
        before = series(embedder)["jaxembed_cancelled_requests"]
        task = asyncio.create_task(embed(embedder, [Text("dog")] * 300))
        while queue_of(embedder)[0] != 300:  # the queue is what there is to wait on
            await asyncio.sleep(0)
        assert embedder.model.admission.inputs == 300
        assert series(embedder)["jaxembed_admitted_inputs"] == 300
        assert series(embedder)["jaxembed_admitted_tokens"] == embedder.model.admission.tokens > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue_of(embedder) == (0, 0)
        assert embedder.model.admission.inputs == 0
        assert series(embedder)["jaxembed_cancelled_requests"] == before + 1
        reservation.gate.set()
        return await first

    np.testing.assert_allclose(asyncio.run(scenario()), embedder.encode("cat"), atol=1e-5)


def test_a_full_server_refuses_before_any_work_and_recovers(open_embedder, reservation):
    reservation.gate.set()  # for the warm-up
    embedder = open_embedder(max_concurrent_requests=2, max_queue_tokens=1000)
    reservation.entered.clear()
    reservation.gate.clear()

    async def scenario():
        options = EncodeOptions()
        first = asyncio.create_task(embed(embedder, [Text("cat")] * 5, options))  # overshoots
        await reservation.wait_entered()
        with pytest.raises(Overloaded, match="--max-concurrent-requests") as raised:
            await embed(embedder, [Text("dog")], options)
        assert raised.value.retry_after_s >= 1
        reservation.gate.set()
        await first
        return await embed(embedder, [Text("dog")], options)

    assert asyncio.run(scenario()).dense.shape == (1, 32)
    assert embedder.model.admission.inputs == 0


def test_a_refused_request_gives_its_place_back(embedder):
    for inputs in ([], [Text("cat"), Text("")], [Text("\ud800")], [Tokens([10**9])]):
        with pytest.raises((InvalidInput, TokenizerError)):
            asyncio.run(embed(embedder, inputs))
    assert (embedder.model.admission.inputs, embedder.model.admission.tokens) == (0, 0)


def test_draining_refuses_and_close_finishes(open_embedder):
    embedder = open_embedder()
    embedder.model.drain()
    assert embedder.model.draining
    with pytest.raises(ShuttingDown):
        asyncio.run(embed(embedder, [Text("cat")]))
    embedder.close()
    with pytest.raises(BackendError, match="this Embedder is closed"):
        embedder.encode("cat")
    with pytest.raises(BackendError, match="this Embedder is closed"):
        asyncio.run(embedder.encode_async("cat"))
    assert embedder.model.main.engine.snapshot().threads == 0


@pytest.mark.parametrize(
    "run", [RequestRunner.run, lambda *args: asyncio.run(RequestRunner.run_async(*args))]
)
def test_a_close_between_the_steps_of_a_request_is_told_as_one(open_embedder, run):
    embedder = open_embedder()
    request = embedder.model.tasks.embed([Text("cat")] * 300, EncodeOptions())

    class Closing(EncodeRequest):
        def share(self, processor):
            embedder.close()

    closing = Closing(**{field.name: getattr(request, field.name) for field in fields(request)})
    with pytest.raises(BackendError, match="this Embedder is closed"):
        run(embedder.model.runner, closing)


def test_the_prompt_of_each_text_counts_among_the_memory_of_its_tokens(embedder):
    async def held_bytes():
        with embedder.model.admission.capacity.request() as reservation:
            await embedder.model.tokenize_async(
                ["a"] * 5, add_special_tokens=True, prompt_name="query", reservation=reservation
            )
            return reservation.bytes

    assert asyncio.run(held_bytes()) == 5 * len("what is a") * PIECE_BYTES


QUERY = "where is the red train"
DOCUMENTS = ["a dog", "the red train", "how is the sky", "the cat sat on the mat " * 20, "a dog"]


def save_scorer(path, labels=("LABEL_0",), **changes):
    """A tiny BERT with a classifier's head of random weights."""
    head = (DenseLayer(32, 32), DenseLayer(32, len(labels), activation="identity"))
    fields = {
        "pooling": ("cls",),
        "modules": head,
        "labels": labels,
        "score_function": "sigmoid" if len(labels) == 1 else "softmax",
        "prompts": {"query": "what is "},
        "default_prompt_name": "query",
    }
    return save_tiny(path, **(fields | changes))


@pytest.fixture(name="open_scorer", scope="module")
def _open_scorer(config, tmp_path_factory, closed_late):
    """Rerankers and classifiers of the tiny BERT, opened once for each set of changes."""

    @cache
    def open_scorer(**changes) -> Embedder:
        path = tmp_path_factory.mktemp("scorer")
        save_scorer(path / "checkpoint", **changes)
        embedder = Embedder(str(path / "checkpoint"), cache_dir=path, config=config)
        return closed_late.enter_context(embedder)

    return open_scorer


@pytest.fixture(name="reranker")
def _reranker(open_scorer) -> Embedder:
    return open_scorer()


@pytest.fixture(name="classifier")
def _classifier(open_scorer) -> Embedder:
    return open_scorer(labels=("bad", "fair", "good"))


def logits_of(scorer, inputs, **options) -> np.ndarray:
    return asyncio.run(score(scorer, inputs, **options)).logits


def test_reranking_gives_the_best_documents_first(reranker):
    logits = np.array([logits_of(reranker, [Pair(QUERY, text)])[0, 0] for text in DOCUMENTS])
    assert len(set(logits.round(4))) == 4  # the first and the last are the same text
    ranked = reranker.rerank(QUERY, DOCUMENTS)
    assert [one.index for one in ranked] == sorted(range(5), key=lambda k: (-logits[k], k))
    assert isinstance(ranked[0], Ranked)
    wanted = 1 / (1 + np.exp(-logits.astype(np.float64)))
    np.testing.assert_allclose([one.score for one in ranked], -np.sort(-wanted), atol=1e-5)
    again = asyncio.run(reranker.rerank_async(QUERY, DOCUMENTS, top_n=3))
    assert [one.index for one in again] == [one.index for one in ranked][:3]
    raw = reranker.rerank(QUERY, DOCUMENTS, raw_scores=True, top_n=2)
    np.testing.assert_allclose([one.score for one in raw], -np.sort(-logits)[:2], atol=1e-4)
    assert [one.index for one in raw] == [one.index for one in ranked][:2]


def test_reranking_nothing_gives_nothing_and_top_n_is_at_least_one(reranker):
    assert reranker.rerank(QUERY, []) == []
    assert asyncio.run(reranker.rerank_async(QUERY, [])) == []
    for top_n in (0, -1):
        with pytest.raises(InvalidInput, match=f"1 or more. Given: {top_n}") as raised:
            reranker.rerank(QUERY, DOCUMENTS, top_n=top_n)
        assert raised.value.field == "top_n"


def test_texts_and_pairs_are_classified(classifier):
    inputs = ["a dog", ("a dog", "the red train")]
    logits = logits_of(classifier, [Text("a dog"), Pair("a dog", "the red train")])
    assert logits.shape == (2, 3)
    powers = np.exp(logits)
    wanted = powers / powers.sum(axis=1, keepdims=True)
    for got, row in zip(classifier.classify(inputs), wanted, strict=True):
        assert isinstance(got[0], Label)
        order = np.argsort(-row)
        assert [one.label for one in got] == [classifier.spec.labels[k] for k in order]
        np.testing.assert_allclose([one.score for one in got], row[order], atol=1e-5)
    assert classifier.classify("a dog") == classifier.classify(["a dog"])
    assert classifier.classify([]) == []
    assert asyncio.run(classifier.classify_async([])) == []


def test_scores_tell_their_figures_and_no_prompt_is_added(reranker):
    """The checkpoint's default prompt has two tokens; the long document is cut to the limit."""
    answer = asyncio.run(rerank(reranker, QUERY, DOCUMENTS))
    assert answer.logits.shape == (5, 1)
    assert answer.logits.dtype == np.float32
    assert answer.num_tokens.tolist() == [10, 11, 12, LIMIT, 10]
    assert answer.truncated == 1
    assert min(answer.tokenization_s, answer.queue_s, answer.inference_s) > 0
    assert (reranker.model.admission.inputs, reranker.model.admission.tokens) == (0, 0)
    alone = asyncio.run(score(reranker, [Text("a dog")]))
    assert alone.num_tokens.tolist() == [4]


def test_long_documents_are_cut_or_refused(reranker):
    cut = logits_of(reranker, [Pair(QUERY, "cat " * 500), Pair(QUERY, "cat " * (LIMIT - 8))])
    np.testing.assert_allclose(cut[0], cut[1], atol=1e-5)
    with pytest.raises(InputTooLong, match="308 tokens, the limit is 64"):
        reranker.rerank(QUERY, ["cat " * 300], truncate=False)
    short = reranker.rerank(QUERY, ["cat " * 500, "cat cat"], max_document_tokens=2)
    np.testing.assert_allclose(short[0].score, short[1].score, atol=1e-5)
    with pytest.raises(InvalidInput, match="1 or more"):
        reranker.rerank(QUERY, ["cat"], max_document_tokens=0)


def test_the_query_of_thousands_of_documents_is_tokenized_once(reranker, monkeypatch):
    tokenizer, shown = reranker.model.main.processor._tokenizer, []
    usual = tokenizer.encode

    def encode(texts, **options):
        shown.append(list(texts))
        return usual(texts, **options)

    monkeypatch.setattr(tokenizer, "encode", encode)
    documents = [WORDS[k % len(WORDS)] for k in range(1000)]
    ranked = reranker.rerank(QUERY, documents)
    answer = asyncio.run(rerank(reranker, QUERY, documents))
    assert len(answer.logits) == len(ranked) == 1000
    assert [texts for texts in shown if QUERY in texts] == [[QUERY]] * 2  # a request each
    assert max(map(len, shown)) == INPUTS_A_JOB


def test_of_many_inputs_the_one_at_fault_is_named(embedder):
    texts = ["cat"] * (3 * INPUTS_A_JOB)
    texts[2 * INPUTS_A_JOB + 7] = "cat " * 500
    for encode in (embedder.encode, lambda *a, **k: asyncio.run(embedder.encode_async(*a, **k))):
        with pytest.raises(InputTooLong) as raised:
            encode(texts, truncate=False)
        assert raised.value.index == 2 * INPUTS_A_JOB + 7


def test_an_empty_query_is_refused_and_an_empty_document_is_not(reranker):
    """As in TEI: one side of a pair may be empty. Rerankers meet empty chunks."""
    with pytest.raises(EmptyInput, match="the query is empty") as raised:
        reranker.rerank("", ["cat"])
    assert raised.value.field == "query"
    with pytest.raises(EmptyInput):
        asyncio.run(rerank(reranker, "", ["cat"]))
    with pytest.raises(EmptyInput):
        asyncio.run(rerank(reranker, "cat", []))
    assert len(reranker.rerank("cat", ["dog", "", " "])) == 3
    assert reranker.model.admission.inputs == 0


def test_what_a_model_cannot_do_is_refused_by_what_it_is(embedder, reranker, classifier):
    with pytest.raises(WrongTask, match="is an embedding model: it cannot classify"):
        asyncio.run(embedder.classify_async([]))
    with pytest.raises(WrongTask, match="is a classifier: it cannot rerank, only classify"):
        asyncio.run(rerank(classifier, QUERY, DOCUMENTS))
    with pytest.raises(WrongTask, match="is a reranker: it cannot embed"):
        reranker.encode(TEXTS)
    assert classifier.model.admission.inputs == embedder.model.admission.inputs == 0


def test_an_instruction_is_refused_where_it_has_no_place(reranker, open_scorer):
    template = PairTemplate("[CLS]", "the {query}", " {document}", "[SEP]", "")
    for model in (reranker, open_scorer(template=template)):
        with pytest.raises(InvalidInput, match="does not take an `instruction`") as raised:
            model.rerank(QUERY, DOCUMENTS, instruction="find it")
        assert raised.value.field == "instruction"
        assert model.model.describe()["instruction"] is None


def test_every_input_is_counted(embedder, reranker):
    for model, kind, call in (
        (embedder, "embed", lambda: embedder.encode([*TEXTS, "cat " * 100])),
        (reranker, "predict", lambda: reranker.rerank(QUERY, DOCUMENTS)),
    ):
        before = series(model)
        call()
        after = series(model)
        for name in ("count", "success", "duration_count"):
            assert after[f"te_{kind}_{name}"] - before[f"te_{kind}_{name}"] == 5, name
        for part in ("tokenization", "queue", "inference"):
            name = f"te_{kind}_{part}_duration_count"
            assert after[name] - before[name] == 5, name
        for name, added in (
            ("jaxembed_truncated_inputs", 1),
            ("te_request_input_length_count", 5),
            ('jaxembed_stage_seconds_count{stage="inference"}', 1),
        ):
            assert after[name] - before[name] == added, name
    assert after["te_embed_count"] == before["te_embed_count"]
    assert after["te_queue_size"] == 0


def test_a_language_model_is_asked_through_its_template(open_scorer):
    template = PairTemplate("[CLS]", "{instruction} {query}", " {document}", "[SEP]", "the")
    asked = open_scorer(template=template)
    raw = {"raw_scores": True}
    whole = Pair("red what", "dog")  # the first three ids stand for prefix and instruction
    answer = asyncio.run(score(asked, [whole]))
    assert answer.num_tokens.tolist() == [6]
    (usual,), (other,) = (
        asked.rerank("red what", ["dog"], **raw),
        asked.rerank("red what", ["dog"], instruction="where is", **raw),
    )
    np.testing.assert_allclose(usual.score, answer.logits[0, 0], atol=1e-4)
    assert abs(usual.score - other.score) > 1e-3
    described = asked.model.describe()
    assert (described["template"], described["instruction"]) == (True, "the")


def test_describe_tells_what_serves(embedder, reranker, classifier):
    described = embedder.model.describe()
    assert described["buckets"] == ["1x16", "2x64", "4x32"]
    assert sorted(described["compiled_buckets"]) == described["buckets"]
    wanted = {"task": "embed", "dimensions": 32, "prompts": ["passage", "query"]}
    assert described | wanted == described
    assert reranker.model.describe()["score_function"] == "sigmoid"
    scorer = classifier.model.describe()
    told = {"task": "classify", "labels": ["bad", "fair", "good"], "score_function": "softmax"}
    assert scorer | told | {"template": False, "instruction": None} == scorer
    assert "dimensions" not in scorer
    assert (embedder.ready, embedder.model.healthy, embedder.model.waiting) == (True, True, 0)
    assert (embedder.max_input_tokens, embedder.model.max_batch_tokens) == (64, 128)
    assert (embedder.device, embedder.dtype) == ("cpu", "float32")


def test_text_settings_are_the_defaults_of_a_request(open_embedder, embedder):
    strict = open_embedder(text=TextConfig(truncate=False, default_prompt_name="query"))
    np.testing.assert_allclose(strict.encode("cat"), embedder.encode_query("cat"), atol=1e-5)
    with pytest.raises(InputTooLong):
        strict.encode("cat " * 100)
    assert strict.encode("cat " * 100, truncate=True).shape == (32,)


def test_what_is_asked_while_buckets_compile_waits(tiny_checkpoint, config, tmp_path, monkeypatch):
    gate, usual, steps = threading.Event(), Replica.lower, []

    def lower(replica, bucket, for_any):
        assert gate.wait(WAIT_S)
        return usual(replica, bucket, for_any)

    monkeypatch.setattr(Replica, "lower", lower)
    options = {"wait": False, "on_progress": lambda *step: steps.append(step)}
    with Embedder(str(tiny_checkpoint), cache_dir=tmp_path, config=config, **options) as embedder:
        assert not embedder.ready
        with pytest.raises(TimeoutError):
            embedder.wait_ready(0.0)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(embedder.encode, "cat")
            until(lambda: queue_of(embedder)[0] == 1)
            gate.set()
            assert answer.result(WAIT_S).shape == (32,)
        embedder.wait_ready(WAIT_S)
        assert embedder.ready
    assert steps[0] == (1, 3)


def test_the_library_loads_no_torch_and_the_null_model_no_device(tiny_checkpoint, tmp_path):
    code = f"""
import logging, sys
from pathlib import Path
from jax._src import xla_bridge
import jaxembed.embedder
assert not xla_bridge.backends_are_initialized(), "a device was started"
from jaxembed import Embedder, EngineConfig
assert not {{"torch", "transformers"}} & set(sys.modules)
assert not logging.getLogger().handlers and not logging.getLogger("jaxembed").handlers
config = EngineConfig(null_model=True)
embedder = Embedder({str(tiny_checkpoint)!r}, cache_dir=Path({str(tmp_path)!r}), config=config)
vectors = embedder.encode(["cat", "dog"], normalize=False)
assert vectors.shape == (2, 32) and (vectors == 1).all()
assert embedder.device == "null"
embedder.close()
assert not xla_bridge.backends_are_initialized(), "a device was started"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_second_start_times_nothing(tiny_checkpoint, config, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxembed.engine.autotune.costs.TIMINGS", 2)
    counts = []
    for _ in range(2):
        with Embedder(str(tiny_checkpoint), cache_dir=tmp_path, config=config) as embedder:
            embedder.model.main.engine.wait_timed(60.0)
            embedder.encode(["the cat"])
            text = embedder.model.telemetry.exposition().decode()
            counts.append(float(re.search(r"^jaxembed_bucket_timings (\S+)$", text, re.M)[1]))
    assert counts == [6.0, 0.0]  # two of each of three buckets, then none
