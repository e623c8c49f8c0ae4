"""Converts jina-clip-v1 and jina-clip-v2, which put texts and images into one space.

The images' encoder is EVA-02 (Fang et al. 2023, arXiv:2303.11331). The texts' encoder is JinaBERT
v2 with ALiBi, or the XLM-RoBERTa of jina-embeddings-v3, whose adapter for the default task is
merged into its weights. config.json names its repository instead of its sizes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from converters import weights
from converters.families import jina, jina_bert
from converters.family import BuiltIn, Family, TensorRules
from converters.features.adapters import with_built_in
from converters.fields import (
    JINA_CLIP_FIELDS,
    OPEN_CLIP_FIELDS,
    check_fields,
    check_multiple,
    given,
    lookup,
    refuse_unknown,
    refuse_unless,
)
from converters.heads import token_limit
from converters.outline import Reader
from converters.tokenizers.tokenizer import read_tokenizer
from converters.vision import dual
from converters.vision.dual import JINA_CLIP, Parts, Source, linear_rules, norm_rules, normalized
from converters.vision.open_clip import clip_processor
from converters.weights import (
    Rule,
    Tensor,
    Transform,
    canonical,
    check_shape,
    concatenate,
    concatenate_transposed,
    reshaped,
    transpose,
)
from jaxembed.data.spec import IMAGE_ROUTE, TEXT_ROUTE, Pooled
from jaxembed.errors import CheckpointError
from jaxembed.models.bert import Bert, BertConfig
from jaxembed.models.clip import CLASS_ID, ClipConfig

PROCESSOR = "preprocessor_config.json"
PREFIXES = ("text_model.transformer.", *jina.FAMILY.prefixes)

# JinaBERT v2 with jina.FAMILY's names of tensors, as jina-bert-flash-implementation has it.
JINA_BERT = replace(
    jina_bert.FAMILY,
    rules=(
        *(rule for rule in jina.FAMILY.rules if ".mlp." not in rule.target),
        Rule(
            f"{jina.LAYER}.mlp.gated_layers.weight", f"{jina.TARGET}.mlp.gate_up.kernel", transpose
        ),
        Rule(f"{jina.LAYER}.mlp.wo.weight", f"{jina.TARGET}.mlp.down.kernel", transpose),
        Rule(f"{jina.LAYER}.mlp.wo.bias", f"{jina.TARGET}.mlp.down.bias"),
    ),
)
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("intermediate_size", "max_position_embeddings", "type_vocab_size", "layer_norm_eps")
# By the repository that config.json names: the family of the texts' encoder, and what the
# repository's own config.json says.
ENCODERS: dict[str, tuple[Family, dict[str, Any]]] = {
    "jinaai/jina-bert-flash-implementation": (
        JINA_BERT,
        dict(zip(_SIZES, (30528, 768, 12, 12, 3072, 8192, 2, 1e-12), strict=True))
        | {"position_embedding_type": "alibi", "feed_forward_type": "geglu"},
    ),
    "jinaai/jina-embeddings-v3": (
        jina.FAMILY,
        dict(zip(_SIZES, (250002, 1024, 24, 16, 4096, 8194, 1, 1e-5), strict=True))
        | {"position_embedding_type": "rotary"},
    ),
}

# Defaults of JinaCLIPTextConfig and JinaCLIPVisionConfig for missing fields.
DEFAULTS: dict[str, dict[str, Any]] = {
    "text_config": {
        "embed_dim": 768,
        "hf_model_name_or_path": "jinaai/jina-bert-flash-implementation",
        "hf_model_config_kwargs": {},
    },
    "vision_config": {
        "embed_dim": 768,
        "width": 768,
        "image_size": 224,
        "patch_size": 16,
        "layers": 12,
        "head_width": 64,
        "mlp_ratio": 4.0,
        "pt_hw_seq_len": 16,
        "intp_freq": False,
    },
}
# Fields that change what is computed, and the only values that are served, None if missing. Under
# "" are those of config.json itself.
SERVED: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {"add_projections": (False, None), "truncate_dim": (None,)}
    | dict.fromkeys(("text_config_dict", "vision_config_dict"), (None,)),
    "text_config": {
        "pooler_type": ("mean_pooler",),
        "proj_type": (None,),
        "default_instruction_task": (None,),
    },
    "vision_config": {
        "proj_type": (None,),
        "ls_init_value": (None,),
        "qkv_bias": (True, None),
        "post_norm": (False, None),
        **dict.fromkeys(("rope_embeddings", "naive_swiglu", "subln"), (True,)),
    },
}


def _fields(model: Source, key: str) -> dict[str, Any]:
    """Return the field `key` of config.json, the config of a half, with its defaults filled in.
    Raises UnsupportedModel for a value that is not served, and CheckpointError."""
    path = str(model.folder / "config.json")
    stated = given(model.hf.get(key) or {})
    check_fields(f"{path}, {key}", stated, JINA_CLIP_FIELDS[key])
    for part, fields in {"": model.hf, key: stated}.items():
        for name, values in SERVED[part].items():
            refuse_unknown(f"{path}: {name}", fields.get(name), values)
    return DEFAULTS[key] | stated


def text_half(model: Source) -> Parts:
    """Read the half of texts: the mean of the last hidden states."""
    fields = _fields(model, "text_config")
    where = f"{model.folder / 'config.json'}, text_config"
    name = fields["hf_model_name_or_path"]
    family, published = lookup(f"{where}: hf_model_name_or_path", name, ENCODERS)
    hf = published | given(fields["hf_model_config_kwargs"])
    refuse_unless(hf, {"use_qk_norm": (False,)})
    config = BertConfig(**family.config(hf))
    if fields["embed_dim"] != config.hidden_size:
        raise CheckpointError(
            f"{where}: embed_dim is {fields['embed_dim']}, wanted {config.hidden_size}, the "
            "hidden_size: projections are not served"
        )
    ignored = (*family.ignored, "vision_model.*", "logit_scale")
    own, task = family.built_in(hf), fields.get("default_lora_task")
    refuse_unknown(f"{where}: default_lora_task", task, own.names if own else (None,))
    find = partial(_find, own=own, task=str(task), ignored=ignored) if own else weights.find
    tensors = TensorRules(
        rules=family.rules, ignored=ignored, prefixes=PREFIXES, renames=family.renames, find=find
    )
    tokenizer = read_tokenizer(model.folder, lowercase=False, vocab_size=config.vocab_size)
    limit = token_limit(model.folder, Bert.position_limit(config))
    head = Pooled(("mean",), normalized(model))
    return tensors, config, head, tokenizer, {"max_input_tokens": limit}


def _find(folder: Path, own: BuiltIn, task: str, ignored: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names of rules, with the adapter `task` merged into
    those of the texts' encoder. Raises ConversionError, and the errors of `weights.find`."""
    name = str(folder)
    tensors = canonical(name, weights.find(folder), PREFIXES, jina.FAMILY.renames)
    return with_built_in(name, own, task, ignored, tensors)


def image_half(model: Source) -> Parts:
    """Read the half of images: the last hidden state of the class token."""
    fields = _fields(model, "vision_config")
    where = f"{model.folder / 'config.json'}, vision_config"
    check_multiple(fields, "width", "head_width")
    if fields["head_width"] % 4 or fields["embed_dim"] != fields["width"]:
        raise CheckpointError(
            f"{where}: head_width is {fields['head_width']}, wanted a multiple of 4, and embed_dim "
            f"{fields['embed_dim']}, wanted the width, {fields['width']}, as projections are not "
            "served"
        )
    rules = dual.image_rules(model.folder, _processor(model), fields, JINA_CLIP)
    rules = msgspec.structs.replace(rules, before=(CLASS_ID,), rounds_crop=True)
    side, span = rules.grid[0], fields["pt_hw_seq_len"]
    if not fields["intp_freq"] and span != side:
        raise CheckpointError(
            f"{where}: pt_hw_seq_len is {span}, wanted {side}, the patches along a side, as "
            "intp_freq is not true"
        )
    width, heads, tokens = fields["width"], fields["width"] // fields["head_width"], 1 + side**2
    config = ClipConfig(
        hidden_size=width,
        num_layers=fields["layers"],
        num_heads=heads,
        intermediate_size=int(width * fields["mlp_ratio"]),
        max_positions=tokens,
        norm_eps=1e-6,
        activation="silu",
        patch_bytes=rules.patch_bytes,
        patch_bias=True,
        class_token=True,
        rotary_span=span,
    )
    tensors = TensorRules(
        rules=_eva_rules(width, heads, tokens),
        # the angles that early files have
        ignored=("text_model.*", "logit_scale", "vision_model.*rope.freqs_*"),
    )
    head = Pooled(("cls",), normalized(model))
    return tensors, config, head, b"", {"max_input_tokens": tokens, "image": rules}


def _processor(model: Source) -> Mapping[str, Any]:
    """Return the fields of transformers' CLIP processor that does what the model's own does."""
    where, fields = str(model.folder / PROCESSOR), given(model.processor)
    kind = fields.get("image_processor_type")
    refuse_unknown(f"{where}: image_processor_type", kind, ("JinaCLIPImageProcessor",))
    check_fields(where, fields, OPEN_CLIP_FIELDS["preprocess_cfg"].fields)
    return clip_processor(where, fields, fields.get("size", 224))


def _eva_rules(width: int, heads: int, tokens: int) -> list[Rule]:
    """Return the rules of EVA-02. `tokens` are those of an image, with the class token."""
    block, target = "vision_model.blocks.{i}", "tower.layers.{i}"
    qkv = tuple(f"{block}.attn.{letter}_proj.weight" for letter in "qkv")
    gate_up = f"{block}.mlp.w1", f"{block}.mlp.w2"
    embeddings = "tower.embeddings"
    return [
        Rule("vision_model.cls_token", f"{embeddings}.class_token.embedding", reshaped(1, width)),
        Rule("vision_model.pos_embed", f"{embeddings}.position.embedding", reshaped(tokens, width)),
        Rule(
            "vision_model.patch_embed.proj.weight", f"{embeddings}.patch.kernel", dual.patch_kernel
        ),
        Rule("vision_model.patch_embed.proj.bias", f"{embeddings}.patch.bias"),
        Rule(qkv, f"{target}.qkv.kernel", _rotary_kernel(heads)),
        Rule(
            (f"{block}.attn.q_bias", f"{block}.attn.v_bias"),
            f"{target}.qkv.bias",
            _rotary_bias(heads),
        ),
        *linear_rules(f"{block}.attn.proj", f"{target}.out"),
        Rule(
            tuple(f"{one}.weight" for one in gate_up),
            f"{target}.mlp.gate_up.kernel",
            concatenate_transposed,
        ),
        Rule(tuple(f"{one}.bias" for one in gate_up), f"{target}.mlp.gate_up.bias", concatenate),
        *linear_rules(f"{block}.mlp.w3", f"{target}.mlp.down"),
        *norm_rules(f"{block}.norm1", f"{target}.attention_norm"),
        *norm_rules(f"{block}.attn.inner_attn_ln", f"{target}.mixed_norm"),
        *norm_rules(f"{block}.norm2", f"{target}.mlp_norm"),
        *norm_rules(f"{block}.mlp.ffn_ln", f"{target}.wide_norm"),
        *norm_rules("vision_model.norm", "tower.norm"),
    ]


def _halved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a projection to queries or keys in another order: EVA-02 rotates rows 2k
    and 2k + 1 of a head together, and `Rotation` rows k and k + width / 2."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _rotary_kernel(heads: int) -> Transform:
    """Return a transform that joins the projections to queries, keys and values."""
    return Transform(
        lambda q, k, v: np.concatenate([_halved(q, heads), _halved(k, heads), v]).T.copy(),
        lambda sources, shape: check_shape(sources, (shape[1] // 3, shape[0])),
    )


def _rotary_bias(heads: int) -> Transform:
    """Return a transform that joins the biases of queries and values. Keys have none: zeros."""
    return Transform(
        lambda q, v: np.concatenate([_halved(q, heads), np.zeros_like(q), v]),
        lambda sources, shape: check_shape(sources, (shape[0] // 3,)),
    )


READER = Reader(
    partial(dual.is_dual, kinds=(JINA_CLIP,)),
    partial(dual.read_outlines, halves={TEXT_ROUTE: text_half, IMAGE_ROUTE: image_half}),
    dual.READER.weight_folders,
)
