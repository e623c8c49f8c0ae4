"""Converts Mistral from transformers 4 and 5: Llama with a window in every layer."""

from typing import Any

from converters.families.decoders import decoder_family, is_causal, window_fields
from converters.families.llama import llama_config
from jaxembed.errors import UnsupportedModel


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of Qwen3Config from a config.json."""
    causal = is_causal(hf, True)
    fields = llama_config(hf, causal) | {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
    return fields | mistral_windows(hf, causal, hf.get("sliding_window", 4096))


def mistral_windows(hf: dict[str, Any], causal: bool, window: Any) -> dict[str, Any]:
    """The window of every layer, unless `window` is None. Raises UnsupportedModel for layer_types
    that say otherwise: transformers' classes do not read them."""
    layers = range(0 if window is None else hf["num_hidden_layers"])
    everywhere = window_fields(hf | {"layer_types": None}, window, layers, causal)
    if window_fields(hf, window, layers, causal) != everywhere:
        raise UnsupportedModel(
            f"layer_types of {hf['model_type']} are not supported beside sliding_window {window}: "
            "every layer has the window"
        )
    return everywhere


FAMILY = decoder_family(
    classes=("MistralModel",),
    classifiers=("MistralForSequenceClassification",),
    generators=("MistralForCausalLM",),
    config=config,
)
