"""Defines the inputs of a request. Knows no wire format."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

Priority = Literal["interactive", "bulk"]  # interactive: a person waits; bulk: a job does

OffsetUnit = Literal["code-points", "utf-16", "utf-8"]  # what places in a text are counted in


class Text(msgspec.Struct, frozen=True):
    """One text; prompts and special tokens are added when it is tokenized."""

    text: str


class Pair(msgspec.Struct, frozen=True):
    """Two texts in one sequence, such as a query and a document."""

    first: str
    second: str


class Tokens(msgspec.Struct, frozen=True):
    """Token ids to run unchanged: nothing is decoded and nothing is added.

    An `array.array` is checked faster than a list and takes less memory.
    """

    ids: Sequence[int]


class Image(msgspec.Struct, frozen=True):
    """One image: the bytes of its file, or its colours, uint8 `[height, width, 3]`."""

    data: bytes | np.ndarray


Input = Text | Pair | Tokens | Image


class ChunkSize(msgspec.Struct, frozen=True):
    """Chunks of so many tokens, of which each shares `overlap` with the one before."""

    tokens: int
    overlap: int = 0


class ChunkedText(msgspec.Struct, frozen=True):
    """A text whose chunks have a vector each, pooled from the tokens of the whole text.

    `chunks` are half-open ranges `(start, end)` in the `offset_unit`, in ascending order of their
    starts; they may overlap, and what is in none of them is context only. A ChunkSize divides the
    text itself.
    """

    text: str
    chunks: Sequence[tuple[int, int]] | ChunkSize
    offset_unit: OffsetUnit = "code-points"
