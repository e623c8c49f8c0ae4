"""Tokenizes the inputs of requests: prompts, special tokens, pairs, truncation.

Knows no HTTP and no batches.
"""

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
# Tokens of a document that is divided: so many are found in the characters that a thread may read.
MOST_DIVIDED = MOST_READ // (2 * FIRST_CUT) - CUT_MARGIN
Row = tuple[np.ndarray, bool]  # the ids of a text, and whether the whole text was tokenized


class Tokenized(msgspec.Struct, frozen=True, eq=False):
    """The columns of some inputs, in order, and the number of inputs that were cut to the limit."""

    work: Work
    truncated: int
    windows: Windows | None = None  # of documents that were divided
    chunked: Chunked | None = None  # of texts whose chunks are pooled one by one


class Rules(msgspec.Struct, frozen=True):
    """The options of a request for the tokenization of its inputs.

    `instruction`, `max_second_tokens` and `overlap` are for pairs, and `max_windows` for pairs and
    chunked texts: a text that does not fit is divided into at most so many windows; with 1 it is
    cut. `bare_ids` is for token ids: if it is False, they must have the tokenizer's special tokens
    around them. `role` is for models with an `interaction`, where None counts as document. With
    `may_be_empty` an empty text has the tokens that are put around one.
    """

    prompt: str
    truncate: bool
    side: Side
    instruction: str | None = None
    max_second_tokens: int | None = None
    bare_ids: bool = True
    max_windows: int = 1
    overlap: int | None = None  # tokens that windows share; None: see `overlap_of`
    role: Literal["query", "document"] | None = None
    may_be_empty: bool = False


class TextProcessor:
    """Turns the inputs of a model into encodings. All threads share it."""

    def __init__(self, path: Path, spec: ModelSpec, limit: int, config: TextConfig, workers: int):
        """Read the tokenizer at `path`.

        `limit` is the largest number of tokens of an encoding. `workers` is the number of threads
        of `executor` for small texts, and of those for others. Raises CheckpointError if the file
        or the template for pairs is damaged, UnsupportedModel if a reranker's tokenizer joins pairs
        in an unknown way, and ConfigError if the limit leaves no room for text, or for queries that
        are filled up, or the default prompt does not exist.
        """
        self.limit = limit
        self.vocab_size = int(spec.config["vocab_size"])
        self._spec = spec
        self._tokenizer = Tokenizer(path)
        sample = self._tokenizer.encode(["a"], fast=False)[0]
        plain = [k for k, special in enumerate(sample.special_tokens_mask) if not special]
        before, after = 0, 0  # of a tokenizer that knows no letter of the sample
        if plain:
            before, after = plain[0], len(sample) - 1 - plain[-1]
        self._around = before, after
        self._ids_around = sample.ids[:before], sample.ids[len(sample) - after :]
        # XLM-R's tokenizer and others give types to pairs whose tower knows only one
        has_types = spec.token_types and spec.config.get("type_vocab_size", 0) > 1
        self._has_types = has_types and any(sample.type_ids)
        self._dropped_id = spec.config.get("dropped_id")
        self._image_id = None if spec.image is None else spec.image.token_id
        self._special_ids = {self._dropped_id, self._image_id} - {None}
        self._reads_whole = limit == NO_LIMIT  # texts are not cut, but read to their end
        per_token = spec.config.get("characters_per_token")
        self._most_characters = sys.maxsize if per_token is None else per_token * limit
        if self._reads_whole:
            self._most_characters = MOST_READ
        expansion = spec.interaction and spec.interaction.expansion
        # The lengths up to which texts are filled; 0 where they are not.
        self._length_to_fill = 0 if spec.filled is None else spec.filled.length
        self._length_of_query = self._length_to_fill if expansion is None else expansion.length
        self._has_whole_texts = (
            spec.template is None and spec.filled is None and not self._has_types
        )
        self._pair_frame = (
            None if spec.is_static else find_frame(self._tokenizer, spec, with_types=has_types)
        )
        # Refuse a limit that leaves no room beside the special tokens.
        special = before + after
        if spec.task == "rerank" and self._pair_frame is not None:
            special = max(special, self._pair_frame.length)
        if spec.filled is not None and limit != spec.filled.length:
            raise ConfigError(
                f"--max-input-length {limit}: texts of this model are filled up to "
                f"{spec.filled.length} tokens, no more and no fewer; leave it out"
            )
        if spec.interaction is not None:
            markers = {spec.interaction.query_marker, spec.interaction.document_marker}
            special += markers != {None}
        if expansion is not None and expansion.length > limit:
            raise ConfigError(
                f"--max-input-length {limit} is less than the {expansion.length} tokens that "
                "queries of this model are filled up to"
            )
        if limit <= special:
            raise ConfigError(
                f"--max-input-length {limit} leaves no room for text beside the {special} special "
                "tokens"
            )
        self._default_prompt = default_prompt(config, spec)
        self.default_prompt_name = default_prompt_name(config, spec)
        # these threads share the work: others within each job would only disturb them
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.executor = JobThreads(workers, "tokenize")
        self._prompt_length = lru_cache(maxsize=64)(self._count_prompt)

    def prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """The text to put before each input: the prompt, the named one, or else the default.

        Raises UnknownPrompt if the checkpoint has no prompt with the name.
        """
        if prompt is not None:
            return prompt
        if prompt_name is None:
            return self._default_prompt
        return named_prompt(prompt_name, self._spec.prompts)

    def encode(self, inputs: Sequence[Input], rules: Rules) -> Tokenized:
        """Tokenize inputs in the calling thread, without holding the interpreter lock for long.

        Raises EmptyInput, InputTooLong, InvalidInput or TokenizerError for the first input at
        fault.
        """
        if self._spec.interaction is not None:
            return _tokenized(self._encode_marked(inputs, rules, self._spec.interaction))
        texts = [item for item in inputs if isinstance(item, Text)]
        most = self._most_characters
        cut = slice(0, most) if rules.side == "right" else slice(-most, None)
        prompted = ((rules.prompt + text.text)[cut] for text in texts)
        read = self._tokenizer.encode_enough(prompted, self.limit, rules.side)
        encoded = zip(texts, read, strict=True)
        has_spans = self._has_spans(rules)
        if self._has_whole_texts and not has_spans and len(texts) == len(inputs):
            # Texts that are ids alone and pooled whole: faster together than one by one.
            special, longest = self._special_ids, most - len(rules.prompt)
            rows: list[list[int]] = []
            truncated = 0
            try:
                for text, (encoding, whole) in encoded:
                    row = encoding.ids
                    is_usual = 0 < len(row) <= self.limit and 0 < len(text.text) <= longest
                    if not is_usual or (special and not special.isdisjoint(row)):
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
        """Tokenize a query once, for `encode_beside`. Raises InvalidInput if the model takes no
        pairs or the query cannot be tokenized, and TokenizerError."""
        first = self._frame.first(query, rules.instruction)
        (row,) = self._tokenizer.rows([first], self.limit, rules.side)
        return row

    def encode_beside(self, query: Row, documents: Sequence[str], rules: Rules) -> Tokenized:
        """Tokenize the pairs of a query and each document; several threads may share the query.
        Raises what `encode` does."""
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
        """Tokenize documents that are compared with a query by their vectors, each in windows if
        the rules allow several. Raises what `encode` does."""
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
                    own = ((min(len(before) + len(division.head), len(ids) - 1), len(ids)),)
                    encodings.append(Encoding(ids, spans=own if has_spans else None))
        except InvalidInput as error:
            raise error.at(len(parts)) from error
        return _in_windows(parts, encodings, sum(part.is_cut for part in parts))

    def encode_late(self, texts: Sequence[ChunkedText], rules: Rules, slots: int) -> Tokenized:
        """Tokenize texts whose chunks are pooled one by one, at most `slots` in a sequence. A text
        over the limit is run in windows where `truncate` is on. Raises what `encode` does, and
        InvalidChunk."""
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
        """Estimate the numbers of sequences and tokens of the inputs before tokenization, with one
        token per 4 characters."""
        most = self.limit * rules.max_windows
        least = self._length_of_query if rules.role == "query" else self._length_to_fill
        tokens = sum(max(min(characters(item) // 4 + 2, most), least) for item in inputs)
        return max(len(inputs), tokens // self.limit), tokens

    @property
    def job_bytes(self) -> int:
        """The largest memory in bytes that a thread for small texts needs while it runs `encode`,
        and one for large texts."""
        large = MOST_READ if self._reads_whole else most_read(self.limit)
        return CHARACTER_BYTES * (JOB_CHARACTERS + large)

    def pieces(self, texts: Sequence[str], *, special: bool, prompt: str) -> list[list[TokenPiece]]:
        """The tokens of each text after the prompt, without a limit.

        `special` adds the tokenizer's special tokens. Raises EmptyInput or TokenizerError.
        """
        if not all(texts):
            raise EmptyInput()
        prompted = [prompt + text for text in texts]
        name_of = self._tokenizer.file.id_to_token
        pieces = []
        for chunk in chunks(prompted, len):
            encodings = self._tokenizer.encode(chunk, special=special, fast=False)
            both = zip(chunk, encodings, strict=True)
            pieces += [token_pieces(text, encoding, name_of) for text, encoding in both]
        return pieces

    def term_names(self, ids: Sequence[int]) -> list[str]:
        """The tokens with these ids, as the vocabulary spells them; empty where it has none."""
        return [self._tokenizer.file.id_to_token(one) or "" for one in ids]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids.

        Raises EmptyInput for an empty list, and InvalidInput for an id that is not in the
        vocabulary.
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
        """The number of tokens of a prompt, without a special token at its end.

        sentence-transformers counts them in the same way.
        """
        ((encoding, _),) = self._tokenizer.encode_enough([prompt], self.limit, "right")
        return len(encoding) - encoding.special_tokens_mask[-1]

    def _encode_marked(
        self, inputs: Sequence[Input], rules: Rules, interaction: LateInteraction
    ) -> Iterator[tuple[Encoding, bool]]:
        """Yield the encoding of each text with the marker and the fillers of its role, and whether
        it was cut. Token ids and pairs are refused: a marker must stand in each text."""
        texts: list[Text] = []
        for item in inputs:  # those before the first that is refused may be at fault themselves
            if not isinstance(item, Text):
                break
            texts.append(item)
        limit, marker = self._limit_and_marker(rules, interaction)
        most = limit - (marker is not None)
        prompted = (rules.prompt + text.text for text in texts)
        encodings = self._tokenizer.encode_enough(prompted, most, rules.side)
        expansion = interaction.expansion if rules.role == "query" else None
        place = min(self._around[0], 1)
        for text, (encoding, whole) in zip(texts, encodings, strict=True):
            if not ((text.text or rules.may_be_empty) and len(encoding)):
                raise EmptyInput()
            count = len(encoding)
            if count > most and not rules.truncate:
                raise InputTooLong(limit, limit + count - most if whole else limit + 1, exact=whole)
            ids = self._within(np.array(encoding.ids, np.int32), most, rules.side)
            if marker is not None:
                ids = np.insert(ids, place, np.int32(marker))
            fillers = 0
            if expansion is not None:
                ids, fillers = _filled(ids, expansion)
            yield Encoding(ids, fillers=fillers), count > most
        if len(texts) < len(inputs):
            kind = "pairs" if isinstance(inputs[len(texts)], Pair) else "token ids"
            raise InvalidInput(
                "this model compares texts token by token, and puts a marker into each and fills "
                f"queries up: it takes no {kind}; send texts"
            )

    def _limit_and_marker(
        self, rules: Rules, interaction: LateInteraction
    ) -> tuple[int, int | None]:
        """The most tokens of a text of this role, and the id of its marker. A limit that was
        raised above the model's is for documents."""
        if rules.role == "query":
            return min(interaction.query_length, self.limit), interaction.query_marker
        is_raised = self.limit > self._spec.max_input_tokens
        most = self.limit if is_raised else min(interaction.document_length, self.limit)
        return most, interaction.document_marker

    def _finish(self, text: Text, encoding, whole: bool, rules: Rules) -> tuple[Encoding, bool]:
        """Cut the tokens of a text to the limit. Returns its encoding, and whether it was cut.

        `whole` says whether the whole text was tokenized.
        """
        is_given = bool(text.text) or rules.may_be_empty
        if not self._spec.is_static and not (is_given and len(encoding)):
            raise EmptyInput()  # without special tokens a blank text has no tokens
        count, most = len(rules.prompt) + len(text.text), self._most_characters
        if count > most and self._reads_whole:
            raise InvalidInput(
                f"the text has {count} characters, of at most {most} for a model that cuts "
                "nothing; send it in parts, or set --max-input-length to have it cut"
            )
        is_cut = count > most or len(encoding) > self.limit
        if is_cut and not rules.truncate:
            raise self._too_long(len(encoding), whole and count <= most)
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
        """Whether texts are pooled without their prompt."""
        return bool(rules.prompt) and not self._spec.include_prompt

    def _checked_words(self, ids: np.ndarray) -> np.ndarray:
        """The ids of a text without the one that the model drops. Raises InvalidInput for the token
        that stands for a part of an image."""
        if self._image_id is not None and (ids == self._image_id).any():
            name = self._tokenizer.file.id_to_token(self._image_id)
            raise InvalidInput(
                f"the text has {name!r}, the token that stands for a part of an image; write it "
                "otherwise, and send images as images"
            )
        return ids if self._dropped_id is None else ids[ids != self._dropped_id]

    def _too_long(self, got: int, whole: bool) -> InputTooLong:
        """The error for an input with `got` tokens, exactly if the `whole` input was tokenized."""
        return InputTooLong(self.limit, got if whole else self.limit + 1, exact=whole)

    def _within(self, row: np.ndarray, most: int, side: Side) -> np.ndarray:
        """Cut a text's ids or types to so many on one side; special tokens around it stay."""
        if len(row) <= most:
            return row
        before, after = self._around
        text = cut_tokens(row[before : len(row) - after], most - before - after, side)
        return np.concatenate([row[:before], text, row[len(row) - after :]])

    def _encode_pairs(self, pairs: Sequence[Pair], rules: Rules) -> Iterator[tuple[Encoding, bool]]:
        """Yield the encoding of each pair, and whether it was cut.

        Pairs get no prompts, which are for single texts.
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
        most = min(self.limit, rules.max_second_tokens or self.limit)
        return self._tokenizer.rows(map(self._frame.second, texts), most, rules.side)

    def _pair(self, first_row: Row, second_row: Row, rules: Rules) -> tuple[Encoding, bool]:
        """Join two texts. Returns the encoding of the pair, and whether a text was cut.

        The second text is cut first. The first text is cut only if it alone exceeds the limit, or
        its share of that by the template.
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
        most = room if frame.template is None else int(frame.template.query_share * self.limit)
        short_first = first if length <= room else cut_tokens(first, min(room, most), side)
        ids, types = frame.join(
            short_first, cut_tokens(short_second, room - len(short_first), side)
        )
        if not len(ids):
            raise EmptyInput()
        return Encoding(ids, types), length > room or len(short_second) < len(second)

    def _division(
        self, room: int, around: tuple[str, str], rules: Rules, *, with_query: bool
    ) -> Division:
        """How documents are divided, with the texts `around` each, of which a sequence has room for
        so many tokens. Raises InvalidInput if that is too little, and for documents that are to be
        cut on the left."""
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
        """The windows of one document, which is within the text that is tokenized. Raises
        InvalidInput if it is cut and may not be."""
        around, room = len(division.head) + len(division.tail), division.room
        most = min(rules.max_windows * room, MOST_DIVIDED)
        kept = rules.max_second_tokens or most + 1  # the request itself cuts what is beyond
        ((encoding, whole),) = self._tokenizer.encode_enough(
            [text],
            min(most, kept) + around,
            "right",
            special=False,
            fast=False,
        )
        ids = np.array(encoding.ids, np.int32)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2) - division.start
        inside = (places[:, 1] > 0) & (places[:, 0] < len(document))
        own, places = ids[inside], places[inside].clip(0, len(document))
        is_shortened = len(own) > kept
        found = windows(min(len(own), kept, most), room, division.overlap)
        is_long = min(len(own), kept) > most or len(found) > rules.max_windows
        is_long |= not (whole or is_shortened)
        if is_long and not rules.truncate:
            raise self._too_long(self.limit + 1, whole=False)
        is_cut = is_long or is_shortened
        found = found[: rules.max_windows]
        if len(found) == 1 and not is_cut:
            return Divided([ids], [(0, len(document))], is_cut=False)
        return Divided(
            [np.concatenate([division.head, own[a:b], division.tail]) for a, b in found],
            [(int(places[a, 0]), int(places[b - 1, 1])) for a, b in found],
            is_cut,
        )

    def _encode_ids(self, tokens: Tokens, rules: Rules) -> tuple[Encoding, bool]:
        """The encoding of token ids without a prompt, and whether they were cut.

        No special tokens are added. With `rules.bare_ids` False they must be there, and stay when
        the ids are cut, as with texts.
        """
        if not len(tokens.ids):
            raise EmptyInput()
        if not rules.bare_ids:
            # With a tokenizer that adds none nothing shows whose ids they are: they are refused.
            before, after = self._ids_around
            inner = len(tokens.ids) - len(after)
            ends = list(tokens.ids[: len(before)]), list(tokens.ids[inner:])
            if not (before or after) or inner < len(before) or ends != (before, after):
                raise BareTokenIds(before, after)
        ids = _checked_ids(tokens.ids, self.vocab_size)
        if len(ids) > self.limit and not rules.truncate:
            raise InputTooLong(self.limit, len(ids))
        within = cut_tokens if rules.bare_ids else self._within
        cut = within(ids, self.limit, rules.side)
        cut = self._checked_words(cut)
        fillers = 0
        if self._spec.filled is not None:
            cut, fillers = _filled(cut, self._spec.filled)
        return Encoding(cut, fillers=fillers), len(ids) > self.limit


def _checked_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Convert token ids to int32 `[tokens]`; there must be at least one.

    Raises InvalidInput if an id is not in the vocabulary.
    """
    if isinstance(ids, array):  # without a Python int of each id
        values = np.asarray(ids)
        least, most = int(values.min()), int(values.max())
    else:
        least, most = min(ids), max(ids)
    if least < 0 or most >= vocab_size:  # before int32: they may exceed 64 bits
        bad = least if least < 0 else most
        raise InvalidInput(
            f"token id {bad} is out of range: this model's ids are 0 to {vocab_size - 1}; "
            "ids of another tokenizer (such as tiktoken) must be sent as text"
        )
    return np.array(ids, np.int32)


def _filled(ids: np.ndarray, expansion: Expansion) -> tuple[np.ndarray, int]:
    """The ids filled up to the length, and how many fillers that takes."""
    fillers = max(expansion.length - len(ids), 0)
    return np.concatenate([ids, np.full(fillers, expansion.token_id, np.int32)]), fillers


def characters(item: Input | ChunkedText | str) -> int:
    """The number of characters of a text or an input; a token id counts as four, an image as a
    whole job: of a small file, too, it may take a second."""
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
    """The encodings of all windows of some documents, of which so many were cut."""
    counts = np.array([len(part.rows) for part in parts])
    bounds = np.array([bound for part in parts for bound in part.bounds]).reshape(-1, 2)
    return Tokenized(work_of(encodings), truncated, Windows(counts, bounds))


def _tokenized(parts: Iterable[tuple[Encoding, bool]]) -> Tokenized:
    """Collect the encodings of inputs; each part says whether its input was cut.

    An InvalidInput that is raised meanwhile gets the index of its input.
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
