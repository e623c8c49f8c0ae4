"""Converts Gemma 1 from transformers 4 and 5, as in bge-reranker-v2-gemma. Has the template of all
of BAAI's rerankers on language models."""

from dataclasses import replace
from typing import Any

from converters.families import qwen3
from converters.families.decoders import decoder_family, is_causal
from converters.families.gemma3 import HEAD_WIDTH, gemma_config, score_head
from converters.family import Reranker
from converters.weights import one_plus
from jaxembed.data.spec import PairTemplate

# From FlagEmbedding, inference/reranker/decoder_only/base.py. Each line is tokenized by itself.
BAAI_TEMPLATE = PairTemplate(
    prefix="{bos}",
    first="A: {query}",
    second="B: {document}",
    suffix="Given a query A and a passage B, determine whether the passage contains an answer to "
    "the query by providing a prediction of either 'Yes' or 'No'.",
    separator="\n",
    instruction="",
    query_share=0.75,
)


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    # the published "gelu" means its approximation by tanh, as in transformers
    name = hf.get("hidden_activation") or hf.get("hidden_act")
    if name in (None, "gelu"):
        name = "gelu_pytorch_tanh"
    width = hf.get("head_dim") or HEAD_WIDTH
    fields = gemma_config(
        hf | {"hidden_activation": name, "query_pre_attn_scalar": width},
        is_causal(hf, otherwise=True),
    )
    return fields | {"block_norms": False, "qk_norm": False}


FAMILY = decoder_family(
    classes=("GemmaModel",),
    classifiers=("GemmaForSequenceClassification",),
    generators=("GemmaForCausalLM",),
    rules=tuple(
        replace(rule, transform=one_plus) if rule.target.endswith(".scale") else rule
        for rule in qwen3.FAMILY.rules
    ),
    config=config,
    score_head=score_head,
    reranker=Reranker(
        name="bge-reranker-v2-gemma",
        quote="bge-reranker-v2-gemma",
        template=BAAI_TEMPLATE,
        answers=("Yes",),
    ),
)
