"""Reads models with a tower: what they are used for, and what follows the tower."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from converters import heads
from converters.family import Family, TermHead
from converters.features import late_interaction, rerankers, scores, terms
from converters.features.adapters import with_adapters
from converters.features.m3 import with_token_heads
from converters.field_types import CONFIG_FIELDS, check_fields
from converters.heads import Layout
from converters.outline import Options, Outline, spec_of
from converters.registry import CONVERTERS, family_of, family_of_type
from converters.tokenizers import tokenizer
from converters.vision import pages
from jaxembed.checkpoints import checkpoint
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import position_limit, tower_class

logger = logging.getLogger(__name__)

# The uses of a model, named by transformers' class for each. These are the keys under which
# auto_map names code that a model brings along.
EMBEDDER = "AutoModel"
CLASSIFIER = "AutoModelForSequenceClassification"
GENERATOR = "AutoModelForCausalLM"
MASKED_LM = "AutoModelForMaskedLM"  # whose logits become the weights of terms


def tower_outline(source: Path, options: Options, route: str) -> Outline:
    """Describe a model with a tower, or such a route of a model."""
    folder = source / heads.tower_folder(source, route)
    family, hf = _family(_config(folder), folder)
    is_late = not route and not options.splade and late_interaction.is_late(source)
    use = EMBEDDER if is_late else MASKED_LM if options.splade else _use(source, family, hf, route)
    _refuse_own_code(family, hf, use)
    config = _tower_fields(family, folder, hf)
    words = None
    if is_late:
        options.refuse_dense_path(source, "compares texts token by token")
        layout, words = late_interaction.read_late_layout(source, config["hidden_size"])
    else:
        layout = _layout(source, options, family, hf, config, use, route)
    tower = source / layout.tower
    spec = spec_of(
        options,
        layout,
        config,
        hf,
        architecture=family.architecture,
        token_types=tokenizer.gives_types(tower, hf),
        max_input_tokens=1,  # until the tower says how many it has positions for
    )
    limit = heads.token_limit(tower, position_limit(spec), late=is_late)
    text = tokenizer.read_tokenizer(
        tower, lowercase=layout.lowercase, vocab_size=config["vocab_size"]
    )
    if use == EMBEDDER:
        layout = with_token_heads(
            source, layout, hf, config["hidden_size"], family.sparse_classes, text
        )
    spec = msgspec.structs.replace(spec, heads=layout.heads, max_input_tokens=limit)
    if words is not None:
        spec = late_interaction.with_interaction(spec, words, text, tower)
    rules = (*family.rules, *family.config_rules(hf), *layout.rules)
    tensors = replace(family, rules=rules)
    own = family.built_in(hf)
    model = Outline(source, tensors, layout, spec, text, own)
    return with_adapters(model, options.adapters) if options.adapters or own else model


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


def _family(hf: dict[str, Any], folder: Path) -> tuple[Family, dict[str, Any]]:
    """The converter of this config, and the config with what the family reads of other files.
    Raises UnsupportedModel for a class that it does not convert."""
    family = family_of(hf)
    classes = (*family.classes, *family.classifiers, *family.generators)
    classes += (late_interaction.STANFORD,)
    for architecture in hf.get("architectures") or ():
        if architecture not in classes:
            raise UnsupportedModel(
                f"architecture {architecture!r} is not supported; known: {', '.join(classes)}"
            )
    if hf.get("quantization_config"):
        raise UnsupportedModel("quantised weights are not supported; use the original ones")
    return family, family.completed(hf, folder)


def _tower_fields(family: Family, folder: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of the tower's config, in the types that the tower wants. Raises CheckpointError
    for one of another type, as null may lead to, besides what the family raises."""
    fields = family.config(hf)
    try:
        typed = msgspec.convert(fields, tower_class(family.architecture).Config)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{folder / 'config.json'} does not give what the {family.architecture} tower takes: "
            f"{error}"
        ) from error
    return {name: getattr(typed, name) for name in fields}


def _use(source: Path, family: Family, hf: dict[str, Any], route: str) -> str:
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
            f'"architectures": ["{family.classes[0]}"] of an embedder'
        )
    if classes & set(family.classifiers):
        return CLASSIFIER
    return GENERATOR if classes & set(family.generators) else EMBEDDER


def _refuse_own_code(family: Family, hf: dict[str, Any], use: str) -> None:
    """Raise UnsupportedModel if the model brings its own code for the tower or for this use.

    Code for the tower changes every use; code for other uses is ignored.
    """
    codes = hf.get("auto_map") or {}
    known_codes = family.own_code.get(use, ())
    for key in dict.fromkeys((EMBEDDER, use)):
        code = codes.get(key)
        if code is not None and code not in known_codes:
            raise UnsupportedModel(
                f"the model brings its own code (auto_map, {key}: {code}), which is never run"
            )


def _layout(
    source: Path,
    options: Options,
    family: Family,
    hf: dict[str, Any],
    config: dict[str, Any],
    use: str,
    route: str,
) -> Layout:
    """Read what follows the tower: pooling, modules, labels and template, according to the use."""
    if use == EMBEDDER:
        return heads.read_layout(source, config["hidden_size"], options.dense_path, route)
    options.refuse_dense_path(source)
    if use == MASKED_LM:
        return terms.terms_layout(source, _term_head(source, family, hf), route)
    if use == GENERATOR:
        return rerankers.reranker_layout(source, options.name, family, hf, config)
    labels = scores.labels_of(hf)
    assert family.classifier is not None
    scorer = family.classifier(hf, len(labels))
    template = rerankers.template_of(source, options.name, family) if len(labels) == 1 else None
    if len(labels) == 1 and template is None and family.generators:
        logger.warning(
            "%s is a language model that scores pairs, and nothing says how it is asked: pairs are "
            "put to it without a template; most need one, and score near chance without it",
            options.name,
        )
    return scores.scores_layout(source, hf, scorer, labels, template)


def _term_head(source: Path, family: Family, hf: dict[str, Any]) -> TermHead:
    """The masked-LM head of a family. Raises UnsupportedModel for one whose head is not known."""
    if family.masked_lm is None:
        known = [kind for kind in CONVERTERS if family_of_type(kind).masked_lm is not None]
        raise UnsupportedModel(
            f"{source}: weights of terms are made by the head of a masked language model, and that "
            f"of {hf['model_type']!r} is not supported; known: {', '.join(known)}"
        )
    return family.masked_lm(hf)
