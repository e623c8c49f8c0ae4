"""Converts Mistral from transformers 4 and 5: Llama with a window in every layer."""

from typing import Any

from converters.families.decoders import decoder_family, is_causal, window_fields
from converters.families.llama import llama_config
from jaxembed.errors import UnsupportedModel


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    causal = is_causal(hf, otherwise=True)
    fields = llama_config(hf, causal) | {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
    return fields | mistral_windows(hf, causal, hf.get("sliding_window", 4096))


def mistral_windows(hf: dict[str, Any], causal: bool, window: Any) -> dict[str, Any]:
    """Return the window fields of Qwen3Config for a window of `window` tokens in every layer; if it
    is None, no layer has a window. Raises UnsupportedModel if layer_types, which transformers'
    classes ignore, names other layers, and CheckpointError for wrong layer_types or window."""
    window_layers = range(0 if window is None else hf["num_hidden_layers"])
    fields = window_fields(hf | {"layer_types": None}, window, window_layers, causal)
    if window_fields(hf, window, window_layers, causal) != fields:
        raise UnsupportedModel(
            f"layer_types of {hf['model_type']} are not supported beside sliding_window {window}: "
            "every layer has the window"
        )
    return fields


FAMILY = decoder_family(
    classes=("MistralModel",),
    classifiers=("MistralForSequenceClassification",),
    generators=("MistralForCausalLM",),
    config=config,
)
