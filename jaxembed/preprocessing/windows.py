"""Divides the tokens of a long document into windows. Pure functions."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from jaxembed.errors import InvalidInput

MOST_WINDOWS = 64  # of a document
LEAST_ROOM = 64  # tokens of the document in a window: shorter ones say little of it
LARGEST_DEFAULT_OVERLAP = 80  # tokens, as BCEmbedding and jina-reranker-v2 take it


class Windows(msgspec.Struct, frozen=True, eq=False):
    """The windows of some documents, back to back."""

    counts: np.ndarray  # int64 [documents]: how many windows each has, one or more
    bounds: (
        np.ndarray
    )  # int64 [windows, 2]: the first character of each, and the one after its last


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
