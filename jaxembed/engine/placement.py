"""Puts the parameters of a model on devices, in the dtype that they are served in."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxembed.data.spec import DType
from jaxembed.memory import available_bytes
from jaxembed.models import native
from jaxembed.models.heads import TABLE_OF_TERMS

Device = Any  # jax.Device, which type checkers refuse because JAX exports it as a variable

FLOAT32: DType = "float32"


def place_parameters(
    parameters: Iterable[tuple[str, Any]],
    groups: Iterable[Sequence[Device]],
    dtype: DType,
    native_layout: bool = False,
) -> list[dict[str, jax.Array]]:
    """Cast the parameters and copy them to each group of devices. Returns them for each group.

    They may come from a generator, so that the host holds one at a time. With `native_layout`
    weights are packed into panels, as native.linear takes them.
    """
    shardings = [NamedSharding(mesh_of(devices), PartitionSpec()) for devices in groups]
    placed: list[dict[str, jax.Array]] = [{} for _ in shardings]
    for name, leaf in parameters:
        cast = leaf.astype(jnp.dtype(placed_dtype(name, leaf.ndim, dtype)), copy=False)
        if native_layout and native.packable(name, cast.shape, str(cast.dtype)):
            cast = native.packed(np.asarray(cast))
        for copies, sharding in zip(placed, shardings, strict=True):
            copies[name] = jax.device_put(cast, sharding)
        jax.block_until_ready([copies[name] for copies in placed])  # before the next needs memory
    return placed


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """One axis of devices, `data`, over which the rows of a batch are divided."""
    return Mesh(np.array(devices), ("data",))


def placed_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: DType) -> int:
    """The memory of one copy of the parameters, by name, on a device."""
    return sum(
        math.prod(shape) * jnp.dtype(placed_dtype(name, len(shape), dtype)).itemsize
        for name, shape in shapes.items()
    )


def room_for_models(device: Device) -> int | None:
    """The bytes that models may take: of a device, or of the host where a CPU is the device. None
    if it is not known. A tenth is left to what is not counted."""
    if device.platform == "cpu":
        room = available_bytes()
    else:
        room = (device.memory_stats() or {}).get("bytes_limit")
    return None if room is None else room * 9 // 10


def placed_dtype(name: str, axes: int, dtype: DType) -> DType:
    """The dtype of a parameter on the device: `dtype` for weights of the tower, else float32.

    `axes` is its number of axes. Vectors, such as norms, stay in float32, and so do biases of any
    shape and the heads: they are small, and scores come directly from them. The table of terms of
    a head is none of them: it is as large as the tower's embeddings.
    """
    is_head = name.startswith("heads.") and not name.endswith(TABLE_OF_TERMS)
    return FLOAT32 if axes < 2 or name.endswith(".bias") or is_head else dtype
