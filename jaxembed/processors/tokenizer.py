"""A tokenizer file, in batches and without the interpreter lock. Knows no prompts and no pairs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from jaxembed.errors import TokenizerError

Side = Literal["left", "right"]

FIRST_CUT = 16  # characters for each token of the limit that a long text is first cut to
# Tokens over the limit that make a cut safe: it changes only those of the word it runs through,
# and WordPiece splits words of up to 100 characters. With BPE and Unigram a change may run on
# through thousands of one character: of 512 such tokens one or two were others.
CUT_MARGIN = 128
SHORT_CHARACTERS = 512  # characters: at most 0.2 ms


class Tokenizer:
    """One tokenizer, shared by all threads: it is configured once and never per request."""

    def __init__(self, path: Path):
        self.file = tokenizers.Tokenizer.from_file(str(path))
        self.file.no_padding()  # all-MiniLM-L6-v2 stores both, fixed at 128
        self.file.no_truncation()

    def encode(self, texts: Sequence[str], *, special: bool = True, fast: bool = True) -> list:
        """The tokenizers.Encoding of each text; `fast` is without offsets.

        Text that spells a special token becomes that token, as in transformers. Raises
        TokenizerError.
        """
        encode = self.file.encode_batch_fast if fast else self.file.encode_batch
        try:
            # encode_batch() gives the interpreter lock away, and has to get it back
            if len(texts) == 1 and len(texts[0]) <= SHORT_CHARACTERS:
                return [self.file.encode(texts[0], add_special_tokens=special)]
            return encode(list(texts), add_special_tokens=special)
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(_reason(texts, error)) from error

    def encode_enough(
        self, texts: Sequence[str], most: int | None, side: Side, *, special: bool = True
    ) -> list:
        """`encode` where of each text only `most` tokens count: a long one is not read to its end.

        `side` is the one that tokens are cut from. With None all of them count.
        """
        if most is None:
            return self.encode(texts, special=special)
        first_cut = FIRST_CUT * most
        encoded = self.encode([_cut(text, first_cut, side) for text in texts], special=special)
        for k, text in enumerate(texts):
            cut = first_cut
            while cut < len(text) and len(encoded[k]) < most + CUT_MARGIN:
                cut *= 4  # few tokens of many characters: the cut may have lost some that belong
                encoded[k] = self.encode([_cut(text, cut, side)], special=special)[0]
        return encoded

    def rows(self, texts: Sequence[str], most: int | None, side: Side) -> list[np.ndarray]:
        """int32 ids without special tokens, otherwise as `encode_enough`."""
        encoded = self.encode_enough(texts, most, side, special=False)
        return [np.array(encoding.ids, np.int32) for encoding in encoded]


def cut_tokens(ids: np.ndarray, most: int, side: Side) -> np.ndarray:
    """At most `most` of them; the others are cut from `side`."""
    return ids[:most] if side == "right" else ids[max(len(ids) - most, 0) :]


def _cut(text: str, most: int, side: Side) -> str:
    return text[:most] if side == "right" else text[max(len(text) - most, 0) :]


def _reason(texts: Sequence[str], error: Exception) -> str:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            return "the text holds a lone surrogate, which is not Unicode text"
    return str(error)
