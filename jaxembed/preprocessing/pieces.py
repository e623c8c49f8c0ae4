"""Shows the tokens of a text one by one, with their places in it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxembed.data.inputs import OffsetUnit

# The first characters of two, three and four units.
WIDER: dict[OffsetUnit, tuple[int, ...]] = {
    "code-points": (),
    "utf-16": (0x10000,),
    "utf-8": (0x80, 0x800, 0x10000),
}


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token, as /tokenize shows it.

    `start` and `stop` are byte offsets into the UTF-8 text with its prompt; None for a special
    token.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


def token_pieces(text: str, encoding, name_of: Callable[[int], str | None]) -> list[TokenPiece]:
    """The tokens of a text, from its tokenizers.Encoding, whose offsets count characters.

    `name_of` returns the token with an id, which is the text of special tokens.
    """
    data = text.encode()
    offsets = character_offsets(text, "utf-8")[np.array(encoding.offsets, np.intp).reshape(-1, 2)]
    columns = (encoding.ids, encoding.special_tokens_mask, *offsets.T.tolist())
    return [
        TokenPiece(id, name_of(id) or "", True, None, None)
        if special
        else TokenPiece(id, data[start:stop].decode(errors="replace"), False, start, stop)
        for id, special, start, stop in zip(*columns, strict=True)
    ]


def character_offsets(text: str, unit: OffsetUnit) -> np.ndarray:
    """The offset of each character in this unit, and the length of the text: int32."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = np.ones(len(codes) + 1, np.int8)
    widths[0] = 0
    for first in WIDER[unit]:
        widths[1:] += codes >= first
    return np.cumsum(widths, dtype=np.int32)
