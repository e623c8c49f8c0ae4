"""Measures one request: holds the lease on its model, and records its durations and counters."""

import asyncio
import time
from collections.abc import Awaitable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import Task
from jaxembed.engine.admission import Reservation
from jaxembed.observability.metrics import Telemetry
from jaxembed.observability.tracing import Trace, current_trace
from jaxembed.runtime.options import RequestStats, Similarities
from jaxembed.server.auth.permissions import check_name
from jaxembed.server.http.exchange import Response, current_exchange
from jaxembed.server.service import Service, current_service

if TYPE_CHECKING:
    from jaxembed.runtime.served import ServedModel, ServedRoute
    from jaxembed.server.registry.models import LoadedInstance

Method = Literal["single", "batch"]
Stage = Literal["decode", "encode"]


class RequestSize(msgspec.Struct, frozen=True):
    """The size of a request's inputs, for its metrics, headers and error messages."""

    method: Method
    characters: int  # Unicode code points of the texts, plus one for each token id
    field: str  # the field of the body that holds the inputs

    def place(self, index: int, part: int | None = None) -> str:
        """Return the path of the input with this index, such as `inputs[3]`; `part` has no
        effect."""
        return self.field if self.method == "single" else f"{self.field}[{index}]"


@dataclass(eq=False, repr=False)
class Meter(AbstractContextManager["Meter"]):
    """The durations and counters of one request, recorded when the context ends.

    `find` takes a lease on the model, which the end of the context returns. `telemetry` has the
    metrics that count the request. The Meter counts clients that disconnect, and `errors.refuse`
    counts other failures.
    """

    service: Service
    reservation: Reservation  # memory of the whole HTTP request, which may have several meters
    started_at: float = field(default_factory=time.monotonic)
    trace: Trace | None = field(default_factory=current_trace)

    # Set by `find`. `adapter` is the adapter that the request names, and `served_name` the name of
    # the model in the response.
    loaded: "ServedModel[ServedRoute]" = field(init=False)
    adapter: str | None = None
    served_name: str = field(init=False)

    size: RequestSize = field(init=False)  # set by `accept`
    images: Sequence[Any] = ()  # the bytes of each image; set when they are read
    route: str = field(init=False)  # the model's route that runs the request; set when it is run

    _lease: "LoadedInstance | None" = field(default=None, init=False)
    _stages: list[tuple[str, float]] = field(default_factory=list, init=False)  # name, seconds

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Return the lease, record the durations, and count a client that disconnected."""
        if self._lease is not None:
            self._lease.give_back()
        telemetry = self.telemetry
        for stage, seconds in self._stages:
            telemetry.stage.labels(stage).observe(seconds)
        if isinstance(error, asyncio.CancelledError):  # the client disconnected
            telemetry.request_failure.labels("dropped").inc()

    @property
    def telemetry(self) -> Telemetry:
        """The metrics that count the request. They belong to the model of the request; before
        `find` to the first startup model, or if that is not in memory, to the server."""
        if hasattr(self, "loaded"):
            return self.loaded.telemetry
        models = self.service.models
        first = models.startup_models[0].instance if models.startup_models else None
        return models.telemetry if first is None else first.loaded.telemetry

    def time(self, stage: Stage) -> "_StageTime":
        """Return a context that measures the duration of a stage. The metrics receive it when the
        request ends, because the model may be unknown until then."""
        return _StageTime(self, stage)

    def note(self, stage: Stage, started_at: float, ended_at: float) -> None:
        """Record the duration of a stage."""
        self._stages.append((stage, ended_at - started_at))
        if self.trace is not None:
            self.trace.note(stage, started_at, ended_at)

    async def find(
        self, name: str | None, task: Task | None, outputs: Collection[OutputName] = ()
    ) -> "ServedModel[ServedRoute]":
        """Find the model of the request, load it if needed, and take a lease on it.

        Returns the model. `name` is the model that the request names, `task` what the model must be
        able to do, and `outputs` the outputs that it should have. Raises the errors of
        `ModelPool.lease`, and Forbidden if the API key of the request may not use the model.
        """
        permitted = check_name(name) if self.service.has_keys else None
        self._lease = await self.service.pool.lease(name, task, permitted, outputs)
        self.loaded = loaded = self._lease.loaded
        models = self.service.models
        self.adapter = models.adapter_of(name)
        suffix = f":{self.adapter}" if self.adapter else ""
        self.served_name = models.name_of(loaded, permitted) + suffix  # `name` may have moved
        if self.reservation.account is not None:
            self.reservation.account.models.add(models.name_of(loaded) + suffix)
        if self.trace is not None:
            self.trace.task, self.trace.model = task, name or self.served_name
        return loaded

    def accept(self, size: RequestSize) -> None:
        """Record the size of the request, and count the request as accepted by its model."""
        self.size = size
        self.loaded.telemetry.request_count.labels(size.method).inc()

    async def answer(self, answer: RequestStats, response: Awaitable[Response]) -> Response:
        """Await the response, which encodes `answer`. Record how long that takes, and return the
        response after `stamp` has added its headers."""
        with self.time("encode"):
            encoded = await response
        return self.stamp(encoded, answer)

    def stamp(self, response: Response, answer: RequestStats) -> Response:
        """Count the request as answered, and add headers with the durations and counts of the
        request to the response."""
        total_s = time.monotonic() - self.started_at
        telemetry = self.loaded.telemetry
        telemetry.request_success.labels(self.size.method).inc()
        telemetry.request_duration.observe(total_s)
        telemetry.request_tokenization.observe(answer.tokenization_s)
        telemetry.request_queue.observe(answer.queue_s)
        telemetry.request_inference.observe(answer.inference_s)
        route, total_ms = self.loaded.routes[self.route], f"{int(1000 * total_s)}"
        tokens = answer.total_tokens
        response.headers.update(
            {
                "x-compute-type": route.compute_type,
                "x-compute-time": total_ms,
                "x-total-time": total_ms,
                "x-tokenization-time": f"{int(1000 * answer.tokenization_s)}",
                "x-queue-time": f"{int(1000 * answer.queue_s)}",
                "x-inference-time": f"{int(1000 * answer.inference_s)}",
                "x-compute-characters": f"{self.size.characters}",
                "x-compute-tokens": f"{tokens}",
            }
        )
        if self.trace is not None:
            self.trace.count(len(answer.num_tokens), tokens, answer.truncated, answer.cached)
        if answer.truncated:
            response.headers["x-truncated-inputs"] = str(answer.truncated)
        if answer.cached:
            response.headers["x-cache-hits"] = str(answer.cached)
        if isinstance(answer, Similarities):
            response.headers["x-score-source"] = "embeddings"
        elif self.loaded.spec.listwise is not None:
            response.headers["x-score-source"] = "listwise"
        return response


class _StageTime:
    """A context that is a stage of a request."""

    def __init__(self, meter: Meter, name: Stage):
        self._meter = meter
        self._name: Stage = name

    def __enter__(self) -> None:
        self._started_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._meter.note(self._name, self._started_at, time.monotonic())


def current_meter() -> Meter:
    """Return the meter of the current request, which is created when it is first asked for."""
    exchange = current_exchange()
    if exchange.meter is None:
        exchange.meter = Meter(current_service(), exchange.body.reservation)
    return exchange.meter
