"""Converts ELECTRA from transformers: BERT with embeddings of another width, and another head."""

from typing import Any

from converters.families import bert
from converters.family import Family, Scorer, TermHead
from converters.features.terms import term_head, transform_layers
from converters.fields import refuse_unless, require
from converters.weights import Rule, transpose

EMBEDDING_SIZE = 128  # transformers' default

# Of the head for multiple choice, which is not run; another value asks for another head than ours.
SUMMARY = {
    "summary_type": ("first",),
    "summary_use_proj": (True,),
    "summary_activation": ("gelu", None),
}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of BertConfig from a config.json, with the width of the embeddings."""
    hf = {"embedding_size": EMBEDDING_SIZE} | hf
    require(hf, ("embedding_size",))
    refuse_unless(hf, SUMMARY)
    fields = bert.config(hf)
    projected = hf["embedding_size"] != fields["hidden_size"]
    return fields | {"embedding_size": hf["embedding_size"] if projected else None}


def classifier(hf: dict[str, Any], labels: int) -> Scorer:
    """ElectraClassificationHead: a dense layer with GELU on the first token, then the logits."""
    return bert.two_layers(
        hf["hidden_size"], labels, "classifier.dense", "classifier.out_proj", activation="gelu"
    )


def masked_lm(hf: dict[str, Any]) -> TermHead:
    """The head of a generator: a dense layer with GELU to the width of the embeddings, a norm, and
    the decoder."""
    features = hf.get("embedding_size", EMBEDDING_SIZE)
    eps = hf.get("layer_norm_eps", 1e-12)
    return term_head(
        hf,
        transform_layers(hf["hidden_size"], "gelu", eps, features=features),
        dense="generator_predictions.dense",
        norms=("generator_predictions.LayerNorm",),
        decoder="generator_lm_head",
    )


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("ElectraModel", "ElectraForPreTraining", "ElectraForMaskedLM"),
    classifiers=("ElectraForSequenceClassification",),
    prefixes=("electra.",),
    renames=bert.FAMILY.renames,
    rules=(
        *bert.FAMILY.rules,
        Rule("embeddings_project.weight", "tower.embeddings.projection.kernel", transpose),
        Rule("embeddings_project.bias", "tower.embeddings.projection.bias"),
    ),
    # The heads of discriminator and generator are not used, nor the classifier for embeddings.
    ignored=(
        "embeddings.position_ids",
        "discriminator_predictions.*",
        "generator_predictions.*",
        "generator_lm_head.*",
        "classifier.dense.*",
        "classifier.out_proj.*",
    ),
    config=config,
    classifier=classifier,
    masked_lm=masked_lm,
)
