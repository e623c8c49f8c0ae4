"""The kinds of engines, and which of them runs a model."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jaxembed.checkpoints import checkpoint
from jaxembed.config import EngineConfig
from jaxembed.data.spec import ModelSpec
from jaxembed.engine.build import build, host_plan, make_plan
from jaxembed.engine.host import HostEngine, ServedEngine
from jaxembed.engine.placement import placed_bytes
from jaxembed.errors import CheckpointError
from jaxembed.memory import MIB
from jaxembed.models import native, program
from jaxembed.models.static import Means, numpy_means, static_model, static_shapes
from jaxembed.observability.metrics import Telemetry

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

PROGRAM_BYTES = 10 * MIB  # about: of the host, for the program of a bucket on a CPU


class OnDevices:
    """An engine that runs programs on JAX's devices. Its limits are decided in `plan`; its
    parameters are not loaded yet."""

    def __init__(self, spec: ModelSpec, config: EngineConfig, cache_dir: Path):
        """Start the devices and decide. Raises ConfigError as `make_plan` does, and CheckpointError
        for a damaged spec."""
        self._spec, self._config = spec, config
        try:
            self._program = program(spec)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the sizes in the manifest of {spec.source} make no model ({error}); convert the "
                "model again"
            ) from error
        self.plan = make_plan(spec, self._program, config, cache_dir)

    @property
    def resident_bytes(self) -> int:
        """The memory that it takes once it is loaded, of each device, or on a CPU of the host:
        parameters and, on a CPU, programs; what a run takes besides is not known yet."""
        devices = self.plan.devices
        if not devices:
            return 0
        shapes = {name: leaf.shape for name, leaf in self._program.shapes.items()}
        parameters = placed_bytes(shapes, self.plan.dtype)
        if devices[0].platform != "cpu":
            return parameters
        programs = len(self.plan.grid.buckets) * PROGRAM_BYTES
        return len(devices) * (parameters + programs) + self._config.cache_bytes

    def load(
        self, path: Path, telemetry: Telemetry, on_progress: Progress | None, name: str
    ) -> ServedEngine:
        """Place the parameters of the checkpoint at `path` on the devices. The engine is not
        started yet.

        `on_progress` is as in Warmup, `name` is the model's, for the log. Raises CheckpointError.
        """
        return build(
            self.plan,
            self._program,
            partial(checkpoint.stream_params, path, self._spec, self._program.order),
            self._spec,
            self._config,
            telemetry,
            on_progress,
            name,
        )


class OnHost:
    """An engine that computes a static model on the host, to be loaded as OnDevices. It uses no
    device."""

    def __init__(self, spec: ModelSpec, config: EngineConfig, cache_dir: Path):
        """Decide. Raises ConfigError as `host_plan` does."""
        self._spec, self._cache_dir = spec, cache_dir
        self.plan = host_plan(spec, config)

    @property
    def resident_bytes(self) -> int:
        """The table and the modules after it."""
        return placed_bytes(static_shapes(self._spec), "float32")

    def load(
        self, path: Path, telemetry: Telemetry, on_progress: Progress | None, name: str
    ) -> ServedEngine:
        """Read the table into memory."""
        parameters = checkpoint.load_params(path, self._spec)
        try:
            means: Means = native.load_means(self._cache_dir)
        except native.Unavailable as error:
            logger.info("static embeddings run in numpy, slower: %s", error)
            means = numpy_means
        model = static_model(self._spec, parameters, means)
        return HostEngine(model, telemetry, name=name)


PlannedEngine = OnDevices | OnHost


def plan_engine(spec: ModelSpec, config: EngineConfig, cache_dir: Path) -> PlannedEngine:
    """Choose the engine of a model, and its limits. Raises ConfigError for settings that do not
    fit."""
    kind = OnHost if spec.is_static else OnDevices
    return kind(spec, config, cache_dir)
