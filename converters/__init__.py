"""Converts a Hugging Face directory to a checkpoint. Knows no network and runs no model code."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec

from converters import heads, rerankers, scores, tokenizer, weights
from converters.heads import Layout, weight_folders
from converters.weights import Step
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import parameter_shapes, position_limit
from jaxembed.spec import DType, ModelSpec

__all__ = ["CONVERTERS", "convert", "weight_folders"]

logger = logging.getLogger(__name__)

CONVERTERS: dict[str, str] = {
    "bert": "converters.bert",
    "camembert": "converters.roberta",
    "modernbert": "converters.modernbert",
    "qwen2": "converters.qwen2",
    "qwen3": "converters.qwen3",
    "roberta": "converters.roberta",
    "xlm-roberta": "converters.roberta",
}

LOG_EVERY_S = 5.0

Progress = Callable[[Sequence[Step]], Iterable[Step]]


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
    progress: Progress = show_progress,
) -> ModelSpec:
    """Write the checkpoint of the model in `source` to `out`, all of it or nothing.

    `name` and `revision` are what the checkpoint says it comes from. Raises CheckpointError, the
    subclasses UnsupportedModel and ConversionError included.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory")
    checkpoint.refuse_occupied(out)
    hf = _config(source / heads.tower_folder(source))
    family = _family(hf)
    config = family.config(hf)
    found = _layout(source, name or str(source), family, hf, config, dense_path)
    spec = _spec(family, config, found, name or str(source), revision)
    spec = msgspec.structs.replace(
        spec,
        max_input_tokens=heads.token_limit(source / found.tower, position_limit(spec)),
    )
    text = tokenizer.read(
        source / found.tower, lowercase=found.lowercase, vocab_size=config["vocab_size"]
    )
    steps = _plan(source, family, found, spec)
    spec = msgspec.structs.replace(spec, dtype=_dtype(steps))
    params = ((step.target, step.read()) for step in progress(steps))
    return checkpoint.save(out, spec, params, text)


def _config(tower: Path) -> dict[str, Any]:
    if (tower / "adapter_config.json").is_file():
        raise UnsupportedModel(f"{tower} is an adapter; merge it into its base model first")
    hf = heads.read_json(tower / "config.json")
    if not hf:
        raise CheckpointError(f"{tower} is not a model: there is no config.json")
    return hf


def _family(hf: dict[str, Any]) -> ModuleType:
    """The converter of this config. Raises UnsupportedModel for what none converts."""
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
    code = (hf.get("auto_map") or {}).get("AutoModel")
    if code is not None and code != getattr(family, "OWN_CODE", None):
        raise UnsupportedModel(
            f"the model brings its own code (auto_map: {code}), which is never run"
        )
    if hf.get("quantization_config"):
        raise UnsupportedModel("quantised weights are not supported; use the original ones")
    return family


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
    dense_path: str | None,
) -> Layout:
    """An embedder if modules.json pools; else what the class in config.json is for."""
    named = set(hf.get("architectures") or ())
    if not heads.pools(source) and named & set(classifiers(family)):
        labels = scores.labels_of(hf)
        head = family.classifier(hf, len(labels))
        template = rerankers.template_of(source, name, family) if len(labels) == 1 else None
        return scores.layout(source, hf, head, labels, template)
    if not heads.pools(source) and named & set(generators(family)):
        return rerankers.layout(source, name, family, hf, config)
    return heads.read(source, config["hidden_size"], dense_path)


def _spec(
    family: ModuleType, config: dict[str, Any], found: Layout, name: str, revision: str | None
) -> ModelSpec:
    """The spec, but for its limit, dtype and hash."""
    return ModelSpec(
        architecture=family.ARCHITECTURE,
        config=config,
        pooling=found.pooling,
        modules=found.modules,
        task=found.task,
        labels=found.labels,
        score_function=found.score_function,
        template=found.template,
        include_prompt=found.include_prompt,
        prompts=dict(found.prompts or {}),
        default_prompt_name=found.default_prompt_name,
        max_input_tokens=1,
        hidden_size=config["hidden_size"],
        dtype="float32",
        source=name,
        revision=revision,
        content_hash="",
    )


def _plan(source: Path, family: ModuleType, found: Layout, spec: ModelSpec) -> list[Step]:
    """Every tensor of the tower and of the modules after it, in one plan."""
    model = spec.source
    tower = weights.find(source / found.tower)
    tensors = weights.canonical(model, tower, family.PREFIXES, family.RENAMES)
    for folder in found.folders:
        tensors |= weights.within(folder, weights.find(source / folder))
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(spec).items()}
    rules, ignored = [*family.RULES, *found.rules], [*family.IGNORED, *found.ignored]
    return weights.plan(model, rules, ignored, tensors, shapes)


def _dtype(steps: Sequence[Step]) -> DType:
    """The dtype that most elements have: a module is at times saved wider than its tower."""
    elements: Counter[str] = Counter()
    for step in steps:
        elements[step.dtype] += step.size
    return cast(DType, elements.most_common(1)[0][0])
