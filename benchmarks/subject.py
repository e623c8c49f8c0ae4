"""Loads the model that a benchmark runs: a checkpoint, or random weights of a known architecture.

Random weights run as fast as real ones, because the shapes are equal and speed does not depend on
values.
"""

import math
import os
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from benchmarks.parameters import random_parameter, random_parameters
from jaxembed.checkpoints.source import DEFAULT_MODEL, ModelSource, default_cache_dir
from jaxembed.data.spec import Adapter, DType, ModelSpec, NormalizeLayer, Pooled, Pooling
from jaxembed.engine.autotune.calibrate import Calibration
from jaxembed.engine.autotune.kernels import Choice, choose_kernels, choose_native
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.placement import placed_dtype
from jaxembed.engine.replica import Replica
from jaxembed.models import Program, program


def _bert(
    vocabulary: int, width: int, layers: int, heads: int, intermediate: int, positions: int
) -> dict[str, Any]:
    """The config of a BERT tower of these sizes."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_layers": layers,
        "num_heads": heads,
        "intermediate_size": intermediate,
        "max_positions": positions,
        "type_vocab_size": 2,
        "norm_eps": 1e-12,
        "activation": "gelu",
    }


_BASE = _bert(30522, 768, 12, 12, 3072, 512)
MPNET_BASE = _BASE | {
    "vocab_size": 30527,
    "max_positions": 514,
    "type_vocab_size": 0,
    "norm_eps": 1e-5,
    "pad_id": 1,
    "bias_reach": 128,
}
XLM_R_LARGE = _bert(250002, 1024, 24, 16, 4096, 514) | {
    "type_vocab_size": 1,
    "norm_eps": 1e-5,
    "pad_id": 1,
}
NOMIC_BASE = _BASE | {
    "max_positions": 8192,
    "activation": "silu",
    "rope_theta": 1000.0,
    "gated": True,
    "attention_bias": False,
    "up_bias": False,
    "down_bias": False,
}
NOMIC_MOE = _BASE | {  # nomic-embed-text-v2-moe
    "vocab_size": 250048,
    "max_positions": 2048,
    "type_vocab_size": 1,
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "expert_layers": list(range(1, 12, 2)),
    "experts": 8,
    "active_experts": 2,
}
GTE_BASE = _BASE | {  # gte-base-en-v1.5
    "max_positions": 8192,
    "type_vocab_size": 0,
    "rope_theta": 1e6,
    "rope_scaling": {"kind": "linear", "factor": 2 ** (2 / 64)},
    "gated": True,
    "up_bias": False,
}
JINA_V2_BASE = _BASE | {  # jina-embeddings-v2-base-en
    "max_positions": 8192,
    "gated": True,
    "up_bias": False,
    "alibi": True,
}
MODERNBERT_BASE = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "num_layers": 22,
    "num_heads": 12,
    "intermediate_size": 1152,
    "max_positions": 8192,
    "global_layers": list(range(0, 22, 3)),
    "local_reach": 64,
    "global_theta": 160_000.0,
    "local_theta": 10_000.0,
    "norm_eps": 1e-5,
    "activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
}
QWEN3_06B = {
    "vocab_size": 151669,
    "hidden_size": 1024,
    "num_layers": 28,
    "num_heads": 16,
    "num_key_heads": 8,
    "head_width": 128,
    "intermediate_size": 3072,
    "max_positions": 32768,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "activation": "silu",
    "qkv_bias": False,
    "out_bias": False,
    "qk_norm": True,
    "causal": True,
}
QWEN3_8B = QWEN3_06B | {
    "vocab_size": 151665,
    "hidden_size": 4096,
    "num_layers": 36,
    "num_heads": 32,
    "intermediate_size": 12288,
}
EUROBERT_210M = QWEN3_06B | {
    "vocab_size": 128256,
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "num_key_heads": 12,
    "head_width": 64,
    "max_positions": 8192,
    "rope_theta": 250_000.0,
    "norm_eps": 1e-5,
    "qk_norm": False,
    "causal": False,
}
LLAMA_1B = QWEN3_06B | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_layers": 16,
    "num_heads": 32,
    "head_width": 64,
    "intermediate_size": 8192,
    "max_positions": 131072,
    "rope_theta": 500_000.0,
    "norm_eps": 1e-5,
    "qk_norm": False,
}
EMBEDDINGGEMMA_300M = QWEN3_06B | {
    "vocab_size": 262144,
    "hidden_size": 768,
    "num_layers": 24,
    "num_heads": 3,
    "num_key_heads": 1,
    "head_width": 256,
    "intermediate_size": 1152,
    "max_positions": 2048,
    "activation": "gelu_tanh",
    "causal": False,
    "local_layers": [layer for layer in range(24) if (layer + 1) % 6],
    "local_reach": 256,
    "local_theta": 10_000.0,
    "embedding_scale": 768**0.5,
    "block_norms": True,
    "overflows_float16": True,
}
GEMMA_2B = QWEN3_06B | {  # bge-reranker-v2-gemma
    "vocab_size": 256000,
    "hidden_size": 2048,
    "num_layers": 18,
    "num_heads": 8,
    "num_key_heads": 1,
    "head_width": 256,
    "intermediate_size": 16384,
    "max_positions": 8192,
    "rope_theta": 10_000.0,
    "activation": "gelu_tanh",
    "qk_norm": False,
    "embedding_scale": 2048**0.5,
    "overflows_float16": True,
}
MINICPM_2B = QWEN3_06B | {  # bge-reranker-v2-minicpm-layerwise
    "vocab_size": 122753,
    "hidden_size": 2304,
    "num_layers": 40,
    "num_heads": 36,
    "num_key_heads": 36,
    "head_width": 64,
    "intermediate_size": 5760,
    "max_positions": 2048,
    "rope_theta": 10_000.0,
    "norm_eps": 1e-5,
    "qk_norm": False,
    "embedding_scale": 12.0,
}
T5_BASE = {  # gtr-t5-base, sentence-t5-base
    "vocab_size": 32128,
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "head_width": 64,
    "intermediate_size": 3072,
    "bias_reach": 128,
    "norm_eps": 1e-6,
    "activation": "relu",
    "gated": False,
}
DEBERTA_V3_BASE = _bert(128100, 768, 12, 12, 3072, 512) | {
    "type_vocab_size": 0,
    "norm_eps": 1e-7,
    "absolute_positions": False,
    "buckets": 256,
    "max_distance": 512,
    "content_to_position": True,
    "position_to_content": True,
}
# Architecture, config and pooling by name, from the models' own config.json.
SIZES: dict[str, tuple[str, dict[str, Any], Pooling]] = {
    "tiny": ("bert", _bert(1000, 32, 2, 4, 64, 64), "mean"),
    "minilm": ("bert", _bert(30522, 384, 6, 12, 1536, 512), "mean"),
    "bert-base": ("bert", _bert(30522, 768, 12, 12, 3072, 512), "mean"),
    "bge-large": ("bert", _bert(30522, 1024, 24, 16, 4096, 512), "cls"),
    "xlm-r-large": ("bert", XLM_R_LARGE, "cls"),
    "mpnet-base": ("bert", MPNET_BASE, "mean"),
    "nomic-base": ("bert", NOMIC_BASE, "mean"),
    "nomic-moe": ("bert", NOMIC_MOE, "mean"),
    "gte-base": ("bert", GTE_BASE, "cls"),
    "jina-v2-base": ("bert", JINA_V2_BASE, "mean"),
    "t5-base": ("t5", T5_BASE, "mean"),
    "deberta-v3-base": ("deberta", DEBERTA_V3_BASE, "cls"),
    "modernbert-base": ("modernbert", MODERNBERT_BASE, "cls"),
    "eurobert-210m": ("qwen3", EUROBERT_210M, "mean"),
    "embeddinggemma-300m": ("qwen3", EMBEDDINGGEMMA_300M, "mean"),
    "gemma-2b": ("qwen3", GEMMA_2B, "lasttoken"),
    "minicpm-2b": ("qwen3", MINICPM_2B, "lasttoken"),
    "llama-1b": ("qwen3", LLAMA_1B, "lasttoken"),
    "qwen3-0.6b": ("qwen3", QWEN3_06B, "lasttoken"),
    "qwen3-8b": ("qwen3", QWEN3_8B, "lasttoken"),
}


BY_LAYER = {"expert_layers", "global_layers", "local_layers"}  # fields that list numbers of layers


@dataclass(frozen=True)
class Subject:
    """A model and its parameters, on the host."""

    name: str
    spec: ModelSpec
    program: Program
    parameters: dict[str, np.ndarray]
    tokenizer: Path | None  # None for random weights

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self.spec.config["vocab_size"])


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options that choose the model, and those of add_kernel_arguments."""
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument(
        "--architecture-size", choices=SIZES, help="random weights of this shape instead"
    )
    add_kernel_arguments(parser)


def add_kernel_arguments(parser: ArgumentParser) -> None:
    """Add the options of the dtype, the kernels and the cache."""
    parser.add_argument("--dtype", choices=get_args(DType), help="default: the device's own")
    parser.add_argument("--kernels", default="auto", help="as of `jaxembed serve`")
    parser.add_argument("--cache-dir", type=Path, help="of checkpoints and trials of kernels")


def dtype_of(args: Namespace) -> DType:
    """The dtype that the arguments name, or the device's own."""
    return args.dtype or Calibration(jax.local_devices()[0]).native_dtype()


def grid_of(buckets: str) -> BucketGrid:
    """The grid of buckets such as "8x128,2x512"."""
    pairs = [text.split("x") for text in buckets.split(",")]
    return BucketGrid(tuple(Bucket(int(rows), int(length)) for rows, length in pairs))


def load(args: Namespace) -> Subject:
    """Load the model that the arguments name."""
    if args.architecture_size:
        return random_subject(args.architecture_size)
    # imported here, because random weights need neither Orbax nor the hub
    from jaxembed.checkpoints import checkpoint, hub

    path = hub.resolve(ModelSource(args.model, cache_dir=args.cache_dir or default_cache_dir()))
    spec = checkpoint.load_spec(path)
    name = args.model or DEFAULT_MODEL
    parameters = checkpoint.load_params(path, spec)
    return Subject(name, spec, program(spec), parameters, checkpoint.tokenizer_path(path))


def random_subject(size: str, seed: int = 0, dtype: DType = "float32") -> Subject:
    """A model of SIZES with random weights, the same on every machine.

    Each weight has a generator of its own, so that threads draw them. `dtype` is that of matrices;
    the host holds few of them in float32 at once.
    """
    spec = spec_of(size)
    made = program(spec)

    def drawn(name: str) -> np.ndarray:
        draw = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = random_parameter(name, made.shapes[name].shape, draw)
        return values.astype(jnp.dtype(placed_dtype(name, values.ndim, dtype)), copy=False)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        parameters = dict(zip(made.shapes, threads.map(drawn, made.shapes), strict=True))
    return Subject(f"{size} (random)", spec, made, parameters, None)


# Weights that stand side by side in a product; an adapter changes each by columns of its own.
JOINED = {"qkv": 3, "gate_up": 2}


def with_adapters(subject: Subject, count: int, rank: int, seed: int = 0) -> Subject:
    """The model with random adapters of this rank for all products of its layers."""
    ranks = {}
    for name in subject.program.shapes:
        if name.startswith("tower.layers.") and name.endswith(".kernel"):
            layer = name.removesuffix(".kernel")
            ranks[layer] = rank * JOINED.get(layer.rsplit(".", 1)[1], 1)
    adapters = tuple(Adapter(str(number), ranks) for number in range(1, count + 1))
    spec = msgspec.structs.replace(subject.spec, adapters=adapters)
    parameters = random_parameters(spec, seed) | subject.parameters
    for layer in ranks:
        up, joined = parameters[f"{layer}.adapter.up.kernel"], ranks[layer] // rank
        row, column = np.indices(up.shape)
        up *= row // rank % joined == column * joined // up.shape[1]
    return replace(subject, spec=spec, program=program(spec), parameters=parameters)


def replica(subject: Subject, args: Namespace, grid: BucketGrid) -> Replica:
    """Place the model on the first device, with the kernels a server would use for the grid."""
    device, dtype = jax.local_devices()[0], dtype_of(args)
    native_choice = native_choice_of(subject, args)
    choice = choose_kernels(
        subject.program, device, dtype, grid, args.kernels, native_choice=native_choice
    )
    parameters = (subject.program, subject.parameters, [device], dtype)
    return Replica(*parameters, attention=choice.implementation, native_layout=choice.native_layout)


def native_choice_of(subject: Subject, args: Namespace) -> Choice:
    """The native kernels that a server would use for the model, if any."""
    device, folder = jax.local_devices()[0], args.cache_dir or default_cache_dir()
    return choose_native(subject.program, device, dtype_of(args), args.kernels, folder)


def spec_of(size: str, layers: int = 0, **changes: Any) -> ModelSpec:
    """The spec of an embedding model of SIZES, with normalised output.

    `layers` is the number of layers, 0 for all of them; `changes` are fields of the config.
    """
    architecture, config, pooling = SIZES[size]
    config = config | changes
    if layers:
        config["num_layers"] = layers
        for field in BY_LAYER & config.keys():
            config[field] = [number for number in config[field] if number < layers]
    return ModelSpec(
        architecture=architecture,
        config=config,
        heads={"dense": Pooled((pooling,), (NormalizeLayer(),))},
        max_input_tokens=config.get("max_positions", 512),
        hidden_size=config["hidden_size"],
        dtype="float32",
        source=size,
        content_hash="",
    )


def useful_flops(spec: ModelSpec, model: Program, lengths: Sequence[int] | np.ndarray) -> float:
    """The floating-point operations that sequences of these lengths need.

    These are two for each weight element and token, and attention's two products. Norms, softmax
    and padding are not counted.
    """
    tokens = np.asarray(lengths, np.float64)
    products = 2.0 * sum(map(math.prod, model.products))
    return float(products * tokens.sum()) + attention_flops(spec, lengths)


def attention_flops(spec: ModelSpec, lengths: Sequence[int] | np.ndarray) -> float:
    """The floating-point operations of attention's two products, over all layers, for sequences of
    these lengths."""
    config = spec.config
    heads = config["num_heads"]
    width = heads * config.get("head_width", config["hidden_size"] // heads)
    return float(4.0 * width * _pairs(config, np.asarray(lengths, np.float64)).sum())


def _pairs(config: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """The number of pairs of a query and a key that it sees, over all layers, of each sequence."""
    layers = config["num_layers"]
    if config.get("causal"):
        return layers * tokens * (tokens + 1) / 2
    whole = len(config.get("global_layers", range(layers)))
    reach = np.minimum(config.get("local_reach", 0), tokens - 1)
    seen = tokens * (2 * reach + 1) - reach * (reach + 1)  # windows are cut at both ends
    return whole * tokens**2 + (layers - whole) * seen


# Our names of config fields -> transformers' names.
THEIRS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_key_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "max_positions": "max_position_embeddings",
}
SAME = ("vocab_size", "hidden_size", "intermediate_size")


def transformers_config(size: str) -> tuple[str, dict[str, int]]:
    """The model type and config of the same architecture for transformers, which a peer runs.

    Fields that are left out have transformers' defaults, which these models have too.
    """
    architecture, config, _ = SIZES[size]
    fields = {name: config[name] for name in SAME}
    return architecture, fields | {THEIRS[name]: config[name] for name in THEIRS if name in config}
