"""Holds a copy of a model's parameters on devices, and runs a compiled program for each bucket.

NullReplica stands in for a replica without a device, to measure the work of the host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxembed import memory
from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.spec import DType
from jaxembed.data.work import SparseRows
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.compiles import compile_lowered, compiler_options
from jaxembed.engine.placement import FLOAT32, Device, mesh_of, place_parameters
from jaxembed.engine.sparse import fetch_rows, gather_nonzero
from jaxembed.errors import ConfigError, counted
from jaxembed.models import Program
from jaxembed.models.attention import Attend, by_xla, using
from jaxembed.models.tokens import PackedTokens

Outputs = dict[OutputName, Any]
"""Outputs by name: an output per slot is float32 `[rows, slots, width]`, an output per token is
float32 `[rows, length, width]`, and a sparse output is SparseRows `[rows * slots, width]`."""


class Replica:
    """A model on one device, or on several devices that divide the rows of every batch."""

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
        self._mesh = mesh_of(devices)
        self._programs: dict[tuple[Bucket, DType], jax.stages.Compiled] = {}
        self.native_layout = native_layout
        self._float32_bucket = float32_bucket
        self._attention = attention
        named = zip(program.shapes, program.order(parameters), strict=True)
        (placed,) = place_parameters(named, [devices], dtype, native_layout)
        self._parameters = [placed[name] for name in program.shapes]
        self._by_rows = _by_rows(self._mesh)

    def compile(self, bucket: Bucket) -> None:
        """Compile the program of a bucket, so that `run` can use it.

        If the bucket is the replica's `float32_bucket`, also compile a program that computes in
        float32 with the same parameters, for sequences whose activations exceed the range of
        float16. Raises ConfigError if the rows of the bucket cannot be divided equally among the
        devices, and the errors of XLA.
        """
        self._programs[bucket, self.dtype] = self._compile(bucket, self.dtype)
        if bucket == self._float32_bucket:
            self._programs[bucket, FLOAT32] = self._compile(bucket, FLOAT32)
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

        `planes` is the packed batch, int32 `[planes, rows, length]`. This method releases the GIL
        while it waits for the device. With `in_float32` it runs the program in float32, which only
        the `float32_bucket` has. Raises KeyError if the bucket has no such program, and the errors
        of XLA.
        """
        computed = self.launch(bucket, planes, FLOAT32 if in_float32 else self.dtype)
        return {
            name: fetch_rows(computed[name]) if OUTPUTS[name].sparse else np.asarray(computed[name])
            for name in outputs
        }

    def launch(
        self, bucket: Bucket, planes: np.ndarray, dtype: DType | None = None
    ) -> dict[OutputName, Any]:
        """Start the program of a bucket on a batch, and return all its outputs without waiting.

        The outputs are arrays on the device by name; they may not be computed yet. `dtype` chooses
        between the bucket's programs, by default the one in the replica's dtype. Raises KeyError if
        the bucket has no such program, and the errors of XLA.
        """
        program = self._programs[bucket, dtype or self.dtype]
        return program(self._parameters, jax.device_put(planes, self._by_rows))

    @property
    def float32_bucket(self) -> Bucket | None:
        """The bucket that also has a program in float32; None if there is none."""
        bucket = self._float32_bucket
        return bucket if bucket is not None and (bucket, FLOAT32) in self._programs else None

    def free(self) -> None:
        """Free the memory of the parameters and programs, even while the replica is referenced."""
        self._programs.clear()
        for leaf in self._parameters:
            leaf.delete()

    def compiled(self, bucket: Bucket) -> jax.stages.Compiled:
        """Return the program of a compiled bucket, for its HLO and its use of memory."""
        return self._programs[bucket, self.dtype]

    def temporary_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of device memory that a run of the bucket needs besides parameters.

        It is 0 after `free`."""
        program = self._programs.get((bucket, self.dtype))
        if program is None:
            return 0
        usage: Any = program.memory_analysis()  # never None on a supported platform
        return usage.temp_size_in_bytes + usage.output_size_in_bytes

    def _compile(self, bucket: Bucket, dtype: DType) -> jax.stages.Compiled:
        """Compile and return the program of a bucket in `dtype`. Raises ConfigError if the rows
        cannot be divided equally among the devices, and the errors of XLA."""
        attend = self._attention(bucket) if dtype == self.dtype else by_xla
        lowered = lower(self._program, self._parameters, self._mesh, bucket, dtype, attend)
        return compile_lowered(lowered, compiler_options(self.devices[0].platform))


def lower(
    program: Program,
    parameters: Sequence[jax.Array | jax.ShapeDtypeStruct],
    mesh: Mesh,
    bucket: Bucket,
    dtype: DType,
    attend: Attend,
) -> jax.stages.Lowered:
    """Lower the program of a bucket for the devices of a mesh, which may be devices that are only
    described.

    `parameters` are arrays or their shapes, in the order of `program.shapes`; every device has all
    of them, and some rows of a batch. With the dtype float32, parameters of another dtype are
    converted. Raises ConfigError if the rows cannot be divided equally among the devices.
    """
    if bucket.rows % mesh.size:
        raise ConfigError(
            f"the rows of bucket {bucket} cannot be divided equally among "
            f"{counted(mesh.size, 'device')}"
        )

    def forward(parameters, planes):
        if dtype == FLOAT32:
            parameters = [leaf.astype(jnp.float32) for leaf in parameters]
        computed = program.forward(parameters, planes, bucket.slots, program.outputs)
        if mesh.devices.flat[0].platform == "cpu":  # the outputs are in the memory of the host
            return computed
        return {
            name: gather_nonzero(value, planes[0].size) if OUTPUTS[name].sparse else value
            for name, value in computed.items()
        }

    sharded = jax.shard_map(
        forward,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(None, "data")),
        out_specs={name: PartitionSpec("data") for name in program.outputs},
        check_vma=False,
    )
    shape = (program.planes, bucket.rows, bucket.length)
    planes = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=_by_rows(mesh))
    # float32 must mean float32: the default is TF32 on GPU and bfloat16 passes on TPU
    precision = jax.default_matmul_precision("highest") if dtype == FLOAT32 else nullcontext()
    with precision, using(attend):
        return jax.jit(sharded).lower(parameters, planes)


def _by_rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of the planes of a batch, whose rows are divided among the devices."""
    return NamedSharding(mesh, PartitionSpec(None, "data"))


class NullReplica:
    """A replica that returns constants and uses no device, to measure the work of the host."""

    float32_bucket = None  # constants are always finite

    def __init__(self, primary: OutputName, widths: Mapping[OutputName, int]):
        """Make a replica whose outputs have these `widths`, in columns, by name."""
        self.primary: OutputName = primary
        self.planes = PackedTokens.PLANES
        self._widths = widths

    def compile(self, bucket: Bucket) -> None:
        """Do nothing."""

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
