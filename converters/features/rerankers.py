"""Finds out which language models rerank, which two tokens they answer with, and their template."""

import logging
from pathlib import Path
from typing import Any, cast

from converters import heads
from converters.family import Family, Reranker
from converters.features import chat, scores
from converters.heads import Layout, read_optional_json
from jaxembed.data.spec import PairTemplate
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.tokenizer import parse_tokenizer

logger = logging.getLogger(__name__)

LABEL = "yes"


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
        true_id, false_id = _judged(judged, config["vocab_size"])
        if template is None and "message" in heads.modalities(tower):
            raise UnsupportedModel(
                f"{tower}: the chat template takes no query and document; wanted one with the "
                'roles "query" and "document"'
            )
    elif (published := _published(source, name, family)) is not None:
        true_id, false_id = (_id(tower, answer) for answer in published.answers)
    else:
        raise UnsupportedModel(
            f"{name} is a language model, and nothing says that it embeds or reranks: an embedder "
            "has a Pooling in modules.json, a reranker a LogitScore, and Qwen3-Reranker and "
            "mxbai-rerank have that in their names"
        )
    assert family.score_head is not None
    scorer = family.score_head(hf, config, true_id, false_id)
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
        template = None if plain else chat.pair_template(tower)
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


def _judged(folder: Path, vocab_size: int) -> tuple[int, int]:
    config = read_optional_json(folder / "config.json")
    true_id, false_id = config.get("true_token_id"), config.get("false_token_id")
    if false_id is None:
        raise UnsupportedModel(
            f"{folder}: LogitScore without false_token_id is not supported; known: the difference "
            "of two logits"
        )
    if not all(isinstance(one, int) and 0 <= one < vocab_size for one in (true_id, false_id)):
        raise CheckpointError(
            f"{folder}: true_token_id and false_token_id are {true_id!r} and {false_id!r}, wanted "
            f"two ids below {vocab_size}"
        )
    return cast(int, true_id), cast(int, false_id)


def _id(tower: Path, token: str) -> int:
    path = tower / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"no tokenizer.json in {tower}, which a language model needs")
    found = parse_tokenizer(path.read_bytes(), path).token_to_id(token)
    if found is None:
        raise CheckpointError(f"{path} has no token {token!r}")
    return found
