"""Converts Qwen2 from transformers 4 and 5: Qwen3's backbone with biases, not head norms.

It also converts gte-Qwen2 and stella, whose own code is Qwen2 without the causal mask.
"""

from typing import Any

from converters.families.decoders import decoder_config, decoder_family, head_width_of, is_causal
from converters.families.qwen3 import qwen_windows
from converters.family import Reranker
from jaxembed.data.spec import PairTemplate


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    # models with their own code (auto_map) are bidirectional by default; stella lacks is_causal
    causal = is_causal(hf, otherwise="AutoModel" not in (hf.get("auto_map") or {}))
    return (
        decoder_config(hf, head_width_of(hf), causal=causal)
        | qwen_windows(hf, causal)
        | {
            "qkv_bias": True,
            "out_bias": False,
            "qk_norm": False,
        }
    )


FAMILY = decoder_family(
    classes=("Qwen2Model",),
    classifiers=("Qwen2ForSequenceClassification",),
    generators=("Qwen2ForCausalLM",),
    # The code of Alibaba-NLP/gte-Qwen2-1.5B-instruct, which is never run: the backbone is alike.
    own_code={"AutoModel": ("modeling_qwen.Qwen2Model",)},
    config=config,
    # From mixedbread's mxbai_rerank_v2.py, which tokenizes an instruction by itself. Here a token
    # could span the end of an instruction, so the template takes no instruction.
    reranker=Reranker(
        name="mxbai-rerank",
        quote="You are a search relevance expert who evaluates how well documents match search "
        "queries",
        template=PairTemplate(
            prefix="<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
            "assistant.<|im_end|>\n<|im_start|>user\n",
            first="query: {query}",
            second="\ndocument: {document}",
            suffix="\nYou are a search relevance expert who evaluates how well documents match "
            "search queries. For each query-document pair, carefully analyze the semantic "
            "relationship between them, then provide your binary relevance judgment (0 for not "
            "relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n",
            instruction="",
            query_share=0.75,
        ),
        answers=("1", "0"),
    ),
)
