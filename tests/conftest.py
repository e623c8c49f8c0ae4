"""Fixtures that most tests share: a tiny random BERT as a checkpoint, and an Embedder on it."""

import json
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest
import quick  # noqa: F401 - few buckets, which are not timed
import tokenizers
from dual_sources import write_dual
from fakes import SMALL_GRID, WAIT_S, EngineUnderTest, SumRunner
from native_builds import AVX2, AVX512_BF16, DTYPES, for_this_cpu
from tokenizers import models, normalizers, pre_tokenizers, processors
from werkzeug.routing import Rule

import converters
from benchmarks.parameters import random_parameters
from jaxembed import Embedder, EngineConfig
from jaxembed.checkpoints import checkpoint
from jaxembed.config import TextConfig
from jaxembed.data.spec import (
    DType,
    ImageRules,
    ModelSpec,
    NormalizeLayer,
    Pooled,
    Tiles,
    scoring_heads,
)
from jaxembed.engine import build
from jaxembed.engine.autotune import calibrate, costs, native_trial
from jaxembed.engine.autotune.calibrate import Rate
from jaxembed.engine.bucket import default_grid
from jaxembed.models import native
from jaxembed.preprocessing.text import TextProcessor
from jaxembed.server.registry import pool

jax.config.update("jax_num_cpu_devices", 8)  # used by tests of parallelism; the others take one
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_cpu_enable_async_dispatch", False)

load_native = native.load_library


def _leave_out_native(cache_dir: Path, dtype: str) -> None:
    """Trying native kernels takes as long as compiling all else: few tests are about them."""
    raise native.NativeUnavailable("this test leaves them out")


native.load_library = _leave_out_native

collect = pool._collect
pool._collect = lambda: None  # it searches all that other tests left; fake models leave nothing

_compile_builder, _builders = Rule._compile_builder, {}


def _builder_once(rule: Rule, append_unknown: bool = True) -> Any:
    """Compile what makes URLs of a route once for all servers: most of the 23 ms that one takes."""
    key = rule.rule, append_unknown
    return _builders.get(key) or _builders.setdefault(key, _compile_builder(rule, append_unknown))


Rule._compile_builder = _builder_once

measure_product = calibrate._measure


@cache
def _measured_once(dtype: DType) -> Rate:
    """This machine's rate, as that of a quiet one: each cache directory would be given its own."""
    return replace(measure_product(dtype), sure=True)


calibrate._measure = _measured_once
native_trial.MAX_WAITED = costs.MAX_WAITED = 1.0  # other tests use the cores, too

LIMIT = 64  # tokens
_SENTENCE = "the a of cat dog sat on mat runs red blue sky how what is where train tiny"
WORDS = _SENTENCE.split()


_SIZES: dict[str, Any] = {
    "vocab_size": 5 + len(WORDS) + 26,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 64,
    "max_positions": LIMIT,
    "norm_eps": 1e-12,
    "activation": "gelu",
}
_VISION = {name: _SIZES[name] for name in _SIZES if name not in ("vocab_size", "max_positions")}


def _bert(**config: Any) -> dict[str, Any]:
    return {"architecture": "bert", "config": _SIZES | {"type_vocab_size": 2} | config}


def _clip(**config: Any) -> dict[str, Any]:
    usual = {"activation": "quick_gelu", "causal": True}
    return {"architecture": "clip", "config": _SIZES | usual | config}


def _deberta(**config: Any) -> dict[str, Any]:
    usual = {"type_vocab_size": 0, "absolute_positions": False, "buckets": 8}
    usual |= {"max_distance": LIMIT, "content_to_position": True, "position_to_content": True}
    return {"architecture": "deberta", "config": _SIZES | usual | config}


def _decoder(architecture: str = "qwen3", **config: Any) -> dict[str, Any]:
    usual = {"num_key_heads": 2, "head_width": 8, "rope_theta": 1e6, "activation": "silu"}
    usual |= {"qkv_bias": False, "out_bias": False, "qk_norm": True, "causal": True}
    return {"architecture": architecture, "config": _SIZES | usual | config}


def _image(**rules: Any) -> ImageRules:
    return ImageRules(patch=4, mean=(0.5,) * 3, std=(0.5,) * 3, token_id=100, **rules)


def _pages(rules: dict[str, Any], **config: Any) -> dict[str, Any]:
    backbone = _decoder("pages", qk_norm=False, image_token_id=100, **config)
    return backbone | {"image": _image(**rules)}


def _modernbert(architecture: str = "modernbert", **config: Any) -> dict[str, Any]:
    usual = {"num_layers": 3, "global_layers": [0], "local_reach": 3, "global_theta": 160000.0}
    usual |= {"local_theta": 10000.0, "attention_bias": False, "mlp_bias": False}
    usual |= {"norm_bias": False}
    return {"architecture": architecture, "config": _SIZES | usual | config}


def _t5(**config: Any) -> dict[str, Any]:
    sizes = {name: size for name, size in _SIZES.items() if name != "max_positions"}
    usual = {"head_width": 8, "bias_reach": 5, "activation": "relu", "gated": False}
    return {"architecture": "t5", "config": sizes | usual | config}


_GATED = {"gated": True, "up_bias": False}
_GEMMA = {"activation": "gelu_tanh", "embedding_scale": 32**0.5, "block_norms": True}
_GEMMA |= {"local_layers": [0], "local_reach": 3, "query_scale": 0.7, "overflows_float16": True}

# A tiny one of every tower, and of what a tower does by its config: fields of ModelSpec.
TOWERS: dict[str, dict[str, Any]] = {
    "bert": _bert(),
    "roberta": _bert(max_positions=LIMIT + 2, pad_id=1),
    "distilbert": _bert(type_vocab_size=0),
    "electra": _bert(embedding_size=20),
    # with a layer that runs again before and after another
    "albert": _bert(embedding_size=32, layer_order=[0, 0, 1, 0]),
    "mpnet": _bert(max_positions=LIMIT + 2, type_vocab_size=0, pad_id=1, bias_reach=5),
    "clip": _clip(),
    "clip, gelu": _clip(activation="gelu"),
    "siglip": {"architecture": "clip", "config": _SIZES | {"activation": "gelu_tanh"}},
    "pages": _pages(
        {"size": (16, 16)},
        causal=False,
        embedding_scale=32**0.5,
        image=_VISION | {"max_positions": 16, "patch_bytes": 48, "patch_bias": True},
    ),
    "pages, qwen": _pages(
        {"area": (64, 1024), "place_numbers": 3, "merge": 2},
        rope_sections=[1, 2, 1],
        image_tower="qwen_vision",
        image={
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 24,
            "out_size": 32,
            "patch_bytes": 48,
            "merge": 2,
            "activation": "silu",
            "rms_norm": True,
            "window": 2,
            "global_layers": [1],
        },
    ),
    "modernbert_pages": _modernbert(
        "modernbert_pages",
        image_token_id=100,
        image=_VISION
        | {"max_positions": 16, "patch_bytes": 48, "patch_bias": True}
        | {"merge": 2, "projection_bias": False},
    )
    | {"image": _image(size=(16, 16), merge=2, tiles=Tiles(32, (((5,),) * 2,) * 2, (6,), (7,)))},
    "nomic_bert": _bert(
        **_GATED,
        activation="silu",
        rope_theta=1000.0,
        rope_scaling={"kind": "dynamic", "factor": 2.0, "length": 12},
        attention_bias=False,
        down_bias=False,
    ),
    "nomic_moe": _bert(rope_theta=10_000.0, expert_layers=[1], experts=4, active_experts=2),
    "gte": _bert(
        **_GATED,
        type_vocab_size=0,
        rope_theta=160000.0,
        rope_scaling={"kind": "linear", "factor": 1.067},
    ),
    "jina_bert": _bert(**_GATED, alibi=True),
    "jina_bert_code": _bert(**_GATED, alibi=True, qk_norm=True, residual_norm=True),
    "modernbert": _modernbert(),
    "deberta": _deberta(),
    "deberta, every switch": _deberta(
        type_vocab_size=2,
        embedding_size=20,
        absolute_positions=True,
        buckets=0,
        max_distance=24,
        content_to_position=False,
        conv_width=3,
        conv_activation="gelu",
    ),
    "qwen3": _decoder(),
    "mistral": _decoder(  # with angles that depend on a text's length
        qk_norm=False,
        local_layers=[0, 1],
        local_reach=3,
        rope_scaling={"kind": "dynamic", "factor": 4.0, "length": 8},
    ),
    "ministral3": _decoder(
        qk_norm=False,
        rope_scaling={"kind": "yarn", "factor": 4.0, "length": 8, "magnitude": 1.2},
        query_growth=0.5,
        query_growth_length=8,
    ),
    "gemma3": _decoder(**_GEMMA, causal=False, local_theta=1e4),
    "gemma2": _decoder(**_GEMMA, qk_norm=False, score_cap=0.5),
    "eurobert": _decoder(qk_norm=False, causal=False, mlp_bias=True),
    "t5": _t5(),
    # with heads that are wider than the hidden states together
    "t5, gated": _t5(head_width=12, activation="gelu_tanh", gated=True),
}

# Two heads of 32, which the native kernels take.
_WIDER = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_key_heads": 1,
    "head_width": 32,
    "intermediate_size": 96,
    "out_size": 64,
    "rope_sections": [4, 8, 4],
}


def _widened(config: dict[str, Any]) -> dict[str, Any]:
    """A tower's config, and that of its tower of images, with other sizes."""
    return {
        key: _widened(value) if key == "image" else _WIDER.get(key, value)
        for key, value in config.items()
    }


WIDER_TOWERS: dict[str, dict[str, Any]] = {
    name: backbone | {"config": _widened(backbone["config"]), "hidden_size": 64}
    for name, backbone in TOWERS.items()
}


NORMALIZED = (NormalizeLayer(),)


def tiny_spec(pooling=("mean",), modules=NORMALIZED, **changes) -> ModelSpec:
    """A two-layer BERT of width 32; `changes` are fields of ModelSpec. `pooling` and `modules` are
    those of the primary head: logits where there are labels, else vectors."""
    primary = Pooled(pooling, modules)
    fields = {
        **TOWERS["bert"],
        "heads": scoring_heads(primary) if changes.get("labels") else {"dense": primary},
        "prompts": {"query": "what is ", "passage": "the "},
        "max_input_tokens": LIMIT,
        "hidden_size": 32,
        "dtype": "float32",
        "source": "tiny",
        "content_hash": "",
    }
    return ModelSpec(**(fields | changes))


def word_tokenizer() -> tokenizers.Tokenizer:
    """WordPiece over WORDS and single letters, with BERT's special tokens."""
    letters = [f"##{chr(c)}" for c in range(ord("a"), ord("z") + 1)]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    # as all-MiniLM-L6-v2 ships them: both must be switched off, or every vector is wrong
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(16)
    return tokenizer


@pytest.fixture(name="loop_factory")
def _loop_factory() -> None:
    """Tests that are coroutines run on asyncio's own loop unless they name another."""


@pytest.fixture(name="anyio_backend")
def _anyio_backend(loop_factory) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": loop_factory}


def save_tiny(path: Path, **changes) -> Path:
    """A checkpoint of `tiny_spec(**changes)` with random parameters."""
    spec = tiny_spec(**changes)
    checkpoint.save(path, spec, random_parameters(spec), word_tokenizer().to_str().encode())
    return path


def open_tiny(checkpoint: Path, folder: Path, *buckets: tuple[int, int], **fields) -> Embedder:
    """An Embedder on one device, with a grid of these buckets and its cache in a folder."""
    grid, most = folder / "buckets.json", max(rows * length for rows, length in buckets)
    grid.write_text(json.dumps({"buckets": buckets}))
    usual = {"dtype": "float32", "devices": 1, "buckets": grid, "max_batch_tokens": most}
    config = EngineConfig(**(usual | fields))
    return Embedder(str(checkpoint), cache_dir=folder / "cache", config=config)


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(tmp_path_factory) -> None:
    """Programs that several tests compile are compiled once, also by tests in other processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(name="optimized", scope="module")
def _optimized() -> Iterator[None]:
    """Programs are compiled as they are for users, with LLVM's optimisations."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(name="native_kernels", scope="session")
def _native_kernels(tmp_path_factory) -> None:
    """The native kernels of each dtype, for this process: emulated where this CPU has none."""
    if platform.machine() != "x86_64" or native.compiler.find_compiler() is None:
        pytest.skip("native kernels need x86-64 and a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        for dtype, build in zip(DTYPES, (AVX512_BF16, AVX2), strict=True):
            if not native.library._runnable(dtype):
                patch.setattr(native.compiler, "KERNELS", (for_this_cpu(build),))
            load_native(tmp_path_factory.mktemp("native"), dtype)


@pytest.fixture(name="engines_try_native")
def _engines_try_native(monkeypatch) -> None:
    """Engines try the native kernels, as those of users do."""
    monkeypatch.setattr(native, "load_library", load_native)


@pytest.fixture(name="whole_grids")
def _whole_grids(monkeypatch) -> None:
    """Default grids have all their buckets, as those of users do."""
    monkeypatch.setattr(build, "default_grid", default_grid)


@pytest.fixture(name="closed")
def _closed() -> Iterator[ExitStack]:
    """What is entered here is closed after the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(name="closed_late", scope="module")
def _closed_late() -> Iterator[ExitStack]:
    """What is entered here is closed after the module."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(name="conversions")
def _conversions(monkeypatch) -> list[Path]:
    """Every source that is converted, in order."""
    seen = []
    convert = converters.convert

    def counted(source, out, **options):
        seen.append(source)
        return convert(source, out, **options)

    monkeypatch.setattr(converters, "convert", counted)
    return seen


@pytest.fixture(name="tiny_checkpoint", scope="session")
def _tiny_checkpoint(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(name="grid_file", scope="session")
def _grid_file(tmp_path_factory) -> Path:
    """Three tiny buckets: what nearly all tests compile."""
    path = tmp_path_factory.mktemp("grid") / "buckets.json"
    path.write_text('{"buckets": [[1, 16], [4, 32], [2, 64]]}')
    return path


@pytest.fixture(name="make_processor", scope="module")
def _make_processor(tmp_path_factory, closed_late) -> Callable[..., TextProcessor]:
    """Processors on the tiny tokenizer, or with another post-processor."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"

    def make(limit=8, post_processor=lambda tokenizer: None, text=None, **spec) -> TextProcessor:
        tokenizer = word_tokenizer()
        post_processor(tokenizer)
        tokenizer.save(str(path))
        processor = TextProcessor(path, tiny_spec(**spec), limit, text or TextConfig(), 2)
        closed_late.callback(processor.executor.shutdown)
        return processor

    return make


@pytest.fixture(name="embedder", scope="session")
def _embedder(tiny_checkpoint, grid_file, tmp_path_factory) -> Iterator[Embedder]:
    """One device, float32, three buckets, all compiled. Shared: do not close or drain it."""
    config = EngineConfig(
        dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128, warmup="full"
    )
    cache = tmp_path_factory.mktemp("cache")
    with Embedder(str(tiny_checkpoint), cache_dir=cache, config=config) as embedder:
        embedder.model.main.engine.wait_timed(60.0)
        yield embedder


@pytest.fixture(name="held")
def _held(embedder, monkeypatch):
    """An event until which the device computes nothing."""
    gate, runner = threading.Event(), embedder.model.main.engine.workers[0].runner
    run = runner.run

    def wait_and_run(*arguments: Any, **options: Any) -> Any:
        assert gate.wait(WAIT_S)
        return run(*arguments, **options)

    monkeypatch.setattr(runner, "run", wait_and_run)
    yield gate
    gate.set()


@pytest.fixture(name="load_model", scope="module")
def _load_model(tmp_path_factory, closed_late) -> Callable[..., Embedder]:
    """Embedder(source) in float32 on one device, with one bucket of these rows and this length;
    closed after the module. Options are those of Embedder."""
    cache = tmp_path_factory.mktemp("cache")

    def load(source: Path, rows: int, length: int, **options: Any) -> Embedder:
        grid = cache / f"{rows}-{length}.json"
        grid.write_text(f'{{"buckets": [[{rows}, {length}]]}}')
        budget = rows * length
        config = EngineConfig(dtype="float32", devices=1, buckets=grid, max_batch_tokens=budget)
        embedder = Embedder(str(source), cache_dir=cache, config=config, **options)
        return closed_late.enter_context(embedder)

    return load


@pytest.fixture(name="clip", scope="session")
def _clip(tmp_path_factory) -> Iterator[Embedder]:
    """A tiny CLIP. Shared: do not close or drain it."""
    pytest.importorskip("PIL")
    folder, cache = (tmp_path_factory.mktemp(name) for name in ("clip", "clip-cache"))
    config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=256)
    with Embedder(str(write_dual(folder)), cache_dir=cache, config=config) as embedder:
        yield embedder


@pytest.fixture(name="runner")
def _runner() -> SumRunner:
    return SumRunner()


@pytest.fixture(name="start")
def _start(closed):
    """Start engines that are closed at the end. If `ready`, all their runners have joined."""

    def start(*runners, ready=True, **options) -> EngineUnderTest:
        engine = EngineUnderTest(runners, options.pop("grid", SMALL_GRID), **options)
        closed.callback(engine.close, WAIT_S)
        engine.start()
        if ready:
            engine.warmup.wait(WAIT_S)
            assert engine.warmup.joined.wait(WAIT_S)
        return engine

    return start
