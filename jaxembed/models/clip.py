"""The text and image encoders of CLIP and its kin: transformers with a norm before each block.

Radford et al. 2021, arXiv:2103.00020. Names and the order of operations are those of transformers'
CLIPModel. The config selects what differs in SigLIP (Zhai et al. 2023, arXiv:2303.15343): attention
in texts is not causal, and images have no class token. SigLIP2 (Tschannen et al. 2025,
arXiv:2502.14786) takes images of any shape, and resizes its position table to the image. EVA-02
(Fang et al. 2023, arXiv:2303.11331), the image encoder of jina-clip, has layers of its own.
"""

from dataclasses import dataclass
from math import isqrt

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxembed.models.attention import AttentionMask
from jaxembed.models.layers import (
    Embedding,
    LayerNorm,
    Linear,
    Mlp,
    after_attention,
    attend_hidden,
)
from jaxembed.models.parallel import refuse, share
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Hidden, PackedTokens

CLASS_ID = 1  # the id of an image's class token, which has no patch; tokens with patches have id 0
ROTARY_THETA = 10_000.0  # base of EVA-02's rotary angles


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
    # Layers are EVA-02's, in which the sides of an image have this length for the rotary angles,
    # however many patches they have; None: layers are CLIP's, without rotary angles.
    rotary_span: int | None = None


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
        self.span = config.rotary_span
        layer = ClipLayer if self.span is None else EvaLayer
        self.layers = nnx.List([layer(config) for _ in range(config.num_layers)])
        self.norm = _norm(config)
        self.side = isqrt(config.max_positions - 1)  # patches along a side, if layers are EVA-02's
        self.head_width = config.hidden_size // config.num_heads

    def __call__(self, tokens: PackedTokens) -> Hidden:
        hidden = self.embeddings(tokens)
        rotation = None if self.span is None else self._rotation(tokens, self.span)
        for layer, of_layer in zip(self.layers, tokens.by_layer(len(self.layers)), strict=True):
            hidden = layer(hidden, of_layer, rotation)
        return self.norm(hidden)

    def _rotation(self, tokens: PackedTokens, span: int) -> Rotation:
        """Return the rotation by the places of patches. The class token, which is the first token,
        does not rotate: its place is zero."""
        patch = jnp.maximum(tokens.positions - 1, 0)
        # in the order of operations of the published code, in float32
        places = np.arange(self.side, dtype=np.float32) / np.float32(self.side) * np.float32(span)
        row, column = (jnp.asarray(places)[index] for index in jnp.divmod(patch, self.side))
        return Rotation.of_grid(row, column, self.head_width, ROTARY_THETA)


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

    def __call__(
        self, hidden: Hidden, tokens: PackedTokens, rotation: Rotation | None = None
    ) -> Hidden:
        mixed = attend_hidden(
            self.attention_norm(hidden),
            self.qkv,
            self.num_heads,
            tokens.segments,
            self.attention_mask,
            rotation=rotation,
            key_segments=tokens.key_segments,
        )
        with after_attention(tokens):
            hidden = hidden + self.out(mixed)
            return hidden + self.down(self.up.apply_rounded(self.mlp_norm(hidden), self.activation))


class EvaLayer(nnx.Module):
    """One layer of EVA-02: as a ClipLayer, but the MLP is gated, queries and keys rotate, and there
    are two more norms, before the last linear layer of the attention and of the MLP."""

    def __init__(self, config: ClipConfig):
        refuse("a norm over all heads")
        dim = config.hidden_size
        self.attention_norm = _norm(config)
        self.num_heads = config.num_heads
        self.qkv = Linear(dim, 3 * dim)
        self.mixed_norm = _norm(config)
        self.out = Linear(dim, dim)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(dim, config.intermediate_size, activation=config.activation, bias=True)
        self.wide_norm = LayerNorm(config.intermediate_size, eps=config.norm_eps)

    def __call__(self, hidden: Hidden, tokens: PackedTokens, rotation: Rotation | None) -> Hidden:
        mixed = attend_hidden(
            self.attention_norm(hidden),
            self.qkv,
            self.num_heads,
            tokens.segments,
            rotation=rotation,
            key_segments=tokens.key_segments,
        )
        with after_attention(tokens):
            hidden = hidden + self.out(self.mixed_norm(mixed.astype(jnp.float32)))
            wide = self.mlp.wide(self.mlp_norm(hidden)).astype(jnp.float32)
            return hidden + self.mlp.down(self.wide_norm(wide))


def _norm(config: ClipConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.norm_eps)
