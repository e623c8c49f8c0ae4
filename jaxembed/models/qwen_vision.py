"""The image encoder of Qwen2-VL, 2.5-VL and 3-VL: rotary positions, and patches merged to tokens.

Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923 and arXiv:2511.21631. Names
and the order of operations are those of transformers' models of these names. A token's place begins
with three numbers: added to its position they give its time, row and column, as the decoder counts
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxembed.models import native
from jaxembed.models.attention import AttentionMask, with_segments
from jaxembed.models.layers import Embedding, LayerNorm, Linear, Mlp, RMSNorm, attend_hidden
from jaxembed.models.parallel import share
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Hidden, PackedTokens, Segments


@dataclass(frozen=True)
class QwenVisionConfig:
    """The sizes and switches of the image encoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    out_size: int  # dimensions of the result, which are those of the language model
    patch_bytes: int  # bytes of a patch: three times its area in pixels
    merge: int  # a token is made of merge * merge patches
    activation: str  # a name in ACTIVATIONS
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    rms_norm: bool = False  # whether norms are RMS norms and MLPs gated; True in Qwen2.5-VL
    window: int | None = None  # tokens on a side of an attention window; None: the whole image
    global_layers: Sequence[int] = ()  # numbers of the layers without a window, from 0
    patch_bias: bool = False  # True in Qwen3-VL, as are the next two
    table_size: int = 0  # entries of a square table of position embeddings; 0: there is none
    deepstack: Sequence[int] = ()  # numbers of the layers whose output is also merged to tokens


class PatchMerger(nnx.Module):
    """Joins the patches of each token after a norm, and maps them to `out_size` numbers."""

    def __init__(self, config: QwenVisionConfig, *, joins_first: bool = False):
        """With `joins_first` the patches are joined before the norm."""
        size = config.hidden_size * config.merge**2
        self.norm = LayerNorm(size, eps=config.norm_eps) if joins_first else _norm(config)
        self.up, self.down = Linear(size, size), Linear(size, config.out_size)
        self.merge, self.joins_first = config.merge, joins_first

    def merged(self, hidden: Float[Array, "rows patches width"]) -> Hidden:
        """Return float32 `[rows, length, out_size]` for the hidden states of patches."""
        joined = len(hidden), hidden.shape[1] // self.merge**2, -1
        hidden = (
            self.norm(hidden.reshape(joined))
            if self.joins_first
            else self.norm(hidden).reshape(joined)
        )
        return self.down(self.up.apply_rounded(hidden, "gelu"))


class QwenVision(PatchMerger):
    """The image encoder: maps the tokens of images to a list of float32 `[rows, length, out_size]`.

    The language model takes the first in the place of word embeddings, and adds the others, one for
    each layer of `deepstack`, after its first layers. `tokens.pixels` must be normalized, float32
    `[rows, length, values]`. `tokens.segments` must be 0 for tokens of texts, which get an
    arbitrary result. `tokens.places` are the three numbers of `mrope_positions`, and with a table
    of positions the numbers of rows and columns of tokens in the image.
    """

    Config = QwenVisionConfig

    def __init__(self, config: QwenVisionConfig):
        super().__init__(config)
        self.patch = Linear(config.patch_bytes, config.hidden_size, bias=config.patch_bias)
        self.position = GridPositions(config) if config.table_size else None
        self.layers = nnx.List([VisionLayer(config, n) for n in range(config.num_layers)])
        self.mergers = nnx.List([PatchMerger(config, joins_first=True) for _ in config.deepstack])
        self.deepstack = tuple(config.deepstack)
        self.window, self.theta = config.window, config.rope_theta
        self.head_width = config.hidden_size // config.num_heads

    def __call__(self, tokens: PackedTokens) -> list[Hidden]:
        """Compute the layers on patches, then merge the patches of each token."""
        if self.window is None:
            return self.run(tokens, tokens.segments)
        tokens, windows, order = by_window(tokens, self.window)
        return [at(merged, jnp.argsort(order, axis=1)) for merged in self.run(tokens, windows)]

    def run(self, tokens: PackedTokens, windows: Segments) -> list[Hidden]:
        """Compute the result for tokens in the order of their `windows`, numbered like segments."""
        assert tokens.pixels is not None
        rows, length, _ = tokens.pixels.shape
        patches_per_token = self.merge**2
        patches = tokens.pixels.reshape(rows, length * patches_per_token, -1)
        images, windows = (
            jnp.repeat(numbers, patches_per_token, axis=1) for numbers in (tokens.segments, windows)
        )
        # Each patch is rotated by the row and the column of the patch in its image. `row` and
        # `column` are those of the token.
        within_token = jnp.arange(self.merge)
        row, column = _row_and_column(tokens)
        shape = rows, length, self.merge, self.merge
        in_row = self.merge * row[:, :, None, None] + within_token[None, None, :, None]
        in_column = self.merge * column[:, :, None, None] + within_token[None, None, None, :]
        patch_rows, patch_columns = (
            jnp.broadcast_to(numbers, shape).reshape(rows, -1) for numbers in (in_row, in_column)
        )
        rotation = Rotation.of_grid(patch_rows, patch_columns, self.head_width, self.theta)
        to_merge = []
        with native.skipping_padding(images):
            hidden = self.patch(patches)
            if self.position is not None:
                assert tokens.places is not None
                sides = self.merge * jnp.repeat(tokens.places[:, :, 3:], patches_per_token, axis=1)
                hidden = hidden + self.position(patch_rows, patch_columns, sides)
            for number, layer in enumerate(self.layers):
                hidden = layer(hidden, images, windows, rotation)
                if number in self.deepstack:
                    to_merge.append(hidden)
        with native.skipping_padding(tokens.segments):
            pairs = zip((self, *self.mergers), (hidden, *to_merge), strict=True)
            return [merger.merged(of_patches) for merger, of_patches in pairs]


class GridPositions(nnx.Module):
    """A square table of position embeddings, resized to the grid of each image's patches.

    The resizing is bilinear, and the corners of the grid are those of the table.
    """

    def __init__(self, config: QwenVisionConfig):
        self.table = Embedding(config.table_size, config.hidden_size)
        self.side = isqrt(config.table_size)

    def __call__(self, row: Segments, column: Segments, sides: Int[Array, "..."]) -> Hidden:
        """Return the position embeddings of patches, with the row and the column of each, and in
        `sides`, int `[rows, length, 2]`, the numbers of rows and columns of patches in its image.
        """
        near_rows, near_columns = (
            self._neighbours(place, sides[:, :, axis]) for axis, place in enumerate((row, column))
        )
        terms = [
            (by_row * by_column)[:, :, None] * self.table(at_row * self.side + at_column)
            for at_row, by_row in near_rows
            for at_column, by_column in near_columns
        ]
        return sum(terms[1:], terms[0])

    def _neighbours(
        self, place: Segments, size: Segments
    ) -> list[tuple[Segments, Float[Array, "rows length"]]]:
        """Return the entries before and after a `place` of `size` along a side of the table, with
        their weights. Distances are integers, so that they are not rounded."""
        last = jnp.maximum(size - 1, 1)
        scaled = place * (self.side - 1)
        before = scaled // last
        share = (scaled - before * last).astype(jnp.float32) / last.astype(jnp.float32)
        return [(before, 1 - share), (jnp.minimum(before + 1, self.side - 1), share)]


class VisionLayer(nnx.Module):
    """One layer: attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: QwenVisionConfig, number: int):
        """`number` is the layer's index."""
        dim = config.hidden_size
        window = None if number in config.global_layers else config.window
        self.is_local = window is not None
        # The patches of a window are adjacent, and the distance between two is less than their
        # number.
        reach = None if window is None else (window * config.merge) ** 2 - 1
        self.mask, self.patches_per_token = AttentionMask(reach=reach), config.merge**2
        # Segments per token: the smallest image has three tokens with those around it. No image has
        # more windows for its size than one that is a token longer than a window.
        self.most_segments = 1 / 3 if window is None else max(1 / 3, 2 / (window + 1))
        self.attention_norm = _norm(config)
        head = (config.num_heads, dim // config.num_heads)
        self.num_heads = share(config.num_heads, "attention heads of the image encoder")
        self.qkv = Linear(dim, 3 * dim, columns=(head,) * 3)
        self.out = Linear(dim, dim, rows=(head,))
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(
            dim,
            config.intermediate_size,
            activation=config.activation,
            gated=config.rms_norm,
            bias=True,
        )

    def __call__(
        self, hidden: Hidden, images: Segments, windows: Segments, rotation: Rotation
    ) -> Hidden:
        """Return the layer's output. `images` and `windows` number the image and the window of each
        patch, like segments. A local layer attends within windows, other layers within images."""
        normal = self.attention_norm(hidden)
        segments = windows if self.is_local else images
        tokens = hidden.shape[1] // self.patches_per_token
        with with_segments(int(self.most_segments * tokens) + 1):
            mixed = attend_hidden(
                normal, self.qkv, self.num_heads, segments, self.mask, rotation=rotation
            )
        hidden = hidden + self.out(mixed)
        return hidden + self.mlp(self.mlp_norm(hidden))


def by_window(tokens: PackedTokens, side: int) -> tuple[PackedTokens, Segments, Segments]:
    """Return tokens in the order of their attention windows, the number of each one's window, and
    the index of each in its row before.

    Windows of `side` by `side` tokens divide an image from its upper left corner on. Tokens of
    segment 0 come first and have number 0; the numbers count from 1 along the row. Only the fields
    `segments`, `pixels` and `places` are sorted.
    """
    row, column = _row_and_column(tokens)
    is_patch = tokens.segments != 0
    window = tokens.segments, *(jnp.where(is_patch, x // side, 0) for x in (row, column))
    order = jnp.lexsort(window[::-1], axis=1)  # the last key is compared first
    windows = jnp.stack([at(numbers, order) for numbers in window])
    begins = jnp.any(windows != jnp.pad(windows[:, :, :-1], ((0, 0), (0, 0), (1, 0))), axis=0)
    sorted_tokens = replace(
        tokens, **{k: at(getattr(tokens, k), order) for k in ("segments", "pixels", "places")}
    )
    return sorted_tokens, jnp.cumsum(begins, axis=1), order


def at(x: Array, order: Segments) -> Array:
    """Return the values `x`, `[rows, length, ...]`, in another order: those at the indices `order`
    in each row."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)


def _row_and_column(tokens: PackedTokens) -> tuple[Segments, Segments]:
    """Return the row and the column of each token in its image."""
    assert tokens.places is not None
    time, row, column = (tokens.places[:, :, number] for number in range(3))
    return row - time, column - time


def _norm(config: QwenVisionConfig) -> LayerNorm | RMSNorm:
    kind = RMSNorm if config.rms_norm else LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)
