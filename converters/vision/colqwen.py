"""Converts ColQwen2, which embeds pages: Qwen2-VL or Qwen2.5-VL, and a projection of each token.

The language model and the texts around pages come first, then the image encoder.
"""

from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from converters.families import qwen3
from converters.families.qwen2_vl import text_config
from converters.family import TensorRules
from converters.fields import CONFIG_FIELDS, activation_of, check_fields, refuse_unknown
from converters.heads import read_optional_json
from converters.outline import Options, Outline
from converters.tokenizers.framed import FramedTokenizer
from converters.vision.dual import convolution, processor_fields
from converters.vision.image_rules import read_rules
from converters.vision.pages import (
    AUGMENTATION_TOKENS,
    engine_class,
    page_outline,
    read_part,
)
from converters.weights import (
    Rule,
    Transform,
    concatenate,
    concatenate_transposed,
    transpose,
)
from jaxembed.data.spec import ImageRules
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.images.prepare import max_tokens

# The model_type of the language model's config; Qwen3-VL is not one of ColQwen2's.
QWEN2_VL, QWEN2_5_VL, QWEN3_VL = "qwen2_vl", "qwen2_5_vl", "qwen3_vl"

# transformers' defaults for missing fields of vision_config.
VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    QWEN2_VL: {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
    },
    QWEN2_5_VL: {
        "depth": 32,
        "hidden_size": 3584,
        "out_hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    QWEN3_VL: {
        "depth": 27,
        "hidden_size": 1152,
        "out_hidden_size": 3584,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
SHARED_DEFAULTS = {
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
FRAMES = 2  # an image is a video of two equal frames
AXIAL_THETA = 10_000.0

IMAGE_PAD_ID = 151655
QUERY_PREFIX = "Query: "
PAGE_TEXT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)


def outline(source: Path, hf: Mapping[str, Any], options: Options) -> Outline:
    """Return the outline of the model in the folder `source`, whose config.json is `hf`. Raises
    UnsupportedModel and CheckpointError."""
    vlm = hf.get("vlm_config") or {}
    check_fields(f"{source / 'config.json'}, vlm_config", vlm, CONFIG_FIELDS)
    kind = vlm.get("model_type", QWEN2_VL)
    refuse_unknown("vlm_config of model_type", kind, (QWEN2_VL, QWEN2_5_VL))
    lm = text_config(_part(source, vlm, "text_config", kind))
    vision = SHARED_DEFAULTS | VISION_DEFAULTS[kind] | _part(source, vlm, "vision_config", kind)
    image, rules = encoder_and_rules(source, vision, kind, lm["hidden_size"])
    image_id = vlm.get("image_token_id") or IMAGE_PAD_ID
    config = lm | {"image_tower": "qwen_vision", "image": image, "image_token_id": image_id}
    tokenizer = FramedTokenizer(source, lm["vocab_size"])
    processor = read_optional_json(source / "processor_config.json")
    # the text of a page, in which one token stands for the image
    page = tokenizer.ids(processor.get("visual_prompt_prefix") or PAGE_TEXT)
    if page.count(image_id) != 1:
        raise CheckpointError(
            f"{source}: the text around a page has {page.count(image_id)} tokens {image_id}, which "
            "stand for images; wanted one"
        )
    at = page.index(image_id)
    rules = msgspec.structs.replace(
        rules, token_id=image_id, before=tuple(page[:at]), after=tuple(page[at + 1 :])
    )
    # what colpali-engine and what transformers put around a query
    prefix, end = ("", "") if engine_class(hf) else (QUERY_PREFIX, "\n")
    prompt = processor.get("query_prefix") or prefix
    limit, positions = max_tokens(rules), lm["max_positions"]
    if limit > positions:
        raise CheckpointError(
            f"a page has up to {limit} tokens, and the model has {positions} positions; lower "
            "max_pixels in preprocessor_config.json"
        )
    tensors = TensorRules(
        rules=(
            *qwen3.FAMILY.rules,
            *vision_rules("visual", "tower.image"),
        ),
        ignored=("lm_head.weight",),
        prefixes=("vlm.", "model.", "language_model.", "model."),
    )
    return page_outline(
        source,
        options,
        hf,
        config,
        image=rules,
        prompt=prompt,
        limit=limit,
        tensors=tensors,
        tokenizer=tokenizer.framed(
            before="",
            after=tokenizer.special("pad_token") * AUGMENTATION_TOKENS + end,
            prompt=prompt,
        ),
    )


def _part(source: Path, vlm: Mapping[str, Any], key: str, kind: str) -> dict[str, Any]:
    """Return the checked config of the part `key`, which is text_config or vision_config. Old files
    have the fields of text_config in `vlm` itself. `kind` is the model_type of `vlm`."""
    fields = vlm if key == "text_config" and vlm.get(key) is None else vlm.get(key) or {}
    return read_part(source, key, fields, [kind, f"{kind}_{key.removesuffix('_config')}"])


def encoder_and_rules(
    source: Path, vision: Mapping[str, Any], kind: str, width: int
) -> tuple[dict[str, Any], ImageRules]:
    """Return the config of the image encoder of the model in `source`, and how its images are
    prepared. `vision` is a vision_config with its defaults filled in, `kind` a key of
    VISION_DEFAULTS, and `width` that of the language model. Raises UnsupportedModel and
    CheckpointError."""
    encoder, merge = vision_config(vision, kind), vision["spatial_merge_size"]
    if encoder["out_size"] != width:
        raise CheckpointError(
            f"the image encoder outputs {encoder['out_size']} numbers per token, and the language "
            f"model takes {width}"
        )
    rules = read_rules(processor_fields(source), vision["patch_size"])
    if rules.area is None or rules.merge != merge:
        raise CheckpointError(
            f"{source}: its image processor merges {rules.merge} by {rules.merge} patches, and its "
            f"encoder merges {merge} by {merge}"
        )
    return encoder, rules


def vision_config(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of QwenVisionConfig for a vision_config with its defaults filled in. `kind`
    is a key of VISION_DEFAULTS. Raises UnsupportedModel and CheckpointError."""
    fields = dict(hf)
    dim = fields["embed_dim" if kind == QWEN2_VL else "hidden_size"]
    for name, required in (("in_channels", 3), ("temporal_patch_size", FRAMES)):
        refuse_unknown(name, fields[name], (required,))
    if dim % (4 * fields["num_heads"]):
        raise CheckpointError(
            f"the image encoder is {dim} wide; wanted a multiple of 4 * num_heads, which is "
            f"{4 * fields['num_heads']}, to rotate pairs by row and by column"
        )
    rope = fields.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", "axial")
    if rope_type != "axial":
        raise UnsupportedModel(f"rope_type {rope_type!r} of images is not supported; known: axial")
    config = {
        "hidden_size": dim,
        "num_layers": fields["depth"],
        "num_heads": fields["num_heads"],
        "patch_bytes": 3 * fields["patch_size"] ** 2,
        "merge": fields["spatial_merge_size"],
        "activation": activation_of(fields, "hidden_act"),
        "rope_theta": float(rope.get("rope_theta") or AXIAL_THETA),
    }
    if kind == QWEN2_VL:
        return config | {
            "intermediate_size": int(dim * fields["mlp_ratio"]),
            "out_size": fields["hidden_size"],
        }
    if kind == QWEN3_VL:
        return config | {
            "intermediate_size": fields["intermediate_size"],
            "out_size": fields["out_hidden_size"],
            "patch_bias": True,
            "table_size": fields["num_position_embeddings"],
            "deepstack": deepstack_layers(fields),
        }
    window_side = fields["window_size"] // fields["spatial_merge_size"] // fields["patch_size"]
    if not window_side:
        raise CheckpointError(f"window_size {fields['window_size']} is less than a token's side")
    return config | {
        "intermediate_size": fields["intermediate_size"],
        "out_size": fields["out_hidden_size"],
        "rms_norm": True,
        "window": window_side,
        "global_layers": list(fields["fullatt_block_indexes"]),
    }


def deepstack_layers(fields: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the layers whose output goes to the decoder's first layers. Raises
    CheckpointError unless they are numbers of layers in ascending order, and for a table of
    positions that is not square."""
    layers, size = list(fields["deepstack_visual_indexes"]), fields["num_position_embeddings"]
    if layers != sorted({*layers} & {*range(fields["depth"])}):
        raise CheckpointError(
            f"deepstack_visual_indexes is {layers}, wanted ascending numbers from 0 to "
            f"{fields['depth'] - 1}"
        )
    if isqrt(size) ** 2 != size:
        raise CheckpointError(f"num_position_embeddings is {size}, wanted a square number")
    return layers


def vision_rules(source: str, target: str) -> list[Rule]:
    """Return the image encoder's rules. `source` is the prefix of tensors, and `target` the prefix
    of parameters. Qwen2-VL has fc1 and fc2, Qwen2.5-VL gate_proj, up_proj and down_proj, and
    Qwen3-VL linear_fc1 and linear_fc2."""
    block, layer = f"{source}.blocks.{{i}}", f"{target}.layers.{{i}}"
    deepstack, merger = f"{source}.deepstack_merger_list.{{i}}", f"{target}.mergers.{{i}}"
    gated = [f"{block}.mlp.{name}_proj" for name in ("gate", "up")]
    linears = {
        f"{block}.attn.qkv": f"{layer}.qkv",
        f"{block}.attn.proj": f"{layer}.out",
        f"{block}.mlp.fc1": f"{layer}.mlp.up",
        f"{block}.mlp.fc2": f"{layer}.mlp.down",
        f"{block}.mlp.down_proj": f"{layer}.mlp.down",
        f"{block}.mlp.linear_fc1": f"{layer}.mlp.up",
        f"{block}.mlp.linear_fc2": f"{layer}.mlp.down",
        f"{source}.merger.mlp.0": f"{target}.up",
        f"{source}.merger.mlp.2": f"{target}.down",
        f"{source}.merger.linear_fc1": f"{target}.up",
        f"{source}.merger.linear_fc2": f"{target}.down",
        f"{deepstack}.linear_fc1": f"{merger}.up",
        f"{deepstack}.linear_fc2": f"{merger}.down",
    }
    norms = {
        f"{block}.norm1": f"{layer}.attention_norm",
        f"{block}.norm2": f"{layer}.mlp_norm",
        f"{source}.merger.ln_q": f"{target}.norm",
        f"{source}.merger.norm": f"{target}.norm",
        f"{deepstack}.norm": f"{merger}.norm",
    }
    return [
        Rule(f"{source}.patch_embed.proj.weight", f"{target}.patch.kernel", image_patch_kernel),
        Rule(f"{source}.patch_embed.proj.bias", f"{target}.patch.bias"),
        Rule(f"{source}.pos_embed.weight", f"{target}.position.table.embedding"),
        *(Rule(f"{old}.weight", f"{new}.kernel", transpose) for old, new in linears.items()),
        *(Rule(f"{old}.weight", f"{new}.scale") for old, new in norms.items()),
        *(Rule(f"{old}.bias", f"{new}.bias") for old, new in (linears | norms).items()),
        Rule(
            tuple(f"{name}.weight" for name in gated),
            f"{layer}.mlp.gate_up.kernel",
            concatenate_transposed,
        ),
        Rule(tuple(f"{name}.bias" for name in gated), f"{layer}.mlp.gate_up.bias", concatenate),
    ]


image_patch_kernel = Transform(  # sums over the equal frames; bfloat16 would round the sum
    lambda array: np.ascontiguousarray(
        array.astype(np.float32).sum(axis=2).transpose(2, 3, 1, 0).reshape(-1, len(array))
    ),
    lambda sources, shape: convolution(sources, shape, (3, FRAMES)),
    dtype="float32",
)
