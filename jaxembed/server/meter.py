"""The clock and the counters of one request. Knows no route and no body."""

import asyncio
import time
from collections.abc import Awaitable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, cast

from quart import Response, g, request

from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import Task
from jaxembed.engine.admission import Held
from jaxembed.observability.metrics import Telemetry
from jaxembed.observability.tracing import Trace, current_trace
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import Embeddings, Scores, Similarities
from jaxembed.server.auth.permissions import check_name
from jaxembed.server.http.connection import BoundedBody
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


@dataclass(eq=False, repr=False)
class Meter(AbstractContextManager["Meter"]):
    """Counts a request when it is accepted and when it is answered, or when its client goes away.

    It is counted for the model that was found, and before that for the first model that was loaded
    at the start. From then on it has a lease on the model, until it is answered. `errors.refuse`
    counts failures.
    """

    service: Service
    held: Held  # the memory of the whole HTTP request, of which this may be a part
    started_at: float = field(default_factory=time.monotonic)
    trace: Trace | None = field(default_factory=current_trace)

    # Set by `find`, the adapter if `model` names one. The name is that which answers carry.
    loaded: LoadedModel = field(init=False)
    adapter: str | None = None
    served_name: str = field(init=False)

    size: RequestSize = field(init=False)  # set by `accept`
    images: Sequence[Any] = ()  # the bytes of each of the request; set when they are read
    route: str = field(init=False)  # of the model, which the request took; set when it is run

    _lease: Residence | None = field(default=None, init=False)
    _stages: list[tuple[str, float]] = field(default_factory=list, init=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lease is not None:
            self._lease.give_back()
        telemetry = self.telemetry
        for stage, seconds in self._stages:
            telemetry.stage.labels(stage).observe(seconds)
        if isinstance(error, asyncio.CancelledError):  # Quart cancels when the client is gone
            telemetry.request_failure.labels("dropped").inc()

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
            if self.trace is not None:
                self.trace.note(stage, started_at, ended_at)

    async def find(
        self, name: str | None, task: Task | None, outputs: Collection[OutputName] = ()
    ) -> LoadedModel:
        """The model that `Models.find` gives, loaded if it is not in memory; from now on the
        request is counted for it. Raises as `ModelPool.lease`, and Forbidden if the request's key
        may not use it."""
        permitted = None if self.service.keyring is None else check_name(name)
        self._lease = await self.service.pool.lease(name, task, permitted, outputs)
        self.loaded = loaded = self._lease.loaded
        models = self.service.models
        self.adapter = models.adapter_of(name)
        suffix = f":{self.adapter}" if self.adapter else ""
        self.served_name = models.name_of(loaded, permitted) + suffix  # names may move
        if self.held.account is not None:
            self.held.account.models.add(models.name_of(loaded) + suffix)
        if self.trace is not None:
            self.trace.task, self.trace.model = task, name or self.served_name
        return loaded

    def accept(self, size: RequestSize) -> None:
        """Count the request as accepted by the model found."""
        self.size = size
        self.loaded.telemetry.request_count.labels(size.method).inc()

    async def answer(self, answer: Embeddings | Scores, response: Awaitable[Response]) -> Response:
        """The response that is made of the answer, timed and stamped."""
        with self.time("encode"):
            made = await response
        return self.stamp(made, answer)

    def stamp(self, response: Response, answer: Embeddings | Scores) -> Response:
        """Count the request as answered and tell the client where its time went."""
        total_s = time.monotonic() - self.started_at
        telemetry = self.loaded.telemetry
        telemetry.request_success.labels(self.size.method).inc()
        telemetry.request_duration.observe(total_s)
        telemetry.request_tokenization.observe(answer.tokenization_s)
        telemetry.request_queue.observe(answer.queue_s)
        telemetry.request_inference.observe(answer.inference_s)
        plan, total_ms = self.loaded.routes[self.route].plan, f"{int(1000 * total_s)}"
        tokens = int(answer.num_tokens.sum())
        response.headers.extend(  # `update` would look for each name first: 2 us a header
            {
                # in the form of TEI's header: `cpu+bfloat16`
                "x-compute-type": f"{plan.device_name.lower().replace(' ', '-')}+{plan.dtype}",
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
            response.headers.add("x-truncated-inputs", str(answer.truncated))
        if answer.cached:
            response.headers.add("x-cache-hits", str(answer.cached))
        if isinstance(answer, Similarities):
            response.headers.add("x-score-source", "embeddings")
        return response


def current_meter() -> Meter:
    """The meter of the current request; the first call starts it."""
    if "meter" not in g:
        g.meter = Meter(current_service(), cast(BoundedBody, request.body).held)
    return g.meter
