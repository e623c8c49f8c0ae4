"""Casts the parameters of a model to the dtype they are served in, and copies them to devices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxembed.data.spec import DType
from jaxembed.memory import available_bytes
from jaxembed.models import Program, native
from jaxembed.models.heads import TABLE_OF_TERMS
from jaxembed.models.parallel import AXIS

Device = Any  # jax.Device, which type checkers refuse because JAX exports it as a variable

FLOAT32: DType = "float32"
ROWS = "data"  # the axis of a mesh whose devices divide the rows of a batch


def place_parameters(
    program: Program,
    parameters: Iterable[tuple[str, Any]],
    groups: Iterable[Sequence[Device]],
    dtype: DType,
    native_layout: bool = False,
) -> list[dict[str, jax.Array]]:
    """Cast the parameters, and copy them to every group of devices.

    Each device gets all parameters, or its share of those that the program divides. `parameters`
    are pairs of name and array; with a generator the host holds one array at a time. Arrays of JAX
    must be the result of an earlier call. `dtype` is the dtype of large weights. With
    `native_layout`, weights are packed into panels for the native kernels (native.linear). Returns
    a dict of the placed arrays by name for each group.
    """
    meshes = [mesh_of(devices, program.degree) for devices in groups]
    placed: list[dict[str, jax.Array]] = [{} for _ in meshes]
    for name, leaf in parameters:
        cast = leaf.astype(jnp.dtype(placed_dtype(name, leaf.ndim, dtype)), copy=False)
        if native_layout and is_packable(name, cast.shape, dtype):
            cast = native.packed(np.asarray(cast))
        if name in program.cuts and not isinstance(leaf, jax.Array):
            cast = program.cuts[name].apply(np.asarray(cast), program.degree)
        for copies, mesh in zip(placed, meshes, strict=True):
            copies[name] = jax.device_put(cast, NamedSharding(mesh, partition(program, name)))
        # wait until this array is copied, before the next array needs memory
        jax.block_until_ready([copies[name] for copies in placed])
    return placed


def is_packable(name: str, shape: tuple[int, ...], dtype: DType) -> bool:
    """Return whether a parameter is a large weight that native kernels of a dtype take packed."""
    is_large = placed_dtype(name, len(shape), "bfloat16") == "bfloat16"
    return is_large and native.is_packable(name, shape, dtype)


def described_parameters(program: Program, mesh: Mesh, dtype: DType) -> list[jax.ShapeDtypeStruct]:
    """Describe the parameters as `place_parameters` places them on the devices of a mesh, without
    making any."""
    return [
        jax.ShapeDtypeStruct(
            program.placed_shape(name),
            jnp.dtype(placed_dtype(name, len(leaf.shape), dtype)),
            sharding=NamedSharding(mesh, partition(program, name)),
        )
        for name, leaf in program.shapes.items()
    ]


def partition(program: Program, name: str) -> PartitionSpec:
    """Return how a parameter is divided among the devices of a mesh."""
    return program.cuts[name].spec if name in program.cuts else PartitionSpec()


def mesh_of(devices: Sequence[Device], degree: int = 1) -> Mesh:
    """Return a mesh of two axes. `data` divides the rows of a batch among the devices; the `degree`
    neighbouring devices along parallel.AXIS hold the model together."""
    return Mesh(np.array(devices).reshape(-1, degree), (ROWS, AXIS))


def any_mesh(devices: Sequence[Device], degree: int = 1) -> AbstractMesh:
    """Return a mesh as `mesh_of` does, for any as many devices."""
    return AbstractMesh((len(devices) // degree, degree), (ROWS, AXIS))


def placed_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: DType) -> int:
    """Return the bytes of the parameters on a device, from the shapes that they have there by
    name."""
    return sum(
        math.prod(shape) * jnp.dtype(placed_dtype(name, len(shape), dtype)).itemsize
        for name, shape in shapes.items()
    )


def room_for_models(device: Device) -> int | None:
    """Return the bytes of memory that models may take on a device; None if they are not known.

    They are nine tenths of the device's memory (on a CPU, of the available memory of the host): a
    tenth is left for what models take beyond the bytes that are counted."""
    if device.platform == "cpu":
        room = available_bytes()
    else:
        room = (device.memory_stats() or {}).get("bytes_limit")
    return None if room is None else room * 9 // 10


def placed_dtype(name: str, axes: int, dtype: DType) -> DType:
    """Return the dtype of a parameter on a device: `dtype` for large weights, else float32.

    `name` is the path of the parameter and `axes` its number of axes. Vectors (such as scales of
    norms), biases and the parameters of heads stay in float32: they are small, and scores come
    directly from heads. The table of terms of a sparse head gets `dtype`, because this table is as
    large as the embedding table of the backbone.
    """
    is_head = name.startswith("heads.") and not name.endswith(TABLE_OF_TERMS)
    return FLOAT32 if axes < 2 or name.endswith(".bias") or is_head else dtype
