"""The backbone of DeBERTa v2 and v3: like BERT's, but attention scores also depend on relative
positions.

He et al. 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543. Names and the order of operations are
those of transformers' DebertaV2Model.
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
from jaxembed.models.parallel import Cut, zeros
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Hidden, PackedTokens, Segments

# The number of tokens in a tile of queries or keys. A row up to this length is one tile. In a
# longer row one tile of queries is computed at a time, with all keys that any query of the tile may
# attend to. Smaller tiles are slower on CPUs.
SCORES_TILE = 128

Table = Float[Array, "places heads width"]
Tiles = Float[Array, "tiles rows length heads width"]
Offset = int | Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class DebertaConfig(BertConfig):
    """The sizes and switches of a DeBERTa backbone."""

    embedding_size: int | None = None  # width of the embedding tables; None: hidden_size
    absolute_positions: bool  # whether position embeddings are added to the word embeddings
    # The relative tables have this many rows for each direction; 0: a row for each distance.
    buckets: int
    max_distance: int  # distances from this one on share the last row
    content_to_position: bool  # whether scores have the term query . relative key
    position_to_content: bool  # whether scores have the term key . relative query
    conv_width: int = 0  # tokens in the window of the first layer's convolution; 0: no convolution
    conv_activation: str = "tanh"  # a name in ACTIVATIONS


class Deberta(nnx.Module):
    """The backbone: maps packed tokens to the last hidden states, float32 `[rows, length, dim]`."""

    Config = DebertaConfig

    @staticmethod
    def position_limit(config: DebertaConfig) -> int:
        """Return the maximum length of a sequence in tokens. The model was not trained with longer
        texts."""
        return config.max_positions

    def __init__(self, config: DebertaConfig):
        self.embeddings = DebertaEmbeddings(config)
        self.layers = nnx.List(
            [BertLayer(config, DebertaAttention(config)) for _ in range(config.num_layers)]
        )
        self.convolution = Convolution(config) if config.conv_width else None

    def __call__(self, tokens: PackedTokens) -> Hidden:
        embedded = hidden = self.embeddings(tokens)
        for number, of_layer in enumerate(tokens.by_layer(len(self.layers))):
            hidden = self.layers[number](hidden, of_layer)
            if number == 0 and self.convolution is not None:
                hidden = self.convolution(embedded, hidden, tokens.segments)
        return hidden


class DebertaEmbeddings(nnx.Module):
    """The embeddings: the sum of word, type and position embeddings, a projection to the width of
    the backbone, and a norm. Types, positions and the projection are optional."""

    def __init__(self, config: DebertaConfig):
        width, size = config.hidden_size, config.embedding_size or config.hidden_size
        self.word = Embedding(config.vocab_size, size)
        self.position = Embedding(config.max_positions, size) if config.absolute_positions else None
        self.type = Embedding(config.type_vocab_size, size) if config.type_vocab_size else None
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
    """A convolution over the embeddings. Its result is added to the result of the first layer, and
    the sum goes through a norm."""

    def __init__(self, config: DebertaConfig):
        self.width = config.conv_width
        self.linear = Linear(config.conv_width * config.hidden_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.activation = ACTIVATIONS[config.conv_activation]

    def __call__(self, embedded: Hidden, hidden: Hidden, segments: Segments) -> Hidden:
        """Return norm(hidden + activation(convolution of `embedded`)). `hidden` is the result of
        the first layer. The convolution sees zeros beyond the ends of a segment."""
        side = self.width // 2
        padded = jnp.pad(embedded, ((0, 0), (side, side), (0, 0)))
        padded_segments = jnp.pad(segments, ((0, 0), (side, side)), constant_values=-1)
        neighbours = []
        for first in range(self.width):
            neighbour = slice(first, first + segments.shape[1])
            is_same = (padded_segments[:, neighbour] == segments)[:, :, None]
            neighbours.append(jnp.where(is_same, padded[:, neighbour], 0.0))
        return self.norm(hidden + self.activation(self.linear(jnp.concatenate(neighbours, axis=2))))


class DebertaAttention(BertAttention):
    """Disentangled self-attention: a score is a sum of terms for contents and relative positions.

    The relative keys and queries are parameters, which the conversion of a checkpoint computes from
    the relative embeddings. Computing these for each batch would take longer than a short text.
    """

    def __init__(self, config: DebertaConfig):
        super().__init__(config)
        shape = (2 * (config.buckets or config.max_distance), config.hidden_size)
        cut = Cut(1, ((config.num_heads, self.head_width),))
        by_content, by_position = config.content_to_position, config.position_to_content
        self.relative_key = zeros(shape, cut) if by_content else None
        self.relative_query = zeros(shape, cut) if by_position else None
        self.distances = DistanceBuckets(
            config.buckets, config.max_distance, config.max_positions - 1
        )

    def __call__(
        self,
        hidden: Hidden,
        tokens: PackedTokens,
        rotation: Rotation | None = None,
        bias: Bias | None = None,
    ) -> Float[Array, "rows length inner"]:
        """Return the concatenated heads, as BertAttention does, without `rotation` and `bias`."""
        rows, length, _ = hidden.shape
        width = self.head_width
        joint = self.qkv.apply_rounded(hidden).reshape(rows, length, 3, self.num_heads, width)
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
        return mixed.reshape(rows, length, -1)


@dataclass(frozen=True)
class DistanceBuckets:
    """How a distance (the query's position minus the key's) becomes a row of a relative table."""

    buckets: int  # the number of rows for each direction; 0: a row for each distance
    max_distance: int  # distances from this one on share the last row
    largest: int  # the largest distance between two tokens of a sequence

    def places(self, distances: np.ndarray) -> np.ndarray:
        """Return the indices of the table's rows for these distances.

        Each distance up to half the buckets has its own row. Larger distances share rows, in ranges
        that grow geometrically. The computation is in float32 as in transformers, because float64
        may round to another bucket.
        """
        half = self.buckets or self.max_distance
        rows = distances
        if self.buckets:
            middle = self.buckets // 2
            ratio = np.maximum(abs(distances), middle).astype(np.float32) / np.float32(middle)
            log_range = np.log(np.float32((self.max_distance - 1) / middle))
            far = np.ceil(np.log(ratio) / log_range * np.float32(middle - 1)) + middle
            rows = np.where(abs(distances) <= middle, distances, np.sign(distances) * far)
        return np.clip(rows.astype(int) + half, 0, 2 * half - 1)


def attend_disentangled(
    query: Heads,
    key: Heads,
    value: Heads,
    relative_key: Table | None,
    relative_query: Table | None,
    segments: Segments,
    distances: DistanceBuckets,
    key_segments: Segments | None = None,
) -> Heads:
    """Compute disentangled attention within the segments of each row.

    The score of a query and a key is (query . key + query . relative_key + key . relative_query)
    / sqrt(width of a head * number of terms). The relative vectors are looked up by the distance
    between query and key, which `distances` turns into a row. If a relative table is None, its term
    is left out. A query attends to keys whose `key_segments` (default: `segments`) equal its own
    segment.

    To gather a relative vector for each score would be slower on CPUs. Instead a tile of queries is
    multiplied by the relative keys of all distances between the tile and any key, in the order of
    distances, and the diagonals of the product are the scores.
    """
    rows, length, heads, _ = query.shape
    tile = min(SCORES_TILE, length)
    blocks = -(-length // tile)
    side_tiles = -(-distances.largest // tile)  # tiles of keys on either side of a tile of queries
    near_tiles = 2 * side_tiles + 1
    if near_tiles >= blocks:  # every tile of queries is computed with all keys
        side_tiles, near_tiles = 0, blocks
    value = jnp.where(segments[:, :, None, None] != 0, value, jnp.zeros((), value.dtype))
    tiled = partial(_tiled, tile=tile, count=blocks)
    segments_of_keys = segments if key_segments is None else key_segments
    keys = [tiled(x, around=side_tiles) for x in (key, value, segments_of_keys)]
    max_distance = near_tiles * tile - 1  # the maximum between a query of a tile and its keys
    all_distances = np.arange(-max_distance, max_distance + 1)
    keys_by_distance, queries_by_distance = (
        None if table is None else jnp.take(table, distances.places(tabled_distances), axis=0)
        for table, tabled_distances in (
            (relative_key, all_distances[::-1]),
            (relative_query, all_distances),
        )
    )
    relative = RelativeTables(keys_by_distance, queries_by_distance, tile, max_distance)

    def block(operands):
        number, queries, query_segments = operands
        near_key, near_value, near_segments = keys
        if side_tiles:  # the keys begin with side_tiles tiles of padding
            near_key, near_value, near_segments = (
                lax.dynamic_slice_in_dim(x, number, near_tiles, axis=0) for x in keys
            )
        offset = side_tiles or number  # the index of the queries' tile among the tiles of keys
        rows_first = (x.swapaxes(0, 1) for x in (near_key, near_value, near_segments))
        block_key, block_value, near_segments = (
            x.reshape(rows, -1, *x.shape[3:]) for x in rows_first
        )
        scores = _product("bshk,bthk->bhst", queries, block_key)
        if relative.keys is not None:
            scores += relative.by_query(queries, block_key.shape[1], offset)
        if relative.queries is not None:
            scores += relative.by_key(near_key, offset)
        visible = (query_segments[:, :, None] == near_segments[:, None, :])[:, None]
        terms = 1 + (relative.keys is not None) + (relative.queries is not None)
        scale = (queries.shape[3] * terms) ** -0.5
        mixed = weighted_values(jnp.where(visible, scores * scale, MASKED), block_value)
        return mixed.swapaxes(1, 2)

    if blocks == 1:
        mixed = block((0, query, segments))[None]  # block number 0
    else:
        mixed = lax.map(block, (jnp.arange(blocks), tiled(query), tiled(segments)))
    return mixed.swapaxes(0, 1).reshape(rows, blocks * tile, heads, -1)[:, :length]


@dataclass(frozen=True)
class RelativeTables:
    """The relative keys and queries of all distances between a tile of queries and its keys."""

    keys: Table | None  # relative keys, from the largest distance to the smallest
    queries: Table | None  # relative queries, from the smallest distance to the largest
    tile: int  # the number of tokens in a tile
    largest: int  # the largest distance

    def by_query(self, query: Heads, keys: int, offset: Offset) -> AttentionScores:
        """Return the scores query . relative_key of a tile of queries.

        `keys` is the number of keys. `offset` is the number of tiles from the first tile of the
        keys to the tile of the queries.
        """
        assert self.keys is not None
        # the row of the largest distance, that of the last query from the first key
        first = self.largest - (offset + 1) * self.tile + 1
        table = lax.dynamic_slice_in_dim(self.keys, first, keys + self.tile - 1, axis=0)
        # Heads come first, because XLA:CPU is slower if the product is transposed before the slice.
        return _diagonals(_product("bshk,whk->hbsw", query, table)).swapaxes(0, 1)

    def by_key(self, key: Tiles, offset: Offset) -> AttentionScores:
        """Return the scores key . relative_query of tiles of keys. `offset` is the number of tiles
        from the first tile of the keys to the tile of the queries."""
        assert self.queries is not None
        tiles, rows, tile, heads, _ = key.shape
        tables = []
        for number in range(tiles):
            # the row of the smallest distance, that of the first query from the last key
            first = self.largest + (offset - number) * tile - tile + 1
            tables.append(lax.dynamic_slice_in_dim(self.queries, first, 2 * tile - 1, axis=0))
        product = _product("nbthk,nwhk->nhbtw", key, jnp.stack(tables))
        by_tile = _diagonals(product).transpose(2, 1, 4, 0, 3)  # [rows, heads, queries, tiles, t]
        return by_tile.reshape(rows, heads, tile, tiles * tile)


def _diagonals(product: Float[Array, "... length places"]) -> Float[Array, "... length others"]:
    """Return result[i, j] = product[i, length - 1 - i + j] over the last two axes.

    The flat product is cut into rows that are one column shorter, from the first element of the
    result on. So each row begins one column further left, and no gather is needed.
    """
    *axes, length, places = product.shape
    flat = product.reshape(*axes, length * places)
    flat = flat[..., length - 1 : length - 1 + length * (places - 1)]
    return flat.reshape(*axes, length, places - 1)[..., : places - length + 1]


def _tiled(x: Array, *, tile: int, count: int, around: int = 0) -> Array:
    """Reshape [rows, length, ...] to [tiles, rows, tile, ...], padded with zeros. The result has
    `count` tiles, and before and after these `around` tiles of zeros."""
    rows, length, *rest = x.shape
    before = around * tile
    after = (count + around) * tile - length
    x = jnp.pad(x, [(0, 0), (before, after), *[(0, 0)] * len(rest)])
    return x.reshape(rows, count + 2 * around, tile, *rest).swapaxes(0, 1)


def _product(axes: str, a: Array, b: Array) -> Array:
    """Multiply as jnp.einsum does, with sums in float32."""
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)
