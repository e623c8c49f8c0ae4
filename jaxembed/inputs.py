"""Defines the inputs of a request. Knows no wire format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Priority = Literal["interactive", "bulk"]  # interactive: a person waits; bulk: a job does


@dataclass(frozen=True)
class Text:
    """One text; prompts and special tokens are added when it is tokenized."""

    text: str


@dataclass(frozen=True)
class Pair:
    """Two texts in one sequence, such as a query and a document."""

    first: str
    second: str


@dataclass(frozen=True)
class Tokens:
    """Token ids to run unchanged: nothing is decoded and nothing is added.

    An `array.array` is checked faster than a list and takes less memory.
    """

    ids: Sequence[int]


Input = Text | Pair | Tokens
