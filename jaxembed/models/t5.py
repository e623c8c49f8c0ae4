"""The backbone of T5's encoder: norms before the blocks, and a bias of scores by distance.

Raffel et al. 2020, arXiv:1910.10683. The order of operations is that of transformers'
T5EncoderModel. T5 does not divide scores by the root of a head's width, but `attend` does: the
converter multiplies the weights of queries by this root to make up for it.
"""

from dataclasses import dataclass

from flax import nnx

from jaxembed.models.layers import (
    BiasByDistance,
    Mlp,
    PreNormLayer,
    RMSNorm,
    SelfAttention,
    WordEmbeddings,
)
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
    bias_reach: int  # the bias is constant from this distance on
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    gated: bool  # whether the MLP is gated, as in version 1.1


class T5(nnx.Module):
    """The backbone: maps packed tokens to the last hidden states, float32 `[rows, length, dim]`."""

    Config = T5Config

    @staticmethod
    def position_limit(config: T5Config) -> None:
        """Return None: there is no limit, because all larger distances share one bias."""

    def __init__(self, config: T5Config):
        self.embeddings = WordEmbeddings(config.vocab_size, config.hidden_size)
        self.distance = BiasByDistance(config.num_heads, config.bias_reach)
        self.layers = nnx.List([_layer(config) for _ in range(config.num_layers)])
        self.norm = _norm(config)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        bias = self.distance(tokens.ids.shape[1])
        hidden = self.embeddings(tokens)
        for layer, of_layer in zip(self.layers, tokens.by_layer(len(self.layers)), strict=True):
            hidden = layer(hidden, of_layer, bias)
        return self.norm(hidden)


def _layer(config: T5Config) -> PreNormLayer:
    dim, inner = config.hidden_size, config.num_heads * config.head_width
    return PreNormLayer(
        _norm(config),
        SelfAttention(dim, inner, config.num_heads),
        _norm(config),
        Mlp(dim, config.intermediate_size, activation=config.activation, gated=config.gated),
    )


def _norm(config: T5Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.norm_eps)
