"""What the tests of families have in common in form: how their configs are spelled, what is refused
by its name, which tensors are taken, and what their rerankers are.

What is particular to a family is in its own file. Their numbers are compared with torch's by the
goldens.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sources
from test_golden import FILES, read, write_source

from converters import (
    albert,
    convert,
    deberta,
    distilbert,
    electra,
    gemma2,
    gemma3,
    gte,
    jina_bert,
    modernbert,
    mpnet,
    nomic_bert,
    t5,
)
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.spec import DenseLayer, ModelSpec

Fields = dict[str, Any]
Refusal = tuple[Fields, type[Exception], str]


def golden(name: str) -> dict[str, np.ndarray]:
    """The arrays of a golden: what transformers saved."""
    return read(next(file for file in FILES if file.stem == name))


def converted(
    arrays: dict[str, np.ndarray],
    folder: Path,
    adapters: dict[str, Path] | None = None,
    name: str | None = None,
    **config: Any,
) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """The checkpoint of a golden's source, with `config` changed in its config.json."""
    source, out = write_source(arrays, folder / "source"), folder / "out"
    sources.change_json(source / "config.json", **config)
    spec = convert(source, out, name=name, adapters=adapters, progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


@dataclass(frozen=True)
class Family:
    """A converter, and what it makes of configs."""

    converter: ModuleType
    published: Fields  # config.json, with smaller sizes than the model that is published
    fields: Fields  # of the tower's config
    resaved: Fields = field(default_factory=dict)  # what transformers 5 or other code writes
    least: tuple[str, ...] = ()  # the keys that must be there
    absent: Fields | None = None  # other fields where only those are said
    odd: tuple[tuple[Fields, Fields], ...] = ()  # changes to `published`, and to `fields`
    refused: tuple[Refusal, ...] = ()


def without(config: Fields, *keys: str) -> Fields:
    return {key: value for key, value in config.items() if key not in keys}


def unsupported(message: str = "", **said: Any) -> Refusal:
    """What is not run, and the message that says so: the key and its value if nothing is given."""
    return said, UnsupportedModel, message or "{}[ =]{!r}".format(*next(iter(said.items())))


def damaged(message: str, **said: Any) -> Refusal:
    """What is no config of the family, and the message that says so."""
    return said, CheckpointError, message


def usual(
    kind: str,
    model: str,
    *,
    activation: str = "hidden_act",
    heads: str = "num_attention_heads",
    uneven: int = 3,
    size: str = "vocab_size",
) -> tuple[Refusal, ...]:
    """What all families refuse: a class of theirs for another use, code from elsewhere with the
    class `model`, an unknown `activation`, an `uneven` number of `heads`, and no `size`."""
    return (
        ({"architectures": [kind]}, UnsupportedModel, kind),
        (
            {"auto_map": {"AutoModel": f"other/fork--modeling.{model}"}},
            UnsupportedModel,
            "brings its own code .*other/fork",
        ),
        unsupported(**{activation: "mish"}),
        ({heads: uneven}, CheckpointError, f"(multiple of {heads}|split into .*) {uneven}"),
        ({size: None}, CheckpointError, f"lacks {size}"),
    )


BERT: Fields = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 11,
}
BERT_FIELDS: Fields = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 16,
    "max_positions": 24,
    "type_vocab_size": 2,
    "norm_eps": 1e-12,
    "activation": "gelu",
}
# of two heads of 8 numbers
WIDER: Fields = {"hidden_size": 16, "intermediate_size": 32}
RELATIVE = unsupported(position_embedding_type="relative_key")
OLD = {"torch_dtype": "float32", "position_embedding_type": "absolute"}  # of transformers 4
NEW = {"dtype": "float32", "tie_word_embeddings": True}  # and 5

# paraphrase-albert-small-v2
ALBERT = BERT | {
    "architectures": ["AlbertModel"],
    "embedding_size": 6,
    "hidden_act": "gelu_new",
    "inner_group_num": 1,
    "model_type": "albert",
    "net_structure_type": 0,
    "num_hidden_groups": 1,
    "num_hidden_layers": 6,
    "num_memory_blocks": 0,
}
DEBERTA = BERT | {
    "architectures": ["DebertaV2ForMaskedLM"],
    "layer_norm_eps": 1e-07,
    "max_relative_positions": -1,
    "model_type": "deberta-v2",
    "norm_rel_ebd": "layer_norm",
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": 8,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 8,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
}
DISTILBERT: Fields = {
    "activation": "gelu",
    "architectures": ["DistilBertForMaskedLM"],
    "dim": 8,
    "hidden_dim": 16,
    "max_position_embeddings": 24,
    "model_type": "distilbert",
    "n_heads": 2,
    "n_layers": 2,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "vocab_size": 11,
}
# electra-small-discriminator
ELECTRA = BERT | {
    "architectures": ["ElectraForPreTraining"],
    "embedding_size": 6,
    "model_type": "electra",
    "summary_activation": "gelu",
    "summary_type": "first",
    "summary_use_proj": True,
}
GEMMA: Fields = {
    "attention_bias": False,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10_000.0,
}
GEMMA_FIELDS: Fields = {
    "head_width": 256,
    "rope_theta": 10_000.0,
    "norm_eps": 1e-6,
    "activation": "gelu_tanh",
    "qkv_bias": False,
    "out_bias": False,
    "block_norms": True,
    "query_scale": 1.0,
    "overflows_float16": True,
}
# bge-multilingual-gemma2 in its own size, as transformers 4 wrote it
GEMMA2 = GEMMA | {
    "architectures": ["Gemma2Model"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256002,
}
GEMMA2_FIELDS = GEMMA_FIELDS | {
    "vocab_size": 256002,
    "hidden_size": 3584,
    "num_layers": 42,
    "num_heads": 16,
    "num_key_heads": 8,
    "intermediate_size": 14336,
    "max_positions": 8192,
    "qk_norm": False,
    "causal": True,
    "local_layers": list(range(0, 42, 2)),
    "local_reach": 4095,
    "embedding_scale": 3584**0.5,
    "score_cap": 50.0,
}
# EmbeddingGemma-300m in its own size, as transformers 4 wrote it
GEMMA3 = GEMMA | {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 1152,
    "max_position_embeddings": 2048,
    "sliding_window": 512,
    "_sliding_window_pattern": 6,
    "use_bidirectional_attention": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": None,
}
GEMMA3_OLD_KEYS = ("rope_theta", "rope_local_base_freq", "rope_scaling", "_sliding_window_pattern")
GEMMA3_FIELDS = GEMMA_FIELDS | {
    "vocab_size": 262144,
    "hidden_size": 768,
    "num_layers": 24,
    "num_heads": 3,
    "num_key_heads": 1,
    "intermediate_size": 1152,
    "max_positions": 2048,
    "rope_theta": 1e6,
    "qk_norm": True,
    "causal": False,
    "local_layers": [number for number in range(24) if number % 6 != 5],
    "local_reach": 256,
    "local_theta": 1e4,
    "embedding_scale": 768**0.5,
}
# gte-multilingual-base
IMPL = "Alibaba-NLP/new-impl--"
GTE = (
    BERT
    | WIDER
    | {
        "architectures": ["NewModel", "NewForTokenClassification"],
        "auto_map": {
            "AutoConfig": f"{IMPL}configuration.NewConfig",
            "AutoModel": f"{IMPL}modeling.NewModel",
            "AutoModelForMaskedLM": f"{IMPL}modeling.NewForMaskedLM",
            "AutoModelForSequenceClassification": f"{IMPL}modeling.NewForSequenceClassification",
            "AutoModelForTokenClassification": f"{IMPL}modeling.NewForTokenClassification",
        },
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "model_type": "new",
        "pack_qkv": True,
        "pad_token_id": 1,
        "position_embedding_type": "rope",
        "rope_scaling": {"factor": 8.0, "type": "ntk"},
        "rope_theta": 20000,
        "type_vocab_size": 1,
        "unpad_inputs": False,
    }
)
# what transformers 5 makes of "ntk", by the width of heads
FACTOR = 8 ** (2 / 8)
NTK = {"type": "ntk", "factor": 8.0}
# jina-embeddings-v2-base-en
JINA, CODE = "jinaai/jina-bert-implementation--", "jinaai/jina-bert-v2-qk-post-norm--"


def jina_auto_map(place: str) -> dict[str, str]:
    model = f"{place}modeling_bert.JinaBert"
    return {
        "AutoConfig": f"{place}configuration_bert.JinaBertConfig",
        "AutoModel": f"{model}Model",
        "AutoModelForMaskedLM": f"{model}ForMaskedLM",
        "AutoModelForSequenceClassification": f"{model}ForSequenceClassification",
    }


JINA_BERT = BERT | {
    "_name_or_path": "jinaai/jina-bert-implementation",
    "architectures": ["JinaBertForMaskedLM"],
    "attn_implementation": "torch",
    "auto_map": jina_auto_map(JINA),
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "max_position_embeddings": 8192,
    "model_max_length": 8192,
    "model_type": "bert",
    "position_embedding_type": "alibi",
}
MORE_NORMS = {"qk_norm": True, "residual_norm": True}
CODE_NAME = {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"}
GLOBAL, LOCAL = "full_attention", "sliding_attention"
MODERNBERT: Fields = {
    "architectures": ["ModernBertForMaskedLM"],
    "model_type": "modernbert",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 24,
    "hidden_activation": "gelu",
    "attention_bias": False,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "layer_norm_eps": 1e-05,
    "local_attention": 9,
    "local_rope_theta": 10000.0,
    "mlp_bias": False,
    "norm_bias": False,
    "norm_eps": 1e-05,
    "position_embedding_type": "absolute",
}
MODERNBERT_FIELDS: Fields = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 5,
    "num_heads": 2,
    "intermediate_size": 6,
    "max_positions": 24,
    "global_layers": [0, 3],
    "local_reach": 4,
    "global_theta": 160000.0,
    "local_theta": 10000.0,
    "norm_eps": 1e-5,
    "activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
}
SCORES = {"architectures": ["ModernBertForSequenceClassification"]}
# all-mpnet-base-v2
MPNET = without(BERT, "type_vocab_size") | {
    "architectures": ["MPNetForMaskedLM"],
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 26,
    "model_type": "mpnet",
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
}
# nomic-embed-text-v1
NOMIC_CODE = "nomic-ai/nomic-bert-2048--"
NOMIC: Fields = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "auto_map": {
        "AutoConfig": f"{NOMIC_CODE}configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": f"{NOMIC_CODE}modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": f"{NOMIC_CODE}modeling_hf_nomic_bert.NomicBertForPreTraining",
    },
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 16,
    "n_head": 2,
    "n_inner": 32,
    "n_layer": 2,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 128,
}
# gtr-t5-base in its own size
T5: Fields = {
    "architectures": ["T5EncoderModel"],
    "d_ff": 3072,
    "d_kv": 64,
    "d_model": 768,
    "feed_forward_proj": "relu",
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}

FAMILIES: dict[str, Family] = {
    "albert": Family(
        albert,
        ALBERT,
        BERT_FIELDS
        | {"num_layers": 1, "activation": "gelu_tanh", "embedding_size": 6, "layer_order": [0] * 6},
        least=albert.bert.REQUIRED,
        absent={"embedding_size": 128},
        odd=(
            # as the loop of transformers' AlbertTransformer runs groups of layers
            *(
                (
                    {
                        "num_hidden_layers": layers,
                        "num_hidden_groups": groups,
                        "inner_group_num": inner,
                    },
                    {"num_layers": groups * inner, "layer_order": order},
                )
                for layers, groups, inner, order in (
                    (3, 1, 2, [0, 1, 0, 1, 0, 1]),
                    (4, 2, 1, [0, 0, 1, 1]),
                    (3, 2, 2, [0, 1, 0, 1, 2, 3]),
                    (2, 2, 1, [0, 1]),
                )
            ),
            # embeddings of the hidden size are projected too
            ({"embedding_size": 8}, {"embedding_size": 8}),
        ),
        refused=(
            *usual("AlbertForQuestionAnswering", "AlbertModel", size="embedding_size"),
            RELATIVE,
            damaged("num_hidden_groups is 7; wanted 1 to 6 groups", num_hidden_groups=7),
            damaged("num_hidden_groups is 0", num_hidden_groups=0),
            damaged("inner_group_num is 0, wanted a whole", inner_group_num=0),
            damaged("lacks inner_group_num", inner_group_num=None),
        ),
    ),
    "deberta": Family(
        deberta,
        DEBERTA,
        BERT_FIELDS
        | {
            "type_vocab_size": 0,
            "norm_eps": 1e-7,
            "embedding_size": 8,
            "absolute_positions": False,
            "buckets": 8,
            "max_distance": 24,
            "content_to_position": True,
            "position_to_content": True,
        },
        resaved=DEBERTA | {"legacy": True, "pos_att_type": ["p2c", "c2p"]},
        least=("relative_attention", "pos_att_type", *deberta.bert.REQUIRED),
        absent={"absolute_positions": True, "buckets": 0},
        refused=(
            *usual("DebertaV2ForQuestionAnswering", "DebertaV2Model", size="hidden_size"),
            unsupported(relative_attention=False),
            unsupported(r"pos_att_type 'p2p\|c2p'", pos_att_type="p2p|c2p"),
            unsupported(pos_att_type=None),
            unsupported(norm_rel_ebd="batch_norm"),
            unsupported(conv_kernel_size=4),
            unsupported("conv_groups 2", conv_kernel_size=3, conv_groups=2),
            unsupported("conv_act 'mish'", conv_kernel_size=3, conv_act="mish"),
            unsupported(attention_head_size=8),
            unsupported(pooler_hidden_size=16),
            damaged("position_buckets is 46", position_buckets=46),
            damaged("position_buckets is 1", position_buckets=1),
            damaged('max_relative_positions is "all"', max_relative_positions="all"),
            damaged("type_vocab_size is -1", type_vocab_size=-1),
            damaged("embedding_size is 0", embedding_size=0),
        ),
    ),
    "distilbert": Family(
        distilbert,
        DISTILBERT,
        BERT_FIELDS | {"type_vocab_size": 0},
        least=distilbert.REQUIRED,
        odd=tuple(  # which transformers does not read
            (said, {})
            for said in (
                {"layer_norm_eps": 1e-5},
                {"hidden_act": "silu"},
                {"type_vocab_size": 2},
                {"pruned_heads": {}},
            )
        ),
        refused=(
            *usual(
                "DistilBertForQuestionAnswering",
                "DistilBertModel",
                activation="activation",
                heads="n_heads",
            ),
            unsupported("pruned_heads=", pruned_heads={"0": [1]}),
            damaged("lacks dim, n_layers", dim=None, n_layers=None),
        ),
    ),
    "electra": Family(
        electra,
        ELECTRA,
        BERT_FIELDS | {"embedding_size": 6},
        resaved=ELECTRA | {"add_cross_attention": False, "is_decoder": False},
        least=electra.bert.REQUIRED,
        absent={"embedding_size": 128},
        # embeddings of the hidden size are not projected
        odd=(({"embedding_size": 8}, {"embedding_size": None}),),
        refused=(
            *usual("ElectraForQuestionAnswering", "ElectraModel", size="embedding_size"),
            RELATIVE,
            unsupported("summary_type 'mean' .* known: first", summary_type="mean"),
            unsupported(summary_use_proj=False),
            unsupported(summary_activation="tanh"),
            unsupported(is_decoder=True),
        ),
    ),
    "gemma2": Family(
        gemma2,
        GEMMA2,
        GEMMA2_FIELDS,
        resaved=without(GEMMA2, "rope_theta", "sliding_window_size", "hidden_act")
        | {
            "layer_types": [GLOBAL if n % 2 else LOCAL for n in range(42)],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "use_bidirectional_attention": None,
        },
        least=tuple(
            without(
                GEMMA2,
                "attn_logit_softcapping",
                "query_pre_attn_scalar",
                "head_dim",
                "sliding_window",
                "rope_theta",
                "hidden_activation",
            )
        ),
        odd=(
            ({"query_pre_attn_scalar": 144}, {"query_scale": (256 / 144) ** 0.5}),  # 27 billion
            ({"attn_logit_softcapping": 20}, {"score_cap": 20.0}),
            ({"is_causal": False}, {"causal": False, "local_reach": 4096}),
        ),
        refused=(
            *usual(
                "Gemma2ForTokenClassification",
                "Gemma2Model",
                activation="hidden_activation",
                heads="num_key_value_heads",
            ),
            unsupported("use_bidirectional_attention is", use_bidirectional_attention=True),
            damaged("attn_logit_softcapping is 0, wanted", attn_logit_softcapping=0),
            damaged('attn_logit_softcapping is "50"', attn_logit_softcapping="50"),
            damaged("query_pre_attn_scalar is 0", query_pre_attn_scalar=0),
            damaged("sliding_window is None, wanted", sliding_window=None),
            unsupported("layer_types chunked", layer_types=["chunked"] * 42),
        ),
    ),
    "gemma3": Family(
        gemma3,
        GEMMA3,
        GEMMA3_FIELDS,
        least=tuple(
            without(
                GEMMA3, *GEMMA3_OLD_KEYS, "head_dim", "query_pre_attn_scalar", "hidden_activation"
            )
        ),
        resaved=without(GEMMA3, *GEMMA3_OLD_KEYS)
        | {
            "layer_types": [LOCAL if n % 6 != 5 else GLOBAL for n in range(24)],
            "rope_parameters": {
                GLOBAL: {"rope_type": "default", "rope_theta": 1e6},
                LOCAL: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        odd=(
            ({"_sliding_window_pattern": None, "sliding_window_pattern": 6}, {}),
            # only layers without a window are scaled
            (
                {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
                {"rope_scaling": {"kind": "linear", "factor": 8.0}},
            ),
            ({"sliding_window": 7}, {"local_reach": 3}),
            # harrier: the token itself is in it
            ({"use_bidirectional_attention": False}, {"causal": True, "local_reach": 511}),
            # transformers' own rule
            ({"use_bidirectional_attention": None, "is_causal": False}, {"local_reach": 512}),
            ({"query_pre_attn_scalar": 168}, {"query_scale": (256 / 168) ** 0.5}),
        ),
        refused=(
            *usual(
                "Gemma3ForTokenClassification",
                "Gemma3TextModel",
                activation="hidden_activation",
                heads="num_key_value_heads",
                uneven=2,
            ),
            unsupported(attn_logit_softcapping=50.0),
            unsupported("rope_parameters of rope_th", rope_parameters={"rope_theta": 1e6}),
            unsupported(
                "rope_parameters.sliding_attention .* not scaled",
                rope_parameters={LOCAL: {"rope_type": "linear", "factor": 2.0}},
            ),
            unsupported("layer_types chunked", layer_types=["chunked"] * 24),
            damaged("1 layer_types for num_hidden", layer_types=[GLOBAL]),
            damaged("sliding_window is None, wanted", sliding_window=None),
            damaged("is_causal and use_bidirectional_attention", is_causal=True),
        ),
    ),
    "gte": Family(
        gte,
        GTE,
        BERT_FIELDS
        | WIDER
        | {
            "type_vocab_size": 1,
            "gated": True,
            "up_bias": False,
            "rope_theta": 160000.0,
            "rope_scaling": {"kind": "linear", "factor": FACTOR},
        },
        resaved=BERT
        | WIDER
        | {
            "architectures": ["GteModel"],
            "model_type": "gte",
            "pad_token_id": 1,
            "rope_parameters": {"factor": FACTOR, "rope_theta": 160000.0, "rope_type": "linear"},
            "type_vocab_size": 1,
        },
        odd=(
            (  # snowflake-arctic-embed-m-v2.0
                {
                    "architectures": ["GteModel"],
                    "auto_map": {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"},
                    "model_type": "gte",
                    "rope_scaling": None,
                    "rope_theta": 160000,
                },
                {"rope_scaling": None},
            ),
            ({"rope_scaling": None}, {"rope_theta": 20000.0, "rope_scaling": None}),
            (
                {
                    "rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": None},
                    "rope_theta": 500000,
                },
                {"rope_theta": 1e6, "rope_scaling": {"kind": "linear", "factor": 2 ** (2 / 8)}},
            ),
            ({"type_vocab_size": 0}, {"type_vocab_size": 0}),  # gte-base-en-v1.5
            ({"pack_qkv": False}, {}),
            (
                {"layer_norm_eps": 1e-5, "hidden_act": "silu"},
                {"norm_eps": 1e-5, "activation": "silu"},
            ),
        ),
        refused=(
            *usual("NewForQuestionAnswering", "NewModel"),
            unsupported("'absolute' .* known: rope", position_embedding_type="absolute"),
            unsupported(layer_norm_type="rms_norm"),
            unsupported(logn_attention_scale=True),
            unsupported("mixed_b 0.6", rope_scaling=NTK | {"mixed_b": 0.6}),
            unsupported("beta", rope_scaling=NTK | {"beta": 1}),
            damaged("factor is None", rope_scaling={"type": "ntk"}),
            unsupported("rope_type 'su'", rope_scaling={"type": "su"}),
            damaged("wanted a JSON object", rope_scaling="ntk"),
            damaged("lacks rope_theta", rope_theta=None),
            damaged("num_attention_heads 16 of even width", num_attention_heads=16),
            unsupported("head_dim 4 is not supported; known: 8", head_dim=4),
            unsupported(
                "NewForTokenClassification is not supported by itself",
                architectures=["NewForTokenClassification"],
            ),
        ),
    ),
    "jina_bert": Family(
        jina_bert,
        JINA_BERT,
        BERT_FIELDS
        | {
            "max_positions": 8192,
            "alibi": True,
            "qk_norm": False,
            "residual_norm": False,
            "gated": True,
            "up_bias": False,
        },
        resaved=JINA_BERT | {"auto_map": jina_auto_map(""), "_name_or_path": "./tuned"},
        odd=(
            (CODE_NAME | {"auto_map": jina_auto_map(CODE)}, MORE_NORMS),
            (CODE_NAME | {"auto_map": None}, MORE_NORMS),
            ({"auto_map": None, "architectures": ["JinaBertModel"]}, {}),
            ({"hidden_act": "relu"}, {}),  # the gate has an activation of its own
            ({"emb_pooler": None, "layer_norm_eps": 1e-5}, {"norm_eps": 1e-5}),
        ),
        refused=(
            *(
                case
                for case in usual("JinaBertForTokenClassification", "JinaBertModel")
                if "hidden_act" not in case[0]
            ),
            unsupported(
                "position_embedding_type 'absolute' is not supported; known: alibi",
                position_embedding_type="absolute",
            ),
            # absent, they have the default of the published code
            unsupported("position_embedding_type", position_embedding_type=None),
            unsupported("feed_forward_type", feed_forward_type=None),
            unsupported("'reglu' .* known: geglu", feed_forward_type="reglu"),
            unsupported(feed_forward_type="original"),
            unsupported("emb_pooler 'cls' .* known: mean", emb_pooler="cls"),
            unsupported(is_decoder=True),
        ),
    ),
    "modernbert": Family(
        modernbert,
        MODERNBERT,
        MODERNBERT_FIELDS,
        resaved=without(
            MODERNBERT, "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"
        )
        | {
            "layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL],
            "rope_parameters": {
                GLOBAL: {"rope_theta": 160000.0, "rope_type": "default"},
                LOCAL: {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        least=modernbert.REQUIRED,
        absent={"local_reach": 64},
        odd=(
            ({"local_rope_theta": None}, {"local_theta": 160000.0}),  # transformers 4: the global
            ({"local_rope_theta": 160000}, {"local_theta": 160000.0}),
            ({"global_attn_every_n_layers": 2}, {"global_layers": [0, 2, 4]}),
            ({"layer_types": [LOCAL, GLOBAL, *[LOCAL] * 3]}, {"global_layers": [1]}),
            ({"rope_parameters": {GLOBAL: {"rope_theta": 5000.0}}}, {"global_theta": 5000.0}),
            ({"rope_parameters": {LOCAL: None, GLOBAL: None}, "rope_scaling": None}, {}),
            (
                {"attention_bias": True, "mlp_bias": True},
                {"attention_bias": True, "mlp_bias": True},
            ),
            ({"norm_bias": True, "norm_eps": 1e-3}, {"norm_bias": True, "norm_eps": 1e-3}),
        ),
        refused=(
            *usual(
                "ModernBertForTokenClassification",
                "ModernBertModel",
                activation="hidden_activation",
            ),
            unsupported("rope_scaling", rope_scaling={"type": "linear", "factor": 2.0}),
            unsupported(
                "full_attention with rope_type 'yarn' and factor",
                rope_parameters={GLOBAL: {"rope_type": "yarn", "factor": 4.0}},
            ),
            unsupported("of rope_theta", rope_parameters={"rope_theta": 2.0}),
            unsupported("chunked_attention", layer_types=["chunked_attention"] * 5),
            damaged("4 layer_types for num_hidden_lay", layer_types=[GLOBAL] * 4),
            (SCORES | {"classifier_pooling": "max"}, UnsupportedModel, "classifier_pooling 'max'"),
            (
                SCORES | {"classifier_activation": "mish"},
                UnsupportedModel,
                "classifier_activation 'mish'",
            ),
            unsupported(is_decoder=True),
            damaged("of even width", hidden_size=6, num_attention_heads=2),
            damaged("local_attention is -1", local_attention=-1),
            damaged("global_attn_every_n_layers is 0", global_attn_every_n_layers=0),
            damaged("global_rope_theta is None", global_rope_theta=None),
        ),
    ),
    "mpnet": Family(
        mpnet,
        MPNET,
        BERT_FIELDS
        | {
            "max_positions": 26,
            "type_vocab_size": 0,
            "norm_eps": 1e-5,
            "pad_id": 1,
            "bias_reach": 128,
        },
        least=mpnet.bert.REQUIRED,
        absent={"norm_eps": 1e-12},
        odd=(
            ({"layer_norm_eps": 1e-3}, {"norm_eps": 1e-3}),
            ({"pad_token_id": 3}, {}),  # transformers counts from 1 whatever it says
            ({"type_vocab_size": 2}, {}),
        ),
        refused=(
            *usual("MPNetForQuestionAnswering", "MPNetModel"),
            unsupported("num_buckets 64 .* known: 32", relative_attention_num_buckets=64),
            damaged("is 2, wanted at least 3", max_position_embeddings=2),
        ),
    ),
    "nomic_bert": Family(
        nomic_bert,
        NOMIC,
        BERT_FIELDS
        | WIDER
        | {
            "vocab_size": 128,
            "max_positions": 8192,
            "activation": "silu",
            "attention_bias": False,
            "gated": True,
            "up_bias": False,
            "down_bias": False,
            "rope_theta": 1000.0,
            "rope_scaling": None,
        },
        # with its own keys beside, as v1.5, whose table of positions that there is not does not
        # limit it to the 2,048 tokens of its training
        resaved=NOMIC
        | BERT
        | WIDER
        | {
            "head_dim": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
            "vocab_size": 128,
        },
        odd=(
            ({"qkv_proj_bias": True}, {"attention_bias": True}),
            ({"mlp_fc1_bias": True, "mlp_fc2_bias": True}, {"up_bias": True, "down_bias": True}),
            ({"activation_function": "geglu"}, {"activation": "gelu"}),
            ({"vocab_size": 97}, {"vocab_size": 128}),  # the table has a multiple of 64 rows
            ({"rotary_emb_base": 10_000}, {"rope_theta": 10_000.0}),
            ({"layer_norm_epsilon": 1e-5}, {"norm_eps": 1e-5}),
            *(
                (
                    {"rotary_scaling_factor": 2, "max_trained_positions": length},
                    {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "length": length}},
                )
                for length in (2048, 512)
            ),
        ),
        refused=(
            *usual(
                "NomicBertForTokenClassification",
                "NomicBertModel",
                activation="activation_function",
                heads="n_head",
            ),
            unsupported("prenorm True is not supported; known: False", prenorm=True),
            unsupported(causal=True),
            unsupported(parallel_block=True),
            unsupported(use_rms_norm=True),
            unsupported(scale_attn_weights=False),
            unsupported(rotary_emb_fraction=0.5),
            unsupported(rotary_emb_interleaved=True),
            unsupported(rotary_emb_scale_base=512),
            unsupported("num_experts 8", num_experts=8, moe_every_n_layers=2),
            unsupported(activation_function="gelu"),
            damaged("activation_function is 'swiglu' and hidden_act", hidden_act="gelu"),
            damaged("n_embd is 16 and hidden_size 32", hidden_size=32),
            damaged("layer_norm_epsilon is 1e-12 and layer_norm", layer_norm_eps=1e-5),
            damaged("rotary_emb_base is 1000 and rope_theta 5.0", rope_theta=5.0),
            damaged("lacks rotary_emb_base", rotary_emb_base=None),
            damaged("n_embd or hidden_size, n_inner or", n_embd=None, n_inner=None),
            damaged("n_positions or", n_positions=None, max_trained_positions=None),
            damaged("of even width", n_head=16),
            unsupported("head_dim 12 is not supported; known: 8", head_dim=12),
            unsupported(
                "rotary_scaling_factor 2 beside rope_parameters of kind linear",
                rotary_scaling_factor=2,
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
            ),
            damaged("wanted a JSON object", rope_scaling="ntk"),
        ),
    ),
    "t5": Family(
        t5,
        T5,
        {
            "vocab_size": 32128,
            "hidden_size": 768,
            "num_layers": 12,
            "num_heads": 12,
            "head_width": 64,
            "intermediate_size": 3072,
            "bias_reach": 128,
            "norm_eps": 1e-6,
            "activation": "relu",
            "gated": False,
        },
        resaved=without(T5, "n_positions")
        | {
            "dense_act_fn": "relu",
            "is_decoder": False,
            "is_encoder_decoder": False,
            "is_gated_act": False,
            "relative_attention_max_distance": 128,
        },
        least=t5.REQUIRED,
        odd=(
            (
                {
                    "feed_forward_proj": "gated-gelu",
                    "dense_act_fn": "gelu_new",
                    "is_gated_act": True,
                },
                {"activation": "gelu_tanh", "gated": True},
            ),
            ({"feed_forward_proj": "gated-gelu"}, {"activation": "gelu_tanh", "gated": True}),
            ({"d_kv": 128, "num_heads": 128}, {"head_width": 128, "num_heads": 128}),
            ({"relative_attention_max_distance": 256}, {"bias_reach": 256}),
            ({"layer_norm_epsilon": 1e-5}, {"norm_eps": 1e-5}),
        ),
        refused=(
            *(
                case
                for case in usual("T5ForSequenceClassification", "T5EncoderModel", size="d_kv")
                if not case[0].keys() & {"hidden_act", "num_attention_heads"}
            ),
            unsupported(feed_forward_proj="gated-silu"),
            unsupported("known: relu, gated-gelu", feed_forward_proj="gelu"),
            unsupported("dense_act_fn 'silu' .* known: relu", dense_act_fn="silu"),
            unsupported(is_gated_act=True),
            unsupported(is_decoder=True),
            damaged("num_buckets is 3, wanted", relative_attention_num_buckets=3),
            damaged("max_distance is 8, wanted .* 8", relative_attention_max_distance=8),
            *(
                ({"model_type": name}, UnsupportedModel, f"model_type '{name}' is not supported")
                for name in ("mt5", "umt5", "longt5")
            ),
        ),
    ),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_spelling_of_a_config_is_read(family):
    for hf in (family.published, OLD | family.published, family.resaved or family.published | NEW):
        assert family.converter.config(hf) == family.fields


@pytest.mark.parametrize("family", [one for one in FAMILIES if FAMILIES[one].least])
def test_what_a_config_leaves_out_has_the_default_of_transformers(family):
    family = FAMILIES[family]
    least = {key: family.published[key] for key in family.least}
    assert family.converter.config(least) == family.fields | (family.absent or {})


@pytest.mark.parametrize(
    ("family", "said", "read"),
    [(name, *case) for name, family in FAMILIES.items() for case in family.odd],
    ids=str,
)
def test_odd_configs_are_read(family, said, read):
    family = FAMILIES[family]
    assert family.converter.config(family.published | said) == family.fields | read


@pytest.mark.parametrize(
    ("family", "said", "error", "message"),
    [(name, *case) for name, family in FAMILIES.items() for case in family.refused],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(
    family, said, error, message, tmp_path
):
    sources.write_json(tmp_path / "source" / "config.json", FAMILIES[family].published | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


def dense(width: int, activation: str, **changes: Any) -> DenseLayer:
    return DenseLayer(width, width, activation=activation, **changes)  # pyright: ignore


TANH, GELU, RELU = (dense(16, name) for name in ("tanh", "gelu", "relu"))


# Those of goldens, their layers before the last, and whether they are given types.
RERANKERS = {
    "albert": (TANH, False),
    "bert": (TANH, True),
    "deberta": (GELU, True),
    "distilbert": (RELU, False),
    "electra": (GELU, True),
    "gte": (TANH, False),
    "jina_bert": (dense(15, "tanh"), True),
    "mpnet": (TANH, False),
    "nomic_bert": (TANH, True),
    "xlm_roberta": (dense(15, "tanh"), False),
}


@pytest.mark.parametrize("family", RERANKERS)
def test_a_reranker_is_two_layers_on_the_first_token(family, tmp_path):
    layer, types = RERANKERS[family]
    spec, _ = converted(golden(f"{family}_cross_encoder"), tmp_path)
    assert (spec.task, spec.head.pooling, spec.token_types) == ("rerank", ("cls",), types)
    assert spec.head.modules == (layer, DenseLayer(layer.out_features, 1, activation="identity"))


TENSORS = "tensors/model.safetensors:"
PROJECTION = f"{TENSORS}electra.embeddings_project.weight"
BIASES = f"{TENSORS}mpnet.encoder.relative_attention_bias.weight"
SECOND_GROUP = "encoder.albert_layer_groups.1.albert_layers.0"


@pytest.mark.parametrize(
    ("name", "tensor", "array", "message"),
    [
        (
            "albert_mean",
            f"{TENSORS}albert.{SECOND_GROUP}.ffn.bias",
            np.zeros(32, np.float32),
            r"unused: .*albert_layer_groups\.1\.",
        ),
        (
            "electra_mean",
            PROJECTION,
            np.zeros((16, 9), np.float32),
            r"wanted shape \(16, 10\), got \(16, 9\)",
        ),
        ("electra_mean", PROJECTION, None, r"missing: embeddings_project\.weight"),
        (
            "gte_cls",
            f"{TENSORS}encoder.layer.0.attention.qkv_proj.weight",
            None,
            r"missing: encoder\.layer\.0\.attention\.qkv_proj",
        ),
        (
            "jina_bert_mean",
            f"{TENSORS}encoder.layer.1.mlp.wo.weight",
            None,
            r"missing: encoder\.layer\.1\.mlp\.wo\.weight",
        ),
        (
            "jina_bert_code_odd_mean",
            f"{TENSORS}encoder.layer.1.mlp.down_layer.weight",
            None,
            r"missing: encoder\.layer\.1\.mlp\.down_layer\.weight",
        ),
        (
            "mpnet_cross_encoder",
            BIASES,
            np.zeros((16, 2), np.float32),
            r"wanted shape \(32, 2\), got \(16, 2\)",
        ),
        (
            "nomic_bert_mean",
            f"{TENSORS}encoder.layers.0.attn.Wqkv.bias",
            np.zeros(48, np.float32),
            r"unused: encoder\.layers\.0\.attn\.Wqkv\.bias",
        ),
    ],
    ids=str,
)
def test_tensors_that_are_missing_left_over_or_of_another_shape_are_named(
    name, tensor, array, message, tmp_path
):
    """By the names that they have in the file."""
    arrays = golden(name)
    assert (tensor in arrays) == (array is None or "wanted" in message)
    arrays[tensor] = array
    if array is None:
        del arrays[tensor]
    with pytest.raises(ConversionError, match=message):
        converted(arrays, tmp_path)
