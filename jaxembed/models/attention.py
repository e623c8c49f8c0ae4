"""Attention within the segments of packed rows, with one implementation for each platform."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxembed.data.spec import DType
from jaxembed.models import native
from jaxembed.models.rope import Rotation
from jaxembed.models.tokens import Segments

# In rows up to this length (tokens) all scores are computed at once; in longer rows the scores of
# one block of queries at a time. On CPUs with MiniLM, computing in blocks is a fifth slower at a
# length of 128, 7 % faster at 256 and a third faster at 512 (benchmarks/README.md).
WHOLE_SCORES = 128
# The tokens of a block of queries on CPUs, without and with an attention window. Blocks of 32 are 4
# to 8 % slower without a window and 12 to 16 % with one; blocks of 128 are no faster.
QUERY_BLOCK = 64
LOCAL_BLOCK = 64
# The same on GPUs and TPUs. Without a window the size limits the memory for the scores of long
# rows. With a window larger blocks would compute scores of keys that no query attends to.
ACCELERATOR_QUERY_BLOCK = 512
ACCELERATOR_LOCAL_BLOCK = 128
# Heads are padded for the native kernel by at most this share of their width. The heads of Qwen's
# image encoder are 80 wide, those of ColPali's 72.
MOST_PADDING = 0.5
SIMD_FLOATS = 16  # the number of float32 values in one vector of AVX-512, or in two of AVX2
MAX_PARTS = 32  # a power of 2: maximum slices of a row of scores, to find the largest score
MASKED = -1e30  # finite, so that a query without keys gets uniform weights instead of NaN

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
    """Which tokens of its segment a token attends to (by default all), and the cap of scores."""

    causal: bool = False  # whether a token attends only to itself and earlier tokens
    reach: int | None = None  # maximum distance (tokens) before and after a token; None: no limit
    cap: float | None = None  # scores become cap * tanh(score / cap); None: no soft cap


EVERYTHING = AttentionMask()

# An implementation of `attend`, with the parameters of by_xla. `attend` passes `bias` and
# `key_segments` only if they are not None, so an implementation may lack these two parameters if
# it is only used for models without a bias and without hidden keys.
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
    key head then serves heads / groups neighbouring query heads. The result has the shape of
    `query`. `segments` numbers the sequences of a row; 0 is padding. If the mask has a reach, the
    time in rows longer than WHOLE_SCORES is proportional to length times reach.

    `bias` is `[heads, 2 * length - 1]`, float32: column d + length - 1 is added to the scores of
    keys d tokens after the query (`BiasByDistance` and `alibi` make such arrays). If the mask has a
    soft cap, it is applied to the scores before the bias is added.

    `key_segments` are the segments of the tokens as keys, by default `segments`: a query attends to
    the keys whose key segment equals the query's segment. A token with different numbers in
    `segments` and `key_segments` is hidden as a key. A query that attends to no key gets arbitrary
    finite numbers.

    Matrix products take operands of the given dtype; scores and softmax are float32. The result is
    float32, or of the operands' dtype if the implementation rounds it. Padding may hold NaN: keys
    of padding are masked, and values of padding are replaced by zeros. The context manager `using`
    chooses the implementation.
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

    Query, key and value have the same number of heads. Queries and keys are rotated by `rotation`
    first, if it is given. Unless a native call computes all this, query, key and value are rounded
    to `dtype` after the rotation (default: the dtype of `joint`). The result is
    `[rows, length, heads, width]`.
    """
    _, length, _, _, width = joint.shape
    if key_segments is None and takes_joint(length, width, joint.dtype):
        mask_fields = attention_mask.causal, attention_mask.reach, attention_mask.cap
        angles = None if rotation is None else (rotation.cos, rotation.sin)
        return native.joint_attention(
            joint, segments, *mask_fields, distance_bias=bias, angles=angles
        )
    implementation = _IMPLEMENTATION.get()
    if rotation is None and isinstance(implementation, ByKernel) and implementation.attend_joint:
        optional = {} if key_segments is None else {"key_segments": key_segments}
        return implementation.attend_joint(
            joint, segments, attention_mask, slots=implementation.slots, **optional
        )
    query, key, value = joint[:, :, 0], joint[:, :, 1], joint[:, :, 2]
    if rotation is not None:
        query, key = rotation(query), rotation(key)
    query, key, value = (x.astype(dtype or joint.dtype) for x in (query, key, value))
    return attend(query, key, value, segments, attention_mask, bias, key_segments)


def takes_joint(length: int, width: int, dtype: Any) -> bool:
    """Whether `attend_joint` uses the native kernel for rows of this length and heads of this
    width. The kernel takes heads that the caller has rounded to `dtype`, and rotates the rounded
    heads."""
    return is_native("joint_attention", dtype) and native.takes(
        length, width, str(jnp.dtype(dtype))
    )


@contextmanager
def using(implementation: Attend) -> Iterator[None]:
    """Make `attend` use this implementation in all functions that this thread traces in the block.

    JAX would reuse the trace of a function that it has traced with another implementation: pass a
    new function to jit for each implementation.
    """
    reset_token = _IMPLEMENTATION.set(implementation)
    try:
        yield
    finally:
        _IMPLEMENTATION.reset(reset_token)


def is_native(call: str, dtype: Any = None) -> bool:
    """Whether the program that this thread is tracing may use a native kernel, for operands of a
    `dtype` if it is given. (Packed weights have the dtype of the kernels.)

    `call` is the name of the kernel, or of a step that it adds to a linear layer: a name in
    native.CALLS or native.EPILOGUES.
    """
    implementation = _IMPLEMENTATION.get()
    if not isinstance(implementation, ByNative) or call in implementation.without:
        return False
    return dtype is None or jnp.dtype(dtype) == jnp.dtype(implementation.dtype)


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
    """An implementation that uses native kernels for the shapes they support, and XLA for others.

    native.load_library must have succeeded for `dtype`, that of the kernels. `without` names native
    kernels that are not used, neither in attention nor in the layers around it.
    """

    without: frozenset[str] = frozenset()
    dtype: DType = "bfloat16"

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
        """Compute attention as `attend` does, with the native kernel unless too much padding would
        bring the shapes to those that it takes."""
        length, width = query.shape[1], query.shape[3]
        tokens, columns = -length % native.TILE, -width % native.step(self.dtype)  # of padding
        is_supported = query.dtype == jnp.dtype(self.dtype) and key_segments is None
        is_near = columns <= width * MOST_PADDING and (bias is None or not tokens)
        if not is_supported or not is_near or "attention" in self.without:
            return by_xla(query, key, value, segments, attention_mask, bias, key_segments)
        if columns:  # the kernel divides scores by the square root of the padded width
            scaled = query.astype(jnp.float32) * ((width + columns) / width) ** 0.5
            query = scaled.astype(query.dtype)
        if tokens or columns:
            padding = ((0, 0), (0, tokens), (0, 0), (0, columns))
            query, key, value = (jnp.pad(x, padding) for x in (query, key, value))
            segments = jnp.pad(segments, padding[:2])
        mask_fields = attention_mask.causal, attention_mask.reach, attention_mask.cap
        mixed = native.attention(query, key, value, segments, *mask_fields, distance_bias=bias)
        return mixed[:, :length, :, :width]


by_native = ByNative()


@dataclass(frozen=True)
class ByKernel:
    """An implementation that uses an attention kernel of an accelerator.

    `attend` computes attention as the function of this name does, and is also given `slots`, the
    maximum number of segments in a row. If `separate`, layers compute queries, keys and values in
    products of their own, so that XLA writes each in the order of axes in which the kernel reads
    it. `attend_joint(joint, segments, mask, slots)`, if there is one, reads queries, keys and
    values of the same number of heads from one array. `gather(flat, order, sizes)`, if there is
    one, returns `flat[order]` in parts of these sizes, for the outputs of a program.
    """

    attend: Callable[..., Array]
    slots: int
    separate: bool = False
    attend_joint: Callable[..., Array] | None = None
    gather: Callable[..., list[Array]] | None = None

    def __call__(self, *arguments: Any, **optional: Any) -> Heads:
        """Compute attention with the kernel."""
        return self.attend(*arguments, slots=self.slots, **optional)


@contextmanager
def with_segments(count: int) -> Iterator[None]:
    """Make `attend` take rows of at least `count` segments in all functions that this thread traces
    in the block. Without it, rows have at most as many as slots."""
    implementation = _IMPLEMENTATION.get()
    if isinstance(implementation, ByKernel):
        implementation = replace(implementation, slots=max(implementation.slots, count))
    with using(implementation):
        yield


def is_separate() -> bool:
    """Whether the program that this thread is tracing computes queries, keys and values in products
    of their own."""
    implementation = _IMPLEMENTATION.get()
    return isinstance(implementation, ByKernel) and implementation.separate


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
    """Compute attention block by block, each with the queries of `size` tokens.

    The scores of a block fit in the CPU's cache, and a block skips the keys beyond the reach of all
    its queries. `query` has heads / groups neighbouring queries for each token, as `by_xla`
    arranges them.
    """
    length = segments.shape[1]
    per_group = query.shape[1] // length
    size = min(size, length)
    blocks = -(-length // size)
    padding = blocks * size - length
    before = length if attention_mask.reach is None else attention_mask.reach
    after = 0 if attention_mask.causal else before
    span = before + size + after  # the number of keys for a block
    if span >= length:  # every block takes all keys
        before, span, around = 0, length, (0, 0)
    else:
        around = (before, padding + after)
    keys = [_padded(x, around) for x in (key, value, key_segments)]
    if bias is not None:  # add columns for the padding queries at the end of the last block
        bias = _padded(bias, (padding, 0))

    def block(operands):
        start, queries, query_segments = operands
        first_key = start if span < length else 0
        near_key, near_value, near_segments = (
            lax.dynamic_slice_in_dim(x, first_key, span, axis=1) for x in keys
        )
        key_start = first_key - before  # the index of the first key in the row without padding
        near_bias = bias
        if bias is not None:
            # The column of the distance from the last query of the block to its first key.
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
    the row of the first query's token and of the first key; the mask's distances are differences of
    such indices. The first column of `bias` is for the distance from the last query to the first
    key.
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
    """Compute softmax(scores) . value, in the order of operations that is fastest on the
    platform."""
    return lax.platform_dependent(
        scores, value, cpu=_softmax_by_parts, default=_softmax_by_reductions
    )


def _spread(bias: Bias, tokens: int, groups: int) -> Float[Array, "groups queries keys"]:
    """Return the bias of each query and key, from the bias of each distance.

    `tokens` is the number of tokens that have queries, and `groups` is the number of key heads.
    Each row of the result is copied as one slice of `bias`: XLA:CPU takes several times as long to
    gather single numbers or to reshape. The barrier keeps XLA from computing the result again for
    each row of the batch.
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

    XLA:CPU runs a reduction over the last axis one element at a time. Here elementwise maxima of
    slices of the row give the largest score, and a column of ones beside the values gives the sum
    of the weights. This saves three passes over the scores.
    """
    weights = jnp.exp(scores - _largest(scores))
    ones = jnp.ones((*value.shape[:-1], 1), value.dtype)
    mixed = _product(weights, jnp.concatenate([value, ones], axis=-1))
    return mixed[..., :-1] / mixed[..., -1:]


def _product(weights: AttentionScores, value: KeyHeads) -> Mixed:
    """Multiply attention weights by values, in an order of axes that XLA:CPU needs no copies for.

    If the values were transposed before, XLA:CPU would convert both operands to float32. If the
    result had another order of axes, XLA:CPU would transpose the attention weights.
    """
    return jnp.einsum(
        "bhst,bthk->bhsk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )


def _largest(scores: AttentionScores) -> Float[Array, "rows groups queries one"]:
    """Return the largest score of each query. The row is cut into slices, of which elementwise
    maxima are taken, because a reduction over the whole row is slow on XLA:CPU."""
    keys = scores.shape[-1]
    if keys % SIMD_FLOATS == 0:
        parts = jnp.split(scores, gcd(keys // SIMD_FLOATS, MAX_PARTS), axis=-1)  # a power of 2
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
