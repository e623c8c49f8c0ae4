"""Recognizes models that embed pages, and shares code among their converters. Such a model makes
one vector for each token of a query or of an image of a page, or one for all tokens."""

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
from converters.vision.dual import IDEFICS3, refuse_options
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import DenseLayer, Head, ImageRules, NormalizeLayer, PerToken, Pooled

COLPALI, COLQWEN, COLMODERNVBERT = "colpali", "colqwen2", "colmodernvbert"
CLASSES = {
    COLPALI: ("ColPaliForRetrieval",),
    COLQWEN: ("ColQwen2ForRetrieval",),
    COLMODERNVBERT: ("ColModernVBertForRetrieval",),
    IDEFICS3: (),  # ColSmol's class is only in colpali-engine
}
# Processors of colpali-engine, and the classes of their models, which have one vector: the last
# token's hidden state. The base of an adapter may be the language model itself; then only the
# adapter's files name a processor.
PROCESSORS = {"BiQwen2Processor": "BiQwen2", "BiQwen2_5_Processor": "BiQwen2_5"}
# Classes of colpali-engine, by which published base models are saved. Their config.json is that of
# the language model.
ENGINE_CLASSES = {
    "ColPali": COLPALI,
    "ColModernVBert": COLMODERNVBERT,
    "ColIdefics3": IDEFICS3,
    **dict.fromkeys(("ColQwen2", "ColQwen2_5", *PROCESSORS.values()), COLQWEN),
}
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# The converters; their `outline(source, hf, options)` describes a model.
PAGE_READERS = {
    COLPALI: "converters.vision.colpali",
    COLQWEN: "converters.vision.colqwen",
    COLMODERNVBERT: "converters.vision.idefics3",
    IDEFICS3: "converters.vision.idefics3",
}

KEPT = ("dtype", "torch_dtype", "embedding_dim")  # keys outside of vlm_config
PARTS = ("weight", "bias")
QUERY = "query"
AUGMENTATION_TOKENS = 10  # number of augmentation tokens after a query
VECTOR_WIDTH = 128  # dimension of a vector, if config.json lacks embedding_dim


def is_pages(source: Path) -> bool:
    """Return whether the folder `source` holds a model that embeds pages."""
    hf = read_optional_json(source / "config.json")
    # a list: model_type may be unhashable
    return hf.get("model_type") in list(CLASSES) or _class_of(source, hf) is not None


def _class_of(source: Path, hf: Mapping[str, Any]) -> str | None:
    """Return the class of colpali-engine whose model is in the folder `source`, or None. `hf` is
    its config.json."""
    if (own := engine_class(hf)) is not None:
        return own
    named = [read_optional_json(source / file).get("processor_class") for file in PROCESSOR_FILES]
    return next((own for processor, own in PROCESSORS.items() if processor in named), None)


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
    own = _class_of(source, hf)
    if own is not None:  # as transformers nests the configs
        kept = {key: hf[key] for key in KEPT if key in hf}
        nested = {"model_type": ENGINE_CLASSES[own], "architectures": [own], "vlm_config": hf}
        hf = kept | nested
    kind: str = hf["model_type"]
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
    architecture: str = "pages",
) -> Outline:
    """Return the outline of the model in `source`, whose backbone has this `config`. `image` says
    how pages become tokens, and `limit` is the maximum number of tokens. `prompt` is for queries.
    `tensors` lacks the rules of the projection to vectors, which are added here."""
    heads: dict[OutputName, Head]
    if engine_class(hf) in PROCESSORS.values():
        heads = {"dense": Pooled(("lasttoken",), (NormalizeLayer(),))}
    else:
        width = hf.get("embedding_dim") or VECTOR_WIDTH
        layer = DenseLayer(config["hidden_size"], width, activation="identity")
        rules = dense_rules("multi_vector", number=0, layer=layer, tensor="embedding_proj_layer")
        names = {f"custom_text_proj.{part}": f"embedding_proj_layer.{part}" for part in PARTS}
        tensors = replace(
            tensors, rules=(*tensors.rules, *rules), renames={**tensors.renames, **names}
        )
        heads = {"multi_vector": PerToken((layer, NormalizeLayer()))}
    layout = Layout(backbone="", heads=heads, prompts={QUERY: prompt}, default_prompt_name=QUERY)
    spec = spec_of(
        options,
        layout,
        config,
        hf,
        architecture=architecture,
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
