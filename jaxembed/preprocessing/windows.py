"""Divides long texts into windows, parts that fit the model: documents of reranking requests, and
texts with chunks that are pooled from the hidden states of the whole text (late chunking)."""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from jaxembed.data.inputs import ChunkedText, ChunkSize
from jaxembed.data.spec import DenseLayer, Head
from jaxembed.data.work import Encoding, Span
from jaxembed.errors import EmptyInput, InputTooLong, InvalidChunk, InvalidInput, counted
from jaxembed.preprocessing.tokenizer import MAX_READ_CHARACTERS, Tokenizer, character_offsets

MAX_WINDOWS = 64  # maximum windows of a document
# Minimum tokens of the document in a window: a score of fewer tokens says little of the document.
MIN_WINDOW_TOKENS = 64
LARGEST_DEFAULT_OVERLAP = 80  # tokens, as in BCEmbedding and jina-reranker-v2
MIN_CHUNK = 8  # minimum `chunk_size` in tokens: vectors of shorter chunks say little
# For late chunking: maximum tokens at the start of a window that only serve as context.
LARGEST_CONTEXT = 512
MIN_WINDOW = 16  # for late chunking: minimum tokens of the text in a window
# Maximum tokens of all chunks that do not fit a window, as a multiple of the tokens of the text.
MAX_CHUNK_OVERLAP = 16
WHITE_SPACE = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)


class Windows(msgspec.Struct, frozen=True, eq=False):
    """The windows of some documents, concatenated."""

    counts: np.ndarray  # int64 [documents]: the number of windows of each document, at least 1
    # int64 [windows, 2]: the indices of a window's first character and after its last character
    bounds: np.ndarray


class Division(NamedTuple):
    """How the documents of a request are divided."""

    start: int  # the number of characters that a template or a prompt puts before a document
    head: np.ndarray  # int32: the token ids of these characters
    tail: np.ndarray  # int32: the token ids that the template puts after a document
    room: int  # maximum tokens of the document in a window
    overlap: int  # the number of tokens that neighbouring windows share


class Divided(NamedTuple):
    """One document, divided into windows."""

    rows: list[np.ndarray]  # the ids of each window, with the head and the tail
    bounds: list[tuple[int, int]]  # the first character of each window, and the one after its last
    is_cut: bool  # whether some tokens of the document are in no window


def overlap_of(room: int, overlap: int | None, *, with_query: bool = True) -> int:
    """Return how many tokens neighbouring windows of `room` tokens share.

    This is `overlap`, but at most half a window. If `overlap` is None, it is a quarter of a window,
    but at most LARGEST_DEFAULT_OVERLAP. Raises InvalidInput if `room` is less than
    MIN_WINDOW_TOKENS. `with_query` says whether each window also has a query, for the message.
    """
    if room < MIN_WINDOW_TOKENS:
        what = "the query leaves" if with_query else "the model has"
        how = "shorten the query, or leave" if with_query else "leave"
        raise InvalidInput(
            f"{what} too little room for a document: {max(room, 0)} of the {MIN_WINDOW_TOKENS} "
            f"tokens that a window needs; {how} `max_chunks_per_doc` out",
            field="query" if with_query else "max_chunks_per_doc",
        )
    wanted = min(LARGEST_DEFAULT_OVERLAP, room // 4) if overlap is None else overlap
    return min(wanted, room // 2)


def windows(count: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Return the windows of a document of `count` tokens. A window is the index of its first token
    and the index after its last token.

    A document of at most `room` tokens has one window. In a longer document each window has `room`
    tokens, except the last, which may have fewer. Each window after the first begins with the last
    `overlap` tokens of the window before.
    """
    if count <= room:
        return [(0, count)]
    return [(at, min(at + room, count)) for at in range(0, count - overlap, room - overlap)]


def join_windows(parts: Sequence[Windows | None]) -> Windows | None:
    """Concatenate the windows of all parts of a request, in order. A part is None if its documents
    are not divided, and is then skipped. Returns None if all parts are None."""
    divided = [part for part in parts if part is not None]
    if len(divided) <= 1:
        return divided[0] if divided else None
    return Windows(
        np.concatenate([part.counts for part in divided]),
        np.concatenate([part.bounds for part in divided]),
    )


class PooledChunks(msgspec.Struct, frozen=True, eq=False):
    """The chunks of some texts, concatenated, and the slots of the Work in which they are pooled.

    A chunk that is longer than a window is pooled in several slots.
    """

    counts: np.ndarray  # int64 [texts]: the number of chunks of each text
    bounds: np.ndarray  # int64 [chunks, 2]: start and end of a chunk, in the offset unit of a text
    tokens: np.ndarray  # int64 [texts]: tokens with prompt and special tokens, each counted once
    windows: np.ndarray  # int64 [texts]: the number of windows of each text
    chunk_of_slot: np.ndarray  # int64 [slots]: the index of the chunk that a slot belongs to


NO_CHUNKS = PooledChunks(*(np.zeros(shape, np.int64) for shape in ((0,), (0, 2), (0,), (0,), (0,))))


class ChunkingSetup(NamedTuple):
    """How the texts of a request for late chunking are tokenized and run."""

    tokenizer: Tokenizer
    prompt: str
    around: tuple[int, int]  # the numbers of special tokens before and after a text
    unpooled: int  # the number of tokens at the start that no chunk includes: a prompt, for example
    has_types: bool  # whether the model takes token types
    limit: int  # maximum tokens of a sequence
    slots: int  # maximum ranges that are pooled in a sequence
    truncate: bool  # whether a text over the limit is divided into windows, or else refused
    can_divide: bool  # whether a chunk's vector is the mean of the vectors of its parts


class TokenizedText(NamedTuple):
    """A tokenized text with prompt and special tokens. All other tokens are its own tokens."""

    planes: np.ndarray  # int32 [1 or 2, tokens]: the ids, and the types if the model takes types
    head: int  # the number of tokens before the text: special tokens and prompt
    tail: int  # the number of special tokens after the text
    # int64 [own tokens]: a token's first character that is not white space, ascending
    starts: np.ndarray
    ends: np.ndarray  # int64 [own tokens]: the index after a token's last character


class Piece(NamedTuple):
    """Tokens of a text that are pooled in one slot: a chunk or, if it is too long, a part of it."""

    chunk: int  # the index of the chunk
    start: int  # the index of the first token in the text
    end: int  # the index after the last token


class ChunkWindow(NamedTuple):
    """A range of a text's tokens that become one sequence, and the pieces that it pools."""

    start: int  # the index of the first token in the text
    end: int  # the index after the last token
    pieces: list[Piece]


class ChunkPlaces(NamedTuple):
    """Where the chunks of a text are, in tokens and in offset units."""

    ranges: list[Span]  # for each chunk the index of its first token, and after its last token
    bounds: np.ndarray  # int64 [chunks, 2]: start and end in the text's offset unit
    at_start: np.ndarray  # bool [chunks]: whether the chunk starts where the text starts
    at_end: np.ndarray  # bool [chunks]: whether the chunk ends where the text ends


def is_linear(head: Head) -> bool:
    """Return whether a head maps the mean of vectors to the mean of their outputs, so that a long
    chunk can be pooled in parts."""
    return all(
        isinstance(layer, DenseLayer) and layer.activation == "identity"
        for layer in head.device_modules
    )


def join_texts(texts: Sequence[str]) -> ChunkedText:
    """Join texts to one ChunkedText, in which each text is a chunk. If there is no white space
    between two texts, a space is inserted at the start of the second chunk."""
    parts: list[str] = []
    for text in texts:
        is_separate = not parts or parts[-1][-1:].isspace() or text[:1].isspace()
        parts.append(text if is_separate else f" {text}")
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    return ChunkedText("".join(parts), list(pairwise(ends)))


def encode_chunked(
    texts: Sequence[ChunkedText], late: ChunkingSetup
) -> tuple[list[Encoding], PooledChunks]:
    """Tokenize texts for late chunking. Returns the sequences for the model, and the chunks that
    are pooled in the slots of these sequences.

    If a window has more chunks than a sequence may have slots, there are several sequences of it.
    Raises EmptyInput, InputTooLong, InvalidChunk, InvalidInput or TokenizerError for the first
    invalid text.
    """
    encodings: list[Encoding] = []
    parts: list[PooledChunks] = []
    try:
        for text in texts:
            tokens = _tokenize(text, late)
            places = _places(text, tokens)
            length = tokens.planes.shape[1]
            if length > late.limit and not late.truncate:
                raise InputTooLong(late.limit, length)
            text_windows = _windows(tokens, places, late)
            chunk_of_slot: list[int] = []
            for window in text_windows:
                planes = tokens.planes
                if window.end - window.start < len(tokens.starts):  # the window is not the text
                    start, end = tokens.head + window.start, tokens.head + window.end
                    head, tail = planes[:, : tokens.head], planes[:, length - tokens.tail :]
                    planes = np.concatenate([head, planes[:, start:end], tail], axis=1)
                types = planes[1] if late.has_types else None
                spans: list[Span] = []
                for chunk, start, end in window.pieces:
                    # the indices in the window's sequence of the tokens to pool
                    first, stop = (tokens.head + place - window.start for place in (start, end))
                    # Chunks at the start and at the end of the text include the special tokens
                    # there, and the prompt if it is pooled.
                    if places.at_end[chunk] and end == len(tokens.starts):
                        stop += tokens.tail
                    if places.at_start[chunk] and start == 0:
                        first = min(late.unpooled, stop - 1)
                    spans.append((first, stop))
                encodings += [
                    Encoding(planes[0], types, tuple(spans[at : at + late.slots]))
                    for at in range(0, len(spans), late.slots)
                ]
                chunk_of_slot += [piece.chunk for piece in window.pieces]
            parts.append(
                PooledChunks(
                    counts=np.array([len(places.ranges)]),
                    bounds=places.bounds,
                    tokens=np.array([length]),
                    windows=np.array([len(text_windows)]),
                    chunk_of_slot=np.array(chunk_of_slot, np.int64),
                )
            )
    except InvalidInput as error:
        raise error.at(len(parts)) from error
    return encodings, join_chunked(parts) or NO_CHUNKS


def join_chunked(parts: Sequence[PooledChunks | None]) -> PooledChunks | None:
    """Concatenate the chunks of all parts of a request, in order. Parts that are None are skipped.
    Returns None if all parts are None."""
    chunked = [part for part in parts if part is not None]
    if len(chunked) <= 1:
        return chunked[0] if chunked else None
    # The indices of chunks in each part begin at 0.
    first_chunks = np.cumsum([0, *(len(part.bounds) for part in chunked[:-1])])
    slots = zip(chunked, first_chunks, strict=True)
    return PooledChunks(
        np.concatenate([part.counts for part in chunked]),
        np.concatenate([part.bounds for part in chunked]),
        np.concatenate([part.tokens for part in chunked]),
        np.concatenate([part.windows for part in chunked]),
        np.concatenate([part.chunk_of_slot + first_chunk for part, first_chunk in slots]),
    )


def pool_slots(dense: np.ndarray, bounds: np.ndarray, chunked: PooledChunks) -> np.ndarray:
    """Return the vector of each chunk, float32 `[chunks, width]`: the mean of the vectors of its
    slots, in which a slot counts by its number of tokens.

    `dense` are the vectors of the slots, float32 `[slots, width]`. `bounds`, int `[slots, 2]`, are
    the index of each slot's first token, and the index after its last token. A chunk with one slot
    gets exactly the vector of this slot.
    """
    slot_tokens = (bounds[:, 1] - bounds[:, 0]).astype(np.float64)
    chunk_tokens = np.bincount(chunked.chunk_of_slot, slot_tokens)
    weighted = dense * (slot_tokens / chunk_tokens[chunked.chunk_of_slot])[:, None]
    # Bring the slots of each chunk together.
    order = np.argsort(chunked.chunk_of_slot, kind="stable")
    first_slots = np.searchsorted(chunked.chunk_of_slot[order], np.arange(len(chunk_tokens)))
    return np.add.reduceat(weighted[order], first_slots, axis=0).astype(np.float32)


def plan_windows(ranges: Sequence[Span], count: int, room: int, overlap: int) -> list[ChunkWindow]:
    """Plan windows for a text of `count` tokens, so that each of the token `ranges` is pooled.

    A window has `room` tokens, or fewer at the end of the text. It pools the ranges that end in the
    window and are not pooled yet. The next window starts `overlap` tokens before the first range
    that is not pooled yet, so that this range has some context. A range of more than
    `room - overlap` tokens is pooled in parts, in several windows.
    """
    by_start = sorted(range(len(ranges)), key=lambda chunk: ranges[chunk][0])  # chunk indices
    planned: list[ChunkWindow] = []
    waiting: list[Piece] = []  # the unpooled rests of ranges that begin in earlier windows
    # The first token of a range that is not pooled yet; the number of ranges that begin before the
    # end of the last window.
    first_unpooled = seen = 0
    while waiting or seen < len(by_start):  # plan a window from `start` to `end`
        start = max(first_unpooled - overlap, 0)
        end = min(start + room, count)
        while seen < len(by_start) and ranges[by_start[seen]][0] < end:
            waiting.append(Piece(by_start[seen], *ranges[by_start[seen]]))
            seen += 1
        pieces, still_waiting = [], []
        for piece in waiting:
            if piece.end <= end:
                pieces.append(piece)
            elif piece.end - piece.start > room - overlap:  # too long: pool the part that fits
                pieces.append(Piece(piece.chunk, piece.start, end))
                still_waiting.append(Piece(piece.chunk, end, piece.end))
            else:
                still_waiting.append(piece)
        if pieces:
            planned.append(ChunkWindow(start, end, pieces))
        waiting = still_waiting
        next_starts = [ranges[chunk][0] for chunk in by_start[seen : seen + 1]]
        first_unpooled = min([*(piece.start for piece in waiting), *next_starts], default=count)
    return planned


def _tokenize(text: ChunkedText, late: ChunkingSetup) -> TokenizedText:
    """Tokenize a text with its prompt, and find where its tokens are. Raises EmptyInput for an
    empty text, InvalidInput for a text that is too long to be read, and TokenizerError."""
    if not text.text:
        raise EmptyInput()
    whole = late.prompt + text.text
    if len(whole) > MAX_READ_CHARACTERS:
        raise InvalidInput(
            f"the text has {counted(len(whole), 'character')}, and the limit for a text with "
            f"chunks is {MAX_READ_CHARACTERS}; send it in parts"
        )
    (encoding,) = late.tokenizer.encode([whole], fast=False)
    rows = [encoding.ids, encoding.type_ids] if late.has_types else [encoding.ids]
    before, tail = late.around
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding))
    # The first character of each token that is not special, and the character after its last one.
    bounds = offsets.reshape(-1, 2)[before : len(encoding) - tail]
    # Take the first character that is not white space as the start of a token: depending on the
    # tokenizer, the space between two words belongs to the first, to the second or to no token.
    codes = np.frombuffer(whole.encode("utf-32-le"), "<u4")
    # For each character the index of the next one, or itself, that is not white space.
    first_visible = np.arange(len(codes) + 1)
    first_visible[:-1][np.isin(codes, WHITE_SPACE)] = len(codes)
    first_characters = np.minimum.accumulate(first_visible[::-1])[::-1][bounds[:, 0]]
    starts = np.where(first_characters < bounds[:, 1], first_characters, bounds[:, 0])
    starts = np.maximum.accumulate(starts) - len(late.prompt)
    first_own = int(np.searchsorted(starts, 0))  # index of the first token after the prompt
    return TokenizedText(
        np.array(rows, np.int32),
        before + first_own,
        tail,
        starts[first_own:],
        bounds[first_own:, 1] - len(late.prompt),
    )


def _places(text: ChunkedText, tokens: TokenizedText) -> ChunkPlaces:
    """Find the token ranges and the bounds of a text's chunks. Raises InvalidChunk for a chunk that
    is not a range of the text, is out of order or has no tokens, and InvalidInput if there are no
    chunks, or if the text is white space and has no tokens to divide."""
    offsets = character_offsets(text.text, text.offset_unit)
    if isinstance(text.chunks, ChunkSize):  # divide the text into chunks of this size
        text_tokens = len(tokens.starts)
        if not text_tokens:
            raise InvalidInput("the text has no tokens: it is white space")
        ranges_of_size = windows(text_tokens, text.chunks.tokens, text.chunks.overlap)
        firsts, stops = np.array(ranges_of_size).T
        bounds = np.stack([tokens.starts[firsts], tokens.ends[stops - 1]], axis=1)
        # White space at the ends of the text belongs to the first and the last chunk.
        bounds[0, 0], bounds[-1, 1] = 0, len(offsets) - 1
        bounds = offsets[bounds].astype(np.int64)
        return ChunkPlaces(
            ranges_of_size, bounds, at_start=firsts == 0, at_end=stops == text_tokens
        )
    if not len(text.chunks):
        raise InvalidInput("the text has no chunks")
    size, unit, previous = int(offsets[-1]), text.offset_unit, 0
    for chunk, (start, end) in enumerate(text.chunks):
        if not 0 <= start < end <= size:
            raise InvalidChunk(
                chunk,
                f"of [{start}, {end}] is not a range of its text: expected 0 <= start < end <= "
                f"{size}, in {unit}",
            )
        if start < previous:
            raise InvalidChunk(
                chunk,
                f"of [{start}, {end}] starts before the previous chunk, which starts at "
                f"{previous}; sort the chunks",
            )
        previous = start
    bounds = np.array(text.chunks, np.int64)
    characters = np.searchsorted(offsets, bounds)
    if (splits_character := (offsets[characters] != bounds).any(axis=1)).any():
        chunk = int(np.argmax(splits_character))
        raise InvalidChunk(
            chunk,
            f"of {bounds[chunk].tolist()} starts or ends within a character in {unit}",
        )
    # A token belongs to the chunks in which it starts.
    ranges = np.searchsorted(tokens.starts, characters)
    if not (has_tokens := ranges[:, 0] < ranges[:, 1]).all():
        raise InvalidChunk(int(np.argmin(has_tokens)), "has no tokens: it is empty or white space")
    return ChunkPlaces(
        [(start, end) for start, end in ranges.tolist()],
        bounds,
        at_start=bounds[:, 0] == 0,
        at_end=bounds[:, 1] == offsets[-1],
    )


def _windows(tokens: TokenizedText, places: ChunkPlaces, late: ChunkingSetup) -> list[ChunkWindow]:
    """Divide a text into windows. A text within the limit has one window.

    Raises InvalidInput if the prompt leaves too little room for windows, or if chunks that do not
    fit a window overlap too much. Raises InvalidChunk for a chunk that does not fit a window if the
    model cannot pool it in parts.
    """
    room, text_tokens = late.limit - tokens.head - tokens.tail, len(tokens.starts)
    if text_tokens <= room:
        pieces = [Piece(chunk, *token_range) for chunk, token_range in enumerate(places.ranges)]
        return [ChunkWindow(start=0, end=text_tokens, pieces=pieces)]
    if room < MIN_WINDOW:
        raise InvalidInput(
            f"the prompt leaves too little room for the text: {max(room, 0)} of the {MIN_WINDOW} "
            "tokens that a window needs; shorten the prompt or the text"
        )
    overlap = min(LARGEST_CONTEXT, room // 4)
    # Limit the number of pieces into which overlapping long chunks are divided.
    long_tokens = sum(end - start for start, end in places.ranges if end - start > room - overlap)
    if long_tokens > MAX_CHUNK_OVERLAP * text_tokens:
        raise InvalidInput(
            f"the chunks of more than {room - overlap} tokens, which do not fit a window, have "
            f"{long_tokens} tokens together; the limit is {MAX_CHUNK_OVERLAP} times the "
            f"{text_tokens} tokens of the text: send fewer of them"
        )
    planned = plan_windows(places.ranges, text_tokens, room, overlap)
    for piece in chain.from_iterable(window.pieces for window in planned):
        start, end = places.ranges[piece.chunk]
        if not late.can_divide and end - start > piece.end - piece.start:
            raise InvalidChunk(
                piece.chunk,
                f"has {end - start} tokens, and a window has room for {room - overlap}; it cannot "
                "be pooled in parts, because a layer after this model's pooling is not linear: "
                "send smaller chunks",
            )
    return planned
