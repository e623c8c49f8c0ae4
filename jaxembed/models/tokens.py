"""The input of every backbone: sequences packed into rows."""

from dataclasses import dataclass, replace
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxembed.data.spec import Expansion, ImageRules

Hidden = Float[Array, "rows length dim"]  # the hidden states of packed rows
Segments = Int[Array, "rows length"]
"""A number for each token of packed rows, such as the number of its segment."""
WORD_BYTES = 4  # bytes of a patch that one int32 of a plane holds


@no_type_check  # JAX rebuilds it with leaves of other types, such as shapes and numpy arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedTokens:
    """A buffer of `rows * length` tokens; each row holds one or more whole sequences.

    `segments` numbers the sequences of a row 1, 2, ...; 0 is padding. Attention stays within a
    segment. `positions` count from 0 in each sequence; backbones with another first position add an
    offset. A slot is a range of tokens that are pooled together: `bounds` holds for each slot the
    index in the row of its first token and the index after its last token; both are 0 for an empty
    slot. Slots may overlap. A token may be in no slot, such as those of a prompt in a model with
    include_prompt=false: other tokens attend to the prompt, but it is not pooled.

    Each of the other fields is None if the model does not use it. `adapters` is the number of each
    token's adapter, or 0 for no adapter. `key_segments` equals `segments`, except for tokens that
    are hidden as keys: no token attends to them. `pixels` holds the patches of each token of an
    image, and zeros for other tokens. `places` tells where each token lies in its image, by numbers
    whose meaning depends on the model. `read` equals `segments`, but is 0 for tokens whose last
    hidden state is not needed.
    """

    ids: Int[Array, "rows length"]
    positions: Int[Array, "rows length"]
    segments: Int[Array, "rows length"]
    types: Int[Array, "rows length"]
    bounds: Int[Array, "rows slots 2"]
    adapters: Int[Array, "rows length"] | None = None
    key_segments: Segments | None = None
    pixels: UInt8[Array, "rows length values"] | None = None
    places: Int[Array, "rows length numbers"] | None = None
    read: Segments | None = None

    PLANES = 5  # the number of planes that every model has: see `unstack`

    @classmethod
    def unstack(
        cls,
        planes: Int[Array, "planes rows length"],
        slots: int,
        expansion: Expansion | None = None,
        image: ImageRules | None = None,
    ) -> "PackedTokens":
        """Make the fields from planes: one array, so that a batch is moved to the device at once.

        The first five planes are ids, positions, segments, types and bounds. A row of the bounds
        plane holds the first index of each of the row's `slots` slots, then the end of each slot,
        and at its end the mark of `mark_ends`.
        With an `expansion` the segments of augmentation tokens are negative; if the expansion is
        not attended, these tokens are hidden as keys. With an `image` the next
        `image.place_numbers` planes are the places, and the planes after them hold the bytes of the
        patches, WORD_BYTES in each number, in the host's byte order. In a model with adapters the
        last plane holds the number of each token's adapter.
        """
        ids, positions, segments, types, slot_bounds = (planes[i] for i in range(cls.PLANES))
        key_segments = None
        if expansion is not None:
            if not expansion.attended:
                key_segments = jnp.where(segments < 0, -jnp.ones_like(segments), segments)
            segments = abs(segments)  # so hidden keys, in segment -1, match no query
        bounds = jnp.stack([slot_bounds[:, :slots], slot_bounds[:, slots : 2 * slots]], axis=2)
        last, places, pixels = cls.PLANES, None, None
        if image is not None:
            first = cls.PLANES + image.place_numbers
            last = first + image.token_bytes // WORD_BYTES
            if image.place_numbers:
                places = planes[cls.PLANES : first].transpose(1, 2, 0)
            patches = lax.bitcast_convert_type(planes[first:last].transpose(1, 2, 0), jnp.uint8)
            pixels = patches.reshape(*patches.shape[:2], -1)
        adapters = planes[last] if len(planes) > last else None
        return cls(ids, positions, segments, types, bounds, adapters, key_segments, pixels, places)

    def with_read(self, planes: Int[Array, "planes rows length"]) -> "PackedTokens":
        """Set `read` for rows of `planes` that `mark_ends` has marked: the last hidden states of
        the first and the last token of each slot are needed."""
        if not has_mark(self.bounds.shape[1], planes.shape[2]):
            return self
        index = jnp.arange(planes.shape[2])[None, None]
        first, end = self.bounds[:, :, :1], self.bounds[:, :, 1:]
        is_end = jnp.any(((index == first) | (index == end - 1)) & (end > 0), axis=1)
        is_marked = planes[self.PLANES - 1, :, -1:] == 1
        return replace(self, read=jnp.where(is_marked & ~is_end, 0, self.segments))

    def by_layer(self, count: int) -> "list[PackedTokens]":
        """Return the tokens as each of `count` layers takes them: only the last has `read`."""
        return [*[replace(self, read=None)] * (count - 1), self]


def has_mark(slots: int, length: int) -> bool:
    """Whether `mark_ends` can mark rows of `length` tokens with `slots` slots."""
    return 2 * slots < length


def mark_ends(planes: Int[np.ndarray, "planes rows length"], slots: int, mark: bool) -> None:
    """Mark the rows of a batch, or remove the marks, if there is room for a mark: of marked rows
    only outputs are used that read the first or the last token of a slot."""
    if has_mark(slots, planes.shape[2]):
        planes[PackedTokens.PLANES - 1, :, -1] = mark
