"""Finds out which language models rerank, which two tokens they answer with, and their template."""

import logging
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from converters import heads
from converters.family import Family, Reranker
from converters.features import scores
from converters.heads import Layout, read_optional_json
from jaxembed.data.spec import PairTemplate
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.tokenizer import parse_tokenizer

logger = logging.getLogger(__name__)

LABEL = "yes"

# The messages with which sentence-transformers renders the chat template of a pair: "system" is for
# an instruction that differs from the template's own.
ROLES = {"system": "{instruction}", "query": "{query}", "document": "{document}"}


def reranker_layout(
    source: Path, name: str, family: Family, hf: dict[str, Any], config: dict[str, Any]
) -> Layout:
    """The layout of a language model that answers yes or no. Raises UnsupportedModel for a model
    that is not known to be one.

    It has sentence-transformers' LogitScore module, or is one of its family's rerankers.
    """
    tower = source / heads.tower_folder(source)
    template = template_of(source, name, family)
    entries = heads.modules_of(source) or ()
    judged = next((source / entry.path for entry in entries if entry.kind == "logit_score"), None)
    if judged is not None:
        said = read_optional_json(judged / "config.json")
        answers: Any = said.get("true_token_id"), said.get("false_token_id")
        if answers[1] is None:
            raise UnsupportedModel(
                f"{judged}: LogitScore without false_token_id is not supported; known: the "
                "difference of two logits"
            )
        terms = config["vocab_size"]
        if not all(isinstance(one, int) and 0 <= one < terms for one in answers):
            raise CheckpointError(
                f"{judged}: true_token_id and false_token_id are {answers[0]!r} and "
                f"{answers[1]!r}, wanted two ids below {terms}"
            )
        if template is None and "message" in heads.modalities(tower):
            raise UnsupportedModel(
                f"{tower}: the chat template takes no query and document; wanted one with the "
                'roles "query" and "document"'
            )
    elif (published := _published(source, name, family)) is not None:
        path = tower / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"no tokenizer.json in {tower}, which a language model needs")
        vocabulary = parse_tokenizer(path.read_bytes(), path)
        answers = [vocabulary.token_to_id(answer) for answer in published.answers]
        if None in answers:
            missing = published.answers[answers.index(None)]
            raise CheckpointError(f"{path} has no token {missing!r}")
    else:
        raise UnsupportedModel(
            f"{name} is a language model, and nothing says that it embeds or reranks: an embedder "
            "has a Pooling in modules.json, a reranker a LogitScore, and Qwen3-Reranker and "
            "mxbai-rerank have that in their names"
        )
    assert family.score_head is not None
    scorer = family.score_head(hf, config, *answers)
    return scores.scores_layout(source, hf, scorer, (LABEL,), template)


def template_of(source: Path, name: str, family: Family) -> PairTemplate | None:
    """The template of pairs: the chat template of the model, or that of its family, or None.

    A model that wants a template gives near-random scores without one, and so does one that is
    given another's: being called a reranker is not enough. Raises UnsupportedModel if the model
    has a chat template for pairs that cannot be cut, and its family has none for it.
    """
    tower = source / heads.tower_folder(source)
    plain = heads.modalities(tower) == {"text"}
    published = _published(source, name, family)
    try:
        template = None if plain else pair_template(tower)
    except UnsupportedModel:
        if published is None:
            raise
        template = None
    if template is not None:
        logger.info("%s: pairs are put into its chat template", name)
        return template
    if published is None:
        return None
    logger.info("%s: pairs are put into the template of %s", name, published.name)
    return published.template


def _published(source: Path, name: str, family: Family) -> Reranker | None:
    """The family's rerankers, if this is one of them."""
    published = family.reranker
    if published is None:
        return None
    readme = source / "README.md"
    names = (Path(name).name, source.name)
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    named = any(published.name in each.lower() for each in names)
    return published if named or published.quote in text else None


def pair_template(tower: Path) -> PairTemplate | None:
    """Read the chat template of a model's directory as a PairTemplate.

    Returns None if there is no template, or if it takes no query and document. Raises
    UnsupportedModel if it takes them but cannot be cut at places where tokens always end.
    """
    path = tower / "chat_template.jinja"
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    else:
        source = read_optional_json(tower / "tokenizer_config.json").get("chat_template")
    if not isinstance(source, str):
        return None
    full, plain = _render(source, *ROLES), _render(source, "query", "document")
    if "{query}" not in plain or "{document}" not in plain:
        return None
    # no other token crosses an added one
    added = read_optional_json(tower / "tokenizer.json").get("added_tokens") or ()
    specials = tuple(token["content"] for token in added)
    template = _cut(full, plain, specials)
    if template is None:
        raise UnsupportedModel(
            f"{tower}: the chat template is not supported; wanted lines with the instruction and "
            "the query, then the document after a space, then a special token"
        )
    return template


def _render(source: str, *roles: str) -> str:
    """Render the template with a message of each role; empty if it does not take them."""
    environment = ImmutableSandboxedEnvironment(  # with the settings of transformers
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    messages = [{"role": role, "content": ROLES[role]} for role in roles]
    try:
        return environment.from_string(source).render(
            messages=messages, add_generation_prompt=False
        )
    except (TemplateError, TypeError, AttributeError, ValueError):
        return ""


def _cut(full: str, plain: str, specials: tuple[str, ...]) -> PairTemplate | None:
    """Cut a rendered template into the parts of a PairTemplate; None if it is not possible.

    `full` has all three placeholders; `plain` has the template's own instruction instead.
    """
    if any(full.count(placeholder) != 1 for placeholder in ROLES.values()):
        return None
    before, after = full.split("{instruction}")
    head, suffix = full.split("{document}")
    prefix, line, rest = before.rpartition("\n")
    first = (rest + "{instruction}" + head.removeprefix(before + "{instruction}")).removesuffix(" ")
    is_clean = (
        head.startswith(before)
        and head.endswith(" ")
        and first == first.rstrip()
        and rest == rest.lstrip()
        and first.count("{") == 2
        and suffix.startswith(specials)
        and plain.startswith(before)
        and plain.endswith(after)
    )
    if not is_clean:
        return None
    return PairTemplate(
        prefix=prefix + line,
        first=first,
        second=" {document}",
        suffix=suffix,
        instruction=plain.removeprefix(before).removesuffix(after),
    )
