"""Attention on GPU: jaxembed's flash kernel. For a block of queries it computes only the blocks of
keys in the same segments.

Dao et al. 2022, arXiv:2205.14135. The kernel is written in Pallas and compiled by the Triton in
XLA. JAX 0.11 calls this backend of Pallas deprecated. If it is missing, importing this module
fails, and flash.py or XLA computes attention (benchmarks/README.md says why no other follows).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int

from jaxembed.models.attention import MASKED, AttentionMask, Grouped, Heads, Joint
from jaxembed.models.kernels import Call, Kernel, refuses_changed_scores, spans
from jaxembed.models.kernels.gather import gather
from jaxembed.models.tokens import Segments

LOG2_E = 1.4426950408889634
TRITON_MIN_HEAD = 16  # heads with fewer dimensions are padded, because Triton's products need 16
TRITON_MAX_HEAD = 256
# Heads with more dimensions fill the registers, so their blocks have fewer queries and more warps.
WIDE_HEAD = 64
NARROW_QUERY_TILE, WIDE_QUERY_TILE = 128, 64
KEY_BLOCK = 64


def refuses(call: Call, length: int) -> str | None:
    """Return the reason why the kernel does not support attention with the properties `call` in
    rows of `length` tokens, or None if it does.

    float32 is not supported, because Triton unrolls its products: for an H100 the kernel took a
    minute to compile and spilled 9 kB of registers a thread; with bfloat16 it spills none.
    """
    if call.dtype not in ("bfloat16", "float16"):
        return f"it supports bfloat16 and float16, not {call.dtype}"
    if call.width > TRITON_MAX_HEAD:
        return f"heads of {call.width} are wider than {TRITON_MAX_HEAD}"
    return refuses_changed_scores(call)


def attend(
    query: Heads,
    key: Grouped,
    value: Grouped,
    segments: Segments,
    attention_mask: AttentionMask,
    slots: int,
    **options: Any,
) -> Heads:
    """Compute attention as `attention.attend` does; queries of padding get arbitrary numbers.

    `slots` is ignored. `options` are those of `_attend`. The result has the dtype of `value`."""
    per_group = query.shape[2] // key.shape[2]

    # i is the index of a block of queries, r of a row, and h of a head
    def spec(part: int, tokens: int, width: int, block: Callable[[Any], Any]) -> pl.BlockSpec:
        shared = per_group if part else 1  # query heads that share a head
        return pl.BlockSpec(
            (None, tokens, None, width), lambda i, r, h: (r, block(i), h // shared, 0)
        )

    return _attend((query, key, value), spec, query.shape, segments, attention_mask, **options)


def attend_joint(
    joint: Joint, segments: Segments, attention_mask: AttentionMask, slots: int, **options: Any
) -> Heads:
    """Compute attention as `attend` does, of queries, keys and values that lie in one array, from
    which the kernel reads them without a copy."""
    rows, length, _, heads, width = joint.shape

    def spec(part: int, tokens: int, width: int, block: Callable[[Any], Any]) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, tokens, None, None, width), lambda i, r, h: (r, block(i), part, h, 0)
        )

    shape = (rows, length, heads, width)
    return _attend((joint,) * 3, spec, shape, segments, attention_mask, **options)


def _attend(
    parts: Sequence[Array],
    spec: Callable[[int, int, int, Callable[[Any], Any]], pl.BlockSpec],
    shape: tuple[int, ...],
    segments: Segments,
    attention_mask: AttentionMask,
    interpret: bool = False,
    query_block: int | None = None,
    key_block: int = KEY_BLOCK,
    key_segments: Segments | None = None,
) -> Heads:
    """Run the kernel on the arrays that hold queries, keys and values.

    `spec(part, tokens, width, block)` returns where in its array a block of `tokens` tokens of a
    part lies, if the block's index is `block(i)` for the queries' block i. `shape` is that of the
    queries and the result. `query_block` and `key_block` are the tokens of a block. `interpret`
    runs the kernel in Pallas' interpreter, without a GPU."""
    rows, length, heads, width = shape
    is_wide = width > WIDE_HEAD
    query_block = query_block or (WIDE_QUERY_TILE if is_wide else NARROW_QUERY_TILE)
    scale = width**-0.5 * LOG2_E
    padded_width = max(TRITON_MIN_HEAD, pl.next_power_of_2(width))
    tail = -length % max(query_block, key_block)
    padded = [_padded(x, tail, padded_width - width) for x in parts]  # XLA pads a joint array once
    segments = jnp.pad(segments, ((0, 0), (0, tail)))
    segments_of_keys = segments
    if key_segments is not None:
        segments_of_keys = jnp.pad(key_segments, ((0, 0), (0, tail)))
    first, end = key_blocks(segments, attention_mask, query_block, key_block)
    length += tail
    row_spec = pl.BlockSpec((None, length), lambda i, r, h: (r, 0))
    range_spec = pl.BlockSpec((None, length // query_block), lambda i, r, h: (r, 0))
    mixed = pl.pallas_call(
        partial(
            _kernel,
            attention_mask=attention_mask,
            scale=scale,
            query_block=query_block,
            key_block=key_block,
        ),
        grid=(length // query_block, rows, heads),
        in_specs=[
            range_spec,
            range_spec,
            spec(0, query_block, padded_width, lambda i: i),
            spec(1, length, padded_width, lambda i: 0),
            spec(2, length, padded_width, lambda i: 0),
            row_spec,
            row_spec,
        ],
        out_specs=pl.BlockSpec(
            (None, query_block, None, padded_width), lambda i, r, h: (r, i, h, 0)
        ),
        out_shape=jax.ShapeDtypeStruct((rows, length, heads, padded_width), parts[2].dtype),
        compiler_params=pltriton.CompilerParams(num_warps=8 if is_wide else 4, num_stages=2),
        interpret=interpret,
        name="attention_of_segments",
    )(first, end, *padded, segments, segments_of_keys)
    return mixed[:, : length - tail, :, :width]


def _padded(x: Array, tail: int, width: int) -> Array:
    """Append `tail` tokens of zeros to each row, and `width` zeros to each head."""
    return jnp.pad(x, ((0, 0), (0, tail), *[(0, 0)] * (x.ndim - 3), (0, width)))


def key_blocks(
    segments: Segments, attention_mask: AttentionMask, query_block: int, key_block: int
) -> tuple[Int[Array, "rows blocks"], Int[Array, "rows blocks"]]:
    """Return, for each block of queries, the range of blocks of keys that its queries attend to.

    A range is the index of its first block of keys, and the index after its last block. The range
    is empty if all queries are padding.
    """
    rows, length = segments.shape
    index = jnp.arange(length)[None]
    first, last = spans(segments)
    if attention_mask.reach is not None:
        first, last = (
            jnp.maximum(first, index - attention_mask.reach),
            jnp.minimum(last, index + attention_mask.reach),
        )
    if attention_mask.causal:
        last = jnp.minimum(last, index)
    # Padding must not widen a range. XLA fuses these divisions with the reductions after them, but
    # divisions after the reductions would be kernels of their own.
    first = jnp.where(segments != 0, first, length) // key_block
    end = jnp.where(segments != 0, last, -1) // key_block + 1
    blocks = (rows, -1, query_block)
    return first.reshape(blocks).min(axis=2), end.reshape(blocks).max(axis=2)


def _kernel(
    first_ref,
    end_ref,
    query_ref,
    key_ref,
    value_ref,
    segments_ref,
    key_segments_ref,
    mixed_ref,
    *,
    attention_mask: AttentionMask,
    scale: float,
    query_block: int,
    key_block: int,
):
    """Compute attention of one block of queries of one head, over one block of keys after another.
    `scale` includes the factor log2(e), because the GPU has an instruction for exp2, not for exp.
    """
    block = pl.program_id(0)
    queries = pl.ds(block * query_block, query_block)
    query = query_ref[...]
    query_segments = segments_ref[queries]
    query_at = block * query_block + jnp.arange(query_block)

    def visit(number, carry):
        mixed, largest, total = carry
        keys = pl.ds(number * key_block, key_block)
        key_at = number * key_block + jnp.arange(key_block)
        scores = _product(query, key_ref[keys, :], contracted=1) * scale  # [queries, keys]
        visible = query_segments[:, None] == key_segments_ref[keys][None, :]
        distance = query_at[:, None] - key_at[None, :]
        if attention_mask.causal:
            visible &= distance >= 0
        if attention_mask.reach is not None:
            visible &= (distance <= attention_mask.reach) & (distance >= -attention_mask.reach)
        scores = jnp.where(visible, scores, MASKED)
        larger = jnp.maximum(largest, scores.max(axis=1))
        # Masked keys get weight 0. exp2(MASKED - larger) would be 1 while the query has met only
        # masked keys.
        weights = jnp.where(visible, jnp.exp2(scores - larger[:, None]), 0.0)
        rescale = jnp.exp2(largest - larger)
        # values of padding may be NaN
        is_token = segments_ref[keys][:, None] != 0
        value = value_ref[keys, :]
        value = jnp.where(is_token, value, jnp.zeros_like(value))
        mixed = mixed * rescale[:, None] + _product(
            weights.astype(value.dtype), value, contracted=0
        )
        return mixed, larger, total * rescale + weights.sum(axis=1)

    start = (
        jnp.zeros(query.shape, jnp.float32),
        jnp.full((query_block,), MASKED, jnp.float32),
        jnp.zeros((query_block,), jnp.float32),
    )
    mixed, _, total = lax.fori_loop(first_ref[block], end_ref[block], visit, start)
    mixed = mixed / jnp.where(total == 0, 1.0, total)[:, None]
    mixed_ref[...] = mixed.astype(mixed_ref.dtype)


def _product(a: Array, b: Array, contracted: int) -> Array:
    axes = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


KERNEL = Kernel("triton", attend, refuses, attend_joint=attend_joint, gather=gather)
