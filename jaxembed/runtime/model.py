"""Loads a model into memory, and gives access to its routes, tasks, admission and state."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from jaxembed.checkpoints import hub
from jaxembed.checkpoints.ranges import load_ranges
from jaxembed.checkpoints.source import ModelSource
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.inputs import Image, Pair, Text
from jaxembed.data.outputs import OutputName
from jaxembed.engine.admission import Admission, Capacity, capacity_of
from jaxembed.engine.compiles import compile_events, keep_programs
from jaxembed.engine.engine import EngineState
from jaxembed.observability.metrics import Telemetry
from jaxembed.preprocessing.text import TokenizationOptions
from jaxembed.runtime.requests import ComputeRequest
from jaxembed.runtime.routes import (
    LoadedRoute,
    Progress,
    load_routes,
    load_specs,
    plan_routes,
)
from jaxembed.runtime.served import ServedModel, tokenizer_threads

logger = logging.getLogger(__name__)

QUEUED_BATCHES = 64  # batches that may wait for each device before requests are refused


class LoadedModel(ServedModel[LoadedRoute]):
    """A model that is loaded and runs requests, which its `tasks` make.

    Each route in `routes` takes texts or images, and a request names its route.

    With `wait=False` the constructor returns while buckets still compile, and requests wait until a
    bucket is ready. The models of one process may share a `capacity`. `reserve` is called with the
    number of bytes that the model will take, before its parameters are read. Unless `compile_cache`
    is False, compiled programs are saved in the source's cache directory for the next process.
    Raises CheckpointError or ConfigError, and the errors of `reserve` and `wait_ready`.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        config: EngineConfig | None = None,
        text: TextConfig | None = None,
        capacity: Capacity | None = None,
        wait: bool = True,
        on_progress: Progress | None = None,
        reserve: Callable[[int], object] = lambda count: None,
        compile_cache: bool = True,
    ):
        self.config = config or EngineConfig()
        text = text or TextConfig()
        if compile_cache:
            try:
                keep_programs(source.cache_dir)
            except OSError as error:
                logger.warning(
                    "compiled programs are not saved, so every start compiles them again: %s; set "
                    "a `cache_dir` that this process can write to, or `compile_cache=False`",
                    error,
                )
        self.path = hub.resolve(source)  # the folder of the checkpoint
        specs = load_specs(self.path, source.pooling)
        planned = plan_routes(specs, self.config, source.cache_dir)
        self._planned_bytes = sum(engine.resident_bytes for engine in planned.values())
        reserve(self._planned_bytes)
        telemetry = Telemetry(max(engine.plan.max_input_tokens for engine in planned.values()))
        self.routes = load_routes(
            source.name, self.path, text, telemetry, planned, specs, on_progress
        )
        # The routes with an engine of their own, so that each engine is here once.
        self.engines = {
            name: route for name, route in self.routes.items() if not route.shares_engine
        }
        engines = [route.engine for route in self.engines.values()]
        admission = Admission(
            capacity or capacity_of(self.config),
            max(
                QUEUED_BATCHES * max(len(plan.devices) // plan.degree, 1) * plan.max_batch_tokens
                for plan in (route.plan for route in self.routes.values())
            ),
            # the recent throughput of the slowest engine; 0 before the first batch
            lambda: min(filter(None, [engine.tokens_per_s for engine in engines]), default=0.0),
        )
        super().__init__(
            source.name, specs, self.routes, text, telemetry, load_ranges(self.path), admission
        )
        self.main = self.routes[specs.of_texts.main_route]
        plan = self.main.plan
        self.device, self.dtype = plan.device_name, plan.dtype
        self.max_input_tokens = plan.max_input_tokens
        # An input of more tokens than a batch may have runs alone in its batch.
        self.max_batch_tokens = max(plan.max_batch_tokens, plan.max_input_tokens)
        self.tokenization_workers = tokenizer_threads(text)
        # The largest memory that all tokenizer threads together take.
        self.tokenizing_bytes = self.tokenization_workers * sum(
            route.processor.job_bytes for route in self.routes.values()
        )
        self.telemetry.set_compile_events(compile_events())
        self.telemetry.held_bytes.set_function(lambda: self.admission.capacity.bytes)
        self.telemetry.admitted_inputs.set_function(lambda: self.admission.inputs)
        self.telemetry.admitted_tokens.set_function(lambda: self.admission.tokens)
        for route in self.engines.values():
            route.engine.start()
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.close()  # or the threads would keep the model and its device memory alive
                raise

    @property
    def resident_bytes(self) -> int:
        """The bytes that the model takes on one device or, for a CPU, on the host. They are the
        planned bytes of parameters and programs, and the memory of runs of the largest bucket
        compiled so far."""
        return self._planned_bytes + max(
            route.engine.temporary_bytes for route in self.engines.values()
        )

    @property
    def ready(self) -> bool:
        """Whether every request has a compiled bucket and every engine is healthy."""
        return all(route.engine.ready for route in self.engines.values())

    @property
    def healthy(self) -> bool:
        """Whether every engine has a device that returns from calls, and whose last batches have
        not all failed."""
        return all(route.engine.healthy for route in self.engines.values())

    @property
    def waiting(self) -> int:
        """The number of inputs that wait for a batch."""
        return sum(state.waiting_inputs for state in self.snapshot().values())

    @property
    def stuck(self) -> bool:
        """Whether an engine has no device that returns from its call: only a restart helps."""
        return any(route.engine.stuck for route in self.engines.values())

    def snapshot(self) -> dict[str, EngineState]:
        """Return the current state of each engine, by the name of the engine's route."""
        return {name: route.engine.snapshot() for name, route in self.engines.items()}

    def describe(self) -> dict[str, object]:
        """Return the fields that jaxembed adds to the fields of TEI in the response of `/info`."""
        spec, template, capacity = self.spec, self.spec.template, self.admission.capacity
        task_fields: dict[str, object] = {
            "labels": list(spec.labels),
            "score_function": spec.score_function,
            "template": template is not None or spec.listwise is not None,
            "instruction": template.instruction
            if template and template.takes_instruction
            else None,
        }
        if spec.task == "embed":
            task_fields = {"dimensions": spec.dim, "prompts": sorted(spec.prompts)}
        described = {
            "task": spec.task,
            **task_fields,
            "adapters": list(spec.adapter_names),
            **_describe_route(self.main),
            "parallel": self.config.parallel,
            "tensor_parallel": self.main.plan.degree,
            "max_queue_tokens": capacity.max_tokens,
            "max_queue_bytes": capacity.max_bytes,
            "tokenizing_bytes": self.tokenizing_bytes,
            "cache_bytes": self.config.cache_bytes,
        }
        if len(self.specs.of_texts.specs) > 1:
            described["default_route"] = self.specs.of_texts.default
            described["routes"] = {
                route: _describe_route(self.routes[route]) for route in self.specs.of_texts.specs
            }
        for route in self.routes.values():
            if not route.takes_texts:
                described["images"] = _describe_route(route)
        return described

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until all engines are ready. Raises TimeoutError after `timeout_s` seconds, the
        compiler's error for a bucket that must be compiled, or BackendError if the model is
        closed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for route in self.engines.values():
            route.engine.wait_ready(deadline and max(deadline - time.monotonic(), 0.0))

    def probe(self) -> None:
        """Run a short input on every engine to test it. Raises BackendError if an engine does not
        answer or its result is not finite."""
        tokenization = TokenizationOptions(prompt="", truncate=True, side="right")
        for name, route in self.engines.items():
            has_pairs = route.spec.task == "rerank" and route.spec.listwise is None
            item = Pair("probe", "probe") if has_pairs else Text("probe")
            if not route.spec.takes_texts:
                item = Image(np.zeros((1, 1, 3), np.uint8))
            outputs: frozenset[OutputName] = frozenset({route.spec.primary})
            self.run(ComputeRequest([item], tokenization, outputs, "interactive", route=name))

    @property
    def draining(self) -> bool:
        """Whether the model has stopped admitting requests."""
        return self.admission.draining

    def drain(self) -> None:
        """Stop admitting requests."""
        self.admission.drain()

    def close(self, timeout_s: float = 20.0) -> None:
        """Finish queued requests, stop the threads, and free the parameters and programs.

        Requests that are not answered within `timeout_s` seconds fail. The memory is freed even if
        other objects still refer to the model.
        """
        for route in self.routes.values():
            route.runner.close()
        self.admission.close()
        deadline = time.monotonic() + timeout_s
        for route in self.engines.values():
            route.engine.close(max(deadline - time.monotonic(), 0.0))
            route.engine.free()


def _describe_route(route: LoadedRoute) -> dict[str, object]:
    plan, similarity = route.plan, route.similarity
    return {
        "architecture": route.spec.architecture,
        "max_input_length": plan.max_input_tokens,
        "device": plan.device_name,
        "devices": max(len(plan.devices), 1),
        "dtype": plan.dtype,
        "quantize": similarity and {"method": plan.quantize, **asdict(similarity)},
        "kernels": plan.kernels.describe(),
        "buckets": [str(bucket) for bucket in plan.grid.buckets],
        "compiled_buckets": [str(bucket) for bucket in route.engine.snapshot().compiled],
        "content_hash": route.spec.content_hash,
    }
