"""Text to token ids: prompts, special tokens, pairs, truncation. Knows no HTTP and no batches."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from jaxembed.config import TextConfig
from jaxembed.errors import ConfigError, EmptyInput, InputTooLong, InvalidInput, TokenizerError
from jaxembed.inputs import Encoding, Input, Pair, Text, Tokens
from jaxembed.spec import ModelSpec

Side = Literal["left", "right"]

CHUNK = 256  # inputs a tokenizer thread is given at once
FIRST_CUT = 16  # characters for each token of the limit that a long text is first cut to
# Tokens over the limit that make a cut safe: it changes only those of the word it runs through,
# and WordPiece splits words of up to 100 characters.
CUT_MARGIN = 128


@dataclass(frozen=True)
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
    """The encodings of a request, in order, and how many of its inputs were cut to the limit."""

    encodings: list[Encoding]
    truncated: int


@dataclass(frozen=True)
class Rules:
    """How one request wants its inputs tokenized."""

    prompt: str
    truncate: bool
    side: Side


class TextProcessor:
    """One tokenizer, shared by all threads: it is configured once and never per request."""

    def __init__(self, path: Path, spec: ModelSpec, limit: int, config: TextConfig, workers: int):
        self.limit = limit
        self.vocab_size = int(spec.config["vocab_size"])
        self._spec = spec
        self._config = config
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()  # all-MiniLM-L6-v2 stores both, fixed at 128
        self._tokenizer.no_truncation()
        sample = self._encode(["a"], fast=False)[0]
        self._around = _around_text(sample)
        self._has_types = any(sample.type_ids)
        if limit <= sum(self._around):
            raise ConfigError(
                f"--max-input-length {limit} leaves no room for text beside the "
                f"{sum(self._around)} special tokens"
            )
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
        texts = [one for one in inputs if isinstance(one, Text)]
        plain = self._encode_texts(texts, rules)
        encodings, truncated = [], 0
        for one in inputs:
            if isinstance(one, Text):
                encoding, was_cut = next(plain)
            elif isinstance(one, Pair):
                encoding, was_cut = self._encode_pair(one, rules)
            else:
                encoding, was_cut = self._encode_ids(one, rules)
            encodings.append(encoding)
            truncated += was_cut
        return Tokenized(encodings, truncated)

    def estimate(self, inputs: Sequence[Input]) -> int:
        """About how many tokens the inputs hold, before tokenizing: four characters a token."""
        return sum(min(_size(one) // 4 + 2, self.limit) for one in inputs)

    def pieces(self, texts: Sequence[str], *, special: bool, prompt: str) -> list[list[TokenPiece]]:
        """The tokens of each text, uncut."""
        prompted = [prompt + _not_empty(text) for text in texts]
        encodings = self._encode(prompted, special=special, fast=False)
        return [_pieces(text, e) for text, e in zip(prompted, encodings, strict=True)]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids. Raises EmptyInput or InvalidInput."""
        for one in ids:
            if not one:
                raise EmptyInput("Input validation error: `input_ids` cannot be empty")
            self._check_ids(one)
        return self._tokenizer.decode_batch(
            [list(one) for one in ids], skip_special_tokens=skip_special_tokens
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
        message = f"Input validation error: `default-prompt-name` is set to `{name}` but "
        if not prompts:
            message += "no prompts were found in the Sentence Transformers configuration"
        else:
            message += (
                "it was not found in the Sentence Transformers prompts. "
                f"Available prompts: [{', '.join(sorted(prompts))}]"
            )
        raise InvalidInput(message, field="prompt_name")

    def _count_prompt(self, prompt: str) -> int:
        """Tokens of a prompt, a trailing special one not counted, as sentence-transformers does."""
        encoding = self._tokenizer.encode(prompt)
        return len(encoding.ids) - encoding.special_tokens_mask[-1]

    # -- one kind of input each ------------------------------------------------------------------

    def _encode_texts(self, texts: Sequence[Text], rules: Rules) -> Iterator[tuple[Encoding, bool]]:
        prompted = [rules.prompt + _not_empty(one.text) for one in texts]
        cut = FIRST_CUT * self.limit if rules.truncate else None
        encoded = self._encode([_cut(text, cut, rules.side) for text in prompted])
        for text, encoding in zip(prompted, encoded, strict=True):
            yield self._finish(text, encoding, rules)

    def _finish(self, text: str, encoding, rules: Rules) -> tuple[Encoding, bool]:
        """An encoding within the limit, of a text that may have been cut before tokenizing."""
        cut = FIRST_CUT * self.limit
        while rules.truncate and cut < len(text) and len(encoding) < self.limit + CUT_MARGIN:
            cut *= 4  # few tokens of many characters: the cut may have lost some that belong
            encoding = self._encode([_cut(text, cut, rules.side)])[0]
        if not len(encoding):
            raise _empty()  # a tokenizer without special tokens makes nothing of blanks
        if len(encoding) > self.limit and not rules.truncate:
            raise self._too_long(len(encoding))
        ids = self._within_limit(np.array(encoding.ids, np.int32), rules.side)
        types = None
        if self._has_types:
            types = self._within_limit(np.array(encoding.type_ids, np.int32), rules.side)
        unpooled = 0
        if rules.prompt and not self._spec.include_prompt:
            unpooled = min(self._prompt_length(rules.prompt), len(ids) - 1)
        return Encoding(ids, types, unpooled), len(encoding) > self.limit

    def _within_limit(self, row: np.ndarray, side: Side) -> np.ndarray:
        """Drop tokens from one side of the text, never the special ones around it."""
        if len(row) <= self.limit:
            return row
        before, after = self._around
        room = self.limit - before - after
        text = row[before : len(row) - after]
        kept = text[:room] if side == "right" else text[len(text) - room :]
        return np.concatenate([row[:before], kept, row[len(row) - after :]])

    def _encode_pair(self, pair: Pair, rules: Rules) -> tuple[Encoding, bool]:
        """Both texts in one sequence. The second is cut first, the first only when it alone is
        over the limit. Prompts belong to single texts and are not added."""
        if not pair.first and not pair.second:
            raise _empty()
        first, second = self._encode([pair.first, pair.second], special=False, fast=False)
        room = max(self.limit - self._tokenizer.num_special_tokens_to_add(True), 0)
        length = len(first) + len(second)
        if length > room:
            if not rules.truncate:
                raise self._too_long(length + self.limit - room)
            first.truncate(room, direction=rules.side)
            second.truncate(room - len(first), direction=rules.side)
        whole = self._tokenizer.post_process(first, second)
        types = np.array(whole.type_ids, np.int32)
        return Encoding(np.array(whole.ids, np.int32), types), length > room

    def _encode_ids(self, tokens: Tokens, rules: Rules) -> tuple[Encoding, bool]:
        """Ids as they are: nothing is decoded, nothing added."""
        if not len(tokens.ids):
            raise _empty()
        ids = self._check_ids(tokens.ids)
        if len(ids) <= self.limit:
            return Encoding(ids), False
        if not rules.truncate:
            raise self._too_long(len(ids))
        return Encoding(ids[: self.limit] if rules.side == "right" else ids[-self.limit :]), True

    def _check_ids(self, ids: Sequence[int]) -> np.ndarray:
        if min(ids) < 0 or max(ids) >= self.vocab_size:  # before numpy: they may exceed 64 bits
            bad = next(one for one in ids if not 0 <= one < self.vocab_size)
            raise InvalidInput(
                f"token id {bad} is out of range: this model's ids are 0 to {self.vocab_size - 1}; "
                "ids of another tokenizer (such as tiktoken) must be sent as text"
            )
        return np.array(ids, np.int32)

    def _encode(self, texts: Sequence[str], *, special: bool = True, fast: bool = True) -> list:
        # also for one text: encode() holds the interpreter lock, encode_batch() does not
        encode = self._tokenizer.encode_batch_fast if fast else self._tokenizer.encode_batch
        try:
            return encode(list(texts), add_special_tokens=special)
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"tokenizer error {_reason(texts, error)}") from error

    def _too_long(self, length: int) -> InputTooLong:
        return InputTooLong(
            f"Input validation error: `inputs` must have less than {self.limit} tokens. "
            f"Given: {length}. Send `truncate: true` or start the server with --auto-truncate true"
        )


def _around_text(encoding) -> tuple[int, int]:
    """How many special tokens stand before and after a text."""
    plain = [k for k, special in enumerate(encoding.special_tokens_mask) if not special]
    return plain[0], len(encoding) - 1 - plain[-1]


def _cut(text: str, most: int | None, side: Side) -> str:
    if most is None or len(text) <= most:
        return text
    return text[:most] if side == "right" else text[-most:]


def _not_empty(text: str) -> str:
    if not text:
        raise _empty()
    return text


def _empty() -> EmptyInput:
    return EmptyInput("Input validation error: `inputs` cannot be empty")


def _size(one: Input) -> int:
    """Characters, or four times the token ids."""
    if isinstance(one, Text):
        return len(one.text)
    return len(one.first) + len(one.second) if isinstance(one, Pair) else 4 * len(one.ids)


def _reason(texts: Sequence[str], error: Exception) -> str:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            return "the text holds a lone surrogate, which is not Unicode text"
    return str(error)


def _pieces(text: str, encoding) -> list[TokenPiece]:
    """The tokens with byte offsets; tokenizers counts characters."""
    data = text.encode()
    widths = [len(character.encode()) for character in text]
    at = [0, *accumulate(widths)]
    columns = (encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets)
    pieces = []
    for id, token, special, (start, stop) in zip(*columns, strict=True):
        if special:
            pieces.append(TokenPiece(id, token, True, None, None))
        else:
            span = at[start], at[stop]
            pieces.append(TokenPiece(id, data[slice(*span)].decode(errors="replace"), False, *span))
    return pieces
