"""The routes of a loaded model: what it takes to run a request there, and how they are loaded."""

import os
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
from jaxembed.engine.build import Plan
from jaxembed.engine.host import ServedEngine
from jaxembed.errors import ConfigError
from jaxembed.observability.metrics import Telemetry
from jaxembed.preprocessing.images.processor import ImageProcessor, Processor
from jaxembed.preprocessing.text import TextProcessor
from jaxembed.runtime.engines import PlannedEngine, Progress, plan_engine
from jaxembed.runtime.runner import RequestRunner, runner_of
from jaxembed.runtime.tasks import KIND


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
    workers, shares = tokenizer_threads(text), _shares_of(on_progress, len(planned))
    for (route, spec), progress in zip(specs.specs.items(), shares, strict=True):
        folder, plan = checkpoint.route_path(path, route), planned[route].plan
        if spec.takes_texts:
            tokenizer = checkpoint.tokenizer_path(folder)
            processor = TextProcessor(tokenizer, spec, plan.max_input_tokens, text, workers)
        else:
            processor = ImageProcessor(spec, workers)
        shown = f"{name}, {route}" if route else name
        engine = planned[route].load(folder, telemetry, progress, shown)
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


def _shares_of(on_progress: Progress | None, count: int) -> list[Progress | None]:
    """A callback for each of so many engines: `on_progress` is called with the sums."""
    if on_progress is None:
        return [None] * count
    counts = [(0, 0)] * count

    def note(engine: int, done: int, total: int) -> None:
        counts[engine] = done, total
        on_progress(sum(done for done, _ in counts), sum(total for _, total in counts))

    return [partial(note, engine) for engine in range(count)]
