"""The tower of DeBERTa v2 and v3: BERT's, with attention to contents and to relative positions.

He et al. 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543. Names and the order of operations are
those of transformers' DebertaV2Model. Knows nothing of pooling.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxembed.models.attention import MASKED, AttentionScores, Bias, Heads, weighted_values
from jaxembed.models.bert import BertAttention, BertConfig, BertLayer
from jaxembed.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Hidden, PackedTokens, Segments

# Queries and keys of a tile of scores. Rows up to this length are one tile; of longer rows a block
# of queries is computed at a time, with all keys that any of them may see. Smaller blocks are
# slower on CPU.
SCORES_TILE = 128

Table = Float[Array, "places heads width"]
Tiles = Float[Array, "tiles rows length heads width"]
Offset = int | Int[Array, ""]


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


@dataclass(frozen=True)
class Distances:
    """How a distance, the query's position less the key's, becomes a place in a relative table."""

    buckets: int  # places on either side; 0: one for each distance
    max_distance: int  # from which on distances share the last place
    largest: int  # of any two tokens of a sequence

    def places(self, distances: np.ndarray) -> np.ndarray:
        """The places of distances.

        Up to half the buckets each distance has a place of its own, then buckets grow by a factor.
        The arithmetic is transformers', in float32, which may round to another bucket than float64.
        """
        side = self.buckets or self.max_distance
        places = distances
        if self.buckets:
            middle = self.buckets // 2
            ratio = np.maximum(abs(distances), middle).astype(np.float32) / np.float32(middle)
            end = np.log(np.float32((self.max_distance - 1) / middle))
            far = np.ceil(np.log(ratio) / end * np.float32(middle - 1)) + middle
            places = np.where(abs(distances) <= middle, distances, np.sign(distances) * far)
        return np.clip(places.astype(int) + side, 0, 2 * side - 1)


def attend_disentangled(
    query: Heads,
    key: Heads,
    value: Heads,
    relative_key: Table | None,
    relative_query: Table | None,
    segments: Segments,
    distances: Distances,
    key_segments: Segments | None = None,
) -> Heads:
    """Compute disentangled attention within the segments of each row.

    The score of a query and a key is query . key + query . relative_key + key . relative_query,
    with the relative vectors of their distance, over sqrt(width of a head * number of terms). A
    distance in the row is the distance in the segment. `key_segments` are as in `attend`.

    Nothing is gathered by score, which is slower on CPU: a block of queries is multiplied
    with the relative keys of all distances that it has to any key, in the order of distances, and
    the diagonals of that product are its scores.
    """
    rows, length, heads, _ = query.shape
    tile = min(SCORES_TILE, length)
    blocks = -(-length // tile)
    around = -(-distances.largest // tile)  # tiles on either side that a block may see
    near = 2 * around + 1
    if near >= blocks:  # every block takes all keys
        around, near = 0, blocks
    value = jnp.where(segments[:, :, None, None] != 0, value, jnp.zeros((), value.dtype))
    tiled = partial(_tiled, tile=tile, count=blocks)
    of_keys = segments if key_segments is None else key_segments
    keys = [tiled(x, around=around) for x in (key, value, of_keys)]
    largest = near * tile - 1  # distance between a tile and those that it sees
    every = np.arange(-largest, largest + 1)
    keys_apart, queries_apart = (
        None if table is None else jnp.take(table, distances.places(order), axis=0)
        for table, order in ((relative_key, every[::-1]), (relative_query, every))
    )
    relative = Relative(keys_apart, queries_apart, tile, largest)

    def block(one):
        number, queries, of_query = one
        near_key, near_value, of_key = keys
        if around:  # tiles of padding stand before the first
            near_key, near_value, of_key = (
                lax.dynamic_slice_in_dim(x, number, near, axis=0) for x in keys
            )
        offset = around or number  # of the queries, in tiles from the first of the keys
        rows_first = (x.swapaxes(0, 1) for x in (near_key, near_value, of_key))
        all_key, all_value, of_key = (x.reshape(rows, -1, *x.shape[3:]) for x in rows_first)
        scores = _product("bshk,bthk->bhst", queries, all_key)
        if relative.keys is not None:
            scores += relative.by_query(queries, all_key.shape[1], offset)
        if relative.queries is not None:
            scores += relative.by_key(near_key, offset)
        seen = (of_query[:, :, None] == of_key[:, None, :])[:, None]
        terms = 1 + (relative.keys is not None) + (relative.queries is not None)
        scale = (queries.shape[3] * terms) ** -0.5
        mixed = weighted_values(jnp.where(seen, scores * scale, MASKED), all_value)
        return mixed.swapaxes(1, 2)

    if blocks == 1:
        mixed = block((0, query, segments))[None]
    else:
        mixed = lax.map(block, (jnp.arange(blocks), tiled(query), tiled(segments)))
    return mixed.swapaxes(0, 1).reshape(rows, blocks * tile, heads, -1)[:, :length]


@dataclass(frozen=True)
class Relative:
    """The relative keys and queries of every distance between a tile and those that it sees."""

    keys: Table | None  # from the largest distance to the smallest
    queries: Table | None  # from the smallest to the largest
    tile: int
    largest: int

    def by_query(self, query: Heads, keys: int, offset: Offset) -> AttentionScores:
        """Multiply a tile of queries with relative keys."""
        assert self.keys is not None
        first = self.largest - (offset + 1) * self.tile + 1
        table = lax.dynamic_slice_in_dim(self.keys, first, keys + self.tile - 1, axis=0)
        # heads first: XLA:CPU is slower where the product is transposed before the slice
        return _diagonals(_product("bshk,whk->hbsw", query, table)).swapaxes(0, 1)

    def by_key(self, key: Tiles, offset: Offset) -> AttentionScores:
        """Multiply tiles of keys with the relative queries of a tile."""
        assert self.queries is not None
        count, rows, tile, heads, _ = key.shape
        tables = []
        for number in range(count):
            first = self.largest + (offset - number) * tile - tile + 1
            tables.append(lax.dynamic_slice_in_dim(self.queries, first, 2 * tile - 1, axis=0))
        product = _product("nbthk,nwhk->nhbtw", key, jnp.stack(tables))
        by_tile = _diagonals(product).transpose(2, 1, 4, 0, 3)  # [rows, heads, queries, tiles, t]
        return by_tile.reshape(rows, heads, tile, count * tile)


def _diagonals(product: Float[Array, "... length places"]) -> Float[Array, "... length others"]:
    """Take one place less of each next row: result[i, j] is product[i, length - 1 - i + j].

    Rows that are one place shorter begin one place further left each, so this is a slice of the
    flat product, and no gather.
    """
    *axes, length, places = product.shape
    flat = product.reshape(*axes, length * places)
    flat = flat[..., length - 1 : length - 1 + length * (places - 1)]
    return flat.reshape(*axes, length, places - 1)[..., : places - length + 1]


def _tiled(x: Array, *, tile: int, count: int, around: int = 0) -> Array:
    """Reshape [rows, length, ...] to [tiles, rows, tile, ...], with zeros for what is missing and
    for `around` tiles on either side."""
    rows, length, *rest = x.shape
    before = around * tile
    after = (count + around) * tile - length
    x = jnp.pad(x, [(0, 0), (before, after), *[(0, 0)] * len(rest)])
    return x.reshape(rows, count + 2 * around, tile, *rest).swapaxes(0, 1)


def _product(axes: str, a: Array, b: Array) -> Array:
    """Multiply with sums in float32."""
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)
