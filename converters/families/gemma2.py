"""Converts Gemma 2 from transformers 4 and 5, as in bge-multilingual-gemma2."""

from typing import Any

from converters.families import gemma3
from converters.families.decoders import decoder_family, is_causal, window_fields
from converters.families.gemma3 import gemma_config
from jaxembed.errors import UnsupportedModel


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModel(
            "use_bidirectional_attention is not supported in Gemma 2, where transformers applies "
            "it only in some implementations of attention; known: is_causal=false"
        )
    cap = hf.get("attn_logit_softcapping", 50.0)
    causal = is_causal(hf, otherwise=True)
    fields = gemma_config(hf, causal) | {"qk_norm": False}
    window_layers = range(0, hf["num_hidden_layers"], 2)  # every second layer
    fields |= window_fields(hf, hf.get("sliding_window", 4096), window_layers, causal)
    return fields if cap is None else fields | {"score_cap": float(cap)}


FAMILY = decoder_family(
    classes=("Gemma2Model",),
    classifiers=("Gemma2ForSequenceClassification",),
    generators=("Gemma2ForCausalLM",),
    rules=gemma3.FAMILY.rules,  # those of head norms apply only to Gemma 3
    config=config,
    # a missing key means a soft cap of the logits; null means none
    score_head=lambda hf, *rest: gemma3.score_head({"final_logit_softcapping": 30.0} | hf, *rest),
)
