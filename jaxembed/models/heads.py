"""What follows a tower: from hidden states to the outputs of a model.

Poolings are pure functions from the hidden states of packed rows to one float32 vector for each
slot, zeros for an empty one. Definitions: sentence_transformers.models.Pooling.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxembed.data.spec import (
    DenseLayer,
    Head,
    LayerNormLayer,
    Module,
    NormalizeLayer,
    PerToken,
    Pooled,
    Probed,
    Vocabulary,
)
from jaxembed.models.attention import MASKED
from jaxembed.models.layers import ACTIVATIONS, LayerNorm, Linear
from jaxembed.models.tokens import Hidden, PackedTokens

BLOCK_TOKENS = 256  # whose logits are in memory at once: 31 MB of 30,592 terms
TABLE_OF_TERMS = ".terms.kernel"  # how the name of its parameter ends
TERM_TILE = 128  # the table of terms is padded to a multiple: the lanes of a TPU, and whole panels

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


class PooledHead(nnx.Module):
    """The pooled hidden states of each slot, through the modules of the head."""

    def __init__(self, head: Pooled):
        self.modules = _modules(head)
        self.pooling = head.pooling

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Float[Array, "rows slots width"]:
        pooled = [POOLINGS[name](hidden, tokens) for name in self.pooling]
        return _through(self.modules, jnp.concatenate(pooled, axis=-1))


class TokenHead(nnx.Module):
    """The hidden state of each token, through the modules of the head."""

    def __init__(self, head: PerToken):
        self.modules = _modules(head)

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Float[Array, "rows length width"]:
        return _through(self.modules, hidden)


class VocabularyHead(nnx.Module):
    """The weights of the vocabulary's terms in each slot, zeros for an empty one.

    The logits of all tokens together would not fit: those of a block are folded into their slots
    before the next block's. The maximum commutes with the bias and the activation, which follow
    once for each slot. A token is of the first slot that holds it.
    """

    def __init__(self, head: Vocabulary):
        self.modules = _modules(head)
        self.terms = Linear(head.features, padded_terms(head.vocab_size), bias=False)
        self.bias = nnx.Param(jnp.zeros(padded_terms(head.vocab_size), jnp.float32))
        self.over_tokens = head.over_tokens
        self.twice = head.activation == "log1p_relu"
        self.vocab_size = head.vocab_size

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Float[Array, "rows slots terms"]:
        rows, slots, _ = tokens.bounds.shape
        x = _through(self.modules, hidden).reshape(-1, self.terms.shape[0])
        member = members(tokens)
        first = jnp.arange(rows)[:, None] * slots
        slot_of = jnp.where(member.any(axis=1), first + member.argmax(axis=1), rows * slots)
        slot_of = slot_of.reshape(-1)  # among those of all rows; of a token in none one more
        block = min(BLOCK_TOKENS, len(x))
        missing = -len(x) % block
        x = jnp.pad(x, ((0, missing), (0, 0)))
        slot_of = jnp.pad(slot_of, (0, missing), constant_values=rows * slots)

        def fold(folded, one):
            x, slot_of = one
            logits = self.terms(x[None])[0]
            if self.over_tokens == "max":
                return folded.at[slot_of].max(logits), None
            return folded.at[slot_of].add(self._activated(logits)), None

        nothing = -jnp.inf if self.over_tokens == "max" else 0.0
        folded = jnp.full((rows * slots + 1, self.terms.shape[1]), nothing)  # the last: padding
        blocks = x.reshape(-1, block, x.shape[-1]), slot_of.reshape(-1, block)
        folded, _ = lax.scan(fold, folded, blocks)
        folded = folded[:-1, : self.vocab_size]
        weights = self._activated(folded) if self.over_tokens == "max" else folded
        return weights.reshape(rows, slots, -1)

    def _activated(self, logits: Float[Array, "n terms"]) -> Float[Array, "n terms"]:
        bias = self.bias[...][None, : logits.shape[1]]
        weights = jnp.log1p(jnp.maximum(logits + bias, 0.0))
        return jnp.log1p(weights) if self.twice else weights


class ProbedHead(nnx.Module):
    """What a learned query finds among the tokens of each slot, through a norm and an MLP with a
    residual, and the modules of the head. An empty slot has anything finite."""

    def __init__(self, head: Probed):
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
        rows, length, dim = hidden.shape
        hidden = jnp.where(tokens.segments[:, :, None] != 0, hidden, 0.0)  # padding may hold NaN
        query = self.query(self.probe[...].astype(jnp.float32)[None, None]).reshape(
            self.num_heads, -1
        )
        joint = self.key_value(hidden).reshape(rows, length, 2, self.num_heads, -1)
        exact = lax.Precision.HIGHEST
        scores = jnp.einsum("blhw,hw->bhl", joint[:, :, 0], query, precision=exact)
        scores = scores[:, None] * query.shape[-1] ** -0.5
        scores = jnp.where(members(tokens)[:, :, None], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1)
        found = jnp.einsum("bshl,blhw->bshw", weights, joint[:, :, 1], precision=exact)
        found = self.out(found.reshape(rows, -1, dim))
        found = found + self.down(ACTIVATIONS[self.activation](self.up(self.norm(found))))
        return _through(self.modules, found)


HEADS: dict[type[Head], Callable[..., nnx.Module]] = {
    Pooled: PooledHead,
    PerToken: TokenHead,
    Vocabulary: VocabularyHead,
    Probed: ProbedHead,
}


def padded_terms(vocab_size: int) -> int:
    """The number of columns of a table of terms in a checkpoint: those over `vocab_size` are
    zero."""
    return -(-vocab_size // TERM_TILE) * TERM_TILE


class Dense(Linear):
    """sentence-transformers' Dense: a linear layer, its activation, and perhaps a residual."""

    def __init__(self, layer: DenseLayer):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias)
        self.activation = ACTIVATIONS[layer.activation]
        self.adds_input = layer.residual
        sizes = layer.in_features, layer.out_features
        self.residual = Linear(*sizes, bias=False) if layer.projects_residual else None

    def __call__(self, x: Float[Array, "rows slots in"]) -> Float[Array, "rows slots out"]:
        y = self.activation(super().__call__(x))
        if not self.adds_input:
            return y
        return y + (x if self.residual is None else self.residual(x))


class Normalize(nnx.Module):
    """Scale to length one; zero stays zero."""

    def __call__(self, x: Float[Array, "rows slots dim"]) -> Float[Array, "rows slots dim"]:
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


MODULES: dict[type[Module], Callable[..., nnx.Module]] = {
    DenseLayer: Dense,
    LayerNormLayer: lambda layer: LayerNorm(layer.features, eps=layer.eps, bias=layer.bias),
    NormalizeLayer: lambda layer: Normalize(),
}


def _modules(head: Head) -> Sequence[nnx.Module]:
    return nnx.List([MODULES[type(layer)](layer) for layer in head.device_modules])


def _through(modules: Sequence, x: Float[Array, "..."]) -> Float[Array, "..."]:
    for layer in modules:
        x = layer(x)
    return x
