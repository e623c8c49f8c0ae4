"""Reads folders of OpenCLIP (open_clip_config.json) as those of transformers' CLIP.

The defaults of fields, and what they mean, are those of `CLIPVisionCfg`, `CLIPTextCfg` and
`PreprocessCfg` of open_clip_torch 3.3.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from converters import weights
from converters.fields import (
    OPEN_CLIP_FIELDS,
    check_fields,
    check_multiple,
    given,
    lookup,
    refuse_unknown,
)
from converters.heads import read_optional_json
from converters.weights import Tensor
from jaxembed.errors import CheckpointError

CONFIG = "open_clip_config.json"
SAFETENSORS, TORCH_FILE = "open_clip_model.safetensors", "open_clip_pytorch_model.bin"
WEIGHT_FILES = ("open_clip_model*.safetensors", "open_clip_pytorch_model*.bin")

VISION_DEFAULTS = {
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "image_size": 224,
}
TEXT_DEFAULTS = {
    "context_length": 77,
    "vocab_size": 49408,
    "width": 512,
    "heads": 8,
    "layers": 12,
    "mlp_ratio": 4.0,
    "pool_type": "argmax",
    "eos_id": 2,
}
# Fields that change what is computed, and the only values with which they are served.
BLOCK_FIXED = {
    "ls_init_value": [None],
    "final_ln_after_pool": [False],
    "act_kwargs": [None, {}],
    "norm_kwargs": [None, {}],
    "block_type": [None, "default"],
    "qk_norm": [False],
    "scaled_cosine_attn": [False],
    "scale_heads": [False],
    "scale_attn_inner": [False],
    "scale_attn": [False],
    "scale_fc": [False],
}
FIXED: dict[str, dict[str, list[Any]]] = {
    "vision_cfg": {
        "timm_model_name": [None, ""],
        "attentional_pool": [False],
        "no_ln_pre": [False],
        "pool_type": ["tok"],
        **BLOCK_FIXED,
    },
    "text_cfg": {
        "hf_model_name": [None, ""],
        "embed_cls": [False],
        "no_causal_mask": [False],
        "pool_type": ["argmax", "eos"],
        "proj_bias": [False],
        "proj_type": ["linear"],
        "tokenizer_mode": [None, ""],
        **BLOCK_FIXED,
    },
}
# Fields that change no vector: of training, of other towers, and the kind of a fixed table.
UNUSED = (
    *("patch_dropout", "output_tokens", "pos_embed_type", "pad_id", "hf_tokenizer_name"),
    *("tokenizer_kwargs", "attn_pooler_queries", "attn_pooler_heads"),
)
UNUSED_PREFIXES = ("timm_", "hf_")  # of fields that only another tower has
TOP_FIELDS = (
    *("embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text", "init_logit_scale"),
    *("init_logit_bias", "nonscalar_logit_scale", "output_dict", "cast_dtype"),
)
RESAMPLE = {"bilinear": 2, "bicubic": 3, "random": 3}  # as numbers of Pillow

# OpenCLIP's names of tensors, and those of transformers' CLIP.
NAMES = (
    (r"^text\.", ""),
    (r"^visual\.transformer\.resblocks", "vision_model.encoder.layers"),
    (r"^transformer\.resblocks", "text_model.encoder.layers"),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),  # the spelling in checkpoints
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
)


def is_open_clip(folder: Path) -> bool:
    """Return whether OpenCLIP saved the model in `folder`, and transformers did not."""
    return (folder / CONFIG).is_file() and not read_optional_json(folder / "config.json").get(
        "model_type"
    )


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the fields that config.json and preprocessor_config.json of a CLIP model would have,
    and whether texts are made lower case. Raises UnsupportedModel and CheckpointError."""
    path = str(folder / CONFIG)
    config = read_optional_json(folder / CONFIG)
    check_fields(path, config, OPEN_CLIP_FIELDS)
    model = given(config.get("model_cfg") or {})
    _refuse_others("model_cfg", model, TOP_FIELDS)
    if "embed_dim" not in model:
        raise CheckpointError(f"{path} lacks model_cfg.embed_dim")
    vision = VISION_DEFAULTS | _tower(model, "vision_cfg", VISION_DEFAULTS)
    text = TEXT_DEFAULTS | _tower(model, "text_cfg", TEXT_DEFAULTS)
    check_multiple(vision, "width", "head_width")
    activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
    # The rules of the two types differ only in what eos_token_id 2 means. In CLIP the token with
    # the largest id ends texts then, as with `argmax`; in MetaCLIP 2 it is the id, as with `eos`.
    is_eos = text["pool_type"] == "eos"
    clip = {
        "model_type": "metaclip_2" if is_eos else "clip",
        "projection_dim": model["embed_dim"],
        "text_config": _sizes(text, text["heads"], activation)
        | {
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["context_length"],
            "eos_token_id": text["eos_id"] if is_eos else 2,
        },
        "vision_config": _sizes(vision, vision["width"] // vision["head_width"], activation)
        | {"image_size": vision["image_size"], "patch_size": vision["patch_size"]},
    }
    preprocess = given(config.get("preprocess_cfg") or {})
    processor = clip_processor(CONFIG, preprocess, vision["image_size"])
    return clip, processor, _is_lower(text)


def _tower(model: Mapping[str, Any], key: str, known: Collection[str]) -> dict[str, Any]:
    """Return the fields of a tower. Raises UnsupportedModel for those that are not served."""
    fields = given(model.get(key) or {})
    for name, values in FIXED[key].items():
        refuse_unknown(f"{CONFIG}: {key}.{name}", fields.get(name, values[0]), values)
    others = {name for name in fields if not name.startswith(UNUSED_PREFIXES)}
    _refuse_others(key, others, (*known, *FIXED[key], *UNUSED))
    return fields


def _refuse_others(where: str, fields: Collection[str], known: Collection[str]) -> None:
    for name in fields:
        refuse_unknown(f"{CONFIG}: the field of {where}", name, known)


def _sizes(tower: Mapping[str, Any], heads: int, activation: str) -> dict[str, Any]:
    return {
        "hidden_size": tower["width"],
        "intermediate_size": int(tower["width"] * tower["mlp_ratio"]),
        "num_hidden_layers": tower["layers"],
        "num_attention_heads": heads,
        "hidden_act": activation,
    }


def clip_processor(where: str, fields: Mapping[str, Any], side: int) -> dict[str, Any]:
    """Return the fields of transformers' CLIP processor for OpenCLIP's `fields`, of the file
    `where`. Images become squares of `side` pixels. Raises UnsupportedModel."""
    square = {"height": side, "width": side}
    mode = fields.get("resize_mode", "shortest")
    refuse_unknown(f"{where}: resize_mode", mode, ("shortest", "squash"))
    interpolation = fields.get("interpolation", "bicubic")
    sizes = (
        {"size": {"shortest_edge": side}, "crop_size": square}
        if mode == "shortest"
        else {"size": square, "do_center_crop": False}
    )
    colours = {
        f"image_{name}": value if isinstance(value, list) else [value] * 3
        for name in ("mean", "std")
        if (value := fields.get(name)) is not None
    }
    resample = lookup(f"{where}: interpolation", interpolation, RESAMPLE)
    return {"image_processor_type": "CLIPImageProcessor", "resample": resample, **sizes, **colours}


def _is_lower(text: Mapping[str, Any]) -> bool:
    """Return whether texts are made lower case, as by default with OpenCLIP's own tokenizer."""
    settings = text.get("tokenizer_kwargs") or {}
    _refuse_others("tokenizer_kwargs", settings, ("clean",))
    clean = settings.get("clean", "whitespace" if text.get("hf_tokenizer_name") else "lower")
    refuse_unknown(f"{CONFIG}: tokenizer_kwargs.clean", clean, ("lower", "whitespace"))
    return clean == "lower"


def find(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder under transformers' names of CLIP. Raises UnsupportedModel and
    CheckpointError as `weights.find`."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.find(folder, SAFETENSORS, TORCH_FILE).items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        parts = {name: tensor}
        if ".in_proj_" in name:
            parts = _thirds(name, tensor)
        elif name in ("text_projection.weight", "visual_projection.weight"):
            # saved as [in, out], as OpenCLIP multiplies from the right
            parts[name] = replace(tensor, shape=tensor.shape[::-1], read=_turned(tensor))
        found |= {new: replace(part, name=new) for new, part in parts.items()}
    return found


def _turned(tensor: Tensor) -> Any:
    return lambda: np.ascontiguousarray(tensor.read().T)


def _thirds(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split a joint projection into those of queries, keys and values."""
    rows = tensor.shape[0] // 3

    def part(number: int) -> Tensor:
        within = slice(number * rows, (number + 1) * rows)
        shape = (rows, *tensor.shape[1:])
        return replace(tensor, shape=shape, read=lambda: tensor.read()[within])

    return {
        name.replace("in_proj_", f"{letter}_proj."): part(number)
        for number, letter in enumerate("qkv")
    }
