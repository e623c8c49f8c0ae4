"""The tower of Qwen3 and Qwen2: rotary positions, grouped-query attention, norms before blocks.

Yang et al. 2025, arXiv:2505.09388, and 2024, arXiv:2407.10671. The order of operations is that of
transformers' Qwen3Model and Qwen2Model. Knows nothing of pooling or of the language model's head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxembed.models.attention import Sight, attend
from jaxembed.models.layers import Embedding, GatedMlp, Linear, RMSNorm
from jaxembed.models.rope import Rotation, read_scaling
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class Qwen3Config:
    """The sizes and switches of a Qwen3 or Qwen2 tower."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int  # each serves num_heads / num_key_heads neighbouring query heads
    head_width: int
    intermediate_size: int
    max_positions: int
    rope_theta: float  # base of the rotary angles
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    qkv_bias: bool  # True in Qwen2
    out_bias: bool
    qk_norm: bool  # a norm of each query and key head; True in Qwen3
    causal: bool
    rope_scaling: Mapping[str, Any] | None = None  # the fields of a RopeScaling


class Qwen3(nnx.Module):
    """The tower: maps packed tokens to their last hidden states, float32 `[rows, length, dim]`."""

    Config = Qwen3Config

    @staticmethod
    def position_limit(config: Qwen3Config) -> int:
        """The most tokens of a sequence: the tower was not trained on later positions."""
        return config.max_positions

    def __init__(self, config: Qwen3Config):
        self.embeddings = Qwen3Embeddings(config)
        self.layers = nnx.List([Qwen3Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head_width = config.head_width
        self.rope_theta = config.rope_theta
        self.rope_scaling = read_scaling(config.rope_scaling)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        rotation = Rotation.of(tokens, self.head_width, self.rope_theta, self.rope_scaling)
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, tokens, rotation)
        return self.norm(hidden)


class Qwen3Embeddings(nnx.Module):
    """The word embeddings."""

    def __init__(self, config: Qwen3Config):
        self.word = Embedding(config.vocab_size, config.hidden_size)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        return self.word(tokens.ids)


class Qwen3Layer(nnx.Module):
    """One layer: attention and gated MLP, each after a norm and with a residual connection."""

    def __init__(self, config: Qwen3Config):
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Qwen3Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GatedMlp(
            config.hidden_size, config.intermediate_size, activation=config.activation
        )

    def __call__(self, hidden: Hidden, tokens: PackedTokens, rotation: Rotation) -> Hidden:
        hidden = hidden + self.attention(self.attention_norm(hidden), tokens, rotation)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Qwen3Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: Qwen3Config):
        self.num_heads = config.num_heads
        self.num_key_heads = config.num_key_heads
        self.head_width = config.head_width
        self.sight = Sight(causal=config.causal)
        wide = config.num_heads * config.head_width
        heads = config.num_heads + 2 * config.num_key_heads
        self.qkv = Linear(config.hidden_size, heads * config.head_width, bias=config.qkv_bias)
        self.out = Linear(wide, config.hidden_size, bias=config.out_bias)
        self.query_norm = _head_norm(config)
        self.key_norm = _head_norm(config)

    def __call__(self, hidden: Hidden, tokens: PackedTokens, rotation: Rotation) -> Hidden:
        rows, length, _ = hidden.shape
        heads = self.qkv(hidden).reshape(rows, length, -1, self.head_width)
        ends = (self.num_heads, self.num_heads + self.num_key_heads)
        query, key, value = jnp.split(heads, ends, axis=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        operands = rotation(query), rotation(key), value
        query, key, value = (x.astype(self.qkv.kernel[...].dtype) for x in operands)
        mixed = attend(query, key, value, tokens.segments, self.sight)
        return self.out(mixed.reshape(rows, length, -1))


def _head_norm(config: Qwen3Config) -> RMSNorm | None:
    return RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None
