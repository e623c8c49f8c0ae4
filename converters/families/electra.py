"""Converts ELECTRA from transformers: BERT with embeddings of another width, and another head."""

from typing import Any

from converters.families import bert
from converters.family import Family
from converters.features.terms import masked_lm_function
from converters.fields import refuse_unless, require
from converters.weights import Rule, transpose

DEFAULTS = {"embedding_size": 128}  # transformers' defaults

# Keys of the multiple-choice head, which jaxembed does not run, and the values that it accepts.
SUMMARY = {
    "summary_type": ("first",),
    "summary_use_proj": (True,),
    "summary_activation": ("gelu", None),
}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. embedding_size is None if it equals
    hidden_size. Raises UnsupportedModel and CheckpointError."""
    hf = DEFAULTS | hf
    require(hf, ("embedding_size",))
    refuse_unless(hf, SUMMARY)  # settings of the multiple-choice head
    fields = bert.config(hf)
    is_projected = hf["embedding_size"] != fields["hidden_size"]
    return fields | {"embedding_size": hf["embedding_size"] if is_projected else None}


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("ElectraModel", "ElectraForPreTraining", "ElectraForMaskedLM"),
    classifiers=("ElectraForSequenceClassification",),
    token_classifiers=("ElectraForTokenClassification",),
    prefixes=("electra.",),
    renames=bert.FAMILY.renames,
    rules=(
        *bert.FAMILY.rules,
        Rule("embeddings_project.weight", "tower.embeddings.projection.kernel", transpose),
        Rule("embeddings_project.bias", "tower.embeddings.projection.bias"),
    ),
    # embeddings do not use these tensors
    ignored=(
        "embeddings.position_ids",
        "discriminator_predictions.*",
        "generator_predictions.*",
        "generator_lm_head.*",
        "classifier.dense.*",
        "classifier.out_proj.*",
    ),
    config=config,
    classifier=bert.two_layer_classifier("classifier.dense", "classifier.out_proj", "gelu"),
    masked_lm=masked_lm_function(  # a generator's head; it projects to the width of the embeddings
        "gelu",
        defaults=DEFAULTS,
        features="embedding_size",
        dense="generator_predictions.dense",
        norms=("generator_predictions.LayerNorm",),
        decoder="generator_lm_head",
    ),
)
