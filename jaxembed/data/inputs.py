"""The inputs of a request: texts, pairs, token ids, images, and texts with chunks."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

AggregationStrategy = Literal["none", "simple", "first", "average", "max"]
"""How the labels of tokens become entities. With "none" each token is one. The others join
neighbours of the same label; before that, all but "simple" give the tokens of a word one label."""

Priority = Literal["interactive", "bulk"]
"""The priority of a request: a person waits for an interactive one, and a job for a bulk one."""

OffsetUnit = Literal["code-points", "utf-16", "utf-8"]  # the unit of positions in a text


class Text(msgspec.Struct, frozen=True):
    """A text. Tokenization adds prompts and special tokens."""

    text: str


class Pair(msgspec.Struct, frozen=True):
    """Two texts in one sequence, such as a query and a document."""

    first: str
    second: str


class Tokens(msgspec.Struct, frozen=True):
    """Token ids that the model gets unchanged: no prompt and no special token is added.

    Pass `ids` as an `array.array` if you can: it is checked faster than a list, and takes less
    memory.
    """

    ids: Sequence[int]


class Image(msgspec.Struct, frozen=True):
    """An image: the bytes of its file, or its RGB values, uint8 `[height, width, 3]`."""

    data: bytes | np.ndarray


Input = Text | Pair | Tokens | Image


class ChunkSize(msgspec.Struct, frozen=True):
    """The size of chunks in tokens. Each chunk shares `overlap` tokens with the previous one."""

    tokens: int
    overlap: int = 0


class ChunkedText(msgspec.Struct, frozen=True):
    """A text that gets a vector for each of its chunks, pooled from the hidden states of the text.

    `chunks` are half-open ranges `(start, end)` in the `offset_unit`, ordered by start. Chunks may
    overlap. Text outside all chunks serves only as context. If `chunks` is a ChunkSize, jaxembed
    divides the text into chunks of this size.
    """

    text: str
    chunks: Sequence[tuple[int, int]] | ChunkSize
    offset_unit: OffsetUnit = "code-points"
