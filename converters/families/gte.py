"""Converts GTE ("new"): BERT with rotary positions and a gated MLP.

It reads two forms of config.json: that of Alibaba's own code, which Snowflake uses too, and that of
transformers 5. Both name tensors alike.
"""

from typing import Any

from converters.families import bert
from converters.families.rope import rope_fields, rope_parameters, scaled_positions
from converters.family import Family, SparseHead
from converters.features.terms import masked_lm_function
from converters.fields import activation_of, even_head_width, refuse_unless, require
from converters.weights import (
    Rule,
    concatenate,
    concatenate_transposed,
    swap_halves_transposed,
    transpose,
)
from jaxembed.errors import CheckpointError, UnsupportedModel

# Classes whose token classifier computes sparse weights. gte-multilingual-base names one of them.
SPARSE = ("NewForTokenClassification", "GteForTokenClassification")

# The models' own code, which the backbone replaces.
_NAMES = (
    "modeling.New",
    "Alibaba-NLP/new-impl--modeling.New",
    "modeling_hf_alibaba_nlp_gte.Gte",
)
_MODELS = tuple(f"{name}Model" for name in _NAMES)

LAYER = "encoder.layer.{i}"
SELF = f"{LAYER}.attention"
TARGET = "tower.layers.{i}"

# Switches of Alibaba's code, and the values that the backbone runs.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", None),
    "layer_norm_type": ("layer_norm", None),
    "logn_attention_scale": (False, None),
}


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. Raises UnsupportedModel, CheckpointError."""
    # an embedder names its own class beside the class of a token classifier
    architectures = set(hf.get("architectures") or ())
    if architectures and architectures <= set(SPARSE):
        raise UnsupportedModel(
            f"architecture {', '.join(sorted(architectures))} is not supported by itself, because "
            "jaxembed does not classify tokens with models of this family"
        )
    require(hf, bert.REQUIRED)
    refuse_unless(hf, SWITCHES)
    width = even_head_width(hf["hidden_size"], hf["num_attention_heads"])
    refuse_unless(hf, {"head_dim": (width, None)})
    # the base of the rotary angles, and how they are scaled
    parameters = rope_parameters(hf)
    if parameters.get("rope_theta", hf.get("rope_theta")) is None:
        raise CheckpointError("config.json lacks rope_theta")
    is_ntk = parameters.get("rope_type", parameters.get("type")) == "ntk"
    if is_ntk:
        if parameters.get("mixed_b") is not None:
            raise UnsupportedModel(f"rope_scaling.mixed_b {parameters['mixed_b']} is not supported")
        # rope_fields checks it as linear scaling; the numbers are replaced below
        linear = {key: value for key, value in parameters.items() if key != "mixed_b"}
        hf = hf | {"rope_scaling": linear | {"type": "linear", "rope_type": "linear"}}
    rope = rope_fields(hf, width)
    if is_ntk:  # as Alibaba's NTKScalingRotaryEmbedding does for texts of any length
        factor = rope["rope_scaling"]["factor"]
        rope["rope_theta"] *= factor
        rope["rope_scaling"] = {"kind": "linear", "factor": factor ** (2 / width)}
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "intermediate_size": hf["intermediate_size"],
        "max_positions": scaled_positions(hf, rope["rope_scaling"]),
        "type_vocab_size": hf.get("type_vocab_size", 1),
        "norm_eps": hf.get("layer_norm_eps", 1e-12),
        "activation": activation_of(hf, "hidden_act"),
        "gated": True,
        "up_bias": False,
        **rope,
    }


def masked_lm(hf: dict[str, Any]) -> SparseHead:
    """Return the head of NewForMaskedLM or GteForMaskedLM, and its tensor rules. It is a dense
    layer with an activation, a norm and the decoder. GteForMaskedLM always uses GELU and names
    the norm differently. Raises UnsupportedModel for an unknown activation."""
    return masked_lm_function(
        None if hf["model_type"] == "new" else "gelu",
        dense="lm_head.dense",
        norms=("lm_head.norm", "lm_head.layer_norm"),
        decoder="lm_head.decoder",
    )(hf)


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("NewModel", "NewForMaskedLM", "GteModel", "GteForMaskedLM", *SPARSE),
    classifiers=("NewForSequenceClassification", "GteForSequenceClassification"),
    sparse_classes=SPARSE,
    own_code={
        "AutoModel": _MODELS,
        "AutoModelForSequenceClassification": (
            *_MODELS,
            *(f"{name}ForSequenceClassification" for name in _NAMES),
        ),
        "AutoModelForMaskedLM": (*_MODELS, *(f"{name}ForMaskedLM" for name in _NAMES)),
    },
    prefixes=("new.", "gte."),
    rules=(
        Rule("embeddings.word_embeddings.weight", "tower.embeddings.word.embedding"),
        Rule("embeddings.token_type_embeddings.weight", "tower.embeddings.type.embedding"),
        Rule("embeddings.LayerNorm.weight", "tower.embeddings.norm.scale"),
        Rule("embeddings.LayerNorm.bias", "tower.embeddings.norm.bias"),
        Rule(f"{SELF}.qkv_proj.weight", f"{TARGET}.attention.qkv.kernel", transpose),
        Rule(f"{SELF}.qkv_proj.bias", f"{TARGET}.attention.qkv.bias"),
        Rule(  # with pack_qkv=false
            (f"{SELF}.q_proj.weight", f"{SELF}.k_proj.weight", f"{SELF}.v_proj.weight"),
            f"{TARGET}.attention.qkv.kernel",
            concatenate_transposed,
        ),
        Rule(
            (f"{SELF}.q_proj.bias", f"{SELF}.k_proj.bias", f"{SELF}.v_proj.bias"),
            f"{TARGET}.attention.qkv.bias",
            concatenate,
        ),
        Rule(f"{SELF}.o_proj.weight", f"{TARGET}.attention.out.kernel", transpose),
        Rule(f"{SELF}.o_proj.bias", f"{TARGET}.attention.out.bias"),
        Rule(f"{LAYER}.attn_ln.weight", f"{TARGET}.attention_norm.scale"),
        Rule(f"{LAYER}.attn_ln.bias", f"{TARGET}.attention_norm.bias"),
        Rule(  # the second half is the gate, to which the activation is applied
            f"{LAYER}.mlp.up_gate_proj.weight",
            f"{TARGET}.mlp.gate_up.kernel",
            swap_halves_transposed,
        ),
        Rule(f"{LAYER}.mlp.down_proj.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.mlp.down_proj.bias", f"{TARGET}.mlp.down.bias"),
        Rule(f"{LAYER}.mlp_ln.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{LAYER}.mlp_ln.bias", f"{TARGET}.mlp_norm.bias"),
    ),
    # embeddings do not use these tensors; `classifier` is also the head of the sparse weights
    ignored=("pooler.dense.*", "lm_head.*", "classifier.weight", "classifier.bias"),
    config=config,
    classifier=bert.FAMILY.classifier,
    masked_lm=masked_lm,
)
