"""Converts the image encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and how images of Qwen3-VL's
embedder and reranker and of jina-reranker-m0 are prepared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from converters.family import Images
from converters.tokenizers.framed import FramedTokenizer
from converters.vision.colqwen import (
    QWEN2_VL,
    QWEN3_VL,
    SHARED_DEFAULTS,
    VISION_DEFAULTS,
    encoder_and_rules,
    vision_rules,
)
from converters.vision.pages import read_part
from jaxembed.data.spec import ImageRules
from jaxembed.errors import CheckpointError

# The ids of the tokens of an image, and before and after it.
TOKEN_IDS = {
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
# By model_type, the minimum and maximum tokens of an image in the authors' code: m0's modeling.py
# and qwen3_vl_embedding.py. They take the place of the limits in preprocessor_config.json. A lower
# maximum in this file is used.
TOKENS = {QWEN2_VL: (4, 768), QWEN3_VL: (4, 1800)}


def images(hf: dict[str, Any], folder: Path) -> Images:
    """Return how the model in `folder` takes images, with the limits in TOKENS. `hf` is its
    config.json with the fields of its text_config. Raises UnsupportedModel and CheckpointError."""
    found = encoder_of(hf, folder)
    return replace(found, image=limited(found.image, TOKENS[hf["model_type"]]))


def limited(image: ImageRules, tokens: tuple[int, int]) -> ImageRules:
    """Return the rules with limits of an image's tokens that are not above `tokens`, the minimum
    and the maximum."""
    assert image.area is not None
    token = image.token_side**2
    low, high = (min(*both) for both in zip(image.area, (token * n for n in tokens), strict=True))
    return msgspec.structs.replace(image, area=(low, high))


def encoder_of(hf: dict[str, Any], folder: Path) -> Images:
    """Return how the model in `folder` takes images, with the limits in preprocessor_config.json.
    The arguments and errors are those of `images`."""
    kind, stated = hf["model_type"], hf.get("vision_config") or {}
    # transformers 4 writes the model_type of the whole model
    stated = read_part(folder, "vision_config", stated, [f"{kind}_vision", kind])
    vision = SHARED_DEFAULTS | VISION_DEFAULTS[kind] | stated
    encoder, rules = encoder_and_rules(folder, vision, kind, hf["hidden_size"])
    image_id, start_id, end_id = ids = [hf.get(key, n) for key, n in TOKEN_IDS.items()]
    if max(ids) >= hf["vocab_size"]:
        raise CheckpointError(
            f"config.json: {', '.join(TOKEN_IDS)} are {ids}, wanted ids of the vocabulary, which "
            f"has {hf['vocab_size']}"
        )
    rules = msgspec.structs.replace(
        rules,
        token_id=image_id,
        before=(start_id,),
        after=(end_id,),
        # a table of positions is resized to the rows and columns of an image
        place_numbers=5 if "table_size" in encoder else rules.place_numbers,
    )
    config = {"image_tower": "qwen_vision", "image": encoder, "image_token_id": image_id}
    return Images(config, tuple(vision_rules("visual", "tower.image")), rules)


def within_texts(
    image: ImageRules, tokenizer: FramedTokenizer, before: str, after: str
) -> ImageRules:
    """Return the rules for images with the text `before` and `after` each one. These must end and
    begin with the tokens directly around an image. Raises CheckpointError otherwise."""
    start, end = (tuple(tokenizer.ids(text)) for text in (before, after))
    if (start[-1:], end[:1]) != (image.before, image.after):
        raise CheckpointError(
            f"the tokenizer gives {start} and {end} around an image; wanted the last and the first "
            f"of them to be {image.before} and {image.after}"
        )
    return msgspec.structs.replace(image, before=start, after=end)
