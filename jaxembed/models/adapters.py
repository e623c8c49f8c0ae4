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
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxembed.errors import CheckpointError
from jaxembed.models.layers import Embedding, Linear
from jaxembed.models.native import PANEL, is_packed, plain_shape
from jaxembed.spec import Adapter

Numbers = Int[Array, "rows length"]  # of the adapter of each token, from 1; 0: none

_UP = ".adapter.up.kernel"  # the end of the name of a parameter

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

    `ranks` are the numbers of columns of each adapter, in the order of their numbers.
    """

    def __init__(self, layer: Linear | Embedding, ranks: Sequence[int]):
        inputs, outputs = layer.shape
        width = padded_width(ranks)
        kind = Embedding(inputs, width)
        if isinstance(layer, Linear):
            kind = Linear(inputs, width, bias=False)
        self.down = kind
        self.up = Linear(width, outputs, bias=False)
        columns = [number for number, rank in enumerate(ranks, start=1) for _ in range(rank)]
        self.owners = (*columns, *[-1] * (width - len(columns)))  # -1: of no adapter

    def narrow(self, x: Array) -> Float[Array, "rows length width"]:
        """x . down, where only the columns of each token's own adapter are not zero."""
        numbers = _numbers.get()
        assert numbers is not None
        own = numbers[:, :, None] == np.array(self.owners, np.int32)[None, None]
        return jnp.where(own, self.down(x), 0.0)

    def __call__(self, x: Array) -> Float[Array, "rows length out"]:
        return self.up(self.narrow(x))


def padded_width(ranks: Sequence[int]) -> int:
    """The columns of all adapters together, and so many of zeros that native kernels take them."""
    return -(-sum(ranks) // PANEL) * PANEL


def stacked(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters with the up factor of each adapter below the weight of its layer, for weights
    in panels: native kernels then compute both in one product, of x and the narrow columns.

    Not where more goes in than comes out: there to copy x takes longer than to add two results.
    """
    joined = dict(parameters)
    for name, up in parameters.items():
        weight = f"{name.removesuffix(_UP)}.kernel" if name.endswith(_UP) else ""
        if weight not in joined or not is_packed(joined[weight]):
            continue
        inputs, outputs = plain_shape(joined[weight].shape)
        if inputs <= outputs:
            joined[weight] = jnp.concatenate([joined[weight], up], axis=1)  # of features
    return joined


def attach(tower: nnx.Module, adapters: Sequence[Adapter]) -> None:
    """Put a LowRank beside each layer that some of the adapters change.

    Raises CheckpointError if the tower has no such layer.
    """
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.ranks):
        layer = _layer_of(tower, name)
        layer.adapter = LowRank(layer, [adapter.ranks.get(name, 0) for adapter in adapters])


def _layer_of(tower: nnx.Module, name: str) -> Linear | Embedding:
    """The layer of the tower with this name, such as `tower.layers.0.mlp.up`."""
    found: Any = tower
    for part in name.split(".")[1:]:
        found = found[int(part)] if part.isdigit() else getattr(found, part, None)
    if not isinstance(found, Linear | Embedding):
        raise CheckpointError(f"the model has no layer {name}, for which it has an adapter")
    return found
