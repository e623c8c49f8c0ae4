"""Plans and loads the routes of a model. A route has a processor for its inputs, and an engine that
computes them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from jaxembed.checkpoints import checkpoint
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.spec import (
    IMAGE_ROUTE,
    TEXT_ROUTE,
    ModelSpec,
    PoolingChoice,
    Routes,
)
from jaxembed.engine.build import Plan, build, host_plan, make_plan
from jaxembed.engine.engine import Engine
from jaxembed.engine.host import HostEngine, ServedEngine
from jaxembed.engine.placement import placed_bytes
from jaxembed.errors import CheckpointError, ConfigError
from jaxembed.memory import MIB
from jaxembed.models import native, program
from jaxembed.models.static import Means, numpy_means, static_model, static_shapes
from jaxembed.observability.metrics import Telemetry
from jaxembed.preprocessing.images.processor import Processor
from jaxembed.preprocessing.text import TextProcessor
from jaxembed.runtime.quantization import Similarity, check, measured_similarity
from jaxembed.runtime.runner import HostRunner, QueueRunner, RequestRunner
from jaxembed.runtime.served import ServedRoute, processor_of
from jaxembed.runtime.tasks import KIND

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # called with the numbers of buckets done, and in total

PROGRAM_BYTES = 10 * MIB  # approximate memory of the program of one bucket on a CPU


class DevicePlan:
    """The plan of an engine that runs on JAX's devices. `plan` has the limits of the engine, and
    `load` makes the engine."""

    similarity: Similarity | None = None  # of quantized vectors; set by `load`

    def __init__(self, spec: ModelSpec, config: EngineConfig, cache_dir: Path):
        """Start the devices, and choose dtype, limits, kernels and buckets. Raises ConfigError for
        settings that do not fit, and CheckpointError for a damaged spec."""
        self._spec, self._config, self._cache_dir = spec, config, cache_dir
        if config.quantize and not spec.takes_texts:
            raise ConfigError(
                f"--quantize {config.quantize}: {spec.source} has an image encoder, and only "
                "models of texts are quantized; leave it out"
            )
        try:
            self._program = program(spec, config.tensor_parallel, config.quantize)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the sizes in the manifest of {spec.source} do not make a model ({error}); "
                "convert the model again"
            ) from error
        self.plan = make_plan(spec, self._program, config, cache_dir)

    @property
    def resident_bytes(self) -> int:
        """The bytes that the loaded engine takes on each device or, for a CPU, on the host.

        They are the parameters and, on a CPU, programs and the answer cache. The memory that
        batches need while they run is not included.
        """
        devices = self.plan.devices
        if not devices:
            return 0  # the null model
        shapes = {name: self._program.share_of(name) for name in self._program.shapes}
        parameters = placed_bytes(shapes, self.plan.dtype, self._program.quantize)
        if devices[0].platform != "cpu":
            return parameters
        programs = len(self.plan.grid.buckets) * PROGRAM_BYTES
        return len(devices) * (parameters + programs) + self._config.cache_bytes

    def load(
        self, path: Path, telemetry: Telemetry, on_progress: Progress, name: str
    ) -> ServedEngine:
        """Place the parameters of the checkpoint at `path` on the devices.

        `name` names the model in the log. Returns an engine that is not started yet. Raises
        CheckpointError, and ConfigError if quantization changes the vectors too much.
        """
        load = partial(checkpoint.stream_params, path, self._spec, self._program.order)
        method = self._program.quantize
        if method is not None and self.plan.devices:
            tokenizer = checkpoint.tokenizer_path(path)
            self.similarity = measured_similarity(
                self.plan, self._program, self._spec, load, tokenizer, self._cache_dir
            )
            check(self.similarity, method, self._config.quantize_anyway, self._spec.source)
        return build(
            self.plan,
            self._program,
            load,
            self._spec,
            self._config,
            telemetry,
            on_progress,
            name,
        )


class HostPlan:
    """The plan of an engine for a static model on the host. `plan` has the limits of the engine,
    and `load` makes the engine."""

    similarity = None

    def __init__(self, spec: ModelSpec, config: EngineConfig, cache_dir: Path):
        """Choose the limits. Raises ConfigError for settings that need buckets or a device."""
        self._spec, self._cache_dir = spec, cache_dir
        self.plan = host_plan(spec, config)

    @property
    def resident_bytes(self) -> int:
        """The bytes of the table of token vectors and the modules after it."""
        return placed_bytes(static_shapes(self._spec), "float32")

    def load(
        self, path: Path, telemetry: Telemetry, on_progress: Progress, name: str
    ) -> ServedEngine:
        """Read the parameters of the checkpoint at `path`. `name` names the model in the log.
        Returns an engine that is not started yet. Raises CheckpointError."""
        parameters = checkpoint.load_params(path, self._spec)
        try:
            means: Means = native.load_means(self._cache_dir)
        except native.NativeUnavailable as error:
            logger.info("static embeddings run in numpy, which is slower: %s", error)
            means = numpy_means
        return HostEngine(static_model(self._spec, parameters, means), telemetry, name=name)


PlannedEngine = DevicePlan | HostPlan


def plan_engine(spec: ModelSpec, config: EngineConfig, cache_dir: Path) -> PlannedEngine:
    """Plan the engine of a model: on the host for a static model, otherwise on devices. Raises
    ConfigError for settings that do not fit, and CheckpointError for a damaged spec."""
    return (HostPlan if spec.is_static else DevicePlan)(spec, config, cache_dir)


@dataclass(frozen=True)
class LoadedRoute(ServedRoute):
    """A loaded route, with the engine that computes it and the plan of the engine.

    A route with `shares_engine` takes images, and its engine is the one of the route of texts.
    """

    plan: Plan
    engine: ServedEngine
    similarity: Similarity | None = None  # of the vectors to those without quantization
    shares_engine: bool = False


def load_specs(path: Path, pooling: PoolingChoice | None) -> Routes:
    """Read the spec of each route of the checkpoint at `path`, and replace the pooling by `pooling`
    if it is given. Raises CheckpointError, and ConfigError for a model whose pooling cannot be
    replaced."""
    specs = checkpoint.load_routes(path)
    if pooling is None or pooling == "splade":  # the conversion has applied "splade"
        return specs
    spec = specs.main
    if len(specs.specs) > 1:
        raise ConfigError(
            f"--pooling {pooling}: this checkpoint has several routes ({', '.join(specs.specs)}), "
            "and their pooling cannot be replaced"
        )
    if spec.task != "embed":
        raise ConfigError(
            f"--pooling {pooling} is for embedding models; this is {KIND[spec.task]}, and its head "
            "takes only the pooling it was trained with"
        )
    if spec.primary != "dense":
        raise ConfigError(
            f"--pooling {pooling}: this checkpoint has no pooling; its head returns {spec.primary}"
        )
    if len(spec.dense.pooling) > 1:
        raise ConfigError(
            f"--pooling {pooling}: this checkpoint concatenates {' and '.join(spec.dense.pooling)}"
        )
    head = msgspec.structs.replace(spec.dense, pooling=(pooling,))
    return Routes({"": msgspec.structs.replace(spec, heads=spec.heads | {"dense": head})})


def plan_routes(specs: Routes, config: EngineConfig, cache_dir: Path) -> dict[str, PlannedEngine]:
    """Plan the engine of each route.

    Engines on devices divide the bytes of the answer cache equally. If there are such engines,
    static routes ignore --buckets and the cache. Routes of images ignore --buckets and
    --max-input-length. Raises ConfigError and CheckpointError.
    """
    device_routes = sum(not spec.is_static for spec in specs.specs.values())
    device_config = static_config = config
    if device_routes:
        device_config = replace(config, cache_bytes=config.cache_bytes // device_routes)
        static_config = replace(config, buckets=None, cache_bytes=0)
    image_config = replace(device_config, buckets=None, max_input_tokens=None)

    def config_of(spec: ModelSpec) -> EngineConfig:
        if not spec.takes_texts:
            return image_config
        return static_config if spec.is_static else device_config

    return {
        route: plan_engine(spec, config_of(spec), cache_dir) for route, spec in specs.specs.items()
    }


def runner_of(
    engine: ServedEngine, processor: Processor, telemetry: Telemetry, spec: ModelSpec
) -> RequestRunner:
    """Return the runner for requests to an engine. `processor` tokenizes their inputs."""
    if isinstance(engine, HostEngine):
        assert isinstance(processor, TextProcessor)
        return HostRunner(processor, engine, telemetry, spec)
    assert isinstance(engine, Engine)
    return QueueRunner(processor, engine, telemetry, spec)


def load_routes(
    name: str,
    path: Path,
    text: TextConfig,
    telemetry: Telemetry,
    planned: dict[str, PlannedEngine],
    specs: Routes,
    on_progress: Progress | None,
) -> dict[str, LoadedRoute]:
    """Load the routes of the model `name` from the checkpoint at `path`.

    `planned` has the planned engine of each route. `on_progress` is called with the numbers of
    buckets done and in total, summed over all routes. The route of images is IMAGE_ROUTE. The
    engines are not started yet. Raises CheckpointError and ConfigError.
    """
    routes: dict[str, LoadedRoute] = {}
    progress: dict[str, tuple[int, int]] = dict.fromkeys(planned, (0, 0))

    def note(route: str, done: int, total: int) -> None:
        """Store the progress of one route, and report the sums over all routes."""
        progress[route] = done, total
        if on_progress is not None:
            pairs = progress.values()
            on_progress(sum(done for done, _ in pairs), sum(total for _, total in pairs))

    for route, spec in specs.specs.items():
        folder, plan = checkpoint.route_path(path, route), planned[route].plan
        processor = processor_of(
            folder, spec, plan.max_input_tokens, text, takes_texts=spec.takes_texts
        )
        log_name = f"{name}, {route}" if route else name
        engine = planned[route].load(folder, telemetry, partial(note, route), log_name)
        routes[route] = LoadedRoute(
            spec,
            processor,
            runner_of(engine, processor, telemetry, spec),
            plan.device_name,
            plan.dtype,
            plan,
            engine,
            planned[route].similarity,
        )
    if specs.is_dual:
        return {"": routes.pop(TEXT_ROUTE)} | routes  # requests for texts have the route ""
    if specs.image is not None:  # the engine of the texts also runs the images
        texts = routes[""]
        limit = texts.plan.max_input_tokens
        processor = processor_of(
            path, texts.spec, limit, text, takes_texts=False, texts=texts.processor
        )
        if limit < processor.limit:
            raise ConfigError(
                f"--max-input-length {limit} is less than the {processor.limit} tokens of an image "
                "of this model"
            )
        routes[IMAGE_ROUTE] = replace(
            texts,
            processor=processor,
            runner=runner_of(texts.engine, processor, telemetry, texts.spec),
            shares_engine=True,
        )
    return routes
