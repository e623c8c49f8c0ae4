"""Converts Gemma 2 in bge-reranker-v2.5-gemma2-lightweight, without its compression of tokens."""

from typing import Any

from msgspec.structs import replace

from converters.families import gemma2, layerwise
from converters.families.decoders import decoder_family
from converters.families.gemma import BAAI_TEMPLATE
from converters.family import Reranker, Scorer
from converters.fields import refuse_unknown
from converters.heads import parameter_of
from converters.weights import Rule, constant, transposed_over
from jaxembed.data.spec import DenseLayer, Pooled

REPO = "BAAI/bge-reranker-v2.5-gemma2-lightweight--"
_CODE = tuple(
    f"{repo}gemma_model.CostWiseGemma{name}"
    for repo in ("", REPO)
    for name in ("Model", "ForCausalLM")
)
SCALE = parameter_of("logits", number=1, name="kernel")


def heads(hf: dict[str, Any]) -> range:
    """Return the numbers of layers with a head after them. Raises UnsupportedModel for a model with
    the one head of a language model."""
    refuse_unknown("layer_wise", hf.get("layer_wise", False), (True,))
    return layerwise.layers_with_heads(hf, start=28, step=28)


def score_head(hf: dict[str, Any], config: dict[str, Any]) -> Scorer:
    """Return the head after the last layer of the backbone, and its tensor rules. Its logit x has a
    soft cap c, final_logit_softcapping: c tanh(x / c)."""
    head, (rule,) = layerwise.head_after(config["num_layers"], heads(hf), config["hidden_size"])
    cap = hf.get("final_logit_softcapping", 30.0)
    if cap is None:
        return head, (rule,)
    bounded = DenseLayer(config["hidden_size"], 1, bias=False, activation="tanh")
    scale = DenseLayer(1, 1, bias=False, activation="identity")
    divided = Rule(rule.sources, rule.target, transposed_over(float(cap)))
    return Pooled(head.pooling, (bounded, scale)), (divided, Rule((), SCALE, constant(cap, 1, 1)))


FAMILY = decoder_family(
    classes=(),
    generators=("CostWiseGemmaForCausalLM",),
    own_code={"AutoModelForCausalLM": _CODE},
    rules=gemma2.FAMILY.rules,
    config=lambda hf: gemma2.config(layerwise.cut(hf, heads(hf))),
    score_head=score_head,
    unused=lambda hf: layerwise.unused(hf, heads(hf)),
    reranker=Reranker(
        "gemma2-lightweight",
        "gemma2-lightweight",
        replace(BAAI_TEMPLATE, suffix="Predict whether passage B contains an answer to query A."),
        answers=(),
    ),
)
