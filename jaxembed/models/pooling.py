"""From the hidden states of packed rows to one vector per sequence slot: pure functions, float32.

Each gives zeros for an empty slot. Definitions: sentence_transformers.models.Pooling.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxembed.models.tokens import Hidden, PackedTokens

Pooled = Float[Array, "rows slots dim"]
Member = Bool[Array, "rows slots length"]


def members(segments: Int[Array, "rows length"], slots: int) -> Member:
    """Which tokens belong to which slot; slot s holds segment s + 1."""
    return segments[:, None, :] == jnp.arange(1, slots + 1)[None, :, None]


def cls_pool(hidden: Hidden, tokens: PackedTokens, slots: int) -> Pooled:
    """The first token."""
    member = members(tokens.pooled, slots)
    return _gather(hidden, member.argmax(axis=2), member.any(axis=2))


def last_pool(hidden: Hidden, tokens: PackedTokens, slots: int) -> Pooled:
    """The last token."""
    member = members(tokens.pooled, slots)
    last = hidden.shape[1] - 1 - member[:, :, ::-1].argmax(axis=2)
    return _gather(hidden, last, member.any(axis=2))


def mean_pool(hidden: Hidden, tokens: PackedTokens, slots: int) -> Pooled:
    """The average of the tokens."""
    weights = members(tokens.pooled, slots).astype(jnp.float32)
    return _weighted_sum(hidden, tokens, weights) / _total(weights)


def mean_sqrt_len_pool(hidden: Hidden, tokens: PackedTokens, slots: int) -> Pooled:
    """The sum of the tokens over the square root of their number."""
    weights = members(tokens.pooled, slots).astype(jnp.float32)
    return _weighted_sum(hidden, tokens, weights) / jnp.sqrt(_total(weights))


def weighted_mean_pool(hidden: Hidden, tokens: PackedTokens, slots: int) -> Pooled:
    """The average weighted by the index in the sequence, from 1."""
    index = (tokens.positions + 1).astype(jnp.float32)
    weights = jnp.where(members(tokens.pooled, slots), index[:, None, :], 0.0)
    return _weighted_sum(hidden, tokens, weights) / _total(weights)


def max_pool(hidden: Hidden, tokens: PackedTokens, slots: int) -> Pooled:
    """The largest value of each dimension. One slot at a time: all at once would not fit."""

    def one(slot):
        member = tokens.pooled == slot
        largest = jnp.where(member[:, :, None], hidden, -jnp.inf).max(axis=1)
        return jnp.where(member.any(axis=1)[:, None], largest, 0.0)

    return lax.map(one, jnp.arange(1, slots + 1)).swapaxes(0, 1)


POOLINGS: dict[str, Callable[[Hidden, PackedTokens, int], Pooled]] = {
    "cls": cls_pool,
    "max": max_pool,
    "mean": mean_pool,
    "mean_sqrt_len": mean_sqrt_len_pool,
    "weightedmean": weighted_mean_pool,
    "lasttoken": last_pool,
}


def _gather(hidden: Hidden, index: Int[Array, "rows slots"], used: Bool[Array, "rows slots"]):
    chosen = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
    return jnp.where(used[:, :, None], chosen, 0.0)


def _total(weights: Float[Array, "rows slots length"]) -> Float[Array, "rows slots one"]:
    return jnp.maximum(weights.sum(axis=2, keepdims=True), 1e-9)


def _weighted_sum(hidden: Hidden, tokens: PackedTokens, weights) -> Pooled:
    real = jnp.where(tokens.segments[:, :, None] != 0, hidden, 0.0)  # padding may hold NaN
    return jnp.einsum("bnt,btd->bnd", weights, real, precision=lax.Precision.HIGHEST)
