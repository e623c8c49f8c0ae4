"""What attention is told of the distances between tokens: rotations, or a bias of its scores."""

from dataclasses import dataclass
from typing import no_type_check

import jax.numpy as jnp
from flax import nnx

from jaxembed.models.attention import Bias, bias_of_slopes, bias_of_table
from jaxembed.models.rope import Rotation


@no_type_check  # a tracer is no array to the check
@dataclass(frozen=True)
class RelativePositions:
    """What the attention of every layer is told of the tokens' distances: nothing in BERT."""

    rotation: Rotation | None = None
    bias: Bias | None = None


NOT_RELATIVE = RelativePositions()


class BiasByDistance(nnx.Module):
    """A bias of attention scores for each head and distance of key and query.

    From `reach` on, on either side, it stays the same.
    """

    def __init__(self, heads: int, reach: int):
        self.bias = nnx.Param(jnp.zeros((heads, 2 * reach + 1), jnp.float32))

    def __call__(self, length: int) -> Bias:
        """The biases in rows of this length, as `attend` takes them."""
        return bias_of_table(self.bias[...], length)


def alibi(heads: int, length: int) -> Bias:
    """The bias of ALiBi in rows of this length, in its form for both directions: Press et al. 2021,
    arXiv:2108.12409."""
    return bias_of_slopes(alibi_slopes(heads), length)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head: powers of two with equal steps between them, down to 2^-8.

    If the number of heads is no power of two, the slopes are those of the next lower one, then
    every second one of twice that.
    """
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    between = [2 ** (-4 * (head + 1) / lower) for head in range(0, 2 * lower, 2)]
    return (*slopes, *between[: heads - lower])
