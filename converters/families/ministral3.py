"""Converts Ministral 3 from transformers: Mistral whose queries grow with their position."""

from typing import Any

from converters.families.decoders import decoder_config, decoder_family, is_causal
from converters.families.mistral import mistral_windows
from converters.families.rope import ORIGINAL, rope_fields, rope_parameters
from jaxembed.errors import CheckpointError

HEAD_WIDTH = 128  # default head_dim of every Ministral 3
BETA = "llama_4_scaling_beta"


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    if not (hf.get("rope_scaling") or hf.get("rope_parameters")):
        raise CheckpointError("config.json lacks rope_parameters, which Ministral 3 needs")
    causal, width = is_causal(hf, otherwise=True), hf.get("head_dim") or HEAD_WIDTH
    # keys of Ministral 3 alone; max_position_embeddings is a copy of the field of config.json
    rope = rope_fields(hf, width, ignored=(BETA, "max_position_embeddings", ORIGINAL))
    fields = decoder_config(hf, width, causal=causal, rope=rope, norm_eps=1e-5)
    fields |= mistral_windows(hf, causal, hf.get("sliding_window"))
    # queries are multiplied by 1 + beta * ln(1 + position // length)
    parameters = rope_parameters(hf)
    if beta := parameters.get(BETA):
        length = hf.get(ORIGINAL) or parameters.get(ORIGINAL)
        if length is None:
            raise CheckpointError(
                f"{ORIGINAL} is {length!r}, wanted a whole number over 0 beside {BETA} {beta}"
            )
        fields |= {"query_growth": float(beta), "query_growth_length": length}
    return fields | {"qkv_bias": False, "out_bias": False, "qk_norm": False}


FAMILY = decoder_family(
    classes=("Ministral3Model",),
    classifiers=("Ministral3ForSequenceClassification",),
    generators=("Ministral3ForCausalLM",),
    config=config,
)
