"""Converts DistilBERT from transformers: BERT without token types, with other tensor names."""

from typing import Any

from converters.families import bert
from converters.family import Family, SparseHead
from converters.features.terms import term_head, transform_layers
from converters.fields import activation_of, check_multiple, require
from converters.weights import Rule, concatenate, concatenate_transposed, transpose
from jaxembed.errors import UnsupportedModel

LAYER = "transformer.layer.{i}"
SELF = f"{LAYER}.attention"
TARGET = "tower.layers.{i}"

REQUIRED = ("vocab_size", "dim", "n_layers", "n_heads", "hidden_dim", "max_position_embeddings")

NORM_EPS = 1e-12  # fixed in transformers' code; configs cannot change it


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. A model with sinusoidal_pos_embds stores its
    position table like a learned one. Raises UnsupportedModel and CheckpointError."""
    require(hf, REQUIRED)
    if hf.get("pruned_heads"):
        raise UnsupportedModel(f"pruned_heads={hf['pruned_heads']} is not supported")
    check_multiple(hf, "dim", "n_heads")
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["dim"],
        "num_layers": hf["n_layers"],
        "num_heads": hf["n_heads"],
        "intermediate_size": hf["hidden_dim"],
        "max_positions": hf["max_position_embeddings"],
        "type_vocab_size": 0,
        "norm_eps": NORM_EPS,
        "activation": activation_of(hf, "activation"),
    }


def masked_lm(hf: dict[str, Any]) -> SparseHead:
    """Return the head of DistilBertForMaskedLM and its rules: BERT's, with other tensor names.
    Raises UnsupportedModel for an unknown activation."""
    return term_head(
        hf,
        transform_layers(hf["dim"], activation_of(hf, "activation"), NORM_EPS),
        dense="vocab_transform",
        norms=("vocab_layer_norm",),
        decoder="vocab_projector",
    )


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("DistilBertModel", "DistilBertForMaskedLM"),
    classifiers=("DistilBertForSequenceClassification",),
    token_classifiers=("DistilBertForTokenClassification",),
    prefixes=("distilbert.",),
    rules=(
        Rule("embeddings.word_embeddings.weight", "tower.embeddings.word.embedding"),
        Rule("embeddings.position_embeddings.weight", "tower.embeddings.position.embedding"),
        Rule("embeddings.LayerNorm.weight", "tower.embeddings.norm.scale"),
        Rule("embeddings.LayerNorm.bias", "tower.embeddings.norm.bias"),
        Rule(
            (f"{SELF}.q_lin.weight", f"{SELF}.k_lin.weight", f"{SELF}.v_lin.weight"),
            f"{TARGET}.attention.qkv.kernel",
            concatenate_transposed,
        ),
        Rule(
            (f"{SELF}.q_lin.bias", f"{SELF}.k_lin.bias", f"{SELF}.v_lin.bias"),
            f"{TARGET}.attention.qkv.bias",
            concatenate,
        ),
        Rule(f"{SELF}.out_lin.weight", f"{TARGET}.attention.out.kernel", transpose),
        Rule(f"{SELF}.out_lin.bias", f"{TARGET}.attention.out.bias"),
        Rule(f"{LAYER}.sa_layer_norm.weight", f"{TARGET}.attention_norm.scale"),
        Rule(f"{LAYER}.sa_layer_norm.bias", f"{TARGET}.attention_norm.bias"),
        Rule(f"{LAYER}.ffn.lin1.weight", f"{TARGET}.mlp.up.kernel", transpose),
        Rule(f"{LAYER}.ffn.lin1.bias", f"{TARGET}.mlp.up.bias"),
        Rule(f"{LAYER}.ffn.lin2.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.ffn.lin2.bias", f"{TARGET}.mlp.down.bias"),
        Rule(f"{LAYER}.output_layer_norm.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{LAYER}.output_layer_norm.bias", f"{TARGET}.mlp_norm.bias"),
    ),
    # embeddings do not use these tensors; position_ids is 0, 1, 2, ...
    ignored=(
        "embeddings.position_ids",
        "vocab_transform.*",
        "vocab_layer_norm.*",
        "vocab_projector.*",
        "pre_classifier.*",
        "classifier.*",
    ),
    config=config,
    classifier=bert.two_layer_classifier("pre_classifier", "classifier", "relu", width="dim"),
    masked_lm=masked_lm,
)
