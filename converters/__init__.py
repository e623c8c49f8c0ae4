"""Converts a Hugging Face directory to a checkpoint. Uses no network and runs no model code."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_args

import msgspec

from converters import heads, weights
from converters.families import jina, jina_bert
from converters.families.jina import is_flash
from converters.families.jina_bert import is_jina_bert
from converters.features import late_interaction, rerankers, scores, static, static_terms, terms
from converters.features.adapters import (
    AdapterSource,
    BuiltIn,
    built_in_ranks,
    check_heads,
    layer_ranks,
    plan_adapters,
    read_adapter,
    without_built_in,
)
from converters.features.m3 import with_token_heads
from converters.field_types import CONFIG_FIELDS, check_fields
from converters.heads import Layout
from converters.tokenizers import tokenizer
from converters.vision import dual, pages
from converters.weights import Rule, Step
from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints.adapter_folders import adapter_folders
from jaxembed.checkpoints.checkpoint import Contents
from jaxembed.data.spec import IMAGE_ROUTE, TEXT_ROUTE, DType, ModelSpec
from jaxembed.errors import INTERRUPTS, CheckpointError, JaxembedError, UnsupportedModel
from jaxembed.models import parameter_shapes, position_limit, tower_class

__all__ = [
    "CONVERTERS",
    "Outline",
    "convert",
    "folders_read",
    "outline",
    "outline_routes",
    "weight_folders",
]

logger = logging.getLogger(__name__)

CONVERTERS: dict[str, str] = {
    "albert": "converters.families.albert",
    "bert": "converters.families.bert",
    "camembert": "converters.families.roberta",
    "deberta-v2": "converters.families.deberta",
    "distilbert": "converters.families.distilbert",
    "electra": "converters.families.electra",
    "eurobert": "converters.families.eurobert",
    "gemma2": "converters.families.gemma2",
    "gemma3_text": "converters.families.gemma3",
    "gte": "converters.families.gte",
    "jina_embeddings_v3": "converters.families.jina",
    "llama": "converters.families.llama",
    "llama_bidirec": "converters.families.llama",
    "ministral3": "converters.families.ministral3",
    "mistral": "converters.families.mistral",
    "modernbert": "converters.families.modernbert",
    "mpnet": "converters.families.mpnet",
    "new": "converters.families.gte",
    "nomic_bert": "converters.families.nomic_bert",
    "qwen2": "converters.families.qwen2",
    "qwen3": "converters.families.qwen3",
    "roberta": "converters.families.roberta",
    "t5": "converters.families.t5",
    "xlm-roberta": "converters.families.roberta",
}

LOG_EVERY_S = 5.0  # between two log lines of a conversion

ConversionProgress = Callable[[Sequence[Step]], Iterable[Step]]
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

STORED_DTYPES = get_args(DType)

# The uses of a model, named by transformers' class for each. These are the keys under which
# auto_map names code that a model brings along.
EMBEDDER = "AutoModel"
CLASSIFIER = "AutoModelForSequenceClassification"
GENERATOR = "AutoModelForCausalLM"
MASKED_LM = "AutoModelForMaskedLM"  # whose logits become the weights of terms


@dataclass(frozen=True)
class Outline:
    """A model as its small files describe it, without its weights."""

    source: Path
    family: Any  # the converter of its model_type, a module or one half of a dual model
    layout: Layout
    spec: ModelSpec  # without content hash; its dtype is that of config.json, or float32
    tokenizer: bytes  # the content of tokenizer.json
    rules: tuple[Rule, ...]  # for all parameters, without those of adapters
    built_in: BuiltIn | None = None  # adapters among the model's own tensors; they come first
    adapters: tuple[AdapterSource, ...] = ()  # further ones, in the order of their numbers


def show_progress(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps, and show a progress bar on a terminal, or a log line every few seconds."""
    if sys.stderr.isatty():
        from tqdm import tqdm  # imported here, because only a terminal needs it

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
    adapters: Mapping[str, str | Path] | None = None,
    splade: bool = False,
    progress: ConversionProgress = show_progress,
) -> ModelSpec:
    """Convert the model in the directory `source` to a checkpoint at `out`, and return its spec; of
    a model with several routes that of the main one.

    `name` and `revision` are noted in the checkpoint as its source. `dense_path` is the folder of a
    Dense module to use instead of the one in modules.json. `adapters` are folders of low-rank
    adapters by the names that they get. With `splade` a masked language model without modules.json
    becomes a sparse encoder. `progress` yields the steps that it is
    given. Raises UnsupportedModel for a model that we cannot run, ConversionError for tensors that
    do not fit, and CheckpointError for other problems; then nothing is written.
    """
    checkpoint.refuse_occupied(out)
    routes, default = outline_routes(
        source,
        name=name,
        revision=revision,
        dense_path=dense_path,
        adapters=adapters,
        splade=splade,
    )
    if routes.keys() == {""}:
        return checkpoint.save(out, *_contents(routes[""], progress))
    contents = {route: _contents(model, progress) for route, model in routes.items()}
    return checkpoint.save_routes(out, contents, default).main


def _contents(model: Outline, progress: ConversionProgress) -> Contents:
    """What a checkpoint is made of; the parameters are read as they are taken."""
    steps = _plan(model)
    spec = msgspec.structs.replace(model.spec, dtype=_dtype(steps))
    params = ((step.target, step.read()) for step in progress(steps))
    return Contents(spec, params, model.tokenizer)


def _naming_damage(
    call: Callable[Concatenate[Path, Arguments], Returned],
) -> Callable[Concatenate[Path, Arguments], Returned]:
    """Make a function raise CheckpointError, which names the model in its first argument, where it
    raises an error that no check foresaw."""

    @wraps(call)
    def checked(source: Path, *arguments: Arguments.args, **options: Arguments.kwargs) -> Returned:
        try:
            return call(source, *arguments, **options)
        except (*INTERRUPTS, JaxembedError, MemoryError):
            raise
        except BaseException as error:  # also a panic of a library
            raise CheckpointError(
                f"{source} is damaged, or has a form that is not foreseen: "
                f"{type(error).__name__}: {error}"
            ) from error

    return checked


@_naming_damage
def outline_routes(
    source: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dense_path: str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    splade: bool = False,
) -> tuple[dict[str, Outline], str | None]:
    """Describe the checkpoint that `convert` would write, without reading weights: each route and
    the name of the default one, as in `Routes`.

    The weights need not be in `source`, except static embeddings, which nothing else describes, but
    those of adapters in their folders. The arguments and the errors are those of `convert`, except
    errors of the weights.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory")
    adapters = adapter_folders(adapters)
    if dual.is_dual(source) or pages.is_pages(source):
        _refuse_options_of_texts(source, adapters, dense_path, splade=splade)
        return _outlines_with_images(source, name, revision)
    router = heads.router_of(source)
    if router is None:
        model = outline(
            source,
            name=name,
            revision=revision,
            dense_path=dense_path,
            adapters=adapters,
            splade=splade,
        )
        return {"": model}, ""
    if adapters:
        raise UnsupportedModel(
            f"adapter {next(iter(adapters))}: {source} has the routes {', '.join(router.routes)}, "
            "and a model with several routes takes no adapter; leave --adapter out"
        )
    if dense_path is not None:
        raise CheckpointError(
            f"dense path {dense_path!r} takes the place of the only Dense module, and {source} has "
            f"the routes {', '.join(router.routes)}; leave it out"
        )
    routes = {
        route: outline(source, name=name, revision=revision, route=route, splade=splade)
        for route in router.routes
    }
    if own := [route for route, model in routes.items() if model.built_in]:
        raise UnsupportedModel(
            f"{source}: its route {own[0]} has adapters, and a model with several routes takes none"
        )
    _check_comparable(source, routes)
    return routes, router.default


def _outlines_with_images(
    source: Path, name: str | None, revision: str | None
) -> tuple[dict[str, Outline], str]:
    """What `outline_routes` gives for a model of texts and images."""
    if pages.is_pages(source):
        return {"": outline(source, name=name, revision=revision)}, ""
    halves = {
        route: outline(source, name=name, revision=revision, route=route)
        for route in (TEXT_ROUTE, IMAGE_ROUTE)
    }
    _check_comparable(source, halves)
    return halves, TEXT_ROUTE


def _refuse_options_of_texts(
    source: Path, adapters: Mapping[str, Path], dense_path: str | None, *, splade: bool
) -> None:
    """Raise UnsupportedModel for options that a model of texts and images does not take."""
    given = {
        "--adapter": bool(adapters),
        "--dense-path": dense_path is not None,
        "--pooling splade": splade,
    }
    for flag, is_given in given.items():
        if is_given:
            raise UnsupportedModel(
                f"{flag}: {source} is a model of texts and images, which takes none; leave it out"
            )


def _check_comparable(source: Path, routes: Mapping[str, Outline]) -> None:
    """Raise UnsupportedModel for routes whose outputs differ in kind or width."""
    outputs = {route: model.spec.primary for route, model in routes.items()}
    if len(set(outputs.values())) > 1:
        shown = ", ".join(f"{output} of {route}" for route, output in outputs.items())
        raise UnsupportedModel(
            f"{source}: its routes give different outputs: {shown}; they are never compared"
        )
    widths = {route: model.spec.dim for route, model in routes.items()}
    if len(set(widths.values())) > 1:
        shown = ", ".join(f"{width} of {route}" for route, width in widths.items())
        raise UnsupportedModel(
            f"{source}: the vectors of its routes differ in width: {shown}; they are never compared"
        )


def outline(
    source: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dense_path: str | None = None,
    route: str = "",
    adapters: Mapping[str, Path] | None = None,
    splade: bool = False,
) -> Outline:
    """Describe one route of a model, or a model without routes, as `outline_routes` does."""
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory")
    name = name or str(source)
    if dual.is_dual(source):
        half, layout, spec, text = dual.read_half(source, name, revision, route)
        return Outline(source, half, layout, spec, text, half.RULES)
    if pages.is_pages(source):
        family, layout, spec, text = pages.read_pages(source, name, revision)
        return Outline(source, family, layout, spec, text, family.RULES)
    if splade:
        _refuse_without_terms(source, route)
    if (kind := _static_kind(source, route)) is not None:
        _refuse_adapters(source, adapters or {})
        layout, spec, text = kind.static_outline(source, name, revision, dense_path, route)
        return Outline(source, kind, layout, spec, text, layout.rules)
    folder = source / heads.tower_folder(source, route)
    family, hf = _family(_config(folder), folder)
    is_late = not route and not splade and late_interaction.is_late(source)
    use = EMBEDDER if is_late else MASKED_LM if splade else _use(source, family, hf, route)
    _refuse_own_code(family, hf, use)
    config = _tower_fields(family, folder, hf)
    words = None
    if is_late:
        _refuse_dense_path(source, dense_path, "compares texts token by token")
        layout, words = late_interaction.read_late_layout(source, config["hidden_size"])
    else:
        layout = _layout(source, name, family, hf, config, use, dense_path, route)
    tower = source / layout.tower
    spec = _spec(family, config, layout, name, revision)
    dtype = hf.get("dtype") or hf.get("torch_dtype")  # the keys of transformers 5 and 4
    spec = msgspec.structs.replace(
        spec,
        token_types=tokenizer.gives_types(tower, hf),
        max_input_tokens=heads.token_limit(tower, position_limit(spec), late=is_late),
        dtype=dtype if dtype in STORED_DTYPES else "float32",
    )
    text = tokenizer.read_tokenizer(
        tower, lowercase=layout.lowercase, vocab_size=config["vocab_size"]
    )
    if use == EMBEDDER:
        sparse = getattr(family, "SPARSE", ())
        layout = with_token_heads(source, layout, hf, config["hidden_size"], sparse, text)
        spec = msgspec.structs.replace(spec, heads=layout.heads)
    if words is not None:
        spec = late_interaction.with_interaction(spec, words, text, tower)
    own = family.built_in(hf) if hasattr(family, "built_in") else None
    rules = (*tower_rules(family, hf), *layout.rules)
    model = Outline(source, family, layout, spec, text, rules, own)
    return _with_adapters(model, adapters or {}) if adapters or own else model


def _refuse_adapters(source: Path, adapters: Mapping[str, Path]) -> None:
    """Raise UnsupportedModel for adapters of static embeddings."""
    if adapters:
        raise UnsupportedModel(
            f"adapter {next(iter(adapters))}: {source} holds static embeddings, which take no "
            "adapter; leave --adapter out"
        )


def _with_adapters(model: Outline, folders: Mapping[str, Path]) -> Outline:
    """The outline with adapters, of which names, shapes and ranks are known now."""
    spec, rules, own = model.spec, model.rules, model.built_in
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(spec).items()}
    sources = tuple(read_adapter(name, at, model.family) for name, at in folders.items())
    for name, at in folders.items():
        check_heads(name, at, spec.hidden_size, spec.heads)
    found = [layer_ranks(source, model.family, rules, shapes) for source in sources]
    prompts = spec.prompts
    if own is not None:
        found = [*built_in_ranks(own, rules, shapes), *found]
        prompts = {**own.prompts, **prompts}
    if twice := [name for name, count in Counter(one.name for one in found).items() if count > 1]:
        raise CheckpointError(f"the model has an adapter {twice[0]} already; give it another name")
    spec = msgspec.structs.replace(spec, adapters=tuple(found), prompts=prompts)
    return replace(model, adapters=sources, spec=spec)


def weight_folders(source: Path, dense_path: str | None = None) -> list[str]:
    """The folders within the source that hold weights; needs only its JSON files."""
    if dual.is_dual(source):
        return [dual.folder_of(source)]
    return heads.module_folders(source, dense_path)


def folders_read(source: Path) -> list[str]:
    """The folders of which `outline_routes` needs the weights: those of static models. Needs only
    JSON files."""
    if dual.is_dual(source):
        return []
    routes = [route for route in heads.routes_of(source) if _static_kind(source, route)]
    return [heads.tower_folder(source, route) for route in routes]


def _static_kind(source: Path, route: str) -> ModuleType | None:
    """The converter of a static model, or of such a route; None of one with a tower."""
    if static_terms.holds_static_terms(source, route):
        return static_terms
    return static if static.holds_static(source, route) else None


def _config(tower: Path) -> dict[str, Any]:
    """Read config.json and check the types of its fields. Raises CheckpointError if there is none,
    and UnsupportedModel for a model_type without a converter: its fields may be others."""
    if (tower / "adapter_config.json").is_file():
        base = heads.read_optional_json(tower / "adapter_config.json").get(
            "base_model_name_or_path"
        )
        pages.refuse_adapter(tower, str(base))
        raise UnsupportedModel(
            f"{tower} is an adapter of {base or 'another model'}; serve that with "
            f"--adapter NAME={tower}"
        )
    hf = heads.read_optional_json(tower / "config.json")
    if not hf and (tower / checkpoint.MANIFEST).is_file():
        raise CheckpointError(
            f"{tower} is half a converted checkpoint: {checkpoint.MANIFEST} is there and "
            f"{checkpoint.PARAMETERS}/ is not; convert the model again"
        )
    if not hf:
        raise CheckpointError(f"{tower} is not a model: there is no config.json")
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in CONVERTERS:
        kinds = ", ".join(sorted(CONVERTERS))
        raise UnsupportedModel(f"model_type {kind!r} is not supported; known: {kinds}")
    check_fields(str(tower / "config.json"), hf, CONFIG_FIELDS)
    return hf


def _family(hf: dict[str, Any], folder: Path) -> tuple[ModuleType, dict[str, Any]]:
    """The converter of this config, and the config with what the family reads of other files.
    Raises UnsupportedModel for a class that it does not convert."""
    kind = hf["model_type"]
    if kind == "xlm-roberta" and is_flash(hf):
        family = jina
    elif kind == "bert" and is_jina_bert(hf):
        family = jina_bert
    else:
        family = import_module(CONVERTERS[kind])
    classes = (*family.CLASSES, *classifiers(family), *generators(family))
    classes += (late_interaction.STANFORD,)
    for architecture in hf.get("architectures") or ():
        if architecture not in classes:
            raise UnsupportedModel(
                f"architecture {architecture!r} is not supported; known: {', '.join(classes)}"
            )
    if hf.get("quantization_config"):
        raise UnsupportedModel("quantised weights are not supported; use the original ones")
    completed = getattr(family, "completed", None)
    return family, hf if completed is None else completed(hf, folder)


def _tower_fields(family: ModuleType, folder: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of the tower's config, in the types that the tower wants. Raises CheckpointError
    for one of another type, as null may lead to, besides what the family raises."""
    fields = family.config(hf)
    try:
        typed = msgspec.convert(fields, tower_class(family.ARCHITECTURE).Config)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{folder / 'config.json'} does not give what the {family.ARCHITECTURE} tower takes: "
            f"{error}"
        ) from error
    return {name: getattr(typed, name) for name in fields}


def _use(source: Path, family: ModuleType, hf: dict[str, Any], route: str) -> str:
    """The use of a model: EMBEDDER or MASKED_LM if modules.json pools hidden states or logits, else
    that of the class in config.json.

    Raises UnsupportedModel if both are missing, because a classifier would be taken for an
    embedder.
    """
    if heads.pools(source, route):
        return EMBEDDER
    if heads.weighs_terms(source, route):
        return MASKED_LM
    classes = set(hf.get("architectures") or ())
    if not classes:
        raise UnsupportedModel(
            f"nothing says whether {source} embeds or scores: modules.json names no Pooling, and "
            "config.json no architectures; add the class that the model was saved from, such as "
            f'"architectures": ["{family.CLASSES[0]}"] of an embedder'
        )
    if classes & set(classifiers(family)):
        return CLASSIFIER
    return GENERATOR if classes & set(generators(family)) else EMBEDDER


def _refuse_without_terms(source: Path, route: str) -> None:
    """Raise UnsupportedModel for what gives no weights of terms: modules that do something else,
    or a class that is no masked language model."""
    if heads.modules_of(source, route) is not None:
        known = heads.weighs_terms(source, route) or static_terms.holds_static_terms(source, route)
        if not known:
            raise UnsupportedModel(
                f"--pooling splade: modules.json of {source} says otherwise; leave the flag out"
            )
        return
    classes = heads.read_optional_json(source / "config.json").get("architectures")
    if not any(str(name).endswith("ForMaskedLM") for name in classes or ()):
        raise UnsupportedModel(
            f"--pooling splade is for masked language models, and config.json of {source} names "
            f"{', '.join(map(str, classes or ())) or 'no class'}; known: classes ...ForMaskedLM"
        )


def _refuse_own_code(family: ModuleType, hf: dict[str, Any], use: str) -> None:
    """Raise UnsupportedModel if the model brings its own code for the tower or for this use.

    Code for the tower changes every use; code for other uses is ignored.
    """
    codes = hf.get("auto_map") or {}
    known_codes = getattr(family, "OWN_CODE", {}).get(use, ())
    for key in dict.fromkeys((EMBEDDER, use)):
        code = codes.get(key)
        if code is not None and code not in known_codes:
            raise UnsupportedModel(
                f"the model brings its own code (auto_map, {key}: {code}), which is never run"
            )


def classifiers(family: ModuleType) -> tuple[str, ...]:
    """The names of a family's classes that score inputs instead of embedding them."""
    return getattr(family, "CLASSIFIERS", ())


def generators(family: ModuleType) -> tuple[str, ...]:
    """The names of a family's classes of language models, of which some are rerankers."""
    return getattr(family, "GENERATORS", ())


def tower_rules(family: ModuleType, hf: dict[str, Any]) -> list[Rule]:
    """The rules for the tensors of a family's tower; some of them may depend on the config."""
    of_config = getattr(family, "config_rules", None)
    return [*family.RULES, *(of_config(hf) if of_config else ())]


def _layout(
    source: Path,
    name: str,
    family: ModuleType,
    hf: dict[str, Any],
    config: dict[str, Any],
    use: str,
    dense_path: str | None,
    route: str,
) -> Layout:
    """Read what follows the tower: pooling, modules, labels and template, according to the use."""
    if use == EMBEDDER:
        return heads.read_layout(source, config["hidden_size"], dense_path, route)
    _refuse_dense_path(source, dense_path, "has none")
    if use == MASKED_LM:
        return terms.terms_layout(source, _term_head(source, family, hf), route)
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


def _term_head(source: Path, family: ModuleType, hf: dict[str, Any]) -> terms.TermHead:
    """The masked-LM head of a family. Raises UnsupportedModel for one whose head is not known."""
    if not hasattr(family, "masked_lm"):
        modules = {kind: import_module(name) for kind, name in CONVERTERS.items()}
        known = [kind for kind, module in modules.items() if hasattr(module, "masked_lm")]
        raise UnsupportedModel(
            f"{source}: weights of terms are made by the head of a masked language model, and that "
            f"of {hf['model_type']!r} is not supported; known: {', '.join(known)}"
        )
    return family.masked_lm(hf)


def _refuse_dense_path(source: Path, dense_path: str | None, why: str) -> None:
    if dense_path is not None:
        raise CheckpointError(
            f"dense path {dense_path!r} takes the place of a Dense module, and {source} {why}; "
            "leave it out"
        )


def _spec(
    family: ModuleType, config: dict[str, Any], layout: Layout, name: str, revision: str | None
) -> ModelSpec:
    """Make the spec, with placeholders for token types, limit, dtype and hash."""
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


def _plan(model: Outline) -> list[Step]:
    """Plan the conversion of every parameter of the tower and of the modules after it."""
    source, family, layout, spec = model.source, model.family, model.layout, model.spec
    find = getattr(family, "find", weights.find)
    tower = find(source / layout.tower)
    tensors = weights.canonical(spec.source, tower, family.PREFIXES, family.RENAMES)
    sources = list(model.adapters)
    if model.built_in is not None:
        tensors, own = without_built_in(spec.source, model.built_in, family, tensors)
        sources = [*own, *sources]
    for folder in layout.folders:
        tensors |= weights.within(folder, weights.find(source / folder))
    for name in layout.files:
        tensors |= weights.within(name, weights.torch_file(source / name))
    plain = msgspec.structs.replace(spec, adapters=())
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(plain).items()}
    ignored = [*family.IGNORED, *layout.ignored]
    steps = weights.plan_steps(spec.source, model.rules, ignored, tensors, shapes)
    steps += plan_adapters(spec.source, model.rules, tensors, shapes, sources, spec.adapters)
    return sorted(steps, key=lambda step: step.size)  # as plan_steps says


def _dtype(steps: Sequence[Step]) -> DType:
    """The dtype of most elements: a module may be saved in a wider dtype than the tower."""
    elements: Counter[str] = Counter()
    for step in steps:
        elements[step.dtype] += step.size
    return cast(DType, elements.most_common(1)[0][0])
