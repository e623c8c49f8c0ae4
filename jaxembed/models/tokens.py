"""The one input of every tower: several sequences packed into rows."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxembed.data.spec import Expansion, ImageRules

Hidden = Float[Array, "rows length dim"]  # the hidden states of packed rows
Segments = Int[Array, "rows length"]
WORD_BYTES = 4  # of a number in the planes, which hold so many bytes of a patch


@no_type_check  # JAX rebuilds it with other leaves (shapes, numpy)
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedTokens:
    """A buffer of `rows * length` tokens; each row holds one or more whole sequences.

    `segments` tells the sequences of a row apart: 1, 2, ... in order, 0 is padding. Attention stays
    within a segment. `positions` count from 0 inside each sequence; a tower adds its own offset.
    `bounds` holds for each slot the first token of the row that is pooled into it, and the one
    after the last; both are 0 for an empty slot. Slots may overlap, and leave tokens out: the
    prompt of a model with include_prompt=false, which is attended to and not pooled. `adapters` has
    the number of each token's adapter, 0 for none; it is None in models without adapters.
    `key_segments` are the segments of tokens as keys, which differ for those that no token attends
    to; None: they are the segments. `pixels` holds the patch of each token of an image, zeros for
    one that has none; None in models of text. `places` tells where in its image each token lies, if
    the model of images wants to know.
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

    PLANES = 5  # of the stacked array, without those of adapters and of images

    @classmethod
    def unstack(
        cls,
        planes: Int[Array, "planes rows length"],
        slots: int,
        expansion: Expansion | None = None,
        image: ImageRules | None = None,
    ) -> "PackedTokens":
        """The planes, which are moved to the device as one array. The first `slots` places of each
        row of the fifth one hold where its slots begin, the next `slots` where they end. With an
        `expansion` the segments of its fillers are negative. Of a model of images, which the rules
        `image` tell, the planes after the fifth are the numbers of the places, and then words of
        WORD_BYTES bytes of the patches, in the order of the host's memory."""
        ids, positions, segments, types, ends = (planes[i] for i in range(cls.PLANES))
        key_segments = None
        if expansion is not None:
            hidden = -jnp.ones_like(segments)
            key_segments = None if expansion.attended else jnp.where(segments < 0, hidden, segments)
            segments = abs(segments)
        bounds = jnp.stack([ends[:, :slots], ends[:, slots : 2 * slots]], axis=2)
        if image is not None:
            numbers, words = jnp.split(planes[cls.PLANES :], [image.place_numbers])
            places = numbers.transpose(1, 2, 0) if image.place_numbers else None
            by_word = lax.bitcast_convert_type(words.transpose(1, 2, 0), jnp.uint8)
            pixels = by_word.reshape(*by_word.shape[:2], -1)
            return cls(ids, positions, segments, types, bounds, None, key_segments, pixels, places)
        adapters = planes[cls.PLANES] if len(planes) > cls.PLANES else None
        return cls(ids, positions, segments, types, bounds, adapters, key_segments)
