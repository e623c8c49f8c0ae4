"""Divides long texts into windows: documents that are scored or compared, and texts whose chunks
are pooled one by one from the hidden states of the whole text (late chunking). Runs nothing."""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from jaxembed.data.inputs import ChunkedText, ChunkSize
from jaxembed.data.spec import DenseLayer, Head
from jaxembed.data.work import Encoding, Span
from jaxembed.errors import EmptyInput, InputTooLong, InvalidChunk, InvalidInput
from jaxembed.preprocessing.tokenizer import MOST_READ, Tokenizer, character_offsets

MOST_WINDOWS = 64  # of a document
LEAST_ROOM = 64  # tokens of the document in a window: shorter ones say little of it
LARGEST_DEFAULT_OVERLAP = 80  # tokens, as BCEmbedding and jina-reranker-v2 take it
LEAST_CHUNK = 8  # tokens of a chunk size: more vectors than this of a text say little each
LARGEST_CONTEXT = 512  # tokens of a window that only the one before pools
LEAST_WINDOW = 16  # tokens of the text in a window
MOST_LAYERS = 16  # chunks longer than a window that may lie above each other, on the average
WHITE_SPACE = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)


class Windows(msgspec.Struct, frozen=True, eq=False):
    """The windows of some documents, back to back."""

    counts: np.ndarray  # int64 [documents]: how many windows each has, one or more
    # int64 [windows, 2]: the first character of each, and the one after its last
    bounds: np.ndarray


class Division(NamedTuple):
    """How the documents of a request are divided."""

    start: int  # characters that a template or a prompt puts before a document
    head: np.ndarray  # and their ids,
    tail: np.ndarray  # and after it
    room: int  # tokens of the document in a window
    overlap: int  # tokens that neighbouring windows share


class Divided(NamedTuple):
    """One document in windows."""

    rows: list[np.ndarray]  # the ids of each window, with the head and the tail
    bounds: list[tuple[int, int]]  # its first character, and the one after its last
    is_cut: bool  # whether tokens are in no window


def overlap_of(room: int, overlap: int | None, *, with_query: bool = True) -> int:
    """The tokens that neighbouring windows of `room` tokens share: a quarter of a window, at most
    LARGEST_DEFAULT_OVERLAP, unless the request says otherwise; never more than half of one.

    Raises InvalidInput if there is room for less than LEAST_ROOM tokens, beside the query where
    windows have it.
    """
    if room < LEAST_ROOM:
        what = "the query leaves" if with_query else "the model has"
        how = "shorten the query, or leave" if with_query else "leave"
        raise InvalidInput(
            f"{what} room for {max(room, 0)} tokens of a document, and windows need "
            f"{LEAST_ROOM}; {how} `max_chunks_per_doc` out",
            field="query" if with_query else "max_chunks_per_doc",
        )
    wanted = min(LARGEST_DEFAULT_OVERLAP, room // 4) if overlap is None else overlap
    return min(wanted, room // 2)


def windows(count: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """The first token of each window of a document of `count` tokens, and the one after its last.

    A document that fits is one window. Of others each window but the last has `room` tokens, of
    which `overlap` are in the one before, too.
    """
    if count <= room:
        return [(0, count)]
    return [(at, min(at + room, count)) for at in range(0, count - overlap, room - overlap)]


def join_windows(parts: Sequence[Windows | None]) -> Windows | None:
    """The windows of all parts of a request, in order; None if its documents are not divided."""
    found = [part for part in parts if part is not None]
    if len(found) <= 1:
        return found[0] if found else None
    counts = np.concatenate([part.counts for part in found])
    return Windows(counts, np.concatenate([part.bounds for part in found]))


class Chunked(msgspec.Struct, frozen=True, eq=False):
    """The chunks of some texts, back to back, and the slots of the work that they are pooled in.

    A chunk that is longer than a window has several slots.
    """

    counts: np.ndarray  # int64 [texts]: how many chunks each has
    bounds: np.ndarray  # int64 [chunks, 2]: where each starts and ends, in its text's offset unit
    tokens: np.ndarray  # int64 [texts]: of each text with prompt and special tokens, once each
    windows: np.ndarray  # int64 [texts]: how many each was divided into; 1 if it fits
    owners: np.ndarray  # int64 [slots]: the chunk of each slot


NO_CHUNKS = Chunked(*(np.zeros(shape, np.int64) for shape in ((0,), (0, 2), (0,), (0,), (0,))))


class Late(NamedTuple):
    """How the texts of a request are tokenized and run."""

    tokenizer: Tokenizer
    prompt: str
    around: tuple[int, int]  # special tokens before and after a text
    unpooled: int  # tokens at the start that are in no chunk, because a prompt is not pooled
    has_types: bool
    limit: int  # tokens of a sequence
    slots: int  # the most ranges of a sequence that are pooled
    truncate: bool  # whether a text over the limit is run in windows, or refused
    can_divide: bool  # whether the vector of a chunk is a mean of those of its parts


class LateText(NamedTuple):
    """A tokenized text: its special tokens and prompt, and where its own tokens are."""

    planes: np.ndarray  # int32 [1 or 2, tokens]: the ids, and the types if the model has any
    head: int  # special tokens and prompt before the text
    tail: int  # special tokens after it
    starts: np.ndarray  # int64 [own tokens]: the first character that is not white space, ascending
    ends: np.ndarray  # int64 [own tokens]: the character after the last


class Piece(NamedTuple):
    """Tokens of a text that are pooled together: a chunk, or a part of one."""

    chunk: int
    start: int
    end: int


class LateWindow(NamedTuple):
    """Tokens of a text that are run together, and what is pooled of them."""

    start: int
    end: int
    pieces: list[Piece]


class ChunkPlaces(NamedTuple):
    """Where the chunks of a text are."""

    ranges: list[Span]
    bounds: np.ndarray  # int64 [chunks, 2], in the text's offset unit
    at_start: np.ndarray  # bool [chunks]: whether it starts where the text does
    at_end: np.ndarray  # bool [chunks]: whether it ends where the text does


def is_linear(head: Head) -> bool:
    """Whether the vector of a mean is the mean of the vectors: then a chunk may be pooled in
    parts."""
    return all(
        isinstance(layer, DenseLayer) and layer.activation == "identity"
        for layer in head.device_modules
    )


def join_texts(texts: Sequence[str]) -> ChunkedText:
    """The texts as the chunks of one: joined by a space where no white space is between them, which
    counts for the second."""
    parts: list[str] = []
    for text in texts:
        is_apart = not parts or parts[-1][-1:].isspace() or text[:1].isspace()
        parts.append(text if is_apart else f" {text}")
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    return ChunkedText("".join(parts), list(pairwise(ends)))


def encode_chunked(texts: Sequence[ChunkedText], late: Late) -> tuple[list[Encoding], Chunked]:
    """The sequences of some texts, and which chunk each of their slots belongs to.

    A window with more chunks than a sequence has slots is run several times.
    Raises EmptyInput, InputTooLong, InvalidChunk, InvalidInput or TokenizerError for the first text
    at fault.
    """
    encodings: list[Encoding] = []
    parts: list[Chunked] = []
    try:
        for text in texts:
            tokens = _tokenize(text, late)
            places = _places(text, tokens)
            length = tokens.planes.shape[1]
            if length > late.limit and not late.truncate:
                raise InputTooLong(late.limit, length)
            found = _windows(tokens, places, late)
            owners: list[int] = []
            for window in found:
                planes = tokens.planes
                if window.end - window.start < len(tokens.starts):  # a part, with what is around
                    start, end = tokens.head + window.start, tokens.head + window.end
                    head, tail = planes[:, : tokens.head], planes[:, length - tokens.tail :]
                    planes = np.concatenate([head, planes[:, start:end], tail], axis=1)
                types = planes[1] if late.has_types else None
                spans: list[Span] = []
                for chunk, start, end in window.pieces:
                    first, after = (tokens.head + place - window.start for place in (start, end))
                    # The special tokens and the prompt count for a chunk at that end of the text.
                    if places.at_end[chunk] and end == len(tokens.starts):
                        after += tokens.tail
                    if places.at_start[chunk] and start == 0:
                        first = min(late.unpooled, after - 1)
                    spans.append((first, after))
                for at in range(0, len(spans), late.slots):
                    slots = tuple(spans[at : at + late.slots])
                    encodings.append(Encoding(planes[0], types, slots))
                owners += [piece.chunk for piece in window.pieces]
            chunked = Chunked(
                counts=np.array([len(places.ranges)]),
                bounds=places.bounds,
                tokens=np.array([length]),
                windows=np.array([len(found)]),
                owners=np.array(owners, np.int64),
            )
            parts.append(chunked)
    except InvalidInput as error:
        raise error.at(len(parts)) from error
    return encodings, join_chunked(parts) or NO_CHUNKS


def join_chunked(parts: Sequence[Chunked | None]) -> Chunked | None:
    """The chunks of all parts of a request, in order; None if it has none."""
    found = [part for part in parts if part is not None]
    if len(found) <= 1:
        return found[0] if found else None
    firsts = np.cumsum([0, *(len(part.bounds) for part in found)])
    owners = [part.owners + first for part, first in zip(found, firsts, strict=False)]
    return Chunked(
        np.concatenate([part.counts for part in found]),
        np.concatenate([part.bounds for part in found]),
        np.concatenate([part.tokens for part in found]),
        np.concatenate([part.windows for part in found]),
        np.concatenate(owners),
    )


def pool_slots(dense: np.ndarray, bounds: np.ndarray, chunked: Chunked) -> np.ndarray:
    """The vector of each chunk, float32 `[chunks, width]`: the mean of its slots, weighted by their
    numbers of tokens.

    `dense` are the vectors of the slots, float32 `[slots, width]`, and `bounds` their tokens. The
    vector of a chunk with one slot is that of the slot to the last bit.
    """
    sizes = (bounds[:, 1] - bounds[:, 0]).astype(np.float64)
    totals = np.bincount(chunked.owners, sizes)
    shares = dense * (sizes / totals[chunked.owners])[:, None]
    order = np.argsort(chunked.owners, kind="stable")
    firsts = np.searchsorted(chunked.owners[order], np.arange(len(totals)))
    return np.add.reduceat(shares[order], firsts, axis=0).astype(np.float32)


def plan_windows(ranges: Sequence[Span], count: int, room: int, overlap: int) -> list[LateWindow]:
    """The windows of a text of `count` tokens, of `room` tokens at most, that pool all `ranges`.

    A window has `room` tokens, or ends with the text. It pools the ranges that end in it. The next
    one starts `overlap` tokens before the first range that is not pooled yet, so that this range
    has some context. A range of more than `room - overlap` tokens is pooled in several.
    """
    order = sorted(range(len(ranges)), key=lambda chunk: ranges[chunk][0])
    found: list[LateWindow] = []
    waiting: list[Piece] = []  # ranges that a window saw and did not pool to their ends
    at = seen = 0
    while waiting or seen < len(order):
        start = max(at - overlap, 0)
        end = min(start + room, count)
        while seen < len(order) and ranges[order[seen]][0] < end:
            waiting.append(Piece(order[seen], *ranges[order[seen]]))
            seen += 1
        pieces, later = [], []
        for piece in waiting:
            if piece.end <= end:
                pieces.append(piece)
            elif piece.end - piece.start > room - overlap:
                pieces.append(Piece(piece.chunk, piece.start, end))
                later.append(Piece(piece.chunk, end, piece.end))
            else:
                later.append(piece)
        if pieces:
            found.append(LateWindow(start, end, pieces))
        waiting = later
        starts = [piece.start for piece in waiting]
        at = min(starts + [ranges[chunk][0] for chunk in order[seen : seen + 1]], default=count)
    return found


def _tokenize(text: ChunkedText, late: Late) -> LateText:
    """Tokenize a text with its prompt. Raises EmptyInput, InvalidInput or TokenizerError."""
    if not text.text:
        raise EmptyInput()
    whole = late.prompt + text.text
    if len(whole) > MOST_READ:
        raise InvalidInput(
            f"the text has {len(whole)} characters, and its chunks can be of {MOST_READ} at most; "
            "send it in parts"
        )
    (encoding,) = late.tokenizer.encode([whole], fast=False)
    rows = [encoding.ids, encoding.type_ids] if late.has_types else [encoding.ids]
    before, tail = late.around
    planes = np.array(rows, np.int32)
    ends = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding))
    places = ends.reshape(-1, 2)[before : len(encoding) - tail]
    # Where each token starts, in ascending order: at its first character that is not white space,
    # because tokenizers put the space between two words into either token or none.
    codes = np.frombuffer(whole.encode("utf-32-le"), "<u4")
    at = np.arange(len(codes) + 1)
    at[:-1][np.isin(codes, WHITE_SPACE)] = len(codes)
    visible = np.minimum.accumulate(at[::-1])[::-1][places[:, 0]]
    starts = np.where(visible < places[:, 1], visible, places[:, 0])
    starts = np.maximum.accumulate(starts) - len(late.prompt)
    own = int(np.searchsorted(starts, 0))
    return LateText(planes, before + own, tail, starts[own:], places[own:, 1] - len(late.prompt))


def _places(text: ChunkedText, tokens: LateText) -> ChunkPlaces:
    """Where the chunks of a text are. Raises InvalidChunk for one that is no range of the text or
    has no tokens, and InvalidInput for a text without chunks."""
    offsets = character_offsets(text.text, text.offset_unit)
    if isinstance(text.chunks, ChunkSize):  # divided by its tokens
        own_tokens = len(tokens.starts)
        if not own_tokens:
            raise InvalidInput("the text has no tokens: it is white space")
        found = windows(own_tokens, text.chunks.tokens, text.chunks.overlap)
        firsts, stops = np.array(found).T
        bounds = np.stack([tokens.starts[firsts], tokens.ends[stops - 1]], axis=1)
        bounds[0, 0], bounds[-1, 1] = 0, len(offsets) - 1
        bounds = offsets[bounds].astype(np.int64)
        return ChunkPlaces(found, bounds, at_start=firsts == 0, at_end=stops == own_tokens)
    if not len(text.chunks):
        raise InvalidInput("the text has no chunks")
    size, unit, before = int(offsets[-1]), text.offset_unit, 0
    for chunk, (start, end) in enumerate(text.chunks):
        if not 0 <= start < end <= size:
            raise InvalidChunk(
                chunk,
                f"of [{start}, {end}] is no range of its text, which has {size} {unit}: wanted "
                "0 <= start < end",
            )
        if start < before:
            raise InvalidChunk(
                chunk,
                f"of [{start}, {end}] starts before the one before it, at {before}; sort them",
            )
        before = start
    bounds = np.array(text.chunks, np.int64)
    characters = np.searchsorted(offsets, bounds)
    if (inside := (offsets[characters] != bounds).any(axis=1)).any():
        chunk = int(np.argmax(inside))
        raise InvalidChunk(
            chunk,
            f"of {bounds[chunk].tolist()} starts or ends within a character in {unit}",
        )
    ranges = np.searchsorted(tokens.starts, characters)
    if not (full := ranges[:, 0] < ranges[:, 1]).all():
        raise InvalidChunk(int(np.argmin(full)), "has no tokens: it is empty or white space")
    return ChunkPlaces(
        [(start, end) for start, end in ranges.tolist()],
        bounds,
        at_start=bounds[:, 0] == 0,
        at_end=bounds[:, 1] == offsets[-1],
    )


def _windows(tokens: LateText, places: ChunkPlaces, late: Late) -> list[LateWindow]:
    """The windows of a text: one if it fits. Raises InvalidInput if the prompt leaves no room for
    windows, and InvalidChunk for a chunk that would have to be divided and cannot be."""
    room, own_tokens = late.limit - tokens.head - tokens.tail, len(tokens.starts)
    if own_tokens <= room:
        pieces = [Piece(chunk, *one) for chunk, one in enumerate(places.ranges)]
        return [LateWindow(0, own_tokens, pieces)]
    if room < LEAST_WINDOW:
        raise InvalidInput(
            f"the prompt leaves room for {max(room, 0)} tokens of a text, and windows need "
            f"{LEAST_WINDOW}; shorten the prompt or the text"
        )
    overlap = min(LARGEST_CONTEXT, room // 4)
    long = sum(end - start for start, end in places.ranges if end - start > room - overlap)
    if long > MOST_LAYERS * own_tokens:
        raise InvalidInput(
            f"the chunks that do not fit a window, which has room for {room - overlap} tokens, "
            f"have {long} tokens together, and may have {MOST_LAYERS} times the "
            f"{own_tokens} of the text; send fewer of them"
        )
    found = plan_windows(places.ranges, own_tokens, room, overlap)
    for piece in (piece for window in found for piece in window.pieces):
        start, end = places.ranges[piece.chunk]
        if not late.can_divide and end - start > piece.end - piece.start:
            raise InvalidChunk(
                piece.chunk,
                f"has {end - start} tokens, and a window has room for {room - overlap}; a layer "
                "after this model's pooling is not linear, so that it cannot be pooled in parts: "
                "send smaller chunks",
            )
    return found
