"""Converts ColQwen2, which reads pages: Qwen2-VL or Qwen2.5-VL, and a projection of each token."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from converters.families import qwen3
from converters.families.decoders import decoder_config, head_width_of, is_causal
from converters.families.qwen3 import qwen_windows
from converters.families.rope import read_parameters, rope_parameters
from converters.family import TensorRules
from converters.field_types import CONFIG_FIELDS, check_fields
from converters.heads import read_optional_json
from converters.outline import Options, Outline
from converters.tokenizers.tokenizer import read_tokenizer
from converters.vision.dual import processor_fields
from converters.vision.image_rules import read_rules
from converters.vision.page_words import FILLERS, PageModel, PageWords, read_part
from converters.vision.qwen_vision import (
    SECOND,
    VISION_DEFAULTS,
    vision_config,
    vision_rules,
    with_defaults,
)
from jaxembed.data.spec import ImageRules
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.images.prepare import MOST_ASPECT

# What transformers takes where a file names no value.
LM_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
}
LM_NORM_EPS, LM_THETA, ROPE_SECTIONS = 1e-5, 1_000_000.0, (16, 24, 24)
IMAGE_PAD_ID = 151655
QUERY_PREFIX = "Query: "
PAGE_TEXT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)


def read_colqwen(source: Path, hf: Mapping[str, Any], options: Options) -> Outline:
    """Describe a model. Raises UnsupportedModel for what is not supported, and CheckpointError."""
    vlm = hf.get("vlm_config") or {}
    check_fields(f"{source / 'config.json'}, vlm_config", vlm, CONFIG_FIELDS)
    kind = vlm.get("model_type", SECOND)
    if kind not in VISION_DEFAULTS:
        raise UnsupportedModel(
            f"vlm_config of model_type {kind!r} is not supported; known: "
            f"{', '.join(VISION_DEFAULTS)}"
        )
    text = _text_config(_part(source, vlm, "text_config", kind))
    given = with_defaults(_part(source, vlm, "vision_config", kind), kind)
    image = vision_config(given, kind)
    if image["out_size"] != text["hidden_size"]:
        raise CheckpointError(
            f"the tower of images gives {image['out_size']} numbers a token, and the language "
            f"model takes {text['hidden_size']}"
        )
    image_id = vlm.get("image_token_id") or IMAGE_PAD_ID
    config = text | {"image_tower": "qwen_vision", "image": image, "image_token_id": image_id}
    words = PageWords(
        source, read_tokenizer(source, lowercase=False, vocab_size=text["vocab_size"])
    )
    asked = read_optional_json(source / "processor_config.json")
    rules = _image_rules(
        source, given, words.ids(asked.get("visual_prompt_prefix") or PAGE_TEXT), image_id
    )
    prompt = asked.get("query_prefix") or QUERY_PREFIX
    model = PageModel(hf, config, rules, prompt, _limit(rules, text["max_positions"]))
    tensors = TensorRules(
        rules=(
            *qwen3.FAMILY.rules,
            *vision_rules("visual", "tower.image"),
            *model.projection_rules,
        ),
        ignored=("lm_head.weight",),
        prefixes=("vlm.", "model.", "language_model.", "model."),
    )
    tokenizer = words.framed("", words.special("pad_token") * FILLERS + "\n", prompt)
    return model.outline(source, options, tensors, tokenizer)


def _limit(rules: ImageRules, positions: int) -> int:
    """The most tokens of a page. Raises CheckpointError if the model has no positions for them."""
    limit = most_tokens(rules)
    if limit > positions:
        raise CheckpointError(
            f"a page has up to {limit} tokens, and the model positions for {positions}; lower "
            "max_pixels in preprocessor_config.json"
        )
    return limit


def most_tokens(rules: ImageRules) -> int:
    """The most tokens of a page. Long and narrow images have more than the area says, because
    their shorter side is a token at least."""
    assert rules.area is not None
    least, most = (pixels / rules.token_side**2 for pixels in rules.area)
    aspect = math.sqrt(MOST_ASPECT)
    grown = (math.sqrt(least) / aspect + 1) * (math.sqrt(least) * aspect + 1)
    of_image = max(most, math.sqrt(most) * aspect, grown)
    return len(rules.before) + math.floor(of_image) + len(rules.after)


def _image_rules(
    source: Path, vision: Mapping[str, Any], page: list[int], image_id: int
) -> ImageRules:
    """How pages are prepared, and what stands around them: the ids of `page`, in which one token
    stands for the image."""
    rules = read_rules(processor_fields(source), vision["patch_size"])
    if rules.area is None or rules.merge != vision["spatial_merge_size"]:
        raise CheckpointError(
            f"{source}: its processor merges {rules.merge} by {rules.merge} patches, and the tower "
            f"takes {vision['spatial_merge_size']} by {vision['spatial_merge_size']}"
        )
    if page.count(image_id) != 1:
        raise CheckpointError(
            f"{source}: the text around a page has {page.count(image_id)} tokens {image_id}, which "
            "stand for images; wanted one"
        )
    at = page.index(image_id)
    return msgspec.structs.replace(
        rules,
        token_id=image_id,
        before=tuple(page[:at]),
        after=tuple(page[at + 1 :]),
    )


def _part(source: Path, vlm: Mapping[str, Any], key: str, kind: str) -> dict[str, Any]:
    """The config of one part; that of texts may lie around it, in old files."""
    fields = vlm if key == "text_config" and vlm.get(key) is None else vlm.get(key) or {}
    return read_part(source, key, fields, [kind, f"{kind}_{key.removesuffix('_config')}"])


def _text_config(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of Qwen3Config of Qwen2-VL's language model, whose angles are those of the time,
    the row and the column of a token."""
    hf = {**LM_DEFAULTS, **given}
    parameters = dict(rope_parameters(hf))
    if parameters.get("rope_type", parameters.get("type")) == "mrope":
        parameters["rope_type"] = "default"
    sections = parameters.get("mrope_section") or list(ROPE_SECTIONS)
    width, theta = head_width_of(hf), hf.get("rope_theta", LM_THETA)
    rope = read_parameters(hf, width, parameters, theta, ("mrope_section",))
    if rope["rope_scaling"] is not None:
        raise UnsupportedModel(
            f"rope_type {rope['rope_scaling']['kind']!r} with mrope_section is not supported; "
            "known: default"
        )
    if len(sections) != 3 or 2 * sum(sections) != width:
        raise CheckpointError(
            f"mrope_section is {sections}, wanted three numbers whose sum is {width // 2}, the "
            "pairs of a head's dimensions"
        )
    causal = is_causal(hf, True)
    return (
        decoder_config(hf, width, causal=causal, rope=rope, norm_eps=LM_NORM_EPS)
        | qwen_windows(hf, causal)
        | {"qkv_bias": True, "out_bias": False, "qk_norm": False, "rope_sections": sections}
    )
