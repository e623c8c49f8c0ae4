"""The one input of every tower: several sequences packed into rows."""

from dataclasses import dataclass
from typing import no_type_check

import jax
from jaxtyping import Array, Float, Int

Hidden = Float[Array, "rows length dim"]  # the hidden states of packed rows
Segments = Int[Array, "rows length"]


@no_type_check  # JAX rebuilds it with other leaves (shapes, numpy)
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedTokens:
    """A buffer of `rows * length` tokens; each row holds one or more whole sequences.

    `segments` tells the sequences of a row apart: 1, 2, ... in order, 0 is padding. Attention stays
    within a segment. `positions` count from 0 inside each sequence; a tower adds its own offset.
    `pooled` is the segment again where the token takes part in pooling, else 0: the prompt of a
    model with include_prompt=false is attended to and not pooled, which segments cannot say.
    """

    ids: Int[Array, "rows length"]
    positions: Int[Array, "rows length"]
    segments: Int[Array, "rows length"]
    types: Int[Array, "rows length"]
    pooled: Int[Array, "rows length"]

    FIELDS = 5  # planes of the stacked array

    @classmethod
    def unstack(cls, planes: Int[Array, "planes rows length"]) -> "PackedTokens":
        """The five planes moved to the device as one array."""
        return cls(*(planes[i] for i in range(cls.FIELDS)))
