"""The tower of DeBERTa v2 and v3: BERT's, with attention to contents and to relative positions.

He et al. 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543. Names and the order of operations are
those of transformers' DebertaV2Model. Knows nothing of pooling.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from jaxembed.models.attention import Bias
from jaxembed.models.bert import BertAttention, BertConfig, BertLayer
from jaxembed.models.disentangled import Distances, attend_disentangled
from jaxembed.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Hidden, PackedTokens, Segments


@dataclass(frozen=True, kw_only=True)
class DebertaConfig(BertConfig):
    """The sizes and switches of a DeBERTa tower."""

    embedding_size: int | None = None  # width of the embedding tables; None: hidden_size
    absolute_positions: bool  # whether positions are added to the word embeddings
    buckets: int  # places of the relative tables on either side; 0: one for each distance
    max_distance: int  # from which on distances share the last place
    content_to_position: bool  # whether queries look up relative keys
    position_to_content: bool  # whether keys look up relative queries
    conv_width: int = 0  # tokens that the convolution beside the first layer sees; 0: there is none
    conv_activation: str = "tanh"  # a name in ACTIVATIONS


class Deberta(nnx.Module):
    """The tower: maps packed tokens to their last hidden states, float32 `[rows, length, dim]`."""

    Config = DebertaConfig

    @staticmethod
    def position_limit(config: DebertaConfig) -> int:
        """The most tokens of a sequence: the tower was not trained on larger distances."""
        return config.max_positions

    def __init__(self, config: DebertaConfig):
        self.embeddings = DebertaEmbeddings(config)
        self.layers = nnx.List(
            [BertLayer(config, DebertaAttention(config)) for _ in range(config.num_layers)]
        )
        self.convolution = Convolution(config) if config.conv_width else None

    def __call__(self, tokens: PackedTokens) -> Hidden:
        embedded = hidden = self.embeddings(tokens)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, tokens)
            if number == 0 and self.convolution is not None:
                hidden = self.convolution(embedded, hidden, tokens.segments)
        return hidden


class DebertaEmbeddings(nnx.Module):
    """The sum of word, type and position embeddings, brought to the width of the tower, normed."""

    def __init__(self, config: DebertaConfig):
        width, size = config.hidden_size, config.embedding_size or config.hidden_size
        types = config.type_vocab_size
        self.word = Embedding(config.vocab_size, size)
        self.position = Embedding(config.max_positions, size) if config.absolute_positions else None
        self.type = Embedding(types, size) if types else None
        self.projection = Linear(size, width, bias=False) if size != width else None
        self.norm = LayerNorm(width, eps=config.norm_eps)

    def __call__(self, tokens: PackedTokens) -> Hidden:
        hidden = self.word(tokens.ids)
        if self.position is not None:
            hidden = hidden + self.position(tokens.positions)
        if self.type is not None:
            hidden = hidden + self.type(tokens.types)
        return self.norm(hidden if self.projection is None else self.projection(hidden))


class Convolution(nnx.Module):
    """A convolution over the embeddings, added to the result of the first layer, and a norm."""

    def __init__(self, config: DebertaConfig):
        self.width = config.conv_width
        self.linear = Linear(config.conv_width * config.hidden_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.activation = ACTIVATIONS[config.conv_activation]

    def __call__(self, embedded: Hidden, hidden: Hidden, segments: Segments) -> Hidden:
        side = self.width // 2
        around = jnp.pad(embedded, ((0, 0), (side, side), (0, 0)))
        of_around = jnp.pad(segments, ((0, 0), (side, side)), constant_values=-1)
        near = []
        for first in range(self.width):
            token = slice(first, first + segments.shape[1])
            same = (of_around[:, token] == segments)[:, :, None]
            near.append(jnp.where(same, around[:, token], 0.0))  # zeros beyond a segment's ends
        return self.norm(hidden + self.activation(self.linear(jnp.concatenate(near, axis=2))))


class DebertaAttention(BertAttention):
    """Self-attention whose scores have terms of contents and of relative positions.

    The relative keys and queries are constants of a checkpoint: conversion computes them from the
    relative embeddings, which would cost more than a short text in each run.
    """

    def __init__(self, config: DebertaConfig):
        super().__init__(config)
        places = 2 * (config.buckets or config.max_distance)  # rows of the relative tables
        shape = (places, config.hidden_size)
        by_content, by_position = config.content_to_position, config.position_to_content
        self.relative_key = nnx.Param(jnp.zeros(shape, jnp.float32)) if by_content else None
        self.relative_query = nnx.Param(jnp.zeros(shape, jnp.float32)) if by_position else None
        self.distances = Distances(config.buckets, config.max_distance, config.max_positions - 1)

    def __call__(
        self,
        hidden: Hidden,
        tokens: PackedTokens,
        rotation: Rotation | None = None,
        bias: Bias | None = None,
    ) -> Hidden:
        rows, length, dim = hidden.shape
        width = dim // self.num_heads
        joint = self.qkv.rounded(hidden).reshape(rows, length, 3, self.num_heads, width)
        relative_key, relative_query = (
            None
            if table is None
            else table[...].astype(joint.dtype).reshape(-1, self.num_heads, width)
            for table in (self.relative_key, self.relative_query)
        )
        query, key, value = (joint[:, :, part] for part in range(3))
        mixed = attend_disentangled(
            query,
            key,
            value,
            relative_key,
            relative_query,
            tokens.segments,
            self.distances,
            tokens.key_segments,
        )
        return mixed.reshape(rows, length, dim)
