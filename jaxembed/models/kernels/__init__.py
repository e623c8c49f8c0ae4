"""Attention kernels for accelerators: what each takes, and where to find it.

XLA's own attention is `attention.by_xla`; these stand in for it where a probe has found them right
and faster. None is imported before it is looked for. None takes a bias or a soft cap: models with
either use XLA's in all layers. And what kernels need to know of segments: where they start and end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxembed.models.attention import Sight

KERNELS = {
    "cpu": {},
    "gpu": {
        "flash": "jaxembed.models.kernels.flash:KERNEL",
        "triton": "jaxembed.models.kernels.triton:KERNEL",
    },
    "tpu": {"splash": "jaxembed.models.kernels.splash:KERNEL"},
}

Places = Int[Array, "rows length"]

SHORTEST_PROBED_ROW = 128  # below it XLA computes the scores of a row at once, and they are few


@dataclass(frozen=True)
class Call:
    """What a model asks of attention: the same in each of its buckets."""

    heads: int
    groups: int  # heads of keys and values
    width: int  # of a head
    dtype: str
    sight: Sight
    has_bias: bool = False
    hides_keys: bool = False  # whether some tokens are hidden as keys

    def __str__(self) -> str:
        seen = "causal" if self.sight.causal else "whole"
        if self.sight.reach is not None:
            seen += f" within {self.sight.reach}"
        if self.has_bias:
            seen += ", with a bias"
        if self.sight.cap is not None:
            seen += f", capped at {self.sight.cap:g}"
        if self.hides_keys:
            seen += ", with hidden keys"
        return f"{self.heads}/{self.groups} heads of {self.width}, {self.dtype}, {seen}"


@dataclass(frozen=True)
class Kernel:
    """`attend` is called as attend(query, key, value, segments, sight, slots): as
    `attention.attend`, and `slots` segments are the most that a row holds; for calls that hide keys
    with `key_segments`, too. `refuses` says why it does not take a call in rows of a length, or
    None."""

    name: str
    attend: Callable
    refuses: Callable[[Call, int], str | None]


def changed_scores(call: Call) -> str | None:
    """Why a kernel does not take a call that changes scores before the softmax."""
    if call.has_bias:
        return "it takes no bias of scores"
    return None if call.sight.cap is None else "it takes no soft cap of scores"


def kernel(path: str) -> Kernel:
    """A kernel of KERNELS. Raises ImportError where what it needs is not installed."""
    return resolve_name(path)


def starts(segments: Places) -> Bool[Array, "rows length"]:
    """Whether a segment, or a stretch of padding, begins at a token."""
    return segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def ends(segments: Places) -> Bool[Array, "rows length"]:
    """Whether a segment, or a stretch of padding, ends with a token."""
    return segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1)), constant_values=-1)


def spans(segments: Places) -> tuple[Places, Places]:
    """The places in the row of the first and the last token of each token's segment."""
    length = segments.shape[1]
    at = jnp.broadcast_to(jnp.arange(length), segments.shape)
    first = lax.cummax(jnp.where(starts(segments), at, 0), axis=1)
    last = lax.cummin(jnp.where(ends(segments), at, length - 1), axis=1, reverse=True)
    return first, last


def without_padding(x: Array, segments: Places) -> Array:
    """`[rows, length, heads, width]` with zeros where there is no segment: padding may hold NaN."""
    return jnp.where(segments[:, :, None, None] != 0, x, jnp.zeros((), x.dtype))
