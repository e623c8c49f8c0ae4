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
from jaxembed.data.work import Encoding, Work, whole_work, work_of
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
    MOST_READ,
    Side,
    Tokenizer,
    TokenPiece,
    chunks,
    cut_tokens,
    most_read,
    token_pieces,
)
from jaxembed.preprocessing.windows import (
    Chunked,
    Divided,
    Division,
    Late,
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
MOST_DIVIDED = MOST_READ // (2 * FIRST_CUT) - CUT_MARGIN
Row = tuple[np.ndarray, bool]  # the ids of a text, and whether the whole text was tokenized


class Tokenized(msgspec.Struct, frozen=True, eq=False):
    """The encodings of some inputs, in order, and the number of inputs that were truncated."""

    work: Work
    truncated: int
    windows: Windows | None = None  # of documents that were divided
    chunked: Chunked | None = None  # of texts whose chunks are pooled one by one


class Rules(msgspec.Struct, frozen=True):
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
        before, after = 0, 0  # for a tokenizer that has no token for the sample
        if text_at:
            before, after = text_at[0], len(sample) - 1 - text_at[-1]
        self._around = before, after  # numbers of special tokens before and after a text
        self._ids_around = sample.ids[:before], sample.ids[len(sample) - after :]
        # the tokenizers of XLM-R and others give pairs two types, though the backbone has only one
        has_types = spec.token_types and spec.config.get("type_vocab_size", 0) > 1
        self._has_types = has_types and any(sample.type_ids)
        self._dropped_id = spec.config.get("dropped_id")
        self._image_id = None if spec.image is None else spec.image.token_id
        self._special_ids = {self._dropped_id, self._image_id} - {None}  # see `_checked_words`
        self._reads_whole = limit == NO_LIMIT  # whole texts are read, and none is truncated
        per_token = spec.config.get("characters_per_token")
        self._most_characters = sys.maxsize if per_token is None else per_token * limit
        if self._reads_whole:
            self._most_characters = MOST_READ
        expansion = spec.interaction and spec.interaction.expansion
        # The tokens that texts and queries are filled up to; 0 if they are not filled up.
        self._length_to_fill = 0 if spec.filled is None else spec.filled.length
        self._length_of_query = self._length_to_fill if expansion is None else expansion.length
        self._has_whole_texts = (
            spec.template is None and spec.filled is None and not self._has_types
        )
        self._pair_frame = (
            None if spec.is_static else find_frame(self._tokenizer, spec, with_types=has_types)
        )
        # Refuse a limit that leaves no room beside the special tokens.
        reserved = before + after
        if spec.task == "rerank" and self._pair_frame is not None:
            reserved = max(reserved, self._pair_frame.length)
        if spec.filled is not None and limit != spec.filled.length:
            raise ConfigError(
                f"--max-input-length {limit}: texts of this model are filled up to "
                f"{spec.filled.length} tokens, no more and no fewer; leave it out"
            )
        if spec.interaction is not None:
            markers = {spec.interaction.query_marker, spec.interaction.document_marker}
            reserved += markers != {None}
        if expansion is not None and expansion.length > limit:
            raise ConfigError(
                f"--max-input-length {limit} is less than the {expansion.length} tokens that "
                "queries of this model are filled up to"
            )
        if limit <= reserved:
            raise ConfigError(
                f"--max-input-length {limit} leaves no room for text beside the {reserved} special "
                "tokens"
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

    def encode(self, inputs: Sequence[Input], rules: Rules) -> Tokenized:
        """Tokenize inputs in the calling thread, mostly without the interpreter lock.

        Raises EmptyInput, InputTooLong, InvalidInput or TokenizerError for the first wrong input.
        """
        if self._spec.interaction is not None:
            return _tokenized(self._encode_marked(inputs, rules, self._spec.interaction))
        texts = [item for item in inputs if isinstance(item, Text)]
        max_characters = self._most_characters
        cut = slice(0, max_characters) if rules.side == "right" else slice(-max_characters, None)
        prompted = ((rules.prompt + text.text)[cut] for text in texts)
        readings = self._tokenizer.encode_enough(prompted, self.limit, rules.side)
        encoded = zip(texts, readings, strict=True)
        has_spans = self._has_spans(rules)
        if self._has_whole_texts and not has_spans and len(texts) == len(inputs):
            # Texts that are token ids alone and pooled whole: faster together than one by one.
            special_ids, longest = self._special_ids, max_characters - len(rules.prompt)
            rows: list[list[int]] = []
            truncated = 0
            try:
                for text, (encoding, whole) in encoded:
                    row = encoding.ids
                    is_usual = 0 < len(row) <= self.limit and 0 < len(text.text) <= longest
                    if not is_usual or (special_ids and not special_ids.isdisjoint(row)):
                        finished, was_cut = self._finish(text, encoding, whole, rules)
                        row = finished.ids.tolist()
                        truncated += was_cut
                    rows.append(row)
            except InvalidInput as error:
                raise error.at(len(rows)) from error
            lengths = [len(row) for row in rows]
            ids = np.fromiter(chain.from_iterable(rows), np.int32, sum(lengths))
            return Tokenized(whole_work({"ids": ids}, np.array(lengths, np.int32)), truncated)
        pairs = self._encode_pairs([item for item in inputs if isinstance(item, Pair)], rules)

        def encodings() -> Iterator[tuple[Encoding, bool]]:
            for item in inputs:
                if isinstance(item, Tokens):
                    yield self._encode_ids(item, rules)
                elif isinstance(item, Pair):
                    yield next(pairs)
                elif self._spec.template is not None:
                    raise InvalidInput(
                        "this model scores pairs, such as a query and a document, not texts"
                    )
                else:
                    text, (encoding, whole) = next(encoded)
                    yield self._finish(text, encoding, whole, rules)

        return _tokenized(encodings())

    def query_row(self, query: str, rules: Rules) -> Row:
        """Tokenize a query once, for `encode_beside`.

        Raises InvalidInput if the model takes no pairs or the query cannot be tokenized, and
        TokenizerError.
        """
        first = self._frame.first(query, rules.instruction)
        (row,) = self._tokenizer.rows([first], self.limit, rules.side)
        return row

    def encode_beside(self, query: Row, documents: Sequence[str], rules: Rules) -> Tokenized:
        """Tokenize the pairs of a query, a result of `query_row`, and each document. Several
        threads may share the query. Raises as `encode`."""
        if rules.max_windows == 1:
            seconds = self._second_rows(documents, rules)
            return _tokenized(self._pair(query, second, rules) for second in seconds)
        frame = self._frame
        room = self.limit - frame.length - len(query[0])
        division = self._division(room, frame.around_second, rules, with_query=True)
        parts: list[Divided] = []
        encodings: list[Encoding] = []
        try:
            for document in documents:
                part = self._divide(document, frame.second(document), division, rules)
                parts.append(part)
                encodings += [Encoding(*frame.join(query[0], row)) for row in part.rows]
        except InvalidInput as error:
            raise error.at(len(parts)) from error
        return _in_windows(parts, encodings, sum(part.is_cut or not query[1] for part in parts))

    def encode_documents(self, documents: Sequence[Text], rules: Rules) -> Tokenized:
        """Tokenize documents whose vectors are compared with those of a query. Each is divided into
        windows if the options allow several. Raises as `encode`, and InvalidInput for a model whose
        documents cannot be divided."""
        if rules.max_windows == 1:
            return self.encode(documents, rules)
        if self._has_types or self._spec.filled is not None:
            raise InvalidInput(
                "the documents of this model cannot be divided into windows; leave "
                "`max_chunks_per_doc` and `long_documents` out",
                field="max_chunks_per_doc",
            )
        limit, marker = self.limit, None
        if self._spec.interaction is not None:
            limit, marker = self._limit_and_marker(rules, self._spec.interaction)
        before, after = (np.array(ids, np.int32) for ids in self._ids_around)
        if marker is not None:
            before = np.insert(before, min(len(before), 1), np.int32(marker))
        prompt = rules.prompt
        room = limit - len(before) - len(after)
        division = self._division(room, (prompt, ""), rules, with_query=False)
        has_spans = self._has_spans(rules)
        parts: list[Divided] = []
        encodings: list[Encoding] = []
        try:
            for document in documents:
                text = prompt + document.text
                parts.append(part := self._divide(document.text, text, division, rules))
                for row in part.rows:
                    ids = np.concatenate([before, row, after])
                    is_given = bool(document.text) or rules.may_be_empty
                    if not self._spec.is_static and not (is_given and len(ids)):
                        raise EmptyInput()
                    ids = self._checked_words(ids)
                    spans = ((min(len(before) + len(division.head), len(ids) - 1), len(ids)),)
                    encodings.append(Encoding(ids, spans=spans if has_spans else None))
        except InvalidInput as error:
            raise error.at(len(parts)) from error
        return _in_windows(parts, encodings, sum(part.is_cut for part in parts))

    def encode_late(self, texts: Sequence[ChunkedText], rules: Rules, slots: int) -> Tokenized:
        """Tokenize texts whose chunks are pooled one by one, at most `slots` chunks in a sequence.
        A text over the limit is divided into windows if the options truncate, else refused. Raises
        as `encode`, and InvalidChunk."""
        has_spans = self._has_spans(rules)
        late = Late(
            self._tokenizer,
            rules.prompt,
            self._around,
            self._prompt_length(rules.prompt) if has_spans else 0,
            has_types=self._has_types,
            limit=self.limit,
            slots=slots,
            truncate=rules.truncate,
            can_divide=is_linear(self._spec.heads["dense"]),
        )
        encodings, chunked = encode_chunked(texts, late)
        return Tokenized(work_of(encodings), 0, chunked=chunked)

    def estimate(self, inputs: Sequence[Input], rules: Rules) -> tuple[int, int]:
        """Estimate the numbers of sequences and of tokens of the inputs before they are tokenized,
        with one token for 4 characters."""
        max_tokens = self.limit * rules.max_windows
        min_tokens = self._length_of_query if rules.role == "query" else self._length_to_fill
        tokens = sum(max(min(characters(item) // 4 + 2, max_tokens), min_tokens) for item in inputs)
        return max(len(inputs), tokens // self.limit), tokens

    @property
    def job_bytes(self) -> int:
        """The peak memory in bytes of two threads that run `encode`: for small texts, and for large
        texts."""
        large = MOST_READ if self._reads_whole else most_read(self.limit)
        return CHARACTER_BYTES * (JOB_CHARACTERS + large)

    def pieces(self, texts: Sequence[str], *, special: bool, prompt: str) -> list[list[TokenPiece]]:
        """Return the tokens of each text with the prompt before it, without a limit.

        `special` adds the tokenizer's special tokens. Raises EmptyInput or TokenizerError.
        """
        if not all(texts):
            raise EmptyInput()
        prompted = [prompt + text for text in texts]
        name_of = self._tokenizer.file.id_to_token
        pieces = []
        for chunk in chunks(prompted, len):
            encodings = self._tokenizer.encode(chunk, special=special, fast=False)
            encoded = zip(chunk, encodings, strict=True)
            pieces += [token_pieces(text, encoding, name_of) for text, encoding in encoded]
        return pieces

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
        self, inputs: Sequence[Input], rules: Rules, interaction: LateInteraction
    ) -> Iterator[tuple[Encoding, bool]]:
        """Yield for each text its encoding, with the marker and the augmentation tokens of its
        role, and whether it was truncated.

        Raises InvalidInput for token ids and pairs, because every sequence needs its marker; and
        EmptyInput, InputTooLong and TokenizerError.
        """
        texts: list[Text] = []
        for item in inputs:  # an error in a text comes before that of a later pair
            if not isinstance(item, Text):
                break
            texts.append(item)
        limit, marker = self._limit_and_marker(rules, interaction)
        room = limit - (marker is not None)
        prompted = (rules.prompt + text.text for text in texts)
        encodings = self._tokenizer.encode_enough(prompted, room, rules.side)
        expansion = interaction.expansion if rules.role == "query" else None
        place = min(self._around[0], 1)
        for text, (encoding, whole) in zip(texts, encodings, strict=True):
            if not ((text.text or rules.may_be_empty) and len(encoding)):
                raise EmptyInput()
            count = len(encoding)
            if count > room and not rules.truncate:
                raise InputTooLong(limit, limit + count - room if whole else limit + 1, exact=whole)
            ids = self._within(np.array(encoding.ids, np.int32), room, rules.side)
            if marker is not None:
                ids = np.insert(ids, place, np.int32(marker))
            fillers = 0
            if expansion is not None:
                ids, fillers = _filled(ids, expansion)
            yield Encoding(ids, fillers=fillers), count > room
        if len(texts) < len(inputs):
            kind = "pairs" if isinstance(inputs[len(texts)], Pair) else "token ids"
            raise InvalidInput(
                "this model compares texts token by token, and puts a marker into each and fills "
                f"queries up: it takes no {kind}; send texts"
            )

    def _limit_and_marker(
        self, rules: Rules, interaction: LateInteraction
    ) -> tuple[int, int | None]:
        """Return the most tokens of a text of the options' role, and the role's marker (an id or
        None). A limit that was raised above the model's replaces the length of documents, not that
        of queries."""
        if rules.role == "query":
            return min(interaction.query_length, self.limit), interaction.query_marker
        is_raised = self.limit > self._spec.max_input_tokens
        max_tokens = self.limit if is_raised else min(interaction.document_length, self.limit)
        return max_tokens, interaction.document_marker

    def _finish(self, text: Text, encoding, whole: bool, rules: Rules) -> tuple[Encoding, bool]:
        """Truncate a tokenized text to the limit. `encoding` is its tokenizers.Encoding; `whole`
        says whether the whole text was tokenized. Returns its encoding, and whether it was
        truncated.

        Raises EmptyInput, InputTooLong and InvalidInput.
        """
        is_given = bool(text.text) or rules.may_be_empty
        if not self._spec.is_static and not (is_given and len(encoding)):
            raise EmptyInput()  # without special tokens a blank text has no tokens
        count, max_chars = len(rules.prompt) + len(text.text), self._most_characters
        if count > max_chars and self._reads_whole:
            raise InvalidInput(
                f"the text has {count} characters, of at most {max_chars} for a model that cuts "
                "nothing; send it in parts, or set --max-input-length to have it cut"
            )
        is_cut = count > max_chars or len(encoding) > self.limit
        if is_cut and not rules.truncate:
            raise self._too_long(len(encoding), whole and count <= max_chars)
        ids = self._within(np.array(encoding.ids, np.int32), self.limit, rules.side)
        ids = self._checked_words(ids)
        types = None
        if self._has_types:
            types = self._within(np.array(encoding.type_ids, np.int32), self.limit, rules.side)
        spans = None
        if self._has_spans(rules):
            spans = ((min(self._prompt_length(rules.prompt), len(ids) - 1), len(ids)),)
        fillers = 0
        if self._spec.filled is not None:
            ids, fillers = _filled(ids, self._spec.filled)
        return Encoding(ids, types, spans, fillers), is_cut

    def _has_spans(self, rules: Rules) -> bool:
        """Return whether texts are pooled without their prompt."""
        return bool(rules.prompt) and not self._spec.include_prompt

    def _checked_words(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a text without the id that the model drops. Raises InvalidInput if one
        of them is the token that stands for a part of an image."""
        if self._image_id is not None and (ids == self._image_id).any():
            name = self._tokenizer.file.id_to_token(self._image_id)
            raise InvalidInput(
                f"the text has {name!r}, the token that stands for a part of an image; write it "
                "otherwise, and send images as images"
            )
        return ids if self._dropped_id is None else ids[ids != self._dropped_id]

    def _too_long(self, got: int, whole: bool) -> InputTooLong:
        """Return the error for an input with `got` tokens. The number is exact if the `whole` input
        was tokenized; else the error says: more than the limit."""
        return InputTooLong(self.limit, got if whole else self.limit + 1, exact=whole)

    def _within(self, row: np.ndarray, max_tokens: int, side: Side) -> np.ndarray:
        """Truncate the ids or the types of a text on one side, but keep the special tokens around
        it."""
        if len(row) <= max_tokens:
            return row
        before, after = self._around
        text = cut_tokens(row[before : len(row) - after], max_tokens - before - after, side)
        return np.concatenate([row[:before], text, row[len(row) - after :]])

    def _encode_pairs(self, pairs: Sequence[Pair], rules: Rules) -> Iterator[tuple[Encoding, bool]]:
        """Yield for each pair its encoding, and whether it was truncated.

        Pairs get no prompts, which are for single texts. Raises EmptyInput, and as `_pair`.
        """
        firsts = (self._frame.first(pair.first, rules.instruction) for pair in pairs)
        seconds = self._second_rows((pair.second for pair in pairs), rules)
        rows = self._tokenizer.rows(firsts, self.limit, rules.side)
        for pair, first, second in zip(pairs, rows, seconds, strict=True):
            if not (pair.first or pair.second):
                raise EmptyInput()
            yield self._pair(first, second, rules)

    def _second_rows(self, texts: Iterable[str], rules: Rules) -> Iterator[Row]:
        """Tokenize the second texts of pairs, as far as the limit or `max_second_tokens` needs."""
        max_tokens = min(self.limit, rules.max_second_tokens or self.limit)
        return self._tokenizer.rows(map(self._frame.second, texts), max_tokens, rules.side)

    def _pair(self, first_row: Row, second_row: Row, rules: Rules) -> tuple[Encoding, bool]:
        """Join two tokenized texts. Returns the pair's encoding, and whether a text was truncated.

        Of a pair over the limit the first text is truncated to the room for texts, or to the
        template's share for queries if that is less; the second text is truncated to the rest.
        Raises InputTooLong if the options forbid that or the frame leaves no room, and EmptyInput.
        """
        frame, side = self._frame, rules.side
        (first, first_whole), (second, second_whole) = first_row, second_row
        room = self.limit - frame.length
        short_second = second
        if rules.max_second_tokens is not None:
            short_second = cut_tokens(second, rules.max_second_tokens, side)
        length = len(first) + len(short_second)
        if length > room and (not rules.truncate or room < 0):
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
        self, room: int, around: tuple[str, str], rules: Rules, *, with_query: bool
    ) -> Division:
        """Return how documents are divided into windows. A window has room for `room` tokens of a
        document and of the two texts `around` it. `with_query`: each window has the query, too.

        Raises InvalidInput if there is too little room, or if the options truncate on the left.
        """
        if rules.side == "left":
            raise InvalidInput(
                "a divided document is not cut on the left; leave `truncation_direction` out",
                field="truncation_direction",
            )
        before, after = around
        (sample,) = self._tokenizer.encode([f"{before}a{after}"], special=False, fast=False)
        ends = np.array(sample.offsets).reshape(-1, 2)
        ids = np.array(sample.ids, np.int32)
        head, tail = ids[ends[:, 1] <= len(before)], ids[ends[:, 0] > len(before)]
        room -= len(head) + len(tail)
        overlap = overlap_of(room, rules.overlap, with_query=with_query)
        return Division(len(before), head, tail, room, overlap)

    def _divide(self, document: str, text: str, division: Division, rules: Rules) -> Divided:
        """Return the windows of one document. `text` is what is tokenized: the document within its
        template.

        Raises InputTooLong if the windows do not hold the whole document and the options forbid
        that.
        """
        around, room = len(division.head) + len(division.tail), division.room
        max_tokens = min(rules.max_windows * room, MOST_DIVIDED)
        wanted = rules.max_second_tokens or max_tokens + 1  # the request asks for this many
        ((encoding, whole),) = self._tokenizer.encode_enough(
            [text],
            min(max_tokens, wanted) + around,
            "right",
            special=False,
            fast=False,
        )
        ids = np.array(encoding.ids, np.int32)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2) - division.start
        inside = (places[:, 1] > 0) & (places[:, 0] < len(document))
        doc_ids, places = ids[inside], places[inside].clip(0, len(document))
        is_shortened = len(doc_ids) > wanted
        bounds = windows(min(len(doc_ids), wanted, max_tokens), room, division.overlap)
        is_long = min(len(doc_ids), wanted) > max_tokens or len(bounds) > rules.max_windows
        is_long |= not (whole or is_shortened)
        if is_long and not rules.truncate:
            raise self._too_long(self.limit + 1, whole=False)
        is_cut = is_long or is_shortened
        bounds = bounds[: rules.max_windows]
        if len(bounds) == 1 and not is_cut:
            return Divided([ids], [(0, len(document))], is_cut=False)
        return Divided(
            [np.concatenate([division.head, doc_ids[a:b], division.tail]) for a, b in bounds],
            [(int(places[a, 0]), int(places[b - 1, 1])) for a, b in bounds],
            is_cut,
        )

    def _encode_ids(self, tokens: Tokens, rules: Rules) -> tuple[Encoding, bool]:
        """Truncate token ids to the limit. Returns their encoding, and whether they were truncated.

        Prompts and special tokens are not added. If `bare_ids` is False, the ids must have the
        special tokens, which stay when the ids are truncated. Raises EmptyInput, BareTokenIds,
        InputTooLong, and InvalidInput for an id outside the vocabulary or one that stands for a
        part of an image.
        """
        if not len(tokens.ids):
            raise EmptyInput()
        if not rules.bare_ids:
            # A tokenizer without special tokens does not show whose ids they are: refuse them.
            before, after = self._ids_around
            after_start = len(tokens.ids) - len(after)
            ends = list(tokens.ids[: len(before)]), list(tokens.ids[after_start:])
            if not (before or after) or after_start < len(before) or ends != (before, after):
                raise BareTokenIds(before, after)
        ids = _checked_ids(tokens.ids, self.vocab_size)
        if len(ids) > self.limit and not rules.truncate:
            raise InputTooLong(self.limit, len(ids))
        truncate_ids = cut_tokens if rules.bare_ids else self._within
        kept_ids = truncate_ids(ids, self.limit, rules.side)
        kept_ids = self._checked_words(kept_ids)
        fillers = 0
        if self._spec.filled is not None:
            kept_ids, fillers = _filled(kept_ids, self._spec.filled)
        return Encoding(kept_ids, fillers=fillers), len(ids) > self.limit


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


def _filled(ids: np.ndarray, expansion: Expansion) -> tuple[np.ndarray, int]:
    """Append augmentation tokens up to the expansion's length. Returns the ids, and how many were
    added."""
    fillers = max(expansion.length - len(ids), 0)
    return np.concatenate([ids, np.full(fillers, expansion.token_id, np.int32)]), fillers


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


def _in_windows(
    parts: Sequence[Divided], encodings: Sequence[Encoding], truncated: int
) -> Tokenized:
    """Collect the windows of some documents. `encodings` are those of all windows, and `truncated`
    is the number of documents that were truncated."""
    counts = np.array([len(part.rows) for part in parts])
    bounds = np.array([bound for part in parts for bound in part.bounds]).reshape(-1, 2)
    return Tokenized(work_of(encodings), truncated, Windows(counts, bounds))


def _tokenized(parts: Iterable[tuple[Encoding, bool]]) -> Tokenized:
    """Collect the encodings of inputs. A part is an encoding, and whether its input was truncated.

    Gives an InvalidInput that a part raises the index of its input.
    """
    encodings: list[Encoding] = []
    truncated = 0
    try:
        for encoding, cut in parts:
            encodings.append(encoding)
            truncated += cut
    except InvalidInput as error:
        raise error.at(len(encodings)) from error
    return Tokenized(work_of(encodings), truncated)
