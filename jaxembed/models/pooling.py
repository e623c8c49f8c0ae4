"""From the hidden states of packed rows to one vector for each slot: pure functions, float32.

Each gives zeros for an empty slot. Definitions: sentence_transformers.models.Pooling.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxembed.models.tokens import Hidden, PackedTokens

SlotVectors = Float[Array, "rows slots dim"]
Member = Bool[Array, "rows slots length"]


def members(tokens: PackedTokens) -> Member:
    """Which tokens belong to which slot."""
    index = jnp.arange(tokens.ids.shape[1])[None, None, :]
    return (index >= tokens.bounds[:, :, :1]) & (index < tokens.bounds[:, :, 1:])


def cls_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """The first token."""
    return _gather(hidden, tokens, tokens.bounds[:, :, 0])


def last_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """The last token."""
    return _gather(hidden, tokens, jnp.maximum(tokens.bounds[:, :, 1] - 1, 0))


def mean_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """The average of the tokens."""
    weights = members(tokens).astype(jnp.float32)
    return _weighted_sum(hidden, tokens, weights) / _total(weights)


def mean_sqrt_len_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """The sum of the tokens over the square root of their number."""
    weights = members(tokens).astype(jnp.float32)
    return _weighted_sum(hidden, tokens, weights) / jnp.sqrt(_total(weights))


def weighted_mean_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """The average weighted by the index in the sequence, from 1."""
    index = (tokens.positions + 1).astype(jnp.float32)
    weights = jnp.where(members(tokens), index[:, None, :], 0.0)
    return _weighted_sum(hidden, tokens, weights) / _total(weights)


def max_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """The largest value of each dimension. One slot at a time: all at once would not fit."""
    index = jnp.arange(hidden.shape[1])[None, :]

    def one(bounds):
        member = (index >= bounds[:, :1]) & (index < bounds[:, 1:])
        largest = jnp.where(member[:, :, None], hidden, -jnp.inf).max(axis=1)
        return jnp.where(member.any(axis=1)[:, None], largest, 0.0)

    return lax.map(one, tokens.bounds.swapaxes(0, 1)).swapaxes(0, 1)


POOLINGS: dict[str, Callable[[Hidden, PackedTokens], SlotVectors]] = {
    "cls": cls_pool,
    "max": max_pool,
    "mean": mean_pool,
    "mean_sqrt_len": mean_sqrt_len_pool,
    "weightedmean": weighted_mean_pool,
    "lasttoken": last_pool,
}


def _gather(hidden: Hidden, tokens: PackedTokens, index: Int[Array, "rows slots"]) -> SlotVectors:
    """The hidden state of the token at `index` of its row, for each slot that is in use."""
    chosen = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
    used = tokens.bounds[:, :, 1:] > 0
    return jnp.where(used, chosen, 0.0)


def _total(weights: Float[Array, "rows slots length"]) -> Float[Array, "rows slots one"]:
    return jnp.maximum(weights.sum(axis=2, keepdims=True), 1e-9)


def _weighted_sum(hidden: Hidden, tokens: PackedTokens, weights) -> SlotVectors:
    real = jnp.where(tokens.segments[:, :, None] != 0, hidden, 0.0)  # padding may hold NaN
    return jnp.einsum("bnt,btd->bnd", weights, real, precision=lax.Precision.HIGHEST)
