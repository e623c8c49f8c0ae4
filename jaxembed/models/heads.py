"""Heads: they compute the outputs of a model from the hidden states of its backbone.

A pooling is a pure function from the hidden states of packed rows to one float32 vector for each
slot; an empty slot gets zeros. The names and definitions of poolings are those of
sentence_transformers.models.Pooling.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxembed.data.spec import (
    AttentionPooling,
    DenseLayer,
    Head,
    LayerNormLayer,
    Module,
    NormalizeLayer,
    PerToken,
    Pooled,
    TanhLayer,
    Vocabulary,
)
from jaxembed.models import native
from jaxembed.models.attention import MASKED
from jaxembed.models.layers import ACTIVATIONS, LayerNorm, Linear
from jaxembed.models.tokens import Hidden, PackedTokens

BLOCK_TOKENS = 256  # the logits of this many tokens are in memory at once: 31 MB for 30,592 terms
TABLE_OF_TERMS = ".terms.kernel"  # the name of the parameter with the table of terms ends so
# The number of columns of the table of terms is padded to a multiple of this, so that it fits the
# vectors of a TPU and the panels of the native kernels.
TERM_TILE = 128

SlotVectors = Float[Array, "rows slots dim"]
Member = Bool[Array, "rows slots length"]


def slot_members(tokens: PackedTokens) -> Member:
    """Return whether a token belongs to a slot, for each slot and each token of a row."""
    index = jnp.arange(tokens.ids.shape[1])[None, None, :]
    return (index >= tokens.bounds[:, :, :1]) & (index < tokens.bounds[:, :, 1:])


def cls_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """Return the hidden state of the first token of each slot."""
    return _gather(hidden, tokens, tokens.bounds[:, :, 0])


def last_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """Return the hidden state of the last token of each slot."""
    return _gather(hidden, tokens, jnp.maximum(tokens.bounds[:, :, 1] - 1, 0))


def mean_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """Return the mean of the hidden states of each slot."""
    weights = slot_members(tokens).astype(jnp.float32)
    return _weighted_sum(hidden, tokens, weights) / _total(weights)


def mean_sqrt_len_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """Return the sum of the hidden states of each slot, divided by the square root of the number of
    tokens in the slot."""
    weights = slot_members(tokens).astype(jnp.float32)
    return _weighted_sum(hidden, tokens, weights) / jnp.sqrt(_total(weights))


def weighted_mean_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """Return the weighted mean of the hidden states of each slot. The weight of a token is its
    index in its sequence, counted from 1."""
    index = (tokens.positions + 1).astype(jnp.float32)
    weights = jnp.where(slot_members(tokens), index[:, None, :], 0.0)
    return _weighted_sum(hidden, tokens, weights) / _total(weights)


def max_pool(hidden: Hidden, tokens: PackedTokens) -> SlotVectors:
    """Return the maximum of each dimension over the tokens of each slot. The slots of a row are
    computed one after another, because all of them together might not fit into memory."""
    index = jnp.arange(hidden.shape[1])[None, :]

    def one(bounds):  # the bounds of one slot of each row
        is_member = (index >= bounds[:, :1]) & (index < bounds[:, 1:])
        largest = jnp.where(is_member[:, :, None], hidden, -jnp.inf).max(axis=1)
        return jnp.where(is_member.any(axis=1)[:, None], largest, 0.0)

    return lax.map(one, tokens.bounds.swapaxes(0, 1)).swapaxes(0, 1)


POOLINGS: dict[str, Callable[[Hidden, PackedTokens], SlotVectors]] = {
    "cls": cls_pool,
    "max": max_pool,
    "mean": mean_pool,
    "mean_sqrt_len": mean_sqrt_len_pool,
    "weightedmean": weighted_mean_pool,
    "lasttoken": last_pool,
}
READ_ENDS = {"cls", "lasttoken"}  # the poolings that read one token: the first or last of a slot


def _gather(hidden: Hidden, tokens: PackedTokens, index: Int[Array, "rows slots"]) -> SlotVectors:
    """Return for each slot the hidden state at `index` of its row, or zeros for an empty slot."""
    chosen = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
    return jnp.where(tokens.bounds[:, :, 1:] > 0, chosen, 0.0)


def _total(weights: Float[Array, "rows slots length"]) -> Float[Array, "rows slots one"]:
    """Return the sum of each slot's weights, at least 1e-9 so that callers can divide by it."""
    return jnp.maximum(weights.sum(axis=2, keepdims=True), 1e-9)


def _weighted_sum(hidden: Hidden, tokens: PackedTokens, weights) -> SlotVectors:
    """Return the weighted sum of the hidden states of each slot. `weights` is
    `[rows, slots, length]`."""
    finite = jnp.where(tokens.segments[:, :, None] != 0, hidden, 0.0)  # padding may hold NaN
    return jnp.einsum("bnt,btd->bnd", weights, finite, precision=lax.Precision.HIGHEST)


class PooledHead(nnx.Module):
    """A head of one vector for each slot: the results of its poolings side by side, through its
    modules."""

    def __init__(self, head: Pooled):
        self.modules = _modules(head)
        self.pooling = head.pooling

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Float[Array, "rows slots width"]:
        pooled = [POOLINGS[name](hidden, tokens) for name in self.pooling]
        return _through(self.modules, jnp.concatenate(pooled, axis=-1))


class TokenHead(nnx.Module):
    """A head of one vector for each token: its hidden state, through the head's modules."""

    def __init__(self, head: PerToken):
        self.modules = _modules(head)

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Float[Array, "rows length width"]:
        return _through(self.modules, hidden)


class VocabularyHead(nnx.Module):
    """A head of sparse embeddings: the weight of each term in each slot, zeros for an empty slot.

    Because the logits of all tokens together would not fit into memory, they are computed for one
    block of tokens at a time, and reduced to a maximum or sum for each slot. Bias and activation do
    not change which logit is the largest, so they are applied to the maximum of a slot, but to each
    token before a sum. A token in several slots counts only for the first of these slots.
    """

    def __init__(self, head: Vocabulary):
        self.modules = _modules(head)
        self.terms = Linear(head.features, padded_terms(head.vocab_size), bias=False)
        self.bias = nnx.Param(jnp.zeros(padded_terms(head.vocab_size), jnp.float32))
        self.over_tokens = head.over_tokens
        self.twice = head.activation == "log1p_relu"
        self.vocab_size = head.vocab_size

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Float[Array, "rows slots terms"]:
        """Return the weight of each term in each slot."""
        rows, slots, _ = tokens.bounds.shape
        x = _through(self.modules, hidden).reshape(-1, self.terms.shape[0])
        member = slot_members(tokens)
        row_start = jnp.arange(rows)[:, None] * slots
        # The slot of each token, numbered over all rows. The number rows * slots means no slot.
        token_slots = jnp.where(
            member.any(axis=1), row_start + member.argmax(axis=1), rows * slots
        ).reshape(-1)
        block = min(BLOCK_TOKENS, len(x))
        padding = -len(x) % block
        x = jnp.pad(x, ((0, padding), (0, 0)))
        token_slots = jnp.pad(token_slots, (0, padding), constant_values=rows * slots)

        def fold(by_slot, block_of_tokens):
            block_x, block_slots = block_of_tokens
            # nothing is computed for tokens in no slot, such as padding
            with native.skipping_padding((block_slots < rows * slots)[None].astype(jnp.int32)):
                logits = self.terms(block_x[None])[0]
            if self.over_tokens == "max":
                return by_slot.at[block_slots].max(logits), None
            return by_slot.at[block_slots].add(self._activated(logits)), None

        initial = -jnp.inf if self.over_tokens == "max" else 0.0
        by_slot = jnp.full((rows * slots + 1, self.terms.shape[1]), initial)
        blocks = x.reshape(-1, block, x.shape[-1]), token_slots.reshape(-1, block)
        by_slot, _ = lax.scan(fold, by_slot, blocks)
        by_slot = by_slot[:-1, : self.vocab_size]
        weights = self._activated(by_slot) if self.over_tokens == "max" else by_slot
        return weights.reshape(rows, slots, -1)

    def _activated(self, logits: Float[Array, "n terms"]) -> Float[Array, "n terms"]:
        """Return the term weights w = log(1 + max(logits + bias, 0)), or log(1 + w) if the
        activation is "log1p_relu"."""
        bias = self.bias[...][None, : logits.shape[1]]
        weights = jnp.log1p(jnp.maximum(logits + bias, 0.0))
        return jnp.log1p(weights) if self.twice else weights


class AttentionPoolingHead(nnx.Module):
    """An attention pooling head: a learned query attends to the tokens of each slot.

    The result goes through a norm and an MLP with a residual connection, and then through the
    head's modules. An empty slot gets arbitrary finite numbers.
    """

    def __init__(self, head: AttentionPooling):
        dim = head.width_in
        self.probe = nnx.Param(jnp.zeros(dim, jnp.float32))
        self.query, self.key_value = Linear(dim, dim), Linear(dim, 2 * dim)
        self.out = Linear(dim, dim)
        self.norm = LayerNorm(dim, eps=head.norm_eps)
        self.up = Linear(dim, head.intermediate_size)
        self.down = Linear(head.intermediate_size, dim)
        self.modules = _modules(head)
        self.num_heads, self.activation = head.num_heads, head.activation

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Float[Array, "rows slots width"]:
        rows, _, dim = hidden.shape
        heads, width = self.num_heads, dim // self.num_heads
        hidden = jnp.where(tokens.segments[:, :, None] != 0, hidden, 0.0)  # padding may hold NaN
        product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        # The query is the same for all tokens: it is multiplied with the weight of the keys once.
        # The keys' bias is left out: it adds the same number to all scores of a head.
        identity = jnp.eye(heads)  # selects what a head computes with its own columns of a weight
        query = self.query(self.probe[...].astype(jnp.float32)[None, None]).reshape(dim, 1)
        by_head = query * width**-0.5 * jnp.repeat(identity, width, axis=0)
        scorer = product(
            "dc,ch->dh", self.key_value.kernel[...], jnp.pad(by_head, ((0, dim), (0, 0)))
        )
        scores = product("bld,dh->bhl", hidden, scorer)[:, None]
        scores = jnp.where(slot_members(tokens)[:, :, None], scores, MASKED)
        # Tokens are averaged before they are multiplied with the weight of the values.
        means = product("bshl,bld->bshd", jax.nn.softmax(scores, axis=-1), hidden)
        values = self.key_value(means.reshape(rows, -1, dim))[:, :, dim:]
        values = values.reshape(rows, -1, heads, heads, width) * identity[None, None, :, :, None]
        pooled = self.out(values.sum(axis=2).reshape(rows, -1, dim))
        pooled = pooled + self.down(ACTIVATIONS[self.activation](self.up(self.norm(pooled))))
        return _through(self.modules, pooled)


HEADS: dict[type[Head], Callable[..., nnx.Module]] = {
    Pooled: PooledHead,
    PerToken: TokenHead,
    Vocabulary: VocabularyHead,
    AttentionPooling: AttentionPoolingHead,
}


def padded_terms(vocab_size: int) -> int:
    """Return the number of columns of the stored table of terms. Columns from `vocab_size` on are
    padding of zeros."""
    return -(-vocab_size // TERM_TILE) * TERM_TILE


class Dense(Linear):
    """sentence-transformers' Dense: a linear layer, an activation, and an optional residual."""

    def __init__(self, layer: DenseLayer):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias)
        self.activation = ACTIVATIONS[layer.activation]
        self.adds_input = layer.residual
        self.residual = (
            Linear(layer.in_features, layer.out_features, bias=False)
            if layer.projects_residual
            else None
        )

    def __call__(self, x: Float[Array, "rows slots in"]) -> Float[Array, "rows slots out"]:
        y = self.activation(super().__call__(x))
        if not self.adds_input:
            return y
        return y + (x if self.residual is None else self.residual(x))


class Normalize(nnx.Module):
    """A module that scales vectors to length one; a vector of zeros stays zero."""

    def __call__(self, x: Float[Array, "rows slots dim"]) -> Float[Array, "rows slots dim"]:
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


class Tanh(nnx.Module):
    """A module that takes the tanh of each value."""

    def __call__(self, x: Float[Array, "rows slots dim"]) -> Float[Array, "rows slots dim"]:
        return jnp.tanh(x)


MODULES: dict[type[Module], Callable[..., nnx.Module]] = {
    DenseLayer: Dense,
    LayerNormLayer: lambda layer: LayerNorm(layer.features, eps=layer.eps, bias=layer.bias),
    NormalizeLayer: lambda layer: Normalize(),
    TanhLayer: lambda layer: Tanh(),
}


def _modules(head: Head) -> Sequence[nnx.Module]:
    """Build the modules of a head that run on the device: all but a Normalize at the end."""
    return nnx.List([MODULES[type(layer)](layer) for layer in head.device_modules])


def _through(modules: Sequence, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Apply the modules one after the other."""
    for layer in modules:
        x = layer(x)
    return x
