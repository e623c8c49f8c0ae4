"""Converts RoBERTa, XLM-R and CamemBERT from transformers: BERT with other positions and head."""

from typing import Any

from converters.families import bert
from converters.family import Family, Scorer, TermHead
from converters.features.terms import term_head, transform_layers
from jaxembed.errors import CheckpointError

_NAMES = ("Camembert", "Roberta", "XLMRoberta")


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read BertConfig's fields from a config.json, with the pad id that positions start from."""
    fields = bert.config(hf)
    pad = hf.get("pad_token_id", 1)
    if pad is None or not 0 <= pad < fields["max_positions"] - 1:
        raise CheckpointError(
            f"config.json: pad_token_id is {pad!r}, wanted a number from 0 that leaves some of the "
            f"{fields['max_positions']} positions, which begin after it"
        )
    return fields | {"pad_id": pad}


def classifier(hf: dict[str, Any], labels: int) -> Scorer:
    """RobertaClassificationHead: a dense layer with tanh on the first token, then the logits."""
    return bert.two_layers(hf["hidden_size"], labels, "classifier.dense", "classifier.out_proj")


def masked_lm(hf: dict[str, Any]) -> TermHead:
    """RobertaLMHead: a dense layer with GELU, whatever hidden_act is, a norm, and the decoder."""
    return term_head(
        hf,
        transform_layers(hf["hidden_size"], "gelu", hf.get("layer_norm_eps", 1e-12)),
        dense="lm_head.dense",
        norms=("lm_head.layer_norm",),
        decoder="lm_head.decoder",
        biases=("lm_head.bias",),
    )


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=tuple(f"{name}{kind}" for name in _NAMES for kind in ("Model", "ForMaskedLM")),
    classifiers=tuple(f"{name}ForSequenceClassification" for name in _NAMES),
    prefixes=("roberta.",),
    renames=bert.FAMILY.renames,
    rules=bert.FAMILY.rules,
    # The training heads and the pooler are not used for embeddings, and the pooler not for scores.
    ignored=(
        "embeddings.position_ids",
        "pooler.dense.*",
        "lm_head.*",
        "classifier.dense.*",
        "classifier.out_proj.*",
    ),
    config=config,
    classifier=classifier,
    masked_lm=masked_lm,
)
