"""Converts MiniCPM in bge-reranker-v2-minicpm-layerwise: Llama's layers with scaled outputs."""

from typing import Any

from converters.families import layerwise
from converters.families.decoders import LAYER, SELF, TARGET, decoder_family
from converters.families.gemma import BAAI_TEMPLATE
from converters.families.llama import llama_config
from converters.family import Reranker, Scorer
from converters.fields import refuse_unless
from converters.weights import Rule, transposed_over

CODE = "modeling_minicpm_reranker.LayerWiseMiniCPM"
# the layers whose outputs are scaled, and their parameters
SCALED = {
    f"{SELF}.o_proj.weight": f"{TARGET}.attention.out.kernel",
    f"{LAYER}.mlp.down_proj.weight": f"{TARGET}.mlp.down.kernel",
}


def heads(hf: dict[str, Any]) -> range:
    """Return the numbers of layers with a head after them. Raises UnsupportedModel for heads of
    another kind, whose logits are those of a vocabulary."""
    refuse_unless(hf, {"head_type": ("simple",), "head_multi": (True,)})
    return layerwise.layers_with_heads(hf, start=8, step=1)


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    fields = llama_config(layerwise.cut(hf, heads(hf)), causal=True)
    return fields | {"embedding_scale": float(hf.get("scale_emb", 1))}


def config_rules(hf: dict[str, Any]) -> list[Rule]:
    """Return the rules for the layers whose outputs the model multiplies by scale_depth / sqrt(its
    number of layers), before it adds them to the hidden states; here the weights are multiplied."""
    scale = hf.get("scale_depth", 1) / hf["num_hidden_layers"] ** 0.5
    return [Rule(name, target, transposed_over(1 / scale)) for name, target in SCALED.items()]


def score_head(hf: dict[str, Any], config: dict[str, Any]) -> Scorer:
    """Return the head after the last layer of the backbone, and its tensor rules."""
    return layerwise.head_after(config["num_layers"], heads(hf), config["hidden_size"])


_LLAMA = decoder_family(classes=(), config=config)

FAMILY = decoder_family(
    classes=(),
    generators=("LayerWiseMiniCPMForCausalLM",),
    own_code={"AutoModelForCausalLM": (f"{CODE}Model", f"{CODE}ForCausalLM")},
    rules=tuple(rule for rule in _LLAMA.rules if rule.target not in SCALED.values()),
    config_rules=config_rules,
    config=config,
    score_head=score_head,
    unused=lambda hf: layerwise.unused(hf, heads(hf)),
    reranker=Reranker("minicpm-layerwise", "minicpm-layerwise", BAAI_TEMPLATE, answers=()),
)
