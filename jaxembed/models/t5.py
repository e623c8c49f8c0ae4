"""The tower of T5's encoder: norms before the blocks, and a bias of scores by distance.

Raffel et al. 2020, arXiv:1910.10683. The order of operations is that of transformers'
T5EncoderModel; that scores are not divided by the root of the heads' width is the converter's
matter. Knows nothing of pooling or of the decoder.
"""

from dataclasses import dataclass

from flax import nnx
from jaxtyping import Array, Float

from jaxembed.models.attention import Bias
from jaxembed.models.layers import Embedding, GatedMlp, Linear, RMSNorm, attend_hidden
from jaxembed.models.relative import BiasByDistance
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class T5Config:
    """The sizes and switches of a T5 encoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_width: int  # all heads together may be wider than the hidden states
    intermediate_size: int
    bias_reach: int  # distance from which on biases stay the same
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    gated: bool  # whether the MLP is gated, as in version 1.1


class T5(nnx.Module):
    """The tower: maps packed tokens to their last hidden states, float32 `[rows, length, dim]`."""

    Config = T5Config

    @staticmethod
    def position_limit(config: T5Config) -> None:
        """There is no limit: biases stay the same from a distance on."""

    def __init__(self, config: T5Config):
        self.embeddings = T5Embeddings(config)
        self.distance = BiasByDistance(config.num_heads, config.bias_reach)
        self.layers = nnx.List([T5Layer(config) for _ in range(config.num_layers)])
        self.norm = _norm(config)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        bias = self.distance(tokens.ids.shape[1])
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, tokens, bias)
        return self.norm(hidden)


class T5Embeddings(nnx.Module):
    """The word embeddings."""

    def __init__(self, config: T5Config):
        self.word = Embedding(config.vocab_size, config.hidden_size)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        return self.word(tokens.ids)


class T5Layer(nnx.Module):
    """One layer: attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: T5Config):
        dim, width = config.hidden_size, config.intermediate_size
        self.attention_norm = _norm(config)
        self.attention = T5Attention(config)
        self.mlp_norm = _norm(config)
        kind = GatedMlp if config.gated else T5Mlp
        self.mlp = kind(dim, width, activation=config.activation)

    def __call__(self, hidden: Hidden, tokens: PackedTokens, bias: Bias) -> Hidden:
        hidden = hidden + self.attention(self.attention_norm(hidden), tokens, bias)
        return hidden + self.mlp(self.mlp_norm(hidden))


class T5Attention(nnx.Module):
    """Self-attention with biases by distance, which all layers share."""

    def __init__(self, config: T5Config):
        inner = config.num_heads * config.head_width
        self.num_heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * inner, bias=False)
        self.out = Linear(inner, config.hidden_size, bias=False)

    def __call__(self, hidden: Hidden, tokens: PackedTokens, bias: Bias) -> Hidden:
        mixed = attend_hidden(
            hidden,
            self.qkv,
            self.num_heads,
            tokens.segments,
            bias=bias,
            key_segments=tokens.key_segments,
        )
        return self.out(mixed)


class T5Mlp(nnx.Module):
    """An MLP without gate: down(activation(up(x)))."""

    def __init__(self, dim: int, width: int, *, activation: str):
        self.up = Linear(dim, width, bias=False)
        self.down = Linear(width, dim, bias=False)
        self.activation = activation

    def __call__(self, x: Float[Array, "rows length dim"]) -> Float[Array, "rows length dim"]:
        return self.down(self.up.rounded(x, self.activation))


def _norm(config: T5Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.norm_eps)
