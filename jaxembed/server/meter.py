"""The clock and the counters of one request. Knows no route and no body."""

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, cast

from quart import Response, g, request

from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import Task
from jaxembed.engine.admission import Held
from jaxembed.observability.metrics import Telemetry
from jaxembed.observability.tracing import current_trace
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import Embeddings, Scores, Similarities
from jaxembed.server.auth.permissions import check_name
from jaxembed.server.http.bounded_body import BoundedBody
from jaxembed.server.registry.models import Residence
from jaxembed.server.service import Service, current_service

Method = Literal["single", "batch"]


@dataclass(frozen=True)
class RequestSize:
    """The size of a request, for its metrics and headers."""

    method: Method
    characters: int  # Unicode code points of the texts, plus one for each token id
    field: str  # the field of the body that holds the inputs

    def place(self, index: int) -> str:
        """The path of one input."""
        return self.field if self.method == "single" else f"{self.field}[{index}]"


class Meter:
    """Counts a request when it is accepted and when it is answered, or when its client goes away.

    It is counted for the model that was found, and before that for the first model that was loaded
    at the start. From then on it has a lease on the model, until it is answered. `errors.refuse`
    counts failures.
    """

    loaded: LoadedModel  # set by `find`
    adapter: str | None = None  # that `model` names beside it; set by `find`
    route: str  # of the model, which the request took; set when it is run
    size: RequestSize  # set by `accept`
    images: Sequence[Any] = ()  # the bytes of each of the request; set when they are read

    def __init__(self, service: Service, held: Held):
        """`held` is the memory of the whole HTTP request, of which this may be a part."""
        self.service = service
        self.held = held
        self.started_at = time.monotonic()
        self._stages: list[tuple[str, float]] = []
        self._leases: list[Residence] = []

    def __enter__(self) -> "Meter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for residence in self._leases:
            residence.give_back()
        telemetry = self.telemetry
        for stage, seconds in self._stages:
            telemetry.stage.labels(stage).observe(seconds)
        if isinstance(error, asyncio.CancelledError):  # Quart cancels when the client is gone
            telemetry.request_failure.labels("dropped").inc()

    @property
    def served_name(self) -> str:
        """The name of the model found, as answers carry it, with the adapter if it was named."""
        return self._with_adapter(self._name) if self.adapter else self._name

    def _with_adapter(self, name: str) -> str:
        return f"{name}:{self.adapter}" if self.adapter else name

    @property
    def telemetry(self) -> Telemetry:
        """The metrics of the model that the request is counted for."""
        if hasattr(self, "loaded"):
            return self.loaded.telemetry
        models = self.service.models
        first = models.lasting[0].residence if models.lasting else None
        return models.telemetry if first is None else first.loaded.telemetry

    @contextmanager
    def time(self, stage: Literal["decode", "encode"]) -> Iterator[None]:
        """Time a stage; observed at the end of the request, when its model is known."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            ended_at = time.monotonic()
            self._stages.append((stage, ended_at - started_at))
            if (trace := current_trace()) is not None:
                trace.note(stage, started_at, ended_at)

    async def find(
        self, name: str | None, task: Task | None, outputs: Collection[OutputName] = ()
    ) -> LoadedModel:
        """The model that `Models.find` gives, loaded if it is not in memory; from now on the
        request is counted for it. Raises as `ModelPool.lease`, and Forbidden if the request's key
        may not use it."""
        permitted = None if self.service.keyring is None else check_name(name)
        residence = await self.service.pool.lease(name, task, permitted, outputs)
        self._leases.append(residence)
        self.loaded = residence.loaded
        self.adapter = self.service.models.adapter_of(name)
        models = self.service.models
        self._name = models.name_of(self.loaded, permitted)  # which may move, or leave memory
        if self.held.account is not None:
            self.held.account.models.add(self._with_adapter(models.name_of(self.loaded)))
        if (trace := current_trace()) is not None:
            trace.task, trace.model = task, name or self.served_name
        return self.loaded

    def accept(self, size: RequestSize) -> None:
        """Count the request as accepted by the model found."""
        self.size = size
        self.loaded.telemetry.request_count.labels(size.method).inc()

    def stamp(self, response: Response, answer: Embeddings | Scores) -> Response:
        """Count the request as answered and tell the client where its time went."""
        plan, total_ms = self.loaded.routes[self.route].plan, f"{int(1000 * self._count(answer))}"
        response.headers.extend(  # `update` would look for each name first: 2 us a header
            {
                "x-compute-type": compute_type(plan.device_name, plan.dtype),
                "x-compute-time": total_ms,
                "x-total-time": total_ms,
                "x-tokenization-time": f"{int(1000 * answer.tokenization_s)}",
                "x-queue-time": f"{int(1000 * answer.queue_s)}",
                "x-inference-time": f"{int(1000 * answer.inference_s)}",
                "x-compute-characters": f"{self.size.characters}",
                "x-compute-tokens": f"{answer.num_tokens.sum()}",
            }
        )
        if (trace := current_trace()) is not None:
            inputs, tokens = len(answer.num_tokens), int(answer.num_tokens.sum())
            trace.count(inputs, tokens, answer.truncated, answer.cached)
        if answer.truncated:
            response.headers.add("x-truncated-inputs", str(answer.truncated))
        if answer.cached:
            response.headers.add("x-cache-hits", str(answer.cached))
        if isinstance(answer, Similarities):
            response.headers.add("x-score-source", "embeddings")
        return response

    def _count(self, answer: Embeddings | Scores) -> float:
        """Count the request as answered, and return the seconds since it came."""
        total_s = time.monotonic() - self.started_at
        telemetry = self.loaded.telemetry
        telemetry.request_success.labels(self.size.method).inc()
        telemetry.request_duration.observe(total_s)
        telemetry.request_tokenization.observe(answer.tokenization_s)
        telemetry.request_queue.observe(answer.queue_s)
        telemetry.request_inference.observe(answer.inference_s)
        return total_s


def current_meter() -> Meter:
    """The meter of the current request; the first call starts it."""
    if "meter" not in g:
        g.meter = Meter(current_service(), cast(BoundedBody, request.body).held)
    return g.meter


def blame(meter: Meter) -> None:
    """Count the failure of the current request for this meter's model. The meter is of the part of
    the request that failed."""
    g.meter = meter


def compute_type(device: str, dtype: str) -> str:
    """The device and dtype really used, in the form of TEI's header: `cpu+bfloat16`."""
    return f"{device.lower().replace(' ', '-')}+{dtype}"
