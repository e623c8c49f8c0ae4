"""Finds or builds tokenizer.json. Knows nothing of weights."""

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from converters.heads import read_json
from jaxembed.errors import CheckpointError

logger = logging.getLogger(__name__)

# Files from which transformers can build a tokenizer that was saved without tokenizer.json.
VOCABULARIES = ("vocab.txt", "vocab.json", "*.model", "*.vocab")


def read(folder: Path, *, lowercase: bool, vocab_size: int) -> bytes:
    """The tokenizer as JSON: the stored file to the byte, unless it must also lower its text.

    Raises CheckpointError if there is none, or if it has ids that the embedding table lacks.
    """
    path = folder / "tokenizer.json"
    stored = path.read_bytes() if path.is_file() else _build(folder)
    if lowercase:
        stored = _lowercased(stored)
    _check(folder, stored, vocab_size)
    return stored


def _build(folder: Path) -> bytes:
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        raise CheckpointError(f"no tokenizer in {folder}: wanted tokenizer.json or a vocabulary")
    logger.info("%s has no tokenizer.json: building it with transformers", folder)
    # Imported here: it costs two seconds, and only old models need it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        return tokenizer.backend_tokenizer.to_str().encode()
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise CheckpointError(
            f"transformers cannot build a tokenizer from {folder}: {error}; save one with "
            "tokenizer.json"
        ) from error


def _lowercased(stored: bytes) -> bytes:
    """sentence-transformers' do_lower_case: lower the text before anything else is done to it."""
    tokenizer = json.loads(stored)
    normalizer = tokenizer.get("normalizer")
    steps = _steps(normalizer)
    if any(_lowers(step) for step in steps):
        return stored
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _steps(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if normalizer is None:
        return []
    return normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]


def _lowers(step: dict[str, Any]) -> bool:
    # A BertNormalizer that lowers gives the same for every code point with Lowercase before it.
    return step["type"] == "Lowercase" or (step["type"] == "BertNormalizer" and step["lowercase"])


def _check(folder: Path, stored: bytes, vocab_size: int) -> None:
    try:
        tokenizer = Tokenizer.from_str(stored.decode())
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"the tokenizer in {folder} is damaged: {error}") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab_size:  # JAX would clamp the id and answer with another token's vector
        raise CheckpointError(
            f"the tokenizer in {folder} has ids up to {largest}, the model only {vocab_size} "
            "embeddings; remove the added tokens that the model never learnt"
        )
    _compare(folder, json.loads(stored))


def _compare(folder: Path, tokenizer: dict[str, Any]) -> None:
    """Warn where transformers would lower the text and tokenizer.json does not, or the reverse."""
    said = read_json(folder / "tokenizer_config.json").get("do_lower_case")
    for step in _steps(tokenizer.get("normalizer")):
        if step["type"] == "BertNormalizer" and said is not None and step["lowercase"] != said:
            logger.warning(
                "%s: tokenizer_config.json says do_lower_case=%s, tokenizer.json %s; the latter "
                "is used",
                folder,
                said,
                step["lowercase"],
            )
