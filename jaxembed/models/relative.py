"""What attention is told of the distances between tokens: rotations, or a bias of its scores."""

from dataclasses import dataclass
from typing import no_type_check

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxembed.models.attention import bias_of_table
from jaxembed.models.rope import Rotation


@no_type_check  # a tracer is no array to the check
@dataclass(frozen=True)
class RelativePositions:
    """What the attention of every layer is told of the tokens' distances: nothing in BERT."""

    rotation: Rotation | None = None
    bias: Float[Array, "heads distances"] | None = None  # as `attend` takes it


NOT_RELATIVE = RelativePositions()


class BiasByDistance(nnx.Module):
    """A bias of attention scores for each head and distance of key and query.

    From `reach` on, on either side, it stays the same.
    """

    def __init__(self, heads: int, reach: int):
        self.bias = nnx.Param(jnp.zeros((heads, 2 * reach + 1), jnp.float32))

    def __call__(self, length: int) -> Float[Array, "heads distances"]:
        """The biases in rows of this length, as `attend` takes them."""
        return bias_of_table(self.bias[...], length)
