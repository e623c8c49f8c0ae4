"""The inputs of a request: texts, pairs, token ids, images, and texts with chunks."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

Priority = Literal["interactive", "bulk"]  # interactive: a person waits; bulk: a job does

OffsetUnit = Literal["code-points", "utf-16", "utf-8"]  # the unit of positions in a text


class Text(msgspec.Struct, frozen=True):
    """A text. Tokenization adds prompts and special tokens."""

    text: str


class Pair(msgspec.Struct, frozen=True):
    """Two texts in one sequence, such as a query and a document."""

    first: str
    second: str


class Tokens(msgspec.Struct, frozen=True):
    """Token ids that run unchanged: nothing is decoded, and no prompt or special token is added.

    An `array.array` is checked faster than a list and takes less memory.
    """

    ids: Sequence[int]


class Image(msgspec.Struct, frozen=True):
    """An image: the bytes of its file, or its RGB values, uint8 `[height, width, 3]`."""

    data: bytes | np.ndarray


Input = Text | Pair | Tokens | Image


class ChunkSize(msgspec.Struct, frozen=True):
    """Chunks of `tokens` tokens, each of which shares `overlap` tokens with the previous chunk."""

    tokens: int
    overlap: int = 0


class ChunkedText(msgspec.Struct, frozen=True):
    """A text with a vector for each of its chunks, pooled from the tokens of the whole text.

    `chunks` are half-open ranges `(start, end)` in the `offset_unit`, ordered by their starts. They
    may overlap. Text outside all chunks serves only as context. With a ChunkSize jaxembed divides
    the text.
    """

    text: str
    chunks: Sequence[tuple[int, int]] | ChunkSize
    offset_unit: OffsetUnit = "code-points"
