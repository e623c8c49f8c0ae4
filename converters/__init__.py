"""Converts a Hugging Face directory to a checkpoint. Knows no network and runs no model code."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args

import msgspec

from converters import heads, rerankers, scores, tokenizer, weights
from converters.heads import Layout, weight_folders
from converters.weights import Step
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import parameter_shapes, position_limit
from jaxembed.spec import DType, ModelSpec

__all__ = ["CONVERTERS", "Outline", "convert", "outline", "weight_folders"]

logger = logging.getLogger(__name__)

CONVERTERS: dict[str, str] = {
    "bert": "converters.bert",
    "camembert": "converters.roberta",
    "distilbert": "converters.distilbert",
    "modernbert": "converters.modernbert",
    "qwen2": "converters.qwen2",
    "qwen3": "converters.qwen3",
    "roberta": "converters.roberta",
    "xlm-roberta": "converters.roberta",
}

LOG_EVERY_S = 5.0

ConversionProgress = Callable[[Sequence[Step]], Iterable[Step]]

STORED_DTYPES = get_args(DType)

# What a model is used for, by transformers' class for it: the key under which auto_map names code
# that the model brings along.
EMBEDDER = "AutoModel"
CLASSIFIER = "AutoModelForSequenceClassification"
GENERATOR = "AutoModelForCausalLM"


@dataclass(frozen=True)
class Outline:
    """What the small files of a model say about it, before any weights are there.

    The spec lacks its content hash, and its dtype is what config.json says, or float32.
    """

    source: Path
    family: ModuleType
    layout: Layout
    spec: ModelSpec
    tokenizer: bytes


def show_progress(steps: Sequence[Step]) -> Iterator[Step]:
    """A bar on a terminal; elsewhere a log line every few seconds."""
    if sys.stderr.isatty():
        from tqdm import tqdm  # here: only a terminal needs it

        yield from tqdm(steps, desc="converting", unit="tensor", leave=False)
        return
    logged_at = time.monotonic()
    for done, step in enumerate(steps):
        if time.monotonic() - logged_at >= LOG_EVERY_S:
            logger.info("converted %d of %d tensors", done, len(steps))
            logged_at = time.monotonic()
        yield step


def convert(
    source: Path,
    out: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dense_path: str | None = None,
    progress: ConversionProgress = show_progress,
) -> ModelSpec:
    """Write the checkpoint of the model in `source` to `out`, all of it or nothing.

    `name` and `revision` are what the checkpoint says it comes from. Raises CheckpointError, the
    subclasses UnsupportedModel and ConversionError included.
    """
    checkpoint.refuse_occupied(out)
    made = outline(source, name=name, revision=revision, dense_path=dense_path)
    steps = _plan(made)
    spec = msgspec.structs.replace(made.spec, dtype=_dtype(steps))
    params = ((step.target, step.read()) for step in progress(steps))
    return checkpoint.save(out, spec, params, made.tokenizer)


def outline(
    source: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dense_path: str | None = None,
) -> Outline:
    """The outline of the model in `source`, whose weights need not be there.

    Raises CheckpointError as `convert` does, but for what is wrong with the weights.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory")
    name = name or str(source)
    hf = _config(source / heads.tower_folder(source))
    family = _family(hf)
    use = _use(source, family, hf)
    _refuse_own_code(family, hf, use)
    config = family.config(hf)
    layout = _layout(source, name, family, hf, config, use, dense_path)
    tower = source / layout.tower
    spec = _spec(family, config, layout, name, revision)
    said = hf.get("dtype") or hf.get("torch_dtype")  # as transformers 5 spells it, and as 4 did
    spec = msgspec.structs.replace(
        spec,
        token_types=tokenizer.gives_types(tower, hf),
        max_input_tokens=heads.token_limit(tower, position_limit(spec)),
        dtype=said if said in STORED_DTYPES else "float32",
    )
    text = tokenizer.read_tokenizer(
        tower, lowercase=layout.lowercase, vocab_size=config["vocab_size"]
    )
    return Outline(source, family, layout, spec, text)


def _config(tower: Path) -> dict[str, Any]:
    if (tower / "adapter_config.json").is_file():
        raise UnsupportedModel(f"{tower} is an adapter; merge it into its base model first")
    hf = heads.read_optional_json(tower / "config.json")
    if not hf:
        raise CheckpointError(f"{tower} is not a model: there is no config.json")
    return hf


def _family(hf: dict[str, Any]) -> ModuleType:
    """The converter of this config. Raises UnsupportedModel where there is none."""
    kind = hf.get("model_type")
    if kind not in CONVERTERS:
        known = ", ".join(sorted(CONVERTERS))
        raise UnsupportedModel(f"model_type {kind!r} is not supported; known: {known}")
    family = import_module(CONVERTERS[kind])
    known = (*family.CLASSES, *classifiers(family), *generators(family))
    for architecture in hf.get("architectures") or ():
        if architecture not in known:
            raise UnsupportedModel(
                f"architecture {architecture!r} is not supported; known: {', '.join(known)}"
            )
    if hf.get("quantization_config"):
        raise UnsupportedModel("quantised weights are not supported; use the original ones")
    return family


def _use(source: Path, family: ModuleType, hf: dict[str, Any]) -> str:
    """An embedder if modules.json pools; else what the class in config.json is for.

    Raises UnsupportedModel where neither is there: a classifier would pass for an embedder.
    """
    if heads.pools(source):
        return EMBEDDER
    named = set(hf.get("architectures") or ())
    if not named:
        raise UnsupportedModel(
            f"nothing says whether {source} embeds or scores: modules.json names no Pooling, and "
            "config.json no architectures; add the class that the model was saved from, such as "
            f'"architectures": ["{family.CLASSES[0]}"] of an embedder'
        )
    if named & set(classifiers(family)):
        return CLASSIFIER
    return GENERATOR if named & set(generators(family)) else EMBEDDER


def _refuse_own_code(family: ModuleType, hf: dict[str, Any], use: str) -> None:
    """Raises UnsupportedModel for a model that brings code for its tower, which every use of the
    model needs, or for the use that is meant. Code for other uses does not matter."""
    codes = hf.get("auto_map") or {}
    for key in dict.fromkeys((EMBEDDER, use)):
        code = codes.get(key)
        known = use == EMBEDDER and code == getattr(family, "OWN_CODE", None)
        if code is not None and not known:
            raise UnsupportedModel(
                f"the model brings its own code (auto_map, {key}: {code}), which is never run"
            )


def classifiers(family: ModuleType) -> tuple[str, ...]:
    """The classes of a family that score instead of embedding."""
    return getattr(family, "CLASSIFIERS", ())


def generators(family: ModuleType) -> tuple[str, ...]:
    """The classes of a family's language models, of which some rerank."""
    return getattr(family, "GENERATORS", ())


def _layout(
    source: Path,
    name: str,
    family: ModuleType,
    hf: dict[str, Any],
    config: dict[str, Any],
    use: str,
    dense_path: str | None,
) -> Layout:
    if use == EMBEDDER:
        return heads.read_layout(source, config["hidden_size"], dense_path)
    if dense_path is not None:
        raise CheckpointError(
            f"dense path {dense_path!r} takes the place of a Dense module, and {source} scores "
            "without one; leave it out"
        )
    if use == GENERATOR:
        return rerankers.reranker_layout(source, name, family, hf, config)
    labels = scores.labels_of(hf)
    scorer = family.classifier(hf, len(labels))
    template = rerankers.template_of(source, name, family) if len(labels) == 1 else None
    if len(labels) == 1 and template is None and generators(family):
        logger.warning(
            "%s is a language model that scores pairs, and nothing says how it is asked: pairs are "
            "put to it without a template; most need one, and score near chance without it",
            name,
        )
    return scores.scores_layout(source, hf, scorer, labels, template)


def _spec(
    family: ModuleType, config: dict[str, Any], layout: Layout, name: str, revision: str | None
) -> ModelSpec:
    """The spec, except its types, limit, dtype and hash."""
    return ModelSpec(
        architecture=family.ARCHITECTURE,
        config=config,
        heads=layout.heads,
        labels=layout.labels,
        score_function=layout.score_function,
        template=layout.template,
        include_prompt=layout.include_prompt,
        prompts=dict(layout.prompts or {}),
        default_prompt_name=layout.default_prompt_name,
        max_input_tokens=1,
        hidden_size=config["hidden_size"],
        dtype="float32",
        source=name,
        revision=revision,
        content_hash="",
    )


def _plan(made: Outline) -> list[Step]:
    """A plan for every tensor of the tower and of its heads."""
    source, family, layout, spec = made.source, made.family, made.layout, made.spec
    tower = weights.find(source / layout.tower)
    tensors = weights.canonical(spec.source, tower, family.PREFIXES, family.RENAMES)
    for folder in layout.folders:
        tensors |= weights.within(folder, weights.find(source / folder))
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(spec).items()}
    rules = [*family.RULES, *layout.rules]
    return weights.plan_steps(spec.source, rules, family.IGNORED, tensors, shapes)


def _dtype(steps: Sequence[Step]) -> DType:
    """The dtype that most elements have: some modules are saved in a wider one than the tower."""
    elements: Counter[str] = Counter()
    for step in steps:
        elements[step.dtype] += step.size
    return cast(DType, elements.most_common(1)[0][0])
