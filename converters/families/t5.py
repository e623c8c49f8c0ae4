"""Converts T5's encoder from transformers 4 and 5, as in gtr-t5, sentence-t5 and instructor."""

import math
from typing import Any

import numpy as np
from jaxtyping import Int

from converters.family import Family
from converters.fields import chosen, refuse_unless, require
from converters.weights import (
    Rule,
    Transform,
    concatenate_transposed,
    identity,
    shaped,
    transpose,
)
from jaxembed.data.spec import Activation
from jaxembed.errors import CheckpointError

LAYER = "encoder.block.{i}.layer"
SELF = f"{LAYER}.0.SelfAttention"
MLP = f"{LAYER}.1.DenseReluDense"
TARGET = "tower.layers.{i}"

# One table under two names. It takes no adapter: of PEFT's, that of `shared` changes nothing.
shared_table = Transform(identity.apply, identity.misfits)

REQUIRED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")

# By feed_forward_proj: the activation, its name in transformers, and whether the MLP is gated.
FEED_FORWARDS: dict[str, tuple[Activation, str, bool]] = {
    "relu": ("relu", "relu", False),
    "gated-gelu": ("gelu_tanh", "gelu_new", True),
}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of T5Config from a config.json."""
    require(hf, REQUIRED)
    name = hf.get("feed_forward_proj", "relu")
    activation, dense_act_fn, gated = chosen("feed_forward_proj", name, FEED_FORWARDS)
    # transformers 5 writes what follows from feed_forward_proj, and believes what it reads
    follows = {"dense_act_fn": (dense_act_fn,), "is_gated_act": (gated,)}
    refuse_unless(hf, {"is_decoder": (False,), **follows})
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["d_model"],
        "num_layers": hf["num_layers"],
        "num_heads": hf["num_heads"],
        "head_width": hf["d_kv"],
        "intermediate_size": hf["d_ff"],
        "bias_reach": _distances(hf)[1],
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-6)),
        "activation": activation,
        "gated": gated,
    }


def config_rules(hf: dict[str, Any]) -> list[Rule]:
    """The rules for what the config says how to convert: the biases, and the queries' scale."""
    first = SELF.replace("{i}", "0")  # whose biases all layers take
    heads = (f"{SELF}.q.weight", f"{SELF}.k.weight", f"{SELF}.v.weight")
    return [
        Rule(
            f"{first}.relative_attention_bias.weight",
            "tower.distance.bias",
            by_distance(*_distances(hf)),
        ),
        Rule(heads, f"{TARGET}.attention.qkv.kernel", with_scaled_queries(hf["d_kv"] ** 0.5)),
    ]


def bucket(
    distance: Int[np.ndarray, " distances"], buckets: int, reach: int
) -> Int[np.ndarray, " distances"]:
    """The bucket of a distance, from the position of the query to that of the key.

    Small distances have a bucket each, larger ones share them, and from `reach` on all have the
    last one of their side. Raffel et al. 2020, arXiv:1910.10683. The values are those of
    relative_position_bucket in transformers' MPNet and T5.
    """
    side = buckets // 2
    exact = side // 2
    size = np.abs(distance)
    doublings = np.log2(np.maximum(size, exact) / exact)  # exact for powers of two
    shared = exact + np.floor(doublings * (side - exact) / np.log2(reach / exact)).astype(np.int64)
    return np.where(size < exact, size, np.minimum(shared, side - 1)) + side * (distance > 0)


def by_distance(buckets: int, reach: int) -> Transform:
    """A transform from the biases of buckets, `[buckets, heads]`, to those of distances, `[heads, 2
    * reach + 1]`, from -reach to reach."""

    def apply(table: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(table[bucket(np.arange(-reach, reach + 1), buckets, reach)].T)

    return Transform(apply, lambda sources, shape: shaped(sources, (buckets, shape[0])))


def with_scaled_queries(scale: float) -> Transform:
    """`concatenate_transposed` of queries, keys and values, with queries times `scale`.

    T5 does not divide scores by the root of the heads' width: the queries undo it. The weight is
    float32 unless the scale is a power of two, by which no bit is lost.
    """
    dtype = None if math.frexp(scale)[0] == 0.5 else "float32"

    def apply(*arrays: np.ndarray) -> np.ndarray:
        query, *others = arrays if dtype is None else (x.astype(np.float32) for x in arrays)
        return concatenate_transposed.apply(query * query.dtype.type(scale), *others)

    return Transform(apply, concatenate_transposed.misfits, dtype, by_column=True)


def _distances(hf: dict[str, Any]) -> tuple[int, int]:
    """The number of buckets of distances, and the distance from which on the last is taken."""
    buckets = hf.get("relative_attention_num_buckets", 32)
    reach = hf.get("relative_attention_max_distance", 128)
    if buckets < 4:
        raise CheckpointError(
            f"relative_attention_num_buckets is {buckets!r}, wanted a whole number of at least 4"
        )
    if reach <= buckets // 4:
        raise CheckpointError(
            f"relative_attention_max_distance is {reach!r}, wanted a whole number over "
            f"{buckets // 4}, the distances with a bucket each"
        )
    return buckets, reach


FAMILY = Family(
    architecture="t5",
    classes=("T5EncoderModel", "T5Model", "T5ForConditionalGeneration"),
    rules=(
        Rule("shared.weight", "tower.embeddings.word.embedding", shared_table),
        Rule("encoder.embed_tokens.weight", "tower.embeddings.word.embedding", shared_table),
        Rule(f"{LAYER}.0.layer_norm.weight", f"{TARGET}.attention_norm.scale"),
        Rule(f"{SELF}.o.weight", f"{TARGET}.attention.out.kernel", transpose),
        Rule(f"{LAYER}.1.layer_norm.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{MLP}.wi.weight", f"{TARGET}.mlp.up.kernel", transpose),
        Rule(
            (f"{MLP}.wi_0.weight", f"{MLP}.wi_1.weight"),
            f"{TARGET}.mlp.gate_up.kernel",
            concatenate_transposed,
        ),
        Rule(f"{MLP}.wo.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule("encoder.final_layer_norm.weight", "tower.norm.scale"),
    ),
    ignored=("encoder.embed_tokens.weight", "decoder.*", "lm_head.weight"),
    config=config,
    config_rules=config_rules,
)
