"""Tensor rules, config fields, windows and heads that the converters of decoders share."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from converters.families.rope import rope_fields, scaled_positions
from converters.family import Family, Scorer
from converters.fields import (
    CONFIG_FIELDS,
    LOCAL_LAYER,
    activation_of,
    check_fields,
    check_multiple,
    given,
    layers_of_kind,
    refuse_unknown,
    require,
)
from converters.heads import parameter_of
from converters.weights import (
    Rule,
    concatenate,
    concatenate_transposed,
    difference_of_rows,
    transpose,
)
from jaxembed.data.spec import DenseLayer, Pooled, Pooling
from jaxembed.errors import CheckpointError

LAYER = "layers.{i}"
SELF = f"{LAYER}.self_attn"
TARGET = "tower.layers.{i}"

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def decoder_config(
    hf: dict[str, Any],
    head_width: int,
    *,
    causal: bool,
    rope: dict[str, Any] | None = None,
    activation: str = "hidden_act",
    norm_eps: float = 1e-6,
) -> dict[str, Any]:
    """Return the fields of Qwen3Config that all decoders have.

    `head_width` is the dimension of a head, `rope` has the fields of the rotary positions (None:
    those of `rope_fields`), `activation` is the key of the activation, and `norm_eps` the default
    of rms_norm_eps. Raises UnsupportedModel for settings that jaxembed does not run, and
    CheckpointError for missing or inconsistent ones.
    """
    require(hf, REQUIRED)
    if head_width % 2:
        raise CheckpointError(
            f"heads are {head_width} wide; wanted an even number, to rotate pairs"
        )
    check_multiple(hf, "num_attention_heads", "num_key_value_heads")
    rope = rope_fields(hf, head_width) if rope is None else rope
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "num_key_heads": hf["num_key_value_heads"],
        "head_width": head_width,
        "intermediate_size": hf["intermediate_size"],
        "max_positions": scaled_positions(hf, rope["rope_scaling"]),
        **{name: value for name, value in rope.items() if value is not None},
        "norm_eps": float(hf.get("rms_norm_eps", norm_eps)),
        "activation": activation_of(hf, activation, default="silu"),
        "causal": causal,
    }


def flattened(
    hf: dict[str, Any], folder: Path, *, kinds: Sequence[str], defaults: dict[str, Any]
) -> dict[str, Any]:
    """Return `hf` with the fields of its text_config, and with `defaults` for missing ones. `kinds`
    are the known model_types of text_config, and `folder` is that of config.json. Raises
    UnsupportedModel for another kind, and CheckpointError for a field of a wrong type."""
    text = given(hf.get("text_config") or {})
    check_fields(f"{folder / 'config.json'}, text_config", text, CONFIG_FIELDS)
    refuse_unknown("text_config of model_type", text.get("model_type", kinds[0]), kinds)
    return defaults | text | hf


def head_width_of(hf: dict[str, Any]) -> int:
    """Return the dimension of a head: head_dim, else hidden_size / num_attention_heads. Raises
    CheckpointError if hidden_size or num_attention_heads is missing, or if their quotient is needed
    and is no whole number."""
    require(hf, ("hidden_size", "num_attention_heads"))
    if hf.get("head_dim"):
        return hf["head_dim"]
    check_multiple(hf, "hidden_size", "num_attention_heads")
    return hf["hidden_size"] // hf["num_attention_heads"]


def is_causal(hf: dict[str, Any], otherwise: bool) -> bool:
    """Return whether config.json asks for causal attention; `otherwise` if it does not say. The
    keys are is_causal and use_bidirectional_attention. Raises CheckpointError if both are true."""
    causal, both_ways = hf.get("is_causal"), hf.get("use_bidirectional_attention")
    if causal and both_ways:
        raise CheckpointError(
            "is_causal and use_bidirectional_attention are both true; wanted one of them"
        )
    if both_ways:
        return False
    return otherwise if causal is None else bool(causal)


def window_fields(
    hf: dict[str, Any], window: Any, layers: Sequence[int], causal: bool
) -> dict[str, Any]:
    """Return local_layers and local_reach of Qwen3Config; empty if no layer has a window.

    The layers with a window are those that layer_types names, else `layers`. `window` is
    sliding_window, in tokens. Raises UnsupportedModel for an unknown layer type, and
    CheckpointError for a missing window or layer_types of another length.
    """
    stated_layers = layers_of_kind(hf, LOCAL_LAYER)
    layers = layers if stated_layers is None else stated_layers
    if not layers:
        return {}
    if not window:
        raise CheckpointError(
            f"sliding_window is {window!r}, wanted a whole number over 0 for the layers with a "
            "window"
        )
    # transformers' causal window counts the token itself; other windows count one side's tokens
    return {"local_layers": list(layers), "local_reach": window - 1 if causal else window}


def last_token_classifier(
    hf: dict[str, Any], labels: int, pooling: Pooling = "lasttoken"
) -> Scorer:
    """Return the head of transformers' GenericForSequenceClassification, and its tensor rules. It
    is one linear layer from the pooled hidden state to `labels` logits."""
    kernel = Rule("score.weight", parameter_of("logits", number=0, name="kernel"), transpose)
    return Pooled((pooling,), (_logit_layer(hf, labels),)), (kernel,)


def answer_head(
    hf: dict[str, Any], config: dict[str, Any], true_id: int, false_id: int | None = None
) -> Scorer:
    """Return a head for logit(true_id) - logit(false_id) at the last token, or for logit(true_id)
    alone, and its tensor rules. `hf` is the content of config.json, `config` has the fields of the
    backbone's config. Only the rows of these ids are converted from the language model's head."""
    table = "embed_tokens.weight" if hf.get("tie_word_embeddings") else "lm_head.weight"
    difference = difference_of_rows(true_id, false_id)
    kernel = Rule(table, parameter_of("logits", number=0, name="kernel"), difference)
    return Pooled(("lasttoken",), (_logit_layer(config, labels=1),)), (kernel,)


def _logit_layer(config: dict[str, Any], labels: int) -> DenseLayer:
    """Return a linear layer without bias, from the hidden state to `labels` logits."""
    return DenseLayer(
        in_features=config["hidden_size"], out_features=labels, bias=False, activation="identity"
    )


# Makes a Family of decoders. Callers add the family's classes and `config`.
decoder_family = partial(
    Family,
    architecture="qwen3",
    prefixes=("model.",),
    rules=(
        Rule("embed_tokens.weight", "tower.embeddings.word.embedding"),
        Rule(f"{LAYER}.input_layernorm.weight", f"{TARGET}.attention_norm.scale"),
        Rule(
            (f"{SELF}.q_proj.weight", f"{SELF}.k_proj.weight", f"{SELF}.v_proj.weight"),
            f"{TARGET}.attention.qkv.kernel",
            concatenate_transposed,
        ),
        Rule(
            (f"{SELF}.q_proj.bias", f"{SELF}.k_proj.bias", f"{SELF}.v_proj.bias"),
            f"{TARGET}.attention.qkv.bias",
            concatenate,
        ),
        Rule(f"{SELF}.q_norm.weight", f"{TARGET}.attention.query_norm.scale"),
        Rule(f"{SELF}.k_norm.weight", f"{TARGET}.attention.key_norm.scale"),
        Rule(f"{SELF}.o_proj.weight", f"{TARGET}.attention.out.kernel", transpose),
        Rule(f"{SELF}.o_proj.bias", f"{TARGET}.attention.out.bias"),
        Rule(f"{LAYER}.post_attention_layernorm.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(
            (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
            f"{TARGET}.mlp.gate_up.kernel",
            concatenate_transposed,
        ),
        Rule(
            (f"{LAYER}.mlp.gate_proj.bias", f"{LAYER}.mlp.up_proj.bias"),
            f"{TARGET}.mlp.gate_up.bias",
            concatenate,
        ),
        Rule(f"{LAYER}.mlp.down_proj.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.mlp.down_proj.bias", f"{TARGET}.mlp.down.bias"),
        Rule("norm.weight", "tower.norm.scale"),
    ),
    # embeddings do not use this tensor; files may hold it even if it is tied
    ignored=("lm_head.weight",),
    classifier=last_token_classifier,
    score_head=answer_head,
)
