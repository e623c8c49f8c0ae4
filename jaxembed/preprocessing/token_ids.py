"""Checks token ids that a client sends instead of a text."""

from array import array
from collections.abc import Sequence

import numpy as np

from jaxembed.errors import InvalidInput


def checked_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Convert token ids to int32 `[tokens]`; there must be at least one.

    Raises InvalidInput if an id is not in the vocabulary.
    """
    least, most = _range(ids)
    if least < 0 or most >= vocab_size:  # before int32: they may exceed 64 bits
        bad = least if least < 0 else most
        raise InvalidInput(
            f"token id {bad} is out of range: this model's ids are 0 to {vocab_size - 1}; "
            "ids of another tokenizer (such as tiktoken) must be sent as text"
        )
    return np.array(ids, np.int32)


def has_special_tokens(ids: Sequence[int], before: list[int], after: list[int]) -> bool:
    """Whether token ids have the special tokens around them that the tokenizer adds to a text.

    `before` and `after` are the ids of these. It returns False if the tokenizer adds none: then
    nothing shows whose ids they are, and they count as those of another tokenizer.
    """
    inner = len(ids) - len(after)
    is_framed = list(ids[: len(before)]) == before and list(ids[inner:]) == after
    return len(before) + len(after) > 0 and inner >= len(before) and is_framed


def _range(ids: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest id. For an array it makes no Python int of each id."""
    if isinstance(ids, array):
        values = np.asarray(ids)
        return int(values.min()), int(values.max())
    return min(ids), max(ids)
