"""Converts models that read pages: ColPali, whose texts and images give a vector for each token."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from converters import decoders
from converters.decoders import REQUIRED, decoder_config
from converters.dual import (
    SIGLIP,
    TOWER_SIZES,
    image_rules,
    linear_rules,
    patch_rules,
    tower_config,
    tower_rules,
)
from converters.field_types import CONFIG_FIELDS, check_fields
from converters.fields import either, require
from converters.gemma3 import HEAD_WIDTH
from converters.heads import Layout, dense_rules, read_optional_json
from converters.tokenizer import read_tokenizer
from converters.weights import Rule, one_plus
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.outputs import OutputName
from jaxembed.spec import DenseLayer, Head, ModelSpec, NormalizeLayer, PerToken

COLPALI, COLQWEN = "colpali", "colqwen2"
ARCHITECTURE = "pages"
CLASSES = {COLPALI: ("ColPaliForRetrieval",), COLQWEN: ("ColQwen2ForRetrieval",)}
JOINED = {  # a published model, by what the names of the bases of adapters hold
    "colpali": "vidore/colpali-v1.3-hf",
    "colqwen2": "vidore/colqwen2-v1.0-hf",
}
QUERY = "query"
FILLERS = 10  # tokens after a query, in which the model goes on thinking
SAMPLES = ("a", "How much, in 2024?", "Größe\tund  Gewicht")  # texts with which a template is tried

# What transformers takes where a part does not say; sizes must be there.
TEXT_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 8192}
IMAGE_SIZES = (*TOWER_SIZES, "image_size", "patch_size")
IMAGE_DEFAULTS: dict[str, Any] = {
    "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
IMAGE_TOKEN_ID = 256000

GEMMA_RULES = [  # those of other decoders, but norms multiply by one more than their weight
    Rule(rule.sources, rule.target, one_plus) if rule.target.endswith("norm.scale") else rule
    for rule in decoders.RULES
]


@dataclass(frozen=True)
class Family:
    """A family, as the plan of a conversion reads it."""

    RULES: tuple[Rule, ...]
    IGNORED: tuple[str, ...] = ("lm_head.weight", "embeddings.position_ids", "head.*")
    PREFIXES: tuple[str, ...] = (
        "vlm.",
        "model.",
        "language_model.",
        "model.",
        "vision_tower.",
        "vision_model.",
    )
    RENAMES: Mapping[str, str] | None = None
    ARCHITECTURE: str = ARCHITECTURE


def is_pages(source: Path) -> bool:
    """Whether a directory holds a model that reads pages."""
    kind = read_optional_json(source / "config.json").get("model_type")
    return isinstance(kind, str) and kind in CLASSES


def refuse_adapter(folder: Path, base: str) -> None:
    """Raise UnsupportedModel for an adapter whose base, by its name, is a model that reads pages:
    these are served with their adapter joined."""
    known = next((one for kind, one in JOINED.items() if kind in base.lower()), None)
    if known is not None:
        raise UnsupportedModel(
            f"{folder} is an adapter of {base}, which reads pages with its adapter joined; serve "
            f"one that is, as {known}"
        )


def read_pages(
    source: Path, name: str, revision: str | None
) -> tuple[Family, Layout, ModelSpec, bytes]:
    """The family, layout, spec and tokenizer of a model. Raises UnsupportedModel for what is not
    supported, and CheckpointError."""
    path, hf = source / "config.json", read_optional_json(source / "config.json")
    check_fields(str(path), hf, CONFIG_FIELDS)
    for architecture in hf.get("architectures") or ():
        if architecture not in CLASSES[hf["model_type"]]:
            raise UnsupportedModel(
                f"architecture {architecture!r} of a {hf['model_type']} model is not supported; "
                f"known: {', '.join(CLASSES[hf['model_type']])}"
            )
    if hf["model_type"] == COLQWEN:
        return import_module("converters.colqwen").read_colqwen(source, hf, name, revision)
    return _read_colpali(source, hf, name, revision)


def _read_colpali(
    source: Path, hf: Mapping[str, Any], name: str, revision: str | None
) -> tuple[Family, Layout, ModelSpec, bytes]:
    """ColPali: PaliGemma, whose tokens all see each other, and a projection of each."""
    vlm = hf.get("vlm_config") or {}
    check_fields(f"{source / 'config.json'}, vlm_config", vlm, CONFIG_FIELDS)
    text = _part(source, vlm, "text_config", "gemma", TEXT_DEFAULTS)
    require(text, REQUIRED)
    image = _part(source, vlm, "vision_config", "siglip_vision_model", IMAGE_DEFAULTS)
    require(image, IMAGE_SIZES)
    rules = image_rules(source, image, SIGLIP)
    rows, columns = rules.grid
    sizes = image | {"max_position_embeddings": rows * columns}
    of_images = tower_config(sizes, patch_bytes=rules.patch_bytes, patch_bias=True)
    image_id = either(vlm, "image_token_id", "image_token_index", IMAGE_TOKEN_ID)
    config = _gemma_config(text) | {
        "image": {key: value for key, value in vars(of_images).items() if value is not None},
        "image_token_id": image_id,
    }
    words = Words(source, read_tokenizer(source, lowercase=False, vocab_size=text["vocab_size"]))
    asked = read_optional_json(source / "processor_config.json")
    prompt = asked.get("query_prefix", "Question: ")
    before, pad = words.special("bos_token"), words.special("pad_token")
    page = before + asked.get("visual_prompt_prefix", "Describe the image.") + "\n"
    rules = msgspec.structs.replace(rules, token_id=image_id, after=tuple(words.ids(page)))
    layer = DenseLayer(config["hidden_size"], hf.get("embedding_dim") or 128, activation="identity")
    heads: dict[OutputName, Head] = {"multi_vector": PerToken((layer, NormalizeLayer()))}
    family = Family(
        (
            *GEMMA_RULES,
            *patch_rules("", "tower.image.tower", bias=True),
            *tower_rules("", "post_layernorm", "tower.image.tower"),
            *linear_rules("multi_modal_projector.linear", "tower.image.projection"),
            *dense_rules("multi_vector", 0, layer, "embedding_proj_layer"),
        )
    )
    dtype: Any = hf.get("dtype") or hf.get("torch_dtype")
    spec = ModelSpec(
        architecture=ARCHITECTURE,
        config=config,
        heads=heads,
        image=rules,
        token_types=False,
        prompts={QUERY: prompt},
        default_prompt_name=QUERY,
        max_input_tokens=rows * columns + len(rules.after),
        hidden_size=config["hidden_size"],
        dtype=dtype if dtype in ("float32", "bfloat16", "float16") else "float32",
        source=name,
        revision=revision,
        content_hash="",
    )
    tokenizer = words.framed(before, pad * FILLERS + "\n", prompt)
    return family, Layout(tower="", heads=heads, prompts=spec.prompts), spec, tokenizer


def _part(
    source: Path, vlm: Mapping[str, Any], key: str, kind: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The config of one part with transformers' defaults. Raises UnsupportedModel for another kind
    of part."""
    given = {name: value for name, value in (vlm.get(key) or {}).items() if value is not None}
    check_fields(f"{source / 'config.json'}, {key}", given, CONFIG_FIELDS)
    if given.get("model_type", kind) != kind:
        raise UnsupportedModel(
            f"{key} of model_type {given['model_type']!r} is not supported; known: {kind}"
        )
    return {**defaults, **given}


def _gemma_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of Qwen3Config of the first Gemma, whose tokens all see each other."""
    if hf.get("hidden_act", "gelu") == "gelu":  # of old files, which meant the approximation
        hf = hf | {"hidden_act": "gelu_pytorch_tanh"}
    bias = bool(hf.get("attention_bias", False))
    return decoder_config(hf, hf.get("head_dim") or HEAD_WIDTH, causal=False) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": False,
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "overflows_float16": True,
    }


class Words:
    """A model's tokenizer, with which the texts around inputs become ids."""

    def __init__(self, folder: Path, stored: bytes):
        self._folder = folder
        self._tokenizer = Tokenizer.from_str(stored.decode())
        self._special = read_optional_json(folder / "tokenizer_config.json")

    def special(self, key: str) -> str:
        """A special token. Raises CheckpointError if tokenizer_config.json names none."""
        token = self._special.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str) or self._tokenizer.token_to_id(token) is None:
            raise CheckpointError(
                f"tokenizer_config.json in {self._folder} names no {key} of the vocabulary"
            )
        return token

    def ids(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are written out."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def framed(self, before: str, after: str, prompt: str) -> bytes:
        """The tokenizer.json that puts these texts around each. Raises CheckpointError unless texts
        with the prompt are tokenized alike with them and without."""
        for sample in SAMPLES:
            text = prompt + sample
            if self.ids(before + text + after) != [
                one for part in (before, text, after) for one in self.ids(part)
            ]:
                raise CheckpointError(
                    f"the tokenizer in {self._folder} joins texts with what stands around them"
                )
        parts = {"before": before, "after": after}
        framed = Tokenizer.from_str(self._tokenizer.to_str())
        framed.post_processor = TemplateProcessing(  # pyright: ignore
            single=[*(["before"] if before else []), "$A", *(["after"] if after else [])],
            special_tokens=[
                {"id": name, "ids": self.ids(part), "tokens": [name] * len(self.ids(part))}
                for name, part in parts.items()
                if part
            ],
        )
        return framed.to_str().encode()
