"""Reads a model's tokenizer.json, or builds one."""

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

# Files from which a tokenizer can be built without tokenizer.json.
VOCABULARIES = ("vocab.txt", "vocab.json", "*.model", "*.vocab")

# The classes whose model_input_names have token_type_ids in transformers 5. CrossEncoder of
# sentence-transformers scores with these inputs. TokenizersBackend is not among them, although it
# also loads the PreTrainedTokenizerFast of transformers 4, which had token_type_ids.
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

# The model types whose default tokenizer in transformers is one of WITH_TYPES.
TYPED_BY_DEFAULT = {"bert", "deberta-v2", "electra", "nomic_bert"}


def read_tokenizer(folder: Path, *, lowercase: bool, vocab_size: int) -> bytes:
    """Return the content of a model's tokenizer.json, which is built if the folder has none.

    A step is added if texts must become lower case (`lowercase`), or if tokenizer_config.json asks
    for an end token; otherwise a stored file is unchanged. Raises CheckpointError if there is no
    usable tokenizer or if it has ids of `vocab_size` or more, and UnsupportedModel if a
    SentencePiece model is unsupported.
    """
    path = folder / "tokenizer.json"
    data = path.read_bytes() if path.is_file() else _build(folder)
    if lowercase:  # sentence-transformers' do_lower_case
        parse_tokenizer(data, f"the tokenizer in {folder}")  # raises if it is damaged
        content = json.loads(data)
        steps = _normalizer_steps(content.get("normalizer"))
        # a Lowercase before a BertNormalizer that lowercases would change nothing
        if not any(
            step["type"] == "Lowercase" or (step["type"] == "BertNormalizer" and step["lowercase"])
            for step in steps
        ):
            lowercase_step = {"type": "Lowercase"}
            content["normalizer"] = {"type": "Sequence", "normalizers": [lowercase_step, *steps]}
            data = json.dumps(content, ensure_ascii=False).encode()
    data = _with_end_token(folder, data)
    tokenizer = parse_tokenizer(data, f"the tokenizer in {folder}")
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab_size:  # JAX would clamp the id, and use another token's vector
        raise CheckpointError(
            f"the tokenizer in {folder} has ids up to {largest}, and the model has only "
            f"{vocab_size} embeddings; remove the added tokens that the model never learnt"
        )
    do_lower_case = read_optional_json(folder / "tokenizer_config.json").get("do_lower_case")
    for step in _normalizer_steps(json.loads(data).get("normalizer")):
        if (
            step["type"] == "BertNormalizer"
            and do_lower_case is not None
            and step["lowercase"] != do_lower_case
        ):
            logger.warning(
                "%s: do_lower_case is %s in tokenizer_config.json and %s in tokenizer.json; the "
                "latter is used",
                folder,
                do_lower_case,
                step["lowercase"],
            )
    return data


def special_token(folder: Path, name: str, otherwise: str | None = None) -> str | None:
    """Return the token under `name` in tokenizer_config.json; `otherwise` if it is missing. Raises
    CheckpointError for an invalid file."""
    token = read_optional_json(folder / "tokenizer_config.json").get(name, otherwise)
    token = token.get("content") if isinstance(token, dict) else token
    return None if token is None else str(token)


def gives_types(folder: Path, hf: dict[str, Any]) -> bool:
    """Return whether the model gets the tokenizer's token types. If not, all token types are zero.
    The first of these that is known decides: model_input_names in tokenizer_config.json, the class
    of the tokenizer, the model_type."""
    config = read_optional_json(folder / "tokenizer_config.json")
    names = config.get("model_input_names")
    if names is not None:
        return "token_type_ids" in names
    name = config.get("tokenizer_class") or hf.get("tokenizer_class")
    if name is None:
        return hf["model_type"] in TYPED_BY_DEFAULT
    return name.removesuffix("Fast") in WITH_TYPES


def _build(folder: Path) -> bytes:
    """Build a tokenizer.json, from a SentencePiece model or with transformers. Raises
    CheckpointError and UnsupportedModel if that is not possible."""
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        raise CheckpointError(f"no tokenizer in {folder}: wanted tokenizer.json or a vocabulary")
    logger.info("%s has no tokenizer.json: building one", folder)
    # transformers reads vocab.* if the class for *.model is unknown
    has_vocab_file = any(folder.glob("vocab.*"))
    if any(folder.glob("*.model")) and (class_name(folder) in FAMILIES or not has_vocab_file):
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


def _normalizer_steps(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, which may be a sequence, a single step or None."""
    if normalizer is None:
        return []
    return normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]


def _with_end_token(folder: Path, data: bytes) -> bytes:
    """Return `data`, a tokenizer.json, with an end token after each text if add_eos_token asks for
    it. gte-Qwen2 needs this, because its own code appends the token. Raises CheckpointError if the
    token cannot be appended."""
    if read_optional_json(folder / "tokenizer_config.json").get("add_eos_token") is not True:
        return data
    token = str(special_token(folder, "eos_token"))
    tokenizer = parse_tokenizer(data, f"the tokenizer in {folder}")
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise CheckpointError(
            f"add_eos_token is set in {folder}, and the tokenizer has no token {token!r}"
        )
    ids = tokenizer.encode("a").ids
    if ids[-1:] == [token_id]:
        return data
    text_a, text_b = (
        [{"Sequence": {"id": text, "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}]
        for text in "AB"
    )
    end_step = {
        "type": "TemplateProcessing",
        "single": text_a,
        "pair": text_a + text_b,
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
    content = json.loads(data)
    steps = [content["post_processor"]] if content.get("post_processor") else []
    content["post_processor"] = {"type": "Sequence", "processors": [*steps, end_step]}
    ended = json.dumps(content, ensure_ascii=False).encode()
    if parse_tokenizer(ended, f"the tokenizer in {folder}").encode("a").ids != [*ids, token_id]:
        raise CheckpointError(
            f"add_eos_token is set in {folder}, and {token} cannot follow what tokenizer.json "
            "puts around a text; save it with a post-processor that does both"
        )
    return ended
