"""Converts RoBERTa, XLM-R and CamemBERT from transformers: BERT with other positions and head."""

from typing import Any

from converters.families import bert
from converters.family import Family
from converters.features.terms import masked_lm_function
from jaxembed.errors import CheckpointError

_NAMES = ("Camembert", "Roberta", "XLMRoberta")


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. Positions start after `pad_id`. Raises
    UnsupportedModel and CheckpointError."""
    fields = bert.config(hf)
    pad = hf.get("pad_token_id", 1)
    if pad is None or not 0 <= pad < fields["max_positions"] - 1:
        raise CheckpointError(
            f"config.json: pad_token_id is {pad!r}, wanted a number from 0 that leaves some of the "
            f"{fields['max_positions']} positions, which begin after it"
        )
    return fields | {"pad_id": pad}


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=tuple(f"{name}{kind}" for name in _NAMES for kind in ("Model", "ForMaskedLM")),
    classifiers=tuple(f"{name}ForSequenceClassification" for name in _NAMES),
    token_classifiers=tuple(f"{name}ForTokenClassification" for name in _NAMES),
    prefixes=("roberta.",),
    renames=bert.FAMILY.renames,
    rules=bert.FAMILY.rules,
    # embeddings do not use these tensors; scores do not use the pooler either
    ignored=(
        "embeddings.position_ids",
        "pooler.dense.*",
        "lm_head.*",
        "classifier.dense.*",
        "classifier.out_proj.*",
    ),
    config=config,
    classifier=bert.two_layer_classifier("classifier.dense", "classifier.out_proj"),
    masked_lm=masked_lm_function(  # RobertaLMHead: GELU, whatever hidden_act is
        "gelu",
        dense="lm_head.dense",
        norms=("lm_head.layer_norm",),
        decoder="lm_head.decoder",
        biases=("lm_head.bias",),
    ),
)
