"""Converts NomicBERT: BERT with rotary positions. The MLPs of v1 and v1.5 are gated; those of
v2-moe are not, and every second one has routed experts.

It reads the config.json of the model's own code, that of transformers 5, and files with the keys of
both. All name tensors alike.
"""

from collections.abc import Iterator
from typing import Any

from converters.families import bert
from converters.families.rope import rope_fields, rope_parameters
from converters.family import Family
from converters.fields import (
    HF_ACTIVATIONS,
    activation_of,
    either,
    even_head_width,
    lookup,
    refuse_unless,
)
from converters.weights import Rule, concatenate, concatenate_transposed, rows_of, transpose
from jaxembed.data.spec import Activation
from jaxembed.errors import CheckpointError, UnsupportedModel

# The models' own code, which the backbone replaces.
_REPOS = ("", "nomic-ai/nomic-bert-2048--")

LAYER = "encoder.layers.{i}"
TARGET = "tower.layers.{i}"

# The keys of each BertConfig field: in the config of the model's own code, and in transformers.
SIZES = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "hidden_size": ("n_embd", "hidden_size"),
    "num_layers": ("n_layer", "num_hidden_layers"),
    "num_heads": ("n_head", "num_attention_heads"),
    "intermediate_size": ("n_inner", "intermediate_size"),
}

# max_positions is the largest of these, because rotary positions have no table that limits them.
LENGTHS = ("n_positions", "max_position_embeddings", "max_trained_positions")

# Switches of the model's own code, and the values that the backbone runs.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "prenorm": (False,),
    "causal": (False,),
    "parallel_block": (False,),
    "use_rms_norm": (False, None),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "num_shared_experts": (0, None),
    "expert_choice_router": (False, None),
    "moe_normalize_expert_weights": (False, None),
}

EXPERTS = ("num_experts", "moe_top_k", "moe_every_n_layers")

GATED_ACTIVATIONS: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu"}
ACTIVATIONS = GATED_ACTIVATIONS | HF_ACTIVATIONS

TRAINED = 2048  # default of max_trained_positions, in tokens


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to BertConfig fields. Raises UnsupportedModel, CheckpointError."""
    refuse_unless(hf, SWITCHES)
    sizes = _sizes(hf)
    multiple = hf.get("pad_vocab_size_multiple") or 1  # vocab_size is rounded up to it
    # activation_function is swiglu or geglu if the MLP is gated; hidden_act is that of the gate
    named = hf.get("activation_function")
    named_act = "silu" if named is None else lookup("activation_function", named, ACTIVATIONS)
    activation = activation_of(hf, "hidden_act", default=named_act)
    if named is not None and activation != named_act:
        raise CheckpointError(
            f"config.json: activation_function is {named!r} and hidden_act {hf['hidden_act']!r}, "
            "which must agree"
        )
    is_gated = named is None or named in GATED_ACTIVATIONS
    experts = _experts(hf, sizes["num_layers"])
    if experts and is_gated:
        raise UnsupportedModel(
            f"activation_function {named!r} with num_experts is not supported; known: "
            f"{', '.join(HF_ACTIVATIONS)}"
        )
    # the base of the rotary angles, and how they are scaled
    base, factor = hf.get("rotary_emb_base"), hf.get("rotary_scaling_factor")
    if base is None and hf.get("rope_theta", rope_parameters(hf).get("rope_theta")) is None:
        raise CheckpointError("config.json lacks rotary_emb_base or rope_parameters.rope_theta")
    rope = rope_fields({"rope_theta": base} | hf, sizes["hidden_size"] // sizes["num_heads"])
    if base is not None and rope["rope_theta"] != base:
        raise CheckpointError(
            f"config.json: rotary_emb_base is {base} and rope_theta {rope['rope_theta']}, which "
            "must agree"
        )
    if factor is not None:
        # the base grows with the length of a text beyond max_trained_positions; the model's own
        # code (not jaxembed) keeps that base even for later, shorter texts
        if rope["rope_scaling"] is not None:
            raise UnsupportedModel(
                f"rotary_scaling_factor {factor} beside rope_parameters of kind "
                f"{rope['rope_scaling']['kind']} is not supported; known: one of them"
            )
        length = hf.get("max_trained_positions") or TRAINED
        rope["rope_scaling"] = {"kind": "dynamic", "factor": float(factor), "length": length}
    return sizes | {
        "vocab_size": -(-sizes["vocab_size"] // multiple) * multiple,
        "max_positions": max(hf[key] for key in LENGTHS if isinstance(hf.get(key), int)),
        "type_vocab_size": hf.get("type_vocab_size", 2),
        "norm_eps": either(hf, "layer_norm_epsilon", "layer_norm_eps", 1e-12),
        "activation": activation,
        "attention_bias": bool(hf.get("qkv_proj_bias")),
        "gated": is_gated,
        "up_bias": bool(hf.get("mlp_fc1_bias")),
        "down_bias": bool(hf.get("mlp_fc2_bias")),
        **rope,
        **experts,
    }


def _experts(hf: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the fields of BertConfig for routed experts, or none if the model has none. Every
    layer whose number is 1 modulo moe_every_n_layers has them. Raises UnsupportedModel and
    CheckpointError."""
    experts, active, every = (hf.get(key) or 0 for key in EXPERTS)
    if not experts or not every:
        return {}
    if every == 1:
        raise UnsupportedModel("moe_every_n_layers 1 is not supported; known: 2 or more")
    if not 1 <= active <= experts:
        raise CheckpointError(
            f"config.json: moe_top_k is {active}, wanted 1 to {experts}, which is num_experts"
        )
    return {
        "expert_layers": list(range(1, layers, every)),
        "experts": experts,
        "active_experts": active,
    }


def _expert_rules(hf: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules for the weights of each expert, which are rows of two tensors."""
    experts, width = hf.get("num_experts") or 0, _sizes(hf)["intermediate_size"]
    for number in range(experts):
        rows = (number * width, (number + 1) * width, experts * width)
        target = f"{TARGET}.mlp.experts.{number}"
        yield Rule(
            f"{LAYER}.mlp.experts.mlp.w1", f"{target}.up.kernel", rows_of(*rows, turned=True)
        )
        yield Rule(f"{LAYER}.mlp.experts.mlp.w2", f"{target}.down.kernel", rows_of(*rows))


def _sizes(hf: dict[str, Any]) -> dict[str, int]:
    """Return the fields of BertConfig that SIZES lists. Raises CheckpointError for missing or
    contradictory fields, and UnsupportedModel for a head_dim other than hidden_size / num_heads."""
    sizes = {field: either(hf, *keys) for field, keys in SIZES.items()}
    missing = [" or ".join(dict.fromkeys(SIZES[field])) for field in SIZES if not sizes[field]]
    if not any(isinstance(hf.get(key), int) for key in LENGTHS):
        missing.append(" or ".join(LENGTHS))
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    width = even_head_width(sizes["hidden_size"], sizes["num_heads"])
    refuse_unless(hf, {"head_dim": (width, None)})
    return sizes


FAMILY = Family(
    architecture=bert.FAMILY.architecture,
    classes=("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining"),
    classifiers=("NomicBertForSequenceClassification",),
    own_code={
        "AutoModel": tuple(f"{repo}modeling_hf_nomic_bert.NomicBertModel" for repo in _REPOS)
    },
    prefixes=("bert.", "nomic_bert."),
    rules=(
        Rule("embeddings.word_embeddings.weight", "tower.embeddings.word.embedding"),
        Rule("embeddings.token_type_embeddings.weight", "tower.embeddings.type.embedding"),
        Rule("emb_ln.weight", "tower.embeddings.norm.scale"),
        Rule("emb_ln.bias", "tower.embeddings.norm.bias"),
        Rule(f"{LAYER}.attn.Wqkv.weight", f"{TARGET}.attention.qkv.kernel", transpose),
        Rule(f"{LAYER}.attn.Wqkv.bias", f"{TARGET}.attention.qkv.bias"),
        Rule(f"{LAYER}.attn.out_proj.weight", f"{TARGET}.attention.out.kernel", transpose),
        Rule(f"{LAYER}.attn.out_proj.bias", f"{TARGET}.attention.out.bias"),
        Rule(f"{LAYER}.norm1.weight", f"{TARGET}.attention_norm.scale"),
        Rule(f"{LAYER}.norm1.bias", f"{TARGET}.attention_norm.bias"),
        Rule(  # fc12 is the gate, to which the activation is applied
            (f"{LAYER}.mlp.fc12.weight", f"{LAYER}.mlp.fc11.weight"),
            f"{TARGET}.mlp.gate_up.kernel",
            concatenate_transposed,
        ),
        Rule(
            (f"{LAYER}.mlp.fc12.bias", f"{LAYER}.mlp.fc11.bias"),
            f"{TARGET}.mlp.gate_up.bias",
            concatenate,
        ),
        Rule(f"{LAYER}.mlp.fc1.weight", f"{TARGET}.mlp.up.kernel", transpose),
        Rule(f"{LAYER}.mlp.fc1.bias", f"{TARGET}.mlp.up.bias"),
        Rule(f"{LAYER}.mlp.fc2.weight", f"{TARGET}.mlp.down.kernel", transpose),
        Rule(f"{LAYER}.mlp.fc2.bias", f"{TARGET}.mlp.down.bias"),
        Rule(f"{LAYER}.mlp.router.layer.weight", f"{TARGET}.mlp.router.kernel", transpose),
        Rule(f"{LAYER}.mlp.experts.bias", f"{TARGET}.mlp.bias"),
        Rule(f"{LAYER}.norm2.weight", f"{TARGET}.mlp_norm.scale"),
        Rule(f"{LAYER}.norm2.bias", f"{TARGET}.mlp_norm.bias"),
    ),
    # embeddings do not use these tensors
    ignored=("pooler.dense.*", "cls.*", "classifier.weight", "classifier.bias"),
    config=config,
    config_rules=lambda hf: tuple(_expert_rules(hf)),
    classifier=lambda hf, labels: bert.two_layer_head(
        _sizes(hf)["hidden_size"], labels, "pooler.dense", "classifier"
    ),
)
