"""Attention on TPU: JAX's splash kernel, with segments and windows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float

from jaxembed.models.attention import AttentionMask, Grouped, Heads
from jaxembed.models.kernels import Call, Kernel, refuses_changed_scores, without_padding
from jaxembed.models.tokens import Segments

TPU_LANES = 128  # the numbers in a vector register; the length of a block is a multiple of this
SPLASH_MIN_HEAD = 64  # heads with fewer dimensions are padded with zeros
# The lengths of blocks in tokens. A TPU v6e takes 1.28 ms with blocks of 1024 tokens, and 1.81 ms
# with blocks of 512 (Qwen3-0.6B, measured by a third party).
BLOCKS = (1024, 512, 256, 128)
# The maximum length of blocks with an attention window, in tokens. Larger blocks would contain keys
# that no query attends to.
SPLASH_LOCAL_BLOCK = 256


def refuses(call: Call, length: int) -> str | None:
    """Return the reason why the kernel does not support attention with the properties `call` in
    rows of `length` tokens, or None if it does."""
    if length % TPU_LANES:
        return f"{length} tokens are not a multiple of {TPU_LANES}"
    if call.dtype not in ("bfloat16", "float32"):
        return f"it supports bfloat16 and float32, not {call.dtype}"
    return refuses_changed_scores(call)


def attend(
    query: Heads,
    key: Grouped,
    value: Grouped,
    segments: Segments,
    attention_mask: AttentionMask,
    slots: int,
    interpret: bool = False,
    key_segments: Segments | None = None,
) -> Heads:
    """Compute attention as `attention.attend` does. The result is rounded to the operands' dtype.
    `slots` is ignored. `interpret` runs the kernel in Pallas' interpreter, without a TPU."""
    _, length, heads, width = query.shape
    query = (query.astype(jnp.float32) * width**-0.5).astype(query.dtype)
    value = without_padding(value, segments)
    # [rows, heads, length, width]
    query, key, value = (_padded_heads(x).swapaxes(1, 2) for x in (query, key, value))
    run: Any = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([_mask(length, attention_mask)] * heads),
        block_sizes=block_sizes(length, attention_mask),
        interpret=interpret,
    )
    segments_of_keys = segments if key_segments is None else key_segments
    mixed = jax.vmap(
        lambda query, key, value, q, kv: run(query, key, value, splash.SegmentIds(q=q, kv=kv))
    )(query, key, value, segments, segments_of_keys)
    return mixed.swapaxes(1, 2)[..., :width].astype(jnp.float32)


def block_sizes(length: int, attention_mask: AttentionMask) -> splash.BlockSizes:
    """Return the largest block sizes that divide the length of a row, at most SPLASH_LOCAL_BLOCK if
    the mask has a reach."""
    max_size = SPLASH_LOCAL_BLOCK if attention_mask.reach is not None else BLOCKS[0]
    size = next(size for size in BLOCKS if size <= max_size and length % size == 0)
    return splash.BlockSizes(block_q=size, block_kv=size, block_kv_compute=min(size, 512))


def _mask(length: int, attention_mask: AttentionMask) -> masks.Mask:
    """Convert an attention mask for rows of this length to the kernel's type of mask."""
    square = (length, length)
    if attention_mask.reach is not None:
        after = 0 if attention_mask.causal else attention_mask.reach
        return masks.LocalMask(square, (attention_mask.reach, after), offset=0)
    return masks.CausalMask(square) if attention_mask.causal else masks.FullMask(square)


def _padded_heads(x: Heads) -> Float[Array, "rows length heads filled"]:
    """Pad heads with zeros to a number of dimensions that the kernel supports."""
    width = x.shape[3]
    padded_width = max(
        SPLASH_MIN_HEAD,
        width if width <= SPLASH_MIN_HEAD else -(-width // TPU_LANES) * TPU_LANES,
    )
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padded_width - width)))


KERNEL = Kernel("splash", attend, refuses, separate=True)
