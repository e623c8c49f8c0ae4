"""Converts ColPali, which embeds pages: PaliGemma and a projection of each token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from converters.families import qwen3
from converters.families.decoders import REQUIRED, decoder_config
from converters.families.gemma3 import HEAD_WIDTH
from converters.family import TensorRules
from converters.fields import (
    CONFIG_FIELDS,
    check_fields,
    either,
    require,
)
from converters.heads import read_optional_json
from converters.outline import Options, Outline
from converters.tokenizers.framed import FramedTokenizer
from converters.vision.dual import (
    SIGLIP,
    TOWER_SIZES,
    clip_config,
    clip_rules,
    image_rules,
    linear_rules,
    patch_rules,
    processor_fields,
)
from converters.vision.pages import (
    AUGMENTATION_TOKENS,
    engine_class,
    page_outline,
    read_part,
)
from converters.weights import Rule, one_plus

# transformers' defaults for missing fields of the language model and the image encoder. Sizes have
# no defaults here.
GEMMA_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 8192}
IMAGE_SIZES = (*TOWER_SIZES, "image_size", "patch_size")
VISION_TOWER_DEFAULTS: dict[str, Any] = {
    "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
IMAGE_TOKEN_ID = 256000
QUERY_PREFIX = "Question: "

GEMMA_RULES = [  # the rules of other decoders, but norms multiply by 1 + weight
    Rule(rule.sources, rule.target, one_plus) if rule.target.endswith("norm.scale") else rule
    for rule in qwen3.FAMILY.rules
]


def outline(source: Path, hf: Mapping[str, Any], options: Options) -> Outline:
    """Return the outline of the model in the folder `source`, whose config.json is `hf`. Raises
    UnsupportedModel and CheckpointError."""
    vlm = hf.get("vlm_config") or {}
    check_fields(f"{source / 'config.json'}, vlm_config", vlm, CONFIG_FIELDS)
    lm = GEMMA_DEFAULTS | read_part(source, "text_config", vlm.get("text_config") or {}, ["gemma"])
    require(lm, REQUIRED)
    stated = vlm.get("vision_config") or {}
    encoder = VISION_TOWER_DEFAULTS | read_part(
        source, "vision_config", stated, ["siglip_vision_model"]
    )
    require(encoder, IMAGE_SIZES)
    rules = image_rules(source, processor_fields(source), encoder, SIGLIP)
    rows, columns = rules.grid
    sizes = encoder | {"max_position_embeddings": rows * columns}
    image_config = clip_config(sizes, patch_bytes=rules.patch_bytes, patch_bias=True)
    image_id = either(vlm, "image_token_id", "image_token_index", IMAGE_TOKEN_ID)
    # the fields of Qwen3Config for the first Gemma; attention is bidirectional
    if lm.get("hidden_act", "gelu") == "gelu":  # old files mean the tanh approximation
        lm |= {"hidden_act": "gelu_pytorch_tanh"}
    bias = bool(lm.get("attention_bias", False))
    config = decoder_config(lm, lm.get("head_dim") or HEAD_WIDTH, causal=False) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": False,
        "embedding_scale": lm["hidden_size"] ** 0.5,
        "overflows_float16": True,
        "image": {key: value for key, value in vars(image_config).items() if value is not None},
        "image_token_id": image_id,
    }
    tokenizer = FramedTokenizer(source, lm["vocab_size"])
    processor = read_optional_json(source / "processor_config.json")
    bos, pad = tokenizer.special("bos_token"), tokenizer.special("pad_token")
    # what colpali-engine, whose text of a page has a second bos, and transformers put around texts
    before, prefix, end = (bos, "", "") if engine_class(hf) else ("", QUERY_PREFIX, "\n")
    prompt = processor.get("query_prefix", prefix)
    page = bos + before + processor.get("visual_prompt_prefix", "Describe the image.") + "\n"
    rules = msgspec.structs.replace(rules, token_id=image_id, after=tuple(tokenizer.ids(page)))
    tensors = TensorRules(
        rules=(
            *GEMMA_RULES,
            *patch_rules(half="", tower="tower.image.tower", bias=True),
            *clip_rules(half="", last_norm="post_layernorm", tower="tower.image.tower"),
            *linear_rules("multi_modal_projector.linear", "tower.image.projection"),
        ),
        ignored=("lm_head.weight", "embeddings.position_ids", "head.*"),
        prefixes=(
            *("vlm.", "model.", "language_model.", "model.", "language_model."),
            *("vision_tower.", "vision_model."),
        ),
    )
    return page_outline(
        source,
        options,
        hf,
        config,
        image=rules,
        prompt=prompt,
        limit=rows * columns + len(rules.after),
        tensors=tensors,
        tokenizer=tokenizer.framed(bos, pad * AUGMENTATION_TOKENS + end, prompt),
    )
