"""The tower of BERT and its kin: encoders with a norm after each block.

Devlin et al. 2019, arXiv:1810.04805. Names and the order of operations are those of transformers'
BertModel. The config says in what the others differ: RoBERTa (Liu et al. 2019, arXiv:1907.11692)
counts positions from another number; DistilBERT (Sanh et al. 2019, arXiv:1910.01108) has no token
types; MPNet (Song et al. 2020, arXiv:2004.09297) adds a bias by distance to the scores; NomicBERT
(Nussbaum et al. 2024, arXiv:2402.01613) and GTE (Zhang et al. 2024, arXiv:2407.19669) have rotary
positions and gated MLPs; JinaBERT (Günther et al. 2023, arXiv:2310.19923) has gated MLPs and lowers
scores by the distance; ELECTRA (Clark et al. 2020, arXiv:2003.10555) has embeddings of another
width; ALBERT (Lan et al. 2019, arXiv:1909.11942) has them too, and runs one layer many times. Knows
nothing of pooling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxembed.models import native
from jaxembed.models.attention import Bias, attend_joint, is_native
from jaxembed.models.layers import (
    BiasByDistance,
    Embedding,
    LayerNorm,
    Linear,
    Mlp,
    attend_hidden,
)
from jaxembed.models.rope import Rotation, read_scaling
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class BertConfig:
    """The sizes and switches of a tower. The defaults of the switches are BERT's."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int  # size of the table of positions; without one, the most tokens
    type_vocab_size: int  # 0: tokens have no types, as in DistilBERT
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    pad_id: int | None = None  # RoBERTa counts positions from it; None: positions start at 0
    rope_theta: float | None = None  # base of rotary angles; None: a table of positions instead
    rope_scaling: Mapping[str, Any] | None = None  # fields of a RopeScaling; None: not scaled
    bias_reach: int | None = None  # distance from which on MPNet's biases stay the same; None: none
    alibi: bool = False  # whether scores are lowered by the distance; then positions have no table
    attention_bias: bool = True  # of the products of attention
    qk_norm: bool = False  # a norm of whole queries and one of whole keys, before heads are split
    residual_norm: bool = False  # whether x is added to attention once more, followed by a norm
    gated: bool = False  # whether the MLP is gated
    up_bias: bool = True  # of the first product of the MLP
    down_bias: bool = True  # of its last product
    embedding_size: int | None = None  # width of embeddings to project; None: hidden_size, as is
    layer_order: Sequence[int] | None = None  # numbers of the layers as they run; None: each once


class Bert(nnx.Module):
    """The tower: maps packed tokens to their last hidden states, float32 `[rows, length, dim]`."""

    Config = BertConfig

    @staticmethod
    def position_limit(config: BertConfig) -> int:
        """The most tokens of a sequence: JAX would clamp a later position without an error."""
        return config.max_positions - (0 if config.pad_id is None else config.pad_id + 1)

    def __init__(self, config: BertConfig):
        self.embeddings = BertEmbeddings(config)
        reach = config.bias_reach
        self.distance = None if reach is None else BiasByDistance(config.num_heads, reach)
        self.alibi_heads = config.num_heads if config.alibi else None
        self.layers = nnx.List(
            [BertLayer(config, BertAttention(config)) for _ in range(config.num_layers)]
        )
        self.layer_order = tuple(config.layer_order or range(config.num_layers))
        self.head_width = config.hidden_size // config.num_heads
        self.rope_theta = config.rope_theta
        self.rope_scaling = read_scaling(config.rope_scaling)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        hidden = self.embeddings(tokens)
        rotation = bias = None
        if self.rope_theta is not None:
            rotation = Rotation.of(tokens, self.head_width, self.rope_theta, self.rope_scaling)
        length = tokens.ids.shape[1]
        if self.distance is not None:
            bias = self.distance(length)
        elif self.alibi_heads is not None:
            bias = alibi(self.alibi_heads, length)
        for number in self.layer_order:
            hidden = self.layers[number](hidden, tokens, rotation, bias)
        return hidden


def alibi(heads: int, length: int) -> Bias:
    """The bias of ALiBi in rows of this length, -slope times the distance, which is its form for
    both directions: Press et al. 2021, arXiv:2108.12409."""
    distances = np.abs(np.arange(1 - length, length, dtype=np.float32))
    return jnp.asarray(-np.asarray(alibi_slopes(heads), np.float32)[:, None] * distances)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head: powers of two with equal steps between them, down to 2^-8.

    If the number of heads is no power of two, the slopes are those of the next lower one, then
    every second one of twice that.
    """
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    between = [2 ** (-4 * (head + 1) / lower) for head in range(0, 2 * lower, 2)]
    return (*slopes, *between[: heads - lower])


class BertEmbeddings(nnx.Module):
    """The sum of word, type and position embeddings, as far as there are any, its norm, and the
    projection of that to the width of the tower, if there is one."""

    def __init__(self, config: BertConfig):
        size = config.embedding_size or config.hidden_size
        self.word = Embedding(config.vocab_size, size)
        learned = config.rope_theta is None and not config.alibi
        self.position = Embedding(config.max_positions, size) if learned else None
        types = config.type_vocab_size
        self.type = Embedding(types, size) if types else None
        self.norm = LayerNorm(size, eps=config.norm_eps)
        is_projected = config.embedding_size is not None
        self.projection = Linear(size, config.hidden_size) if is_projected else None
        self.pad_id = config.pad_id

    def __call__(self, tokens: PackedTokens) -> Hidden:
        hidden = self.word(tokens.ids)
        if self.type is not None:
            hidden = hidden + self.type(tokens.types)
        if self.position is not None:
            positions = tokens.positions
            if self.pad_id is not None:
                positions = positions_after_pad(tokens, self.pad_id)
            hidden = hidden + self.position(positions)
        hidden = self.norm(hidden)
        return hidden if self.projection is None else self.projection(hidden)


def positions_after_pad(tokens: PackedTokens, pad_id: int) -> Int[Array, "rows length"]:
    """Compute RoBERTa's positions within each segment.

    They start at pad_id + 1. A pad token within a text gets the position pad_id and is not counted.
    This is transformers' create_position_ids_from_input_ids for packed rows.
    """
    pads = (tokens.ids == pad_id).astype(jnp.int32)
    before = jnp.cumsum(pads, axis=1) - pads
    first = jnp.arange(tokens.ids.shape[1])[None] - tokens.positions
    before_in_segment = before - jnp.take_along_axis(before, first, axis=1)
    return jnp.where(pads == 1, pad_id, pad_id + 1 + tokens.positions - before_in_segment)


class BertLayer(nnx.Module):
    """One layer: attention and MLP, each followed by a residual connection and a norm."""

    def __init__(self, config: BertConfig, attention: "BertAttention"):
        dim, eps = config.hidden_size, config.norm_eps
        self.attention = attention
        self.attention_norm = LayerNorm(dim, eps=eps)
        self.residual_norm = LayerNorm(dim, eps=eps) if config.residual_norm else None
        self.mlp = Mlp(
            dim,
            config.intermediate_size,
            activation=config.activation,
            gated=config.gated,
            bias=config.up_bias,
            down_bias=config.down_bias,
        )
        self.mlp_norm = LayerNorm(dim, eps=eps)

    def __call__(
        self,
        hidden: Hidden,
        tokens: PackedTokens,
        rotation: Rotation | None = None,
        bias: Bias | None = None,
    ) -> Hidden:
        mixed = self.attention(hidden, tokens, rotation, bias)
        mlp = self.mlp
        linears = {
            "out": self.attention.out,
            "up": mlp.gate_up if mlp.gated else mlp.up,
            "down": mlp.down,
        }
        out, up, down = (linear.parameters for linear in linears.values())
        takes_up = (
            native.takes_gated(up[0], mlp.activation) if mlp.gated else mlp.activation == "gelu"
        )
        takes = takes_up and native.takes_mlp(hidden, out[0], up[0], down[0])
        if takes and self.residual_norm is None and is_native("mlp"):  # it does all that follows
            return native.mlp(
                mixed.astype(jnp.bfloat16),
                hidden,
                (*out, *self.attention_norm.parameters),
                up,
                (*down, *self.mlp_norm.parameters),
                self.mlp_norm.eps,
                mlp.activation if mlp.gated else None,
                {name: linear.native_adapters for name, linear in linears.items()},
            )
        attended = self.attention_norm.of_sum(hidden, self.attention.out, mixed)
        hidden = attended if self.residual_norm is None else self.residual_norm(hidden + attended)
        return self.mlp_norm.of_sum(hidden, mlp.down, mlp.wide(hidden))


class BertAttention(nnx.Module):
    """Self-attention without its output product `out`, which the layer computes with the norm."""

    def __init__(self, config: BertConfig):
        dim = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv = Linear(dim, 3 * dim, bias=config.attention_bias)
        self.out = Linear(dim, dim, bias=config.attention_bias)
        # of whole queries and of whole keys, before they are split into heads
        norms = {part: LayerNorm(dim, eps=config.norm_eps) for part in ("query", "key")}
        self.norms = nnx.Dict(norms) if config.qk_norm else None

    def __call__(
        self,
        hidden: Hidden,
        tokens: PackedTokens,
        rotation: Rotation | None = None,
        bias: Bias | None = None,
    ) -> Hidden:
        seen = {"bias": bias, "rotation": rotation, "key_segments": tokens.key_segments}
        if self.norms is None:
            return attend_hidden(hidden, self.qkv, self.num_heads, tokens.segments, **seen)
        rows, length, dim = hidden.shape
        query, key, value = jnp.split(self.qkv(hidden), 3, axis=-1)
        parts = (self.norms["query"](query), self.norms["key"](key), value)
        joint = jnp.concatenate(parts, axis=-1).astype(self.qkv.kernel[...].dtype)
        joint = joint.reshape(rows, length, 3, self.num_heads, dim // self.num_heads)
        return attend_joint(joint, tokens.segments, **seen).reshape(rows, length, dim)
