"""Converts DeBERTa v2 and v3 from transformers 4 and 5: its config, head and tensor rules."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from converters.families import bert
from converters.family import Family
from converters.fields import activation_of, check_multiple, require
from converters.weights import Rule, Shape, Tensor, Transform, check_shape, transpose
from jaxembed.errors import CheckpointError, UnsupportedModel


def projected(norm_eps: float) -> Transform:
    """Return a Transform that applies an optional norm and a linear layer to a table; the result is
    float32. The sources are the table `[rows, width]`, the scale and the shift of the norm (if
    there is one), and the weight `[width, width]` and the bias of the linear layer. `norm_eps` is
    the epsilon of the norm."""

    def apply(table: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        *norm, weight, bias = (array.astype(np.float64) for array in rest)
        rows = table.astype(np.float64)
        if norm:
            scale, shift = norm
            rows = rows - rows.mean(axis=1, keepdims=True)
            variance = (rows * rows).mean(axis=1, keepdims=True)
            rows = rows / np.sqrt(variance + norm_eps) * scale + shift
        return (rows @ weight.T + bias).astype(np.float32)

    def misfits(sources: Sequence[Tensor], shape: Shape) -> list[str]:
        width = shape[1]
        *norm, weight, bias = sources[1:]
        return [
            *check_shape(sources[:1], shape),
            *check_shape([weight], (width, width)),
            *check_shape([bias, *norm], (width,)),
        ]

    return Transform(apply, misfits, dtype="float32")


# from a convolution's weight [out, in, tokens] to a kernel [tokens * in, out]
unfold = Transform(
    lambda weight: np.ascontiguousarray(weight.transpose(2, 1, 0).reshape(-1, len(weight))),
    lambda sources, shape: check_shape(sources, (shape[1], shape[1], shape[0] // shape[1])),
)

CONV = "encoder.conv"

CONTENT_TO_POSITION, POSITION_TO_CONTENT = "c2p", "p2c"

RELATIVE_TABLE = "encoder.rel_embeddings.weight"
TABLE_NORM = ("encoder.LayerNorm.weight", "encoder.LayerNorm.bias")


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to DebertaConfig fields. Raises UnsupportedModel and
    CheckpointError."""
    require(hf, bert.REQUIRED)
    check_multiple(hf, "hidden_size", "num_attention_heads")
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    # keys by which transformers would make layers of another width
    for key, required in (("attention_head_size", width // heads), ("pooler_hidden_size", width)):
        if hf.get(key, required) != required:
            raise UnsupportedModel(f"{key} {hf[key]} is not supported: it must be {required} here")
    if not hf.get("relative_attention", False):
        raise UnsupportedModel(
            "relative_attention=False is not supported: DeBERTa runs with relative positions"
        )
    terms = _names(hf.get("pos_att_type") or ())  # terms of scores by position
    if not terms or set(terms) - {CONTENT_TO_POSITION, POSITION_TO_CONTENT}:
        raise UnsupportedModel(
            f"pos_att_type {hf.get('pos_att_type')!r} is not supported; known: c2p, p2c, c2p|p2c"
        )
    if set(_names(hf.get("norm_rel_ebd", "none"))) - {"layer_norm", "none"}:
        raise UnsupportedModel(
            f"norm_rel_ebd {hf['norm_rel_ebd']!r} is not supported; known: layer_norm, none"
        )
    # the buckets on either side (0: none), and the distance from which on keys share the last row
    buckets = max(hf.get("position_buckets", -1), 0)
    max_distance = hf.get("max_relative_positions", -1)
    max_distance = max_distance if max_distance >= 1 else hf["max_position_embeddings"]
    if buckets and not 2 <= buckets < 2 * (max_distance - 1):
        raise CheckpointError(
            f"position_buckets is {buckets}, wanted at least 2 and less than twice the largest "
            f"distance, {max_distance - 1}, which max_relative_positions gives"
        )
    convolution = {}  # fields of the convolution beside the first layer
    conv_size = hf.get("conv_kernel_size") or 0
    if conv_size > 0:
        if conv_size % 2 == 0:
            raise UnsupportedModel(f"conv_kernel_size {conv_size} is not supported: it must be odd")
        if hf.get("conv_groups", 1) != 1:
            raise UnsupportedModel(f"conv_groups {hf['conv_groups']} is not supported; known: 1")
        activation = hf.get("conv_act", "tanh")
        convolution = {
            "conv_width": conv_size,
            "conv_activation": "tanh" if activation == "tanh" else activation_of(hf, "conv_act"),
        }
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": width,
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "intermediate_size": hf["intermediate_size"],
        "max_positions": hf["max_position_embeddings"],
        "type_vocab_size": hf.get("type_vocab_size", 0),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-7)),
        "activation": activation_of(hf, "hidden_act"),
        "embedding_size": hf.get("embedding_size", width),
        "absolute_positions": bool(hf.get("position_biased_input", True)),
        "buckets": buckets,
        "max_distance": max_distance,
        "content_to_position": CONTENT_TO_POSITION in terms,
        "position_to_content": POSITION_TO_CONTENT in terms,
        **convolution,
    }


def config_rules(hf: dict[str, Any]) -> list[Rule]:
    """Return the rules for the relative keys and queries of each layer: projections of the table of
    positions, which is normalized if `hf` says so. With share_att_key they use the weights that
    also project hidden states."""
    proj = "{}" if hf.get("share_att_key", False) else "pos_{}_proj"
    is_normed = "layer_norm" in _names(hf.get("norm_rel_ebd", "none"))
    table = (RELATIVE_TABLE, *(TABLE_NORM if is_normed else ()))
    transform = projected(float(hf.get("layer_norm_eps", 1e-7)))
    return [
        Rule(
            (*table, *(f"{bert.SELF}.{proj.format(part)}.{kind}" for kind in ("weight", "bias"))),
            f"{bert.TARGET}.attention.relative_{part}",
            transform,
        )
        for part in ("key", "query")
    ]


def _names(value: Any) -> list[str]:
    """Return lower-case names, from a list or from a string that separates them by "|"."""
    names = value.split("|") if isinstance(value, str) else value
    return [str(name).strip().lower() for name in names]


FAMILY = Family(
    architecture="deberta",
    classes=("DebertaV2Model", "DebertaV2ForMaskedLM"),
    classifiers=("DebertaV2ForSequenceClassification",),
    token_classifiers=("DebertaV2ForTokenClassification",),
    prefixes=("deberta.",),
    renames={
        "self.query_proj.weight": "self.query.weight",
        "self.query_proj.bias": "self.query.bias",
        "self.key_proj.weight": "self.key.weight",
        "self.key_proj.bias": "self.key.bias",
        "self.value_proj.weight": "self.value.weight",
        "self.value_proj.bias": "self.value.bias",
    },
    rules=(
        *bert.FAMILY.rules,
        Rule("embeddings.embed_proj.weight", "tower.embeddings.projection.kernel", transpose),
        Rule(f"{CONV}.conv.weight", "tower.convolution.linear.kernel", unfold),
        Rule(f"{CONV}.conv.bias", "tower.convolution.linear.bias"),
        Rule(f"{CONV}.LayerNorm.weight", "tower.convolution.norm.scale"),
        Rule(f"{CONV}.LayerNorm.bias", "tower.convolution.norm.bias"),
    ),
    # The training heads are never used, and embeddings do not use the pooler. Published models
    # store a position table even if position_biased_input is false.
    ignored=(
        "embeddings.position_ids",
        "embeddings.position_embeddings.weight",
        "pooler.dense.*",
        "classifier.*",
        "cls.predictions.*",
        "lm_predictions.*",
        "mask_predictions.*",
    ),
    config=config,
    config_rules=config_rules,
    # a dense layer with an activation on the first token, then the logits
    classifier=lambda hf, labels: bert.two_layer_head(
        hf["hidden_size"],
        labels,
        "pooler.dense",
        "classifier",
        activation=activation_of(hf, "pooler_hidden_act"),
    ),
)
