"""A model in memory: its tokenizers and engines by route, its metrics and what it may admit."""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.adapter_folders import adapter_folders
from jaxembed.checkpoints.ranges import load_ranges
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.inputs import Image, Pair, Text
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import (
    IMAGE_ROUTE,
    TEXT_ROUTE,
    ModelSpec,
    Pooling,
    PoolingChoice,
    Routes,
)
from jaxembed.engine.admission import Admission, Capacity, Cost, Held, capacity_of
from jaxembed.engine.build import Plan
from jaxembed.engine.client import ServedEngine
from jaxembed.engine.compiles import compile_events
from jaxembed.engine.programs import keep_programs
from jaxembed.engine.state import EngineState
from jaxembed.errors import ConfigError, NoInputs
from jaxembed.observability.metrics import Telemetry
from jaxembed.preprocessing.images.processor import ImageProcessor
from jaxembed.preprocessing.pieces import TokenPiece
from jaxembed.preprocessing.text import DECODED_BYTES, PIECE_BYTES, Rules, TextProcessor
from jaxembed.runtime.engines import PlannedEngine, Progress, plan_engine
from jaxembed.runtime.options import Embeddings, Scores
from jaxembed.runtime.requests import Answer, ComputeRequest, EncodeRequest, MixedRequest, Request
from jaxembed.runtime.runner import RequestRunner, runner_of
from jaxembed.runtime.tasks import KIND, Tasks

logger = logging.getLogger(__name__)

IMAGES_A_PART = 64  # of a call: the next ones are decoded while these are computed
PARTS_AT_ONCE = 2  # of a request in parts: one is decoded while another is computed
QUEUED_BATCHES = 64  # of waiting work a device may have before requests are refused


@dataclass(frozen=True)
class LoadedRoute:
    """One route of a loaded model: what it takes to run a request there."""

    spec: ModelSpec
    plan: Plan
    processor: Any  # a TextProcessor, or an ImageProcessor
    engine: ServedEngine
    runner: RequestRunner

    def describe(self) -> dict[str, object]:
        """The fields of /info about the engine."""
        return {
            "architecture": self.spec.architecture,
            "max_input_length": self.plan.max_input_tokens,
            "device": self.plan.device_name,
            "devices": max(len(self.plan.devices), 1),
            "dtype": self.plan.dtype,
            "kernels": self.plan.kernels.describe(),
            "buckets": [str(bucket) for bucket in self.plan.grid.buckets],
            "compiled_buckets": [str(bucket) for bucket in self.engine.snapshot().compiled],
            "content_hash": self.spec.content_hash,
        }


class LoadedModel:
    """A model that is loaded, compiled and ready to run requests, which its `tasks` make.

    `model` is a directory (Hugging Face's or a converted checkpoint), a hub id, or None for
    all-MiniLM-L6-v2. `adapters` are folders of low-rank adapters by the names under which requests
    ask for them. With `wait=False` the constructor returns while buckets still compile;
    requests wait until then. The models of one process may share a `capacity`. `reserve` is called
    with the bytes that the model will take before its parameters are read. Compiled programs are
    kept in `cache_dir` for the next process, as `keep_programs` does it, unless `compile_cache` is
    False. Raises CheckpointError or ConfigError, and what `reserve` does.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        token: str | None = None,
        dense_path: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        pooling: PoolingChoice | None = None,
        cache_dir: Path | None = None,
        config: EngineConfig | None = None,
        text: TextConfig | None = None,
        capacity: Capacity | None = None,
        wait: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
        reserve: Callable[[int], object] = lambda count: None,
        compile_cache: bool = True,
    ):
        self.config = config or EngineConfig()
        self.text = text or TextConfig()
        cache_dir = cache_dir or hub.default_cache_dir()
        if compile_cache:
            _keep_programs(cache_dir)
        path = hub.resolve(
            model,
            revision=revision,
            offline=offline,
            cache_dir=cache_dir,
            token=token,
            dense_path=dense_path,
            adapters=adapter_folders(adapters),
            pooling=pooling,
        )
        self.name = model or hub.DEFAULT_MODEL
        specs = checkpoint.load_routes(path)
        if pooling is not None and pooling != "splade":  # that is the head's, and converted
            specs = Routes({"": _pooled(specs, pooling)})
        planned = self._planned(specs, cache_dir)
        self._planned_bytes = sum(one.resident_bytes for one in planned.values())
        reserve(self._planned_bytes)
        self._load(path, specs, planned, capacity, on_progress)
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.close()  # or its threads would keep it, and the device's memory
                raise

    def _load(
        self,
        path: Path,
        specs: Routes,
        planned: Mapping[str, PlannedEngine],
        capacity: Capacity | None,
        on_progress: Progress | None,
    ) -> None:
        self.path = path  # of the checkpoint
        self.telemetry = Telemetry(max(one.plan.max_input_tokens for one in planned.values()))
        shares = _shares_of(on_progress, len(planned))
        loaded = {
            route: self._load_route(path, route, spec, planned[route], progress)
            for (route, spec), progress in zip(specs.specs.items(), shares, strict=True)
        }
        texts, self.routes = specs.of_texts, loaded
        if specs.is_dual:
            self.routes = {"": loaded.pop(TEXT_ROUTE)}
        self.engines = self.routes | loaded  # those of images too
        self.images = self._route_of_images(specs)
        of_images = {} if self.images is None else {IMAGE_ROUTE: self.images}
        self.run_by = self.engines | of_images  # what runs a request, by its route
        self.default_route, self.main_route = texts.default, texts.main_route
        main = self.routes[self.main_route]
        self.spec, self.plan, self.processor = main.spec, main.plan, main.processor
        self.engine, self.runner = main.engine, main.runner
        self.tasks = Tasks(self.name, specs, self.processor, self.text, load_ranges(path))
        self.admission = Admission(
            capacity or capacity_of(self.config),
            max(map(_queued_tokens, self.engines.values())),
            self._tokens_per_s,
        )
        self._show_gauges()
        for one in self.engines.values():
            one.engine.start()

    def _route_of_images(self, specs: Routes) -> LoadedRoute | None:
        """What runs images, if anything does: a tower of their own, or the engine of the texts."""
        if specs.image is None:
            return None
        if specs.is_dual:
            return self.engines[IMAGE_ROUTE]
        texts = self.routes[""]
        processor = ImageProcessor(texts.spec, self.tokenization_workers)
        if texts.plan.max_input_tokens < processor.limit:
            raise ConfigError(
                f"--max-input-length {texts.plan.max_input_tokens} is less than the "
                f"{processor.limit} tokens of an image of this model"
            )
        runner = runner_of(texts.engine, processor, self.telemetry, texts.spec)
        return replace(texts, processor=processor, runner=runner)

    def tokenized_by(self, name: str) -> Any:
        """The TextProcessor of a request for this route, or if it is for images that of the main
        route."""
        route = self.routes[name if name in self.routes else self.main_route]
        return route.processor

    def _planned(self, specs: Routes, cache_dir: Path) -> dict[str, PlannedEngine]:
        """The engine of each route. A grid and a cache are for those that run on devices, if there
        are any; these divide the cache."""
        towers = sum(not spec.is_static for spec in specs.specs.values())
        of_tower = of_static = self.config
        if towers:
            of_tower = replace(self.config, cache_bytes=self.config.cache_bytes // towers)
            of_static = replace(self.config, buckets=None, cache_bytes=0)
        of_image = replace(of_tower, buckets=None, max_input_tokens=None)

        def config_of(spec: ModelSpec) -> EngineConfig:
            if not spec.takes_texts:
                return of_image
            return of_static if spec.is_static else of_tower

        return {
            route: plan_engine(spec, config_of(spec), cache_dir)
            for route, spec in specs.specs.items()
        }

    def _load_route(
        self,
        path: Path,
        route: str,
        spec: ModelSpec,
        planned: PlannedEngine,
        on_progress: Progress | None,
    ) -> LoadedRoute:
        folder = checkpoint.route_path(path, route)
        processor: Any
        if not spec.takes_texts:
            processor = ImageProcessor(spec, self.tokenization_workers)
        else:
            processor = TextProcessor(
                checkpoint.tokenizer_path(folder),
                spec,
                planned.plan.max_input_tokens,
                self.text,
                self.tokenization_workers,
            )
        name = f"{self.name}, {route}" if route else self.name
        engine = planned.load(folder, self.telemetry, on_progress, name)
        runner = runner_of(engine, processor, self.telemetry, spec)
        return LoadedRoute(spec, planned.plan, processor, engine, runner)

    def _tokens_per_s(self) -> float:
        """The recent throughput of the slowest engine; 0 before the first batch."""
        rates = (one.engine.tokens_per_s for one in self.engines.values())
        return min(filter(None, rates), default=0.0)

    def _show_gauges(self) -> None:
        telemetry = self.telemetry
        telemetry.show_compiles(compile_events())
        telemetry.held_bytes.set_function(lambda: self.admission.capacity.bytes)
        telemetry.admitted_inputs.set_function(lambda: self.admission.inputs)
        telemetry.admitted_tokens.set_function(lambda: self.admission.tokens)

    def run(self, request: Request[Answer]) -> Answer:
        """Run a request and block until it is answered. Nothing is refused for want of room.

        Raises the errors of InvalidInput and BackendError.
        """
        if isinstance(request, MixedRequest):
            return cast(Answer, self._run_parts(request))
        is_long = request.route == IMAGE_ROUTE and len(request.items) > IMAGES_A_PART
        if is_long and isinstance(request, EncodeRequest):
            return cast(Answer, self._run_parts(request.divided(IMAGES_A_PART)))
        return self.run_by[request.route].runner.run(request)

    def _run_parts(self, request: MixedRequest) -> Embeddings:
        """Run the parts of a request, the next one while one is computed."""

        def run(number: int) -> Embeddings:
            with request.placed(number) as part:
                return self.run(part)

        threads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="parts")
        try:
            return request.joined(list(threads.map(run, range(len(request.parts)))))
        finally:
            threads.shutdown(cancel_futures=True)

    async def run_async(self, request: Request[Answer]) -> Answer:
        """`run` without blocking the event loop. If the task is cancelled, what is still queued of
        the request is dropped."""
        if isinstance(request, MixedRequest):
            return await self._answer_parts(request, self.run_async)
        return await self.run_by[request.route].runner.run_async(request)

    async def answer(self, request: Request[Answer], held: Held | None = None) -> Answer:
        """`run_async` for a server: admit the request first, as a part of the one that `held`
        counts for.

        Raises also NoInputs, and Overloaded, RequestTooLarge or ShuttingDown before any work; the
        first two also after it, if the answer is larger than such answers are. If `held` has an
        account, it is charged for the tokens, and refuses what its key may not have.
        """
        if not request.items:
            raise NoInputs()
        if isinstance(request, MixedRequest):
            return await self._answer_parts(request, partial(self.answer, held=held))
        route = self.run_by[request.route]
        estimate = route.processor.estimate(request.inputs(), request.rules)
        with self.admission.admit(request.cost(route.spec, *estimate), held) as permit:
            answer = await route.runner.run_async(
                request, lambda *size: permit.correct(request.cost(route.spec, *size))
            )
            permit.held.charge(request.excess_bytes(answer))
            if isinstance(answer, Embeddings | Scores):
                permit.settle(int(answer.num_tokens.sum()))
            return answer

    async def _answer_parts(
        self, request: MixedRequest, answer: Callable[[EncodeRequest], Awaitable[Embeddings]]
    ) -> Any:
        """The answer to a request for texts and images, whose parts are answered in turn."""
        answers: list[Embeddings] = []
        for number in range(len(request.parts)):
            with request.placed(number) as part:
                answers.append(await answer(part))
        return request.joined(answers)

    async def tokenize_async(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        prompt_name: str | None,
        held: Held | None = None,
    ) -> list[list[TokenPiece]]:
        """The tokens of each text with their byte offsets; nothing is cut.

        For admission each character counts as a token, those of the prompt once for each text.
        Raises UnknownPrompt, and UnknownRoute as `Tasks.named_route`.
        """
        route = self.routes[self.tasks.named_route(prompt_name)]
        prompt = route.processor.prompt(None, prompt_name)
        characters = sum(map(len, texts)) + len(texts) * len(prompt)
        call = partial(route.processor.pieces, texts, special=add_special_tokens, prompt=prompt)
        cost = Cost(len(texts), characters, characters * PIECE_BYTES)
        with self.admission.admit(cost, held, is_run=False):
            return await route.runner.off_loop(call)

    async def decode_async(
        self,
        ids: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool,
        prompt_name: str | None = None,
        held: Held | None = None,
    ) -> list[str]:
        """The text of each list of ids, which are of the route of the prompt."""
        route = self.routes[self.tasks.named_route(prompt_name)]
        call = partial(route.processor.decode, ids, skip_special_tokens=skip_special_tokens)
        tokens = sum(map(len, ids))
        cost = Cost(len(ids), tokens, tokens * DECODED_BYTES)
        with self.admission.admit(cost, held, is_run=False):
            return await route.runner.off_loop(call)

    @property
    def max_input_tokens(self) -> int:
        return self.plan.max_input_tokens

    @property
    def max_batch_tokens(self) -> int:
        """The most tokens of a batch, or of an input where that is more: it runs alone."""
        return max(self.plan.max_batch_tokens, self.plan.max_input_tokens)

    @property
    def tokenization_workers(self) -> int:
        """The number of tokenizer threads: by TEI's rule, but four or more, so that one huge text
        does not delay all others."""
        return self.text.workers or min(max((os.cpu_count() or 2) - 1, 4), 64)

    @property
    def tokenizing_bytes(self) -> int:
        """The most bytes that all tokenizer threads together take."""
        jobs = sum(one.processor.job_bytes for one in self.run_by.values())
        return self.tokenization_workers * jobs

    @property
    def resident_bytes(self) -> int:
        """The memory that the model takes: of one device, or on a CPU of the host. Parameters and
        programs as planned, and what runs take of the buckets compiled so far."""
        runs = (one.engine.temporary_bytes for one in self.engines.values())
        return self._planned_bytes + max(runs)

    @property
    def device(self) -> str:
        return self.plan.device_name

    @property
    def dtype(self) -> str:
        return self.plan.dtype

    @property
    def ready(self) -> bool:
        """Whether every request has a compiled bucket and the device answers."""
        return all(one.engine.ready for one in self.engines.values())

    @property
    def healthy(self) -> bool:
        return all(one.engine.healthy for one in self.engines.values())

    @property
    def waiting(self) -> int:
        """The number of inputs that wait for a batch."""
        return sum(state.waiting_inputs for state in self.snapshot().values())

    @property
    def takes_images(self) -> bool:
        """Whether the model embeds images beside texts."""
        return self.images is not None

    @property
    def stuck(self) -> bool:
        """Whether no device returns from its current call, of any route, so that only a restart
        helps."""
        return any(one.engine.stuck for one in self.engines.values())

    @property
    def draining(self) -> bool:
        return self.admission.draining

    def snapshot(self) -> dict[str, EngineState]:
        """The state of each route's engine at this moment."""
        return {route: one.engine.snapshot() for route, one in self.engines.items()}

    def describe(self) -> dict[str, object]:
        """The fields that /info has in addition to TEI's."""
        described = {
            "task": self.spec.task,
            **self._describe_task(),
            "adapters": list(self.spec.adapter_names),
            **self.routes[self.main_route].describe(),
            "parallel": self.config.parallel,
            "max_queue_tokens": self.admission.capacity.max_tokens,
            "max_queue_bytes": self.admission.capacity.max_bytes,
            "tokenizing_bytes": self.tokenizing_bytes,
            "cache_bytes": self.config.cache_bytes,
        }
        if len(self.routes) > 1:
            described["default_route"] = self.default_route
            described["routes"] = {route: one.describe() for route, one in self.routes.items()}
        if self.images is not None:
            described["images"] = self.images.describe()
        return described

    def _describe_task(self) -> dict[str, object]:
        spec, template = self.spec, self.spec.template
        if spec.task == "embed":
            return {"dimensions": spec.dim, "prompts": sorted(spec.prompts)}
        return {
            "labels": list(spec.labels),
            "score_function": spec.score_function,
            "template": template is not None,
            "instruction": template.instruction
            if template and template.takes_instruction
            else None,
        }

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until ready. Raises the error of the compiler for a bucket that is needed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for one in self.engines.values():
            one.engine.wait_ready(deadline and max(deadline - time.monotonic(), 0.0))

    def probe(self) -> None:
        """Run a short input on every route, before others may. Raises BackendError if one does not
        answer, or not with finite numbers."""
        rules = Rules("", truncate=True, side="right")
        for route, one in self.engines.items():
            item = Pair("probe", "probe") if one.spec.task == "rerank" else Text("probe")
            if not one.spec.takes_texts:
                item = Image(np.zeros((1, 1, 3), np.uint8))
            outputs: frozenset[OutputName] = frozenset({one.spec.primary})
            self.run(ComputeRequest([item], rules, outputs, "interactive", route=route))

    def drain(self) -> None:
        """Admit no further request."""
        self.admission.drain()

    def close(self, timeout_s: float = 20.0) -> None:
        """Finish what is queued, stop the threads, and free the parameters and programs, whoever
        still refers to the model."""
        for one in self.run_by.values():
            one.runner.close()
        self.admission.close()
        deadline = time.monotonic() + timeout_s
        for one in self.engines.values():
            one.engine.close(max(deadline - time.monotonic(), 0.0))
            one.engine.free()


def _keep_programs(cache_dir: Path) -> None:
    """Keep compiled programs, or log why they cannot be kept."""
    try:
        keep_programs(cache_dir)
    except OSError as error:
        logger.warning(
            "compiled programs are not kept, and every start compiles again: %s; give a "
            "`cache_dir` that can be written, or `compile_cache=False`",
            error,
        )


def _shares_of(on_progress: Progress | None, count: int) -> list[Progress | None]:
    """A callback for each of so many engines: `on_progress` is called with the sums."""
    if on_progress is None:
        return [None] * count
    counts = [(0, 0)] * count

    def note(engine: int, done: int, total: int) -> None:
        counts[engine] = done, total
        on_progress(sum(done for done, _ in counts), sum(total for _, total in counts))

    return [partial(note, engine) for engine in range(count)]


def _queued_tokens(route: LoadedRoute) -> int:
    return QUEUED_BATCHES * max(len(route.plan.devices), 1) * route.plan.max_batch_tokens


def _pooled(routes: Routes, pooling: Pooling) -> ModelSpec:
    """The spec with another pooling. Raises ConfigError for a model that was made for its own."""
    spec = routes.main
    if len(routes.specs) > 1:
        names = ", ".join(routes.specs)
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
    return msgspec.structs.replace(spec, heads=spec.heads | {"dense": head})
