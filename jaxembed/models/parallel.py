"""Divides the layers of a model among devices that compute each batch together.

A device computes some attention heads and some columns of each MLP, as in Megatron-LM (Shoeybi et
al. 2019, arXiv:1909.08053). The results of the output layers of attention and MLP are summed over
the devices; everything else is computed by every device. So a layer needs two sums, and a device
holds only its share of the large weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxembed.errors import ConfigError

AXIS = "tensor"  # the axis of a mesh whose devices hold different shares of the weights

Parts = tuple[tuple[int, int], ...]  # see Cut

_DEGREE: ContextVar[int] = ContextVar("devices that hold a model together", default=1)


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided among devices.

    Along `axis` the parameter has several parts, such as queries, keys and values, of `(count,
    width)` each: `count` heads that take `width` places. Each device gets an equal share of the
    heads of every part. If there are fewer heads than devices, as in keys of grouped attention,
    neighbouring devices get the same head.
    """

    axis: int
    parts: Parts

    def places(self, degree: int) -> np.ndarray:
        """Return the indices along the axis that the devices get, one device after the other."""
        chosen = []
        for device in range(degree):
            start = 0
            for count, width in self.parts:
                first = device * count // degree
                end = first + max(count // degree, 1)
                chosen.append(np.arange(start + first * width, start + end * width))
                start += count * width
        return np.concatenate(chosen)

    def shape(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        """Return the shape of a device's share of a parameter."""
        share = sum(max(count // degree, 1) * width for count, width in self.parts)
        return (*shape[: self.axis], share, *shape[self.axis + 1 :])

    def apply(self, parameter: np.ndarray, degree: int) -> np.ndarray:
        """Return the parameter with the shares of all devices side by side along the axis."""
        places = self.places(degree)
        is_ordered = len(places) == parameter.shape[self.axis] and (np.diff(places) == 1).all()
        return parameter if is_ordered else np.take(parameter, places, self.axis)

    @property
    def spec(self) -> PartitionSpec:
        """The partition of what `apply` returns."""
        return PartitionSpec(*[None] * self.axis, AXIS)


@contextmanager
def divided(degree: int) -> Iterator[None]:
    """Make modules that this thread builds in the block those of one of `degree` devices."""
    reset_token = _DEGREE.set(degree)
    try:
        yield
    finally:
        _DEGREE.reset(reset_token)


def is_divided() -> bool:
    """Whether the modules that this thread builds are those of one device of several."""
    return _DEGREE.get() > 1


def share(count: int, what: str, *, repeats: bool = False) -> int:
    """Return how many of `count` heads or columns a device computes.

    `what` names them in the error. With `repeats`, several devices may compute the same one. Raises
    ConfigError if they cannot be divided equally.
    """
    degree = _DEGREE.get()
    if count % degree and (not repeats or degree % count):
        raise ConfigError(
            f"--tensor-parallel {degree}: the {count} {what} of this model cannot be divided "
            f"equally among {degree} devices"
        )
    return max(count // degree, 1)


def refuse(what: str) -> None:
    """Raise ConfigError for a part of a model that cannot be divided, if it should be."""
    degree = _DEGREE.get()
    if degree > 1:
        raise ConfigError(f"--tensor-parallel {degree}: {what} cannot be divided among devices")


def zeros(shape: Sequence[int], cut: Cut | None = None) -> nnx.Param:
    """Declare a parameter of this shape, or of a device's share of it; the Param keeps `cut`."""
    shape = tuple(shape) if cut is None else cut.shape(shape, _DEGREE.get())
    return nnx.Param(jnp.zeros(shape, jnp.float32), cut=cut)


def summed(x: jax.Array) -> Any:
    """Return the sum over the devices that hold a model together."""
    return lax.psum(x, AXIS)


def own_part(table: jax.Array, count: int) -> jax.Array:
    """Return the part of a table of all heads, `[heads, ...]`, for the `count` of this device."""
    if count == table.shape[0]:
        return table
    return lax.dynamic_slice_in_dim(table, lax.axis_index(AXIS) * count, count)
