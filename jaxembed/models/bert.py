"""BERT and its kin: learned positions, norms after each block. Knows nothing of pooling.

Devlin et al. 2019, arXiv:1810.04805; names and order of operations as in transformers' BertModel.
RoBERTa (Liu et al. 2019, arXiv:1907.11692) differs in where positions begin, DistilBERT (Sanh et
al. 2019, arXiv:1910.01108) has no types.
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
    """`pad_id` is for RoBERTa, whose positions are counted from it; None is BERT. A
    `type_vocab_size` of 0 is DistilBERT: tokens have no types."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int
    norm_eps: float
    activation: str
    pad_id: int | None = None


class Bert(nnx.Module):
    """Token ids in, the last hidden states out."""

    Config = BertConfig

    @staticmethod
    def position_limit(config: BertConfig) -> int:
        """Tokens the position table holds; JAX would clamp a later one without a word."""
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
    """RoBERTa's positions: from pad_id + 1, and a pad token within a text has pad_id and is not
    counted. transformers' create_position_ids_from_input_ids, within each segment of a row."""
    pads = (tokens.ids == pad_id).astype(jnp.int32)
    before = jnp.cumsum(pads, axis=1) - pads
    first = jnp.arange(tokens.ids.shape[1])[None] - tokens.positions
    before_in_segment = before - jnp.take_along_axis(before, first, axis=1)
    return jnp.where(pads == 1, pad_id, pad_id + 1 + tokens.positions - before_in_segment)


class BertLayer(nnx.Module):
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
    """Up to the last product, which its norm takes with it."""

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
    """Up to the last product, which its norm takes with it."""

    def __init__(self, config: BertConfig):
        self.up = Linear(config.hidden_size, config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)
        self.activation = config.activation

    def __call__(self, hidden: Hidden) -> Float[Array, "rows length width"]:
        return self.up.rounded(hidden, self.activation)
