"""ModernBERT: rotary positions, layers that see a window, norms before each block.

Warner et al. 2024, arXiv:2412.13663; names and order of operations as in transformers'
ModernBertModel. Knows nothing of pooling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flax import nnx

from jaxembed.models.attention import EVERYTHING, Sight, attend
from jaxembed.models.layers import Embedding, GatedMlp, LayerNorm, Linear, Rotation
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class ModernBertConfig:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    global_layers: Sequence[int]  # from 0; the others are local
    local_reach: int  # how far a token of a local layer sees, to either side
    global_theta: float
    local_theta: float
    norm_eps: float
    activation: str
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool


class ModernBert(nnx.Module):
    """Token ids in, the last hidden states out."""

    Config = ModernBertConfig

    @staticmethod
    def position_limit(config: ModernBertConfig) -> int:
        """Tokens it was trained on. Angles of later ones exist, and mean nothing to it."""
        return config.max_positions

    def __init__(self, config: ModernBertConfig):
        self.embeddings = ModernBertEmbeddings(config)
        self.layers = nnx.List(
            [ModernBertLayer(config, number) for number in range(config.num_layers)]
        )
        self.norm = _norm(config)
        self.head_width = config.hidden_size // config.num_heads
        self.global_theta = config.global_theta
        self.local_theta = config.local_theta

    def __call__(self, tokens: PackedTokens) -> Hidden:
        far = Rotation.of(tokens.positions, self.head_width, self.global_theta)
        near = Rotation.of(tokens.positions, self.head_width, self.local_theta)
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, tokens, near if layer.is_local else far)
        return self.norm(hidden)


class ModernBertEmbeddings(nnx.Module):
    def __init__(self, config: ModernBertConfig):
        self.word = Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        return self.norm(self.word(tokens.ids))


class ModernBertLayer(nnx.Module):
    def __init__(self, config: ModernBertConfig, number: int):
        self.is_local = number not in config.global_layers
        sight = Sight(reach=config.local_reach) if self.is_local else EVERYTHING
        # the first layer's input comes from the norm of the embeddings
        self.attention_norm = _norm(config) if number else None
        self.attention = ModernBertAttention(config, sight)
        self.mlp_norm = _norm(config)
        self.mlp = GatedMlp(
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
        )

    def __call__(self, hidden: Hidden, tokens: PackedTokens, rotation: Rotation) -> Hidden:
        normal = hidden if self.attention_norm is None else self.attention_norm(hidden)
        hidden = hidden + self.attention(normal, tokens, rotation)
        return hidden + self.mlp(self.mlp_norm(hidden))


class ModernBertAttention(nnx.Module):
    def __init__(self, config: ModernBertConfig, sight: Sight):
        dim = config.hidden_size
        self.num_heads = config.num_heads
        self.sight = sight
        self.qkv = Linear(dim, 3 * dim, bias=config.attention_bias)
        self.out = Linear(dim, dim, bias=config.attention_bias)

    def __call__(self, hidden: Hidden, tokens: PackedTokens, rotation: Rotation) -> Hidden:
        rows, length, dim = hidden.shape
        heads = self.qkv(hidden).reshape(rows, length, 3, self.num_heads, dim // self.num_heads)
        operands = rotation(heads[:, :, 0]), rotation(heads[:, :, 1]), heads[:, :, 2]
        query, key, value = (x.astype(self.qkv.kernel[...].dtype) for x in operands)
        mixed = attend(query, key, value, tokens.segments, self.sight)
        return self.out(mixed.reshape(rows, length, dim))


def _norm(config: ModernBertConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
