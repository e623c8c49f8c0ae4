"""Tokenizes the inputs of requests: adds prompts and special tokens, joins pairs, truncates."""

import os
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from jaxembed.config import TextConfig
from jaxembed.data.inputs import ChunkedText, Image, Input, Pair, Text, Tokens
from jaxembed.data.spec import NO_LIMIT, Expansion, LateInteraction, ModelSpec
from jaxembed.data.work import Encoding, Work, whole_work, work_from_encodings
from jaxembed.errors import (
    BareTokenIds,
    ConfigError,
    EmptyInput,
    InputTooLong,
    InvalidInput,
)
from jaxembed.preprocessing.job_threads import JobThreads
from jaxembed.preprocessing.pairs import Frame, find_frame
from jaxembed.preprocessing.prompts import default_prompt, default_prompt_name, named_prompt
from jaxembed.preprocessing.tokenizer import (
    CHARACTER_BYTES,
    CUT_MARGIN,
    FIRST_CUT,
    JOB_CHARACTERS,
    MAX_READ_CHARACTERS,
    Side,
    Tokenizer,
    TokenPiece,
    chunks,
    cut_tokens,
    max_read_characters,
    token_pieces,
)
from jaxembed.preprocessing.windows import (
    ChunkingSetup,
    Divided,
    Division,
    PooledChunks,
    Windows,
    encode_chunked,
    is_linear,
    overlap_of,
    windows,
)

# Bytes of memory per character for /tokenize. Measured maxima: 1719 for one text of emojis with
# byte-level BPE, 1005 for Chinese with WordPiece, and 1000 for many texts while their tokens become
# JSON. Only a ligature that XLM-R decomposes (U+FDFA) needed more, 3628.
PIECE_BYTES = 1800
# Bytes of memory per token id for /decode, measured for the longest token of a vocabulary: 512
# characters, in that of ModernBERT. Ordinary ids needed 5 to 70.
DECODED_BYTES = 1600
# The most tokens of a document that is divided into windows. The characters that a thread may read
# are certain to give this many.
MAX_DIVIDED_TOKENS = MAX_READ_CHARACTERS // (2 * FIRST_CUT) - CUT_MARGIN
Row = tuple[np.ndarray, bool]  # the ids of a text, and whether the whole text was tokenized


class Tokenized(msgspec.Struct, frozen=True, eq=False):
    """The encodings of some inputs, in order, and the number of inputs that were truncated."""

    work: Work
    truncated: int
    windows: Windows | None = None  # of documents that were divided
    chunked: PooledChunks | None = None  # of texts whose chunks are pooled one by one


class TokenizationOptions(msgspec.Struct, frozen=True):
    """How the inputs of a request are tokenized.

    `prompt` is put before each text. Inputs over the limit lose tokens from `side`, or are refused
    if `truncate` is False. `instruction` and `max_second_tokens`, a limit for the second text, are
    for pairs. A document or a chunked text is divided into at most `max_windows` windows; with 1 it
    is truncated. Token ids need the tokenizer's special tokens around them if `bare_ids` is False.
    `role` is for models with an `interaction`, where None counts as document. With `may_be_empty`
    an empty text is encoded as special tokens alone, instead of refused.
    """

    prompt: str
    truncate: bool
    side: Side
    instruction: str | None = None
    max_second_tokens: int | None = None
    bare_ids: bool = True
    max_windows: int = 1
    overlap: int | None = None  # tokens that neighbouring windows share; None: see `overlap_of`
    role: Literal["query", "document"] | None = None
    may_be_empty: bool = False


class TextProcessor:
    """Turns a model's inputs (texts, pairs, token ids) into encodings. All threads share it."""

    def __init__(self, path: Path, spec: ModelSpec, limit: int, config: TextConfig, workers: int):
        """Read the tokenizer at `path`.

        `limit` is the largest number of tokens of an encoding. `workers` is the number of threads
        of `executor` for small texts, and also of those for large texts. Raises CheckpointError if
        the file or the template for pairs is damaged, UnsupportedModel if a reranker's tokenizer
        joins pairs in an unknown way, and ConfigError if the default prompt does not exist, if the
        limit leaves no room for text, or if it does not fit the length that the model's texts or
        queries are filled up to.
        """
        self.limit = limit
        self.vocab_size = int(spec.config["vocab_size"])
        self._spec = spec
        self._tokenizer = Tokenizer(path)
        sample = self._tokenizer.encode(["a"], fast=False)[0]
        text_at = [k for k, special in enumerate(sample.special_tokens_mask) if not special]
        # a tokenizer may have no token for the sample
        before, after = (text_at[0], len(sample) - 1 - text_at[-1]) if text_at else (0, 0)
        self._around = before, after  # numbers of special tokens before and after a text
        self._ids_around = sample.ids[:before], sample.ids[len(sample) - after :]
        # the tokenizers of XLM-R and others give pairs two types, though the backbone has only one
        has_types = spec.token_types and spec.config.get("type_vocab_size", 0) > 1
        self._has_types = has_types and any(sample.type_ids)
        self._dropped_id = spec.config.get("dropped_id")
        self._image_id = None if spec.image is None else spec.image.token_id
        self._special_ids = {self._dropped_id, self._image_id} - {None}  # see `_checked_text_ids`
        self._reads_whole = limit == NO_LIMIT  # whole texts are read, and none is truncated
        per_token = spec.config.get("characters_per_token")
        self._max_characters = sys.maxsize if per_token is None else per_token * limit
        if self._reads_whole:
            self._max_characters = MAX_READ_CHARACTERS
        expansion = spec.interaction and spec.interaction.expansion
        # The tokens that texts and queries are filled up to; 0 if they are not filled up.
        self._length_to_fill = 0 if spec.filled is None else spec.filled.length
        self._length_of_query = self._length_to_fill if expansion is None else expansion.length
        self._needs_only_ids = spec.template is None and spec.filled is None and not self._has_types
        self._pair_frame = (
            None if spec.is_static else find_frame(self._tokenizer, spec, with_types=has_types)
        )
        # Refuse a limit that leaves no room beside the special tokens.
        reserved = before + after
        if spec.task == "rerank" and self._pair_frame is not None:
            reserved = max(reserved, self._pair_frame.length)
        if spec.filled is not None and limit != spec.filled.length:
            raise ConfigError(
                f"the limit of an input is {limit} tokens, but this model pads every text to "
                f"{spec.filled.length}; leave out --max-input-length and --max-batch-tokens"
            )
        if spec.interaction is not None:
            markers = spec.interaction.query_marker, spec.interaction.document_marker
            reserved += markers != (None, None)  # one token if there is a marker
        if expansion is not None and expansion.length > limit:
            raise ConfigError(
                f"the limit of an input is {limit} tokens, but this model extends queries to "
                f"{expansion.length}; raise --max-input-length or --max-batch-tokens"
            )
        if limit <= reserved:
            raise ConfigError(
                f"--max-input-length is {limit}, which leaves no room for text beside the special "
                f"tokens ({reserved})"
            )
        self._default_prompt = default_prompt(config, spec)
        self.default_prompt_name = default_prompt_name(config, spec)
        # these threads share the work: threads within each job would only compete with them
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.executor = JobThreads(workers, "tokenize")
        self._prompt_length = lru_cache(maxsize=64)(self._count_prompt)

    def prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """Return the text to put before each input: `prompt`, or that of `prompt_name`, or the
        default. Raises UnknownPrompt if the checkpoint has no prompt with the name."""
        if prompt is not None:
            return prompt
        if prompt_name is None:
            return self._default_prompt
        return named_prompt(prompt_name, self._spec.prompts)

    def encode(self, inputs: Sequence[Input], tokenization: TokenizationOptions) -> Tokenized:
        """Tokenize inputs in the calling thread, mostly without the interpreter lock.

        Raises EmptyInput, InputTooLong, InvalidInput or TokenizerError for the first wrong input.
        """
        if self._spec.interaction is not None:
            return _tokenized(self._encode_marked(inputs, tokenization, self._spec.interaction))
        texts = [item for item in inputs if isinstance(item, Text)]
        max_characters = self._max_characters
        cut = (
            slice(0, max_characters)
            if tokenization.side == "right"
            else slice(-max_characters, None)
        )
        prompted = ((tokenization.prompt + text.text)[cut] for text in texts)
        encoded = zip(
            texts,
            self._tokenizer.encode_enough(prompted, self.limit, tokenization.side),
            strict=True,
        )
        has_spans = self._has_spans(tokenization)
        if self._needs_only_ids and not has_spans and len(texts) == len(inputs):
            # Sequences without token types and spans: faster together than one by one.
            special_ids, max_length = self._special_ids, max_characters - len(tokenization.prompt)
            rows: list[list[int]] = []
            truncated = 0
            try:
                for text, (encoding, whole) in encoded:
                    row = encoding.ids
                    # `_finish` handles the texts that are empty, too long or have special ids.
                    is_usual = 0 < len(row) <= self.limit and 0 < len(text.text) <= max_length
                    if not is_usual or (special_ids and not special_ids.isdisjoint(row)):
                        finished, was_cut = self._finish(text, encoding, whole, tokenization)
                        row = finished.ids.tolist()
                        truncated += was_cut
                    rows.append(row)
            except InvalidInput as error:
                raise error.at(len(rows)) from error
            lengths = [len(row) for row in rows]
            ids = np.fromiter(chain.from_iterable(rows), np.int32, sum(lengths))
            return Tokenized(whole_work({"ids": ids}, np.array(lengths, np.int32)), truncated)
        pairs = self._encode_pairs(
            [item for item in inputs if isinstance(item, Pair)], tokenization
        )

        def encodings() -> Iterator[tuple[Encoding, bool]]:
            for item in inputs:
                if isinstance(item, Tokens):
                    yield self._encode_ids(item, tokenization)
                elif isinstance(item, Pair):
                    yield next(pairs)
                elif self._spec.template is not None:
                    raise InvalidInput(
                        "this model scores pairs, such as a query and a document, not single texts"
                    )
                else:
                    text, (encoding, whole) = next(encoded)
                    yield self._finish(text, encoding, whole, tokenization)

        return _tokenized(encodings())

    def tokenize_query(self, query: str, tokenization: TokenizationOptions) -> Row:
        """Tokenize a query once, for `encode_pairs_of_query`.

        Raises InvalidInput if the model takes no pairs or the query cannot be tokenized, and
        TokenizerError.
        """
        first = self._frame.first(query, tokenization.instruction)
        (row,) = self._tokenizer.rows([first], self.limit, tokenization.side)
        return row

    def encode_pairs_of_query(
        self, query: Row, documents: Sequence[str], tokenization: TokenizationOptions
    ) -> Tokenized:
        """Tokenize a pair of the query and each document. `query` is a result of `tokenize_query`,
        which several threads may share. Each document is divided into windows if the options allow
        several. Raises as `encode`."""
        if tokenization.max_windows == 1:
            seconds = self._second_rows(documents, tokenization)
            return _tokenized(self._pair(query, second, tokenization) for second in seconds)
        frame = self._frame
        room = self.limit - frame.length - len(query[0])
        division = self._division(room, frame.around_second, tokenization, with_query=True)

        def divided() -> Iterator[tuple[Divided, list[Encoding]]]:
            for document in documents:
                part = self._divide(document, frame.second(document), division, tokenization)
                # query[1]: whether the query is whole; if not, every pair counts as truncated
                part = part._replace(is_cut=part.is_cut or not query[1])
                yield part, [Encoding(*frame.join(query[0], row)) for row in part.rows]

        return _in_windows(divided())

    def encode_documents(
        self, documents: Sequence[Text], tokenization: TokenizationOptions
    ) -> Tokenized:
        """Tokenize documents whose vectors are compared with those of a query. Each is divided into
        windows if the options allow several. Raises as `encode`, and InvalidInput for a model whose
        documents cannot be divided."""
        if tokenization.max_windows == 1:
            return self.encode(documents, tokenization)
        if self._has_types or self._spec.filled is not None:
            raise InvalidInput(
                "the documents of this model cannot be divided into windows; leave "
                "`max_chunks_per_doc` and `long_documents` out",
                field="max_chunks_per_doc",
            )
        limit, marker = self.limit, None
        if self._spec.interaction is not None:
            limit, marker = self._limit_and_marker(tokenization, self._spec.interaction)
        before, after = (np.array(ids, np.int32) for ids in self._ids_around)
        if marker is not None:
            before = np.insert(before, min(len(before), 1), np.int32(marker))
        prompt = tokenization.prompt
        room = limit - len(before) - len(after)
        division = self._division(room, (prompt, ""), tokenization, with_query=False)
        has_spans = self._has_spans(tokenization)

        def encoding(document: Text, row: np.ndarray) -> Encoding:
            ids = np.concatenate([before, row, after])
            self._refuse_empty(document, len(ids), tokenization)
            ids = self._checked_text_ids(ids)
            # pool what is behind the prompt, at least the last token
            spans = ((min(len(before) + len(division.head), len(ids) - 1), len(ids)),)
            return Encoding(ids, spans=spans if has_spans else None)

        def divided() -> Iterator[tuple[Divided, list[Encoding]]]:
            for document in documents:
                part = self._divide(document.text, prompt + document.text, division, tokenization)
                yield part, [encoding(document, row) for row in part.rows]

        return _in_windows(divided())

    def encode_chunked_texts(
        self, texts: Sequence[ChunkedText], tokenization: TokenizationOptions, slots: int
    ) -> Tokenized:
        """Tokenize texts whose chunks are pooled one by one, at most `slots` chunks in a sequence.
        A text over the limit is divided into windows if the options truncate, else refused. Raises
        as `encode`, and InvalidChunk."""
        has_spans = self._has_spans(tokenization)
        late = ChunkingSetup(
            self._tokenizer,
            tokenization.prompt,
            self._around,
            unpooled=self._prompt_length(tokenization.prompt) if has_spans else 0,
            has_types=self._has_types,
            limit=self.limit,
            slots=slots,
            truncate=tokenization.truncate,
            can_divide=is_linear(self._spec.heads["dense"]),
        )
        encodings, chunked = encode_chunked(texts, late)
        return Tokenized(work_from_encodings(encodings), truncated=0, chunked=chunked)

    def estimate(
        self, inputs: Sequence[Input], tokenization: TokenizationOptions
    ) -> tuple[int, int]:
        """Estimate the numbers of sequences and of tokens of the inputs before they are tokenized.
        An input has a token for 4 characters plus 2, at most the limit of its windows together, and
        at least the length that it is filled up to."""
        max_tokens = self.limit * tokenization.max_windows
        min_tokens = self._length_of_query if tokenization.role == "query" else self._length_to_fill
        tokens = sum(max(min(characters(item) // 4 + 2, max_tokens), min_tokens) for item in inputs)
        return max(len(inputs), tokens // self.limit), tokens

    @property
    def job_bytes(self) -> int:
        """The peak memory in bytes of two threads that run `encode`: for small texts, and for large
        texts."""
        large = MAX_READ_CHARACTERS if self._reads_whole else max_read_characters(self.limit)
        return CHARACTER_BYTES * (JOB_CHARACTERS + large)

    def pieces(self, texts: Sequence[str], *, special: bool, prompt: str) -> list[list[TokenPiece]]:
        """Return the tokens of each text with the prompt before it, without a limit.

        `special` adds the tokenizer's special tokens. Raises EmptyInput or TokenizerError.
        """
        if not all(texts):
            raise EmptyInput()
        return [
            token_pieces(text, encoding, self._tokenizer.file.id_to_token)
            for chunk in chunks([prompt + text for text in texts], len)
            for text, encoding in zip(
                chunk,
                self._tokenizer.encode(chunk, special=special, fast=False),
                strict=True,
            )
        ]

    def term_names(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens with these ids, as the vocabulary spells them; "" for an unknown id."""
        return [self._tokenizer.file.id_to_token(token_id) or "" for token_id in ids]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Return the text of each list of ids.

        Raises EmptyInput for an empty list, and InvalidInput for an id outside the vocabulary.
        """
        for row in ids:
            if not row:
                raise EmptyInput()
            _checked_ids(row, self.vocab_size)
        return [
            text
            for chunk in chunks(ids, len)
            for text in self._tokenizer.file.decode_batch(
                [list(row) for row in chunk], skip_special_tokens=skip_special_tokens
            )
        ]

    @property
    def _frame(self) -> Frame:
        """The frame of pairs. Raises InvalidInput if the model takes no pairs."""
        if self._pair_frame is None:
            raise InvalidInput("this model takes no pairs: its tokenizer's template is not known")
        return self._pair_frame

    def _count_prompt(self, prompt: str) -> int:
        """Count the tokens of a prompt as sentence-transformers does: without a special one at the
        end."""
        ((encoding, _),) = self._tokenizer.encode_enough([prompt], self.limit, "right")
        return len(encoding) - encoding.special_tokens_mask[-1]

    def _encode_marked(
        self,
        inputs: Sequence[Input],
        tokenization: TokenizationOptions,
        interaction: LateInteraction,
    ) -> Iterator[tuple[Encoding, bool]]:
        """Yield for each text its encoding, with the marker and the augmentation tokens of its
        role, and whether it was truncated.

        Raises InvalidInput for token ids and pairs, because every sequence needs its marker; and
        EmptyInput, InputTooLong and TokenizerError.
        """
        texts: list[Text] = []
        for item in inputs:  # stop at another kind: an error in a text before it comes first
            if not isinstance(item, Text):
                break
            texts.append(item)
        limit, marker = self._limit_and_marker(tokenization, interaction)
        room = limit - (marker is not None)
        prompted = (tokenization.prompt + text.text for text in texts)
        encodings = self._tokenizer.encode_enough(prompted, room, tokenization.side)
        expansion = interaction.expansion if tokenization.role == "query" else None
        marker_index = min(self._around[0], 1)  # behind a token such as [CLS]
        for text, (encoding, whole) in zip(texts, encodings, strict=True):
            self._refuse_empty(text, len(encoding), tokenization)
            count = len(encoding)
            if count > room and not tokenization.truncate:
                # with the marker, which is limit - room
                raise InputTooLong(limit, limit + count - room if whole else limit + 1, exact=whole)
            ids = self._within(np.array(encoding.ids, np.int32), room, tokenization.side)
            if marker is not None:
                ids = np.insert(ids, marker_index, np.int32(marker))
            ids, augmentation_tokens = _augmented(ids, expansion)
            yield Encoding(ids, augmentation_tokens=augmentation_tokens), count > room
        if len(texts) < len(inputs):
            kind = "pairs" if isinstance(inputs[len(texts)], Pair) else "token ids"
            raise InvalidInput(
                "this model compares texts token by token and prepares each as a query or a "
                f"document, so it takes no {kind}; send texts"
            )

    def _limit_and_marker(
        self, tokenization: TokenizationOptions, interaction: LateInteraction
    ) -> tuple[int, int | None]:
        """Return the most tokens of a text of the options' role, and the role's marker (an id or
        None). If `limit` was raised above the model's own, it replaces `document_length`, but not
        `query_length`."""
        if tokenization.role == "query":
            return min(interaction.query_length, self.limit), interaction.query_marker
        is_raised = self.limit > self._spec.max_input_tokens
        max_tokens = self.limit if is_raised else min(interaction.document_length, self.limit)
        return max_tokens, interaction.document_marker

    def _finish(
        self, text: Text, encoding, whole: bool, tokenization: TokenizationOptions
    ) -> tuple[Encoding, bool]:
        """Truncate a tokenized text to the limit. `encoding` is its tokenizers.Encoding; `whole`
        says whether it is that of the whole text. Returns the Encoding to run, and whether the
        text was truncated.

        Raises EmptyInput, InputTooLong and InvalidInput.
        """
        self._refuse_empty(text, len(encoding), tokenization)
        count, max_chars = len(tokenization.prompt) + len(text.text), self._max_characters
        if count > max_chars and self._reads_whole:
            raise InvalidInput(
                f"the text has {count} characters, and the limit is {max_chars} for a model that "
                "does not truncate; send it in parts, or set --max-input-length to truncate it"
            )
        is_cut = count > max_chars or len(encoding) > self.limit
        if is_cut and not tokenization.truncate:
            raise self._too_long(len(encoding), whole and count <= max_chars)
        ids = self._within(np.array(encoding.ids, np.int32), self.limit, tokenization.side)
        ids = self._checked_text_ids(ids)
        types = spans = None
        if self._has_types:
            types = np.array(encoding.type_ids, np.int32)
            types = self._within(types, self.limit, tokenization.side)
        if self._has_spans(tokenization):
            # pool what is behind the prompt, at least the last token
            spans = ((min(self._prompt_length(tokenization.prompt), len(ids) - 1), len(ids)),)
        ids, augmentation_tokens = _augmented(ids, self._spec.filled)
        return Encoding(ids, types, spans, augmentation_tokens), is_cut

    def _refuse_empty(
        self, text: Text, token_count: int, tokenization: TokenizationOptions
    ) -> None:
        """Raise EmptyInput for an empty text, unless the options or a static model allow it. A
        blank text has no tokens if the tokenizer adds no special tokens."""
        is_given = bool(text.text) or tokenization.may_be_empty
        if not self._spec.is_static and not (is_given and token_count):
            raise EmptyInput()

    def _has_spans(self, tokenization: TokenizationOptions) -> bool:
        """Return whether texts are pooled without their prompt."""
        return bool(tokenization.prompt) and not self._spec.include_prompt

    def _checked_text_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a text without those that the model drops (`dropped_id`). Raises
        InvalidInput if one of the ids stands for a part of an image."""
        if self._image_id is not None and (ids == self._image_id).any():
            name = self._tokenizer.file.id_to_token(self._image_id)
            raise InvalidInput(
                f"the text contains {name!r}, the token that stands for a part of an image; spell "
                "it in another way, and send images as images"
            )
        return ids if self._dropped_id is None else ids[ids != self._dropped_id]

    def _too_long(self, got: int, whole: bool) -> InputTooLong:
        """Return the error for an input with `got` tokens. The number is exact if the `whole` input
        was tokenized; else the error says: more than the limit."""
        return InputTooLong(self.limit, got if whole else self.limit + 1, exact=whole)

    def _within(self, row: np.ndarray, max_tokens: int, side: Side) -> np.ndarray:
        """Truncate the ids or the token types of a text on one side, but keep the special tokens
        around it."""
        if len(row) <= max_tokens:
            return row
        before, after = self._around
        text = cut_tokens(row[before : len(row) - after], max_tokens - before - after, side)
        return np.concatenate([row[:before], text, row[len(row) - after :]])

    def _encode_pairs(
        self, pairs: Sequence[Pair], tokenization: TokenizationOptions
    ) -> Iterator[tuple[Encoding, bool]]:
        """Yield for each pair its encoding, and whether it was truncated.

        Pairs get no prompts, which are for single texts. Raises EmptyInput, and as `_pair`.
        """
        firsts = (self._frame.first(pair.first, tokenization.instruction) for pair in pairs)
        seconds = self._second_rows((pair.second for pair in pairs), tokenization)
        rows = self._tokenizer.rows(firsts, self.limit, tokenization.side)
        for pair, first, second in zip(pairs, rows, seconds, strict=True):
            if not (pair.first or pair.second):
                raise EmptyInput()
            yield self._pair(first, second, tokenization)

    def _second_rows(
        self, texts: Iterable[str], tokenization: TokenizationOptions
    ) -> Iterator[Row]:
        """Tokenize the second texts of pairs, as far as the limit or `max_second_tokens` needs."""
        max_tokens = min(self.limit, tokenization.max_second_tokens or self.limit)
        return self._tokenizer.rows(map(self._frame.second, texts), max_tokens, tokenization.side)

    def _pair(
        self, first_row: Row, second_row: Row, tokenization: TokenizationOptions
    ) -> tuple[Encoding, bool]:
        """Join two tokenized texts. Returns the pair's encoding, and whether a text was truncated.

        Of a pair over the limit the first text is truncated to the room for texts, or to the
        template's share for queries if that is less; the second text is truncated to the rest.
        Raises InputTooLong if the options forbid that or the frame leaves no room, and EmptyInput.
        """
        frame, side = self._frame, tokenization.side
        (first, first_whole), (second, second_whole) = first_row, second_row
        room = self.limit - frame.length
        short_second = second
        if tokenization.max_second_tokens is not None:
            short_second = cut_tokens(second, tokenization.max_second_tokens, side)
        length = len(first) + len(short_second)
        if length > room and (not tokenization.truncate or room < 0):
            second_exact = second_whole or len(short_second) < len(second)
            raise self._too_long(length + frame.length, first_whole and second_exact)
        max_first = room if frame.template is None else int(frame.template.query_share * self.limit)
        short_first = first if length <= room else cut_tokens(first, min(room, max_first), side)
        ids, types = frame.join(
            short_first, cut_tokens(short_second, room - len(short_first), side)
        )
        if not len(ids):
            raise EmptyInput()
        return Encoding(ids, types), length > room or len(short_second) < len(second)

    def _division(
        self,
        room: int,
        around: tuple[str, str],
        tokenization: TokenizationOptions,
        *,
        with_query: bool,
    ) -> Division:
        """Return how documents are divided into windows. A window has `room` tokens, for a
        part of a document and for the texts `around` it, those of a prompt or a template.
        `with_query`: each window has the query, too.

        Raises InvalidInput if there is too little room, or if the options truncate on the left.
        """
        if tokenization.side == "left":
            raise InvalidInput(
                "a document that is divided into windows cannot be truncated on the left; leave "
                "`truncation_direction` out",
                field="truncation_direction",
            )
        before, after = around
        # "a" is a sample document: head and tail are the tokens before and behind it
        (sample,) = self._tokenizer.encode([f"{before}a{after}"], special=False, fast=False)
        offsets = np.array(sample.offsets).reshape(-1, 2)
        ids = np.array(sample.ids, np.int32)
        head, tail = ids[offsets[:, 1] <= len(before)], ids[offsets[:, 0] > len(before)]
        room -= len(head) + len(tail)
        overlap = overlap_of(room, tokenization.overlap, with_query=with_query)
        return Division(len(before), head, tail, room, overlap)

    def _divide(
        self, document: str, text: str, division: Division, tokenization: TokenizationOptions
    ) -> Divided:
        """Return the windows of one document. `text` is what is tokenized: the document within its
        prompt or template.

        Raises InputTooLong if the windows do not hold the whole document and the options forbid
        that.
        """
        around_tokens, room = len(division.head) + len(division.tail), division.room
        max_tokens = min(tokenization.max_windows * room, MAX_DIVIDED_TOKENS)
        max_used = tokenization.max_second_tokens or max_tokens + 1  # or one more than fits
        ((encoding, whole),) = self._tokenizer.encode_enough(
            [text],
            min(max_tokens, max_used) + around_tokens,
            "right",
            special=False,
            fast=False,
        )
        ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) - division.start
        # Tokens with a character of the document.
        inside = (offsets[:, 1] > 0) & (offsets[:, 0] < len(document))
        doc_ids, offsets = ids[inside], offsets[inside].clip(0, len(document))
        is_shortened = len(doc_ids) > max_used  # as the request wants it
        bounds = windows(min(len(doc_ids), max_used, max_tokens), room, division.overlap)
        is_long = min(len(doc_ids), max_used) > max_tokens or len(bounds) > tokenization.max_windows
        is_long |= not (whole or is_shortened)  # the rest of the document was not read
        if is_long and not tokenization.truncate:
            raise self._too_long(self.limit + 1, whole=False)
        is_cut = is_long or is_shortened
        bounds = bounds[: tokenization.max_windows]
        if len(bounds) == 1 and not is_cut:
            return Divided([ids], [(0, len(document))], is_cut=False)
        return Divided(
            [np.concatenate([division.head, doc_ids[a:b], division.tail]) for a, b in bounds],
            [(int(offsets[a, 0]), int(offsets[b - 1, 1])) for a, b in bounds],
            is_cut,
        )

    def _encode_ids(
        self, tokens: Tokens, tokenization: TokenizationOptions
    ) -> tuple[Encoding, bool]:
        """Truncate token ids to the limit. Returns their encoding, and whether they were truncated.

        Prompts and special tokens are not added. If `bare_ids` is False, the ids must have the
        special tokens, which stay when the ids are truncated. Raises EmptyInput, BareTokenIds,
        InputTooLong, and InvalidInput for an id outside the vocabulary or one that stands for a
        part of an image.
        """
        if not len(tokens.ids):
            raise EmptyInput()
        if not tokenization.bare_ids:
            # A tokenizer without special tokens does not show whose ids they are: refuse them.
            before, after = self._ids_around
            after_start = len(tokens.ids) - len(after)
            ends = list(tokens.ids[: len(before)]), list(tokens.ids[after_start:])
            if not (before or after) or after_start < len(before) or ends != (before, after):
                raise BareTokenIds(before, after)
        ids = _checked_ids(tokens.ids, self.vocab_size)
        if len(ids) > self.limit and not tokenization.truncate:
            raise InputTooLong(self.limit, len(ids))
        truncate_ids = cut_tokens if tokenization.bare_ids else self._within
        kept = self._checked_text_ids(truncate_ids(ids, self.limit, tokenization.side))
        kept_ids, augmentation_tokens = _augmented(kept, self._spec.filled)
        return Encoding(kept_ids, augmentation_tokens=augmentation_tokens), len(ids) > self.limit


def _checked_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Convert a sequence of token ids, which is not empty, to int32 `[tokens]`.

    Raises InvalidInput if an id is not in the vocabulary.
    """
    if isinstance(ids, array):  # faster: makes no Python int of each id
        values = np.asarray(ids)
        lowest, highest = int(values.min()), int(values.max())
    else:
        lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:  # before int32: they may exceed 64 bits
        bad = lowest if lowest < 0 else highest
        raise InvalidInput(
            f"token id {bad} is out of range: this model's ids are 0 to {vocab_size - 1}; "
            "ids of another tokenizer (such as tiktoken) must be sent as text"
        )
    return np.array(ids, np.int32)


def _augmented(ids: np.ndarray, expansion: Expansion | None) -> tuple[np.ndarray, int]:
    """Append augmentation tokens up to the expansion's length, if there is one. Returns the ids,
    and how many were added."""
    if expansion is None:
        return ids, 0
    added = max(expansion.length - len(ids), 0)
    return np.concatenate([ids, np.full(added, expansion.token_id, np.int32)]), added


def characters(item: Input | ChunkedText | str) -> int:
    """Return the number of characters of a text or an input, a measure of the work that it takes. A
    token id counts as four, and an image as a whole job: even a small file may take a second."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Text | ChunkedText):
        return len(item.text)
    if isinstance(item, Image):
        return JOB_CHARACTERS
    return len(item.first) + len(item.second) if isinstance(item, Pair) else 4 * len(item.ids)


def _in_windows(documents: Iterable[tuple[Divided, list[Encoding]]]) -> Tokenized:
    """Collect the windows of documents. An item is a divided document, and the encodings of its
    windows.

    An InvalidInput that is raised by the iteration gets the index of its document.
    """
    parts: list[Divided] = []
    encodings: list[Encoding] = []
    try:
        for part, part_encodings in documents:
            parts.append(part)
            encodings += part_encodings
    except InvalidInput as error:
        raise error.at(len(parts)) from error
    counts = np.array([len(part.rows) for part in parts])
    bounds = np.array([bound for part in parts for bound in part.bounds]).reshape(-1, 2)
    truncated = sum(part.is_cut for part in parts)
    return Tokenized(work_from_encodings(encodings), truncated, Windows(counts, bounds))


def _tokenized(parts: Iterable[tuple[Encoding, bool]]) -> Tokenized:
    """Collect the encodings of inputs. A part is an encoding, and whether its input was truncated.

    An InvalidInput that is raised by the iteration gets the index of its input.
    """
    encodings: list[Encoding] = []
    truncated = 0
    try:
        for encoding, cut in parts:
            encodings.append(encoding)
            truncated += cut
    except InvalidInput as error:
        raise error.at(len(encodings)) from error
    return Tokenized(work_from_encodings(encodings), truncated)
