"""The text and image encoders of CLIP and its kin: transformers with a norm before each block.

Radford et al. 2021, arXiv:2103.00020. Names and the order of operations are those of transformers'
CLIPModel. The config selects what differs in SigLIP (Zhai et al. 2023, arXiv:2303.15343): attention
between texts' tokens is not causal, and images have no class token. SigLIP2 (Tschannen et al. 2025,
arXiv:2502.14786) takes images of any shape and resizes its position table to them.
"""

from dataclasses import dataclass
from math import isqrt

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxembed.models.attention import AttentionMask
from jaxembed.models.layers import Embedding, LayerNorm, Linear, attend_hidden
from jaxembed.models.tokens import Hidden, PackedTokens

CLASS_ID = 1  # the id of an image's class token, which has no patch; tokens of patches have 0


@dataclass(frozen=True)
class ClipConfig:
    """The sizes and switches of an encoder: of texts if it has a `vocab_size`, else of images."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int  # rows of the position table; they include the class token's
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    causal: bool = False
    vocab_size: int | None = None
    patch_bytes: int | None = None  # bytes of a patch: three times its area in pixels
    patch_bias: bool = False
    class_token: bool = False  # whether the tokens of an image begin with a class token
    input_norm: bool = False  # whether there is a norm before the first layer
    resizes_positions: bool = False  # whether the position table is resized to each image


class Clip(nnx.Module):
    """An encoder: maps packed tokens to the last hidden states, float32 `[rows, length, dim]`.

    Images must be normalized: `pixels` is then float32 `[rows, length, patch_bytes]`.
    """

    Config = ClipConfig

    @staticmethod
    def position_limit(config: ClipConfig) -> int | None:
        """Return the maximum length of a sequence in tokens, or None if positions are resized. JAX
        would clamp a later position without an error."""
        return None if config.resizes_positions else config.max_positions

    def __init__(self, config: ClipConfig):
        is_text = config.vocab_size is not None
        self.embeddings = TextEmbeddings(config) if is_text else PatchEmbeddings(config)
        self.layers = nnx.List([ClipLayer(config) for _ in range(config.num_layers)])
        self.norm = _norm(config)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, tokens)
        return self.norm(hidden)


class TextEmbeddings(nnx.Module):
    """The sum of word and position embeddings."""

    def __init__(self, config: ClipConfig):
        self.word = Embedding(config.vocab_size or 0, config.hidden_size)
        self.position = Embedding(config.max_positions, config.hidden_size)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        return self.word(tokens.ids) + self.position(tokens.positions)


class PatchEmbeddings(nnx.Module):
    """The embeddings of an image: its projected patches, after a class token if there is one, plus
    their positions, and a norm if the config asks for it."""

    def __init__(self, config: ClipConfig):
        dim = config.hidden_size
        self.patch = Linear(config.patch_bytes or 0, dim, bias=config.patch_bias)
        self.class_token = Embedding(1, dim) if config.class_token else None
        position_class = ResizedPositions if config.resizes_positions else Embedding
        self.position = position_class(config.max_positions, dim)
        self.norm = _norm(config) if config.input_norm else None

    def __call__(self, tokens: PackedTokens) -> Hidden:
        assert tokens.pixels is not None
        hidden = self.patch(tokens.pixels)
        if self.class_token is not None:
            is_class = (tokens.ids == CLASS_ID)[:, :, None]
            hidden = jnp.where(is_class, self.class_token(jnp.zeros_like(tokens.ids)), hidden)
        if isinstance(self.position, ResizedPositions):
            assert tokens.places is not None
            hidden = hidden + self.position(tokens.places)
        else:
            hidden = hidden + self.position(tokens.positions)
        return hidden if self.norm is None else self.norm(hidden)


class ResizedPositions(nnx.Module):
    """A square table of position embeddings, resized to the grid of each image's patches.

    The resizing filter is a triangle. If the image has fewer patches on a side than the table has
    rows, the triangle is as wide as the distance between patches, which avoids aliasing.
    """

    def __init__(self, size: int, dim: int):
        self.embedding = nnx.Param(jnp.zeros((size, dim), jnp.float32))

    def __call__(self, places: Int[Array, "rows length 4"]) -> Hidden:
        """Return the position embeddings of patches. A place is the row and the column of a patch,
        and the numbers of rows and columns of its image."""
        table = self.embedding[...].astype(jnp.float32)
        side = isqrt(len(table))
        by_row = triangle_weights(places[:, :, 0], places[:, :, 2], side)
        by_column = triangle_weights(places[:, :, 1], places[:, :, 3], side)
        weights = by_row[:, :, :, None] * by_column[:, :, None, :]
        weights = weights.reshape(*places.shape[:2], side * side)
        return lax.dot_general(
            weights, table, (((2,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
        )


def triangle_weights(
    place: Int[Array, "rows length"], size: Int[Array, "rows length"], side: int
) -> Float[Array, "rows length side"]:
    """Return the weights by which a table of `side` entries, resized to `size` entries, is read at
    the index `place`.

    Entry `place` of the resized table is the sum of the old entries times these weights, as in
    torch's bilinear interpolation with antialias and without aligned corners. The weights of a
    place sum to 1. Distances are integers, in units of 1 / (2 * size) old entries, so that rounding
    does not move the filter.
    """
    centre = (2 * place + 1)[:, :, None] * side
    distance = abs((2 * jnp.arange(side) + 1)[None, None] * size[:, :, None] - centre)
    reach = 2 * jnp.maximum(size, side)[:, :, None]
    weights = jnp.maximum(reach - distance, 0).astype(jnp.float32)
    return weights / weights.sum(axis=-1, keepdims=True)


class ClipLayer(nnx.Module):
    """One layer: attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: ClipConfig):
        dim = config.hidden_size
        self.attention_norm = _norm(config)
        self.qkv = Linear(dim, 3 * dim)
        self.out = Linear(dim, dim)
        self.mlp_norm = _norm(config)
        self.up = Linear(dim, config.intermediate_size)
        self.down = Linear(config.intermediate_size, dim)
        self.num_heads, self.attention_mask = config.num_heads, AttentionMask(causal=config.causal)
        self.activation = config.activation

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Hidden:
        mixed = attend_hidden(
            self.attention_norm(hidden),
            self.qkv,
            self.num_heads,
            tokens.segments,
            self.attention_mask,
            key_segments=tokens.key_segments,
        )
        hidden = hidden + self.out(mixed)
        return hidden + self.down(self.up.apply_rounded(self.mlp_norm(hidden), self.activation))


def _norm(config: ClipConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.norm_eps)
