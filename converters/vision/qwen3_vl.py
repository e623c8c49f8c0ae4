"""Converts the image encoder of Qwen3-VL-Embedding, and how its images are prepared."""

from pathlib import Path
from typing import Any

import msgspec

from converters.families.rope import mrope_sections, rope_parameters
from converters.family import Images
from converters.vision.colqwen import (
    QWEN3_VL,
    SHARED_DEFAULTS,
    VISION_DEFAULTS,
    vision_config,
    vision_rules,
)
from converters.vision.dual import processor_fields
from converters.vision.image_rules import read_rules
from converters.vision.pages import read_part
from jaxembed.errors import CheckpointError

ROPE_SECTIONS = (24, 20, 20)
# The ids of the tokens of an image, and before and after it.
TOKEN_IDS = {
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
# The limits of an image in the authors' qwen3_vl_embedding.py, which take the place of those in
# preprocessor_config.json. A lower maximum in this file is used.
MIN_TOKENS, MAX_TOKENS = 4, 1800


def images(hf: dict[str, Any], folder: Path) -> Images:
    """Return how the model in `folder` takes images. `hf` is its config.json with the fields of its
    text_config. Raises UnsupportedModel and CheckpointError."""
    stated = hf.get("vision_config") or {}
    stated = read_part(folder, "vision_config", stated, [f"{QWEN3_VL}_vision"])
    vision = SHARED_DEFAULTS | VISION_DEFAULTS[QWEN3_VL] | stated
    encoder = vision_config(vision, QWEN3_VL)
    if encoder["out_size"] != hf["hidden_size"]:
        raise CheckpointError(
            f"the image encoder outputs {encoder['out_size']} numbers per token, and the language "
            f"model takes {hf['hidden_size']}"
        )
    rules = read_rules(processor_fields(folder), vision["patch_size"])
    if rules.area is None or rules.merge != vision["spatial_merge_size"]:
        raise CheckpointError(
            f"{folder}: its image processor merges {rules.merge} by {rules.merge} patches, and its "
            f"encoder merges {vision['spatial_merge_size']} by {vision['spatial_merge_size']}"
        )
    bounds = zip(rules.area, (MIN_TOKENS, MAX_TOKENS), strict=True)
    low, high = (min(pixels, tokens * rules.token_side**2) for pixels, tokens in bounds)
    image_id, start_id, end_id = (hf.get(key, number) for key, number in TOKEN_IDS.items())
    rules = msgspec.structs.replace(
        rules,
        area=(low, high),
        token_id=image_id,
        before=(start_id,),
        after=(end_id,),
        place_numbers=5,
    )
    sections = mrope_sections(rope_parameters(hf), ROPE_SECTIONS, hf["head_dim"])
    config = {
        "image_tower": "qwen_vision",
        "image": encoder,
        "image_token_id": image_id,
        "rope_sections": sections,
        "rope_interleaved": True,
    }
    return Images(config, tuple(vision_rules("visual", "tower.image")), rules)
