"""Low-rank adapters beside the layers of a tower: each token takes those of its own number.

Hu et al. 2021, arXiv:2106.09685. The adapters of a layer stand side by side in one product: a token
keeps the columns of its own adapter, the others become zeros. Tokens without an adapter have the
number 0. Knows nothing of names of adapters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxembed.data.spec import Adapter
from jaxembed.errors import CheckpointError
from jaxembed.models import native
from jaxembed.models.layers import Embedding, Linear

Numbers = Int[Array, "rows length"]  # of the adapter of each token, from 1; 0: none

_numbers: ContextVar[Numbers | None] = ContextVar("numbers", default=None)


@contextmanager
def chosen(numbers: Numbers | None) -> Iterator[None]:
    """Let the layers that this thread traces in the context take these adapters."""
    before = _numbers.set(numbers)
    try:
        yield
    finally:
        _numbers.reset(before)


class LowRank(nnx.Module):
    """What the adapters add to the result of a layer: (the token's columns of x . down) . up.

    `owners` are the numbers of the adapters that the columns between down and up belong to.
    """

    def __init__(self, layer: Linear | Embedding, owners: Sequence[int] | Array):
        (inputs, outputs), width = layer.shape, len(owners)
        if isinstance(layer, Linear):
            self.down: Linear | Embedding = Linear(inputs, width, bias=False)
        else:
            self.down = Embedding(inputs, width)
        self.up = Linear(width, outputs, bias=False)
        self.owners = owners

    def __call__(self, x: Array) -> Float[Array, "rows length out"]:
        own = _chosen()[:, :, None] == jnp.asarray(self.owners, jnp.int32)[None, None]
        return self.up(jnp.where(own, self.down(x), 0.0))

    def for_native(self) -> native.AdapterOperands:
        """The same for a native call, which computes it within the product of a linear layer."""
        assert isinstance(self.down, Linear)
        owners = jnp.asarray(self.owners, jnp.int32)
        return native.AdapterOperands(_chosen(), self.down.kernel[...], self.up.kernel[...], owners)


def _chosen() -> Numbers:
    numbers = _numbers.get()
    assert numbers is not None
    return numbers


def owners_of(ranks: Sequence[int]) -> tuple[int, ...]:
    """The owners of the columns of adapters of these ranks, in the order of their numbers.

    There are so many columns that native kernels take them; the last are of no adapter (-1).
    """
    columns = [number for number, rank in enumerate(ranks, start=1) for _ in range(rank)]
    return (*columns, *[-1] * (-len(columns) % native.PANEL))


def attach(tower: nnx.Module, adapters: Sequence[Adapter]) -> None:
    """Put a LowRank beside each layer that some of the adapters change.

    Raises CheckpointError if the tower has no such layer.
    """
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.ranks):
        layer: Any = tower
        for part in name.split(".")[1:]:  # as in `tower.layers.0.mlp.up`
            layer = layer[int(part)] if part.isdigit() else getattr(layer, part, None)
        if not isinstance(layer, Linear | Embedding):
            raise CheckpointError(f"the model has no layer {name}, for which it has an adapter")
        layer.adapter = LowRank(
            layer, owners_of([adapter.ranks.get(name, 0) for adapter in adapters])
        )
