"""A tokenizer file, in batches and without the interpreter lock. Knows no prompts and no pairs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import tokenizers

from jaxembed.errors import InvalidInput, TokenizerError
from jaxembed.memory import KIB

Side = Literal["left", "right"]

# Characters for each token that are read of a long text at first: real texts have 1 to 6 of them a
# token, whatever the tokenizer, so that one reading nearly always is enough.
FIRST_CUT = 7
# Tokens over the limit that make a cut safe: it changes only those of the word it runs through,
# and WordPiece splits words of up to 100 characters. With BPE and Unigram a change may run on
# through thousands of one character: of 512 such tokens one or two were others.
CUT_MARGIN = 128
SHORT_CHARACTERS = 512  # characters: at most 0.2 ms
INPUTS_A_JOB = 64  # inputs a tokenizer thread is given at once: some 7 ms of texts of 100 tokens
JOB_CHARACTERS = 32 * KIB  # that these have in all: 10 to 20 ms of prose, at worst 60 ms
MOST_READ = 512 * KIB  # characters of a text that are read in search of enough tokens
# Memory while a character is tokenized, at most: measured 439 to 581 with WordPiece and byte-level
# BPE, 304 with Unigram. A ligature that XLM-R takes apart (U+FDFA) needs 2018, and 20 us. A thread
# so needs 20 MB for a job, 35 MB for a text at limit 8192, and 300 MB for one without tokens.
CHARACTER_BYTES = 600

Item = TypeVar("Item")


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
        self, texts: Iterable[str], most: int, side: Side, *, special: bool = True
    ) -> Iterator[tuple[tokenizers.Encoding, bool]]:
        """The Encoding of each text, and whether it is that of the whole text.

        A long text is read until it has over `most` + CUT_MARGIN tokens: `most` of them are those
        of the whole text, and it has more than `most`. `side` is the one that tokens are cut from.
        Raises InvalidInput for one with so few tokens that `most_read` characters don't suffice.
        """
        first_cut = FIRST_CUT * (most + CUT_MARGIN)
        for chunk in chunks(texts, len):
            first = self.encode([_cut(text, first_cut, side) for text in chunk], special=special)
            for text, encoding in zip(chunk, first, strict=True):
                if len(text) <= first_cut:
                    yield encoding, True
                else:
                    yield self._read_on(text, encoding, most, side, special=special)

    def rows(
        self, texts: Iterable[str], most: int, side: Side
    ) -> Iterator[tuple[np.ndarray, bool]]:
        """int32 ids without special tokens, otherwise as `encode_enough`."""
        for encoding, whole in self.encode_enough(texts, most, side, special=False):
            yield np.array(encoding.ids, np.int32), whole

    def _read_on(
        self, text: str, encoding, most: int, side: Side, *, special: bool
    ) -> tuple[tokenizers.Encoding, bool]:
        """`encode_enough` of a text that was read to the first cut."""
        enough = most + CUT_MARGIN
        cut = FIRST_CUT * enough
        while cut < len(text) and len(encoding) <= enough:
            if cut >= most_read(most):
                raise InvalidInput(
                    f"the text has {len(text)} characters and only {len(encoding)} tokens in "
                    f"{cut} of them, more than are read; send it in parts"
                )
            cut = min(2 * cut, most_read(most))
            encoding = self.encode([_cut(text, cut, side)], special=special)[0]
        return encoding, cut >= len(text)


def most_read(most: int) -> int:
    """Characters of a text that are read at most to find `most` tokens."""
    return max(MOST_READ, 2 * FIRST_CUT * (most + CUT_MARGIN))


def chunks(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in order, so many at a time that tokenizing them takes little time and memory.

    `size` is the characters of one; one that is over JOB_CHARACTERS is a chunk by itself.
    """
    chunk: list[Item] = []
    room = JOB_CHARACTERS
    for item in items:
        characters = size(item)
        if chunk and (characters > room or len(chunk) == INPUTS_A_JOB):
            yield chunk
            chunk, room = [], JOB_CHARACTERS
        chunk.append(item)
        room -= characters
    if chunk:
        yield chunk


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
