"""Holds a copy of a model's parameters on devices, and runs a compiled program for each bucket.

NullReplica stands in for a replica without a device, to measure the work of the host.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxembed import memory
from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.spec import DType
from jaxembed.data.work import SparseRows
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.compiles import compile_lowered, compiler_options, start_compiling
from jaxembed.engine.placement import (
    FLOAT32,
    ROWS,
    Device,
    any_mesh,
    described_parameters,
    mesh_of,
    on_mesh,
    place_parameters,
)
from jaxembed.engine.transfer import (
    UsedSlots,
    fetch,
    gather,
    gather_parts,
    is_remote,
    start_copies,
)
from jaxembed.errors import ConfigError
from jaxembed.models import Program, native
from jaxembed.models.attention import Attend, ByKernel, by_xla, using
from jaxembed.models.tokens import PackedTokens, mark_ends

Outputs = dict[OutputName, Any]
"""Outputs by name: an output per slot is float32 `[rows, slots, width]`, an output per token is
float32 `[rows, length, width]`, and a sparse output is SparseRows `[rows * slots, width]`."""

ProgramKey = tuple[Bucket, DType, tuple[OutputName, ...]]
"""A program's bucket, its dtype, and the outputs that it computes."""


# Programs with sums over devices must start in the same order on all devices that they share, or
# each waits for a device that the other one holds. A lock is held while a program starts.
_starting: defaultdict[Device, threading.Lock] = defaultdict(threading.Lock)


@dataclass(frozen=True)
class LoweredBucket:
    """The programs of a bucket, which are lowered and can be compiled."""

    programs: dict[ProgramKey, jax.stages.Lowered]
    for_any: bool  # whether for all replicas of the model, or else for the one that lowered them


class Replica:
    """A model on one device, or on several devices that divide the rows of every batch, the layers
    of the model, or both."""

    def __init__(
        self,
        program: Program,
        parameters: dict[str, Any],
        devices: Sequence[Device],
        dtype: DType,
        float32_bucket: Bucket | None = None,
        attention: Callable[[Bucket], Attend] = lambda bucket: by_xla,
        native_layout: bool = False,
    ):
        """Place the parameters on the devices.

        `parameters` are arrays by name; arrays that `place_parameters` has already placed are not
        copied. `float32_bucket` is a bucket that also gets a program in float32. `attention`
        returns the attention implementation for the program of a bucket; the program in float32
        uses XLA's. With `native_layout`, weights are packed into panels, the form that
        native.linear takes. Raises CheckpointError if the parameters do not fit the program.
        """
        self.devices = tuple(devices)
        self.dtype: DType = dtype
        self.primary: OutputName = program.primary
        self.outputs = program.outputs
        self.planes = program.planes
        self._program = program
        self._mesh = mesh_of(devices, program.degree)
        self._programs: dict[ProgramKey, jax.stages.Compiled] = {}
        self.is_remote = is_remote(devices[0].platform)
        self._variants = output_variants(program, devices[0].platform)
        self.native_layout = native_layout
        # Native attention adds up the keys of a text in tiles of its row. Where a text starts at a
        # tile, its vector does not depend on its place, and the padding before it takes no time.
        # Images of one size are not aligned: fewer of them would fit into a row.
        self.alignment = native.TILE if native_layout and not program.reads_images else 1
        self._float32_bucket = float32_bucket
        self._attention = attention
        named = zip(program.shapes, program.order(parameters), strict=True)
        (placed,) = place_parameters(program, named, [devices], dtype, native_layout)
        self._parameters = [placed[name] for name in program.shapes]

    def lower(self, bucket: Bucket, for_any: bool = False) -> LoweredBucket:
        """Lower the programs of a bucket for the replica's devices, or with `for_any` also for
        other replicas of the same model on devices of the same kind.

        If the bucket is the replica's `float32_bucket`, there is also a program that computes in
        float32 with the same parameters, for sequences whose activations exceed the range of
        float16. On a device with its own memory there is one program that computes outputs per slot
        and one that computes all outputs, if the model is served for an output per slot. Raises
        ConfigError if the rows of the bucket cannot be divided equally among the devices of a
        replica.
        """
        keys: list[ProgramKey] = [(bucket, self.dtype, outputs) for outputs in self._variants]
        if bucket == self._float32_bucket:
            keys.append((bucket, FLOAT32, self.outputs))
        return LoweredBucket({key: self._lower(key, for_any) for key in keys}, for_any)

    def start(self, lowered: LoweredBucket) -> Callable[[], None]:
        """Start to compile the programs of a bucket, all at the same time.

        Returns a function that waits for the programs, after which `run` can use them; the function
        raises the errors of XLA."""
        devices = self.devices if lowered.for_any else ()
        options = compiler_options(self.devices[0].platform)
        compiled = {
            key: start_compiling(program, options, devices)
            for key, program in lowered.programs.items()
        }

        def finish() -> None:
            self._programs.update({key: program.result() for key, program in compiled.items()})

        return finish

    def compile(self, bucket: Bucket) -> None:
        """Compile the programs of a bucket for this replica. Raises the errors of `lower` and of
        XLA."""
        self.start(self.lower(bucket))()
        memory.trim()

    def run(
        self,
        bucket: Bucket,
        planes: np.ndarray,
        outputs: Iterable[OutputName],
        *,
        in_float32: bool = False,
    ) -> Outputs:
        """Run the program of a bucket on a batch, and return the named `outputs` on the host.

        `planes` is the packed batch, int32 `[planes, rows, length]`. Empty slots are zero. This
        method releases the GIL while it waits for the device. With `in_float32` it runs the program
        in float32, which only the `float32_bucket` has. Raises KeyError if the bucket has no
        program for these outputs, and the errors of XLA.
        """
        used = self._used_slots(bucket, planes)
        wanted = tuple(outputs)
        computed = self._launch(bucket, planes, used, FLOAT32 if in_float32 else self.dtype, wanted)
        needed: Outputs = {name: computed[name] for name in wanted}
        if used is not None:
            start_copies(needed, used)
        return {name: fetch(output, name, used) for name, output in needed.items()}

    def launch(self, bucket: Bucket, planes: np.ndarray) -> dict[OutputName, Any]:
        """Start the program of a bucket on a batch, and return its usual outputs without waiting.

        The outputs are arrays on the device by name, as `transfer.gather` returns them if the
        device has its own memory; they may not be computed yet. Raises KeyError if the bucket has
        no program, and the errors of XLA.
        """
        used = self._used_slots(bucket, planes)
        return self._launch(bucket, planes, used, self.dtype, self._variants[0])

    def _used_slots(self, bucket: Bucket, planes: np.ndarray) -> UsedSlots | None:
        """Return which slots of a batch the device has to gather; None if its memory is the
        host's."""
        return UsedSlots.of(bucket, planes, self._mesh.shape[ROWS]) if self.is_remote else None

    def _launch(
        self,
        bucket: Bucket,
        planes: np.ndarray,
        used: UsedSlots | None,
        dtype: DType,
        wanted: Iterable[OutputName],
    ) -> dict[OutputName, Any]:
        """Start the smallest program of a bucket that computes the `wanted` outputs."""
        variants = self._variants if dtype == self.dtype else [self.outputs]
        outputs = next(variant for variant in variants if set(wanted) <= set(variant))
        program = self._programs[bucket, dtype, outputs]
        if self._program.of_ends:
            mark_ends(planes, bucket.slots, set(wanted) <= self._program.of_ends)
        # the program itself copies its inputs to the device, in less time than jax.device_put
        inputs = (planes,) if used is None else (planes, used.order)
        with jax.transfer_guard_host_to_device("allow"), ExitStack() as locks:
            if self._program.degree > 1:
                for device in sorted(self.devices, key=lambda device: device.id):
                    locks.enter_context(_starting[device])
            return program(self._parameters, *inputs)

    @property
    def float32_bucket(self) -> Bucket | None:
        """The bucket that also has a program in float32; None if there is none."""
        bucket = self._float32_bucket
        is_compiled = bucket is not None and (bucket, FLOAT32, self.outputs) in self._programs
        return bucket if is_compiled else None

    def free(self) -> None:
        """Free the memory of the parameters and programs, even while the replica is referenced."""
        self._programs.clear()
        for leaf in jax.tree.leaves(self._parameters):
            leaf.delete()

    def compiled(self, bucket: Bucket) -> jax.stages.Compiled:
        """Return the usual program of a compiled bucket, for its HLO and its use of memory."""
        return self._programs[bucket, self.dtype, self._variants[0]]

    def temporary_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of device memory that a run of the bucket's usual program needs besides
        parameters.

        It is 0 after `free`."""
        program = self._programs.get((bucket, self.dtype, self._variants[0]))
        return 0 if program is None else run_bytes(program)

    def _lower(self, key: ProgramKey, for_any: bool) -> jax.stages.Lowered:
        """Lower a program for the replica's devices, or with `for_any` for any as many devices of
        their kind. Raises ConfigError if the rows cannot be divided equally among the devices."""
        bucket, dtype, outputs = key
        attend = self._attention(bucket) if dtype == self.dtype else by_xla
        mesh = any_mesh(self.devices, self._program.degree) if for_any else self._mesh
        parameters = [
            on_mesh(self._program, name, mesh, parameter)
            for name, parameter in zip(self._program.shapes, self._parameters, strict=True)
        ]
        platform = self.devices[0].platform
        return lower(self._program, parameters, mesh, platform, bucket, dtype, attend, outputs)


def output_variants(program: Program, platform: str) -> list[tuple[OutputName, ...]]:
    """Return the sets of outputs that programs of a model compute, the usual one first.

    The last set has all outputs. If the devices of the platform have their own memory and the model
    is served for an output per slot, the usual set has only those: outputs per token take up to a
    hundred times their memory.
    """
    by_slot: tuple[OutputName, ...] = tuple(
        name for name in program.outputs if OUTPUTS[name].per == "slot"
    )
    if is_remote(platform) and program.primary in by_slot and by_slot != program.outputs:
        return [by_slot, program.outputs]
    return [program.outputs]


def lower(
    program: Program,
    parameters: Sequence[jax.ShapeDtypeStruct],
    mesh: Mesh | AbstractMesh,
    platform: str,
    bucket: Bucket,
    dtype: DType,
    attend: Attend,
    outputs: tuple[OutputName, ...],
) -> jax.stages.Lowered:
    """Lower a program of a bucket for the devices of a mesh.

    The devices may be only described; an abstract mesh stands for any devices of the `platform`.
    `parameters` are the shapes of the parameters, in the order of `program.shapes`, with their
    shardings; a device has some rows of a batch. The program takes them, the planes of a batch and,
    on devices with their own memory, `UsedSlots.order`; it computes the named `outputs`. With the
    dtype float32, parameters of another dtype are converted. Raises ConfigError if the rows cannot
    be divided equally among the devices.
    """
    shards = mesh.shape[ROWS]
    if bucket.rows % shards:
        raise ConfigError(
            f"the rows of bucket {bucket} cannot be divided into {shards} equal parts, which "
            "different devices compute"
        )

    gather_by = (isinstance(attend, ByKernel) and attend.gather) or gather_parts

    def forward(parameters, planes, order=None):
        if dtype == FLOAT32:
            parameters = [leaf.astype(jnp.float32) for leaf in parameters]
        computed = program.forward(parameters, planes, bucket.slots, outputs)
        return computed if order is None else gather(computed, order, planes[0].size, gather_by)

    shape = (program.planes, bucket.rows, bucket.length)
    inputs = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=_by_rows(mesh))]
    if is_remote(platform):
        places = (bucket.rows * bucket.slots,)
        inputs.append(jax.ShapeDtypeStruct(places, jnp.int32, sharding=_by_places(mesh)))
    sharded = jax.shard_map(
        forward,
        mesh=mesh,
        in_specs=(
            jax.tree.map(lambda leaf: leaf.sharding.spec, parameters),
            *(leaf.sharding.spec for leaf in inputs),
        ),
        out_specs=dict.fromkeys(outputs, PartitionSpec(ROWS)),
        check_vma=False,
    )
    # float32 must mean float32: the default is TF32 on GPU and bfloat16 passes on TPU
    precision = jax.default_matmul_precision("highest") if dtype == FLOAT32 else nullcontext()
    with precision, using(attend):
        traced = jax.jit(sharded).trace(parameters, *inputs)
        if isinstance(mesh, Mesh):
            return traced.lower()
        return traced.lower(lowering_platforms=(platform,))


def run_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes of memory that a run of a program needs on each device besides parameters.

    They are its temporary arrays and its outputs."""
    usage: Any = program.memory_analysis()  # never None on a supported platform
    return usage.temp_size_in_bytes + usage.output_size_in_bytes


def compile_described(
    program: Program,
    devices: Sequence[Device],
    bucket: Bucket,
    dtype: DType,
    attend: Attend,
    outputs: tuple[OutputName, ...],
) -> jax.stages.Compiled:
    """Compile a program of a bucket without parameters, for devices that share a batch and may be
    devices that are only described. Raises the errors of `lower` and XLA."""
    mesh, platform = mesh_of(devices, program.degree), devices[0].platform
    parameters = described_parameters(program, dtype, mesh=mesh)
    lowered = lower(program, parameters, mesh, platform, bucket, dtype, attend, outputs)
    return compile_lowered(lowered, compiler_options(platform))


def _by_rows(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of the planes of a batch, whose rows are divided among the devices."""
    return NamedSharding(mesh, PartitionSpec(None, ROWS))


def _by_places(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of `UsedSlots.order`, of which each device has the part of its rows."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


class NullReplica:
    """A replica that returns constants and uses no device, to measure the work of the host."""

    alignment = 1
    is_remote = False
    float32_bucket = None  # constants are always finite

    def __init__(self, primary: OutputName, widths: Mapping[OutputName, int]):
        """Make a replica whose outputs have these `widths`, in columns, by name."""
        self.primary: OutputName = primary
        self.planes = PackedTokens.PLANES
        self._widths = widths

    def lower(self, bucket: Bucket, for_any: bool = False) -> Any:
        """Return None, because it has no program."""

    def start(self, lowered: Any) -> Callable[[], None]:
        """Return a function that does nothing."""
        return lambda: None

    def temporary_bytes(self, bucket: Bucket) -> int:
        """Return 0, because it uses no device."""
        return 0

    def free(self) -> None:
        """Do nothing."""

    def run(
        self,
        bucket: Bucket,
        planes: np.ndarray,
        outputs: Iterable[OutputName],
        *,
        in_float32: bool = False,
    ) -> Outputs:
        """Return float32 ones in the shapes of the named outputs, whatever `planes` holds."""
        computed: Outputs = {}
        for name in outputs:
            kind, width = OUTPUTS[name], self._widths[name]
            if kind.sparse:  # one nonzero value in each row
                count = bucket.rows * bucket.slots
                computed[name] = SparseRows(
                    width, [np.zeros(1, np.int32)] * count, [np.ones(1, np.float32)] * count
                )
            else:
                places = bucket.slots if kind.per == "slot" else bucket.length
                computed[name] = np.ones((bucket.rows, places, width), np.float32)
        return computed


Runner = Replica | NullReplica
"""An object on which an engine runs batches."""
