"""One copy of the parameters on its devices, and one compiled program for each bucket.

Knows nothing of requests: packed tokens in, outputs out.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxembed import memory
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.compiles import compile_lowered
from jaxembed.errors import ConfigError
from jaxembed.models import Program, native
from jaxembed.models.attention import Attend, by_xla, using
from jaxembed.models.tokens import PackedTokens
from jaxembed.outputs import OUTPUTS, OutputName
from jaxembed.spec import DType

logger = logging.getLogger(__name__)

Device = Any  # a jax.Device, which JAX exports as a variable and no checker takes for a type

Outputs = dict[OutputName, np.ndarray]

FLOAT32: DType = "float32"

# XLA:CPU of jaxlib 0.10.2 gives wrong sums where it fuses a product and a reduction
# (github.com/jax-ml/jax/issues/39103). With single products as the only fusions it does not.
SAFE_FUSION: dict[str, str | bool] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}


@runtime_checkable
class Runner(Protocol):
    """What the engine asks of a replica; NullReplica answers the same."""

    @property
    def primary(self) -> OutputName:
        """The output that the model is served for."""
        ...

    def compile(self, bucket: Bucket) -> None: ...

    def run(self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]) -> Outputs: ...

    @property
    def float32_bucket(self) -> Bucket | None: ...

    def run_in_float32(
        self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]
    ) -> Outputs: ...


class Replica:
    """A model on one device, or on several in lockstep, each with a share of the rows."""

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
        """Raises CheckpointError if the parameters are not those of the program.

        What `place_parameters` has put on these devices already stays where it is. `attention`
        gives what the program of a bucket attends with; the twin takes XLA's. With
        `native_layout` the weights lie as native.linear takes them.
        """
        self.devices = tuple(devices)
        self.dtype: DType = dtype
        self.primary: OutputName = program.primary
        self.outputs = program.outputs
        self._forward = program.forward
        self._mesh = _mesh(devices)
        self._programs: dict[Bucket, jax.stages.Compiled] = {}
        self.native_layout = native_layout
        self._twin = float32_twin
        self._attention = attention
        self._float32: jax.stages.Compiled | None = None
        named = zip(program.shapes, program.order(parameters), strict=True)
        (placed,) = place_parameters(named, [devices], dtype, native_layout)
        self._parameters = list(placed.values())

    def compile(self, bucket: Bucket) -> None:
        """Make the program of a bucket. Raises what XLA raises.

        Of the `float32_twin` a second program is kept that computes in float32, with the same
        parameters, for sequences whose activations leave float16's range.
        """
        self._programs[bucket] = self._compile(bucket, self.dtype)
        if bucket == self._twin:
            self._float32 = self._compile(bucket, FLOAT32)
        memory.trim()

    def run(self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]) -> Outputs:
        """Run a bucket and copy the outputs asked for to the host. Blocks without the GIL."""
        return self._fetch(self._programs[bucket](self._parameters, self._placed(planes)), outputs)

    @property
    def float32_bucket(self) -> Bucket | None:
        """The bucket that has a program in float32 as well; None where no bucket has."""
        return None if self._float32 is None else self._twin

    def run_in_float32(
        self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]
    ) -> Outputs:
        """Run the `float32_bucket`, the only one allowed, in float32; otherwise as `run`."""
        assert self._float32 is not None
        assert bucket == self._twin
        return self._fetch(self._float32(self._parameters, self._placed(planes)), outputs)

    def program_text(self, bucket: Bucket) -> str:
        """The optimised program of a bucket, as HLO."""
        return self._programs[bucket].as_text() or ""

    def temporary_bytes(self, bucket: Bucket) -> int:
        """Device memory a run of the bucket takes besides the parameters."""
        memory: Any = self._programs[bucket].memory_analysis()  # None on no platform of ours
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    def _placed(self, planes: np.ndarray) -> jax.Array:
        return jax.device_put(planes, NamedSharding(self._mesh, PartitionSpec(None, "data")))

    def _fetch(self, computed: dict[OutputName, Any], names: Iterable[OutputName]) -> Outputs:
        return {name: np.asarray(computed[name]) for name in names}

    def _compile(self, bucket: Bucket, dtype: DType) -> jax.stages.Compiled:
        if bucket.rows % len(self.devices):
            raise ConfigError(
                f"{bucket.rows} rows of bucket {bucket} do not divide over "
                f"{len(self.devices)} devices"
            )

        def forward(parameters, planes):
            leaves = [leaf.astype(jnp.float32) for leaf in parameters]
            leaves = leaves if dtype == FLOAT32 else parameters
            return self._forward(leaves, planes, bucket.slots, self.outputs)

        mapped = jax.shard_map(
            forward,
            mesh=self._mesh,
            in_specs=(PartitionSpec(), PartitionSpec(None, "data")),
            out_specs={name: PartitionSpec("data") for name in self.outputs},
            check_vma=False,
        )
        shape = (PackedTokens.PLANES, bucket.rows, bucket.length)
        planes = jax.ShapeDtypeStruct(
            shape, jnp.int32, sharding=NamedSharding(self._mesh, PartitionSpec(None, "data"))
        )
        # float32 must mean float32: the default is TF32 on GPU and bfloat16 passes on TPU
        exact = jax.default_matmul_precision("highest") if dtype == FLOAT32 else nullcontext()
        attend = self._attention(bucket) if dtype == self.dtype else by_xla
        with exact, using(attend):
            lowered = jax.jit(mapped).lower(self._parameters, planes)
        return compile_lowered(lowered, compiler_options(self.devices[0].platform))


def place_parameters(
    parameters: Iterable[tuple[str, Any]],
    groups: Iterable[Sequence[Device]],
    dtype: DType,
    native_layout: bool = False,
) -> list[dict[str, jax.Array]]:
    """The parameters on each group of devices. They may come from a generator: the host holds one
    at a time. With `native_layout` weights are laid as native.linear takes them."""
    shardings = [NamedSharding(_mesh(devices), PartitionSpec()) for devices in groups]
    placed: list[dict[str, jax.Array]] = [{} for _ in shardings]
    for name, leaf in parameters:
        cast = _cast(name, leaf, dtype)
        if native_layout and native.packable(name, cast.shape, str(cast.dtype)):
            cast = native.packed(np.asarray(cast))
        for copies, sharding in zip(placed, shardings, strict=True):
            copies[name] = jax.device_put(cast, sharding)
        jax.block_until_ready([copies[name] for copies in placed])  # before the next takes memory
    return placed


def _mesh(devices: Sequence[Device]) -> Mesh:
    return Mesh(np.array(devices), ("data",))


class NullReplica:
    """Answers with constants and runs no device: what is left is the cost of the host."""

    def __init__(self, primary: OutputName, widths: Mapping[OutputName, int]):
        """`widths` are the numbers of columns of the model's outputs."""
        self.primary: OutputName = primary
        self._widths = widths

    def compile(self, bucket: Bucket) -> None:
        """Nothing to compile."""

    def run(self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]) -> Outputs:
        """Ones of the right shapes."""
        columns = {"slot": bucket.slots, "token": bucket.length}
        return {
            name: np.ones((bucket.rows, columns[OUTPUTS[name].per], self._widths[name]), np.float32)
            for name in outputs
        }

    @property
    def float32_bucket(self) -> None:
        """None: constants are finite."""

    def run_in_float32(
        self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]
    ) -> Outputs:
        """As `run`: constants are float32."""
        return self.run(bucket, planes, outputs)


@cache
def compiler_options(platform: str) -> dict[str, str | bool]:
    """XLA's options for a platform: on CPU the safe fusion setting, where XLA knows it."""
    if platform != "cpu":
        return {}
    try:
        compile_lowered(jax.jit(lambda x: x + 1).lower(np.float32(0)), SAFE_FUSION)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        logger.info("this XLA has no YNNPACK fusions to restrict: %s", error)
        return {}
    return SAFE_FUSION


def _cast(name: str, leaf: Any, dtype: DType) -> Any:
    """The parameter, on the host or placed, in the dtype it is served in."""
    return leaf.astype(jnp.dtype(placed_dtype(name, leaf.ndim, dtype)), copy=False)


def placed_dtype(name: str, axes: int, dtype: DType) -> DType:
    """Matrices of the tower in the dtype that products take; vectors (norms, biases) stay float32.

    So do the heads: they are small, and scores come straight out of them.
    """
    return FLOAT32 if axes < 2 or name.startswith("heads.") else dtype
