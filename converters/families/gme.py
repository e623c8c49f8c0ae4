"""Converts GME-Qwen2-VL: Qwen2-VL in a chat template, of texts, images and both in one input."""

from functools import partial
from typing import Any

from converters.families import qwen2_vl
from converters.families.decoders import decoder_family
from converters.family import brings
from jaxembed.errors import CheckpointError

# From the authors' modeling_gme_qwen2vl.py.
REPOS = ("", *(f"Alibaba-NLP/gme-Qwen2-VL-{size}-Instruct--" for size in ("2B", "7B")))
CODES = tuple(f"{repo}modeling_gme_qwen2vl.GmeQwen2VL" for repo in REPOS)
MAX_TOKENS = 1800
PROMPT = "You are a helpful assistant."
TEMPLATE = (
    "<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
    "<|im_start|>assistant\n<|endoftext|>"
)


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert a config.json with the fields of its text_config to Qwen3Config fields. Raises
    UnsupportedModel and CheckpointError."""
    fields, limit = qwen2_vl.text_config(hf), hf.get("max_length", MAX_TOKENS)
    if type(limit) is not int or limit < 1:
        raise CheckpointError(f"config.json: max_length is {limit!r}, wanted an integer over 0")
    # the code gives the tokens of images the positions of text
    return fields | {"max_positions": min(fields["max_positions"], limit), "rope_sections": []}


FAMILY = decoder_family(
    classes=("GmeQwen2VL", "Qwen2VLForConditionalGeneration"),
    own_code={"AutoModel": CODES},
    prefixes=qwen2_vl.FAMILY.prefixes,
    images=("converters.vision.gme", "visual.*"),
    is_variant=partial(brings, codes=CODES),
    completed=qwen2_vl.FAMILY.completed,
    config=config,
    chat=(PROMPT, "", TEMPLATE),
)
