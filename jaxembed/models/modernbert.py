"""The backbone of ModernBERT: rotary positions, local and global layers, norms before blocks.

Warner et al. 2024, arXiv:2412.13663. The order of operations is that of transformers'
ModernBertModel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flax import nnx

from jaxembed.models.attention import EVERYTHING, AttentionMask
from jaxembed.models.layers import LayerNorm, Mlp, PreNormLayer, SelfAttention, WordEmbeddings
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class ModernBertConfig:
    """The sizes and switches of a ModernBERT backbone."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    # The numbers of the layers in which tokens attend to the whole text, from 0; others are local.
    global_layers: Sequence[int]
    local_reach: int  # tokens on either side that a token of a local layer attends to
    global_theta: float  # base of the rotary angles in global layers
    local_theta: float  # base of the rotary angles in local layers
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool


class ModernBert(nnx.Module):
    """The backbone: maps packed tokens to the last hidden states, float32 `[rows, length, dim]`."""

    Config = ModernBertConfig

    @staticmethod
    def position_limit(config: ModernBertConfig) -> int:
        """Return the maximum length of a sequence in tokens. The model was not trained with longer
        texts."""
        return config.max_positions

    def __init__(self, config: ModernBertConfig):
        self.embeddings = WordEmbeddings(config.vocab_size, config.hidden_size, norm=_norm(config))
        self.layers = nnx.List([_layer(config, number) for number in range(config.num_layers)])
        self.norm = _norm(config)
        self.global_layers = tuple(config.global_layers)
        self.head_width = config.hidden_size // config.num_heads
        self.global_theta = config.global_theta
        self.local_theta = config.local_theta

    def __call__(self, tokens: PackedTokens) -> Hidden:
        return self.run(self.embeddings(tokens), tokens)

    def run(self, hidden: Hidden, tokens: PackedTokens) -> Hidden:
        """Return the last hidden states. `hidden` are the embeddings of the tokens."""
        global_rotation = Rotation.of(tokens, self.head_width, self.global_theta)
        local_rotation = Rotation.of(tokens, self.head_width, self.local_theta)
        for number, of_layer in enumerate(tokens.by_layer(len(self.layers))):
            rotation = global_rotation if number in self.global_layers else local_rotation
            hidden = self.layers[number](hidden, of_layer, rotation=rotation)
        return self.norm(hidden)


def _layer(config: ModernBertConfig, number: int) -> PreNormLayer:
    dim, is_global = config.hidden_size, number in config.global_layers
    attention_mask = EVERYTHING if is_global else AttentionMask(reach=config.local_reach)
    return PreNormLayer(
        # The first layer has no norm before attention, because the embeddings end with a norm.
        _norm(config) if number else None,
        SelfAttention(
            dim, dim, config.num_heads, attention_mask=attention_mask, bias=config.attention_bias
        ),
        _norm(config),
        Mlp(dim, config.intermediate_size, activation=config.activation, bias=config.mlp_bias),
    )


def _norm(config: ModernBertConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
