"""Converts the image encoder of jina-embeddings-v4, on Qwen2.5-VL; how its images are prepared."""

from pathlib import Path
from typing import Any

import msgspec

from converters.family import Images
from converters.tokenizers.framed import FramedTokenizer
from converters.vision import qwen_vl
from jaxembed.errors import CheckpointError

# From the authors' modeling_jina_embeddings_v4.py.
BEFORE_IMAGE = "<|im_start|>user\n<|vision_start|>"
AFTER_IMAGE = "<|vision_end|>Describe the image.<|im_end|>\n"


def images(hf: dict[str, Any], folder: Path) -> Images:
    """Return how the model in `folder` takes images. `hf` is its config.json with the fields of its
    text_config. Raises UnsupportedModel and CheckpointError."""
    found = qwen_vl.encoder_of(hf, folder)
    tokenizer = FramedTokenizer(folder, hf["vocab_size"])
    before, after = (tuple(tokenizer.ids(text)) for text in (BEFORE_IMAGE, AFTER_IMAGE))
    if (before[-1:], after[:1]) != (found.image.before, found.image.after):
        raise CheckpointError(
            f"{folder}: its tokenizer gives {before} and {after} around an image; wanted the last "
            f"and the first of them to be {found.image.before} and {found.image.after}"
        )
    rules = msgspec.structs.replace(found.image, before=before, after=after, pools_image=True)
    return Images(found.config, found.rules, rules)
