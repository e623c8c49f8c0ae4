"""Attention kernels for accelerators: what each takes, and where to find it.

A kernel replaces XLA's attention, `attention.by_xla`, where a probe finds it correct and faster.
Kernels are imported on demand. They take neither a bias nor a soft cap: models with either
use XLA's attention in all layers. Functions here also tell kernels where segments start and end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxembed.models.attention import AttentionMask

KERNELS = {
    "cpu": {},
    "gpu": {
        "flash": "jaxembed.models.kernels.flash:KERNEL",
        "triton": "jaxembed.models.kernels.triton:KERNEL",
    },
    "tpu": {"splash": "jaxembed.models.kernels.splash:KERNEL"},
}

Places = Int[Array, "rows length"]

SHORTEST_PROBED_ROW = 128  # tokens; in shorter rows XLA computes the few scores at once


@dataclass(frozen=True)
class Call:
    """The properties of a model's calls of attention, which are the same in each of its buckets."""

    heads: int
    groups: int  # heads of keys and values
    width: int  # dimensions of a head
    dtype: str
    attention_mask: AttentionMask
    has_bias: bool = False
    hides_keys: bool = False  # whether some tokens are hidden as keys

    def __str__(self) -> str:
        seen = "causal" if self.attention_mask.causal else "whole"
        if self.attention_mask.reach is not None:
            seen += f" within {self.attention_mask.reach}"
        if self.has_bias:
            seen += ", with a bias"
        if self.attention_mask.cap is not None:
            seen += f", capped at {self.attention_mask.cap:g}"
        if self.hides_keys:
            seen += ", with hidden keys"
        return f"{self.heads}/{self.groups} heads of {self.width}, {self.dtype}, {seen}"


@dataclass(frozen=True)
class Kernel:
    """An attention kernel.

    `attend(query, key, value, segments, mask, slots)` is as `attention.attend`; a row holds at
    most `slots` segments. Calls that hide keys also pass `key_segments`. `refuses(call, length)`
    returns why the kernel does not take the call in rows of `length` tokens, or None if it does.
    """

    name: str
    attend: Callable
    refuses: Callable[[Call, int], str | None]


def refuses_changed_scores(call: Call) -> str | None:
    """Return why a kernel refuses a call that changes scores before the softmax, or None."""
    if call.has_bias:
        return "it supports no bias of scores"
    return None if call.attention_mask.cap is None else "it supports no soft cap of scores"


def kernel(path: str) -> Kernel:
    """Import a kernel by its path in KERNELS. Raises ImportError if a package is missing."""
    return resolve_name(path)


def starts(segments: Places) -> Bool[Array, "rows length"]:
    """Return whether a segment, or a stretch of padding, begins with each token."""
    return segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def ends(segments: Places) -> Bool[Array, "rows length"]:
    """Return whether a segment, or a stretch of padding, ends with each token."""
    return segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1)), constant_values=-1)


def spans(segments: Places) -> tuple[Places, Places]:
    """Return the index in the row of the first and of the last token of each token's segment. A
    stretch of padding counts as a segment."""
    length = segments.shape[1]
    index = jnp.broadcast_to(jnp.arange(length), segments.shape)
    first = lax.cummax(jnp.where(starts(segments), index, 0), axis=1)
    last = lax.cummin(jnp.where(ends(segments), index, length - 1), axis=1, reverse=True)
    return first, last


def without_padding(x: Array, segments: Places) -> Array:
    """Return `x`, `[rows, length, heads, width]`, with zeros for padding, which may hold NaN."""
    return jnp.where(segments[:, :, None, None] != 0, x, jnp.zeros((), x.dtype))
