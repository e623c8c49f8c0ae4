"""Converts JinaBERT v2, its code variant and jina-reranker-v1: BERT with ALiBi and a gated MLP.

Their configs have BERT's model_type. The code variant, jina-embeddings-v2-base-code, has norms of
queries and keys, one more norm in each layer, and other tensor names.
"""

from pathlib import Path
from typing import Any

from converters.families import bert
from converters.family import Family
from converters.fields import refuse_unless
from converters.weights import Rule, safetensors_of, swap_halves_transposed, transpose

# the repositories with the code of the plain models, and with that of the code variant
VARIANTS = ("jina-bert-implementation", "jina-bert-v2-qk-post-norm")

# The models' own code, which the backbone replaces.
_REPOS = ("", *(f"jinaai/{variant}--" for variant in VARIANTS))
_MODELS = tuple(f"{repo}modeling_bert.JinaBertModel" for repo in _REPOS)
_CLASSIFIER = "modeling_bert.JinaBertForSequenceClassification"

LAYER = "encoder.layer.{i}"
SELF = f"{LAYER}.attention.self"
TARGET = "tower.layers.{i}"

# Switches of the models' own code, and the values that the backbone runs. ABSENT has the defaults.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("alibi",),
    "feed_forward_type": ("geglu",),
    "emb_pooler": ("mean", None),
}
ABSENT = {"position_embedding_type": "absolute", "feed_forward_type": "original"}


def is_jina_bert(hf: dict[str, Any]) -> bool:
    """Return whether a config of BERT is of this family, which names tensors differently."""
    codes, classes = hf.get("auto_map") or {}, hf.get("architectures") or ()
    own = any("JinaBert" in str(name) for name in (*codes.values(), *classes))
    return own or hf.get("position_embedding_type") == "alibi"


def completed(hf: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config `hf`. If it names no variant, because the model was tuned and saved again,
    its _name_or_path is set to the variant to which the names in model.safetensors belong. Raises
    CheckpointError if that file is damaged."""
    file = folder / "model.safetensors"
    if _named_variants(hf) or not file.is_file():
        return hf
    is_code_variant = any("layer_norm_q" in name for name in safetensors_of(file))
    return hf | {"_name_or_path": VARIANTS[is_code_variant]}  # True is 1


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. Raises UnsupportedModel, CheckpointError."""
    refuse_unless(ABSENT | hf, SWITCHES)
    # geglu sets the activation, so that hidden_act is not read
    fields = bert.config(hf | {"position_embedding_type": "absolute", "hidden_act": "gelu"})
    is_code_variant = VARIANTS[1] in _named_variants(hf)
    return fields | {
        "alibi": True,
        "qk_norm": is_code_variant,
        "residual_norm": is_code_variant,
        "gated": True,
        "up_bias": False,
    }


def config_rules(hf: dict[str, Any]) -> list[Rule]:
    """Return the rules for the MLP and its norm, whose tensor names depend on the variant."""
    gate_up, down, norm = "mlp.gated_layers", "mlp.wo", "mlp.layernorm"
    transform = transpose
    if VARIANTS[1] in _named_variants(hf):  # the code variant
        gate_up, down, norm = "mlp.up_gated_layer", "mlp.down_layer", "layer_norm_2"
        transform = swap_halves_transposed  # the second half is the gate
    return [
        Rule(f"{LAYER}.{gate_up}.weight", f"{TARGET}.mlp.gate_up.kernel", transform),
        Rule(f"{LAYER}.{down}.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.{down}.bias", f"{TARGET}.mlp.down.bias"),
        Rule(f"{LAYER}.{norm}.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{LAYER}.{norm}.bias", f"{TARGET}.mlp_norm.bias"),
    ]


def _named_variants(hf: dict[str, Any]) -> list[str]:
    """Return those of VARIANTS that the config names, in _name_or_path or auto_map."""
    names = (hf.get("_name_or_path"), *(hf.get("auto_map") or {}).values())
    return [variant for variant in VARIANTS if any(variant in str(name) for name in names)]


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("JinaBertModel", "JinaBertForMaskedLM"),
    classifiers=("JinaBertForSequenceClassification",),
    own_code={
        "AutoModel": _MODELS,
        "AutoModelForSequenceClassification": (
            *_MODELS,
            *(f"{repo}{_CLASSIFIER}" for repo in _REPOS),
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
