"""Reads a model's tokenizer.json, or builds one. Knows nothing of weights."""

import json
import logging
from pathlib import Path
from typing import Any

from converters.heads import read_optional_json
from converters.tokenizers.sentencepiece_model import (
    FAMILIES,
    build_from_sentencepiece,
    class_name,
)
from jaxembed.errors import CheckpointError
from jaxembed.preprocessing.tokenizer import parse_tokenizer

logger = logging.getLogger(__name__)

# Files of which a tokenizer can be built without tokenizer.json.
VOCABULARIES = ("vocab.txt", "vocab.json", "*.model", "*.vocab")

# The classes whose model_input_names have token_type_ids in transformers 5. Its TokenizersBackend
# has no types; a PreTrainedTokenizerFast saved by transformers 4, which had them, becomes one too.
# This is what sentence-transformers' CrossEncoder scores.
WITH_TYPES = {
    "BertTokenizer",
    "ConvBertTokenizer",
    "DPRContextEncoderTokenizer",
    "DPRQuestionEncoderTokenizer",
    "DebertaTokenizer",
    "DebertaV2Tokenizer",
    "ElectraTokenizer",
    "LayoutLMTokenizer",
    "LxmertTokenizer",
    "MobileBertTokenizer",
    "SqueezeBertTokenizer",
}

# The model types for which transformers takes one of these classes if none is named.
TYPED_BY_DEFAULT = {"bert", "deberta-v2", "electra", "nomic_bert"}


def read_tokenizer(folder: Path, *, lowercase: bool, vocab_size: int) -> bytes:
    """Read the tokenizer of a model's folder, as the content of a tokenizer.json.

    The stored file is returned unchanged unless a step must be added: `lowercase` texts, or an end
    token that tokenizer_config.json asks for. Raises CheckpointError if there is no usable
    tokenizer, or if it has ids of `vocab_size` or more.
    """
    path = folder / "tokenizer.json"
    stored = path.read_bytes() if path.is_file() else _build(folder)
    if lowercase:  # sentence-transformers' do_lower_case
        parse_tokenizer(stored, f"the tokenizer in {folder}")
        content = json.loads(stored)
        steps = _steps(content.get("normalizer"))
        # with a lowering BertNormalizer, a Lowercase before it would change no code point's result
        if not any(
            step["type"] == "Lowercase" or (step["type"] == "BertNormalizer" and step["lowercase"])
            for step in steps
        ):
            first = {"type": "Lowercase"}
            content["normalizer"] = {"type": "Sequence", "normalizers": [first, *steps]}
            stored = json.dumps(content, ensure_ascii=False).encode()
    stored = _ended(folder, stored)
    tokenizer = parse_tokenizer(stored, f"the tokenizer in {folder}")
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab_size:  # JAX would clamp the id, and use another token's vector
        raise CheckpointError(
            f"the tokenizer in {folder} has ids up to {largest}, the model only {vocab_size} "
            "embeddings; remove the added tokens that the model never learnt"
        )
    lowers = read_optional_json(folder / "tokenizer_config.json").get("do_lower_case")
    for step in _steps(json.loads(stored).get("normalizer")):
        if step["type"] == "BertNormalizer" and lowers is not None and step["lowercase"] != lowers:
            logger.warning(
                "%s: tokenizer_config.json says do_lower_case=%s, tokenizer.json %s; the latter "
                "is used",
                folder,
                lowers,
                step["lowercase"],
            )
    return stored


def special_token(folder: Path, name: str, otherwise: str | None = None) -> str | None:
    """A token that tokenizer_config.json names; None where it names none and there is no other."""
    token = read_optional_json(folder / "tokenizer_config.json").get(name, otherwise)
    token = token.get("content") if isinstance(token, dict) else token
    return None if token is None else str(token)


def gives_types(folder: Path, hf: dict[str, Any]) -> bool:
    """Whether the model gets the tokenizer's token types; otherwise they are zeros.

    This depends on model_input_names in tokenizer_config.json, or else on the tokenizer's class.
    """
    config = read_optional_json(folder / "tokenizer_config.json")
    names = config.get("model_input_names")
    if names is not None:
        return "token_type_ids" in names
    name = config.get("tokenizer_class") or hf.get("tokenizer_class")
    if name is None:
        return hf["model_type"] in TYPED_BY_DEFAULT
    return name.removesuffix("Fast") in WITH_TYPES


def _build(folder: Path) -> bytes:
    """Build a tokenizer.json, of a SentencePiece model or with transformers.

    Raises CheckpointError if that is not possible.
    """
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        raise CheckpointError(f"no tokenizer in {folder}: wanted tokenizer.json or a vocabulary")
    logger.info("%s has no tokenizer.json: building it", folder)
    others = any(folder.glob("vocab.*"))
    if any(folder.glob("*.model")) and (class_name(folder) in FAMILIES or not others):
        return build_from_sentencepiece(folder)
    # imported here, because it takes two seconds and only old models need it
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


def _steps(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer, which may be a sequence, a single step or None."""
    if normalizer is None:
        return []
    return normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]


def _ended(folder: Path, stored: bytes) -> bytes:
    """Append the end token if tokenizer_config.json has add_eos_token and tokenizer.json does not.

    This is so in gte-Qwen2, whose own code appends the token. Raises CheckpointError if it cannot
    be appended.
    """
    config = read_optional_json(folder / "tokenizer_config.json")
    if config.get("add_eos_token") is not True:
        return stored
    token = str(special_token(folder, "eos_token"))
    tokenizer = parse_tokenizer(stored, f"the tokenizer in {folder}")
    number = tokenizer.token_to_id(token)
    if number is None:
        raise CheckpointError(f"add_eos_token is set in {folder}, and there is no token {token!r}")
    ids = tokenizer.encode("a").ids
    if ids[-1:] == [number]:
        return stored
    first, second = (
        [{"Sequence": {"id": text, "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}]
        for text in "AB"
    )
    ending = {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    content = json.loads(stored)
    steps = [content["post_processor"]] if content.get("post_processor") else []
    content["post_processor"] = {"type": "Sequence", "processors": [*steps, ending]}
    ended = json.dumps(content, ensure_ascii=False).encode()
    if parse_tokenizer(ended, f"the tokenizer in {folder}").encode("a").ids != [*ids, number]:
        raise CheckpointError(
            f"add_eos_token is set in {folder}, and {token} cannot follow what tokenizer.json "
            "puts around a text; save it with a post-processor that does both"
        )
    return ended
