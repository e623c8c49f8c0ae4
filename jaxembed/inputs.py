"""Defines the inputs of a request. Knows no wire format."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Priority = Literal["interactive", "bulk"]  # interactive: a person waits; bulk: a job does


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


Input = Text | Pair | Tokens
