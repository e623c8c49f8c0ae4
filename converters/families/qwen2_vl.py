"""Converts jina-reranker-m0: Qwen2-VL, whose last hidden state a head of two layers scores.

ColQwen2 has the same language model.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from converters.families.decoders import (
    decoder_config,
    decoder_family,
    flattened,
    head_width_of,
    is_causal,
)
from converters.families.qwen3 import qwen_windows
from converters.families.rope import mrope_sections, read_parameters, rope_parameters
from converters.family import Reranker, Scorer
from converters.heads import dense_rules, parameter_of
from converters.weights import Rule, plus
from jaxembed.data.spec import DenseLayer, PairTemplate, Pooled
from jaxembed.errors import CheckpointError, UnsupportedModel

# transformers' defaults for missing fields of the language model.
LM_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
}
LM_NORM_EPS, LM_THETA, ROPE_SECTIONS = 1e-5, 1_000_000.0, (16, 24, 24)

# From jina-reranker-m0's modeling.py.
JINA = "JinaVLForRanking"
MAX_TOKENS = 10_240  # of a pair
SCORE_ID = 100  # the last token, a byte that is no character
LOGIT_BIAS = 2.65  # is subtracted from logits


def text_config(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Qwen3Config for a text_config. rope_sections counts the pairs of
    dimensions that rotate with a token's time, row and column. Raises UnsupportedModel and
    CheckpointError."""
    hf = {**LM_DEFAULTS, **stated}
    parameters = dict(rope_parameters(hf))
    if parameters.get("rope_type", parameters.get("type")) == "mrope":
        parameters["rope_type"] = "default"
    width, theta = head_width_of(hf), hf.get("rope_theta", LM_THETA)
    rope = read_parameters(hf, width, parameters, theta, ignored=("mrope_section",))
    if rope["rope_scaling"] is not None:
        raise UnsupportedModel(
            f"rope_type {rope['rope_scaling']['kind']!r} with mrope_section is not supported; "
            "known: default"
        )
    sections = mrope_sections(parameters, ROPE_SECTIONS, width)
    causal = is_causal(hf, otherwise=True)
    return (
        decoder_config(hf, width, causal=causal, rope=rope, norm_eps=LM_NORM_EPS)
        | qwen_windows(hf, causal)
        | {"qkv_bias": True, "out_bias": False, "qk_norm": False, "rope_sections": sections}
    )


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert a config.json with the fields of its text_config to Qwen3Config fields. Raises
    UnsupportedModel and CheckpointError."""
    fields = text_config(hf)
    return fields | {"max_positions": min(fields["max_positions"], MAX_TOKENS)}


def score_head(hf: dict[str, Any], config: dict[str, Any]) -> Scorer:
    """Return the head at the last token, and its tensor rules; its last bias includes LOGIT_BIAS.
    Raises CheckpointError if the vocabulary lacks the last token."""
    if config["vocab_size"] <= SCORE_ID:
        raise CheckpointError(
            f"vocab_size is {config['vocab_size']}, and a pair ends with the token {SCORE_ID}"
        )
    width = config["hidden_size"]
    layers = (
        DenseLayer(width, width, activation="relu"),
        DenseLayer(width, 1, activation="identity"),
    )
    bias = Rule("score.2.bias", parameter_of("logits", 1, "bias"), plus(-LOGIT_BIAS))
    hidden, (kernel, _) = (
        dense_rules("logits", number, layer, f"score.{2 * number}")  # 1 is the activation
        for number, layer in enumerate(layers)
    )
    return Pooled(("lasttoken",), layers), (*hidden, kernel, bias)


FAMILY = decoder_family(
    classes=(),
    generators=(JINA,),
    own_code={
        "AutoModelForCausalLM": tuple(
            f"{repo}modeling.{JINA}" for repo in ("", "jinaai/jina-reranker-m0--")
        )
    },
    prefixes=("model.", "language_model.", "model."),
    images=("converters.vision.qwen_vl", "visual.*"),
    completed=partial(flattened, kinds=("qwen2_vl_text", "qwen2_vl"), defaults=LM_DEFAULTS),
    config=config,
    score_head=score_head,
    # Tokens can span the end of a document and a line break, but not "**" and "Query".
    reranker=Reranker(
        name="jina-reranker-m0",
        quote="jina-reranker-m0",
        template=PairTemplate(
            prefix="",
            first="Query**:\n{query}",
            second="**Document**:\n{document}\n**",
            suffix="",
            instruction="",
            document_first=True,
            end_ids=(SCORE_ID,),
        ),
        answers=(),
    ),
)
