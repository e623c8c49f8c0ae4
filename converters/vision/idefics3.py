"""Converts ColModernVBERT and ColSmol, which embed pages that are cut into tiles: SigLIP, a text
model (ModernBERT or Llama), and a projection of each token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from converters.families import llama, modernbert
from converters.family import Family, TensorRules
from converters.fields import CONFIG_FIELDS, check_fields, check_multiple, refuse_unknown, require
from converters.heads import read_optional_json
from converters.outline import Options, Outline
from converters.tokenizers.framed import FramedTokenizer
from converters.vision.colpali import IMAGE_SIZES, VISION_TOWER_DEFAULTS
from converters.vision.dual import (
    IDEFICS3,
    clip_config,
    clip_rules,
    image_rules,
    patch_rules,
    processor_fields,
)
from converters.vision.pages import (
    AUGMENTATION_TOKENS,
    COLMODERNVBERT,
    PARTS,
    page_outline,
    read_part,
)
from converters.weights import Rule, transpose
from jaxembed.data.spec import ImageRules, Tiles
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.images.prepare import image_ids, max_tokens

# The tokens of an image, before and after its tiles, and after a query.
IMAGE, AROUND, END = "<image>", "<fake_token_around_image>", "<end_of_utterance>"
WHOLE = "<global-img>"
MAX_SHUFFLE = 8  # patches along the side of the square that becomes one token


@dataclass(frozen=True)
class _Kind:
    """What differs between the models. The defaults are transformers' for missing fields."""

    model_type: str  # that of the model without the projection
    text_types: tuple[str, ...]
    image_types: tuple[str, ...]
    family: Family  # of the text model
    config: Callable[[dict[str, Any]], dict[str, Any]]  # text_config -> the backbone's config
    architecture: str
    shuffle: tuple[str, int]  # the key of the side of a token in patches, and its default
    image_token_id: int
    start: str  # begins the text of a page
    text_defaults: Mapping[str, Any]
    image_defaults: Mapping[str, Any]
    renames: Mapping[str, str]


KINDS = {
    COLMODERNVBERT: _Kind(
        model_type="modernvbert",
        text_types=("modernbert",),
        image_types=("siglip_vision_model",),
        family=modernbert.FAMILY,
        config=modernbert.config,
        architecture="modernbert_pages",
        shuffle=("pixel_shuffle_factor", 4),
        image_token_id=50407,
        start="<|begin_of_text|>",
        text_defaults={
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "max_position_embeddings": 8192,
        },
        image_defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 224,
            "patch_size": 16,
        },
        renames={},
    ),
    IDEFICS3: _Kind(
        model_type=IDEFICS3,
        text_types=("llama",),
        image_types=("idefics3_vision", "idefics3"),
        family=llama.FAMILY,
        config=lambda text: llama.llama_config(text, causal=True),
        architecture="pages",
        shuffle=("scale_factor", 2),
        image_token_id=128257,
        start="<|im_start|>",
        text_defaults={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
        image_defaults={
            "hidden_size": 1152,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 32,
        },
        renames={f"linear.{part}": f"embedding_proj_layer.{part}" for part in PARTS},
    ),
}


def outline(source: Path, hf: Mapping[str, Any], options: Options) -> Outline:
    """Return the outline of the model in the folder `source`, whose config.json is `hf`. Raises
    UnsupportedModel and CheckpointError."""
    kind, vlm = KINDS[hf["model_type"]], hf.get("vlm_config") or {}
    check_fields(f"{source / 'config.json'}, vlm_config", vlm, CONFIG_FIELDS)
    refuse_unknown(
        "vlm_config of model_type", vlm.get("model_type", kind.model_type), (kind.model_type,)
    )
    text_config = vlm.get("text_config") or {}
    if "text_model_name" in text_config:
        raise UnsupportedModel(
            f"{source / 'config.json'} only names the text model, "
            f"{text_config['text_model_name']}, and lacks its settings; use "
            "ModernVBERT/colmodernvbert-merged, or another model of ColModernVBertForRetrieval"
        )
    text = {**kind.text_defaults, **read_part(source, "text_config", text_config, kind.text_types)}
    encoder = {
        **VISION_TOWER_DEFAULTS,
        **kind.image_defaults,
        **read_part(source, "vision_config", vlm.get("vision_config") or {}, kind.image_types),
    }
    require(encoder, IMAGE_SIZES)
    check_multiple(encoder, "hidden_size", "num_attention_heads")
    config, image_id = kind.config(text), vlm.get("image_token_id") or kind.image_token_id
    tokenizer = FramedTokenizer(source, text["vocab_size"])
    processor = read_optional_json(source / "processor_config.json")
    rules = image_rules(source, processor_fields(source), encoder, IDEFICS3)
    rules = msgspec.structs.replace(
        rules, token_id=image_id, merge=_merge(source, vlm, rules, kind)
    )
    rules = _with_texts(source, tokenizer, rules, _page_text(source, processor, kind.start))
    limit, positions = max_tokens(rules), config["max_positions"]
    if limit > positions:
        raise CheckpointError(
            f"a page has up to {limit} tokens, and the model has {positions} positions; lower "
            "`size` in preprocessor_config.json"
        )
    sizes = encoder | {"max_position_embeddings": rules.grid[0] * rules.grid[1]}
    tower = vars(clip_config(sizes, patch_bytes=rules.patch_bytes, patch_bias=True))
    config |= {
        "image": {key: value for key, value in tower.items() if value is not None}
        | {"merge": rules.merge, "projection_bias": False},
        "image_token_id": image_id,
    }
    connector = "connector.modality_projection"
    tensors = TensorRules(
        rules=(
            *kind.family.rules,
            *patch_rules(half="", tower="tower.image.tower", bias=True),
            *clip_rules(half="", last_norm="post_layernorm", tower="tower.image.tower"),
            Rule(f"{connector}.weight", "tower.image.projection.kernel", transpose),
        ),
        ignored=("lm_head.*", "head.*", "embeddings.position_ids"),
        prefixes=("vlm.", "model.", "text_model.", "vision_model."),
        renames={**kind.renames, f"{connector}.proj.weight": f"{connector}.weight"},
    )
    prompt = processor.get("query_prefix") or ""
    before, after = tokenizer.own_frame()
    return page_outline(
        source,
        options,
        hf,
        config,
        image=rules,
        prompt=prompt,
        limit=limit,
        tensors=tensors,
        tokenizer=tokenizer.framed(before, END * AUGMENTATION_TOKENS + after, prompt),
        architecture=kind.architecture,
    )


def _merge(source: Path, vlm: Mapping[str, Any], rules: ImageRules, kind: _Kind) -> int:
    """Return the side of a token in patches. Raises CheckpointError if tiles of the image processor
    have no whole number of tokens."""
    key, default = kind.shuffle
    merge = vlm.get(key, default)
    if type(merge) is not int or not 1 <= merge <= MAX_SHUFFLE or rules.grid[0] % merge:
        raise CheckpointError(
            f"{source / 'config.json'}: {key} is {merge!r}, wanted a divisor of the "
            f"{rules.grid[0]} patches along a side of a tile, at most {MAX_SHUFFLE}"
        )
    return merge


def _page_text(source: Path, processor: Mapping[str, Any], start: str) -> str:
    """Return the text of a page, in which the token IMAGE stands for the image. Raises
    CheckpointError if another number of such tokens is there."""
    text = processor.get("visual_prompt_prefix")
    text = text or f"{start}User:{IMAGE}Describe the image.{END}\nAssistant:"
    if not isinstance(text, str) or text.count(IMAGE) != 1:
        raise CheckpointError(
            f"{source / 'processor_config.json'}: visual_prompt_prefix is {text!r}, wanted a text "
            f"with one {IMAGE}"
        )
    return text


def _with_texts(
    source: Path, tokenizer: FramedTokenizer, rules: ImageRules, page: str
) -> ImageRules:
    """Return the rules with the tokens around the tiles of a page, whose text is `page`. Raises
    CheckpointError if a token is missing, or spans the text around two tiles."""
    for token in (IMAGE, AROUND, END):
        if len(tokenizer.ids(token)) != 1:
            raise CheckpointError(f"the tokenizer in {source} lacks the token {token}")
    if tokenizer.ids(IMAGE) != [rules.token_id]:
        raise CheckpointError(
            f"{source}: image_token_id is {rules.token_id}, and {IMAGE} has the id "
            f"{tokenizer.ids(IMAGE)[0]}"
        )
    assert rules.tiles is not None
    (first, last), (before, after) = page.split(IMAGE), tokenizer.own_frame()
    names = [
        [f"{AROUND}<row_{row}_col_{column}>" for column in _sides(rules)] for row in _sides(rules)
    ]
    # "\n" ends each row, and another one follows the last row
    row_end, whole = "\n", f"\n\n{AROUND}{WHOLE}"
    rules = msgspec.structs.replace(
        rules,
        before=tuple(tokenizer.ids(before + first)),
        after=tuple(tokenizer.ids(AROUND + last + after)),
        tiles=Tiles(
            rules.tiles.longest,
            tuple(tuple(tuple(tokenizer.ids(name)) for name in row) for row in names),
            tuple(tokenizer.ids(row_end)),
            tuple(tokenizer.ids(whole)),
        ),
    )
    tile = IMAGE * (rules.made[0] // rules.token_side) ** 2
    rows = row_end.join("".join(name + tile for name in row) for row in names)
    text = f"{before}{first}{rows}{whole}{tile}{AROUND}{last}{after}"
    if tokenizer.ids(text) != image_ids(1, 1, rules):
        raise CheckpointError(
            f"the tokenizer in {source} has tokens that span a tile's name and the text around it"
        )
    return rules


def _sides(rules: ImageRules) -> range:
    """Return the numbers of tiles along the longer side of an image, from 1."""
    assert rules.tiles is not None
    return range(1, ceil(rules.tiles.longest / rules.made[0]) + 1)
