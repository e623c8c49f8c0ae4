"""Attention kernels for accelerators: which kernels exist, and which inputs each supports.

A kernel replaces XLA's attention, `attention.by_xla`, where a probe finds the kernel correct and
faster. Kernels are imported on demand. They support no bias and no soft cap of scores: models with
one of these use XLA's attention in all layers. A kernel may come with another one, which gathers
the outputs of a program. This module also has functions that find for kernels where segments start
and end.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxembed.models.attention import AttentionMask, ByKernel

KERNELS = {
    "cpu": {},
    "gpu": {
        "flash": "jaxembed.models.kernels.flash:KERNEL",
        "triton": "jaxembed.models.kernels.triton:KERNEL",
    },
    "tpu": {"splash": "jaxembed.models.kernels.splash:KERNEL"},
}

PACKAGES = ("dew-flash-attn",)  # that kernels call, besides JAX

Places = Int[Array, "rows length"]

# Kernels are not tried for rows of fewer tokens, in which XLA computes all scores at once.
SHORTEST_PROBED_ROW = 128


@dataclass(frozen=True)
class Call:
    """The properties of a model's attention on which it depends whether a kernel supports it. They
    are the same for each bucket of the model."""

    heads: int
    groups: int  # the number of heads of keys and values
    width: int  # the number of dimensions of a head
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

    `attend(query, key, value, segments, mask, slots)` computes the result of `attention.attend`;
    `slots` is the maximum number of segments in a row. If some tokens are hidden as keys, it is
    also given `key_segments`. `refuses(call, length)` returns the reason if the kernel does not
    support attention with the properties `call` in rows of `length` tokens, or None if it does. The
    other fields are those of ByKernel.
    """

    name: str
    attend: Callable
    refuses: Callable[[Call, int], str | None]
    separate: bool = False
    attend_joint: Callable | None = None
    gather: Callable | None = None

    def implementation(self, slots: int) -> ByKernel:
        """Return the attention implementation for rows with at most so many segments."""
        return ByKernel(self.attend, slots, self.separate, self.attend_joint, self.gather)


def refuses_changed_scores(call: Call) -> str | None:
    """Return the reason why a kernel that cannot change scores does not support `call`, or None if
    there is no bias and no soft cap."""
    if call.has_bias:
        return "it supports no bias of scores"
    return None if call.attention_mask.cap is None else "it supports no soft cap of scores"


def kernel(path: str) -> Kernel:
    """Import a kernel. `path` is a value in KERNELS. Raises ImportError if a package is missing."""
    return resolve_name(path)


def source_digest() -> str:
    """Return a hash of the kernels' sources and of the packages that they call, on which results of
    their trials depend."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{package} {metadata.version(package)}".encode())
    return digest.hexdigest()[:16]


def starts(segments: Places) -> Bool[Array, "rows length"]:
    """Return for each token whether it is the first of a segment or of a stretch of padding."""
    return segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def ends(segments: Places) -> Bool[Array, "rows length"]:
    """Return for each token whether it is the last of a segment or of a stretch of padding."""
    return segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1)), constant_values=-1)


def spans(segments: Places) -> tuple[Places, Places]:
    """Return for each token the indices in the row of the first and the last token of its segment.
    A stretch of padding counts as a segment."""
    length = segments.shape[1]
    index = jnp.broadcast_to(jnp.arange(length), segments.shape)
    first = lax.cummax(jnp.where(starts(segments), index, 0), axis=1)
    last = lax.cummin(jnp.where(ends(segments), index, length - 1), axis=1, reverse=True)
    return first, last


def without_padding(x: Array, segments: Places) -> Array:
    """Return `x`, `[rows, length, heads, width]`, with zeros for padding, which may hold NaN."""
    return jnp.where(segments[:, :, None, None] != 0, x, jnp.zeros((), x.dtype))
