"""How the configs of each family are spelled, what is refused by its name, which tensors are taken.

A config is that of a golden with changes: tests/test_golden.py compares what goldens convert to,
and their numbers with torch's.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from test_adapter_conversion import write_adapter
from test_golden import FILES, conversion_of, read, wanted_of, write_source

from converters import convert
from converters.families import (
    bert,
    deberta,
    distilbert,
    eurobert,
    gemma3,
    jina_bert,
    llama,
    modernbert,
    t5,
)
from converters.family import family_of
from jaxembed.data.spec import ModelSpec
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

Fields = dict[str, Any]
Refusal = tuple[Fields, type[Exception], str]
ABSENT = "absent"  # in changes to a config: the key is taken out of it


def golden(name: str) -> dict[str, np.ndarray]:
    """The arrays of a golden: what transformers saved."""
    return read(next(file for file in FILES if file.stem == name))


def config_of(name: str) -> Fields:
    return json.loads(golden(name)["source/config.json"].item())


def changed(config: Fields, changes: Fields) -> Fields:
    return {key: value for key, value in (config | changes).items() if value != ABSENT}


def converted(
    arrays: dict[str, np.ndarray], folder: Path, name: str | None = None, **config: Any
) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """The checkpoint of a golden's source, with `config` changed in its config.json."""
    source = write_source(arrays, folder / "source")
    sources.change_json(source / "config.json", **config)
    return sources.converted(source, name=name)


@dataclass(frozen=True)
class Family:
    """What a converter makes of configs: those of a golden with changes."""

    golden: str
    alike: tuple[Fields, ...] = ()  # changes that change nothing
    least: tuple[str, ...] = ()  # the keys that must be there
    absent: Fields | None = None  # the fields that are others where only those are said
    odd: tuple[tuple[Fields, Fields], ...] = ()  # changes to the config, and to the tower's fields
    refused: tuple[Refusal, ...] = ()


def unsupported(message: str = "", **said: Any) -> Refusal:
    """What is not run, and the message that says so: the key and its value if nothing is given."""
    return said, UnsupportedModel, message or "{}[ =]{!r}".format(*next(iter(said.items())))


def damaged(message: str, **said: Any) -> Refusal:
    """What is no config of the family, and the message that says so."""
    return said, CheckpointError, message


def alike(**fields: Any) -> tuple[Fields, Fields]:
    """Fields that the config and the tower call the same."""
    return fields, fields


def on(said: Fields, *refused: Refusal) -> tuple[Refusal, ...]:
    """Refusals of configs that say this, too."""
    return tuple((said | more, error, message) for more, error, message in refused)


def usual(
    name: str,
    activation: str | None = "hidden_act",
    heads: str | None = "num_attention_heads",
    size: str = "vocab_size",
    model: str = "Model",
    uneven: int = 3,
) -> tuple[Refusal, ...]:
    """What all families refuse: a class of theirs for another use, code from elsewhere with the
    class of the model, an unknown `activation`, an `uneven` number of `heads`, and no `size`."""
    kind, code = f"{name}ForMultipleChoice", {"AutoModel": f"other/fork--m.{name}{model}"}
    return (
        unsupported(kind, architectures=[kind]),
        unsupported("brings its own code .*other/fork", auto_map=code),
        damaged(f"lacks {size}", **{size: None}),
        *([unsupported(**{activation: "mish"})] if activation else ()),
        *([damaged(f"(multiple of {heads}|into .*) {uneven}", **{heads: uneven})] if heads else ()),
    )


RELATIVE = unsupported(position_embedding_type="relative_key")
OLD = {"torch_dtype": "float32", "dtype": ABSENT}  # of transformers 4
CONTRADICTION = damaged(
    "is_causal and use_bidirectional_attention", is_causal=True, use_bidirectional_attention=True
)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "intermediate_size", "max_position_embeddings")
GLOBAL, LOCAL = "full_attention", "sliding_attention"
DOUBLED: Fields = {"rope_type": "linear", "factor": 2.0}
NO_WINDOW: Fields = {"local_layers": ABSENT, "local_reach": ABSENT}
REPEATED = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")  # of ALBERT
OLD_LAYERS = {"layer_types": ABSENT, "rope_parameters": ABSENT}
GEMMA2_OLD = OLD_LAYERS | {"use_bidirectional_attention": ABSENT, "sliding_window_size": 12}
GEMMA2_OLD |= {"rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh"}
GEMMA3_OLD = OLD_LAYERS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
# gte-multilingual-base
SCALED = {"rope_scaling": {"kind": "linear", "factor": 8 ** (2 / 8)}}
IMPL = "Alibaba-NLP/new-impl--"
NTK = {"type": "ntk", "factor": 8.0}
GTE_TERMS = "NewForTokenClassification"
GTE: Fields = {
    "architectures": ["NewModel", GTE_TERMS],
    "auto_map": {
        "AutoConfig": f"{IMPL}configuration.NewConfig",
        "AutoModel": f"{IMPL}modeling.NewModel",
        "AutoModelForTokenClassification": f"{IMPL}modeling.NewForTokenClassification",
    },
}
GTE |= {"layer_norm_type": "layer_norm", "logn_attention_clip1": False, "unpad_inputs": False}
GTE |= {"logn_attention_scale": False, "model_type": "new", "pack_qkv": True, "rope_theta": 20000}
GTE |= {"position_embedding_type": "rope", "rope_parameters": ABSENT, "rope_scaling": NTK}
SNOWFLAKE = GTE | {"architectures": ["GteModel"], "model_type": "gte", "rope_theta": 160000}
SNOWFLAKE |= {"auto_map": {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"}}
JINA, CODE = "jinaai/jina-bert-implementation--", "jinaai/jina-bert-v2-qk-post-norm--"
FLASH = "jinaai/xlm-roberta-flash-implementation--"


def jina_auto_map(place: str) -> dict[str, str]:
    uses = {"AutoModel": "Model", "AutoModelForMaskedLM": "ForMaskedLM"}
    return {key: f"{place}modeling_bert.JinaBert{use}" for key, use in uses.items()}


MORE_NORMS = {"qk_norm": True, "residual_norm": True}
CODE_NAME = {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"}
MODERNBERT_OLD = OLD_LAYERS | {"global_attn_every_n_layers": 3}
MODERNBERT_OLD |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
SCORES = {"architectures": ["ModernBertForSequenceClassification"]}
# as nomic-embed-text-v1, whose own code has other names, and with the golden's sizes
OF_TRANSFORMERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
OF_TRANSFORMERS += ("layer_norm_eps", "max_position_embeddings", "hidden_act", "head_dim")
NOMIC_CODE = "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBert"
NOMIC_MAP = {
    "AutoModel": f"{NOMIC_CODE}Model",
    "AutoModelForMaskedLM": f"{NOMIC_CODE}ForPreTraining",
}
NOMIC: Fields = dict.fromkeys((*OF_TRANSFORMERS, "rope_parameters"), ABSENT)
NOMIC |= {"activation_function": "swiglu", "auto_map": NOMIC_MAP, "causal": False, "prenorm": False}
NOMIC |= {"n_embd": 16, "n_head": 2, "n_inner": 32, "n_layer": 2, "n_positions": 32}
NOMIC |= {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False}
NOMIC |= {"layer_norm_epsilon": 1e-12, "use_rms_norm": False, "scale_attn_weights": True}
NOMIC |= {"max_trained_positions": 32, "pad_vocab_size_multiple": 1, "rotary_emb_base": 1000}
NOMIC |= {"rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False}
NOMIC |= {"rotary_emb_scale_base": None, "rotary_scaling_factor": None}
EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2, "hidden_act": ABSENT}
EXPERTS |= {"activation_function": "gelu"}
OF_EXPERTS = {"expert_layers": [1], "experts": 4, "active_experts": 2}
GATED, OF_GATED = {"feed_forward_proj": "gated-gelu"}, {"activation": "gelu_tanh", "gated": True}
NVIDIA = {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}
STELLA = {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}  # whose config says nothing of it
WINDOW: Fields = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
WINDOW |= {"layer_types": ABSENT}


def of_qwen(name: str, odd: tuple[tuple[Fields, Fields], ...], *refused: Refusal) -> Family:
    """What Qwen2 and Qwen3 have in common: a window in the layers from a number on, if asked."""
    seen = {"local_layers": [1], "local_reach": 7}
    return Family(
        f"{name.lower()}_lasttoken",
        alike=(
            OLD | {"rope_parameters": ABSENT, "rope_theta": 10000, "layer_types": ABSENT},
            {"rope_parameters": ABSENT, "rope_scaling": {"type": "default"}},
            WINDOW | {"use_sliding_window": False},
            WINDOW | {"max_window_layers": 2},
        ),
        odd=((WINDOW, seen), (WINDOW | {"layer_types": [GLOBAL, LOCAL]}, seen), *odd),
        refused=(
            *usual(name, heads="num_key_value_heads"),
            CONTRADICTION,
            unsupported("rope_type 'ntk'", rope_parameters={"rope_type": "ntk", "factor": 4.0}),
            unsupported("layer_types chunked", layer_types=["chunked_attention"] * 2),
            *refused,
        ),
    )


YARN = {"rope_type": "yarn", "factor": 4.0}
MINISTRAL_YARN = YARN | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}

FAMILIES: dict[str, Family] = {
    "albert": Family(
        "albert_mean",
        alike=(OLD,),
        least=bert.REQUIRED,
        absent={"embedding_size": 128},
        odd=(
            # as the loop of transformers' AlbertTransformer runs groups of layers
            *(
                (
                    dict(zip(REPEATED, (layers, groups, inner), strict=True)),
                    {"num_layers": groups * inner, "layer_order": order},
                )
                for layers, groups, inner, order in (
                    (3, 1, 2, [0, 1, 0, 1, 0, 1]),
                    (4, 2, 1, [0, 0, 1, 1]),
                    (3, 2, 2, [0, 1, 0, 1, 2, 3]),
                )
            ),
            # embeddings of the hidden size are projected too
            alike(embedding_size=16),
        ),
        refused=(
            *usual("Albert", size="embedding_size"),
            RELATIVE,
            damaged("num_hidden_groups is 7; wanted 1 to 2 groups", num_hidden_groups=7),
            damaged("num_hidden_groups is 0", num_hidden_groups=0),
            damaged("inner_group_num is 0, wanted a whole", inner_group_num=0),
            damaged("lacks inner_group_num", inner_group_num=None),
        ),
    ),
    "deberta": Family(
        "deberta_mean",
        alike=(OLD | {"pos_att_type": "p2c|c2p", "legacy": ABSENT},),
        least=("relative_attention", "pos_att_type", *bert.REQUIRED),
        absent={"absolute_positions": True, "buckets": 0},
        refused=(
            *usual("DebertaV2", size="hidden_size"),
            unsupported(relative_attention=False),
            unsupported(r"pos_att_type 'p2p\|c2p'", pos_att_type="p2p|c2p"),
            unsupported(pos_att_type=None),
            unsupported(norm_rel_ebd="batch_norm"),
            unsupported(conv_kernel_size=4),
            unsupported("conv_groups 2", conv_kernel_size=3, conv_groups=2),
            unsupported("conv_act 'mish'", conv_kernel_size=3, conv_act="mish"),
            unsupported(attention_head_size=4),
            unsupported(pooler_hidden_size=8),
            damaged("position_buckets is 62", position_buckets=62),
            damaged("position_buckets is 1", position_buckets=1),
            damaged('max_relative_positions is "all"', max_relative_positions="all"),
            damaged("type_vocab_size is -1", type_vocab_size=-1),
            damaged("embedding_size is 0", embedding_size=0),
        ),
    ),
    "distilbert": Family(
        "distilbert_mean",
        least=distilbert.REQUIRED,
        alike=(  # which transformers does not read
            OLD | {"layer_norm_eps": 1e-5},
            {"hidden_act": "silu", "type_vocab_size": 2, "pruned_heads": {}},
        ),
        refused=(
            *usual("DistilBert", "activation", "n_heads"),
            unsupported("pruned_heads=", pruned_heads={"0": [1]}),
            damaged("lacks dim, n_layers", dim=None, n_layers=None),
        ),
    ),
    "electra": Family(
        "electra_mean",
        alike=(OLD | {"add_cross_attention": ABSENT, "is_decoder": ABSENT},),
        least=bert.REQUIRED,
        absent={"embedding_size": 128},
        # embeddings of the hidden size are not projected
        odd=(({"embedding_size": 16}, {"embedding_size": None}),),
        refused=(
            *usual("Electra", size="embedding_size"),
            RELATIVE,
            unsupported("summary_type 'mean' .* known: first", summary_type="mean"),
            unsupported(summary_use_proj=False),
            unsupported(summary_activation="tanh"),
            unsupported(is_decoder=True),
        ),
    ),
    "eurobert": Family(
        "eurobert_mean",
        alike=(OLD | {"rope_parameters": ABSENT, "rope_theta": 10000},),
        refused=(
            *usual("EuroBert", heads="num_key_value_heads"),
            unsupported("is_causal=true", is_causal=True),
        ),
    ),
    "gemma2": Family(
        "gemma2_lasttoken",
        alike=(OLD | GEMMA2_OLD,),
        least=SIZES,
        absent={"head_width": 256, "query_scale": 1.0, "score_cap": 50.0, "local_reach": 4095},
        odd=(
            ({"query_pre_attn_scalar": 144}, {"query_scale": (12 / 144) ** 0.5}),
            ({"attn_logit_softcapping": 20}, {"score_cap": 20.0}),
            ({"attn_logit_softcapping": None}, {"score_cap": ABSENT}),
            ({"is_causal": False}, {"causal": False, "local_reach": 12}),
        ),
        refused=(
            *usual("Gemma2", "hidden_activation", "num_key_value_heads"),
            unsupported("use_bidirectional_attention is", use_bidirectional_attention=True),
            damaged("attn_logit_softcapping is 0, wanted", attn_logit_softcapping=0),
            damaged('attn_logit_softcapping is "50"', attn_logit_softcapping="50"),
            damaged("query_pre_attn_scalar is 0", query_pre_attn_scalar=0),
            damaged("sliding_window is None, wanted", sliding_window=None),
            unsupported("layer_types chunked", layer_types=["chunked"] * 2),
        ),
    ),
    "gemma3": Family(
        "gemma3_mean",
        least=(*SIZES, "sliding_window", "use_bidirectional_attention"),
        absent={"head_width": 256, "query_scale": 1.0, "local_layers": [0, 1]},
        alike=(
            OLD | GEMMA3_OLD,
            GEMMA3_OLD | {"_sliding_window_pattern": None, "sliding_window_pattern": 2},
        ),
        odd=(
            # only layers without a window are scaled
            (
                GEMMA3_OLD | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
                {"rope_scaling": {"kind": "linear", "factor": 8.0}},
            ),
            ({"sliding_window": 7}, {"local_reach": 3}),
            # harrier: the token itself is in it
            ({"use_bidirectional_attention": False}, {"causal": True, "local_reach": 11}),
            # transformers' own rule
            ({"use_bidirectional_attention": None, "is_causal": False}, {"local_reach": 12}),
            ({"query_pre_attn_scalar": 168}, {"query_scale": (12 / 168) ** 0.5}),
        ),
        refused=(
            *usual("Gemma3Text", "hidden_activation", "num_key_value_heads"),
            unsupported(attn_logit_softcapping=50.0),
            unsupported("rope_parameters of rope_th", rope_parameters={"rope_theta": 1e6}),
            unsupported("sliding_attention .* not scaled", rope_parameters={LOCAL: DOUBLED}),
            unsupported("layer_types chunked", layer_types=["chunked"] * 2),
            damaged("1 layer_types for num_hidden", layer_types=[GLOBAL]),
            damaged("sliding_window is None, wanted", sliding_window=None),
            CONTRADICTION,
        ),
    ),
    "gte": Family(
        "gte_cls",
        odd=(
            (GTE, SCALED),
            (GTE | {"pack_qkv": False}, SCALED),
            (SNOWFLAKE | {"rope_scaling": None}, {"rope_scaling": None}),
            (
                GTE | {"rope_scaling": NTK | {"factor": 2, "mixed_b": None}, "rope_theta": 500000},
                {"rope_theta": 1e6, "rope_scaling": {"kind": "linear", "factor": 2 ** (2 / 8)}},
            ),
            # as transformers 5 saves it
            ({"rope_parameters": NTK | {"rope_type": "ntk", "rope_theta": 20000}}, SCALED),
            alike(type_vocab_size=0),  # gte-base-en-v1.5
            ({"layer_norm_eps": 1e-5}, {"norm_eps": 1e-5}),
            ({"hidden_act": "silu"}, {"activation": "silu"}),
        ),
        refused=(
            *usual("New"),
            unsupported("'absolute' .* known: rope", position_embedding_type="absolute"),
            unsupported(layer_norm_type="rms_norm"),
            unsupported(logn_attention_scale=True),
            *on(
                GTE,
                unsupported("mixed_b 0.6", rope_scaling=NTK | {"mixed_b": 0.6}),
                unsupported("beta", rope_scaling=NTK | {"beta": 1}),
                damaged("factor is None", rope_scaling={"type": "ntk"}),
                unsupported("rope_type 'su'", rope_scaling={"type": "su"}),
                damaged("wanted a JSON object", rope_scaling="ntk"),
                damaged("lacks rope_theta", rope_theta=None),
                unsupported("ification is not supported by itself", architectures=[GTE_TERMS]),
            ),
            damaged("num_attention_heads 16 of even width", num_attention_heads=16),
            unsupported("head_dim 4 is not supported; known: 8", head_dim=4),
        ),
    ),
    "jina_bert": Family(
        "jina_bert_mean",
        alike=(
            OLD | {"auto_map": jina_auto_map(""), "_name_or_path": "./tuned"},
            {"auto_map": None, "architectures": ["JinaBertModel"]},
            {"hidden_act": "relu"},  # the gate has an activation of its own
        ),
        odd=(
            (CODE_NAME | {"auto_map": jina_auto_map(CODE)}, MORE_NORMS),
            (CODE_NAME | {"auto_map": None}, MORE_NORMS),
            ({"emb_pooler": None, "layer_norm_eps": 1e-5}, {"norm_eps": 1e-5}),
        ),
        refused=(
            *usual("JinaBert", None),
            unsupported("'absolute' .* known: alibi", position_embedding_type="absolute"),
            # absent, they have the default of the published code
            unsupported("position_embedding_type", position_embedding_type=None),
            unsupported("feed_forward_type", feed_forward_type=None),
            unsupported("'reglu' .* known: geglu", feed_forward_type="reglu"),
            unsupported(feed_forward_type="original"),
            unsupported("emb_pooler 'cls' .* known: mean", emb_pooler="cls"),
            unsupported(is_decoder=True),
        ),
    ),
    "jina_v3": Family(
        "jina_v3_mean",
        alike=(
            {"model_type": "xlm-roberta", "auto_map": {"AutoModel": f"{FLASH}m.XLMRobertaLoRA"}}
            | {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
            | {"rope_parameters": ABSENT},
        ),
    ),
    "llama": Family(
        "llama_odd_mean",
        alike=(
            {"is_causal": ABSENT, "use_bidirectional_attention": True},
            {"is_causal": ABSENT, "model_type": "llama_bidirec"},
            {"is_causal": ABSENT, "auto_map": NVIDIA},
        ),
        odd=(
            ({"is_causal": ABSENT}, {"causal": True}),
            ({"is_causal": True, "model_type": "llama_bidirec"}, {"causal": True}),
            ({"num_key_value_heads": ABSENT}, {"num_key_heads": 3}),
            ({"hidden_size": 18, "head_dim": ABSENT}, {"hidden_size": 18, "head_width": 6}),
        ),
        refused=(
            *usual("Llama", heads=None),
            CONTRADICTION,
            damaged("hidden_size 15 is not a multiple", num_attention_heads=4, head_dim=None),
        ),
    ),
    "ministral3": Family(
        "ministral3_mean",
        odd=(
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
                dict.fromkeys(("rope_scaling", "query_growth", "query_growth_length"), ABSENT),
            ),
        ),
        refused=(
            damaged("original_max_position_embeddings is None", rope_parameters=MINISTRAL_YARN),
            damaged("lacks rope_parameters", rope_parameters=None),
        ),
    ),
    "mistral": Family(
        "mistral_lasttoken",
        alike=(OLD | {"rope_parameters": ABSENT, "rope_theta": 10000},),
        odd=(
            ({"sliding_window": None}, NO_WINDOW),
            ({"sliding_window": ABSENT}, {"local_reach": 4095}),
            ({"is_causal": False}, {"causal": False, "local_reach": 6}),
        ),
        refused=(
            *usual("Mistral", heads="num_key_value_heads"),
            CONTRADICTION,
            unsupported("layer_types of mistral are not supp", layer_types=[GLOBAL, LOCAL]),
            damaged("sliding_window is 0, wanted a whole number", sliding_window=0),
        ),
    ),
    "modernbert": Family(
        "modernbert_mean",
        alike=(
            OLD | MODERNBERT_OLD,
            MODERNBERT_OLD | {"rope_parameters": {LOCAL: None, GLOBAL: None}, "rope_scaling": None},
        ),
        least=modernbert.REQUIRED,
        absent={"local_reach": 64},
        odd=(
            # transformers 4: the global
            (MODERNBERT_OLD | {"local_rope_theta": None}, {"local_theta": 160000.0}),
            (MODERNBERT_OLD | {"local_rope_theta": 160000}, {"local_theta": 160000.0}),
            (MODERNBERT_OLD | {"global_attn_every_n_layers": 2}, {"global_layers": [0, 2]}),
            ({"layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL]}, {"global_layers": [1]}),
            (
                MODERNBERT_OLD | {"rope_parameters": {GLOBAL: {"rope_theta": 5000.0}}},
                {"global_theta": 5000.0},
            ),
            alike(attention_bias=True, mlp_bias=True),
            alike(norm_bias=True, norm_eps=1e-3),
        ),
        refused=(
            *usual("ModernBert", "hidden_activation", uneven=5),
            unsupported("rope_scaling", rope_scaling={"type": "linear", "factor": 2.0}),
            unsupported("full_attention with rope_type 'yarn' and", rope_parameters={GLOBAL: YARN}),
            unsupported("of rope_theta", rope_parameters={"rope_theta": 2.0}),
            unsupported("chunked_attention", layer_types=["chunked_attention"] * 4),
            damaged("3 layer_types for num_hidden_lay", layer_types=[GLOBAL] * 3),
            *on(
                SCORES,
                unsupported(classifier_pooling="max"),
                unsupported(classifier_activation="mish"),
            ),
            unsupported(is_decoder=True),
            damaged("of even width", hidden_size=6, num_attention_heads=2),
            damaged("local_attention is -1", local_attention=-1),
            *on(
                MODERNBERT_OLD,
                damaged("global_attn_every_n_layers is 0", global_attn_every_n_layers=0),
                damaged("global_rope_theta is None", global_rope_theta=None),
            ),
        ),
    ),
    "mpnet": Family(
        "mpnet_mean",
        alike=(
            OLD,
            {"pad_token_id": 3},  # transformers counts from 1 whatever it says
            {"type_vocab_size": 2},
        ),
        least=bert.REQUIRED,
        absent={"norm_eps": 1e-12},
        refused=(
            *usual("MPNet"),
            unsupported("num_buckets 64 .* known: 32", relative_attention_num_buckets=64),
            damaged("is 2, wanted at least 3", max_position_embeddings=2),
        ),
    ),
    "nomic_bert": Family(
        "nomic_bert_mean",
        alike=(
            NOMIC,
            # with both kinds of names, as v1.5, whose table of positions that there is not does not
            # limit it to the tokens of its training
            NOMIC | dict.fromkeys(OF_TRANSFORMERS) | {"hidden_size": 16, "hidden_act": "silu"},
        ),
        odd=(
            (NOMIC | {"qkv_proj_bias": True}, {"attention_bias": True}),
            (NOMIC | {"mlp_fc1_bias": True}, {"up_bias": True}),
            (NOMIC | {"mlp_fc2_bias": True}, {"down_bias": True}),
            (NOMIC | {"activation_function": "geglu"}, {"activation": "gelu"}),
            (NOMIC | EXPERTS, {"activation": "gelu", "gated": False} | OF_EXPERTS),
            (
                NOMIC | EXPERTS | {"num_experts": 0},
                {"activation": "gelu", "gated": False},
            ),
            (NOMIC | {"pad_vocab_size_multiple": 64}, {"vocab_size": 128}),
            (
                NOMIC | {"n_positions": 8192, "max_position_embeddings": 2048},
                {"max_positions": 8192},
            ),
            (NOMIC | {"layer_norm_epsilon": 1e-5}, {"norm_eps": 1e-5}),
            (
                NOMIC | {"rotary_scaling_factor": 2, "max_trained_positions": 512},
                {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "length": 512}}
                | {"max_positions": 512},
            ),
        ),
        refused=(
            *usual("NomicBert"),
            unsupported("prenorm True is not supported; known: False", prenorm=True),
            unsupported(causal=True),
            unsupported(parallel_block=True),
            unsupported(use_rms_norm=True),
            unsupported(scale_attn_weights=False),
            unsupported(rotary_emb_fraction=0.5),
            unsupported(rotary_emb_interleaved=True),
            unsupported(rotary_emb_scale_base=512),
            unsupported("'swiglu' with num_experts", **EXPERTS | {"activation_function": "swiglu"}),
            unsupported("moe_every_n_layers 1", **EXPERTS | {"moe_every_n_layers": 1}),
            unsupported("num_shared_experts 1", **EXPERTS, num_shared_experts=1),
            unsupported("expert_choice_router True", **EXPERTS, expert_choice_router=True),
            unsupported("expert_weights True", **EXPERTS, moe_normalize_expert_weights=True),
            damaged("moe_top_k is 5, wanted 1 to 4", **EXPERTS | {"moe_top_k": 5}),
            damaged("moe_top_k is 0, wanted 1 to 4", **EXPERTS | {"moe_top_k": ABSENT}),
            *on(
                NOMIC,
                unsupported(activation_function="mish"),
                damaged("activation_function is 'swiglu' and hidden_act", hidden_act="gelu"),
                damaged("n_embd is 16 and hidden_size 32", hidden_size=32),
                damaged("layer_norm_epsilon is 1e-12 and layer_norm", layer_norm_eps=1e-5),
                damaged("rotary_emb_base is 1000 and rope_theta 5.0", rope_theta=5.0),
                damaged("lacks rotary_emb_base", rotary_emb_base=None),
                damaged("n_embd or hidden_size, n_inner or", n_embd=None, n_inner=None),
                damaged("n_positions or", n_positions=None, max_trained_positions=None),
            ),
            damaged("of even width", num_attention_heads=16),
            unsupported("head_dim 12 is not supported; known: 8", head_dim=12),
            unsupported(
                "rotary_scaling_factor 2 beside rope_parameters of kind linear",
                **{"rotary_scaling_factor": 2, "rope_parameters": DOUBLED | {"rope_theta": 1e3}},
            ),
            damaged("wanted a JSON object", rope_scaling="ntk"),
        ),
    ),
    "qwen2": of_qwen(
        "Qwen2",
        (
            ({"is_causal": None}, {}),
            ({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}, {}),
            ({"is_causal": False}, {"causal": False}),
            (STELLA, {"causal": False}),
            (STELLA | {"is_causal": False}, {"causal": False}),  # gte-Qwen2
        ),
        unsupported("its own code .*oth", auto_map={"AutoModel": "other.Qwen2Model"}),
        damaged("lacks num_key_value_heads", num_key_value_heads=None),
        damaged("hidden_size 16 is not a multiple", num_attention_heads=6),
    ),
    "qwen3": of_qwen(
        "Qwen3",
        (
            ({"head_dim": ABSENT}, {"head_width": 128}),
            ({"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ),
        unsupported("tial_rotary_fa", rope_parameters={"partial_rotary_factor": 0.5}),
        unsupported("modeling_qwen.Qwen2Model", **STELLA),
        unsupported("'qwen3_moe' is not supported", model_type="qwen3_moe"),
        damaged("heads are 7 wide; wanted an even number", head_dim=7),
    ),
    "roberta": Family(
        "xlm_roberta_mean",
        alike=(OLD | {"pad_token_id": ABSENT},),
        odd=(({"pad_token_id": 5}, {"pad_id": 5}),),
        refused=(
            *usual("XLMRoberta"),
            unsupported("is_decoder=True", is_decoder=True),
            damaged("pad_token_id is", pad_token_id=None),
            damaged("pad_token_id is", pad_token_id=-1),
            damaged("pad_token_id is", pad_token_id=33),
        ),
    ),
    "t5": Family(
        "t5_mean",
        alike=(
            dict.fromkeys(("dense_act_fn", "is_decoder", "is_gated_act"), ABSENT)
            | {"is_encoder_decoder": True, "n_positions": 512},
        ),
        least=t5.REQUIRED,
        absent={"bias_reach": 128},
        odd=(
            *(
                (GATED | dict.fromkeys(("dense_act_fn", "is_gated_act"), ABSENT) | said, OF_GATED)
                for said in ({}, {"dense_act_fn": "gelu_new", "is_gated_act": True})
            ),
            ({"d_kv": 128, "num_heads": 128}, {"head_width": 128, "num_heads": 128}),
            ({"relative_attention_max_distance": 256}, {"bias_reach": 256}),
            ({"layer_norm_epsilon": 1e-5}, {"norm_eps": 1e-5}),
        ),
        refused=(
            *usual("T5", None, None, "d_kv", model="EncoderModel"),
            unsupported(feed_forward_proj="gated-silu"),
            unsupported("known: relu, gated-gelu", feed_forward_proj="gelu"),
            unsupported("dense_act_fn 'silu' .* known: relu", dense_act_fn="silu"),
            unsupported(is_gated_act=True),
            unsupported(is_decoder=True),
            damaged("num_buckets is 3, wanted", relative_attention_num_buckets=3),
            damaged("max_distance is 8, wanted .* 8", relative_attention_max_distance=8),
            unsupported("model_type 'mt5' is not supported", model_type="mt5"),
        ),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_spelling_of_a_config_is_read(name):
    family = FAMILIES[name]
    hf = config_of(family.golden)
    read = family_of(hf).config
    fields = read(hf)
    for said in family.alike:
        assert read(changed(hf, said)) == fields, said
    if family.least:  # the rest has the default of transformers
        least = {key: hf[key] for key in family.least}
        assert read(least) == fields | (family.absent or {})


@pytest.mark.parametrize(
    ("name", "said", "read"),
    [(name, *case) for name, family in FAMILIES.items() for case in family.odd],
    ids=str,
)
def test_odd_configs_are_read(name, said, read):
    hf = config_of(FAMILIES[name].golden)
    converter = family_of(hf)
    assert converter.config(changed(hf, said)) == changed(converter.config(hf), read)


@pytest.mark.parametrize(
    ("name", "said", "error", "message"),
    [(name, *case) for name, family in FAMILIES.items() for case in family.refused],
    ids=str,
)
def test_what_is_not_run_is_refused_before_weights_are_read(name, said, error, message, tmp_path):
    hf = changed(config_of(FAMILIES[name].golden), said)
    sources.write_json(tmp_path / "source" / "config.json", hf)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


TENSORS, LM = "tensors/model.safetensors:", "ForMaskedLM"
ALBERT_GROUP = "albert.encoder.albert_layer_groups.1.albert_layers.0"


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("albert_mean", f"{ALBERT_GROUP}.ffn.bias", (32,)),
        ("distilbert_odd_cls", "distilbert.embeddings.token_type_embeddings.weight", (2, 15)),
        ("electra_mean", "electra.embeddings_project.weight", (16, 9)),
        ("deberta_mean", "encoder.rel_embeddings.weight", (14, 16)),
        ("deberta_odd_cls", "deberta.encoder.conv.conv.weight", (15, 15, 5)),
        ("gte_cls", "encoder.layer.0.attention.qkv_proj.weight", None),
        ("jina_bert_mean", "encoder.layer.1.mlp.wo.weight", None),
        ("jina_bert_code_odd_mean", "encoder.layer.1.mlp.down_layer.weight", None),
        ("modernbert_mean", "layers.0.attn.Wqkv.bias", (36,)),
        ("modernbert_mean", "layers.0.attn_norm.weight", (12,)),
        ("modernbert_mean", "layers.3.attn_norm.weight", None),
        ("mpnet_cross_encoder", "mpnet.encoder.relative_attention_bias.weight", (16, 2)),
        ("nomic_bert_mean", "encoder.layers.0.attn.Wqkv.bias", (48,)),
        ("nomic_moe_mean", "encoder.layers.1.mlp.experts.mlp.w1", (9 * 32, 16)),
        ("nomic_moe_mean", "encoder.layers.1.mlp.experts.mlp.w2", (8 * 31, 16)),
        ("nomic_moe_mean", "encoder.layers.1.mlp.router.layer.weight", None),
        ("t5_mean", "encoder.block.0.x", (2,)),
    ],
)
def test_tensors_that_are_missing_left_over_or_misshapen_are_named(name, tensor, shape, tmp_path):
    """By the names that they have in the file."""
    arrays, named = golden(name), re.escape(tensor)
    if shape is None:
        del arrays[f"{TENSORS}{tensor}"]
        message = f"missing: {named}"
    else:
        stored = arrays.get(f"{TENSORS}{tensor}")
        arrays[f"{TENSORS}{tensor}"] = np.zeros(shape, np.float32)
        wanted = None if stored is None else re.escape(f"{stored.shape}, got {shape}")
        message = f"unused: {named}" if wanted is None else f"{named}: wanted shape {wanted}"
    with pytest.raises(ConversionError, match=message):
        converted(arrays, tmp_path)


def prefixed(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key.replace(TENSORS, f"{TENSORS}{prefix}"): array for key, array in arrays.items()}


def gte_published(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As Alibaba names its tensors where queries, keys and values are apart."""
    named = {}
    for name, array in prefixed(arrays, "new.").items():
        parts = np.split(array, 3) if ".qkv_proj." in name else [array]
        for x, part in zip("qkv", parts, strict=False):
            named[name.replace("qkv_proj", f"{x}_proj")] = part
    return named


def t5_tables(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With the table of words under both names, and a decoder."""
    table = arrays[f"{TENSORS}shared.weight"]
    own = {f"{TENSORS}encoder.embed_tokens.weight": table, f"{TENSORS}decoder.block.0.x": table}
    return arrays | own


def t5_own_table(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    table = {f"{TENSORS}encoder.embed_tokens.weight": arrays[f"{TENSORS}shared.weight"]}
    return {k: array for k, array in arrays.items() if not k.endswith("shared.weight")} | table


@pytest.mark.parametrize(
    ("name", "spelled", "config"),
    [
        ("gte_cls", gte_published, {"pack_qkv": False}),
        ("gte_cls", lambda arrays: prefixed(arrays, "new."), {}),
        ("jina_bert_mean", lambda arrays: prefixed(arrays, "bert."), {}),
        # the tensors tell the variant of a model that was saved with its code
        ("jina_bert_mean", dict, {"auto_map": jina_auto_map(""), "_name_or_path": None}),
        ("jina_bert_code_odd_mean", dict, {"auto_map": jina_auto_map(""), "_name_or_path": None}),
        (
            "llama_odd_mean",
            dict,
            {"is_causal": None, "auto_map": NVIDIA, "model_type": "llama_bidirec"}
            | {"architectures": ["LlamaBidirectionalModel"]},
        ),
        *(
            ("xlm_roberta_mean", dict, {"model_type": one.lower(), "architectures": [f"{one}{LM}"]})
            for one in ("Roberta", "Camembert")
        ),
        ("t5_mean", t5_tables, {}),
        ("t5_mean", t5_own_table, {}),
    ],
)
def test_other_spellings_of_a_checkpoint_give_the_same_model(name, spelled, config, tmp_path):
    assert conversion_of(spelled(golden(name)), tmp_path, **config) == wanted_of(name)


def test_tensors_of_the_variant_that_a_config_does_not_name_are_refused(tmp_path):
    with pytest.raises(ConversionError, match=r"missing: encoder\.layer\.0\.mlp\.gated_layers"):
        converted(golden("jina_bert_code_odd_mean"), tmp_path, auto_map=jina_auto_map(JINA))


@pytest.mark.parametrize(
    ("said", "family"),
    [
        ({"auto_map": None, "architectures": None}, True),
        ({"position_embedding_type": "absolute"}, True),  # which is refused then
        ({"position_embedding_type": None, "architectures": None}, True),
        ({"auto_map": None, "architectures": None, "position_embedding_type": None}, False),
    ],
    ids=str,
)
def test_the_code_or_the_kind_of_positions_tells_jina_bert_from_bert(said, family):
    assert jina_bert.is_jina_bert(config_of("jina_bert_mean") | said) is family


def test_gtes_head_of_sparse_weights_is_taken(tmp_path):
    head = {"weight": np.ones((1, 16), np.float32), "bias": np.ones(1, np.float32)}
    heads = {f"{TENSORS}classifier.{part}": array for part, array in head.items()}
    said = changed(GTE, {"rope_parameters": None})
    spec, params = converted(prefixed(golden("gte_cls"), "new.") | heads, tmp_path, **said)
    assert spec.representations == ("dense", "sparse")
    assert params["heads.token_weights.modules.0.kernel"].shape == (16, 1)


@pytest.mark.parametrize("name", ["albert", "electra"])
def test_pairs_have_types_where_the_tokenizer_gives_them(name, tmp_path):
    """transformers' AlbertTokenizer gives none by itself since version 5; ELECTRA's does."""
    arrays = golden(f"{name}_cross_encoder")
    names = '{"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}'
    arrays["source/tokenizer_config.json"] = np.array(names if name == "albert" else "{}")
    assert converted(arrays, tmp_path)[0].token_types


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_soft_cap_of_logits_is_refused_where_they_are_scores(name):
    hf = config_of(FAMILIES[name].golden)
    family = family_of(hf)
    capped, plain = hf | {"final_logit_softcapping": 30.0}, hf | {"final_logit_softcapping": None}
    fields = family.config(hf)
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping 30"):
        family.score_head(capped, fields, 1, 0)
    _, (rule,) = family.score_head(plain, fields, 1, 0)
    assert rule.sources == "embed_tokens.weight"  # tied unless the config says otherwise


def test_an_odd_window_of_gemma3_may_be_one_that_was_halved_before(caplog):
    gemma3.config(config_of("gemma3_mean"))
    assert not caplog.messages
    gemma3.config(config_of("gemma3_mean") | {"sliding_window": 257})
    assert "sliding_window 257 is odd" in caplog.text
    assert "published value is 512" in caplog.text


def test_an_adapter_of_one_run_of_alberts_layer_is_refused(tmp_path):
    source = write_source(golden("albert_mean"), tmp_path / "source")
    layers = "encoder.albert_layer_groups.{}.albert_layers.0.attention.query"
    first, second = (
        {"one": write_adapter(tmp_path / str(number), {layers.format(number): (16, 16)})}
        for number in (0, 1)
    )
    spec = convert(source, tmp_path / "out", adapters=first)
    assert spec.adapters[0].ranks == {"tower.layers.0.attention.qkv": 3}
    with pytest.raises(ConversionError, match=r"unused: .*albert_layer_groups\.1\."):
        convert(source, tmp_path / "other", adapters=second)


@pytest.mark.parametrize("name", ["shared", "encoder.embed_tokens"])
def test_the_table_of_words_of_t5_takes_no_adapter(name, tmp_path):
    arrays = golden("t5_mean")
    source = write_source(arrays, tmp_path / "source")
    folder = write_adapter(tmp_path / "a", {name: arrays[f"{TENSORS}shared.weight"].shape})
    with pytest.raises(ConversionError, match=f"{name}.weight cannot take an adapter"):
        convert(source, tmp_path / "out", adapters={"a": folder})


def test_eurobert_pools_before_its_head():
    published = config_of("eurobert_mean")
    for pooling, ours in (("bos", "cls"), ("mean", "mean")):
        head = eurobert.classifier(published | {"classifier_pooling": pooling}, 3)
        assert head[0].pooling == (ours,)
    for said in ({"classifier_pooling": ABSENT}, {"classifier_pooling": "late"}):
        with pytest.raises(UnsupportedModel, match="classifier_pooling 'late' is not supported"):
            eurobert.classifier(changed(published, said), 3)


SCORER = {
    "architectures": ["LlamaBidirectionalForSequenceClassification"],
    "model_type": "llama_bidirec",
    "pooling": "avg",
    "temperature": 0.25,
}


def test_nvidias_reranker_takes_the_mean_and_divides_by_its_temperature(tmp_path):
    arrays, name = golden("llama_cross_encoder"), "llama-nemotron-rerank-1b-v2"
    spec, params = converted(arrays, tmp_path / "nvidia", name=name, **SCORER)
    _, plain = converted(arrays, tmp_path / "plain")
    assert spec.head.pooling == ("mean",)
    assert spec.template == llama.FAMILY.reranker.template
    kernel = "heads.logits.modules.0.kernel"
    np.testing.assert_allclose(params[kernel], plain[kernel] * 4, rtol=1e-6)
    hf = config_of("llama_cross_encoder") | SCORER
    for pooling, ours in (("cls", "cls"), ("last", "lasttoken")):
        assert llama.classifier(hf | {"pooling": pooling}, 1)[0].pooling == (ours,)
    with pytest.raises(UnsupportedModel, match="pooling 'weighted_avg'"):
        llama.classifier(hf | {"pooling": "weighted_avg"}, 1)
    with pytest.raises(CheckpointError, match="temperature is 0, wanted a number over 0"):
        llama.classifier(hf | {"temperature": 0}, 1)


def test_an_unknown_activation_of_debertas_pooler_is_refused():
    with pytest.raises(UnsupportedModel, match="pooler_hidden_act 'mish'"):
        deberta.FAMILY.classifier(config_of("deberta_mean") | {"pooler_hidden_act": "mish"}, 1)


def test_debertas_relative_tables_are_float32_where_the_weights_are_not(tmp_path):
    arrays = {
        name: array.astype(np.float16) if name.startswith("tensors") else array
        for name, array in golden("deberta_mean").items()
    }
    spec, params = converted(arrays, tmp_path)
    assert params["tower.layers.0.attention.relative_key"].dtype == np.float32
    assert spec.dtype == "float16"
