"""Converts DSE-Qwen2 and models trained from it, mcdse and vdr: Qwen2-VL, which embeds pages, and
texts with a blank image before them.

Ma et al. 2024, arXiv:2406.11251.
"""

from functools import partial
from typing import Any

from converters.families import qwen2_vl
from converters.families.decoders import decoder_family
from converters.family import brings
from converters.heads import CODED_CLASS, README_CODES
from jaxembed.data.spec import BLANK_SIDE

# From the code in the README.md of dse-qwen2-2b-mrl-v1 and mcdse-2b-v1.
BEFORE_IMAGE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
)
AFTER_IMAGE = "<|vision_end|>"
END = dict.fromkeys(README_CODES, "<|im_end|>\n<|endoftext|>")
END["readme.DSE"] = "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
PROMPTS = {"query": "Query: ", "document": "Document: "}
BLANK = "<|video_pad|>"  # stands for each token of the blank image; no other video is read


def code_of(hf: dict[str, Any]) -> str:
    """Return the key in README_CODES of the code that the config names."""
    return hf["auto_map"]["AutoModel"]


def frame(hf: dict[str, Any]) -> tuple[str, str]:
    """Return what is put before and after each text."""
    return f"{BEFORE_IMAGE}{BLANK * BLANK_SIDE**2}{AFTER_IMAGE}", END[code_of(hf)]


FAMILY = decoder_family(
    classes=(CODED_CLASS,),
    own_code={"AutoModel": tuple(README_CODES)},
    prefixes=qwen2_vl.FAMILY.prefixes,
    images=("converters.vision.dse", "visual.*"),
    is_variant=partial(brings, codes=README_CODES),
    completed=qwen2_vl.FAMILY.completed,
    config=qwen2_vl.text_config,
    prompts=(PROMPTS, "query"),
    frame=frame,
)
