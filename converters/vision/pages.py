"""Recognizes models that embed pages, and shares code among their converters. Such a model makes
one vector for each token of a text or of an image of a page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from converters.family import TensorRules
from converters.fields import CONFIG_FIELDS, check_fields, given, refuse_unknown
from converters.heads import Layout, dense_rules, read_optional_json
from converters.outline import Options, Outline, Reader, spec_of
from converters.quantized import scheme_of
from converters.vision.dual import refuse_options
from jaxembed.data.spec import DenseLayer, ImageRules, NormalizeLayer, PerToken

COLPALI, COLQWEN = "colpali", "colqwen2"
CLASSES = {COLPALI: ("ColPaliForRetrieval",), COLQWEN: ("ColQwen2ForRetrieval",)}
# Classes of colpali-engine, by which published base models are saved. Their config.json is that of
# the language model.
ENGINE_CLASSES = {"ColPali": COLPALI, "ColQwen2": COLQWEN, "ColQwen2_5": COLQWEN}
# The converters; their `outline(source, hf, options)` describes a model.
PAGE_READERS = {COLPALI: "converters.vision.colpali", COLQWEN: "converters.vision.colqwen"}

KEPT = ("architectures", "dtype", "torch_dtype", "embedding_dim")  # keys outside of vlm_config
PARTS = ("weight", "bias")
QUERY = "query"
AUGMENTATION_TOKENS = 10  # number of augmentation tokens after a query
VECTOR_WIDTH = 128  # dimension of a vector, if config.json lacks embedding_dim


def is_pages(source: Path) -> bool:
    """Return whether the folder `source` holds a model that embeds pages."""
    hf = read_optional_json(source / "config.json")
    # a list: model_type may be unhashable
    return hf.get("model_type") in list(CLASSES) or engine_class(hf) is not None


def engine_class(hf: Mapping[str, Any]) -> str | None:
    """Return the class of colpali-engine that a config.json names, or None."""
    classes = hf.get("architectures")
    names = classes if isinstance(classes, list) else ()
    return next((one for one in ENGINE_CLASSES if one in names), None)


def _outlines(source: Path, options: Options) -> tuple[dict[str, Outline], str | None]:
    """Return the model's outline as route "", which is also the default route. Raises
    UnsupportedModel and CheckpointError."""
    refuse_options(source, options)
    hf = read_optional_json(source / "config.json", CONFIG_FIELDS)
    scheme_of(hf)  # raises for what is not supported
    own = engine_class(hf)
    if own is not None:  # as transformers nests the configs
        kept = {key: hf[key] for key in KEPT if key in hf}
        hf = kept | {"model_type": ENGINE_CLASSES[own], "vlm_config": hf}
    kind = hf["model_type"]
    for architecture in hf.get("architectures") or ():
        refuse_unknown(f"{kind} architecture", architecture, (*CLASSES[kind], *ENGINE_CLASSES))
    return {"": import_module(PAGE_READERS[kind]).outline(source, hf, options)}, ""


READER = Reader(is_pages, _outlines)


def page_outline(
    source: Path,
    options: Options,
    hf: Mapping[str, Any],
    config: dict[str, Any],
    *,
    image: ImageRules,
    prompt: str,
    limit: int,
    tensors: TensorRules,
    tokenizer: bytes,
) -> Outline:
    """Return the outline of the model in `source`, whose backbone has this `config`. `image` says
    how pages become tokens, and `limit` is the maximum number of tokens. `prompt` is for queries.
    `tensors` lacks the rules of the projection to vectors, which are added here."""
    width = hf.get("embedding_dim") or VECTOR_WIDTH
    projection = DenseLayer(config["hidden_size"], width, activation="identity")
    rules = dense_rules("multi_vector", number=0, layer=projection, tensor="embedding_proj_layer")
    names = {f"custom_text_proj.{part}": f"embedding_proj_layer.{part}" for part in PARTS}
    tensors = replace(tensors, rules=(*tensors.rules, *rules), renames=names)
    head = PerToken((projection, NormalizeLayer()))
    layout = Layout(
        backbone="",
        heads={"multi_vector": head},
        prompts={QUERY: prompt},
        default_prompt_name=QUERY,
    )
    spec = spec_of(
        options,
        layout,
        config,
        hf,
        architecture="pages",
        image=image,
        token_types=False,
        max_input_tokens=limit,
    )
    return Outline(source, tensors, layout, spec, tokenizer)


def read_part(
    source: Path, key: str, fields: Mapping[str, Any], known: Sequence[str]
) -> dict[str, Any]:
    """Check `fields`, the content of the object `key` in config.json, and return those that are not
    null. Raises UnsupportedModel for a model_type that is not one of `known`, and CheckpointError
    for a field of a wrong type."""
    part = given(fields)
    check_fields(f"{source / 'config.json'}, {key}", part, CONFIG_FIELDS)
    refuse_unknown(f"{key} of model_type", part.get("model_type", known[0]), known)
    return part
