"""Holds a copy of the parameters on its devices, and runs one compiled program for each bucket.

Knows nothing of requests: it takes packed tokens and returns outputs. A replica without a device
stands in to measure the work of the host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxembed import memory
from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.spec import DType
from jaxembed.data.work import SparseRows
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.compiles import compile_lowered, compiler_options
from jaxembed.engine.placement import FLOAT32, Device, mesh_of, place_parameters
from jaxembed.engine.sparse import fetched, gathered
from jaxembed.errors import ConfigError
from jaxembed.models import Program
from jaxembed.models.attention import Attend, by_xla, using
from jaxembed.models.tokens import PackedTokens

Outputs = dict[OutputName, Any]
"""float32 `[rows, slots or length, width]`, a sparse one SparseRows `[rows * slots, width]`."""


class Replica:
    """A model on one device, or on several devices that divide the rows of every batch."""

    def __init__(
        self,
        program: Program,
        parameters: dict[str, Any],
        devices: Sequence[Device],
        dtype: DType,
        float32_twin: Bucket | None = None,
        attention: Callable[[Bucket], Attend] = lambda bucket: by_xla,
        native_layout: bool = False,
    ):
        """Place the parameters on the devices.

        Raises CheckpointError if they are not those of the program. Parameters that
        `place_parameters` has placed already are not copied. `attention` returns the attention
        implementation for the program of a bucket; the program in float32 uses XLA's.
        `float32_twin` is the bucket that also gets a program in float32. With `native_layout`
        weights are packed into panels, as native.linear takes them.
        """
        self.devices = tuple(devices)
        self.dtype: DType = dtype
        self.primary: OutputName = program.primary
        self.outputs = program.outputs
        self.planes = program.planes
        self._forward = program.forward
        self._mesh = mesh_of(devices)
        self._programs: dict[tuple[Bucket, DType], jax.stages.Compiled] = {}
        self.native_layout = native_layout
        self._twin = float32_twin
        self._attention = attention
        named = zip(program.shapes, program.order(parameters), strict=True)
        (placed,) = place_parameters(named, [devices], dtype, native_layout)
        self._parameters = [placed[name] for name in program.shapes]
        self._by_rows = NamedSharding(self._mesh, PartitionSpec(None, "data"))  # of a batch

    def compile(self, bucket: Bucket) -> None:
        """Compile the program of a bucket, so that `run` can use it.

        If the bucket is the replica's `float32_twin`, also compile a program that computes in
        float32 with the same parameters, for sequences whose activations exceed the range of
        float16. Raises ConfigError if the rows of the bucket cannot be divided equally
        among the devices, and what XLA raises.
        """
        self._programs[bucket, self.dtype] = self._compile(bucket, self.dtype)
        if bucket == self._twin:
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
        """Run a compiled bucket, and copy the `outputs` to the host.

        `planes` is a packed batch, int32 `[planes, rows, length]`. The call does not hold the GIL
        while it waits for the device. Only the `float32_bucket` can run `in_float32`. Raises what
        XLA raises.
        """
        computed = self.launch(bucket, planes, FLOAT32 if in_float32 else self.dtype)
        return {
            name: fetched(computed[name]) if OUTPUTS[name].sparse else np.asarray(computed[name])
            for name in outputs
        }

    def launch(
        self, bucket: Bucket, planes: np.ndarray, dtype: DType | None = None
    ) -> dict[OutputName, Any]:
        """Start a compiled bucket. Returns all outputs, on the device, where they may not be ready.

        It computes in `dtype`, by default that of the replica. Raises what XLA raises.
        """
        program = self._programs[bucket, dtype or self.dtype]
        return program(self._parameters, jax.device_put(planes, self._by_rows))

    @property
    def float32_bucket(self) -> Bucket | None:
        """The bucket that also has a program in float32; None if there is none."""
        twin = self._twin
        return twin if twin is not None and (twin, FLOAT32) in self._programs else None

    def free(self) -> None:
        """Delete the parameters and the programs, whoever still refers to the replica."""
        self._programs.clear()
        for leaf in self._parameters:
            leaf.delete()

    def compiled(self, bucket: Bucket) -> jax.stages.Compiled:
        """Return the program of a compiled bucket, which tells its HLO and its memory."""
        return self._programs[bucket, self.dtype]

    def temporary_bytes(self, bucket: Bucket) -> int:
        """The device memory that a run of the bucket needs besides the parameters, in bytes; none
        once they are freed."""
        program = self._programs.get((bucket, self.dtype))
        if program is None:
            return 0
        memory: Any = program.memory_analysis()  # None on no platform of ours
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    def _compile(self, bucket: Bucket, dtype: DType) -> jax.stages.Compiled:
        """Compile the program of a bucket that computes in this dtype."""
        if bucket.rows % len(self.devices):
            raise ConfigError(
                f"{bucket.rows} rows of bucket {bucket} do not divide over "
                f"{len(self.devices)} devices"
            )

        def forward(parameters, planes):
            leaves = [leaf.astype(jnp.float32) for leaf in parameters]
            leaves = leaves if dtype == FLOAT32 else parameters
            computed = self._forward(leaves, planes, bucket.slots, self.outputs)
            if self.devices[0].platform == "cpu":  # its memory is the host's
                return computed
            return {
                name: gathered(value, planes[0].size) if OUTPUTS[name].sparse else value
                for name, value in computed.items()
            }

        mapped = jax.shard_map(
            forward,
            mesh=self._mesh,
            in_specs=(PartitionSpec(), PartitionSpec(None, "data")),
            out_specs={name: PartitionSpec("data") for name in self.outputs},
            check_vma=False,
        )
        shape = (self.planes, bucket.rows, bucket.length)
        planes = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._by_rows)
        # float32 must mean float32: the default is TF32 on GPU and bfloat16 passes on TPU
        exact = jax.default_matmul_precision("highest") if dtype == FLOAT32 else nullcontext()
        attend = self._attention(bucket) if dtype == self.dtype else by_xla
        with exact, using(attend):
            lowered = jax.jit(mapped).lower(self._parameters, planes)
        return compile_lowered(lowered, compiler_options(self.devices[0].platform))


class NullReplica:
    """A replica that returns constants and uses no device, to measure the work of the host."""

    float32_bucket = None  # constants are always finite

    def __init__(self, primary: OutputName, widths: Mapping[OutputName, int]):
        """Make a replica for outputs of these `widths`, which are numbers of columns."""
        self.primary: OutputName = primary
        self.planes = PackedTokens.PLANES
        self._widths = widths

    def compile(self, bucket: Bucket) -> None:
        """Do nothing."""

    def temporary_bytes(self, bucket: Bucket) -> int:
        """None, because it uses no device."""
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
        """Return ones in the shapes of these outputs, which are float32 in any case."""
        made: Outputs = {}
        for name in outputs:
            kind, width = OUTPUTS[name], self._widths[name]
            if kind.sparse:  # one term in each row
                count = bucket.rows * bucket.slots
                row = [np.zeros(1, np.int32)] * count, [np.ones(1, np.float32)] * count
                made[name] = SparseRows(width, *row)
            else:
                columns = bucket.slots if kind.per == "slot" else bucket.length
                made[name] = np.ones((bucket.rows, columns, width), np.float32)
        return made


Runner = Replica | NullReplica
"""What the threads of an engine run batches on."""
