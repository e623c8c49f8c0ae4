"""Converts T5's encoder from transformers 4 and 5, as in gtr-t5, sentence-t5 and instructor."""

import math
from typing import Any

import numpy as np
from jaxtyping import Int

from converters.family import Family
from converters.fields import lookup, refuse_unless, require
from converters.weights import (
    Rule,
    Transform,
    check_shape,
    concatenate_transposed,
    identity,
    transpose,
)
from jaxembed.data.spec import Activation
from jaxembed.errors import CheckpointError

LAYER = "encoder.block.{i}.layer"
SELF = f"{LAYER}.0.SelfAttention"
MLP = f"{LAYER}.1.DenseReluDense"
TARGET = "tower.layers.{i}"

# For the embedding table, which files store under two names. This copy of `identity` refuses
# adapters of the table, because PEFT's adapter of `shared` changes nothing.
shared_table = Transform(identity.apply, identity.misfits)

REQUIRED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")

# By feed_forward_proj: the activation, its name in transformers, and whether the MLP is gated.
FEED_FORWARDS: dict[str, tuple[Activation, str, bool]] = {
    "relu": ("relu", "relu", False),
    "gated-gelu": ("gelu_tanh", "gelu_new", True),
}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to T5Config fields. Raises UnsupportedModel, CheckpointError."""
    require(hf, REQUIRED)
    name = hf.get("feed_forward_proj", "relu")
    activation, dense_act_fn, gated = lookup("feed_forward_proj", name, FEED_FORWARDS)
    # transformers 5 writes and uses these two keys, which must agree with feed_forward_proj
    derived = {"dense_act_fn": (dense_act_fn,), "is_gated_act": (gated,)}
    refuse_unless(hf, {"is_decoder": (False,), **derived})
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["d_model"],
        "num_layers": hf["num_layers"],
        "num_heads": hf["num_heads"],
        "head_width": hf["d_kv"],
        "intermediate_size": hf["d_ff"],
        "bias_reach": _bucket_settings(hf)[1],
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-6)),
        "activation": activation,
        "gated": gated,
    }


def config_rules(hf: dict[str, Any]) -> list[Rule]:
    """Return the rules that depend on the config: biases by distance, and scaled queries."""
    first_layer = SELF.replace("{i}", "0")  # all layers share its biases
    qkv = (f"{SELF}.q.weight", f"{SELF}.k.weight", f"{SELF}.v.weight")
    return [
        Rule(
            f"{first_layer}.relative_attention_bias.weight",
            "tower.distance.bias",
            by_distance(*_bucket_settings(hf)),
        ),
        Rule(qkv, f"{TARGET}.attention.qkv.kernel", with_scaled_queries(hf["d_kv"] ** 0.5)),
    ]


def bucket(
    distance: Int[np.ndarray, " distances"], buckets: int, reach: int
) -> Int[np.ndarray, " distances"]:
    """Return the bucket number of each distance, which is the key's position minus the query's.

    There are `buckets` numbers; the second half is for keys after the query. In each half, small
    distances have a bucket each, ranges of larger distances share a bucket, and all distances from
    `reach` on share the last one. Raffel et al. 2020, arXiv:1910.10683. The values are those of
    relative_position_bucket in transformers' MPNet and T5.
    """
    half = buckets // 2
    exact = half // 2  # smaller distances have a bucket each
    size = np.abs(distance)
    doublings = np.log2(np.maximum(size, exact) / exact)  # log2 is exact for powers of 2
    shared = exact + np.floor(doublings * (half - exact) / np.log2(reach / exact)).astype(np.int64)
    return np.where(size < exact, size, np.minimum(shared, half - 1)) + half * (distance > 0)


def by_distance(buckets: int, reach: int) -> Transform:
    """Return a Transform from biases of buckets `[buckets, heads]` to biases of distances. The
    result is `[heads, 2 * reach + 1]`, for distances from -reach to reach; see `bucket`."""

    def apply(table: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(table[bucket(np.arange(-reach, reach + 1), buckets, reach)].T)

    return Transform(apply, lambda sources, shape: check_shape(sources, (buckets, shape[0])))


def with_scaled_queries(scale: float) -> Transform:
    """Return a Transform like `concatenate_transposed` that multiplies the queries by `scale`. With
    sqrt(head width) this undoes the division of scores by this number, which T5 does not do. The
    result is float32, unless `scale` is a power of two, with which no bit is lost."""
    dtype = None if math.frexp(scale)[0] == 0.5 else "float32"  # 0.5: a power of two

    def apply(*arrays: np.ndarray) -> np.ndarray:
        query, *others = arrays if dtype is None else (x.astype(np.float32) for x in arrays)
        return concatenate_transposed.apply(query * query.dtype.type(scale), *others)

    return Transform(apply, concatenate_transposed.misfits, dtype, by_column=True)


def _bucket_settings(hf: dict[str, Any]) -> tuple[int, int]:
    """Return the number of buckets, and the distance from which on keys share the last bucket.
    Raises CheckpointError if either number is too small."""
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
