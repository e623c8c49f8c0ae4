"""The inputs of a request: texts, pairs, token ids, images, inputs of several parts, and texts with
chunks."""

from collections.abc import Sequence
from typing import Any, Literal

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


class Parts(msgspec.Struct, frozen=True):
    """Texts and images that are one input, in the given order. Neighbouring texts are joined by a
    line break. An image is an Image; methods of Embedder also take what `encode` takes as one."""

    parts: tuple[Any, ...]

    def __post_init__(self) -> None:
        if isinstance(self.parts, str):
            raise TypeError("Parts takes a tuple of texts and images, not a string")


Input = Text | Pair | Tokens | Image | Parts
Content = str | Image | Parts  # a query or a document to rank


def parts_of(item: Input | Content) -> tuple[str | Image, ...]:
    """Return the texts and images of an input, in order. Token ids have none."""
    match item:
        case Parts():
            return item.parts
        case Text():
            return (item.text,)
        case Pair():
            return item.first, item.second
        case str() | Image():
            return (item,)
    return ()


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
