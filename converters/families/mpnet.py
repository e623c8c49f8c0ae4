"""Converts MPNet from transformers: RoBERTa's positions, and a bias of scores by distance."""

from typing import Any

from converters.families import bert, roberta
from converters.families.t5 import by_distance
from converters.family import Family
from converters.weights import Rule, concatenate, concatenate_transposed, transpose
from jaxembed.errors import CheckpointError, UnsupportedModel

# These numbers are fixed in transformers' code; configs cannot change them.
PAD_ID = 1  # positions start after this number, whatever pad_token_id says
BUCKETS = 32
REACH = 128  # distances from here on share the last bucket

SELF = f"{bert.LAYER}.attention.attn"


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. The bias of scores is constant for distances
    from `bias_reach` on. Raises UnsupportedModel and CheckpointError."""
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


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("MPNetModel", "MPNetForMaskedLM"),
    classifiers=("MPNetForSequenceClassification",),
    prefixes=("mpnet.",),
    rules=(
        *(rule for rule in bert.FAMILY.rules if ".attention" not in rule.target),
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
        Rule(
            "encoder.relative_attention_bias.weight",
            "tower.distance.bias",
            by_distance(BUCKETS, REACH),
        ),
    ),
    ignored=roberta.FAMILY.ignored,
    config=config,
    classifier=roberta.FAMILY.classifier,
    masked_lm=roberta.FAMILY.masked_lm,
)
