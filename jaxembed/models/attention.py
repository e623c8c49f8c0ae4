"""Attention within the segments of packed rows, with one implementation for each platform."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxembed.models import native
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Segments

# In rows up to this length all scores are computed at once, in longer rows one block of queries at
# a time. On CPU with MiniLM, blocks are a fifth slower at a length of 128, 7 % faster at 256 and a
# third faster at 512 (benchmarks/README.md).
WHOLE_SCORES = 128
QUERY_BLOCK = 64  # tokens, on CPU: blocks of 32 are 4 to 8 % slower, blocks of 128 no faster
LOCAL_BLOCK = 64  # the same with a window: 12 to 16 % faster than 32, and 128 is no faster
ACCELERATOR_QUERY_BLOCK = 512  # tokens; it bounds the memory of the scores in long rows
ACCELERATOR_LOCAL_BLOCK = 128  # with a window; larger blocks score keys that no query needs
SIMD_FLOATS = 16  # float32 in one vector of AVX-512 or two of AVX2
MAX_PARTS = 32  # parts of a row of scores, a power of 2; each becomes a slice in the program
MASKED = -1e30  # finite, so that a query without keys gets uniform weights and not NaN

Heads = Float[Array, "rows length heads width"]
Grouped = Float[Array, "rows length groups width"]
KeyHeads = Float[Array, "rows keys groups width"]
QueryHeads = Float[Array, "rows queries groups width"]
AttentionScores = Float[Array, "rows groups queries keys"]
Mixed = Float[Array, "rows groups queries width"]
Joint = Float[Array, "rows length three heads width"]
Bias = Float[Array, "heads distances"]  # 2 * length - 1 distances: from 1 - length to length - 1


@dataclass(frozen=True)
class AttentionMask:
    """Which tokens of its segment a token attends to (by default all), and the soft cap."""

    causal: bool = False  # whether a token attends only to itself and earlier tokens
    reach: int | None = None  # the largest distance on either side; None: no limit
    cap: float | None = None  # scores become cap * tanh(score / cap); None: no soft cap


EVERYTHING = AttentionMask()

# The type of by_xla. `bias` and `key_segments` are passed only if they are not None, so an
# implementation for models without them may lack these parameters.
Attend = Callable[..., Array]


def attend(
    query: Heads,
    key: Grouped,
    value: Grouped,
    segments: Segments,
    attention_mask: AttentionMask = EVERYTHING,
    bias: Bias | None = None,
    key_segments: Segments | None = None,
) -> Heads:
    """Compute softmax(query . key / sqrt(width) + bias) . value within the segments of each row.

    `query` is `[rows, length, heads, width]`. Keys and values may have fewer heads (groups): each
    then serves heads / groups neighbouring query heads. The result has the shape of `query`.
    `segments` numbers the sequences of a row; 0 is padding. If the mask has a reach, the time in
    rows longer than WHOLE_SCORES is proportional to length times reach.

    `bias` is `[heads, 2 * length - 1]`, float32: column d + length - 1 is added to the scores of
    keys d tokens after the query (`BiasByDistance` and `alibi` make it). A soft cap is applied to
    scores before the bias.

    A query attends to the keys whose `key_segments` are the query's segment. `key_segments` are the
    `segments` by default; a token whose number differs in the two is hidden as a key. A query that
    attends to no key gets arbitrary finite numbers.

    Matrix products take operands of the given dtype; scores and softmax are float32. The result is
    float32, or of the operands' dtype if the implementation rounds it. Padding may hold NaN: its
    keys are masked and its values are replaced by zeros. `using` chooses the implementation.
    """
    optional = {"bias": bias, "key_segments": key_segments}
    present = {name: value for name, value in optional.items() if value is not None}
    return _IMPLEMENTATION.get()(query, key, value, segments, attention_mask, **present)


def attend_joint(
    joint: Joint,
    segments: Segments,
    attention_mask: AttentionMask = EVERYTHING,
    bias: Bias | None = None,
    rotation: Rotation | None = None,
    dtype: Any = None,
    key_segments: Segments | None = None,
) -> Heads:
    """Compute attention as `attend` does, with query, key and value side by side in one array.

    All three have the same number of heads. A `rotation` rotates queries and keys first. Without a
    native call, query, key and value are then rounded to `dtype`, by default that of `joint`. The
    result is `[rows, length, heads, width]`.
    """
    _, length, _, _, width = joint.shape
    if key_segments is None and takes_joint(length, width, joint.dtype):
        mask_fields = attention_mask.causal, attention_mask.reach, attention_mask.cap
        angles = None if rotation is None else (rotation.cos, rotation.sin)
        return native.joint_attention(
            joint, segments, *mask_fields, distance_bias=bias, angles=angles
        )
    query, key, value = joint[:, :, 0], joint[:, :, 1], joint[:, :, 2]
    if rotation is not None:
        query, key = rotation(query), rotation(key)
    query, key, value = (x.astype(dtype or joint.dtype) for x in (query, key, value))
    return attend(query, key, value, segments, attention_mask, bias, key_segments)


def takes_joint(length: int, width: int, dtype: Any) -> bool:
    """Whether `attend_joint` makes a native call for rows of this length and heads of this width.
    The native call takes heads that are rounded to `dtype` and rotates them afterwards."""
    return is_native("joint_attention") and native.takes(length, width, str(jnp.dtype(dtype)))


@contextmanager
def using(implementation: Attend) -> Iterator[None]:
    """Make `attend` use this implementation in everything that this thread traces in the context.

    JAX caches traced functions whatever the implementation: pass a new function to jit each time.
    """
    reset_token = _IMPLEMENTATION.set(implementation)
    try:
        yield
    finally:
        _IMPLEMENTATION.reset(reset_token)


def is_native(call: str) -> bool:
    """Whether the program that this thread traces may use a native kernel.

    `call` is one of native.CALLS or native.EPILOGUES.
    """
    implementation = _IMPLEMENTATION.get()
    return isinstance(implementation, ByNative) and call not in implementation.without


def by_xla(
    query: Heads,
    key: Grouped,
    value: Grouped,
    segments: Segments,
    attention_mask: AttentionMask,
    bias: Bias | None = None,
    key_segments: Segments | None = None,
) -> Heads:
    """Compute attention as `attend` does, in plain JAX. This is the default implementation."""
    segments_of_keys = segments if key_segments is None else key_segments
    rows, length, heads, width = query.shape
    groups = key.shape[2]
    query = (query.astype(jnp.float32) * width**-0.5).astype(query.dtype)
    per_group = heads // groups
    if per_group > 1:  # the query heads that share a key head become several queries of each token
        query = query.reshape(rows, length, groups, per_group, width)
        query = query.swapaxes(2, 3).reshape(rows, -1, groups, width)
    value = jnp.where(segments[:, :, None, None] != 0, value, jnp.zeros((), value.dtype))
    if length <= WHOLE_SCORES:
        # the zeros: queries and keys begin at the start of the row
        mixed = _mix(query, segments, 0, key, value, segments_of_keys, 0, attention_mask, bias)
    else:
        cpu_size, other_size = (
            (QUERY_BLOCK, ACCELERATOR_QUERY_BLOCK)
            if attention_mask.reach is None
            else (LOCAL_BLOCK, ACCELERATOR_LOCAL_BLOCK)
        )
        mixed = lax.platform_dependent(
            query,
            key,
            value,
            segments,
            segments_of_keys,
            bias,
            cpu=partial(_in_query_blocks, attention_mask=attention_mask, size=cpu_size),
            default=partial(_in_query_blocks, attention_mask=attention_mask, size=other_size),
        )
    if per_group == 1:
        return mixed
    split = mixed.reshape(rows, length, per_group, groups, width)
    return split.swapaxes(2, 3).reshape(rows, -1, heads, width)


@dataclass(frozen=True)
class ByNative:
    """An implementation that uses native kernels for the shapes that they take, and XLA otherwise.

    native.load_library must have succeeded. The native calls that `without` names are left out, in
    attention and in the layers around it.
    """

    without: frozenset[str] = frozenset()

    def __call__(
        self,
        query: Heads,
        key: Grouped,
        value: Grouped,
        segments: Segments,
        attention_mask: AttentionMask,
        bias: Bias | None = None,
        key_segments: Segments | None = None,
    ) -> Heads:
        """Compute attention as `attend` does, by the native kernel if possible."""
        length, width = query.shape[1], query.shape[3]
        is_supported = key_segments is None and native.takes(length, width, str(query.dtype))
        if is_supported and "attention" not in self.without:
            mask_fields = attention_mask.causal, attention_mask.reach, attention_mask.cap
            return native.attention(query, key, value, segments, *mask_fields, distance_bias=bias)
        return by_xla(query, key, value, segments, attention_mask, bias, key_segments)


by_native = ByNative()

_IMPLEMENTATION: ContextVar[Attend] = ContextVar("attention", default=by_xla)


def _in_query_blocks(
    query: QueryHeads,
    key: KeyHeads,
    value: KeyHeads,
    segments: Segments,
    key_segments: Segments,
    bias: Bias | None,
    *,
    attention_mask: AttentionMask,
    size: int,
) -> QueryHeads:
    """Compute attention for the queries of `size` tokens at a time.

    The scores of a block fit in the CPU's cache. Keys beyond the reach of all queries of a block
    are skipped. `query` has heads / groups neighbouring queries for each token, as `by_xla`
    arranges them.
    """
    length = segments.shape[1]
    per_group = query.shape[1] // length
    size = min(size, length)
    blocks = -(-length // size)
    padding = blocks * size - length
    before = length if attention_mask.reach is None else attention_mask.reach
    after = 0 if attention_mask.causal else before
    span = before + size + after  # the number of keys that a block takes
    if span >= length:  # every block takes all keys
        before, span, around = 0, length, (0, 0)
    else:
        around = (before, padding + after)
    keys = [_padded(x, around) for x in (key, value, key_segments)]
    if bias is not None:  # the padding queries of the last block have distances, too
        bias = _padded(bias, (padding, 0))

    def block(operands):
        start, queries, query_segments = operands
        first_key = start if span < length else 0
        near_key, near_value, near_segments = (
            lax.dynamic_slice_in_dim(x, first_key, span, axis=1) for x in keys
        )
        key_start = first_key - before  # in the row without its padding
        near_bias = bias
        if bias is not None:
            # of the distance from the block's last query to its first key
            column = bias.shape[1] - length + key_start - (start + size - 1)
            near_bias = lax.dynamic_slice_in_dim(bias, column, size + span - 1, axis=1)
        return _mix(
            queries,
            query_segments,
            start,
            near_key,
            near_value,
            near_segments,
            key_start,
            attention_mask,
            near_bias,
        )

    starts = jnp.arange(blocks) * size
    queries = _split(_padded(query, (0, padding * per_group)), blocks)
    query_segments = _split(_padded(segments, (0, padding)), blocks)
    # [blocks, rows, queries, groups, width]
    mixed = lax.map(block, (starts, queries, query_segments))
    rows, _, groups, width = query.shape
    return mixed.swapaxes(0, 1).reshape(rows, -1, groups, width)[:, : query.shape[1]]


def _mix(
    query: QueryHeads,
    query_segments: Int[Array, "rows tokens"],
    query_start: int | Int[Array, ""],
    key: KeyHeads,
    value: KeyHeads,
    key_segments: Int[Array, "rows keys"],
    key_start: int | Int[Array, ""],
    attention_mask: AttentionMask,
    bias: Bias | None,
) -> QueryHeads:
    """Compute attention of some queries over some keys of the same rows.

    Each token has one or more neighbouring queries, as `by_xla` arranges them. `query_segments` and
    `key_segments` are the segments of the tokens. `query_start` and `key_start` are the indices in
    the row of the first query's token and of the first key; distances in the row are distances in
    the sequence. `bias` begins with the distance from the last query to the first key.
    """
    scores = jnp.einsum("bshk,bthk->bhst", query, key, preferred_element_type=jnp.float32)
    if attention_mask.cap is not None:
        scores = attention_mask.cap * jnp.tanh(scores / attention_mask.cap)
    if bias is not None:
        scores = scores + _spread(bias, query_segments.shape[1], key.shape[2])[None]
    visible = query_segments[:, :, None] == key_segments[:, None, :]
    query_at = query_start + jnp.arange(query_segments.shape[1])
    key_at = key_start + jnp.arange(key_segments.shape[1])
    distance = (query_at[:, None] - key_at[None, :])[None]
    if attention_mask.causal:
        visible &= distance >= 0
    if attention_mask.reach is not None:
        visible &= abs(distance) <= attention_mask.reach
    visible = jnp.repeat(visible, query.shape[1] // query_segments.shape[1], axis=1)
    scores = jnp.where(visible[:, None], scores, MASKED)
    return weighted_values(scores, value).swapaxes(1, 2)


def weighted_values(scores: AttentionScores, value: KeyHeads) -> Mixed:
    """Compute softmax(scores) . value, in the platform's fastest order of operations."""
    return lax.platform_dependent(
        scores, value, cpu=_softmax_by_parts, default=_softmax_by_reductions
    )


def _spread(bias: Bias, tokens: int, groups: int) -> Float[Array, "groups queries keys"]:
    """Return the bias of each query and key, from the bias of each distance.

    `tokens` is the number of the queries' tokens, `groups` that of key heads. Whole rows are
    gathered: XLA:CPU takes several times as long to gather single numbers or to reshape. The
    barrier keeps XLA from computing the result again for each row of the batch.
    """
    heads, distances = bias.shape
    keys = distances - tokens + 1

    def of_token(start: Int[Array, ""]) -> Float[Array, "heads keys"]:
        return lax.dynamic_slice_in_dim(bias, start, keys, axis=1)

    rows = jax.vmap(of_token, out_axes=1)(tokens - 1 - jnp.arange(tokens))
    if heads != groups:  # heads become queries, as in by_xla
        rows = rows.reshape(groups, heads // groups, tokens, keys).swapaxes(1, 2)
    return lax.optimization_barrier(rows.reshape(groups, -1, keys))


def _softmax_by_reductions(scores: AttentionScores, value: KeyHeads) -> Mixed:
    """Compute softmax(scores) . value with reductions over the last axis."""
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return _product(weights, value) / weights.sum(axis=-1, keepdims=True)


def _softmax_by_parts(scores: AttentionScores, value: KeyHeads) -> Mixed:
    """Compute softmax(scores) . value for XLA:CPU, without reductions over the last axis.

    XLA:CPU runs such a reduction one element at a time. Here elementwise maxima of parts of the row
    give the largest score, and a column of ones beside the values gives the sum of the weights.
    This saves three passes over the scores.
    """
    weights = jnp.exp(scores - _largest(scores))
    ones = jnp.ones((*value.shape[:-1], 1), value.dtype)
    mixed = _product(weights, jnp.concatenate([value, ones], axis=-1))
    return mixed[..., :-1] / mixed[..., -1:]


def _product(weights: AttentionScores, value: KeyHeads) -> Mixed:
    """Multiply weights by values, in an order of axes that XLA:CPU computes without copies.

    If the values are transposed before, XLA:CPU converts both operands to float32; if the result
    has another order, it transposes the weights.
    """
    return jnp.einsum(
        "bhst,bthk->bhsk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )


def _largest(scores: AttentionScores) -> Float[Array, "rows groups queries one"]:
    """Return the largest score of each query, by elementwise maxima of parts of the row as far as
    possible: reductions are slow on XLA:CPU."""
    keys = scores.shape[-1]
    if keys % SIMD_FLOATS == 0:
        parts = jnp.split(scores, gcd(keys // SIMD_FLOATS, MAX_PARTS), axis=-1)  # 2^n parts
        while len(parts) > 1:
            parts = [jnp.maximum(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        scores = parts[0]
    return scores.max(axis=-1, keepdims=True)


def _padded(x: Array, around: tuple[int, int]) -> Array:
    """Pad the second axis with `around` = (before, after) zeros."""
    if around == (0, 0):
        return x
    return jnp.pad(x, [(0, 0), around, *[(0, 0)] * (x.ndim - 2)])


def _split(x: Array, blocks: int) -> Array:
    """Reshape [rows, blocks * size, ...] to [blocks, rows, size, ...]."""
    return x.reshape(x.shape[0], blocks, -1, *x.shape[2:]).swapaxes(0, 1)
