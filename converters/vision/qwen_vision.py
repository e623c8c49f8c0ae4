"""What the converters of Qwen2-VL's kin share: the tower of images, its config and tensor rules."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from converters.fields import activation_of
from converters.weights import (
    Rule,
    Shape,
    Tensor,
    Transform,
    concatenate,
    concatenate_transposed,
    transpose,
)
from jaxembed.errors import CheckpointError, UnsupportedModel

SECOND, SECOND_AND_HALF = "qwen2_vl", "qwen2_5_vl"  # the model_type of the language model's config

# What transformers takes where vision_config names no value.
VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    SECOND: {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
    },
    SECOND_AND_HALF: {
        "depth": 32,
        "hidden_size": 3584,
        "out_hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
SHARED_DEFAULTS = {
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
FRAMES = 2  # of an image, which are both the image
AXIAL_THETA = 10_000.0


def with_defaults(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of a vision_config, with transformers' defaults for this kind of model."""
    given = {key: value for key, value in hf.items() if value is not None}
    return {**SHARED_DEFAULTS, **VISION_DEFAULTS[kind], **given}


def vision_config(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Read the fields of QwenVisionConfig from a vision_config, whose defaults are filled in.

    Raises UnsupportedModel for settings that we do not run, and CheckpointError for inconsistent
    ones.
    """
    fields = dict(hf)
    dim = fields["embed_dim" if kind == SECOND else "hidden_size"]
    for name, only in (("in_channels", 3), ("temporal_patch_size", FRAMES)):
        if fields[name] != only:
            raise UnsupportedModel(f"{name} {fields[name]!r} is not supported; known: {only}")
    if dim % (4 * fields["num_heads"]):
        raise CheckpointError(
            f"the tower of images is {dim} wide; wanted a multiple of 4 * num_heads, which is "
            f"{4 * fields['num_heads']}, to rotate pairs by row and by column"
        )
    config = {
        "hidden_size": dim,
        "num_layers": fields["depth"],
        "num_heads": fields["num_heads"],
        "patch_bytes": 3 * fields["patch_size"] ** 2,
        "merge": fields["spatial_merge_size"],
        "activation": activation_of(fields, "hidden_act"),
        "rope_theta": _theta(fields),
    }
    if kind == SECOND:
        return config | {
            "intermediate_size": int(dim * fields["mlp_ratio"]),
            "out_size": fields["hidden_size"],
        }
    side = fields["window_size"] // fields["spatial_merge_size"] // fields["patch_size"]
    if not side:
        raise CheckpointError(f"window_size {fields['window_size']} is less than a token's side")
    return config | {
        "intermediate_size": fields["intermediate_size"],
        "out_size": fields["out_hidden_size"],
        "rms_norm": True,
        "window": side,
        "global_layers": list(fields["fullatt_block_indexes"]),
    }


def vision_rules(source: str, target: str) -> list[Rule]:
    """The rules of the tower whose tensors begin with `source`, for the parameters of `target`."""
    block, layer = f"{source}.blocks.{{i}}", f"{target}.layers.{{i}}"
    gated = [f"{block}.mlp.{name}_proj" for name in ("gate", "up")]
    names = {
        f"{block}.attn.qkv": f"{layer}.qkv",
        f"{block}.attn.proj": f"{layer}.out",
        f"{block}.mlp.fc1": f"{layer}.mlp.up",
        f"{block}.mlp.fc2": f"{layer}.mlp.down",
        f"{block}.mlp.down_proj": f"{layer}.mlp.down",
        f"{source}.merger.mlp.0": f"{target}.up",
        f"{source}.merger.mlp.2": f"{target}.down",
    }
    norms = {
        f"{block}.norm1": f"{layer}.attention_norm",
        f"{block}.norm2": f"{layer}.mlp_norm",
        f"{source}.merger.ln_q": f"{target}.norm",
    }
    return [
        Rule(f"{source}.patch_embed.proj.weight", f"{target}.patch.kernel", still_kernel),
        *(Rule(f"{old}.weight", f"{new}.kernel", transpose) for old, new in names.items()),
        *(Rule(f"{old}.weight", f"{new}.scale") for old, new in norms.items()),
        *(Rule(f"{old}.bias", f"{new}.bias") for old, new in (names | norms).items()),
        Rule(
            tuple(f"{one}.weight" for one in gated),
            f"{layer}.mlp.gate_up.kernel",
            concatenate_transposed,
        ),
        Rule(tuple(f"{one}.bias" for one in gated), f"{layer}.mlp.gate_up.bias", concatenate),
    ]


def _theta(fields: Mapping[str, Any]) -> float:
    """The base of the angles. Raises UnsupportedModel for other angles than those of a plane."""
    rope = fields.get("rope_parameters") or {}
    kind = rope.get("rope_type", "axial")
    if kind != "axial":
        raise UnsupportedModel(f"rope_type {kind!r} of images is not supported; known: axial")
    return float(rope.get("rope_theta") or AXIAL_THETA)


def _still_kernel(array: np.ndarray) -> np.ndarray:
    still = array.astype(np.float32).sum(axis=2)  # bfloat16 would round the sum
    return np.ascontiguousarray(still.transpose(2, 3, 1, 0).reshape(-1, len(still)))


def _is_convolution(sources: Sequence[Tensor], shape: Shape) -> list[str]:
    """Check a kernel `[out, 3, FRAMES, size, size]` for a weight `[3 * size * size, out]`."""
    return [
        f"{source.name}: wanted a convolution for a weight {shape}, got {source.shape}"
        for source in sources
        if len(source.shape) != 5
        or source.shape[1:3] != (3, FRAMES)
        or source.shape[3] != source.shape[4]
        or (3 * source.shape[3] ** 2, source.shape[0]) != shape
    ]


still_kernel = Transform(_still_kernel, _is_convolution, dtype="float32")
