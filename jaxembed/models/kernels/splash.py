"""Attention on TPU: the splash kernel that comes with JAX, told of segments and windows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float

from jaxembed.models.attention import Grouped, Heads, Sight
from jaxembed.models.kernels import Call, Kernel, changed_scores, without_padding
from jaxembed.models.tokens import Segments

TPU_LANES = 128  # of a vector register: blocks of a row are multiples of it
SPLASH_NARROWEST_HEAD = 64  # narrower ones are filled up with zeros
BLOCKS = (1024, 512, 256, 128)  # on v6e 1024 beat 512, 1.28 to 1.81 ms (Qwen3-0.6B, third party)
SPLASH_LOCAL_BLOCK = 256  # larger ones hold keys that no query of theirs sees


def refuses(call: Call, length: int) -> str | None:
    """Why it does not take this call in rows of this length."""
    if length % TPU_LANES:
        return f"{length} tokens are no multiple of {TPU_LANES}"
    if call.dtype not in ("bfloat16", "float32"):
        return f"{call.dtype} has no products on TPU"
    return changed_scores(call)


def attend(
    query: Heads,
    key: Grouped,
    value: Grouped,
    segments: Segments,
    sight: Sight,
    slots: int,
    interpret: bool = False,
    key_segments: Segments | None = None,
) -> Heads:
    """As `attention.attend`. The kernel rounds what comes out to the operands' dtype."""
    _, length, heads, width = query.shape
    query = (query.astype(jnp.float32) * width**-0.5).astype(query.dtype)
    value = without_padding(value, segments)
    # [rows, heads, length, width]
    query, key, value = (_filled(x).swapaxes(1, 2) for x in (query, key, value))
    run: Any = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([_mask(length, sight)] * heads),
        block_sizes=block_sizes(length, sight),
        interpret=interpret,
    )
    of_keys = segments if key_segments is None else key_segments
    mixed = jax.vmap(
        lambda query, key, value, q, kv: run(query, key, value, splash.SegmentIds(q=q, kv=kv))
    )(query, key, value, segments, of_keys)
    return mixed.swapaxes(1, 2)[..., :width].astype(jnp.float32)


def block_sizes(length: int, sight: Sight) -> splash.BlockSizes:
    """The largest blocks that divide the row."""
    most = SPLASH_LOCAL_BLOCK if sight.reach is not None else BLOCKS[0]
    size = next(size for size in BLOCKS if size <= most and length % size == 0)
    return splash.BlockSizes(block_q=size, block_kv=size, block_kv_compute=min(size, 512))


def _mask(length: int, sight: Sight) -> masks.Mask:
    square = (length, length)
    if sight.reach is not None:
        after = 0 if sight.causal else sight.reach
        return masks.LocalMask(square, (sight.reach, after), offset=0)
    return masks.CausalMask(square) if sight.causal else masks.FullMask(square)


def _filled(x: Heads) -> Float[Array, "rows length heads filled"]:
    width = x.shape[3]
    wanted = max(
        SPLASH_NARROWEST_HEAD,
        width if width <= SPLASH_NARROWEST_HEAD else -(-width // TPU_LANES) * TPU_LANES,
    )
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wanted - width)))


KERNEL = Kernel("splash", attend, refuses)
