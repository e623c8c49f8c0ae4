"""Converts Qwen2 from transformers 4 and 5: Qwen3's tower with biases instead of head norms.

It also converts gte-Qwen2 and stella, whose own code is Qwen2 without the causal mask.
"""

from typing import Any

from converters import qwen3
from converters.fields import require
from jaxembed.errors import CheckpointError

ARCHITECTURE = qwen3.ARCHITECTURE

CLASSES = ("Qwen2Model",)
CLASSIFIERS = ("Qwen2ForSequenceClassification",)
GENERATORS = ("Qwen2ForCausalLM",)

PREFIXES, RENAMES = qwen3.PREFIXES, qwen3.RENAMES
RULES, IGNORED = qwen3.RULES, qwen3.IGNORED
classifier, score_head = qwen3.classifier, qwen3.score_head

# The code of Alibaba-NLP/gte-Qwen2-1.5B-instruct: we do not run it, but our tower does the same.
OWN_CODE = "modeling_qwen.Qwen2Model"


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of Qwen3Config from a config.json.

    Raises UnsupportedModel for settings that we do not run, and CheckpointError for missing or
    inconsistent ones.
    """
    require(hf, qwen3.REQUIRED)
    width, rest = divmod(hf["hidden_size"], hf["num_attention_heads"])
    if rest:
        raise CheckpointError(
            f"hidden_size {hf['hidden_size']} is not a multiple of num_attention_heads "
            f"{hf['num_attention_heads']}"
        )
    # models with their own code (auto_map) are not causal by default; stella's config lacks the key
    return qwen3.decoder_config(hf, hf.get("head_dim") or width) | {
        "qkv_bias": True,
        "out_bias": False,
        "qk_norm": False,
        "causal": qwen3.is_causal(hf, "AutoModel" not in (hf.get("auto_map") or {})),
    }
