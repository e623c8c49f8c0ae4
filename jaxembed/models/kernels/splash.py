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

TPU_LANES = 128  # numbers in a vector register; a block of a row is a multiple of it
SPLASH_MIN_HEAD = 64  # dimensions; narrower heads are padded with zeros
# Tokens. With 1024 a v6e takes 1.28 ms, with 512 1.81 ms (Qwen3-0.6B, measured by a third party).
BLOCKS = (1024, 512, 256, 128)
SPLASH_LOCAL_BLOCK = 256  # tokens; with a window, larger blocks hold keys that no query attends to


def refuses(call: Call, length: int) -> str | None:
    """Return why the kernel does not take this call in rows of `length` tokens, or None."""
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
    """Compute attention as `attention.attend`; the kernel rounds the result to the operands' dtype.
    `slots` is ignored. `interpret` runs it in Pallas' interpreter, without a TPU."""
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
    """Return the largest blocks that divide the row; with a window they are smaller."""
    max_size = SPLASH_LOCAL_BLOCK if attention_mask.reach is not None else BLOCKS[0]
    size = next(size for size in BLOCKS if size <= max_size and length % size == 0)
    return splash.BlockSizes(block_q=size, block_kv=size, block_kv_compute=min(size, 512))


def _mask(length: int, attention_mask: AttentionMask) -> masks.Mask:
    """Return the mask of a row in the kernel's form."""
    square = (length, length)
    if attention_mask.reach is not None:
        after = 0 if attention_mask.causal else attention_mask.reach
        return masks.LocalMask(square, (attention_mask.reach, after), offset=0)
    return masks.CausalMask(square) if attention_mask.causal else masks.FullMask(square)


def _padded_heads(x: Heads) -> Float[Array, "rows length heads filled"]:
    """Pad heads with zeros to a width that the kernel takes."""
    width = x.shape[3]
    padded_width = max(
        SPLASH_MIN_HEAD,
        width if width <= SPLASH_MIN_HEAD else -(-width // TPU_LANES) * TPU_LANES,
    )
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padded_width - width)))


KERNEL = Kernel("splash", attend, refuses)
