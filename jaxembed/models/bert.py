"""The towers of BERT, RoBERTa and DistilBERT: learned positions, and a norm after each block.

Devlin et al. 2019, arXiv:1810.04805. Names and the order of operations are those of transformers'
BertModel. RoBERTa (Liu et al. 2019, arXiv:1907.11692) counts positions from another number;
DistilBERT (Sanh et al. 2019, arXiv:1910.01108) has no token types. Knows nothing of pooling.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxembed.models import native
from jaxembed.models.attention import attend_joint, is_native
from jaxembed.models.layers import Embedding, LayerNorm, Linear
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT, RoBERTa or DistilBERT tower."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int  # size of the table of positions
    type_vocab_size: int  # 0: tokens have no types, as in DistilBERT
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    pad_id: int | None = None  # RoBERTa counts positions from it; None: positions start at 0


class Bert(nnx.Module):
    """The tower: maps packed tokens to their last hidden states, float32 `[rows, length, dim]`."""

    Config = BertConfig

    @staticmethod
    def position_limit(config: BertConfig) -> int:
        """The most tokens of a sequence: JAX would clamp a later position without an error."""
        return config.max_positions - (0 if config.pad_id is None else config.pad_id + 1)

    def __init__(self, config: BertConfig):
        self.embeddings = BertEmbeddings(config)
        self.layers = nnx.List([BertLayer(config) for _ in range(config.num_layers)])

    def __call__(self, tokens: PackedTokens) -> Hidden:
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, tokens)
        return hidden


class BertEmbeddings(nnx.Module):
    """The sum of word, type and position embeddings, and its norm."""

    def __init__(self, config: BertConfig):
        self.word = Embedding(config.vocab_size, config.hidden_size)
        self.position = Embedding(config.max_positions, config.hidden_size)
        types = config.type_vocab_size
        self.type = Embedding(types, config.hidden_size) if types else None
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.pad_id = config.pad_id

    def __call__(self, tokens: PackedTokens) -> Hidden:
        positions = tokens.positions
        if self.pad_id is not None:
            positions = positions_after_pad(tokens, self.pad_id)
        hidden = self.word(tokens.ids)
        if self.type is not None:
            hidden = hidden + self.type(tokens.types)
        return self.norm(hidden + self.position(positions))


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

    def __init__(self, config: BertConfig):
        self.attention = BertAttention(config)
        self.attention_norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Mlp(config)
        self.mlp_norm = LayerNorm(config.hidden_size, eps=config.norm_eps)

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Hidden:
        mixed = self.attention(hidden, tokens)
        out, up, down = self.attention.out, self.mlp.up, self.mlp.down
        kernels = [linear.kernel[...] for linear in (out, up, down)]
        exact = self.mlp.activation == "gelu"
        if is_native("mlp") and exact and native.takes_mlp(hidden, *kernels):
            return native.mlp(
                mixed.astype(jnp.bfloat16),
                hidden,
                (*out.parameters, *self.attention_norm.parameters),
                up.parameters,
                (*down.parameters, *self.mlp_norm.parameters),
                self.mlp_norm.eps,
            )
        hidden = self.attention_norm.of_sum(hidden, out, mixed)
        return self.mlp_norm.of_sum(hidden, down, self.mlp(hidden))


class BertAttention(nnx.Module):
    """Self-attention without its output product `out`, which the layer computes with the norm."""

    def __init__(self, config: BertConfig):
        dim = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv = Linear(dim, 3 * dim)
        self.out = Linear(dim, dim)

    def __call__(self, hidden: Hidden, tokens: PackedTokens) -> Hidden:
        rows, length, dim = hidden.shape
        kernel = self.qkv.kernel[...]
        takes = native.takes_self_attention(hidden, self.num_heads, kernel)
        if is_native("self_attention") and takes:
            return native.self_attention(
                hidden, *self.qkv.parameters, tokens.segments, self.num_heads
            )
        joint = self.qkv.rounded(hidden)
        joint = joint.reshape(rows, length, 3, self.num_heads, dim // self.num_heads)
        return attend_joint(joint, tokens.segments).reshape(rows, length, dim)


class Mlp(nnx.Module):
    """The MLP without its last product `down`, which the layer computes with the norm."""

    def __init__(self, config: BertConfig):
        self.up = Linear(config.hidden_size, config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)
        self.activation = config.activation

    def __call__(self, hidden: Hidden) -> Float[Array, "rows length width"]:
        return self.up.rounded(hidden, self.activation)
