"""The backbone of decoders such as Qwen3: rotary positions, grouped heads, norms before blocks.

Yang et al. 2025, arXiv:2505.09388. The config selects what differs in Qwen2, Llama, Mistral, Gemma
and EuroBERT; the causal mask is optional. The order of operations is that of transformers' models
of these names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxembed.models.attention import AttentionMask, attend
from jaxembed.models.layers import Linear, Mlp, RMSNorm, WordEmbeddings, after_attention
from jaxembed.models.parallel import share
from jaxembed.models.rope import Rotation, read_scaling
from jaxembed.models.tokens import Hidden, PackedTokens


@dataclass(frozen=True)
class Qwen3Config:
    """The sizes and switches of a decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int  # each key head serves num_heads / num_key_heads neighbouring query heads
    head_width: int
    intermediate_size: int
    max_positions: int
    rope_theta: float  # base of the rotary angles
    norm_eps: float
    activation: str  # a name in ACTIVATIONS
    qkv_bias: bool  # whether the query, key and value layers have a bias; True in Qwen2
    out_bias: bool
    qk_norm: bool  # whether each query head and key head has a norm; True in Qwen3
    causal: bool
    mlp_bias: bool = False
    rope_scaling: Mapping[str, Any] | None = None  # the fields of a RopeScaling
    local_layers: Sequence[int] = ()  # numbers of the layers with an attention window, from 0
    local_reach: int | None = None  # tokens on either side that a token of a local layer attends to
    # The base of the angles, which are not scaled, in local layers. None: as in the other layers.
    local_theta: float | None = None
    embedding_scale: float = 1.0  # factor of the word embeddings; sqrt(hidden_size) in Gemma
    block_norms: bool = False  # whether attention and MLP also end with a norm; True in Gemma
    query_scale: float = 1.0  # scores are multiplied by this, besides 1 / sqrt(head_width)
    score_cap: float | None = None  # soft cap of the scores; 50 in Gemma 2
    # Queries are multiplied by 1 + query_growth * ln(1 + position // query_growth_length).
    query_growth: float = 0.0
    query_growth_length: int = 1
    overflows_float16: bool = False  # whether hidden states exceed the range of float16
    # The numbers of pairs of dimensions that are rotated by a token's time, row and column. Empty:
    # all pairs are rotated by the token's position.
    rope_sections: Sequence[int] = ()
    rope_interleaved: bool = False  # whether the sections take turns; True in Qwen3-VL


class Qwen3(nnx.Module):
    """The backbone: maps packed tokens to the last hidden states, float32 `[rows, length, dim]`."""

    Config = Qwen3Config

    @staticmethod
    def position_limit(config: Qwen3Config) -> int:
        """Return the maximum length of a sequence in tokens. The model was not trained with longer
        texts."""
        return config.max_positions

    def __init__(self, config: Qwen3Config):
        self.embeddings = WordEmbeddings(
            config.vocab_size, config.hidden_size, scale=config.embedding_scale
        )
        self.layers = nnx.List([Qwen3Layer(config, number) for number in range(config.num_layers)])
        self.norm = _norm(config)
        self.positions = Qwen3Positions(config)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        return self.run(self.embeddings(tokens), tokens)

    def run(self, hidden: Hidden, tokens: PackedTokens, later: Sequence[Hidden] = ()) -> Hidden:
        """Return the last hidden states. `hidden` are the embeddings of the tokens. The items of
        `later` are added after the first layers, one after each."""
        global_rotations, local_rotations = self.positions(tokens)
        by_layer = tokens.by_layer(len(self.layers))
        for layer, of_layer, added in zip_longest(self.layers, by_layer, later[: len(by_layer)]):
            rotations = local_rotations if layer.is_local else global_rotations
            hidden = layer(hidden, of_layer, rotations)
            hidden = hidden if added is None else hidden + added
        return self.norm(hidden)


Rotations = tuple[Rotation, Rotation]  # the rotation of queries, and the rotation of keys


class Qwen3Positions(nnx.Module):
    """The rotations of queries and keys in global and in local layers. It has no parameters.

    The rotation of queries also multiplies queries by `query_scale` and their growth by position.
    """

    def __init__(self, config: Qwen3Config):
        self.head_width = config.head_width
        self.theta = config.rope_theta
        self.scaling = read_scaling(config.rope_scaling)
        self.sections, self.interleaved = tuple(config.rope_sections), config.rope_interleaved
        self.local_theta = config.local_theta
        self.query_scale = config.query_scale
        self.growth = config.query_growth
        self.growth_length = config.query_growth_length

    def __call__(self, tokens: PackedTokens) -> tuple[Rotations, Rotations]:
        """Return the rotations of queries and keys in global layers, and those in local layers."""
        key_rotation = Rotation.of(
            tokens,
            self.head_width,
            self.theta,
            self.scaling,
            self.sections,
            interleaved=self.interleaved,
        )
        global_rotations = self._for_queries(key_rotation, tokens), key_rotation
        if self.local_theta is None:
            return global_rotations, global_rotations
        local_rotation = Rotation.of(tokens, self.head_width, self.local_theta)
        return global_rotations, (self._for_queries(local_rotation, tokens), local_rotation)

    def _for_queries(self, rotation: Rotation, tokens: PackedTokens) -> Rotation:
        """Return the rotation multiplied by the factors of queries: `query_scale`, and the growth
        by position."""
        if self.growth:
            multiples = (tokens.positions // self.growth_length).astype(jnp.float32)
            factor = self.query_scale * (1 + self.growth * jnp.log(1 + multiples))[:, :, None]
            return Rotation(rotation.cos * factor, rotation.sin * factor)
        if self.query_scale != 1.0:
            return Rotation(rotation.cos * self.query_scale, rotation.sin * self.query_scale)
        return rotation


class Qwen3Layer(nnx.Module):
    """One layer: attention and gated MLP, each after a norm and with a residual connection.

    With `block_norms` attention and MLP also end with a norm, before the residual connection.
    """

    def __init__(self, config: Qwen3Config, number: int):
        """`number` is the layer's index."""
        self.is_local = number in config.local_layers
        self.attention_norm = _norm(config)
        self.attention = Qwen3Attention(config, self.is_local)
        self.attention_out_norm = _norm(config) if config.block_norms else None
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
        )
        self.mlp_out_norm = _norm(config) if config.block_norms else None

    def __call__(self, hidden: Hidden, tokens: PackedTokens, rotations: Rotations) -> Hidden:
        mixed = self.attention(self.attention_norm(hidden), tokens, rotations)
        hidden = hidden + (
            mixed if self.attention_out_norm is None else self.attention_out_norm(mixed)
        )
        with after_attention(tokens):
            out = self.mlp(self.mlp_norm(hidden))
        return hidden + (out if self.mlp_out_norm is None else self.mlp_out_norm(out))


class Qwen3Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions, within a window if `is_local`."""

    def __init__(self, config: Qwen3Config, is_local: bool):
        heads, key_heads, width = config.num_heads, config.num_key_heads, config.head_width
        self.num_heads = share(heads, "query heads")
        self.num_key_heads = share(key_heads, "key heads", repeats=True)
        self.head_width = width
        reach = config.local_reach if is_local else None
        self.attention_mask = AttentionMask(causal=config.causal, reach=reach, cap=config.score_cap)
        self.qkv = Linear(
            config.hidden_size,
            (heads + 2 * key_heads) * width,
            bias=config.qkv_bias,
            columns=((heads, width), (key_heads, width), (key_heads, width)),
        )
        self.out = Linear(
            heads * width, config.hidden_size, bias=config.out_bias, rows=((heads, width),)
        )
        self.query_norm, self.key_norm = (
            RMSNorm(width, eps=config.norm_eps) if config.qk_norm else None for _ in range(2)
        )

    def __call__(self, hidden: Hidden, tokens: PackedTokens, rotations: Rotations) -> Hidden:
        rows, length, _ = hidden.shape
        counts = self.num_heads, self.num_key_heads, self.num_key_heads
        query, key, value = self.qkv.heads(hidden, counts, self.head_width)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        rotate_query, rotate_key = rotations
        query, key, value = (
            x.astype(self.qkv.kernel[...].dtype)
            for x in (rotate_query(query), rotate_key(key), value)
        )
        mixed = attend(
            query,
            key,
            value,
            tokens.segments,
            self.attention_mask,
            key_segments=tokens.key_segments,
        )
        with after_attention(tokens):
            return self.out(mixed.reshape(rows, length, -1))


def _norm(config: Qwen3Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.norm_eps)
