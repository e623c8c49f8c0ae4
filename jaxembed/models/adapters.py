"""Low-rank adapters (LoRA) beside the layers of a model. Each token may use another adapter.

Hu et al. 2021, arXiv:2106.09685. All adapters of a layer are computed together: their matrices are
concatenated, and for each token the columns of other adapters are set to zero. Adapters are
numbered from 1, in the order of the model's spec; 0 stands for no adapter.
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
from jaxembed.models.parallel import refuse

Numbers = Int[Array, "rows length"]  # the number of each token's adapter, from 1; 0: none

_numbers: ContextVar[Numbers | None] = ContextVar("numbers", default=None)


@contextmanager
def chosen(numbers: Numbers | None) -> Iterator[None]:
    """Tell the layers that this thread traces in the block the number of each token's adapter."""
    reset_token = _numbers.set(numbers)
    try:
        yield
    finally:
        _numbers.reset(reset_token)


class LowRank(nnx.Module):
    """The term that adapters add to the output of a layer: own(x . down) . up.

    `owners` holds the number of the adapter that each column of x . down belongs to. own() sets the
    columns to zero that do not belong to the adapter of the token.
    """

    def __init__(self, layer: Linear | Embedding, owners: Sequence[int] | Array):
        (inputs, outputs), width = layer.shape, len(owners)
        self.down = (
            Linear(inputs, width, bias=False)
            if isinstance(layer, Linear)
            else Embedding(inputs, width)
        )
        self.up = Linear(width, outputs, bias=False)
        self.owners = owners

    def __call__(self, x: Array) -> Float[Array, "rows length out"]:
        """Return the term to add. `x` is the input of the layer: hidden states, or the ids for an
        Embedding."""
        is_own = _current_numbers()[:, :, None] == jnp.asarray(self.owners, jnp.int32)[None, None]
        return self.up(jnp.where(is_own, self.down(x), 0.0))

    def for_native(self) -> native.AdapterOperands:
        """Return the operands for a native call, which computes the adapters with its product."""
        assert isinstance(self.down, Linear)
        return native.AdapterOperands(
            numbers=_current_numbers(),
            down=self.down.kernel[...],
            up=self.up.kernel[...],
            owners=jnp.asarray(self.owners, jnp.int32),
        )


def _current_numbers() -> Numbers:
    """Return the numbers that the enclosing `chosen` block set."""
    numbers = _numbers.get()
    assert numbers is not None
    return numbers


def column_owners(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the number of the adapter that each column of a layer's `down` matrix belongs to.

    `ranks` are the numbers of columns of adapters 1, 2, and so on. Columns that belong to no
    adapter (-1) are added at the end, because native kernels need a multiple of PANEL columns.
    """
    columns = [number for number, rank in enumerate(ranks, start=1) for _ in range(rank)]
    return (*columns, *[-1] * (-len(columns) % native.PANEL))


def attach(model: nnx.Module, adapters: Sequence[Adapter]) -> None:
    """Set the attribute `adapter` of each layer that at least one of the adapters changes.

    `Adapter.ranks` names the layers that an adapter changes. Raises CheckpointError if the model
    has no layer of such a name, and ConfigError if several devices hold the model together.
    """
    if adapters:
        refuse("a model with adapters")
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.ranks):
        layer: Any = model
        for part in name.split("."):  # for example `tower.layers.0.mlp.up`
            layer = layer[int(part)] if part.isdigit() else getattr(layer, part, None)
        if not isinstance(layer, Linear | Embedding):
            raise CheckpointError(f"an adapter changes the layer {name}, which the model lacks")
        layer.adapter = LowRank(
            layer, column_owners([adapter.ranks.get(name, 0) for adapter in adapters])
        )
