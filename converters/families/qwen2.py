"""Converts Qwen2 from transformers 4 and 5: Qwen3's tower with biases instead of head norms.

It also converts gte-Qwen2 and stella, whose own code is Qwen2 without the causal mask.
"""

from typing import Any

from converters.families import decoders
from converters.families.decoders import decoder_config, head_width_of, is_causal
from converters.families.qwen3 import qwen_windows
from converters.features.rerankers import Reranker
from jaxembed.data.spec import PairTemplate

ARCHITECTURE = decoders.ARCHITECTURE

CLASSES = ("Qwen2Model",)
CLASSIFIERS = ("Qwen2ForSequenceClassification",)
GENERATORS = ("Qwen2ForCausalLM",)

PREFIXES, RENAMES = decoders.PREFIXES, decoders.RENAMES
RULES, IGNORED = decoders.RULES, decoders.IGNORED
classifier, score_head = decoders.last_token_classifier, decoders.answer_head

# The code of Alibaba-NLP/gte-Qwen2-1.5B-instruct: we do not run it, but our tower does the same.
OWN_CODE = {"AutoModel": ("modeling_qwen.Qwen2Model",)}

# From mixedbread's mxbai_rerank_v2.py. An instruction would be a part of its own, whose end could
# join a token with what follows it here, so that the template takes none.
RERANKER = Reranker(
    name="mxbai-rerank",
    quote="You are a search relevance expert who evaluates how well documents match search queries",
    template=PairTemplate(
        prefix="<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.<|im_end|>\n<|im_start|>user\n",
        first="query: {query}",
        second="\ndocument: {document}",
        suffix="\nYou are a search relevance expert who evaluates how well documents match search "
        "queries. For each query-document pair, carefully analyze the semantic relationship "
        "between them, then provide your binary relevance judgment (0 for not relevant, 1 for "
        "relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n",
        instruction="",
        query_share=0.75,
    ),
    answers=("1", "0"),
)


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
