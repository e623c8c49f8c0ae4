"""Attention on GPU: FlashAttention 2 or 3 of the optional package dew-flash-attn.

The rows of a batch become one long row, in which each segment and each stretch of padding is a
sequence between two offsets. On Hopper GPUs the package runs FlashAttention-3 (Shah et al. 2024,
arXiv:2407.08608).
"""

import jax.numpy as jnp
from dew_flash_attn import flash_mha_varlen  # pyright: ignore[reportMissingImports]
from jaxtyping import Array, Int

from jaxembed.models.attention import AttentionMask, Grouped, Heads
from jaxembed.models.kernels import Call, Kernel, refuses_changed_scores, starts, without_padding
from jaxembed.models.tokens import Segments

FLASH_MAX_HEAD = 256


def refuses(call: Call, length: int) -> str | None:
    """Return the reason why the kernel does not support attention with the properties `call` in
    rows of `length` tokens, or None if it does."""
    if call.dtype not in ("bfloat16", "float16"):
        return f"{call.dtype} is not bfloat16 or float16"
    if call.width > FLASH_MAX_HEAD:
        return f"heads of {call.width} are wider than {FLASH_MAX_HEAD}"
    if call.hides_keys:
        return "it supports no hidden keys"
    return refuses_changed_scores(call)


def attend(
    query: Heads,
    key: Grouped,
    value: Grouped,
    segments: Segments,
    attention_mask: AttentionMask,
    slots: int,
) -> Heads:
    """Compute attention as `attention.attend` does. The result is rounded to the operands' dtype.
    A row has at most `slots` segments."""
    rows, length = segments.shape
    flat = (x.reshape(rows * length, *x.shape[2:]) for x in (query, key, value))
    # A reach of -1 means no limit, and a reach of 0 on the right means causal attention.
    reach = -1 if attention_mask.reach is None else attention_mask.reach
    mixed = flash_mha_varlen(
        *(without_padding(x[None], segments.reshape(1, -1))[0] for x in flat),
        offsets(segments, slots),
        length,
        is_causal=attention_mask.causal,
        window_size=(reach, 0 if attention_mask.causal else reach),
    )
    return mixed.reshape(query.shape).astype(jnp.float32)


def offsets(segments: Segments, slots: int) -> Int[Array, " sequences_and_one"]:
    """Return where each sequence begins in the long row, and where the last sequence ends.

    A row has at most `slots` segments. Each stretch of padding before, between and after segments
    is a sequence, too. Offsets that are not needed make empty sequences at the end.
    """
    rows, length = segments.shape
    max_sequences = rows * min(2 * slots + 1, length)
    (first_tokens,) = jnp.nonzero(
        starts(segments).reshape(-1), size=max_sequences, fill_value=rows * length
    )
    return jnp.append(first_tokens, rows * length).astype(jnp.int32)


KERNEL = Kernel("flash", attend, refuses)
