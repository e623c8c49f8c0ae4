"""Casts the parameters of a model to the dtype they are served in, and copies them to devices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxembed.data.spec import DType, Quantize
from jaxembed.errors import CheckpointError
from jaxembed.memory import available_bytes
from jaxembed.models import Program, native
from jaxembed.models.heads import TABLE_OF_TERMS
from jaxembed.models.parallel import AXIS
from jaxembed.models.quantized import QuantizedWeight, groups_of, quantized, quantized_table

Device = Any  # jax.Device, which type checkers refuse because JAX exports it as a variable

FLOAT32: DType = "float32"
# The features of a group of a quantized weight. Those of attention's values turn vectors most.
GROUP, VALUE_GROUP = 128, 64
WORD_TABLE = ".word.embedding"  # ends the name of the table of a backbone's tokens
IMAGES = "tower.image."  # begins the names of the parameters of an encoder of images
ROUTER = ".router."  # is in the names of the weights that choose experts
ADAPTER = ".adapter."  # is in the names of the parameters of adapters, which are never quantized
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
        cast = leaf
        if not isinstance(leaf, QuantizedWeight):
            cast = _cast(program, name, leaf, dtype, native_layout)
        for copies, mesh in zip(placed, meshes, strict=True):
            copies[name] = jax.device_put(cast, shardings(program, name, mesh, cast))
        # wait until this array is copied, before the next array needs memory
        jax.block_until_ready([copies[name] for copies in placed])
    return placed


def _cast(program: Program, name: str, leaf: Any, dtype: DType, native_layout: bool) -> Any:
    """Return a parameter as devices take it: cast, divided, packed or quantized."""
    is_placed = isinstance(leaf, jax.Array)
    form = form_of(name, leaf.shape, dtype, program.quantize, native_layout)
    if form in (Form.PLAIN, Form.PANELS):
        leaf = leaf.astype(jnp.dtype(placed_dtype(name, leaf.ndim, dtype)), copy=False)
    if name in program.cuts and not is_placed:
        leaf = program.cuts[name].apply(np.asarray(leaf), program.degree)
    try:
        match form:
            case Form.PANELS:
                return native.packed(np.asarray(leaf))
            case Form.QUANTIZED_PANELS:
                groups = quantized_groups(name, leaf.shape[0])
                return native.packed_quantized(np.asarray(leaf), groups, dtype)
            case Form.QUANTIZED:
                groups = quantized_groups(name, leaf.shape[0], _parts_of_inputs(program, name))
                return QuantizedWeight(*quantized(np.asarray(leaf), groups), dtype)
            case Form.QUANTIZED_TABLE:
                return QuantizedWeight(*quantized_table(np.asarray(leaf)), dtype)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return leaf


def quantized_groups(name: str, inputs: int, parts: int = 1) -> int:
    """Return the number of groups of a quantized weight with so many inputs, which devices divide
    into `parts`."""
    size = VALUE_GROUP if ".qkv." in name else GROUP
    return parts * groups_of(inputs // parts, size, native.QUANTIZED_STEP)


def _parts_of_inputs(program: Program, name: str) -> int:
    """Return into how many parts devices divide the inputs of a weight."""
    is_divided = name in program.cuts and program.cuts[name].axis == 0
    return program.degree if is_divided else 1


class Form(Enum):
    """How a device holds a parameter."""

    PLAIN = auto()
    PANELS = auto()  # packed for native kernels
    QUANTIZED = auto()
    QUANTIZED_PANELS = auto()
    QUANTIZED_TABLE = auto()


def form_of(
    name: str,
    shape: tuple[int, ...],
    dtype: DType,
    quantize: Quantize | None,
    native_layout: bool = False,
) -> Form:
    """Return how devices hold a parameter of a shape, in a model of a dtype and with a Program's
    `quantize`; see `place_parameters` for `native_layout`."""
    # not heads, from which results come directly, and no encoder of images, which is never measured
    is_quantized = name.startswith("tower.") and not name.startswith(IMAGES) and ADAPTER not in name
    if quantize is not None and is_quantized:
        if name.endswith(WORD_TABLE):
            return Form.QUANTIZED_TABLE
        if quantize == "int8" and is_packable(name, shape, "int8"):
            return Form.QUANTIZED_PANELS
        is_weight = is_large(name, shape) and name.endswith(".kernel") and len(shape) == 2
        if quantize == "int8-weights" and is_weight:
            return Form.QUANTIZED
    return Form.PANELS if native_layout and is_packable(name, shape, dtype) else Form.PLAIN


def is_packable(name: str, shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether a parameter is a large weight that native kernels take packed, in a dtype or
    in int8."""
    return is_large(name, shape) and native.is_packable(name, shape, dtype)


def is_large(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is a large weight, which need not be float32."""
    return placed_dtype(name, len(shape), "bfloat16") == "bfloat16"


def described_parameters(
    program: Program, dtype: DType, native_layout: bool = False, mesh: Mesh | None = None
) -> list[Any]:
    """Describe the parameters as `place_parameters` places them on the devices of a mesh, without
    making any. Without a mesh, devices are not named."""
    parameters = []
    for name in program.shapes:
        form = form_of(name, program.shapes[name].shape, dtype, program.quantize, native_layout)
        parameter = _described(
            name, program.placed_shape(name), dtype, form, _parts_of_inputs(program, name)
        )
        if mesh is not None:
            parameter = on_mesh(program, name, mesh, parameter)
        parameters.append(parameter)
    return parameters


def on_mesh(program: Program, name: str, mesh: Mesh | AbstractMesh, parameter: Any) -> Any:
    """Describe a parameter, which is placed or described, as it is on a mesh."""
    return jax.tree.map(
        lambda part, sharding: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding),
        parameter,
        shardings(program, name, mesh, parameter),
    )


def _described(name: str, shape: tuple[int, ...], dtype: DType, form: Form, parts: int = 1) -> Any:
    """Describe a parameter of a shape on devices, which divide its inputs into `parts`."""

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    match form:
        case Form.PANELS:
            return array(native.packed_shape(shape, dtype), dtype)
        case Form.QUANTIZED_PANELS:
            groups = quantized_groups(name, shape[0])
            return native.packed_quantized_shape(shape, groups, dtype)
        case Form.QUANTIZED:
            of_scales = quantized_groups(name, shape[0], parts), shape[1]
            return QuantizedWeight(array(shape, "int8"), array(of_scales, FLOAT32), dtype)
        case Form.QUANTIZED_TABLE:
            return QuantizedWeight(array(shape, "int8"), array((shape[0], 1), FLOAT32), dtype)
    return array(shape, placed_dtype(name, len(shape), dtype))


def shardings(program: Program, name: str, mesh: Any, placed: Any) -> Any:
    """Return the sharding of a parameter on a mesh: of its array, or of both of its arrays."""
    sharding = NamedSharding(mesh, partition(program, name))
    return jax.tree.map(lambda part: sharding, placed)


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


def placed_bytes(
    shapes: Mapping[str, tuple[int, ...]], dtype: DType, quantize: Quantize | None = None
) -> int:
    """Return the bytes of the parameters on a device, from the shapes that they have there by
    name."""
    return sum(
        math.prod(part.shape) * part.dtype.itemsize
        for name, shape in shapes.items()
        for part in jax.tree.leaves(
            _described(name, shape, dtype, form_of(name, shape, dtype, quantize))
        )
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
    directly from heads. So do routers, which would choose other experts. The table of terms of a
    sparse head gets `dtype`, because this table is as large as the embedding table of the backbone.
    """
    is_head = name.startswith("heads.") and not name.endswith(TABLE_OF_TERMS)
    return FLOAT32 if axes < 2 or name.endswith(".bias") or is_head or ROUTER in name else dtype
