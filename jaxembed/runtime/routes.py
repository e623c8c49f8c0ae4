"""The routes of a loaded model: which engine runs each, what it takes to run a request there, and
how they are loaded."""

import logging
import os
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
from jaxembed.engine.host import HostEngine, ServedEngine
from jaxembed.engine.placement import placed_bytes
from jaxembed.errors import CheckpointError, ConfigError
from jaxembed.memory import MIB
from jaxembed.models import native, program
from jaxembed.models.static import Means, numpy_means, static_model, static_shapes
from jaxembed.observability.metrics import Telemetry
from jaxembed.preprocessing.images.processor import ImageProcessor, Processor
from jaxembed.preprocessing.text import TextProcessor
from jaxembed.runtime.runner import RequestRunner, runner_of
from jaxembed.runtime.tasks import KIND

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
        self, path: Path, telemetry: Telemetry, on_progress: Progress, name: str
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
        self, path: Path, telemetry: Telemetry, on_progress: Progress, name: str
    ) -> ServedEngine:
        """Read the table into memory."""
        parameters = checkpoint.load_params(path, self._spec)
        try:
            means: Means = native.load_means(self._cache_dir)
        except native.Unavailable as error:
            logger.info("static embeddings run in numpy, slower: %s", error)
            means = numpy_means
        return HostEngine(static_model(self._spec, parameters, means), telemetry, name=name)


PlannedEngine = OnDevices | OnHost


def plan_engine(spec: ModelSpec, config: EngineConfig, cache_dir: Path) -> PlannedEngine:
    """Choose the engine of a model, and its limits. Raises ConfigError for settings that do not
    fit."""
    return (OnHost if spec.is_static else OnDevices)(spec, config, cache_dir)


@dataclass(frozen=True)
class LoadedRoute:
    """A processor and the engine that runs what it makes, with the limits of both.

    The route of images of a model that reads them among texts has the engine of its texts.
    """

    spec: ModelSpec
    plan: Plan
    processor: Processor
    engine: ServedEngine
    runner: RequestRunner
    shares_engine: bool = False

    @property
    def takes_texts(self) -> bool:
        """Whether its inputs are texts; else they are images."""
        return isinstance(self.processor, TextProcessor)

    @property
    def text_processor(self) -> TextProcessor:
        """The processor, of a route of texts."""
        assert isinstance(self.processor, TextProcessor)
        return self.processor


def load_specs(path: Path, pooling: PoolingChoice | None) -> Routes:
    """The specs of the checkpoint at `path`, with another pooling if one is chosen. Raises
    CheckpointError, and ConfigError for a model that was made for its own pooling."""
    specs = checkpoint.load_routes(path)
    if pooling is None or pooling == "splade":  # which was converted
        return specs
    spec = specs.main
    if len(specs.specs) > 1:
        names = ", ".join(specs.specs)
        raise ConfigError(f"--pooling {pooling}: this checkpoint has the routes {names}")
    if spec.task != "embed":
        raise ConfigError(
            f"--pooling {pooling} is for embedding models; this is {KIND[spec.task]}, and its head "
            "takes only the pooling it was trained with"
        )
    if spec.primary != "dense":
        raise ConfigError(
            f"--pooling {pooling}: this checkpoint pools nothing; its head gives {spec.primary}"
        )
    head = spec.dense
    if len(head.pooling) > 1:
        raise ConfigError(f"--pooling {pooling}: this checkpoint concatenates {head.pooling}")
    head = msgspec.structs.replace(head, pooling=(pooling,))
    return Routes({"": msgspec.structs.replace(spec, heads=spec.heads | {"dense": head})})


def plan_routes(specs: Routes, config: EngineConfig, cache_dir: Path) -> dict[str, PlannedEngine]:
    """The engine of each spec. A grid and a cache are for those that run on devices, if there are
    any; these divide the cache. Raises as `plan_engine`."""
    towers = sum(not spec.is_static for spec in specs.specs.values())
    of_tower = of_static = config
    if towers:
        of_tower = replace(config, cache_bytes=config.cache_bytes // towers)
        of_static = replace(config, buckets=None, cache_bytes=0)
    of_image = replace(of_tower, buckets=None, max_input_tokens=None)

    def config_of(spec: ModelSpec) -> EngineConfig:
        if not spec.takes_texts:
            return of_image
        return of_static if spec.is_static else of_tower

    return {
        route: plan_engine(spec, config_of(spec), cache_dir) for route, spec in specs.specs.items()
    }


def tokenizer_threads(text: TextConfig) -> int:
    """The number of tokenizer threads: by TEI's rule, but four or more, so that one huge text does
    not delay all others."""
    return text.workers or min(max((os.cpu_count() or 2) - 1, 4), 64)


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

    Texts take the route that they ask for, images IMAGE_ROUTE. Engines are not started yet. Raises
    CheckpointError and ConfigError.
    """
    routes: dict[str, LoadedRoute] = {}
    workers = tokenizer_threads(text)
    counts: dict[str, tuple[int, int]] = dict.fromkeys(planned, (0, 0))

    def note(route: str, done: int, total: int) -> None:
        """Tell the sums over all engines."""
        counts[route] = done, total
        if on_progress is not None:
            every = counts.values()
            on_progress(sum(done for done, _ in every), sum(total for _, total in every))

    for route, spec in specs.specs.items():
        folder, plan = checkpoint.route_path(path, route), planned[route].plan
        if spec.takes_texts:
            tokenizer = checkpoint.tokenizer_path(folder)
            processor = TextProcessor(tokenizer, spec, plan.max_input_tokens, text, workers)
        else:
            processor = ImageProcessor(spec, workers)
        shown = f"{name}, {route}" if route else name
        engine = planned[route].load(folder, telemetry, partial(note, route), shown)
        runner = runner_of(engine, processor, telemetry, spec)
        routes[route] = LoadedRoute(spec, plan, processor, engine, runner)
    if specs.is_dual:
        return {"": routes.pop(TEXT_ROUTE)} | routes
    if specs.image is not None:  # the engine of the texts runs the images among them
        texts = routes[""]
        processor = ImageProcessor(texts.spec, workers)
        limit = texts.plan.max_input_tokens
        if limit < processor.limit:
            raise ConfigError(
                f"--max-input-length {limit} is less than the {processor.limit} tokens of an image "
                "of this model"
            )
        runner = runner_of(texts.engine, processor, telemetry, texts.spec)
        routes[IMAGE_ROUTE] = replace(texts, processor=processor, runner=runner, shares_engine=True)
    return routes
