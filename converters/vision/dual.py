"""Converts models that put texts and images into one space: CLIP, MetaCLIP 2, SigLIP and SigLIP2.

Each half, an encoder and its head, becomes a route of the checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from converters import weights
from converters.family import TensorRules
from converters.fields import (
    CONFIG_FIELDS,
    activation_of,
    check_fields,
    given,
    refuse_unknown,
    require,
)
from converters.heads import (
    Layout,
    dense_rules,
    listed_modules,
    read_optional_json,
    read_prompts,
    token_limit,
)
from converters.outline import Options, Outline, Reader, check_comparable, spec_of
from converters.quantized import scheme_of
from converters.tokenizers.tokenizer import read_tokenizer, special_token
from converters.vision import open_clip
from converters.vision.image_rules import read_rules
from converters.weights import (
    Rule,
    Shape,
    Tensor,
    Transform,
    concatenate,
    concatenate_transposed,
    reshaped,
    rows_of,
    transpose,
)
from jaxembed.data.spec import (
    IMAGE_ROUTE,
    TEXT_ROUTE,
    AttentionPooling,
    DenseLayer,
    Expansion,
    Head,
    ImageRules,
    Module,
    NormalizeLayer,
    Pooled,
)
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models.bert import BertConfig
from jaxembed.models.clip import CLASS_ID, ClipConfig

CLIP, METACLIP2, SIGLIP, SIGLIP2 = "clip", "metaclip_2", "siglip", "siglip2"
JINA_CLIP = "jina_clip"  # its halves are read in jina_clip.py
IDEFICS3 = "idefics3"  # no model of two halves: see `image_rules`
CLASSES = {
    CLIP: ("CLIPModel",),
    METACLIP2: ("MetaClip2Model",),
    SIGLIP: ("SiglipModel",),
    SIGLIP2: ("Siglip2Model",),
    JINA_CLIP: ("JinaCLIPModel",),
}
DUAL_MODULES = {  # modules of sentence-transformers that hold both halves
    "sentence_transformers.models.CLIPModel",
    "sentence_transformers.sentence_transformer.modules.clip_model.CLIPModel",
}
NORMALIZE = {
    "sentence_transformers.models.Normalize",
    "sentence_transformers.sentence_transformer.modules.normalize.Normalize",
}

# transformers' defaults for missing fields.
SIGLIP_TEXT: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "pad_token_id": 1,
}
SIGLIP_IMAGE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": True,
}
CLIP_TEXT: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
CLIP_IMAGE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
TEXT_DEFAULTS = {
    CLIP: CLIP_TEXT,
    METACLIP2: CLIP_TEXT,
    SIGLIP: SIGLIP_TEXT,
    SIGLIP2: SIGLIP_TEXT,
}
IMAGE_DEFAULTS = {
    CLIP: CLIP_IMAGE,
    METACLIP2: CLIP_IMAGE,
    SIGLIP: {**SIGLIP_IMAGE, "image_size": 224},
    SIGLIP2: {**SIGLIP_IMAGE, "num_patches": 256},
}
TOWER_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# eos_token_id in OpenAI's files of CLIP, where the token with the largest id ends texts. MetaCLIP 2
# also has it, and there it is the id.
OLD_EOS = 2


@dataclass(frozen=True)
class Source:
    """The folder and the config.json of a model, from which both halves are read."""

    folder: Path
    tower: str  # path of `folder` within the source
    kind: str  # a key of CLASSES
    hf: Mapping[str, Any]  # config.json
    normalizes: bool  # whether vectors get length one
    processor: Mapping[str, Any]  # the image processor's fields
    lowercase: bool  # whether texts become lower case, whatever tokenizer.json says
    is_open_clip: bool  # whether OpenCLIP saved it, with other names and no limit of the tokenizer

    @property
    def is_clip(self) -> bool:
        """Whether the halves are those of CLIP, and not of SigLIP."""
        return self.kind in (CLIP, METACLIP2)

    def tensors(self, rules: Sequence[Rule], ignored: Sequence[str]) -> TensorRules:
        """Return the rules of a half, for the names of transformers."""
        found_by = open_clip.find if self.is_open_clip else weights.find
        return TensorRules(rules=rules, ignored=ignored, find=found_by)

    def fields(self, key: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the field `key`, the config of a half, with transformers' `defaults` filled in.
        Old files also have `<key>_dict`, which takes precedence with the same defaults. Raises
        CheckpointError for missing or inconsistent sizes."""
        path = str(self.folder / "config.json")
        stated, old_fields = (given(self.hf.get(name) or {}) for name in (key, f"{key}_dict"))
        for part in (stated, old_fields):
            check_fields(f"{path}, {key}", part, CONFIG_FIELDS)
        fields = {**defaults, **({**stated, **defaults, **old_fields} if old_fields else stated)}
        require(fields, TOWER_SIZES)
        if fields["hidden_size"] % fields["num_attention_heads"]:
            raise CheckpointError(
                f"{path}, {key}: hidden_size {fields['hidden_size']} does not split into "
                f"num_attention_heads {fields['num_attention_heads']}"
            )
        return fields


def is_dual(source: Path, kinds: tuple[str, ...] = tuple(CLASSES)) -> bool:
    """Return whether the folder `source` holds a model of texts and images, of one of `kinds`."""
    hf = read_optional_json(source / folder_of(source) / "config.json")
    return hf.get("model_type") in kinds


def refuse_options(source: Path, options: Options) -> None:
    """Raise UnsupportedModel for options that a model with images, in `source`, does not take."""
    flags = {
        "--adapter": bool(options.adapters),
        "--cutoff-layer": options.cutoff_layer is not None,
        "--dense-path": options.dense_path is not None,
        "--pooling splade": options.splade,
    }
    for flag, is_given in flags.items():
        if is_given:
            raise UnsupportedModel(
                f"{flag}: {source} is a model of texts and images, which does not take it; leave "
                "it out"
            )


def read_outlines(
    source: Path, options: Options, halves: Mapping[str, "Half"]
) -> tuple[dict[str, Outline], str | None]:
    """Return the outlines of the two `halves`, by route, and the name of the default route. Raises
    UnsupportedModel and CheckpointError."""
    refuse_options(source, options)
    folder = source / folder_of(source)
    path, hf = folder / "config.json", read_optional_json(folder / "config.json")
    is_open_clip = open_clip.is_open_clip(folder)
    if is_open_clip:
        hf, processor, lowercase = open_clip.read_config(folder)
    else:
        check_fields(str(path), hf, CONFIG_FIELDS)
        # SigLIP was trained on lower case
        processor, lowercase = processor_fields(folder), hf["model_type"] in (SIGLIP, SIGLIP2)
    scheme_of(hf)  # raises for what is not supported
    kind = hf["model_type"]
    for architecture in hf.get("architectures") or ():
        if architecture not in CLASSES[kind]:
            raise UnsupportedModel(
                f"architecture {architecture!r} of a {kind} model is not supported; known: "
                f"{', '.join(CLASSES[kind])}, which has both an encoder of texts and one of images"
            )
    # the first module holds both halves; only Normalize may follow
    modules = [name for name, _ in listed_modules(source) or ()]
    is_known = {*modules[1:]} <= NORMALIZE and not {*modules[:1]} & NORMALIZE
    if not is_known or (not modules and (source / "modules.json").is_file()):
        raise UnsupportedModel(
            f"{source / 'modules.json'}: the modules {', '.join(modules) or '(none)'} of a model "
            "of texts and images are not supported; wanted one, then perhaps Normalize"
        )
    # normalized if modules.json lists Normalize, or if there is no modules.json
    normalizes = len(modules) != 1
    model = Source(
        folder, folder_of(source), kind, hf, normalizes, processor, lowercase, is_open_clip
    )
    outlines: dict[str, Outline] = {}
    for route, half in halves.items():
        tensors, config, head, tokenizer, fields = half(model)
        prompts, default = read_prompts(source)
        layout = Layout(model.tower, {"dense": head}, prompts=prompts, default_prompt_name=default)
        architecture = "clip" if isinstance(config, ClipConfig) else "bert"
        config_fields = given(vars(config))
        spec = spec_of(
            options,
            layout,
            config_fields,
            hf,
            architecture=architecture,
            token_types=False,
            **fields,
        )
        outlines[route] = Outline(source, tensors, layout, spec, tokenizer)
    check_comparable(source, outlines)
    return outlines, TEXT_ROUTE


# What describes a half. The bytes are its tokenizer.json; the dict has further fields of its spec.
Parts = tuple[TensorRules, ClipConfig | BertConfig, Head, bytes, dict[str, Any]]
Half = Callable[[Source], Parts]


def _text_half(model: Source) -> Parts:
    """Read the half of texts. The vector of a text comes from its last token: the end token (CLIP)
    or the last token of the padding (SigLIP)."""
    hf = model.fields("text_config", TEXT_DEFAULTS[model.kind])
    require(hf, ("vocab_size", "max_position_embeddings"))
    config = clip_config(hf, vocab_size=hf["vocab_size"], causal=model.is_clip)
    vocab_size = hf["vocab_size"]
    tokenizer = read_tokenizer(model.folder, lowercase=model.lowercase, vocab_size=vocab_size)
    limit = config.max_positions
    if not model.is_open_clip:
        limit = token_limit(model.folder, limit)
    spec: dict[str, Any] = {"max_input_tokens": limit}
    if model.is_clip:
        eos = hf["eos_token_id"]
        is_largest = model.kind == CLIP and eos == OLD_EOS
        _check_end(model.folder, tokenizer, None if is_largest else eos)
        projection, tensor = _projection(model, config), "text_projection"
    else:
        folder, parsed = model.folder, Tokenizer.from_str(tokenizer.decode())
        eos_token = special_token(folder, "eos_token")
        if eos_token is not None:
            _check_end(folder, tokenizer, parsed.token_to_id(eos_token))
        # SigLIP was trained without a begin token and with padding on the right
        side = read_optional_json(folder / "tokenizer_config.json").get("padding_side")
        if side is not None:
            refuse_unknown(f"{folder}: padding_side", side, ("right",))
        bos_token = special_token(folder, "bos_token")
        if bos_token is not None and parsed.encode("a").tokens[:1] == [bos_token]:
            raise UnsupportedModel(f"{folder}: texts that begin with {bos_token} are not supported")
        spec["max_input_tokens"] = length = config.max_positions
        pad_token = special_token(folder, "pad_token")
        pad_id = None if pad_token is None else parsed.token_to_id(pad_token)
        pad_id = hf.get("pad_token_id") if pad_id is None else pad_id
        if not isinstance(pad_id, int) or not 0 <= pad_id < vocab_size:
            raise CheckpointError(
                f"{folder} does not name the token that texts are padded with: wanted pad_token "
                "in tokenizer_config.json"
            )
        # texts are padded to this length
        spec["filled"] = Expansion(pad_id, length, attended=True)
        width = hf.get("projection_size") or config.hidden_size
        projection = DenseLayer(
            in_features=config.hidden_size, out_features=width, activation="identity"
        )
        tensor = "text_model.head"
    head = Pooled(("lasttoken",), normalized(model, projection))
    rules = (
        Rule("text_model.embeddings.token_embedding.weight", "tower.embeddings.word.embedding"),
        *clip_rules("text_model.", "final_layer_norm"),
        *dense_rules("dense", number=0, layer=projection, tensor=tensor),
    )
    ignored = ("vision_model.*", "visual_projection.*", *UNUSED_TENSORS)
    return model.tensors(rules, ignored), config, head, tokenizer, spec


def _image_half(model: Source) -> Parts:
    """Read the half of images. CLIP pools by a class token, SigLIP by attention."""
    hf = model.fields("vision_config", IMAGE_DEFAULTS[model.kind])
    is_clip, is_siglip2 = model.is_clip, model.kind == SIGLIP2
    require(hf, ("num_patches" if is_siglip2 else "image_size", "patch_size", "num_channels"))
    refuse_unknown("num_channels", hf["num_channels"], (3,))
    if not is_clip and not hf["vision_use_head"]:
        raise UnsupportedModel("vision_use_head false is not supported; known: true")
    if is_siglip2 and isqrt(hf["num_patches"]) ** 2 != hf["num_patches"]:
        raise UnsupportedModel(
            f"num_patches {hf['num_patches']} is not supported; known: a square number"
        )
    rules = image_rules(model.folder, model.processor, hf, model.kind)
    rules = msgspec.structs.replace(
        rules, before=(CLASS_ID,) if is_clip else (), rounds_crop=model.is_open_clip
    )
    patches = prod(rules.grid) if rules.most_patches is None else rules.most_patches
    max_tokens = len(rules.before) + patches + len(rules.after)
    config = clip_config(
        hf | {"max_position_embeddings": hf["num_patches"] if is_siglip2 else max_tokens},
        resizes_positions=is_siglip2,
        patch_bytes=rules.patch_bytes,
        patch_bias=not is_clip,
        class_token=is_clip,
        input_norm=is_clip,
    )
    tensor_rules = [
        *patch_rules("vision_model.", bias=not is_clip, flat=is_siglip2),
        *clip_rules("vision_model.", "post_layernorm"),
    ]
    head: Head
    if is_clip:
        projection = _projection(model, config)
        head = Pooled(("cls",), normalized(model, projection))
        tensor_rules += [
            Rule(
                "vision_model.embeddings.class_embedding",
                "tower.embeddings.class_token.embedding",
                reshaped(1, config.hidden_size),
            ),
            # "layrnorm" is the spelling in checkpoints
            *norm_rules("vision_model.pre_layrnorm", "tower.embeddings.norm"),
            *dense_rules("dense", number=0, layer=projection, tensor="visual_projection"),
        ]
    else:
        head = AttentionPooling(
            width_in=config.hidden_size,
            num_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            norm_eps=config.norm_eps,
            activation=activation_of(hf, "hidden_act"),
            modules=normalized(model),
        )
        joint, width = "vision_model.head.attention.in_proj", config.hidden_size
        # rows of the joint projection
        query, key_value = (0, width, 3 * width), (width, 3 * width, 3 * width)
        tensor_rules += [
            Rule("vision_model.head.probe", "heads.dense.probe", reshaped(width)),
            Rule(f"{joint}_weight", "heads.dense.query.kernel", rows_of(*query, turned=True)),
            Rule(f"{joint}_bias", "heads.dense.query.bias", rows_of(*query)),
            Rule(
                f"{joint}_weight", "heads.dense.key_value.kernel", rows_of(*key_value, turned=True)
            ),
            Rule(f"{joint}_bias", "heads.dense.key_value.bias", rows_of(*key_value)),
            *linear_rules("vision_model.head.attention.out_proj", "heads.dense.out"),
            *norm_rules("vision_model.head.layernorm", "heads.dense.norm"),
            *linear_rules("vision_model.head.mlp.fc1", "heads.dense.up"),
            *linear_rules("vision_model.head.mlp.fc2", "heads.dense.down"),
        ]
    ignored = ("text_model.*", "text_projection.*", *UNUSED_TENSORS)
    tensors = model.tensors(tensor_rules, ignored)
    # images have no tokenizer
    return tensors, config, head, b"", {"max_input_tokens": max_tokens, "image": rules}


# tensors that neither half uses
UNUSED_TENSORS = ("logit_scale", "logit_bias", "*.embeddings.position_ids")


def clip_config(hf: Mapping[str, Any], **switches: Any) -> ClipConfig:
    """Return the ClipConfig of an encoder, whose config is `hf` with its defaults filled in.
    `switches` are further fields. Raises UnsupportedModel for an unknown activation."""
    return ClipConfig(
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        intermediate_size=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"],
        norm_eps=float(hf["layer_norm_eps"]),
        activation=activation_of(dict(hf), "hidden_act"),
        **switches,
    )


def convolution(
    sources: Sequence[Tensor], shape: Shape, inner: tuple[int, ...] = (3,)
) -> list[str]:
    """Return an error for each source whose shape is not `[out, *inner, n, n]`. `shape` is the
    shape of the parameter, `[3 * n * n, out]`."""
    side = isqrt(shape[0] // 3)
    return [
        f"{source.name}: wanted a convolution for a weight {shape}, got {source.shape}"
        for source in sources
        if source.shape != (shape[1], *inner, side, side)
    ]


patch_kernel = Transform(  # [out, 3, size, size] to [size * size * 3, out]
    lambda array: np.ascontiguousarray(array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])),
    convolution,
)


def clip_rules(half: str, last_norm: str, tower: str = "tower") -> list[Rule]:
    """Return the rules of an encoder, without the rules of its word or patch embeddings. `half` is
    the prefix of its tensors, and `tower` the prefix of its parameters; `last_norm` is the name of
    its final norm."""
    layer, target = f"{half}encoder.layers.{{i}}", f"{tower}.layers.{{i}}"
    qkv = [f"{layer}.self_attn.{letter}_proj" for letter in "qkv"]
    positions = f"{tower}.embeddings.position.embedding"
    return [
        Rule(f"{half}embeddings.position_embedding.weight", positions),
        Rule(tuple(f"{one}.weight" for one in qkv), f"{target}.qkv.kernel", concatenate_transposed),
        Rule(tuple(f"{one}.bias" for one in qkv), f"{target}.qkv.bias", concatenate),
        *linear_rules(f"{layer}.self_attn.out_proj", f"{target}.out"),
        *linear_rules(f"{layer}.mlp.fc1", f"{target}.up"),
        *linear_rules(f"{layer}.mlp.fc2", f"{target}.down"),
        *norm_rules(f"{layer}.layer_norm1", f"{target}.attention_norm"),
        *norm_rules(f"{layer}.layer_norm2", f"{target}.mlp_norm"),
        *norm_rules(f"{half}{last_norm}", f"{tower}.norm"),
    ]


def patch_rules(half: str, tower: str = "tower", *, bias: bool, flat: bool = False) -> list[Rule]:
    """Return the rules of the projection of patches. `half` is the prefix of its tensors, and
    `tower` the prefix of its parameters. `flat`: whether the projection is saved as a linear layer
    and not as a convolution."""
    source, target = f"{half}embeddings.patch_embedding", f"{tower}.embeddings.patch"
    kernel = Rule(f"{source}.weight", f"{target}.kernel", transpose if flat else patch_kernel)
    return [kernel, Rule(f"{source}.bias", f"{target}.bias")] if bias else [kernel]


def linear_rules(source: str, target: str) -> list[Rule]:
    """Return the rules of a linear layer with a bias."""
    return [
        Rule(f"{source}.weight", f"{target}.kernel", transpose),
        Rule(f"{source}.bias", f"{target}.bias"),
    ]


def norm_rules(source: str, target: str) -> list[Rule]:
    return [
        Rule(f"{source}.weight", f"{target}.scale"),
        Rule(f"{source}.bias", f"{target}.bias"),
    ]


def _projection(model: Source, config: ClipConfig) -> DenseLayer:
    """Return CLIP's projection into the common space of texts and images."""
    return DenseLayer(
        in_features=config.hidden_size,
        out_features=model.hf.get("projection_dim") or 512,
        bias=False,
        activation="identity",
    )


def normalized(model: Source, *modules: Module) -> tuple[Module, ...]:
    return (*modules, NormalizeLayer()) if model.normalizes else modules


def processor_fields(folder: Path) -> dict[str, Any]:
    """Return the image processor's fields of preprocessor_config.json, else processor_config.json.
    Raises CheckpointError if neither file has these fields."""
    fields = read_optional_json(folder / "preprocessor_config.json")
    fields = fields or read_optional_json(folder / "processor_config.json").get("image_processor")
    if not isinstance(fields, dict) or not fields:
        raise CheckpointError(
            f"{folder} does not say how images are prepared: wanted preprocessor_config.json"
        )
    return fields


def image_rules(
    folder: Path, fields: Mapping[str, Any], hf: Mapping[str, Any], kind: str
) -> ImageRules:
    """Return how images are prepared for a model of type `kind` whose vision_config is `hf`, and
    whose image processor has these `fields`. Raises UnsupportedModel for another processor,
    CheckpointError for images of another size."""
    rules = read_rules(fields, hf["patch_size"])
    # only SigLIP2 has a maximum of patches, only Idefics3 has tiles, and only Qwen2-VL an area
    is_other = (rules.most_patches is not None) != (kind == SIGLIP2) or rules.area is not None
    if is_other or (rules.tiles is not None) != (kind == IDEFICS3):
        name = fields.get("image_processor_type")
        raise UnsupportedModel(f"image processor {name!r} of a {kind} model is not supported")
    if rules.most_patches is not None:
        return rules
    size = (hf["image_size"], hf["image_size"])
    if rules.made != size:
        raise CheckpointError(
            f"{folder}: the final size of an image or tile is {rules.made}, and the image encoder "
            f"takes {size}"
        )
    return rules


def _check_end(folder: Path, stored: bytes, eos: int | None) -> None:
    """Raise CheckpointError unless the tokenizer.json `stored` ends texts with the token id `eos`,
    or with the largest id if `eos` is None."""
    tokenizer = Tokenizer.from_str(stored.decode())
    wanted = max(tokenizer.get_vocab().values()) if eos is None else eos
    last = tokenizer.encode("a").ids[-1:]
    if last != [wanted]:
        raise CheckpointError(
            f"the tokenizer in {folder} ends texts with the ids {last}, and the model needs "
            f"{wanted}"
        )


def folder_of(source: Path) -> str:
    """Return the model's folder within `source`; "" is `source` itself."""
    listed = listed_modules(source)
    return listed[0][1] if listed and listed[0][0] in DUAL_MODULES else ""


_outlines = partial(read_outlines, halves={TEXT_ROUTE: _text_half, IMAGE_ROUTE: _image_half})
READER = Reader(is_dual, _outlines, lambda source, dense_path: [folder_of(source)])
OPEN_CLIP_READER = Reader(open_clip.is_open_clip, _outlines, weight_files=open_clip.WEIGHT_FILES)
