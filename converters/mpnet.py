"""Converts MPNet from transformers: RoBERTa's positions, and a bias of scores by distance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from converters import bert, roberta
from converters.scores import Scorer
from converters.weights import (
    Rule,
    Shape,
    Tensor,
    Transform,
    concatenate,
    concatenate_transposed,
    transpose,
)
from jaxembed.errors import CheckpointError, UnsupportedModel

ARCHITECTURE = bert.ARCHITECTURE

CLASSES = ("MPNetModel", "MPNetForMaskedLM")
CLASSIFIERS = ("MPNetForSequenceClassification",)

PREFIXES = ("mpnet.",)
RENAMES: dict[str, str] = {}

# Fixed in transformers' code; configs cannot change them.
PAD_ID = 1  # positions count from it, whatever pad_token_id says
BUCKETS = 32
REACH = 128  # from this distance on the bucket stays the same


def bucket(distance: Int[np.ndarray, " distances"]) -> Int[np.ndarray, " distances"]:
    """The bucket of a distance, from the position of the query to that of the key.

    Small distances have a bucket each, larger ones share them. Raffel et al. 2020,
    arXiv:1910.10683. The values are those of MPNetEncoder.relative_position_bucket.
    """
    side = BUCKETS // 2
    exact = side // 2
    size = np.abs(distance)
    doublings = np.log2(np.maximum(size, exact) / exact)  # exact for powers of two
    shared = exact + np.floor(doublings * (side - exact) / np.log2(REACH / exact)).astype(np.int64)
    return np.where(size < exact, size, np.minimum(shared, side - 1)) + side * (distance > 0)


def _by_distance(table: np.ndarray) -> np.ndarray:
    """The biases of buckets, `[buckets, heads]`, as those of distances from -REACH to REACH."""
    return np.ascontiguousarray(table[bucket(np.arange(-REACH, REACH + 1))].T)


def _misfits(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    wanted = (BUCKETS, shape[0])
    return [
        f"{source.name}: wanted shape {wanted}, got {source.shape}"
        for source in sources
        if source.shape != wanted
    ]


by_distance = Transform(_by_distance, _misfits)

SELF = f"{bert.LAYER}.attention.attn"
ATTENTION = [
    Rule(
        (f"{SELF}.q.weight", f"{SELF}.k.weight", f"{SELF}.v.weight"),
        f"{bert.TARGET}.attention.qkv.kernel",
        concatenate_transposed,
    ),
    Rule(
        (f"{SELF}.q.bias", f"{SELF}.k.bias", f"{SELF}.v.bias"),
        f"{bert.TARGET}.attention.qkv.bias",
        concatenate,
    ),
    Rule(f"{SELF}.o.weight", f"{bert.TARGET}.attention.out.kernel", transpose),
    Rule(f"{SELF}.o.bias", f"{bert.TARGET}.attention.out.bias"),
    Rule(f"{bert.LAYER}.attention.LayerNorm.weight", f"{bert.TARGET}.attention_norm.scale"),
    Rule(f"{bert.LAYER}.attention.LayerNorm.bias", f"{bert.TARGET}.attention_norm.bias"),
    Rule("encoder.relative_attention_bias.weight", "tower.distance.bias", by_distance),
]
RULES = [*(rule for rule in bert.RULES if ".attention" not in rule.target), *ATTENTION]
IGNORED = roberta.IGNORED


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of BertConfig from a config.json.

    Raises UnsupportedModel for settings that we do not run, and CheckpointError for missing or
    inconsistent ones.
    """
    fields = bert.config(hf)
    buckets = hf.get("relative_attention_num_buckets", BUCKETS)
    if buckets != BUCKETS:
        raise UnsupportedModel(
            f"relative_attention_num_buckets {buckets!r} is not supported; known: {BUCKETS}"
        )
    if fields["max_positions"] < PAD_ID + 2:
        raise CheckpointError(
            f"max_position_embeddings is {fields['max_positions']}, wanted at least {PAD_ID + 2}, "
            f"because positions begin at {PAD_ID + 1}"
        )
    return fields | {"type_vocab_size": 0, "pad_id": PAD_ID, "bias_reach": REACH}


def classifier(hf: dict[str, Any], labels: int) -> Scorer:
    """MPNetClassificationHead: a dense layer with tanh on the first token, then the logits."""
    return roberta.classifier(hf, labels)
