"""A tokenizer file, in batches and without the interpreter lock. Knows no prompts and no pairs."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import tokenizers

from jaxembed.errors import CheckpointError, InvalidInput, TokenizerError
from jaxembed.memory import KIB

Side = Literal["left", "right"]

# Characters for each token that are read of a long text at first: real texts have 1 to 6 of them a
# token, whatever the tokenizer, so that one reading nearly always is enough.
FIRST_CUT = 7
# A cut changes the tokens of the words near it. What is kept lies so many tokens, and so many of
# the tokenizer's words, away from it: a special token that it runs through is several of them.
CUT_MARGIN = 128  # tokens
CUT_WORDS = 8
SHORT_CHARACTERS = 512  # characters: at most 0.2 ms
INPUTS_A_JOB = 64  # inputs a tokenizer thread is given at once: some 7 ms of texts of 100 tokens
JOB_CHARACTERS = 32 * KIB  # that these have in all: 10 to 20 ms of prose, at worst 60 ms
MOST_READ = 512 * KIB  # characters of a text that are read in search of enough tokens
# Memory while a character is tokenized with its words, at most: measured 648 with WordPiece, 758
# with byte-level BPE (emojis), 369 with Unigram. A ligature that XLM-R takes apart (U+FDFA) needs
# 2018, and 20 us. A thread so needs 25 MB for a job, 45 MB for a text at limit 8192, and 400 MB for
# one that must be read on to the most.
CHARACTER_BYTES = 800

WORD_END = re.compile(r"(?<=\S) ")
Item = TypeVar("Item")


class Tokenizer:
    """One tokenizer, shared by all threads: it is configured once and never per request."""

    def __init__(self, path: Path):
        self.file = _read(path)
        self.file.no_padding()  # all-MiniLM-L6-v2 stores both, fixed at 128
        self.file.no_truncation()

    def encode(self, texts: Sequence[str], *, special: bool = True, fast: bool = True) -> list:
        """The tokenizers.Encoding of each text; `fast` is without offsets and words.

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

        A long text is read until `most` of its tokens are known to be those of the whole text,
        which has more than `most`. `side` is the one that tokens are cut from. Raises InvalidInput
        for a text of which `most_read` characters don't tell: one of few tokens or endless words.
        """
        first_cut = FIRST_CUT * (most + CUT_MARGIN)
        for chunk in chunks(texts, len):
            fast = all(len(text) <= first_cut for text in chunk)
            parts = [_cut(text, first_cut, side) for text in chunk]
            encodings = self.encode(parts, special=special, fast=fast)
            for text, encoding in zip(chunk, encodings, strict=True):
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
        cut = FIRST_CUT * (most + CUT_MARGIN)
        while cut < len(text) and not _is_enough(encoding, most, side):
            if cut >= most_read(most):
                end = "first" if side == "right" else "last"
                raise InvalidInput(
                    f"the text has {len(text)} characters, and its {end} {cut} do not tell its "
                    f"{end} {most} tokens: its words are too long; send it in parts"
                )
            cut = min(2 * cut, most_read(most))
            encoding = self.encode([_cut(text, cut, side)], special=special, fast=False)[0]
        return encoding, cut >= len(text)


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other class
        raise CheckpointError(f"{path} is damaged ({error}); convert the model again") from error


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
    """The first `most` characters, or the last: of these what follows the first word, because a
    tokenizer with words goes on after a space as if nothing had been before it. The rest of a
    number or of a line of dashes it might take apart otherwise."""
    if side == "right" or len(text) <= most:
        return text[:most]
    space = WORD_END.search(text, len(text) - most)
    return text[space.start() :] if space is not None else ""


def _is_enough(encoding: tokenizers.Encoding, most: int, side: Side) -> bool:
    """Whether `most` tokens at the end that is kept lie far enough from the cut."""
    if len(encoding) <= most + CUT_MARGIN:
        return False
    words = [word for word in encoding.word_ids if word is not None]  # special tokens have none
    if side == "right":
        return words[min(most, len(words)) - 1] + CUT_WORDS <= words[-1]
    return words[0] + CUT_WORDS <= words[-min(most, len(words))]


def _reason(texts: Sequence[str], error: Exception) -> str:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            return "the text holds a lone surrogate, which is not Unicode text"
    return str(error)
