"""Tokenizes texts in batches, without holding the interpreter lock, and lists the tokens of a text
with the offsets of each token."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from jaxembed.data.inputs import OffsetUnit
from jaxembed.errors import INTERRUPTS, CheckpointError, InvalidInput, TokenizerError, counted
from jaxembed.memory import KIB
from jaxembed.preprocessing.job_threads import restart_if_small
from jaxembed.preprocessing.word_cache import ASCII_WORD, WordCache

Side = Literal["left", "right"]

# A long text is cut to this many characters for each needed token before it is tokenized. Real
# texts have 1 to 6 characters a token with any tokenizer, so one attempt is nearly always enough.
FIRST_CUT = 7
# A cut changes the tokens of the words near the cut. So the tokens that are kept must be at least
# this many tokens and this many words away from the cut.
CUT_MARGIN = 128  # tokens
CUT_WORDS = 8
# A text up to this length is tokenized while the interpreter lock is held, for 0.2 ms at most.
SHORT_CHARACTERS = 512
INPUTS_A_JOB = 128  # maximum inputs in one job of a tokenizer thread; 2 ms for short sentences
JOB_CHARACTERS = 32 * KIB  # maximum characters in a job: 10 to 20 ms of prose, at worst 60 ms
# A job that tokenizes a longer text at a time moves to the threads for large inputs. This many
# characters take 4 ms for prose, and 15 ms for Chinese with WordPiece.
SMALL_TEXT = 8 * KIB
MAX_GROWTH = 1000  # maximum characters that a normalizer may make of one character
# Maximum characters of a text that are read to find the tokens to keep, at the usual limits.
MAX_READ_CHARACTERS = 512 * KIB
# Bytes of memory per character while a text is tokenized with offsets and words. Measured maxima:
# 648 with WordPiece, 758 with byte-level BPE (emojis), 369 with Unigram. A ligature that XLM-R
# decomposes (U+FDFA) needs 2018 bytes and 20 us. So a thread needs 25 MB for a job, 45 MB for a
# text with the limit 8192, and 400 MB for a text of which MAX_READ_CHARACTERS are read.
CHARACTER_BYTES = 800
# For each unit, the first code points of which a character takes two, three and four units.
WIDER: dict[OffsetUnit, tuple[int, ...]] = {
    "code-points": (),
    "utf-16": (0x10000,),
    "utf-8": (0x80, 0x800, 0x10000),
}

UNKNOWN = ("[UNK]", "<unk>")  # names of the token for text that is not in the vocabulary
# Steps of normalizers that change no ASCII character. BERT's normalizer has some of them, and
# removes control characters.
UNICODE_STEPS = ("NFC", "NFD", "NFKC", "NFKD", "StripAccents")
PLAIN_ASCII = re.compile(r"[\t\n\r -~]*")
WORD_END = re.compile(r"(?<=\S) ")
Item = TypeVar("Item")


class Tokenizer:
    """A tokenizer that all threads share. Its configuration never changes after the start.

    Raises CheckpointError if the file at `path` cannot be read.
    """

    def __init__(self, path: Path):
        try:
            self.file = parse_tokenizer(path.read_bytes(), path)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{error}; convert the model again") from error
        # Ignore the file's own settings; that of all-MiniLM-L6-v2 pads and truncates to 128 tokens.
        self.file.no_padding()
        self.file.no_truncation()
        self._of_ascii = tokenizer_of_ascii(self.file)
        self._words = word_cache_of(self.file, self._of_ascii)

    @cached_property
    def of_plain_text(self) -> "Tokenizer":
        """This tokenizer, but for it the name of a special token is plain text."""
        other = copy(self)
        shared = _sharing(self.file, self.file.normalizer, self.file.pre_tokenizer)
        shared.encode_special_tokens = True
        vars(other).update(file=shared, _of_ascii=None, _words=None)
        return other

    def encode(self, texts: Sequence[str], *, special: bool = True, fast: bool = True) -> list:
        """Tokenize each text. Returns a tokenizers.Encoding for each text.

        `special` adds the tokenizer's special tokens. `fast` leaves out offsets and words. Text
        that spells a special token becomes that token, as in transformers. If a text is longer than
        SMALL_TEXT, the job is run again in a thread for large inputs. Raises TokenizerError if the
        tokenizer refuses a text.
        """
        if max(map(len, texts), default=0) > SMALL_TEXT:
            restart_if_small()
        try:
            of_ascii = self._of_ascii
            is_ascii = [of_ascii is not None and is_plain_ascii(text) for text in texts]
            if of_ascii is None or not any(is_ascii):
                return _encode(self.file, texts, special, fast)
            if all(is_ascii):
                return _encode(of_ascii, texts, special, fast)
            others = [text for text, plain in zip(texts, is_ascii, strict=True) if not plain]
            encodings = (
                iter(_encode(self.file, others, special, fast)),
                iter(_encode(of_ascii, list(compress(texts, is_ascii)), special, fast)),
            )
            return [next(encodings[plain]) for plain in is_ascii]
        except INTERRUPTS:
            raise
        except BaseException as error:  # `tokenizers` raises Exception, or a panic of Rust
            reason = str(error)
            try:
                "".join(texts).encode()
            except UnicodeEncodeError:
                reason = "the text holds a lone surrogate, which is not Unicode text"
            raise TokenizerError(reason) from error

    def short_ids(self, text: str) -> list[int] | None:
        """Return the token ids of a text without special tokens, if this takes less time than
        `encode`; else None. Raises TokenizerError if the tokenizer refuses the text."""
        if self._words is None or len(text) > SHORT_CHARACTERS or not is_plain_ascii(text):
            return None
        return self._words.encode(
            text, lambda words: self.encode([words], special=False, fast=False)[0]
        )

    def encode_enough(
        self,
        texts: Iterable[str],
        max_tokens: int,
        side: Side,
        *,
        special: bool = True,
        fast: bool = True,
    ) -> Iterator[tuple[tokenizers.Encoding, int]]:
        """Tokenize as much of each text as is needed to keep `max_tokens` tokens.

        Yields for each text a tokenizers.Encoding, and how many characters of the text it leaves
        out at `side`; 0 for an encoding of the whole text. Of a long text only a part is tokenized,
        so long that the `max_tokens` tokens to keep are certain to be as in the whole text.
        `side` is the side that tokens are cut from. `special` adds special tokens. `fast` leaves
        out offsets and words, except for texts that are tokenized together with a long one. Raises
        TokenizerError if the tokenizer refuses a text, and InvalidInput if the words of a text are
        too long: even `max_read_characters(max_tokens)` characters do not determine the tokens.
        """
        first_cut = FIRST_CUT * (max_tokens + CUT_MARGIN)
        for chunk in chunks(texts, len):
            is_whole = max(map(len, chunk)) <= first_cut
            parts = chunk if is_whole else [_cut(text, first_cut, side) for text in chunk]
            encodings = self.encode(parts, special=special, fast=fast and is_whole)
            for text, encoding in zip(chunk, encodings, strict=True):
                if len(text) <= first_cut:
                    yield encoding, 0
                else:
                    yield self._read_on(text, encoding, max_tokens, side, special=special)

    def rows(
        self, texts: Iterable[str], max_tokens: int, side: Side
    ) -> Iterator[tuple[np.ndarray, bool]]:
        """Tokenize texts as `encode_enough` does, without special tokens. Yields for each text the
        token ids, int32 `[tokens]`, and whether these are of the whole text."""
        for encoding, left_out in self.encode_enough(texts, max_tokens, side, special=False):
            yield np.array(encoding.ids, np.int32), not left_out

    def words(
        self, text: str, ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[list[str], list[bool]]:
        """Return for each token how it is spelled, and whether it continues the word of the token
        before it, by the rules of TokenClassificationPipeline in transformers 5.

        `ids`, int32 `[tokens]`, are of tokens of `text`, and `offsets`, int32 `[tokens, 2]`, are
        their first character and the character after their last. An unknown token is spelled as in
        the text.
        """
        model, vocabulary = self.file.model, self.file
        named = (getattr(model, "unk_token", None), *UNKNOWN)
        numbers = [vocabulary.token_to_id(name) for name in named if name is not None]
        unknown = next((number for number in numbers if number is not None), None)
        has_prefix = bool(getattr(model, "continuing_subword_prefix", None))
        spellings, continue_word = [], []
        for token_id, (start, end) in zip(ids.tolist(), offsets.tolist(), strict=True):
            is_known = token_id != unknown
            spelling = (vocabulary.id_to_token(token_id) or "") if is_known else text[start:end]
            is_joined = start > 0 and " " not in text[start - 1 : start + 1]
            spellings.append(spelling)
            continue_word.append(
                is_known and (len(spelling) != end - start if has_prefix else is_joined)
            )
        return spellings, continue_word

    def joined(self, spellings: Sequence[str]) -> str:
        """Return the text that tokens with these spellings stand for."""
        decoder = self.file.decoder
        return " ".join(spellings) if decoder is None else decoder.decode(list(spellings))

    def _read_on(
        self, text: str, encoding, max_tokens: int, side: Side, *, special: bool
    ) -> tuple[tokenizers.Encoding, int]:
        """Tokenize longer and longer parts of a long text, until the `max_tokens` tokens to keep
        are certain. `encoding` is of the first part. Returns the last tokenizers.Encoding, and how
        many characters it leaves out. Raises InvalidInput if the words of the text are too long,
        and TokenizerError."""
        cut = FIRST_CUT * (max_tokens + CUT_MARGIN)
        part = _cut(text, cut, side)
        while cut < len(text) and not _is_enough(encoding, max_tokens, side):
            if cut >= max_read_characters(max_tokens):
                end = "first" if side == "right" else "last"
                raise InvalidInput(
                    f"the text has {counted(len(text), 'character')}, and its {end} {cut} do not "
                    f"determine its {end} {max_tokens} tokens: its words are too long; send it in "
                    "parts"
                )
            cut = min(2 * cut, max_read_characters(max_tokens))
            part = _cut(text, cut, side)
            encoding = self.encode([part], special=special, fast=False)[0]
        return encoding, len(text) - len(part)


def _encode(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], special: bool, fast: bool
) -> list[tokenizers.Encoding]:
    """Tokenize texts with `Tokenizer.file`, or another tokenizer that gives the same tokens."""
    # encode_batch() releases the interpreter lock and has to wait for it afterwards, which takes
    # longer than to tokenize a short text.
    if len(texts) == 1 and len(texts[0]) <= SHORT_CHARACTERS:
        return [tokenizer.encode(texts[0], add_special_tokens=special)]
    encode = tokenizer.encode_batch_fast if fast else tokenizer.encode_batch
    return encode(texts, add_special_tokens=special)


def is_plain_ascii(text: str) -> bool:
    """Return whether a text has only printable ASCII characters, tabs and line ends."""
    return text.isascii() and (text.isprintable() or PLAIN_ASCII.fullmatch(text) is not None)


def tokenizer_of_ascii(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """Return a tokenizer that gives the same tokens and offsets for plain ASCII in less time,
    because it leaves out what the normalizer does to other characters only. Returns None if the
    normalizer has no such steps. Both tokenizers share the vocabulary."""
    added = tokenizer.get_added_tokens_decoder()
    normalizer = tokenizer.normalizer and msgspec.json.decode(tokenizer.normalizer.__getstate__())
    shorter = _normalizer_of_ascii(normalizer)
    # of other tokens the normalizer may make ASCII, which the text may spell
    if shorter == normalizer or not all(is_plain_ascii(token.content) for token in added.values()):
        return None
    lighter, splitter = shorter and _read_normalizer(shorter), tokenizer.pre_tokenizer
    if _splits_as_bert(tokenizer, lighter):
        # the same words, without looking each character up in the tables of Unicode
        splitter = pre_tokenizers.Split(tokenizers.Regex(ASCII_WORD), "removed", invert=True)
    shared = _sharing(tokenizer, lighter, splitter)
    return shared if shared.get_added_tokens_decoder() == added else None


def _sharing(
    tokenizer: tokenizers.Tokenizer, normalizer: Any, splitter: Any
) -> tokenizers.Tokenizer:
    """Return a tokenizer that shares the vocabulary of another one, with this normalizer and
    pre-tokenizer, each of which may be None."""
    shared = tokenizers.Tokenizer(tokenizer.model)
    if normalizer is not None:
        shared.normalizer = normalizer
    if splitter is not None:
        shared.pre_tokenizer = splitter
    if tokenizer.post_processor is not None:
        shared.post_processor = tokenizer.post_processor
    for _, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        (shared.add_special_tokens if token.special else shared.add_tokens)([token])
    return shared


def word_cache_of(
    tokenizer: tokenizers.Tokenizer, of_ascii: tokenizers.Tokenizer | None
) -> WordCache | None:
    """Return a cache of the words of plain ASCII; None for a tokenizer that divides texts in
    another way than BERT's, or has an added token that begins with a space. `of_ascii` is its
    `tokenizer_of_ascii`."""
    if of_ascii is None or not isinstance(tokenizer.model, models.WordPiece):
        return None
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if not _splits_as_bert(tokenizer, of_ascii.normalizer) or any(t[:1].isspace() for t in added):
        return None
    return WordCache(added, lowercases=of_ascii.normalizer is not None)


def _splits_as_bert(tokenizer: tokenizers.Tokenizer, normalizer: Any) -> bool:
    """Return whether a tokenizer divides plain ASCII, of which `normalizer` is what is left of its
    normalizer, into the words of ASCII_WORD."""
    is_plain = normalizer is None or isinstance(normalizer, normalizers.Lowercase)
    return is_plain and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)


def _normalizer_of_ascii(normalizer: Any) -> Any:
    """Return the JSON of a normalizer without the steps that change no plain ASCII; None if no step
    is left."""
    kind = normalizer["type"] if isinstance(normalizer, dict) else None
    if kind in UNICODE_STEPS:
        return None
    if kind == "BertNormalizer":
        return {"type": "Lowercase"} if normalizer["lowercase"] else None
    if kind == "Sequence":
        steps = [step for step in map(_normalizer_of_ascii, normalizer["normalizers"]) if step]
        return {"type": "Sequence", "normalizers": steps} if steps else None
    return normalizer


def _read_normalizer(normalizer: Any) -> tokenizers.normalizers.Normalizer:
    """Make a normalizer from its JSON."""
    empty = {"version": "1.0", "added_tokens": [], "normalizer": normalizer}
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    return tokenizers.Tokenizer.from_str(
        msgspec.json.encode(empty | {"model": model}).decode()
    ).normalizer


def parse_tokenizer(stored: bytes, name: object) -> tokenizers.Tokenizer:
    """Parse the content of a tokenizer.json. Raises CheckpointError if it is damaged, or if its
    normalizer may make more than MAX_GROWTH characters of one. `name` is its name in messages."""
    try:
        # Estimate how many characters the normalizer may make of one character. Each step replaces
        # a pattern by a content. The factors of two steps multiply if the pattern of the later step
        # may match what the earlier step inserted.
        growth, inserted = 1, ""
        for step in _steps(msgspec.json.decode(stored, type=_Stored).normalizer):
            content, pattern = step.get("content"), step.get("pattern")
            if not isinstance(content, str) or not isinstance(pattern, dict):
                continue
            replaced, factor = pattern.get("String"), max(len(content), 1)
            # A pattern that is not a string is a regular expression, which may match anything.
            multiplies = not isinstance(replaced, str) or replaced in inserted
            growth = growth * factor if multiplies else max(growth, factor)
            inserted += 2 * content  # twice: two insertions may be adjacent
        if growth > MAX_GROWTH:
            raise ValueError(f"its normalizer makes up to {growth} characters from one")
        return tokenizers.Tokenizer.from_str(stored.decode())
    except INTERRUPTS:
        raise
    except BaseException as error:  # `tokenizers` raises Exception, or a panic of Rust
        raise CheckpointError(f"{name} is damaged: {error}") from error


class _Stored(msgspec.Struct):
    """The part of a tokenizer.json that `parse_tokenizer` checks."""

    normalizer: Any = None


def _steps(normalizer: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, in order. A normalizer may be a sequence of normalizers."""
    if not isinstance(normalizer, dict):
        return []
    steps = normalizer.get("normalizers")
    if not isinstance(steps, list):
        return [normalizer]
    return [sub for step in steps for sub in _steps(step)]


def max_read_characters(max_tokens: int) -> int:
    """Return the maximum characters of a text that are read to find `max_tokens` tokens."""
    return max(MAX_READ_CHARACTERS, 2 * FIRST_CUT * (max_tokens + CUT_MARGIN))


def chunks(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Divide items, in order, into chunks that take little time and memory to tokenize.

    `size` returns the number of characters of an item. A chunk has at most INPUTS_A_JOB items and
    JOB_CHARACTERS characters. An item of more characters is a chunk of its own.
    """
    chunk: list[Item] = []
    remaining = JOB_CHARACTERS
    for item in items:
        characters = size(item)
        if chunk and (characters > remaining or len(chunk) == INPUTS_A_JOB):
            yield chunk
            chunk, remaining = [], JOB_CHARACTERS
        chunk.append(item)
        remaining -= characters
    if chunk:
        yield chunk


def cut_tokens(ids: np.ndarray, max_tokens: int, side: Side) -> np.ndarray:
    """Truncate token ids on `side`, so that at most `max_tokens` are left."""
    return ids[:max_tokens] if side == "right" else ids[max(len(ids) - max_tokens, 0) :]


def _cut(text: str, max_characters: int, side: Side) -> str:
    """Cut off characters on `side`, so that at most `max_characters` are left.

    A cut on the left is made at a space, because most tokenizers tokenize what follows a space
    independently of what is before it. (What is left of a number or of a line of dashes might be
    tokenized differently.) If there is no space, the result is empty.
    """
    if side == "right" or len(text) <= max_characters:
        return text[:max_characters]
    space = WORD_END.search(text, len(text) - max_characters)
    return text[space.start() :] if space is not None else ""


def _is_enough(encoding: tokenizers.Encoding, kept_tokens: int, side: Side) -> bool:
    """Return whether the `kept_tokens` tokens to keep of a cut text are certain: they are so far
    from the cut that the whole text has the same tokens there. `encoding` is of the cut text."""
    if len(encoding) <= kept_tokens + CUT_MARGIN:
        return False
    words = [word for word in encoding.word_ids if word is not None]  # special tokens have none
    # The kept tokens must end at least CUT_WORDS words away from the word at the cut.
    if side == "right":
        return words[min(kept_tokens, len(words)) - 1] + CUT_WORDS <= words[-1]
    return words[0] + CUT_WORDS <= words[-min(kept_tokens, len(words))]


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token as /tokenize shows it.

    `start` and `stop` are byte offsets in the UTF-8 of the prompt and the text together. Both are
    None for a special token.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


def token_pieces(text: str, encoding, name_of: Callable[[int], str | None]) -> list[TokenPiece]:
    """Return the tokens of a text, from the tokenizers.Encoding of the text.

    `name_of` returns the name of the token with an id, which is the text of a special token.
    """
    data = text.encode()
    offsets = character_offsets(text, "utf-8")[np.array(encoding.offsets, np.intp).reshape(-1, 2)]
    columns = (encoding.ids, encoding.special_tokens_mask, *offsets.T.tolist())
    return [
        TokenPiece(id, name_of(id) or "", special=True, start=None, stop=None)
        if special
        else TokenPiece(
            id, data[start:stop].decode(errors="replace"), special=False, start=start, stop=stop
        )
        for id, special, start, stop in zip(*columns, strict=True)
    ]


def character_offsets(text: str, unit: OffsetUnit) -> np.ndarray:
    """Return the offset in `unit` of each character of a text, and then the length of the text in
    `unit`: int32 `[characters + 1]`."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = np.ones(len(codes) + 1, np.int8)
    widths[0] = 0
    for wider_from in WIDER[unit]:
        widths[1:] += codes >= wider_from
    return np.cumsum(widths, dtype=np.int32)
