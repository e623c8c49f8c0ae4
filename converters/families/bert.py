"""Converts BERT from transformers: its config, classifier and tensor rules."""

from collections.abc import Callable
from typing import Any

from converters.family import Family, Fields, Scorer
from converters.features.terms import masked_lm_function
from converters.fields import activation_of, check_multiple, refuse_unknown, require
from converters.heads import dense_rules
from converters.weights import Rule, concatenate, concatenate_transposed, transpose
from jaxembed.data.spec import Activation, DenseLayer, Pooled, Pooling
from jaxembed.errors import UnsupportedModel

LAYER = "encoder.layer.{i}"
SELF = f"{LAYER}.attention.self"
TARGET = "tower.layers.{i}"

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. Raises UnsupportedModel, CheckpointError."""
    require(hf, REQUIRED)
    positions = hf.get("position_embedding_type") or "absolute"
    refuse_unknown("position_embedding_type", positions, ("absolute",))
    for flag in ("is_decoder", "add_cross_attention", "pruned_heads"):
        if hf.get(flag):
            raise UnsupportedModel(f"{flag}={hf[flag]} is not supported: BERT runs as an encoder")
    check_multiple(hf, "hidden_size", "num_attention_heads")
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "intermediate_size": hf["intermediate_size"],
        "max_positions": hf["max_position_embeddings"],
        "type_vocab_size": hf.get("type_vocab_size", 2),
        "norm_eps": hf.get("layer_norm_eps", 1e-12),
        "activation": activation_of(hf, "hidden_act"),
    }


def two_layer_head(
    width: int,
    labels: int,
    first: str,
    second: str,
    *,
    activation: Activation = "tanh",
    pooling: Pooling = "cls",
) -> Scorer:
    """Return a head of two dense layers, second(activation(first(pooled))), and its tensor rules.
    `width` is the dimension of hidden states, `labels` the number of logits. `first` and
    `second` are tensor names without ".weight" and ".bias"."""
    layers = (
        DenseLayer(in_features=width, out_features=width, activation=activation),
        DenseLayer(in_features=width, out_features=labels, activation="identity"),
    )
    rules = (
        *dense_rules("logits", number=0, layer=layers[0], tensor=first),
        *dense_rules("logits", number=1, layer=layers[1], tensor=second),
    )
    return Pooled((pooling,), layers), rules


def two_layer_classifier(
    first: str, second: str, activation: Activation = "tanh", width: str = "hidden_size"
) -> Callable[[Fields, int], Scorer]:
    """Return a function for `Family.classifier` that calls `two_layer_head` with CLS pooling and
    these arguments. `width` is the key of the hidden size in config.json."""
    return lambda hf, labels: two_layer_head(
        hf[width], labels, first, second, activation=activation
    )


FAMILY = Family(
    architecture="bert",
    classes=("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    classifiers=("BertForSequenceClassification",),
    token_classifiers=("BertForTokenClassification",),
    prefixes=("bert.",),
    renames={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    rules=(
        Rule("embeddings.word_embeddings.weight", "tower.embeddings.word.embedding"),
        Rule("embeddings.position_embeddings.weight", "tower.embeddings.position.embedding"),
        Rule("embeddings.token_type_embeddings.weight", "tower.embeddings.type.embedding"),
        Rule("embeddings.LayerNorm.weight", "tower.embeddings.norm.scale"),
        Rule("embeddings.LayerNorm.bias", "tower.embeddings.norm.bias"),
        Rule(
            (f"{SELF}.query.weight", f"{SELF}.key.weight", f"{SELF}.value.weight"),
            f"{TARGET}.attention.qkv.kernel",
            concatenate_transposed,
        ),
        Rule(
            (f"{SELF}.query.bias", f"{SELF}.key.bias", f"{SELF}.value.bias"),
            f"{TARGET}.attention.qkv.bias",
            concatenate,
        ),
        Rule(f"{LAYER}.attention.output.dense.weight", f"{TARGET}.attention.out.kernel", transpose),
        Rule(f"{LAYER}.attention.output.dense.bias", f"{TARGET}.attention.out.bias"),
        Rule(f"{LAYER}.attention.output.LayerNorm.weight", f"{TARGET}.attention_norm.scale"),
        Rule(f"{LAYER}.attention.output.LayerNorm.bias", f"{TARGET}.attention_norm.bias"),
        Rule(f"{LAYER}.intermediate.dense.weight", f"{TARGET}.mlp.up.kernel", transpose),
        Rule(f"{LAYER}.intermediate.dense.bias", f"{TARGET}.mlp.up.bias"),
        Rule(f"{LAYER}.output.dense.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.output.dense.bias", f"{TARGET}.mlp.down.bias"),
        Rule(f"{LAYER}.output.LayerNorm.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{LAYER}.output.LayerNorm.bias", f"{TARGET}.mlp_norm.bias"),
    ),
    # embeddings do not use these tensors; position_ids is 0, 1, 2, ...
    ignored=(
        "embeddings.position_ids",
        "pooler.dense.*",
        "cls.predictions.*",
        "cls.seq_relationship.*",
        "classifier.weight",
        "classifier.bias",
    ),
    config=config,
    classifier=two_layer_classifier("pooler.dense", "classifier"),
    masked_lm=masked_lm_function(  # BertLMPredictionHead
        dense="cls.predictions.transform.dense",
        norms=("cls.predictions.transform.LayerNorm",),
        decoder="cls.predictions.decoder",
        biases=("cls.predictions.bias",),
    ),
)
