"""Text to token ids: prompts, special tokens, pairs, truncation. Knows no HTTP and no batches."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from jaxembed.config import TextConfig
from jaxembed.errors import (
    BareTokenIds,
    ConfigError,
    EmptyInput,
    InputTooLong,
    InvalidInput,
    UnknownPrompt,
    UnsupportedModel,
)
from jaxembed.inputs import Input, Pair, Text, Tokens
from jaxembed.processors.pairs import Frame, template_frame, tokenizer_frame
from jaxembed.processors.tokenizer import (
    CHARACTER_BYTES,
    Side,
    Tokenizer,
    chunks,
    cut_tokens,
    most_read,
)
from jaxembed.spec import ModelSpec
from jaxembed.work import Encoding, Work, work_of

# Memory for a character of /tokenize, at most: measured 1719 for one text of emojis in byte-level
# BPE, 1005 for Chinese in WordPiece, and 1000 for many texts while their tokens become JSON. Of a
# ligature that XLM-R takes apart (U+FDFA) it was 3628.
PIECE_BYTES = 1800
# Memory for a token id of /decode, at most: measured for the longest token of a vocabulary, 512
# characters in ModernBERT's. Ordinary ids took 5 to 70.
DECODED_BYTES = 1600
Row = tuple[np.ndarray, bool]  # ids of a text, and whether they are those of all of it


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token as /tokenize shows it; `start` and `stop` are byte offsets into the prompted UTF-8
    text, None for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True)
class Tokenized:
    """The columns of some inputs, in order, and how many of the inputs were cut to the limit."""

    work: Work
    truncated: int


@dataclass(frozen=True)
class Rules:
    """How one request wants its inputs tokenized. `instruction` and `max_second_tokens` are for
    pairs, `bare_ids` is for token ids."""

    prompt: str
    truncate: bool
    side: Side
    instruction: str | None = None
    max_second_tokens: int | None = None
    bare_ids: bool = True


class TextProcessor:
    """What a model makes of inputs; shared by all threads."""

    def __init__(self, path: Path, spec: ModelSpec, limit: int, config: TextConfig, workers: int):
        self.limit = limit
        self.vocab_size = int(spec.config["vocab_size"])
        self._spec = spec
        self._config = config
        self._tokenizer = Tokenizer(path)
        sample = self._tokenizer.encode(["a"], fast=False)[0]
        self._around = before, after = _around_text(sample)
        self._ids_around = sample.ids[:before], sample.ids[len(sample) - after :]
        # XLM-R's tokenizer and others give types to pairs whose tower knows only one
        has_types = spec.token_types and spec.config.get("type_vocab_size", 0) > 1
        self._has_types = has_types and any(sample.type_ids)
        self._pair_frame = self._find_pair_frame(has_types)
        self._check_room()
        self._default_prompt = self._choose_default_prompt()
        self.executor: Executor = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._prompt_length = lru_cache(maxsize=64)(self._count_prompt)

    def prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """The text to put before each input: given, named, or the default. Raises InvalidInput."""
        if prompt is not None:
            return prompt
        if prompt_name is None:
            return self._default_prompt
        return self._named_prompt(prompt_name)

    def encode(self, inputs: Sequence[Input], rules: Rules) -> Tokenized:
        """Tokenize a request in the calling thread, without the interpreter lock for long.

        Raises EmptyInput, InputTooLong, InvalidInput or TokenizerError for the first input at
        fault.
        """
        texts = self._encode_texts([one for one in inputs if isinstance(one, Text)], rules)
        pairs = self._encode_pairs([one for one in inputs if isinstance(one, Pair)], rules)
        return _tokenized(
            self._encode_ids(one, rules)
            if isinstance(one, Tokens)
            else next(texts if isinstance(one, Text) else pairs)
            for one in inputs
        )

    def beside(self, query: str, rules: Rules) -> Callable[[Sequence[str]], Tokenized]:
        """Tokenize a query, once. What comes back encodes the pairs of it and each of some
        documents, otherwise as `encode`; several threads may call it.
        """
        first = self._frame.first(query, rules.instruction)
        (row,) = self._tokenizer.rows([first], self.limit, rules.side)

        def encode(documents: Sequence[str]) -> Tokenized:
            seconds = self._second_rows(documents, rules)
            return _tokenized(self._pair(row, second, rules) for second in seconds)

        return encode

    def estimate(self, inputs: Sequence[Input]) -> int:
        """About how many tokens the inputs hold, before tokenizing: four characters a token."""
        return sum(min(_size(one) // 4 + 2, self.limit) for one in inputs)

    @property
    def job_bytes(self) -> int:
        """Memory that a thread takes at most while it tokenizes what `encode` is given."""
        return CHARACTER_BYTES * most_read(self.limit)

    def pieces(self, texts: Sequence[str], *, special: bool, prompt: str) -> list[list[TokenPiece]]:
        """The tokens of each text, uncut."""
        prompted = [prompt + _not_empty(text) for text in texts]
        pieces = []
        for chunk in chunks(prompted, len):
            encodings = self._tokenizer.encode(chunk, special=special, fast=False)
            pieces += map(self._pieces, chunk, encodings)
        return pieces

    def _pieces(self, text: str, encoding) -> list[TokenPiece]:
        """The tokens with byte offsets; tokenizers counts characters."""
        data, name_of = text.encode(), self._tokenizer.file.id_to_token
        offsets = _byte_offsets(text)[np.array(encoding.offsets, np.intp).reshape(-1, 2)]
        columns = (encoding.ids, encoding.special_tokens_mask, *offsets.T.tolist())
        return [
            TokenPiece(id, name_of(id) or "", True, None, None)
            if special
            else TokenPiece(id, data[start:stop].decode(errors="replace"), False, start, stop)
            for id, special, start, stop in zip(*columns, strict=True)
        ]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids. Raises EmptyInput or InvalidInput."""
        for one in ids:
            if not one:
                raise EmptyInput()
            self._check_ids(one)
        return [
            text
            for chunk in chunks(ids, len)
            for text in self._tokenizer.file.decode_batch(
                [list(one) for one in chunk], skip_special_tokens=skip_special_tokens
            )
        ]

    # -- pairs -----------------------------------------------------------------------------------

    def _find_pair_frame(self, with_types: bool) -> Frame | None:
        """None where the tokenizer's pairs are beyond us and the model can do without."""
        if self._spec.template is not None:
            return template_frame(
                self._spec.template,
                lambda text: self._tokenizer.encode([text], special=False)[0].ids,
            )
        try:
            return tokenizer_frame(self._tokenizer.file, with_types=with_types)
        except UnsupportedModel:
            if self._spec.task == "rerank":
                raise
            return None

    @property
    def _frame(self) -> Frame:
        if self._pair_frame is None:
            raise InvalidInput("this model takes no pairs: its tokenizer's template is not known")
        return self._pair_frame

    def _check_room(self) -> None:
        special = sum(self._around)
        if self._spec.task == "rerank" and self._pair_frame is not None:
            special = max(special, self._pair_frame.length)
        if self.limit <= special:
            raise ConfigError(
                f"--max-input-length {self.limit} leaves no room for text beside the "
                f"{special} special tokens"
            )

    # -- prompts ---------------------------------------------------------------------------------

    def _choose_default_prompt(self) -> str:
        config, spec = self._config, self._spec
        if config.default_prompt is not None and config.default_prompt_name is not None:
            raise ConfigError("set --default-prompt or --default-prompt-name, not both")
        if config.default_prompt is not None:
            return config.default_prompt
        name = config.default_prompt_name or spec.default_prompt_name
        if name is None:
            return ""
        try:
            return self._named_prompt(name)
        except InvalidInput as error:
            raise ConfigError(f"--default-prompt-name {name}: {error}") from error

    def _named_prompt(self, name: str) -> str:
        prompts = self._spec.prompts
        if name in prompts:
            return prompts[name]
        raise UnknownPrompt(name, sorted(prompts))

    def _count_prompt(self, prompt: str) -> int:
        """Tokens of a prompt, a trailing special one not counted, as sentence-transformers does."""
        ((encoding, _),) = self._tokenizer.encode_enough([prompt], self.limit, "right")
        return len(encoding) - encoding.special_tokens_mask[-1]

    # -- one kind of input each ------------------------------------------------------------------

    def _encode_texts(self, texts: Sequence[Text], rules: Rules) -> Iterator[tuple[Encoding, bool]]:
        if texts and self._spec.template is not None:
            raise InvalidInput("this model scores pairs, such as a query and a document, not texts")
        prompted = (rules.prompt + one.text for one in texts)
        encodings = self._tokenizer.encode_enough(prompted, self.limit, rules.side)
        for one, (encoding, whole) in zip(texts, encodings, strict=True):
            _not_empty(one.text)
            yield self._finish(encoding, whole, rules)

    def _finish(self, encoding, whole: bool, rules: Rules) -> tuple[Encoding, bool]:
        """The encoding of a text, cut to the limit."""
        if not len(encoding):
            raise EmptyInput()  # a tokenizer without special tokens makes nothing of blanks
        if len(encoding) > self.limit and not rules.truncate:
            raise self._too_long(len(encoding), whole)
        ids = self._within_limit(np.array(encoding.ids, np.int32), rules.side)
        types = None
        if self._has_types:
            types = self._within_limit(np.array(encoding.type_ids, np.int32), rules.side)
        spans = None
        if rules.prompt and not self._spec.include_prompt:
            spans = ((min(self._prompt_length(rules.prompt), len(ids) - 1), len(ids)),)
        return Encoding(ids, types, spans), len(encoding) > self.limit

    def _too_long(self, got: int, whole: bool) -> InputTooLong:
        """The error for so many tokens of an input that was, or was not, read to its end."""
        return InputTooLong(self.limit, got if whole else self.limit + 1, exact=whole)

    def _within_limit(self, row: np.ndarray, side: Side) -> np.ndarray:
        """Drop tokens from one side of the text, never the special ones around it."""
        if len(row) <= self.limit:
            return row
        before, after = self._around
        text = cut_tokens(row[before : len(row) - after], self.limit - before - after, side)
        return np.concatenate([row[:before], text, row[len(row) - after :]])

    def _encode_pairs(self, pairs: Sequence[Pair], rules: Rules) -> Iterator[tuple[Encoding, bool]]:
        """Both texts in one sequence. Prompts belong to single texts and are not added."""
        firsts = (self._frame.first(pair.first, rules.instruction) for pair in pairs)
        seconds = self._second_rows((pair.second for pair in pairs), rules)
        rows = self._tokenizer.rows(firsts, self.limit, rules.side)
        for pair, first, second in zip(pairs, rows, seconds, strict=True):
            _not_empty(pair.first or pair.second)
            yield self._pair(first, second, rules)

    def _second_rows(self, texts: Iterable[str], rules: Rules) -> Iterator[Row]:
        most = min(self.limit, rules.max_second_tokens or self.limit)
        return self._tokenizer.rows(map(self._frame.second, texts), most, rules.side)

    def _pair(self, first_row: Row, second_row: Row, rules: Rules) -> tuple[Encoding, bool]:
        """The second text is cut first, the first only when it alone is over the limit."""
        frame, side = self._frame, rules.side
        (first, first_whole), (second, second_whole) = first_row, second_row
        room = self.limit - frame.length
        asked = second
        if rules.max_second_tokens is not None:
            asked = cut_tokens(second, rules.max_second_tokens, side)
        length = len(first) + len(asked)
        if length > room and (not rules.truncate or room < 0):
            counted = second_whole or len(asked) < len(second)
            raise self._too_long(length + frame.length, first_whole and counted)
        kept = cut_tokens(first, room, side)
        ids, types = frame.join(kept, cut_tokens(asked, room - len(kept), side))
        if not len(ids):
            raise EmptyInput()
        return Encoding(ids, types), length > room or len(asked) < len(second)

    def _encode_ids(self, tokens: Tokens, rules: Rules) -> tuple[Encoding, bool]:
        """Ids as they are: nothing is decoded, nothing added. Those with the special tokens around
        them keep these when they are cut, as texts do."""
        if not len(tokens.ids):
            raise EmptyInput()
        if not rules.bare_ids and not self._is_whole(tokens.ids):
            raise BareTokenIds(*self._ids_around)
        ids = self._check_ids(tokens.ids)
        if len(ids) > self.limit and not rules.truncate:
            raise InputTooLong(self.limit, len(ids))
        cut = cut_tokens(ids, self.limit, rules.side)
        if not rules.bare_ids:
            cut = self._within_limit(ids, rules.side)
        return Encoding(cut), len(ids) > self.limit

    def _is_whole(self, ids: Sequence[int]) -> bool:
        """Whether the tokenizer's special tokens stand around the ids. If it adds none, there is no
        telling, and they count as another tokenizer's."""
        before, after = self._ids_around
        inner = len(ids) - len(after)
        is_framed = list(ids[: len(before)]) == before and list(ids[inner:]) == after
        return sum(self._around) > 0 and inner >= len(before) and is_framed

    def _check_ids(self, ids: Sequence[int]) -> np.ndarray:
        least, most = _range(ids)
        if least < 0 or most >= self.vocab_size:  # before int32: they may exceed 64 bits
            bad = least if least < 0 else most
            raise InvalidInput(
                f"token id {bad} is out of range: this model's ids are 0 to {self.vocab_size - 1}; "
                "ids of another tokenizer (such as tiktoken) must be sent as text"
            )
        return np.array(ids, np.int32)


def _range(ids: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest id; of an array without a Python int for each."""
    if isinstance(ids, array):
        values = np.asarray(ids)
        return int(values.min()), int(values.max())
    return min(ids), max(ids)


def characters(item: Input | str) -> int:
    """What tokenizing one item of a request may have to read, four for a token id."""
    return len(item) if isinstance(item, str) else _size(item)


def _around_text(encoding) -> tuple[int, int]:
    """How many special tokens stand before and after a text."""
    plain = [k for k, special in enumerate(encoding.special_tokens_mask) if not special]
    return plain[0], len(encoding) - 1 - plain[-1]


def _tokenized(parts: Iterable[tuple[Encoding, bool]]) -> Tokenized:
    """All parts together; the error of one says which it is."""
    encodings: list[Encoding] = []
    truncated = 0
    try:
        for encoding, cut in parts:
            encodings.append(encoding)
            truncated += cut
    except InvalidInput as error:
        error.index = len(encodings)
        raise
    return Tokenized(work_of(encodings), truncated)


def _not_empty(text: str) -> str:
    if not text:
        raise EmptyInput()
    return text


def _size(one: Input) -> int:
    """Characters, or four times the token ids."""
    if isinstance(one, Text):
        return len(one.text)
    return len(one.first) + len(one.second) if isinstance(one, Pair) else 4 * len(one.ids)


def _byte_offsets(text: str) -> np.ndarray:
    """Where each character begins in the UTF-8 text, and where the last one ends; int32."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = np.ones(len(codes) + 1, np.int8)
    widths[0] = 0
    for first in (0x80, 0x800, 0x10000):  # of two, three and four bytes
        widths[1:] += codes >= first
    return np.cumsum(widths, dtype=np.int32)
