"""Reads models that are a chain of modules, or several chains behind a Router, as most are."""

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from converters import heads
from converters.family import (
    ADAPTERS,
    CONVERTERS,
    Family,
    Images,
    TensorRules,
    family_of,
    family_of_type,
)
from converters.features import late_interaction, scores, static, terms
from converters.features.adapters import CONFIG, with_adapters
from converters.features.chat import check_image_tokens, with_chat
from converters.features.m3 import with_token_heads
from converters.fields import (
    CONFIG_FIELDS,
    check_fields,
    refuse_unknown,
)
from converters.heads import Layout
from converters.outline import Options, Outline, Reader, check_comparable, spec_of
from converters.quantized import scheme_of
from converters.tokenizers import tokenizer
from converters.tokenizers.framed import FramedTokenizer
from converters.vision.dual import refuse_options
from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints.source import adapter_folders
from jaxembed.data.spec import ModelSpec
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import position_limit, tower_class

logger = logging.getLogger(__name__)

# The uses of a model, by transformers' class for each. auto_map in config.json names the model's
# own code under these keys.
EMBEDDER = "AutoModel"
CLASSIFIER = "AutoModelForSequenceClassification"
GENERATOR = "AutoModelForCausalLM"
TOKEN_CLASSIFIER = "AutoModelForTokenClassification"
MASKED_LM = "AutoModelForMaskedLM"  # its logits become term weights
LISTWISE = "listwise"  # a class of the model's own, whose code auto_map names for AutoModel


def _outlines(source: Path, options: Options) -> tuple[dict[str, Outline], str | None]:
    """Describe each route of a model; return the outlines by route, and the name of the default
    route. A model without a Router has the one route ""."""
    router = heads.router_of(source)
    if router is None:
        return {"": _outline(source, options, "")}, ""
    if options.adapters:
        raise UnsupportedModel(
            f"adapter {next(iter(options.adapters))}: {source} has the routes "
            f"{', '.join(router.routes)}, and a model with several routes cannot take adapters; "
            "leave --adapter out"
        )
    if options.dense_path is not None:
        raise CheckpointError(
            f"dense path {options.dense_path!r} takes the place of the only Dense module, and "
            f"{source} has the routes {', '.join(router.routes)}; leave it out"
        )
    routes = {route: _outline(source, options, route) for route in router.routes}
    if bad := [route for route, model in routes.items() if model.built_in]:
        raise UnsupportedModel(
            f"{source}: its route {bad[0]} has adapters, and a model with several routes cannot "
            "take any"
        )
    check_comparable(source, routes)
    return routes, router.default


def _outline(source: Path, options: Options, route: str) -> Outline:
    """Describe one route of a model; the route of a model without a Router is ""."""
    if options.splade:
        # modules.json must list a sparse encoder; without it, the class must be a masked LM
        kinds = heads.kinds_of(source, route)
        if kinds and not {"splade", "static_terms"} & {*kinds}:
            raise UnsupportedModel(
                f"--pooling splade: modules.json of {source} names other modules; leave the flag "
                "out"
            )
        classes = heads.read_optional_json(source / "config.json").get("architectures") or ()
        if not kinds and not any(str(name).endswith("ForMaskedLM") for name in classes):
            raise UnsupportedModel(
                "--pooling splade is for masked language models, and config.json of "
                f"{source} names {', '.join(map(str, classes)) or 'no class'}; known: classes "
                "...ForMaskedLM"
            )
    if not static.holds_static(source, route):
        return _tower_outline(source, options, route)
    if options.adapters:
        raise UnsupportedModel(
            f"adapter {next(iter(options.adapters))}: {source} holds static embeddings, which "
            "cannot take an adapter; leave --adapter out"
        )
    if options.cutoff_layer is not None:
        raise UnsupportedModel(
            f"--cutoff-layer {options.cutoff_layer}: {source} holds static embeddings, which have "
            "no layers; leave the flag out"
        )
    return static.static_outline(source, options, route)


def _tower_outline(source: Path, options: Options, route: str) -> Outline:
    """Describe a route whose backbone is a transformer; `route` is "" without a Router."""
    folder = source / heads.tower_folder(source, route)
    family, hf = _family(folder)
    is_multi_vector = not route and not options.splade and late_interaction.is_multi_vector(source)
    use = (
        EMBEDDER
        if is_multi_vector
        else MASKED_LM
        if options.splade
        else _use(source, family, hf, route)
    )
    # The model's own code for the backbone changes every use. Its code for other uses is ignored.
    for key in dict.fromkeys((EMBEDDER, use)):
        code = (hf.get("auto_map") or {}).get(key)
        if code is not None and code not in family.own_code.get(use, ()):
            raise UnsupportedModel(
                f"the model brings its own code (auto_map, {key}: {code}), which is never run"
            )
    if options.cutoff_layer is not None:
        if family.unused is None:
            raise UnsupportedModel(
                f"--cutoff-layer {options.cutoff_layer}: {source} has only a head after its last "
                "layer; leave the flag out"
            )
        hf = hf | {"cutoff_layer": options.cutoff_layer}
    config, images, architecture = family.config(hf), None, family.architecture
    if family.images is not None and use in (EMBEDDER, GENERATOR):
        refuse_options(source, options)
        images, architecture = import_module(family.images[0]).images(hf, folder), "pages"
        config |= images.config
    config = _checked(folder, config, architecture)
    tokenization = None
    if is_multi_vector:
        options.refuse_dense_path(source, "compares texts token by token")
        layout, tokenization = late_interaction.read_late_layout(source, config["hidden_size"])
    else:
        layout = _layout(source, options, family, hf, config, use, route)
    backbone = source / layout.backbone
    spec = spec_of(
        options,
        layout,
        config,
        hf,
        architecture=architecture,
        image=images and images.image,
        token_types=tokenizer.gives_types(backbone, hf),
        max_input_tokens=1,  # replaced below by `limit`
    )
    limit = heads.token_limit(backbone, position_limit(spec), late=is_multi_vector)
    text = tokenizer.read_tokenizer(
        backbone, lowercase=layout.lowercase, vocab_size=config["vocab_size"]
    )
    if use == EMBEDDER:
        layout = with_token_heads(source, layout, hf, config["hidden_size"], family, text)
    spec = msgspec.structs.replace(spec, heads=layout.heads, max_input_tokens=limit)
    if use == EMBEDDER:
        spec, text = _with_texts(family, hf, spec, text, backbone)
    if spec.image is not None:
        check_image_tokens(spec)
    if tokenization is not None:
        spec = late_interaction.with_interaction(spec, tokenization, text, backbone)
    tensors = _tensors(family, hf, layout, images)
    built_in, tasks = family.built_in(hf), _task_folders(folder, family, hf)
    if tasks:
        spec = msgspec.structs.replace(spec, default_adapter=next(iter(tasks)))
    if twice := [name for name in options.adapters if name in tasks]:
        raise CheckpointError(f"the model has an adapter {twice[0]} already; give it another name")
    model = Outline(source, tensors, layout, spec, text, built_in)
    adapters = {**tasks, **options.adapters}
    in_one = tuple(tasks) if {*tasks.values()} == {folder / ADAPTERS} else ()
    return with_adapters(model, adapters, in_one) if adapters or built_in else model


def _with_texts(
    family: Family, hf: dict[str, Any], spec: ModelSpec, text: bytes, backbone: Path
) -> tuple[ModelSpec, bytes]:
    """Return the spec of an embedder with the prompts and the chat template of the family's code,
    and the tokenizer.json `text` with what this code puts around texts."""
    prompts, default = spec.prompts, spec.default_prompt_name
    if family.prompts is not None:
        own, own_default = family.prompts
        # with a frame, the prompts of the files would repeat what it puts around texts
        prompts = own if family.frame else {**own, **prompts}
        default = own_default if family.frame else default or own_default
        spec = msgspec.structs.replace(spec, prompts=prompts, default_prompt_name=default)
    if family.chat is None and family.frame is None:
        return spec, text
    framed = FramedTokenizer(backbone, spec.config["vocab_size"])
    if family.chat is not None:
        return with_chat(spec, framed, backbone, *family.chat)
    assert family.frame is not None
    return spec, framed.framed(*family.frame(hf), prompt=prompts[default] if default else "")


def _checked(folder: Path, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the config of a backbone with the types of its fields. Raises CheckpointError for a
    field of a wrong type, such as a null in the config.json of `folder`."""
    try:
        typed = msgspec.convert(config, tower_class(architecture).Config)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{folder / 'config.json'} does not fit the {architecture} backbone: {error}"
        ) from error
    return {name: getattr(typed, name) for name in config}


def _tensors(
    family: Family, hf: dict[str, Any], layout: Layout, images: Images | None
) -> TensorRules:
    """Return the rules for all tensors of a model, whose image encoder is ignored if it takes no
    `images`."""
    rules = (*family.rules, *family.config_rules(hf), *layout.rules)
    ignored = (*family.ignored, *(family.unused(hf) if family.unused else ()))
    if images is not None:
        rules = (*rules, *images.rules)
    elif family.images is not None:
        ignored = (*ignored, family.images[1])
    return replace(family, rules=rules, ignored=ignored)


def _task_folders(folder: Path, family: Family, hf: dict[str, Any]) -> dict[str, Path]:
    """Return the folders of the adapters that belong to the model in `folder`, by their names."""
    inside = folder / ADAPTERS
    in_one = (inside / CONFIG).is_file()  # all adapters are in one file
    return adapter_folders({name: inside if in_one else inside / name for name in family.tasks(hf)})


def _family(backbone: Path) -> tuple[Family, dict[str, Any]]:
    """Return the family that converts the config.json in a folder, and that config, checked, with
    the fields that the family reads from other files.

    Raises CheckpointError if there is no config.json, and UnsupportedModel for an unknown
    model_type or class, and for weights quantized in an unknown way.
    """
    hf = heads.model_config(backbone)
    if not hf and (backbone / checkpoint.MANIFEST).is_file():
        raise CheckpointError(
            f"{backbone} is an incomplete checkpoint: it has {checkpoint.MANIFEST} but not "
            f"{checkpoint.PARAMETERS}/; convert the model again"
        )
    if not hf:
        raise CheckpointError(f"{backbone} is not a model: there is no config.json")
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in CONVERTERS:
        kinds = ", ".join(sorted(CONVERTERS))
        raise UnsupportedModel(f"model_type {kind!r} is not supported; known: {kinds}")
    check_fields(str(backbone / "config.json"), hf, CONFIG_FIELDS)
    family = family_of(hf)
    scorers = (*family.classifiers, *family.token_classifiers, *family.generators)
    classes = (*family.classes, *scorers, *family.listwise, late_interaction.STANFORD)
    for architecture in hf.get("architectures") or ():
        if architecture == heads.CODED_CLASS and architecture not in classes:
            names = ", ".join(name for name, _ in heads.README_CODES.values())
            raise UnsupportedModel(
                f"{backbone}: {architecture} does not say how the model embeds; supported are "
                f"models with {names} in the name of their folder, or with their README.md in it"
            )
        refuse_unknown("architecture", architecture, classes)
    scheme_of(hf)  # raises for what is not supported
    return family, family.completed(hf, backbone)


def _use(source: Path, family: Family, hf: dict[str, Any], route: str) -> str:
    """Return the use of a model. It is EMBEDDER if modules.json pools hidden states, MASKED_LM if
    it pools logits, and otherwise the use of the class in config.json.

    Raises UnsupportedModel if neither file tells the use, so that no classifier is served as an
    embedder.
    """
    kinds = heads.kinds_of(source, route)
    if "pooling" in kinds:
        if not family.classes:
            raise UnsupportedModel(
                f"{source}: modules.json names a Pooling, and of {hf['model_type']} models only "
                "rerankers are supported"
            )
        return EMBEDDER
    if "splade" in kinds:
        return MASKED_LM
    classes, known = set(hf.get("architectures") or ()), (*family.classes, *family.generators)
    if not classes:
        raise UnsupportedModel(
            f"nothing says whether {source} embeds or scores: modules.json names no Pooling, and "
            "config.json no architectures; add the class that the model was saved from, such as "
            f'"architectures": ["{known[0]}"]'
        )
    if classes & set(family.classifiers):
        return CLASSIFIER
    if classes & set(family.token_classifiers):
        return TOKEN_CLASSIFIER
    if classes & set(family.listwise):
        return LISTWISE
    return GENERATOR if classes & set(family.generators) else EMBEDDER


def _layout(
    source: Path,
    options: Options,
    family: Family,
    hf: dict[str, Any],
    config: dict[str, Any],
    use: str,
    route: str,
) -> Layout:
    """Read what follows the backbone for this `use`: pooling, modules, labels and template. `hf` is
    the content of config.json, and `config` is that of the backbone."""
    if use == EMBEDDER:
        width = config["hidden_size"]
        projection = family.projection(hf, width)
        in_chat = family.chat is not None
        return heads.read_layout(
            source, width, options.dense_path, route, projection, in_chat=in_chat
        )
    options.refuse_dense_path(source)
    if use == MASKED_LM:
        if family.masked_lm is None:
            known = [kind for kind in CONVERTERS if family_of_type(kind).masked_lm is not None]
            raise UnsupportedModel(
                f"{source}: the head of a masked language model computes term weights, and that "
                f"of {hf['model_type']!r} is not supported; known: {', '.join(known)}"
            )
        return terms.terms_layout(source, family.masked_lm(hf), route)
    if use == GENERATOR:
        return scores.reranker_layout(source, options.name, family, hf, config)
    if use == LISTWISE:
        return scores.listwise_layout(source, family, hf, config["hidden_size"])
    labels = scores.labels_of(hf)
    if use == TOKEN_CLASSIFIER:
        return scores.token_layout(source, family, hf, config["hidden_size"], labels)
    assert family.classifier is not None
    scorer = family.classifier(hf, len(labels))
    template = scores.template_of(source, options.name, family) if len(labels) == 1 else None
    if len(labels) == 1 and template is None and family.generators:
        logger.warning(
            "%s is a language model that scores pairs, and its files have no template: pairs are "
            "scored without one; most such models need one, and score near chance without it",
            options.name,
        )
    return scores.scores_layout(source, hf, scorer, labels, template)


def _folders_read(source: Path) -> list[str]:
    """Return the folders whose weights `_outlines` reads: static embeddings, and the adapters that
    belong to a model."""
    folders: list[str] = []
    for route in heads.routes_of(source):
        inside = heads.tower_folder(source, route)
        if static.holds_static(source, route):
            folders.append(inside)
            continue
        hf = heads.model_config(source / inside, CONFIG_FIELDS)
        if hf.get("model_type") in list(CONVERTERS):  # a list: model_type may be unhashable
            tasks = _task_folders(source / inside, family_of(hf), hf)
            folders += [str(folder.relative_to(source)) for folder in tasks.values()]
    return list(dict.fromkeys(folders))


READER = Reader(lambda source: True, _outlines, folders_read=_folders_read)
