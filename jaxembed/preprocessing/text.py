"""Tokenizes the inputs of requests: adds prompts and special tokens, joins pairs, truncates."""

import os
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from jaxembed.config import TextConfig
from jaxembed.data.inputs import (
    ChunkedText,
    Content,
    Image,
    Input,
    Pair,
    Text,
    Tokens,
    parts_of,
)
from jaxembed.data.spec import NO_LIMIT, Expansion, LateInteraction, ModelSpec
from jaxembed.data.work import Encoding, Work, whole_work, work_from_encodings
from jaxembed.errors import (
    BareTokenIds,
    ConfigError,
    EmptyInput,
    InputTooLong,
    InvalidInput,
    counted,
)
from jaxembed.preprocessing.job_threads import JobThreads
from jaxembed.preprocessing.listwise import ListTokenizer
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

# Bytes of memory that /tokenize needs per character of a text. Measured maxima: 1719 for one text
# of emojis with byte-level BPE, 1005 for Chinese with WordPiece, and 1000 for many texts while
# their tokens are written as JSON. Only a ligature that XLM-R decomposes (U+FDFA) needs more: 3628.
PIECE_BYTES = 1800
# Bytes of memory that /decode needs per token id, measured for the longest token of all
# vocabularies, ModernBERT's token of 512 characters. Ordinary tokens need 5 to 70 bytes.
DECODED_BYTES = 1600
# Maximum tokens of a document that is divided into windows: so many that MAX_READ_CHARACTERS
# characters are sure to contain them.
MAX_DIVIDED_TOKENS = MAX_READ_CHARACTERS // (2 * FIRST_CUT) - CUT_MARGIN
Row = tuple[np.ndarray, bool]  # the token ids of a text, and whether the whole text was read


class Tokenized(msgspec.Struct, frozen=True, eq=False):
    """The encodings of some inputs, in order, and the number of inputs that were truncated."""

    work: Work
    truncated: int
    windows: Windows | None = None  # where the windows are, if documents were divided
    chunked: PooledChunks | None = None  # where the chunks are, if each chunk gets a vector
    # int32 [tokens, 2]: the first character of each token in its text, and the character after its
    # last; -1 for special tokens. None unless they were asked for.
    offsets: np.ndarray | None = None


PROMPT_CHARACTERS = 16  # for each token that a prompt in a request may have


class TokenizationOptions(msgspec.Struct, frozen=True):
    """How the inputs of a request are tokenized.

    `prompt` is put before each text. Inputs over the limit lose tokens from `side`, or are refused
    if `truncate` is False. For pairs, `instruction` is the instruction of the template, and
    `max_second_tokens` is the limit for the second text. A document is divided into at most
    `max_windows` windows, or truncated if `max_windows` is 1; for a chunked text the number is only
    used to estimate its tokens. If `bare_ids` is False, token ids must begin and end with the
    tokenizer's special tokens. `role` is used by multi-vector models, which prepare an input
    without a role as a document. If `may_be_empty` is True, an empty text becomes the special
    tokens alone; if it is False, an empty text is refused. If `has_special_names` is False, the
    name of a special token in a prompt or a text is plain text.
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
    has_special_names: bool = True


class TextProcessor:
    """Turns a model's inputs (texts, pairs, token ids) into encodings. All threads share it."""

    def __init__(self, path: Path, spec: ModelSpec, limit: int, config: TextConfig, workers: int):
        """Read the tokenizer at `path`.

        `limit` is the maximum number of tokens of an encoding. `executor` gets `workers` threads
        for small texts, and as many for large texts. Raises CheckpointError if the file or the
        template for pairs is damaged, and UnsupportedModel if a reranker's tokenizer joins pairs in
        an unknown way. Raises ConfigError if the default prompt does not exist, if the limit leaves
        no room for text, or if the limit does not fit the length to which the model pads texts or
        extends queries.
        """
        self.limit = limit
        self.vocab_size = int(spec.config["vocab_size"])
        self._spec = spec
        self._tokenizer = Tokenizer(path)
        sample = self._tokenizer.encode(["a"], fast=False)[0]
        text_at = [k for k, special in enumerate(sample.special_tokens_mask) if not special]
        # If the tokenizer has no token for the sample, assume that it adds no special tokens.
        before, after = (text_at[0], len(sample) - 1 - text_at[-1]) if text_at else (0, 0)
        self._around = before, after  # numbers of special tokens before and after a text
        # the ids of these tokens
        self.ids_around = sample.ids[:before], sample.ids[len(sample) - after :]
        words = self._tokenizer.short_ids("a a") or []
        (whole,) = self._tokenizer.encode(["a a"], fast=False)
        # whether the tokenizer looks short texts up, and only puts special tokens around them
        self._finds_short = whole.ids == [*self.ids_around[0], *words, *self.ids_around[1]]
        # Some tokenizers, such as XLM-R's, give pairs two types although the backbone has only one.
        has_types = spec.token_types and spec.config.get("type_vocab_size", 0) > 1
        self._has_types = has_types and any(sample.type_ids)
        self._dropped_id = spec.config.get("dropped_id")
        # the ids of tokens that stand for parts of images, and how many of each a text may have
        parts = {spec.image and spec.image.token_id, spec.config.get("blank_id")} - {None}
        self._image_parts = {part: self.ids_around[0].count(part) for part in parts}
        # CLIP pools the state of the first end token, even if a text spells it
        ends_early = spec.architecture == "clip" and spec.pooling == ("lasttoken",)
        self._end_id = self.ids_around[1][-1] if ends_early and after else None
        special_ids = {self._dropped_id, *parts, self._end_id}
        self._special_ids = special_ids - {None}  # see `checked_text_ids`
        self._reads_whole = limit == NO_LIMIT  # the model reads whole texts and truncates none
        per_token = spec.config.get("characters_per_token")
        self._max_characters = sys.maxsize if per_token is None else per_token * limit
        if self._reads_whole:
            self._max_characters = MAX_READ_CHARACTERS
        expansion = spec.interaction and spec.interaction.expansion
        # The length in tokens that augmentation tokens extend texts and queries to; 0: no extension
        self._length_to_fill = 0 if spec.filled is None else spec.filled.length
        self._length_of_query = self._length_to_fill if expansion is None else expansion.length
        self._needs_only_ids = spec.template is None and spec.filled is None and not self._has_types
        has_pairs = not spec.is_static and spec.listwise is None
        self._pair_frame = (
            find_frame(self._tokenizer, spec, with_types=has_types) if has_pairs else None
        )
        self._lists = spec.listwise and ListTokenizer(self._tokenizer, spec.listwise, limit)
        # Refuse a limit that leaves no room beside the special tokens.
        reserved = before + after
        if spec.task == "rerank" and self._pair_frame is not None:
            reserved = max(reserved, self._pair_frame.reserved)
        if self._lists is not None:
            reserved = self._lists.reserved
        self._check_limit(reserved)
        self._default_prompt = default_prompt(config, spec)
        self.default_prompt_name = default_prompt_name(config, spec)
        # Jobs of `executor` run in parallel, so further threads within each job would only compete.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.executor = JobThreads(workers, "tokenize")
        self._count = lru_cache(maxsize=64)(self._count_prompt)

    def _check_limit(self, reserved: int) -> None:
        """Raise ConfigError if the limit leaves no room for text beside `reserved` tokens, or does
        not fit the length to which the model pads texts or extends queries."""
        spec, limit = self._spec, self.limit
        expansion = spec.interaction and spec.interaction.expansion
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
                f"--max-input-length is {limit}, which leaves no room for text beside the tokens "
                f"that the model needs ({reserved})"
            )

    def prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """Return the text to put before each input: `prompt` if it is given, else the prompt with
        the name `prompt_name`, else the default prompt. Raises UnknownPrompt if the checkpoint has
        no prompt with the name. In a model with a chat template, this is the text before each
        input, and an empty prompt becomes the default one."""
        if prompt is None and prompt_name is not None:
            prompt = named_prompt(prompt_name, self._spec.prompts)
        chat = self._spec.chat
        if prompt is None or (chat is not None and not prompt):
            prompt = self._default_prompt
        return prompt if chat is None else chat.before.replace("{prompt}", prompt)

    def check_prompt(self, prompt: str, max_tokens: int | None, field: str) -> bool:
        """Return whether a prompt that a request sends in words contains the name of a special
        token. Raises InvalidInput, which names the request field, for one over `max_tokens` or half
        of the limit of an input, which must leave room for the text."""
        has_names = any(name in prompt for name in self._special_names)
        if has_names and self._spec.chat is not None:
            raise InvalidInput(
                f"`{field}` contains the name of a special token, which would end the system "
                "message of this model; leave the name out",
                field=field,
            )
        tokenizer = self._tokenizer.of_plain_text if has_names else self._tokenizer
        if max_tokens is not None:
            max_tokens = min(max_tokens, self.limit // 2)
            # every text is tokenized with it, and white space has no tokens in some models
            is_long = len(prompt) > PROMPT_CHARACTERS * max_tokens
            if is_long or self._count(tokenizer, prompt) - self._around[0] > max_tokens:
                raise InvalidInput(
                    f"`{field}` has more than {counted(max_tokens, 'token')}, the limit of "
                    "--max-instruction-tokens or half of that of an input, or more than "
                    f"{PROMPT_CHARACTERS} characters for each; shorten it",
                    field=field,
                )
        return has_names

    @cached_property
    def _special_names(self) -> list[str]:
        added = self._tokenizer.file.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def _tokenizer_of(self, tokenization: TokenizationOptions) -> Tokenizer:
        usual = tokenization.has_special_names
        return self._tokenizer if usual else self._tokenizer.of_plain_text

    def encode(self, inputs: Sequence[Input], tokenization: TokenizationOptions) -> Tokenized:
        """Tokenize inputs in the calling thread, mostly without the interpreter lock.

        Raises EmptyInput, InputTooLong, InvalidInput or TokenizerError for the first invalid input.
        """
        if self._spec.interaction is not None:
            return _tokenized(self._encode_marked(inputs, tokenization, self._spec.interaction))
        texts = [item for item in inputs if isinstance(item, Text)]
        max_characters = self._max_characters
        empty = self._spec.chat.empty if self._spec.chat else ""
        prompted = [tokenization.prompt + (text.text or empty) for text in texts]
        is_cut = max(map(len, prompted), default=0) > max_characters
        if is_cut:
            is_right = tokenization.side == "right"
            cut = slice(0, max_characters) if is_right else slice(-max_characters, None)
            prompted = [text[cut] for text in prompted]
        has_spans = self._has_spans(tokenization)
        is_ids_only = self._needs_only_ids and not has_spans and len(texts) == len(inputs)
        is_usual = tokenization.has_special_names and self._finds_short
        is_short = is_usual and len(texts) == 1 and bool(texts[0].text) and not is_cut
        if is_ids_only and is_short:
            row = self._short_row(prompted[0])
            if row is not None:
                return Tokenized(whole_work({"ids": row}, np.array([len(row)], np.int32)), 0)
        encoded = zip(
            texts,
            self._tokenizer_of(tokenization).encode_enough(prompted, self.limit, tokenization.side),
            strict=True,
        )
        if is_ids_only:
            # Without token types and spans it is faster to make one array of the ids of all texts.
            special_ids, max_length = self._special_ids, max_characters - len(tokenization.prompt)
            rows: list[list[int]] = []
            truncated = 0
            try:
                for text, (encoding, left_out) in encoded:
                    row = encoding.ids
                    # Texts that are empty, too long or contain special ids need `_finish`.
                    is_usual = 0 < len(row) <= self.limit and 0 < len(text.text) <= max_length
                    if not is_usual or (special_ids and not special_ids.isdisjoint(row)):
                        finished, was_cut = self._finish(text, encoding, not left_out, tokenization)
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
                    text, (encoding, left_out) = next(encoded)
                    yield self._finish(text, encoding, not left_out, tokenization)

        return _tokenized(encodings())

    def encode_with_offsets(
        self, texts: Sequence[Text], tokenization: TokenizationOptions
    ) -> Tokenized:
        """Tokenize texts as `encode` does, and find the offsets of their tokens. Raises EmptyInput,
        InputTooLong, InvalidInput or TokenizerError for the first invalid text."""
        side, offsets = tokenization.side, [np.zeros((0, 2), np.int32)]
        plain = [text.text for text in texts]
        encoded = self._tokenizer.encode_enough(plain, self.limit, side, fast=False)

        def encodings() -> Iterator[tuple[Encoding, bool]]:
            for text, (encoding, left_out) in zip(texts, encoded, strict=True):
                yield self._finish(text, encoding, not left_out, tokenization)
                places = np.array(encoding.offsets, np.int32).reshape(-1, 2)
                if side == "left":
                    places += left_out
                places[np.array(encoding.special_tokens_mask, bool)] = -1
                offsets.append(self._within(places, self.limit, side))

        tokenized = _tokenized(encodings())
        return msgspec.structs.replace(tokenized, offsets=np.concatenate(offsets))

    def _short_row(self, text: str) -> np.ndarray | None:
        """Return the token ids of a text with its special tokens, int32 `[tokens]`, if they are
        quickly found and need none of the steps of `_finish`; else None. Raises TokenizerError."""
        ids = self._tokenizer.short_ids(text)
        if not ids:
            return None
        before, after = self.ids_around
        row = [*before, *ids, *after]
        is_usual = len(row) <= self.limit and self._special_ids.isdisjoint(row)
        return np.array(row, np.int32) if is_usual else None

    def tokenize_query(self, query: str, tokenization: TokenizationOptions) -> Row:
        """Tokenize a query once, for use in several calls of `encode_pairs_of_query`.

        Raises InvalidInput if the model takes no pairs or if the words of the query are too long,
        and TokenizerError if the tokenizer refuses the query.
        """
        first = self._frame.first(query, tokenization.instruction)
        (row,) = self._tokenizer.rows([first], self.limit, tokenization.side)
        return row

    def encode_pairs_of_query(
        self, query: Row, documents: Sequence[str], tokenization: TokenizationOptions
    ) -> Tokenized:
        """Tokenize a pair of the query and each document. `query` is a result of `tokenize_query`,
        which several threads may share. If `max_windows` is over 1, long documents are divided into
        windows. Raises EmptyInput, InputTooLong, InvalidInput or TokenizerError."""
        if tokenization.max_windows == 1:
            seconds = self._second_rows(documents, tokenization)
            return _tokenized(self._pair(query, second, tokenization) for second in seconds)
        frame = self._frame
        room = self.limit - frame.length - len(query[0])
        division = self._division(room, frame.around_second, tokenization, with_query=True)

        def divided() -> Iterator[tuple[Divided, list[Encoding]]]:
            for document in documents:
                part = self._divide(document, frame.second(document), division, tokenization)
                # query[1] is False if not all of the query was read: every pair is truncated then.
                part = part._replace(is_cut=part.is_cut or not query[1])
                yield part, [Encoding(*frame.join(query[0], row)) for row in part.rows]

        return _in_windows(divided())

    def encode_list(
        self, query: str, documents: Sequence[str], tokenization: TokenizationOptions, slots: int
    ) -> Tokenized:
        """Tokenize a query with documents that the model reads together, as `ListTokenizer.encode`
        does."""
        assert self._lists is not None
        encodings, truncated = self._lists.encode(query, documents, tokenization, slots)
        return Tokenized(work_from_encodings(encodings), truncated)

    def encode_documents(
        self, documents: Sequence[Text], tokenization: TokenizationOptions
    ) -> Tokenized:
        """Tokenize documents whose vectors will be compared with the vectors of a query. If
        `max_windows` is over 1, long documents are divided into windows. Raises EmptyInput,
        InputTooLong, TokenizerError, and InvalidInput, also if the documents of this model cannot
        be divided."""
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
        before, after = (np.array(ids, np.int32) for ids in self.ids_around)
        if marker is not None:
            before = np.insert(before, min(len(before), 1), np.int32(marker))
        prompt = tokenization.prompt
        room = limit - len(before) - len(after)
        division = self._division(room, (prompt, ""), tokenization, with_query=False)
        has_spans = self._has_spans(tokenization)

        def encoding(document: Text, row: np.ndarray) -> Encoding:
            ids = np.concatenate([before, row, after])
            self._refuse_empty(document, len(ids), tokenization)
            ids = self.checked_text_ids(ids)
            # Pool the tokens after the prompt, and at least the last token.
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
        """Tokenize texts whose chunks are pooled one by one, with at most `slots` chunks in a
        sequence. A text over the limit is divided into windows, or refused if `truncate` is False.
        Raises EmptyInput, InputTooLong, InvalidChunk, InvalidInput or TokenizerError."""
        has_spans = self._has_spans(tokenization)
        late = ChunkingSetup(
            self._tokenizer_of(tokenization),
            tokenization.prompt,
            self._around,
            unpooled=self._prompt_length(tokenization) if has_spans else 0,
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
        """Estimate the numbers of sequences and of tokens of inputs that are not tokenized yet. The
        estimate for an input with its prompt or instruction is a token for each 4 characters plus 2
        tokens, at most `limit` tokens for each of `max_windows` windows, and at least the length
        that the model extends inputs to. The inputs of a model that reads documents together are
        the query and its documents."""
        if self._lists is not None:
            return self._lists.estimate(list(map(characters, inputs)), tokenization)
        max_tokens = self.limit * tokenization.max_windows
        min_tokens = self._length_of_query if tokenization.role == "query" else self._length_to_fill
        more = len(tokenization.prompt) + len(tokenization.instruction or "") + 8
        tokens = sum(
            max(min((characters(item) + more) // 4, max_tokens), min_tokens) for item in inputs
        )
        return max(len(inputs), tokens // self.limit), tokens

    @property
    def job_bytes(self) -> int:
        """The peak memory in bytes of two threads that run `encode`, one of small texts and one of
        large texts."""
        large = MAX_READ_CHARACTERS if self._reads_whole else max_read_characters(self.limit)
        return CHARACTER_BYTES * (JOB_CHARACTERS + large)

    def pieces(self, texts: Sequence[str], *, special: bool, prompt: str) -> list[list[TokenPiece]]:
        """Return all tokens of each text, with the prompt before it, as /tokenize shows them.

        `special` adds the tokenizer's special tokens. Raises EmptyInput for an empty text, and
        TokenizerError if the tokenizer refuses a text.
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
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which says how tokens are spelled and which of them form a word."""
        return self._tokenizer

    @property
    def template_frame(self) -> Frame | None:
        """What surrounds the texts of a pair, if the model has a template for pairs."""
        return None if self._spec.template is None else self._pair_frame

    def rows(self, texts: Sequence[str], tokenization: TokenizationOptions) -> Iterator[Row]:
        """Tokenize texts without prompt and special tokens, as far as the limit needs. Raises
        InvalidInput or TokenizerError."""
        tokenizer = self._tokenizer_of(tokenization)
        return tokenizer.rows(texts, self.limit, tokenization.side)

    @property
    def _frame(self) -> Frame:
        """What surrounds the texts of a pair. Raises InvalidInput if the model takes no pairs."""
        if self._pair_frame is None:
            raise InvalidInput("this model takes no pairs: its tokenizer's template is not known")
        return self._pair_frame

    def _prompt_length(self, tokenization: TokenizationOptions) -> int:
        return self._count(self._tokenizer_of(tokenization), tokenization.prompt)

    def _count_prompt(self, tokenizer: Tokenizer, prompt: str) -> int:
        """Count the tokens of a prompt as sentence-transformers does: a special token at the end
        does not count."""
        ((encoding, _),) = tokenizer.encode_enough([prompt], self.limit, "right")
        return len(encoding) - encoding.special_tokens_mask[-1]

    def _encode_marked(
        self,
        inputs: Sequence[Input],
        tokenization: TokenizationOptions,
        interaction: LateInteraction,
    ) -> Iterator[tuple[Encoding, bool]]:
        """Yield for each text its encoding, with the marker and the augmentation tokens of the role
        (query or document), and whether the text was truncated.

        Raises EmptyInput, InputTooLong or TokenizerError, and InvalidInput for token ids and pairs,
        in which no marker can be inserted.
        """
        texts: list[Text] = []
        # Take the texts up to the first input of another kind. If one of these texts has an error,
        # that error is raised, and not the error for the other kind.
        for item in inputs:
            if not isinstance(item, Text):
                break
            texts.append(item)
        limit, marker = self._limit_and_marker(tokenization, interaction)
        room = limit - (marker is not None)
        prompted = (tokenization.prompt + text.text for text in texts)
        encodings = self._tokenizer_of(tokenization).encode_enough(
            prompted, room, tokenization.side
        )
        expansion = interaction.expansion if tokenization.role == "query" else None
        marker_index = min(self._around[0], 1)  # after the first special token, such as [CLS]
        for text, (encoding, left_out) in zip(texts, encodings, strict=True):
            self._refuse_empty(text, len(encoding), tokenization)
            count = len(encoding)
            if count > room and not tokenization.truncate:
                # `limit - room` is the number of markers, which `count` does not include.
                got = limit + 1 if left_out else limit + count - room
                raise InputTooLong(limit, got, exact=not left_out)
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
        """Return the maximum tokens of a text of the role in `tokenization`, and the id of the
        role's marker or None. If `self.limit` was raised above the model's own limit, it replaces
        `document_length`, but not `query_length`."""
        if tokenization.role == "query":
            return min(interaction.query_length, self.limit), interaction.query_marker
        is_raised = self.limit > self._spec.max_input_tokens
        max_tokens = self.limit if is_raised else min(interaction.document_length, self.limit)
        return max_tokens, interaction.document_marker

    def _finish(
        self, text: Text, encoding, whole: bool, tokenization: TokenizationOptions
    ) -> tuple[Encoding, bool]:
        """Truncate a tokenized text to the limit. Returns the Encoding for the model, and whether
        the text was truncated. `encoding` is a tokenizers.Encoding, of the whole text if `whole`
        is True, else of a part that is long enough.

        Raises EmptyInput, InputTooLong or InvalidInput.
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
        if is_cut and tokenization.side == "left" and self._spec.chat is not None:
            raise InvalidInput(
                f"the input has more than {self.limit} tokens, and a text in the chat template of "
                "this model is truncated only at its end: shorten it, or truncate on the right"
            )
        ids = self._within(np.array(encoding.ids, np.int32), self.limit, tokenization.side)
        ids = self.checked_text_ids(ids)
        types = spans = None
        if self._has_types:
            types = np.array(encoding.type_ids, np.int32)
            types = self._within(types, self.limit, tokenization.side)
        if self._has_spans(tokenization):
            # Pool the tokens after the prompt, and at least the last token.
            spans = ((min(self._prompt_length(tokenization), len(ids) - 1), len(ids)),)
        ids, augmentation_tokens = _augmented(ids, self._spec.filled)
        return Encoding(ids, types, spans, augmentation_tokens), is_cut

    def _refuse_empty(
        self, text: Text, token_count: int, tokenization: TokenizationOptions
    ) -> None:
        """Raise EmptyInput for a text that is empty or has no tokens, unless the model is static.
        With `may_be_empty` an empty text is allowed if special tokens make it a sequence."""
        is_given = bool(text.text) or tokenization.may_be_empty
        if not self._spec.is_static and not (is_given and token_count):
            raise EmptyInput()

    def _has_spans(self, tokenization: TokenizationOptions) -> bool:
        """Return whether texts are pooled without their prompt."""
        return bool(tokenization.prompt) and not self._spec.include_prompt

    def checked_text_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a text without the id that the model drops (`dropped_id`), and without
        what follows the end token of CLIP. Raises InvalidInput if the text contains the token that
        stands for a part of an image."""
        for part, allowed in self._image_parts.items():
            if (count := np.count_nonzero(ids == part)) and count != allowed:
                name = self._tokenizer.file.id_to_token(part)
                raise InvalidInput(
                    f"the text contains {name!r}, the token that stands for a part of an image; "
                    "spell it in another way, and send images as images"
                )
        if self._end_id is not None and (ends := np.flatnonzero(ids == self._end_id)).size:
            ids = ids[: ends[0] + 1]
        return ids if self._dropped_id is None else ids[ids != self._dropped_id]

    def _too_long(self, got: int, whole: bool) -> InputTooLong:
        """Return the error for an input that is too long. If the `whole` input was tokenized, the
        error gives its number of tokens, `got`; else it says that there are more than the limit."""
        return InputTooLong(self.limit, got if whole else self.limit + 1, exact=whole)

    def _within(self, row: np.ndarray, max_tokens: int, side: Side) -> np.ndarray:
        """Truncate the ids, the token types or the offsets of a text on one side, but keep the
        special tokens around it."""
        if len(row) <= max_tokens:
            return row
        before, after = self._around
        text = cut_tokens(row[before : len(row) - after], max_tokens - before - after, side)
        return np.concatenate([row[:before], text, row[len(row) - after :]])

    def _encode_pairs(
        self, pairs: Sequence[Pair], tokenization: TokenizationOptions
    ) -> Iterator[tuple[Encoding, bool]]:
        """Yield for each pair its encoding, and whether it was truncated.

        Pairs get no prompts, which are for single texts. Raises EmptyInput if both texts are empty,
        InputTooLong if a pair must be truncated but `truncate` is False, and TokenizerError.
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
        """Tokenize the second texts of pairs. A long text is only read until it has as many tokens
        as the limit and `max_second_tokens` allow."""
        max_tokens = min(self.limit, tokenization.max_second_tokens or self.limit)
        return self._tokenizer.rows(map(self._frame.second, texts), max_tokens, tokenization.side)

    def _pair(
        self, first_row: Row, second_row: Row, tokenization: TokenizationOptions
    ) -> tuple[Encoding, bool]:
        """Join two tokenized texts. Returns the pair's encoding, and whether a text was truncated.

        If the pair is over the limit, the first text may take all tokens of the limit that the
        special tokens and the template leave, or the share of the limit that the template gives to
        queries if that is less. The second text is truncated to the remaining tokens. Raises
        InputTooLong if the pair is over the limit and `truncate` is False, or if special tokens and
        template alone are over the limit, and EmptyInput if the pair has no tokens.
        """
        frame, side = self._frame, tokenization.side
        (first, first_whole), (second, second_whole) = first_row, second_row
        room = self.limit - frame.length
        short_second = second
        if tokenization.max_second_tokens is not None:
            short_second = frame.cut_second(second, tokenization.max_second_tokens, side)
        length = len(first) + len(short_second)
        if length > room and (not tokenization.truncate or room < 0):
            second_exact = second_whole or len(short_second) < len(second)
            raise self._too_long(length + frame.length, first_whole and second_exact)
        max_first = room if frame.template is None else int(frame.template.query_share * self.limit)
        if frame.template is not None and max_first >= room:  # a long template; see `query_share`
            max_first = int(frame.template.query_share * room)
        max_first = min(room - len(frame.second_end), max_first)
        short_first = first if length <= room else cut_tokens(first, max_first, side)
        ids, types = frame.join(
            short_first, frame.cut_second(short_second, room - len(short_first), side)
        )
        if not len(ids):
            raise EmptyInput()
        ids = self.checked_text_ids(ids)
        return Encoding(ids, types), length > room or len(short_second) < len(second)

    def _division(
        self,
        room: int,
        around: tuple[str, str],
        tokenization: TokenizationOptions,
        *,
        with_query: bool,
    ) -> Division:
        """Return how documents are divided into windows.

        `around` are the texts that a prompt or a template puts before and after a document. `room`
        is the number of tokens in a window for these texts and a part of the document.
        `with_query` says whether each window also has a query, for the message. Raises InvalidInput
        if there is too little room for the document, or if `side` is "left".
        """
        if tokenization.side == "left":
            raise InvalidInput(
                "a document that is divided into windows cannot be truncated on the left; leave "
                "`truncation_direction` out",
                field="truncation_direction",
            )
        before, after = around
        # "a" is a sample document: head and tail are the tokens before and after it.
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
        """Return the windows of one document. `text` is the document within its prompt or template,
        which is tokenized as one text.

        Raises InputTooLong if the whole document does not fit into `max_windows` windows and
        `truncate` is False.
        """
        around_tokens, room = len(division.head) + len(division.tail), division.room
        max_tokens = min(tokenization.max_windows * room, MAX_DIVIDED_TOKENS)
        # Without `max_second_tokens` use one token more than fits, to see whether that is too long.
        max_used = tokenization.max_second_tokens or max_tokens + 1
        ((encoding, left_out),) = self._tokenizer.encode_enough(
            [text],
            min(max_tokens, max_used) + around_tokens,
            "right",
            special=False,
            fast=False,
        )
        ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) - division.start
        # The tokens that contain a character of the document.
        inside = (offsets[:, 1] > 0) & (offsets[:, 0] < len(document))
        doc_ids, offsets = ids[inside], offsets[inside].clip(0, len(document))
        is_shortened = len(doc_ids) > max_used  # the request asks for that by `max_second_tokens`
        bounds = windows(min(len(doc_ids), max_used, max_tokens), room, division.overlap)
        is_long = min(len(doc_ids), max_used) > max_tokens or len(bounds) > tokenization.max_windows
        is_long |= bool(left_out) and not is_shortened  # the rest of the document was not read
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

        Prompts and special tokens are not added. If the ids begin and end with the special tokens
        of the tokenizer, as they must if `bare_ids` is False, truncating keeps these. Raises
        EmptyInput, BareTokenIds, InputTooLong, and InvalidInput for an id that is not in the
        vocabulary or that stands for a part of an image.
        """
        if not len(tokens.ids):
            raise EmptyInput()
        before, after = self.ids_around
        after_start = len(tokens.ids) - len(after)
        ends = list(tokens.ids[: len(before)]), list(tokens.ids[after_start:])
        is_whole = after_start >= len(before) and ends == (before, after)
        # The special tokens show that the ids come from this model's tokenizer. If it has none,
        # nothing shows that: refuse all ids.
        if not tokenization.bare_ids and not (is_whole and (before or after)):
            raise BareTokenIds(before, after)
        ids = _checked_ids(tokens.ids, self.vocab_size)
        if len(ids) > self.limit and not tokenization.truncate:
            raise InputTooLong(self.limit, len(ids))
        truncate_ids = self._within if is_whole else cut_tokens
        kept = self.checked_text_ids(truncate_ids(ids, self.limit, tokenization.side))
        kept_ids, augmentation_tokens = _augmented(kept, self._spec.filled)
        return Encoding(kept_ids, augmentation_tokens=augmentation_tokens), len(ids) > self.limit


def _checked_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Convert one or more token ids to int32 `[tokens]`.

    Raises InvalidInput if an id is not in the vocabulary.
    """
    if isinstance(ids, array):  # numpy reads an array faster, because it needs no Python ints
        values = np.asarray(ids)
        lowest, highest = int(values.min()), int(values.max())
    else:
        lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:  # check this before the conversion, which may overflow
        bad = lowest if lowest < 0 else highest
        raise InvalidInput(
            f"token id {bad} is out of range: this model's ids are 0 to {vocab_size - 1}; "
            "ids of another tokenizer (such as tiktoken) must be sent as text"
        )
    return np.array(ids, np.int32)


def _augmented(ids: np.ndarray, expansion: Expansion | None) -> tuple[np.ndarray, int]:
    """Append augmentation tokens to `ids` up to expansion.length, unless `expansion` is None.
    Returns the ids, and the number of augmentation tokens."""
    if expansion is None:
        return ids, 0
    added = max(expansion.length - len(ids), 0)
    return np.concatenate([ids, np.full(added, expansion.token_id, np.int32)]), added


def characters(item: Input | ChunkedText | Content) -> int:
    """Return the number of characters of a text or an input, by which inputs are divided into jobs.
    A token id counts as four characters. An image counts as JOB_CHARACTERS, a whole job, because
    even a small file may take a second."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Text | ChunkedText):
        return len(item.text)
    if isinstance(item, Tokens):
        return 4 * len(item.ids)
    return sum(JOB_CHARACTERS if isinstance(p, Image) else len(p) for p in parts_of(item))


def _in_windows(documents: Iterable[tuple[Divided, list[Encoding]]]) -> Tokenized:
    """Collect divided documents. Each item is one document, and the encodings of its windows.

    If the iteration raises an InvalidInput, the index of the document is added to the error.
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
    """Collect encodings of inputs. Each part is an encoding, and whether its input was truncated.

    If the iteration raises an InvalidInput, the index of the input is added to the error.
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
