"""Converts the image encoder of jina-embeddings-v4, on Qwen2.5-VL; how its images are prepared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from converters.family import Images
from converters.tokenizers.framed import FramedTokenizer
from converters.vision import qwen_vl

# From the authors' modeling_jina_embeddings_v4.py.
BEFORE_IMAGE = "<|im_start|>user\n<|vision_start|>"
AFTER_IMAGE = "<|vision_end|>Describe the image.<|im_end|>\n"


def images(hf: dict[str, Any], folder: Path) -> Images:
    """Return how the model in `folder` takes images. `hf` is its config.json with the fields of its
    text_config. Raises UnsupportedModel and CheckpointError."""
    found = qwen_vl.encoder_of(hf, folder)
    tokenizer = FramedTokenizer(folder, hf["vocab_size"])
    rules = qwen_vl.within_texts(found.image, tokenizer, BEFORE_IMAGE, AFTER_IMAGE)
    return replace(found, image=msgspec.structs.replace(rules, pools_image=True))
