"""The models of a front-end process: tokenizers and tasks here, the engine in its own process."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints.ranges import load_ranges
from jaxembed.config import TextConfig
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import ModelSpec, Task
from jaxembed.data.work import Work
from jaxembed.engine.admission import Admission, Cost, Permit, Reservation
from jaxembed.errors import ModelUnavailable, UnknownModel
from jaxembed.observability.metrics import Telemetry
from jaxembed.observability.tracing import FutureTrace
from jaxembed.preprocessing.images.processor import Processor
from jaxembed.runtime.requests import Request
from jaxembed.runtime.runner import Computed, TokenizingRunner
from jaxembed.runtime.served import ServedModel, ServedRoute, processor_of
from jaxembed.server.front import frames
from jaxembed.server.front.client import (
    BRIEF_TOKENS,
    EngineClient,
    LentCapacity,
    LentReservation,
    RemotePermit,
)
from jaxembed.server.registry.models import KnownModel, LoadedInstance, Models, is_name

TRIES = 5  # how often a request asks for a model that is evicted at once


class RemoteRunner(TokenizingRunner):
    """Runs the requests of one route: tokenizes them here, and has them computed by the engine's
    process."""

    def __init__(self, processor: Processor, telemetry: Telemetry, spec: ModelSpec, route: str):
        super().__init__(processor, telemetry, spec)
        self._route = route

    def _run(self, request: Request) -> Any:
        raise AssertionError("a front-end process has no blocking requests")

    async def _compute_async(
        self, work: Work, request: Request, permit: Permit | None, trace: FutureTrace | None
    ) -> Computed:
        assert isinstance(permit, RemotePermit)
        answer = await permit.compute(work, self._route, request.priority, trace)
        if trace is not None:
            trace.add(answer.queued_at, answer.runs)
        values = frames.decoded_result(answer.values, work, self.spec.widths)
        return Computed(values, answer.queue_s, answer.inference_s, answer.cached)


class RemoteModel(ServedModel[ServedRoute]):
    """A model that the engine's process computes. `number` is its number there."""

    def __init__(self, facts: frames.ModelFacts, client: EngineClient, admission: Admission):
        """Load the tokenizers. Raises CheckpointError."""
        text, path = TextConfig(**facts.text), Path(facts.path)
        limits = [route.max_input_tokens for route in facts.routes.values()]
        telemetry = Telemetry(max(limits))
        routes: dict[str, ServedRoute] = {}
        for name, route in facts.routes.items():
            spec = facts.specs.specs[route.stored_as]
            folder = checkpoint.route_path(path, route.stored_as)
            texts = routes.get("") if spec.takes_texts and not route.takes_texts else None
            processor = processor_of(
                folder,
                spec,
                route.max_input_tokens,
                text,
                takes_texts=route.takes_texts,
                texts=texts and texts.processor,
            )
            runner = RemoteRunner(processor, telemetry, spec, name)
            routes[name] = ServedRoute(spec, processor, runner, route.device_name, route.dtype)
        super().__init__(
            facts.name, facts.specs, routes, text, telemetry, load_ranges(path), admission
        )
        self.number, self._client = facts.number, client

    async def admit(
        self, cost: Cost, reservation: Reservation | None, *, is_run: bool = True
    ) -> Permit:
        """Admit a part of a request. A brief one is admitted when its work is sent."""
        assert isinstance(reservation, LentReservation)
        permit = RemotePermit(self._client, self.number, cost, reservation)
        if not is_run or cost.inputs != 1 or cost.tokens > BRIEF_TOKENS:
            await permit.reserve(is_run=is_run)
        return permit

    def close(self) -> None:
        """Stop the tokenizer threads."""
        for route in self.routes.values():
            route.runner.close()


class RemoteModels(Models):
    """The models of the engine's process, by the names of its last table."""

    def __init__(self, client: EngineClient, capacity: LentCapacity):
        super().__init__(capacity=capacity)
        self._client = client
        self._admission = Admission(capacity, 0, lambda: 0.0)
        self.epoch = 0
        self._applied = asyncio.Event()
        self._by_number: dict[int, LoadedInstance] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def add(self, facts: frames.ModelFacts) -> None:
        """Load the tokenizers of a model, which the next table names."""
        model = await asyncio.to_thread(RemoteModel, facts, self._client, self._admission)
        self._by_number[facts.number] = LoadedInstance(cast(Any, model))

    def apply(self, table: frames.Table) -> None:
        """Use the models and names of a table. Models that it lacks are closed when the last
        request that uses them is answered; the engine's process keeps them until then."""
        known = [
            KnownModel(
                one.id,
                None if one.number is None else self._by_number.get(one.number),
                one.spec,
                one.takes_images,
                described=one.described,
            )
            for one in table.models
        ]
        for model in known:
            if model.instance is not None:
                model.spec = model.instance.loaded.spec
        pairs = list(zip(known, table.models, strict=True))
        self.startup_models = [model for model, one in pairs if one.is_startup]
        self._by_name = {name: known[index] for name, index in table.names.items()}
        self.can_load = table.can_load
        numbers = {one.number for one in table.models}
        for number in [number for number in self._by_number if number not in numbers]:
            task = asyncio.create_task(self._leave(number, self._by_number.pop(number)))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        self.epoch = table.epoch
        self._applied.set()
        self._applied = asyncio.Event()

    async def _leave(self, number: int, instance: LoadedInstance) -> None:
        await instance.idle()
        cast(RemoteModel, instance.loaded).close()
        self._client.send(frames.Returned(number))

    async def applied(self, epoch: int) -> None:
        """Wait until the table of this epoch, or of a later one, is in use."""
        while self.epoch < epoch:
            await self._applied.wait()

    def growth(self) -> dict[str, Any]:
        """Return what the metrics of each model have grown by since the last call."""
        telemetries = {"": self.telemetry} | {
            str(number): instance.loaded.telemetry for number, instance in self._by_number.items()
        }
        return {name: grown for name, one in telemetries.items() if (grown := one.growth())}

    def discover(self) -> None:
        """Do nothing: the engine's process looks for new models."""


class RemotePool:
    """Finds the models of requests, and has the engine's process load them."""

    def __init__(self, client: EngineClient, models: RemoteModels):
        self._client, self.models = client, models

    async def lease(
        self,
        name: str | None,
        task: Task | None,
        permitted: Collection[str] | None = None,
        outputs: Collection[OutputName] = (),
    ) -> LoadedInstance:
        """Return the model of a request as `ModelPool.lease` does."""
        models = self.models
        is_asked = False  # whether the engine's process has looked for models
        for _ in range(TRIES):
            lacks_reranker = task == "rerank" and not is_name(name) and models.can_load
            if is_asked or not lacks_reranker or models.rerankers(permitted):
                try:
                    instance = models.find(name, task, permitted, outputs).instance
                except UnknownModel:
                    if is_asked or not models.can_load:
                        raise
                    instance = None
                if instance is not None:
                    instance.leases += 1
                    return instance
            await self._load(name, task, permitted, outputs)
            is_asked = True
        raise ModelUnavailable("the model is evicted again and again; raise --model-memory")

    async def specs_of(
        self, name: str | None, permitted: Collection[str] | None = None
    ) -> list[ModelSpec]:
        """Return the specs of the models that a request may mean, as `ModelPool.specs_of` does."""
        for _ in range(TRIES):
            try:
                specs = [known.spec for known in self.models.candidates(name, permitted)]
            except UnknownModel:
                if not self.models.can_load:
                    raise
                specs = [None]
            if None not in specs:
                return [spec for spec in specs if spec is not None]
            await self._load(name, None, permitted, (), specs_only=True)
        raise ModelUnavailable("the model is evicted again and again; raise --model-memory")

    async def _load(
        self,
        name: str | None,
        task: Task | None,
        permitted: Collection[str] | None,
        outputs: Collection[OutputName],
        *,
        specs_only: bool = False,
    ) -> None:
        """Have the engine's process load the models that a request may mean, and wait until the
        table has them. Raises the errors of `ModelPool.lease`."""
        call, names = self._client.number(), None if permitted is None else list(permitted)
        frame = frames.Load(call, name, task, names, list(outputs), specs_only)
        loaded: frames.Loaded = await self._client.call(frame)
        await self.models.applied(loaded.epoch)
