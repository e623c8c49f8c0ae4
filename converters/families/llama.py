"""Converts Llama from transformers 4 and 5, and NVIDIA's bidirectional Llama, `llama_bidirec`.

The backbone is Qwen3's without norms of query and key heads. The own code of llama_bidirec differs
from Llama in the attention mask, the pooling of its classifier and a temperature.
"""

from dataclasses import replace
from typing import Any

from converters.families.decoders import (
    decoder_config,
    decoder_family,
    head_width_of,
    is_causal,
    last_token_classifier,
)
from converters.family import Reranker, Scorer
from converters.fields import lookup
from converters.weights import transposed_over
from jaxembed.data.spec import PairTemplate, Pooling
from jaxembed.errors import CheckpointError

_MODEL = "llama_bidirectional_model.LlamaBidirectionalModel"

POOLINGS_OF_SCORES: dict[str, Pooling] = {"avg": "mean", "cls": "cls", "last": "lasttoken"}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    has_own_code = "AutoModel" in (hf.get("auto_map") or {})
    return llama_config(hf, is_causal(hf, otherwise=not (has_own_code or _is_bidirectional(hf))))


def llama_config(hf: dict[str, Any], causal: bool) -> dict[str, Any]:
    """Return the fields of Qwen3Config for Llama and for families that are built like it. Raises
    UnsupportedModel and CheckpointError, as `decoder_config` does."""
    key_heads = hf.get("num_key_value_heads")  # missing in older configs: one for each head
    hf = hf | {"num_key_value_heads": key_heads or hf.get("num_attention_heads")}
    bias = bool(hf.get("attention_bias", False))
    return decoder_config(hf, head_width_of(hf), causal=causal) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "qk_norm": False,
    }


def classifier(hf: dict[str, Any], labels: int) -> Scorer:
    """Return the classification head and its tensor rules. For Llama it is one linear layer on the
    last token, for llama_bidirec score(pooled) / temperature. Raises UnsupportedModel for an
    unknown pooling, and CheckpointError for a temperature of 0."""
    if not _is_bidirectional(hf):
        return last_token_classifier(hf, labels)
    pooling = lookup("pooling", hf.get("pooling", "avg"), POOLINGS_OF_SCORES)
    temperature = hf.get("temperature", 1.0)
    if not temperature:
        raise CheckpointError(f"temperature is {temperature!r}, wanted a number over 0")
    head, (rule,) = last_token_classifier(hf, labels, pooling)
    return head, (replace(rule, transform=transposed_over(float(temperature))),)


def _is_bidirectional(hf: dict[str, Any]) -> bool:
    return hf["model_type"] == "llama_bidirec"


FAMILY = decoder_family(
    classes=("LlamaModel", "LlamaBidirectionalModel"),
    classifiers=("LlamaForSequenceClassification", "LlamaBidirectionalForSequenceClassification"),
    generators=("LlamaForCausalLM",),
    own_code={
        "AutoModel": (_MODEL,),
        "AutoModelForSequenceClassification": (
            _MODEL,
            "llama_bidirectional_model.LlamaBidirectionalForSequenceClassification",
        ),
    },
    config=config,
    classifier=classifier,
    # The template of vLLM for llama-nemotron-rerank-1b-v2. Scores with it were not compared with
    # those of the model's own code. `second` begins with the colon, because a token may hold the
    # colon and the letter after it.
    reranker=Reranker(
        name="llama-nemotron-rerank",
        quote="question:{query} \\n \\n passage:{passage}",
        template=PairTemplate(
            prefix="<|begin_of_text|>",
            first="question:{query} \n \n passage",
            second=":{document}",
            suffix="",
            instruction="",
        ),
    ),
)
