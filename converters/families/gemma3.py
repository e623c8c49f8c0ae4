"""Converts the text model of Gemma 3 from transformers 4 and 5, as in EmbeddingGemma."""

import logging
from typing import Any

from converters.families import qwen3
from converters.families.decoders import (
    LAYER,
    SELF,
    TARGET,
    answer_head,
    decoder_config,
    decoder_family,
    is_causal,
    window_fields,
)
from converters.families.rope import read_parameters, rope_by_layers
from converters.family import Scorer
from converters.fields import GLOBAL_LAYER, LOCAL_LAYER
from converters.weights import Rule, one_plus
from jaxembed.errors import UnsupportedModel

logger = logging.getLogger(__name__)

HEAD_WIDTH = 256  # default head_dim of every Gemma
# keys of a number n, where every n-th layer has no window
EVERY = ("sliding_window_pattern", "_sliding_window_pattern")


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    if hf.get("attn_logit_softcapping") is not None:
        raise UnsupportedModel(
            f"attn_logit_softcapping {hf['attn_logit_softcapping']} is not supported in Gemma 3"
        )
    causal = is_causal(hf, otherwise=True)
    # global and local layers have separate angles; transformers 4 scales only the global ones
    by_kind = rope_by_layers(hf)
    width = hf.get("head_dim") or HEAD_WIDTH
    global_rope = (by_kind.get(GLOBAL_LAYER) or {}) | (hf.get("rope_scaling") or {})
    rope = read_parameters(hf, width, global_rope, hf.get("rope_theta", 1e6))
    local_parameters = by_kind.get(LOCAL_LAYER) or {}
    local_rope = read_parameters(hf, width, local_parameters, hf.get("rope_local_base_freq", 1e4))
    if local_rope["rope_scaling"] is not None:
        raise UnsupportedModel(
            f"rope_parameters.{LOCAL_LAYER} {local_parameters} are not supported: angles of layers "
            "with a window are not scaled"
        )
    fields = gemma_config(hf, causal, rope=rope | {"local_theta": local_rope["rope_theta"]})
    # all layers but every period-th have a window
    window = hf.get("sliding_window", 4096)
    period = next((hf[key] for key in EVERY if hf.get(key) is not None), 6)
    window_layers = [layer for layer in range(hf["num_hidden_layers"]) if (layer + 1) % period]
    windows = window_fields(hf, window, window_layers, causal)
    if windows and hf.get("use_bidirectional_attention"):  # half of the window is on either side
        if window % 2:
            logger.warning(
                "sliding_window %d is odd, perhaps because an older transformers halved it when it "
                "saved the model; if the published value is %d, set it in config.json",
                window,
                (window - 1) * 2,
            )
        windows["local_reach"] = window // 2
    return fields | windows | {"qk_norm": True}


def gemma_config(
    hf: dict[str, Any], causal: bool, rope: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of Qwen3Config that all Gemma families read alike. `rope` has the fields of
    the rotary positions (None: those of `rope_fields`). Raises UnsupportedModel and
    CheckpointError, as `decoder_config` does."""
    width, bias = hf.get("head_dim") or HEAD_WIDTH, bool(hf.get("attention_bias", False))
    scalar = hf.get("query_pre_attn_scalar", 256)
    defaults = {"hidden_activation": "gelu_pytorch_tanh"}
    return decoder_config(
        defaults | hf, width, causal=causal, rope=rope, activation="hidden_activation"
    ) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "block_norms": True,
        # scores are divided by sqrt(query_pre_attn_scalar) instead of sqrt(head width)
        "query_scale": (width / scalar) ** 0.5,
        "overflows_float16": True,
    }


def score_head(hf: dict[str, Any], config: dict[str, Any], *answers: int) -> Scorer:
    """Return the head that `answer_head` makes for these ids, and its tensor rules. Raises
    UnsupportedModel if logits have a soft cap, because then their difference is not linear in the
    hidden state."""
    if hf.get("final_logit_softcapping") is not None:
        raise UnsupportedModel(
            f"final_logit_softcapping {hf['final_logit_softcapping']} is not supported in a "
            "language model that scores"
        )
    # transformers shares the word embeddings with the head unless config.json says otherwise
    return answer_head({"tie_word_embeddings": True} | hf, config, *answers)


FAMILY = decoder_family(
    classes=("Gemma3TextModel",),
    classifiers=("Gemma3TextForSequenceClassification",),
    generators=("Gemma3ForCausalLM",),
    rules=(
        *(rule for rule in qwen3.FAMILY.rules if not rule.target.endswith(".scale")),
        # Norms multiply by 1 + weight. Each block has one before it and one after it.
        Rule(f"{LAYER}.input_layernorm.weight", f"{TARGET}.attention_norm.scale", one_plus),
        Rule(
            f"{LAYER}.post_attention_layernorm.weight",
            f"{TARGET}.attention_out_norm.scale",
            one_plus,
        ),
        Rule(f"{LAYER}.pre_feedforward_layernorm.weight", f"{TARGET}.mlp_norm.scale", one_plus),
        Rule(
            f"{LAYER}.post_feedforward_layernorm.weight", f"{TARGET}.mlp_out_norm.scale", one_plus
        ),
        Rule(f"{SELF}.q_norm.weight", f"{TARGET}.attention.query_norm.scale", one_plus),
        Rule(f"{SELF}.k_norm.weight", f"{TARGET}.attention.key_norm.scale", one_plus),
        Rule("norm.weight", "tower.norm.scale", one_plus),
    ),
    config=config,
    score_head=score_head,
)
