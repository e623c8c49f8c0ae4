"""Where the segments of packed rows begin and end, as kernels want to know it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

Places = Int[Array, "rows length"]


def starts(segments: Places) -> Bool[Array, "rows length"]:
    """Whether a segment, or a stretch of padding, begins at a token."""
    return segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def ends(segments: Places) -> Bool[Array, "rows length"]:
    """Whether a segment, or a stretch of padding, ends with a token."""
    return segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1)), constant_values=-1)


def spans(segments: Places) -> tuple[Places, Places]:
    """The places in the row of the first and the last token of each token's segment."""
    length = segments.shape[1]
    at = jnp.broadcast_to(jnp.arange(length), segments.shape)
    first = lax.cummax(jnp.where(starts(segments), at, 0), axis=1)
    last = lax.cummin(jnp.where(ends(segments), at, length - 1), axis=1, reverse=True)
    return first, last


def without_padding(x: Array, segments: Places) -> Array:
    """`[rows, length, heads, width]` with zeros where there is no segment: padding may hold NaN."""
    return jnp.where(segments[:, :, None, None] != 0, x, jnp.zeros((), x.dtype))
