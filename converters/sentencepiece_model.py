"""Builds tokenizer.json from a SentencePiece model of DeBERTa, and compares the two.

transformers 5 itself leaves the model's normalization out: half-width letters, ligatures and the
like then get other ids than in training. Its converter of version 4, which it still has, does not.
"""

import random
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer

from converters.heads import read_optional_json
from jaxembed.errors import CheckpointError, UnsupportedModel

FILE = "spm.model"

COMPARED = 200  # texts
NORMALIZED = "ﬁne ½ Ⅻ ｶﾀｶﾅ e\u0301 n\u0303 \u200b soft\u00adhyphen \u3000 x  y …"


def build_from_sentencepiece(folder: Path) -> bytes:
    """Build the content of a tokenizer.json from spm.model.

    Raises UnsupportedModel for a switch that the result would not follow, and CheckpointError if a
    package is missing, or if the result differs from SentencePiece on any of the compared texts.
    """
    config = read_optional_json(folder / "tokenizer_config.json")
    for switch in ("do_lower_case", "split_by_punct"):
        if config.get(switch):
            raise UnsupportedModel(
                f"{folder}: {switch} is not supported without a tokenizer.json; save one"
            )
    try:
        # no dependency of ours, because only models without tokenizer.json need it
        sentencepiece = import_module("sentencepiece")
        from transformers.convert_slow_tokenizer import DebertaV2Converter

        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / FILE))
        slow = SimpleNamespace(
            vocab_file=str(folder / FILE),
            do_lower_case=False,
            split_by_punct=False,
            add_prefix_space=True,
            legacy=True,
            convert_tokens_to_ids=pieces.piece_to_id,
        )
        tokenizer: Tokenizer = DebertaV2Converter(slow).converted()
    except (OSError, RuntimeError, ImportError) as error:
        raise CheckpointError(
            f"no tokenizer can be built from {folder / FILE}: {error}; save one with tokenizer.json"
        ) from error
    _compare(folder, tokenizer, pieces)
    # not in the model, but after it, as transformers adds it
    tokenizer.add_special_tokens([AddedToken("[MASK]", special=True, normalized=False)])
    return tokenizer.to_str().encode()


def _compare(folder: Path, tokenizer: Tokenizer, pieces: Any) -> None:
    """Raise CheckpointError if a text has other ids than SentencePiece gives it."""
    first, last = pieces.piece_to_id("[CLS]"), pieces.piece_to_id("[SEP]")
    for text in _texts(pieces):
        if tokenizer.encode(text).ids != [first, *pieces.encode(text), last]:
            raise CheckpointError(
                f"{folder / FILE}: the tokenizer that transformers makes of it differs from "
                f"SentencePiece on {text!r}; save one with tokenizer.json"
            )


def _texts(pieces: Any) -> list[str]:
    """Texts of the model's own pieces, and one of what normalization changes."""
    special = (pieces.is_control, pieces.is_unknown, pieces.is_unused, pieces.is_byte)
    count = pieces.get_piece_size()
    numbers = [n for n in range(count) if not any(kind(n) for kind in special)]
    names = [pieces.id_to_piece(n) for n in numbers]
    draw = random.Random(0)
    drawn = ["".join(draw.choices(names, k=20)) for _ in range(COMPARED - 1)]
    return [NORMALIZED, *(text.replace("▁", " ") for text in drawn)]
