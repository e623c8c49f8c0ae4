"""Converts ModernBERT from transformers 4 and 5: its config, classifier and tensor rules."""

from typing import Any

from converters.families.rope import rope_by_layers
from converters.family import Family, Scorer, SparseHead, TokenModules
from converters.features.terms import term_head
from converters.fields import (
    GLOBAL_LAYER,
    LOCAL_LAYER,
    activation_of,
    even_head_width,
    layers_of_kind,
    refuse_unknown,
    require,
)
from converters.heads import dense_rules, parameter_of
from converters.weights import Rule, transpose
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import DenseLayer, LayerNormLayer, Pooled
from jaxembed.errors import CheckpointError, UnsupportedModel

LAYER = "layers.{i}"
TARGET = "tower.layers.{i}"

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)

# The base of the rotary angles by layer type: its key and default in transformers 4.
THETAS = {
    GLOBAL_LAYER: ("global_rope_theta", 160_000.0),
    LOCAL_LAYER: ("local_rope_theta", 10_000.0),
}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to ModernBertConfig fields. Raises UnsupportedModel and
    CheckpointError."""
    require(hf, REQUIRED)
    for flag in ("is_decoder", "is_causal", "add_cross_attention"):
        if hf.get(flag):
            raise UnsupportedModel(f"{flag}={hf[flag]} is not supported: ModernBERT is an encoder")
    even_head_width(hf["hidden_size"], hf["num_attention_heads"])  # raises for odd widths
    if hf.get("rope_scaling"):
        raise UnsupportedModel(f"rope_scaling {hf['rope_scaling']} is not supported")
    global_theta = _theta(hf, GLOBAL_LAYER, if_null=None)
    global_layers = layers_of_kind(hf, GLOBAL_LAYER)
    if global_layers is None:  # as in transformers 4
        period = hf.get("global_attn_every_n_layers", 3)
        global_layers = list(range(0, hf["num_hidden_layers"], period))
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "intermediate_size": hf["intermediate_size"],
        "max_positions": hf["max_position_embeddings"],
        "global_layers": global_layers,
        "local_reach": hf.get("local_attention", 128) // 2,  # half on either side
        "global_theta": global_theta,
        "local_theta": _theta(hf, LOCAL_LAYER, if_null=global_theta),
        "norm_eps": float(hf.get("norm_eps", 1e-5)),
        "activation": activation_of(hf, "hidden_activation"),
        "attention_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "norm_bias": bool(hf.get("norm_bias", False)),
    }


def classifier(hf: dict[str, Any], labels: int) -> Scorer:
    """Return the head of ModernBertForSequenceClassification and its tensor rules. It computes
    classifier(norm(activation(dense(pooled)))). Raises UnsupportedModel for an unknown pooling
    or activation."""
    pooling = hf.get("classifier_pooling", "cls")
    refuse_unknown("classifier_pooling", pooling, ("cls", "mean"))
    dense, norm = _prediction_head(hf)
    out = DenseLayer(in_features=norm.features, out_features=labels, activation="identity")
    rules = (
        *_prediction_rules("logits", dense),
        *dense_rules("logits", number=2, layer=out, tensor="classifier"),
    )
    return Pooled((pooling,), (dense, norm, out)), rules


def token_modules(hf: dict[str, Any]) -> TokenModules:
    """Return the head of ModernBertForTokenClassification, which computes
    classifier(norm(activation(dense(hidden state)))), before its last layer, and its tensor rules.
    Raises UnsupportedModel for an unknown activation."""
    dense, norm = _prediction_head(hf)
    return (dense, norm), _prediction_rules("token_logits", dense)


def masked_lm(hf: dict[str, Any]) -> SparseHead:
    """Return the head of ModernBertForMaskedLM and its tensor rules. It computes
    decoder(norm(activation(dense(hidden state)))). Raises UnsupportedModel for an unknown
    activation."""
    return term_head(
        hf,
        _prediction_head(hf),
        dense="head.dense",
        norms=("head.norm",),
        decoder="decoder",
        tied="embeddings.tok_embeddings.weight",
        bias=hf.get("decoder_bias") is not False,
    )


def _prediction_head(hf: dict[str, Any]) -> tuple[DenseLayer, LayerNormLayer]:
    """Return the layers of ModernBertPredictionHead, which classifiers and masked LMs share."""
    width = hf["hidden_size"]
    dense = DenseLayer(
        in_features=width,
        out_features=width,
        bias=bool(hf.get("classifier_bias", False)),
        activation=activation_of(hf, "classifier_activation"),
    )
    norm = LayerNormLayer(
        features=width,
        eps=float(hf.get("norm_eps", 1e-5)),
        bias=bool(hf.get("norm_bias", False)),
    )
    return dense, norm


def _prediction_rules(head: OutputName, dense: DenseLayer) -> tuple[Rule, ...]:
    """Return the rules for the layers of `_prediction_head`, which are the first two modules of
    `head`."""
    return (
        *dense_rules(head, number=0, layer=dense, tensor="head.dense"),
        Rule("head.norm.weight", parameter_of(head, number=1, name="scale")),
        Rule("head.norm.bias", parameter_of(head, number=1, name="bias")),
    )


def _theta(hf: dict[str, Any], kind: str, if_null: float | None) -> float:
    """Return the RoPE theta (base of the rotary angles) of layers of type `kind`. A missing value
    means transformers' default, and null means `if_null`. Raises UnsupportedModel for other
    settings of RoPE, and CheckpointError if the value is null and `if_null` is None."""
    key, default = THETAS[kind]
    parameters = dict(rope_by_layers(hf).get(kind) or {})
    theta = parameters.pop("rope_theta", hf.get(key, default))
    rope_type = parameters.pop("rope_type", "default")
    if rope_type != "default" or parameters:
        raise UnsupportedModel(
            f"rope_parameters.{kind} with rope_type {rope_type!r} and "
            f"{', '.join(parameters) or 'no more'} is not supported; known: rope_type 'default' "
            "and rope_theta"
        )
    theta = if_null if theta is None else theta
    if theta is None:
        raise CheckpointError(f"{key} is {theta!r}, wanted a number over 0")
    return float(theta)


FAMILY = Family(
    architecture="modernbert",
    classes=("ModernBertModel", "ModernBertForMaskedLM"),
    classifiers=("ModernBertForSequenceClassification",),
    token_classifiers=("ModernBertForTokenClassification",),
    token_modules=token_modules,
    prefixes=("model.",),
    rules=(
        Rule("embeddings.tok_embeddings.weight", "tower.embeddings.word.embedding"),
        Rule("embeddings.norm.weight", "tower.embeddings.norm.scale"),
        Rule("embeddings.norm.bias", "tower.embeddings.norm.bias"),
        Rule(f"{LAYER}.attn_norm.weight", f"{TARGET}.attention_norm.scale"),
        Rule(f"{LAYER}.attn_norm.bias", f"{TARGET}.attention_norm.bias"),
        Rule(f"{LAYER}.attn.Wqkv.weight", f"{TARGET}.attention.qkv.kernel", transpose),
        Rule(f"{LAYER}.attn.Wqkv.bias", f"{TARGET}.attention.qkv.bias"),
        Rule(f"{LAYER}.attn.Wo.weight", f"{TARGET}.attention.out.kernel", transpose),
        Rule(f"{LAYER}.attn.Wo.bias", f"{TARGET}.attention.out.bias"),
        Rule(f"{LAYER}.mlp_norm.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{LAYER}.mlp_norm.bias", f"{TARGET}.mlp_norm.bias"),
        Rule(f"{LAYER}.mlp.Wi.weight", f"{TARGET}.mlp.gate_up.kernel", transpose),
        Rule(f"{LAYER}.mlp.Wi.bias", f"{TARGET}.mlp.gate_up.bias"),
        Rule(f"{LAYER}.mlp.Wo.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.mlp.Wo.bias", f"{TARGET}.mlp.down.bias"),
        Rule("final_norm.weight", "tower.norm.scale"),
        Rule("final_norm.bias", "tower.norm.bias"),
    ),
    # embeddings do not use these tensors; masked LMs and classifiers share names
    ignored=("head.dense.*", "head.norm.*", "decoder.*", "classifier.*"),
    config=config,
    classifier=classifier,
    masked_lm=masked_lm,
)
