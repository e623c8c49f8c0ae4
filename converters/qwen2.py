"""Converts Qwen2 from transformers 4 and 5: Qwen3's tower with biases instead of head norms.

It also converts gte-Qwen2 and stella, whose own code is Qwen2 without the causal mask.
"""

from typing import Any

from converters import decoders
from converters.decoders import decoder_config, head_width_of, is_causal
from converters.qwen3 import qwen_windows

ARCHITECTURE = decoders.ARCHITECTURE

CLASSES = ("Qwen2Model",)
CLASSIFIERS = ("Qwen2ForSequenceClassification",)
GENERATORS = ("Qwen2ForCausalLM",)

PREFIXES, RENAMES = decoders.PREFIXES, decoders.RENAMES
RULES, IGNORED = decoders.RULES, decoders.IGNORED
classifier, score_head = decoders.last_token_classifier, decoders.answer_head

# The code of Alibaba-NLP/gte-Qwen2-1.5B-instruct: we do not run it, but our tower does the same.
OWN_CODE = {"AutoModel": ("modeling_qwen.Qwen2Model",)}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of Qwen3Config from a config.json.

    Raises UnsupportedModel for settings that we do not run, and CheckpointError for missing or
    inconsistent ones.
    """
    # models with their own code (auto_map) are not causal by default; stella's config lacks the key
    causal = is_causal(hf, "AutoModel" not in (hf.get("auto_map") or {}))
    return (
        decoder_config(hf, head_width_of(hf), causal=causal)
        | qwen_windows(hf, causal)
        | {
            "qkv_bias": True,
            "out_bias": False,
            "qk_norm": False,
        }
    )
