"""Converts JinaBERT v2, its code variant and jina-reranker-v1: BERT with ALiBi and a gated MLP.

Their configs name BERT. The code variant, jina-embeddings-v2-base-code, has norms of queries and
keys, one more norm in each layer, and other names.
"""

from pathlib import Path
from typing import Any

from converters.families import bert
from converters.family import Family
from converters.fields import refuse_unless
from converters.weights import Rule, safetensors_of, swap_halves_transposed, transpose

VARIANTS = ("jina-bert-implementation", "jina-bert-v2-qk-post-norm")  # repositories of code

# The models' own code, which is never run: the tower does the same.
_PLACES = ("", *(f"jinaai/{variant}--" for variant in VARIANTS))
_TOWERS = tuple(f"{place}modeling_bert.JinaBertModel" for place in _PLACES)
_SCORER = "modeling_bert.JinaBertForSequenceClassification"

LAYER = "encoder.layer.{i}"
SELF = f"{LAYER}.attention.self"
TARGET = "tower.layers.{i}"

# The values that the tower runs of switches of the models' own code, and where they are missing.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("alibi",),
    "feed_forward_type": ("geglu",),
    "emb_pooler": ("mean", None),
}
ABSENT = {"position_embedding_type": "absolute", "feed_forward_type": "original"}


def is_jina_bert(hf: dict[str, Any]) -> bool:
    """Whether a config of BERT is of this family, whose tensors have other names."""
    codes, classes = hf.get("auto_map") or {}, hf.get("architectures") or ()
    own = any("JinaBert" in str(name) for name in (*codes.values(), *classes))
    return own or hf.get("position_embedding_type") == "alibi"


def completed(hf: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the variant that the weights show, if it names none and they are there.

    A model that was tuned and saved again names its code as a file beside it.
    """
    file = folder / "model.safetensors"
    if _named_variants(hf) or not file.is_file():
        return hf
    is_code_variant = any("layer_norm_q" in name for name in safetensors_of(file))
    return hf | {"_name_or_path": VARIANTS[is_code_variant]}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of BertConfig from a config.json."""
    refuse_unless(ABSENT | hf, SWITCHES)
    # the gate has an activation of its own, so that hidden_act is not read
    fields = bert.config(hf | {"position_embedding_type": "absolute", "hidden_act": "gelu"})
    has_more_norms = VARIANTS[1] in _named_variants(hf)
    return fields | {
        "alibi": True,
        "qk_norm": has_more_norms,
        "residual_norm": has_more_norms,
        "gated": True,
        "up_bias": False,
    }


def config_rules(hf: dict[str, Any]) -> list[Rule]:
    """The rules for the MLP, which the two variants name in their own ways."""
    first, last, norm = "mlp.gated_layers", "mlp.wo", "mlp.layernorm"
    halves = transpose
    if VARIANTS[1] in _named_variants(hf):
        first, last, norm = "mlp.up_gated_layer", "mlp.down_layer", "layer_norm_2"
        halves = swap_halves_transposed  # the second half is the gate
    return [
        Rule(f"{LAYER}.{first}.weight", f"{TARGET}.mlp.gate_up.kernel", halves),
        Rule(f"{LAYER}.{last}.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.{last}.bias", f"{TARGET}.mlp.down.bias"),
        Rule(f"{LAYER}.{norm}.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{LAYER}.{norm}.bias", f"{TARGET}.mlp_norm.bias"),
    ]


def _named_variants(hf: dict[str, Any]) -> list[str]:
    """Those of VARIANTS that the config names, as the place of its code or where it came from."""
    names = (hf.get("_name_or_path"), *(hf.get("auto_map") or {}).values())
    return [variant for variant in VARIANTS if any(variant in str(name) for name in names)]


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("JinaBertModel", "JinaBertForMaskedLM"),
    classifiers=("JinaBertForSequenceClassification",),
    own_code={
        "AutoModel": _TOWERS,
        "AutoModelForSequenceClassification": (
            *_TOWERS,
            *(f"{place}{_SCORER}" for place in _PLACES),
        ),
    },
    prefixes=bert.FAMILY.prefixes,
    rules=(
        *(rule for rule in bert.FAMILY.rules if ".mlp" not in rule.target),
        Rule(f"{SELF}.layer_norm_q.weight", f"{TARGET}.attention.norms.query.scale"),
        Rule(f"{SELF}.layer_norm_q.bias", f"{TARGET}.attention.norms.query.bias"),
        Rule(f"{SELF}.layer_norm_k.weight", f"{TARGET}.attention.norms.key.scale"),
        Rule(f"{SELF}.layer_norm_k.bias", f"{TARGET}.attention.norms.key.bias"),
        Rule(f"{LAYER}.layer_norm_1.weight", f"{TARGET}.residual_norm.scale"),
        Rule(f"{LAYER}.layer_norm_1.bias", f"{TARGET}.residual_norm.bias"),
    ),
    ignored=bert.FAMILY.ignored,
    config=config,
    completed=completed,
    config_rules=config_rules,
    is_variant=is_jina_bert,
    classifier=bert.FAMILY.classifier,
)
