"""The backbone of BERT and its kin: encoders with a norm after each block.

Devlin et al. 2019, arXiv:1810.04805. Names and the order of operations are those of transformers'
BertModel. The config selects what differs in other models: RoBERTa (Liu et al. 2019,
arXiv:1907.11692) starts to count positions at another number; DistilBERT (Sanh et al. 2019,
arXiv:1910.01108) has no token types; MPNet (Song et al. 2020, arXiv:2004.09297) adds a bias by
distance to the scores; NomicBERT (Nussbaum et al. 2024, arXiv:2402.01613) and GTE (Zhang et al.
2024, arXiv:2407.19669) have rotary positions and gated MLPs; JinaBERT (Günther et al. 2023,
arXiv:2310.19923) has gated MLPs and ALiBi; ELECTRA (Clark et al. 2020, arXiv:2003.10555) and ALBERT
(Lan et al. 2019, arXiv:1909.11942) project embeddings of another width, and ALBERT runs one layer
many times. nomic-embed-text-v2-moe (Nussbaum and Duderstadt 2025, arXiv:2502.07972) has routed
experts in some layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxembed.models import native, parallel
from jaxembed.models.attention import Bias, attend_joint, is_native
from jaxembed.models.experts import Experts
from jaxembed.models.layers import (
    BiasByDistance,
    Embedding,
    LayerNorm,
    Linear,
    Mlp,
    after_attention,
    attend_hidden,
    stored_on_gpu,
)
from jaxembed.models.rope import Rotation, read_scaling
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class BertConfig:
    """The sizes and switches of the backbone. The defaults of the switches are BERT's."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int  # rows of the position table, or maximum tokens if there is no table
    type_vocab_size: int  # the number of token types; 0: tokens have no types, as in DistilBERT
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    pad_id: int | None = None  # positions start at pad_id + 1, as in RoBERTa; None: at 0
    rope_theta: float | None = None  # base of rotary angles; None: no rotary positions
    rope_scaling: Mapping[str, Any] | None = None  # the fields of a RopeScaling; None: no scaling
    # Scores have a learned bias by distance, constant from this one on, as in MPNet; None: no bias.
    bias_reach: int | None = None
    alibi: bool = False  # whether ALiBi's bias of scores replaces the table of positions
    attention_bias: bool = True  # whether attention's linear layers have a bias
    qk_norm: bool = False  # whether whole queries and keys are normed before heads are split
    residual_norm: bool = False  # whether the layer's input is added and normed once more
    gated: bool = False  # whether the MLP is gated
    up_bias: bool = True  # whether the MLP's first linear layer has a bias
    down_bias: bool = True  # whether the MLP's last linear layer has a bias
    embedding_size: int | None = None  # width of embeddings before a projection; None: hidden_size
    layer_order: Sequence[int] | None = None  # the numbers of layers to run in order; None: all
    expert_layers: Sequence[int] = ()  # the numbers of layers whose MLP has routed experts
    experts: int = 0  # of such a layer
    active_experts: int = 0  # those that each token uses


class Bert(nnx.Module):
    """The backbone: maps packed tokens to the last hidden states, float32 `[rows, length, dim]`."""

    Config = BertConfig

    @staticmethod
    def position_limit(config: BertConfig) -> int:
        """Return the maximum length of a sequence in tokens. For later positions JAX would use the
        last row of the position table, without an error."""
        return config.max_positions - (0 if config.pad_id is None else config.pad_id + 1)

    def __init__(self, config: BertConfig):
        self.embeddings = BertEmbeddings(config)
        self.distance = (
            None
            if config.bias_reach is None
            else BiasByDistance(config.num_heads, config.bias_reach)
        )
        self.alibi_heads = config.num_heads if config.alibi else None
        self.own_heads = parallel.share(config.num_heads, "attention heads")
        self.layers = nnx.List(
            [
                BertLayer(config, BertAttention(config), has_experts=i in config.expert_layers)
                for i in range(config.num_layers)
            ]
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
            bias = parallel.own_part(alibi(self.alibi_heads, length), self.own_heads)
        by_layer = tokens.by_layer(len(self.layer_order))
        for place, (number, of_layer) in enumerate(zip(self.layer_order, by_layer, strict=True)):
            hidden = hidden if place == 0 else stored_on_gpu(hidden)
            hidden = self.layers[number](hidden, of_layer, rotation, bias)
        return hidden


def alibi(heads: int, length: int) -> Bias:
    """Return the bias of ALiBi in its symmetric form, -slope * |distance|, as `attend` takes it.

    `length` is the length of the rows in tokens. The result is `[heads, 2 * length - 1]`. Press et
    al. 2021, arXiv:2108.12409.
    """
    distances = np.abs(np.arange(1 - length, length, dtype=np.float32))
    return jnp.asarray(-np.asarray(alibi_slopes(heads), np.float32)[:, None] * distances)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slope of each head: a geometric sequence that ends with 2^-8.

    If the number of heads is not a power of two, there are first the slopes for the next lower
    power of two, p, and then every second slope of those for 2 * p heads.
    """
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    between = [2 ** (-4 * (head + 1) / lower) for head in range(0, 2 * lower, 2)]
    return (*slopes, *between[: heads - lower])


class BertEmbeddings(nnx.Module):
    """The embeddings: the sum of word, type and position embeddings, a norm, and a projection to
    the width of the backbone. Types, positions and the projection are optional."""

    def __init__(self, config: BertConfig):
        size = config.embedding_size or config.hidden_size
        self.word = Embedding(config.vocab_size, size)
        has_table = config.rope_theta is None and not config.alibi
        self.position = Embedding(config.max_positions, size) if has_table else None
        self.type = Embedding(config.type_vocab_size, size) if config.type_vocab_size else None
        self.norm = LayerNorm(size, eps=config.norm_eps)
        self.projection = (
            None if config.embedding_size is None else Linear(size, config.hidden_size)
        )
        self.pad_id = config.pad_id

    def __call__(self, tokens: PackedTokens) -> Hidden:
        hidden = self.word(tokens.ids)
        if self.type is not None:
            hidden = hidden + self.type(tokens.types)
        if self.position is not None:
            positions = tokens.positions
            if self.pad_id is not None:  # RoBERTa
                positions = positions_after_pad(tokens, self.pad_id)
            hidden = hidden + self.position(positions)
        hidden = self.norm(stored_on_gpu(hidden))
        return hidden if self.projection is None else self.projection(hidden)


def positions_after_pad(tokens: PackedTokens, pad_id: int) -> Int[Array, "rows length"]:
    """Return RoBERTa's position of each token within its segment.

    Positions start at pad_id + 1. A pad token within a text gets the position pad_id and is not
    counted. This is transformers' create_position_ids_from_input_ids for packed rows.
    """
    pads = (tokens.ids == pad_id).astype(jnp.int32)
    pads_before = jnp.cumsum(pads, axis=1) - pads
    segment_start = jnp.arange(tokens.ids.shape[1])[None] - tokens.positions
    pads_in_segment = pads_before - jnp.take_along_axis(pads_before, segment_start, axis=1)
    return jnp.where(pads == 1, pad_id, pad_id + 1 + tokens.positions - pads_in_segment)


class BertLayer(nnx.Module):
    """One layer: attention and MLP, each followed by a residual connection and a norm."""

    def __init__(
        self, config: BertConfig, attention: "BertAttention", *, has_experts: bool = False
    ):
        dim, eps = config.hidden_size, config.norm_eps
        self.attention = attention
        self.attention_norm = LayerNorm(dim, eps=eps)
        self.residual_norm = LayerNorm(dim, eps=eps) if config.residual_norm else None
        sizes = (dim, config.intermediate_size)
        if has_experts:
            self.mlp = Experts(
                *sizes,
                activation=config.activation,
                experts=config.experts,
                active=config.active_experts,
            )
        else:
            self.mlp = Mlp(
                *sizes,
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
        """Return the layer's output. What follows the attention is computed by a single native call
        if this call supports the weights and shapes."""
        mixed = self.attention(hidden, tokens, rotation, bias)
        with after_attention(tokens):
            return self._finished(mixed, hidden, tokens)

    def _finished(
        self, mixed: Float[Array, "rows length inner"], hidden: Hidden, tokens: PackedTokens
    ) -> Hidden:
        """Return the layer's output from the result of attention and the layer's input."""
        mlp = self.mlp
        if isinstance(mlp, Mlp) and self._is_joined(mlp):
            linears = {
                "out": self.attention.out,
                "up": mlp.gate_up if mlp.gated else mlp.up,
                "down": mlp.down,
            }
            out, up, down = (linear.parameters for linear in linears.values())
            return native.mlp(
                mixed.astype(out[0].dtype),
                hidden,
                (*out, *self.attention_norm.parameters),
                up,
                (*down, *self.mlp_norm.parameters),
                self.mlp_norm.eps,
                end=f"gated_{mlp.activation}" if mlp.gated else mlp.activation,
                adapters={name: linear.native_adapters for name, linear in linears.items()},
            )
        attended = self.attention_norm.norm_of_sum(hidden, self.attention.out, mixed)
        hidden = attended if self.residual_norm is None else self.residual_norm(hidden + attended)
        hidden = stored_on_gpu(hidden)
        if isinstance(mlp, Experts):
            return self.mlp_norm(hidden + mlp(hidden, tokens.segments))
        return self.mlp_norm.norm_of_sum(hidden, mlp.down, mlp.wide(hidden))

    def _is_joined(self, mlp: Mlp) -> bool:
        """Return whether a single native call computes all that follows the attention."""
        up = (mlp.gate_up if mlp.gated else mlp.up).kernel[...]
        supports_up = (
            native.supports_gated(up, mlp.activation)
            if mlp.gated
            else mlp.activation in native.EPILOGUES
        )
        supports = supports_up and native.supports_mlp(
            self.attention.out.kernel[...], up, mlp.down.kernel[...]
        )
        return supports and self.residual_norm is None and is_native("mlp")


class BertAttention(nnx.Module):
    """Self-attention. BertLayer computes the output layer `out`, together with the norm."""

    def __init__(self, config: BertConfig):
        dim = config.hidden_size
        self.num_heads = parallel.share(config.num_heads, "attention heads")
        self.head_width = dim // config.num_heads
        part = (config.num_heads, self.head_width)
        self.qkv = Linear(dim, 3 * dim, bias=config.attention_bias, columns=(part,) * 3)
        self.out = Linear(dim, dim, bias=config.attention_bias, rows=(part,))
        # Norms of queries and keys over all heads together.
        norms = {part: LayerNorm(dim, eps=config.norm_eps) for part in ("query", "key")}
        self.norms = nnx.Dict(norms) if config.qk_norm else None
        if config.qk_norm:
            parallel.refuse("a norm over all heads")

    def __call__(
        self,
        hidden: Hidden,
        tokens: PackedTokens,
        rotation: Rotation | None = None,
        bias: Bias | None = None,
    ) -> Float[Array, "rows length inner"]:
        """Return the concatenated heads before the layer `out`: `[rows, length, inner]`."""
        options = {"bias": bias, "rotation": rotation, "key_segments": tokens.key_segments}
        if self.norms is None:
            return attend_hidden(hidden, self.qkv, self.num_heads, tokens.segments, **options)
        rows, length, dim = hidden.shape
        query, key, value = jnp.split(self.qkv(hidden), 3, axis=-1)
        parts = (self.norms["query"](query), self.norms["key"](key), value)
        joint = jnp.concatenate(parts, axis=-1).astype(self.qkv.kernel[...].dtype)
        joint = joint.reshape(rows, length, 3, self.num_heads, dim // self.num_heads)
        return attend_joint(joint, tokens.segments, **options).reshape(rows, length, dim)
