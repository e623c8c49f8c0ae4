"""The text and image encoders of CLIP and its kin: transformers with a norm before each block.

Radford et al. 2021, arXiv:2103.00020. Names and the order of operations are those of transformers'
CLIPModel. The config selects what differs in SigLIP (Zhai et al. 2023, arXiv:2303.15343): attention
in texts is not causal, and images have no class token. SigLIP2 (Tschannen et al. 2025,
arXiv:2502.14786) takes images of any shape, and resizes its position table to the image.
"""

from dataclasses import dataclass
from math import isqrt

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxembed.models.attention import AttentionMask
from jaxembed.models.layers import Embedding, LayerNorm, Linear, attend_hidden
from jaxembed.models.parallel import share
from jaxembed.models.tokens import Hidden, PackedTokens

CLASS_ID = 1  # the id of an image's class token, which has no patch; tokens with patches have id 0


@dataclass(frozen=True)
class ClipConfig:
    """The sizes and switches of a text encoder, or if `vocab_size` is None of an image encoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int  # rows of the position table, including the row of the class token
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

    The pixels must be normalized: `tokens.pixels` is float32 `[rows, length, patch_bytes]`.
    """

    Config = ClipConfig

    @staticmethod
    def position_limit(config: ClipConfig) -> int | None:
        """Return the maximum length of a sequence in tokens, or None if positions are resized. For
        later positions JAX would use the last row of the table, without an error."""
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
    """The embeddings of an image: projected patches, after a class token if there is one, plus
    position embeddings, then a norm if the config has `input_norm`."""

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

    The resizing filter is a triangle. If a side of the image has fewer patches than a side of the
    table has entries, the triangle is widened to the distance between patches, to avoid aliasing.
    """

    def __init__(self, size: int, dim: int):
        self.embedding = nnx.Param(jnp.zeros((size, dim), jnp.float32))

    def __call__(self, places: Int[Array, "rows length 4"]) -> Hidden:
        """Return the position embeddings of patches. The four numbers of a place are the row and
        the column of the patch, and the numbers of rows and of columns of its image."""
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
    """Return the weights that resize a table of `side` entries to `size` entries.

    Entry `place` of the resized table is the sum of the old entries times these weights, which sum
    to 1, as in torch's bilinear interpolation with antialias and without aligned corners. `place`
    and `size` have a value for each token. Distances are integers, in units of 1 / (2 * size) old
    entries, so that there are no rounding errors.
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
        head, column = (config.num_heads, dim // config.num_heads), (config.intermediate_size, 1)
        self.num_heads = share(config.num_heads, "attention heads")
        share(config.intermediate_size, "columns of the MLP")
        self.qkv = Linear(dim, 3 * dim, columns=(head,) * 3)
        self.out = Linear(dim, dim, rows=(head,))
        self.mlp_norm = _norm(config)
        self.up = Linear(dim, config.intermediate_size, columns=(column,))
        self.down = Linear(config.intermediate_size, dim, rows=(column,))
        self.attention_mask = AttentionMask(causal=config.causal)
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
