"""Attention within the segments of packed rows: one signature, an implementation per platform."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Up to this row length the scores of a row are computed at once, above it this many queries at a
# time. On CPU, MiniLM: as fast at 128, 7 % faster at 256, 13 % at 512 (benchmarks/README.md).
WHOLE_SCORES = 128
QUERY_BLOCK = 32
ACCELERATOR_QUERY_BLOCK = 512  # fewer, larger steps; bounds the scores' memory at long rows
MASKED = -1e30  # finite, so that a query that sees nothing gets a uniform row and not NaN

Heads = Float[Array, "rows length heads width"]


def attend(query: Heads, key: Heads, value: Heads, segments: Int[Array, "rows length"]) -> Heads:
    """softmax(query . key / sqrt(width)) . value, each token seeing the tokens of its own segment.

    Scores and softmax are float32, products take the operands' dtype, the result is float32.
    Padding may hold NaN: its keys are masked and its values replaced, never multiplied by zero.
    """
    length, width = query.shape[1], query.shape[3]
    query = (query.astype(jnp.float32) * width**-0.5).astype(query.dtype)
    value = jnp.where(segments[:, :, None, None] != 0, value, jnp.zeros((), value.dtype))
    if length <= WHOLE_SCORES:
        return _scores_times_values(query, segments, key, value, segments)
    return lax.platform_dependent(
        query,
        key,
        value,
        segments,
        cpu=partial(_in_query_blocks, size=QUERY_BLOCK),
        default=partial(_in_query_blocks, size=ACCELERATOR_QUERY_BLOCK),
    )


def _in_query_blocks(query: Heads, key: Heads, value: Heads, segments, *, size: int) -> Heads:
    """The same, `size` queries at a time, so that scores stay in the cache."""
    rows, length, heads, width = query.shape
    size = min(size, length)
    blocks = -(-length // size)
    padding = blocks * size - length
    query = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
    of_query = jnp.pad(segments, ((0, 0), (0, padding)))
    query = query.reshape(rows, blocks, size, heads, width).swapaxes(0, 1)
    of_query = of_query.reshape(rows, blocks, size).swapaxes(0, 1)

    def block(one):
        return _scores_times_values(one[0], one[1], key, value, segments)

    mixed = lax.map(block, (query, of_query))  # [blocks, rows, block, heads, width]
    return mixed.swapaxes(0, 1).reshape(rows, blocks * size, heads, width)[:, :length]


def _scores_times_values(
    query: Float[Array, "rows queries heads width"],
    of_query: Int[Array, "rows queries"],
    key: Heads,
    value: Heads,
    of_key: Int[Array, "rows length"],
) -> Float[Array, "rows queries heads width"]:
    scores = jnp.einsum("bshk,bthk->bhst", query, key, preferred_element_type=jnp.float32)
    same = of_query[:, None, :, None] == of_key[:, None, None, :]
    scores = jnp.where(same, scores, MASKED)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1)  # [rows, heads, queries]
    mixed = jnp.einsum(
        "bhst,bthk->bshk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return mixed / total.swapaxes(1, 2)[..., None]
