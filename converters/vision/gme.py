"""Converts the image encoder of GME-Qwen2-VL, and how its images are prepared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from converters.family import Images
from converters.vision import qwen_vl
from jaxembed.errors import CheckpointError

# From the authors' modeling_gme_qwen2vl.py, which resizes an image twice: limits of its tokens.
FIRST_TOKENS = (4, 16_384)
TOKENS = {"min_image_tokens": 256, "max_image_tokens": 1280}  # by their keys in config.json


def images(hf: dict[str, Any], folder: Path) -> Images:
    """Return how the model in `folder` takes images. `hf` is its config.json with the fields of its
    text_config. Raises UnsupportedModel and CheckpointError."""
    found = qwen_vl.encoder_of(hf, folder)
    token = found.image.token_side**2
    (low, high), (least, most) = FIRST_TOKENS, (hf.get(key, n) for key, n in TOKENS.items())
    if least > most:
        raise CheckpointError(
            f"config.json: min_image_tokens is {least}, more than max_image_tokens, {most}"
        )
    rules = msgspec.structs.replace(
        found.image,
        first_area=(low * token, high * token),
        clamps_aspect=True,
        area=(least * token, most * token),
    )
    return replace(found, image=rules)
