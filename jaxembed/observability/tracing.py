"""Records the stages and batches of a traced request. A tracer makes spans from the record when the
request ends.

This module imports no tracing library. Times are values of time.monotonic(), in seconds.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

# The largest number of recorded stages of a request. A request in several parts has several stages
# of the same name.
MAX_STAGES = 64
MAX_LINKS = 64  # most links from a batch to requests, and from a stage of a request to batches

StageName = Literal["decode", "tokenize", "queue", "device", "encode"]


@dataclass(frozen=True)
class BatchRun:
    """A batch that was run."""

    model: str
    bucket: str
    fill: float  # utilization: the share of the bucket's tokens that are useful, 0 to 1
    sequences: int
    tokens: int
    replica: int
    failed: bool  # whether no sequence was answered
    started_at: float  # time.monotonic()
    ended_at: float


@dataclass(frozen=True)
class StageTimes:
    """The begin and the end of a stage of a request. `links` are the span contexts of the batches
    that the stage waited for."""

    name: StageName
    started_at: float  # time.monotonic()
    ended_at: float
    links: tuple[Any, ...] = ()


@dataclass(eq=False)
class Trace:
    """The record of a sampled request until the request is answered.

    Threads of the engine and the tokenizer may add stages to it.
    """

    trace_id: str  # hexadecimal digits
    span: Any  # the span of the request, an object of the tracer
    tracer: "Tracer"
    stages: list[StageTimes] = field(default_factory=list)
    task: str | None = None  # what the model does for the request
    model: str | None = None  # the name of the model in the request
    priority: str | None = None
    inputs: int = 0
    tokens: int = 0
    truncated: int = 0
    cached: int = 0
    status: int | None = None  # the HTTP status; None if the client disconnected first
    request_id: str | None = None
    error: str | None = None  # class name of the error that the request failed with, or a reason

    def note(self, name: StageName, started_at: float, ended_at: float, *links: Any) -> None:
        """Add a stage, unless there are MAX_STAGES stages. `links` are the span contexts of the
        stage's batches."""
        if len(self.stages) < MAX_STAGES:
            self.stages.append(StageTimes(name, started_at, ended_at, links))

    def count(self, inputs: int, tokens: int, truncated: int, cached: int) -> None:
        """Add numbers of answered inputs, their tokens, and truncated and cached inputs."""
        self.inputs += inputs
        self.tokens += tokens
        self.truncated += truncated
        self.cached += cached


@dataclass(eq=False)
class FutureTrace:
    """The record of one future of a traced request, to which the engine adds batches."""

    trace: Trace
    queued_at: float | None = None  # None: not queued, because the cache had every answer
    # the batches that computed sequences of the future, each with its span context
    runs: list[tuple[BatchRun, Any]] = field(default_factory=list)

    def add(self, queued_at: float | None, runs: Sequence[tuple[float, float, str]]) -> None:
        """Add the batches that another process ran: begin, end and context of each."""
        self.queued_at = queued_at
        for started_at, ended_at, context in runs:
            run = BatchRun("", "", 0.0, 0, 0, 0, False, started_at, ended_at)
            self.runs.append((run, self.trace.tracer.read_context(context)))

    def finish(self) -> None:
        """Add the stages of a future that is complete or was dropped to the trace.

        The queue stage lasts until the first batch begins, or until now if there is no batch. The
        device stage lasts from the begin of the first batch to the end of the last batch, pauses
        included. A future that was never queued has neither stage.
        """
        if self.queued_at is None:
            return
        runs = list(self.runs)
        began_at = min((run.started_at for run, _ in runs), default=time.monotonic())
        self.trace.note("queue", self.queued_at, began_at)
        if runs:
            links = [context for _, context in runs[:MAX_LINKS]]
            self.trace.note("device", began_at, max(run.ended_at for run, _ in runs), *links)


@runtime_checkable
class Tracer(Protocol):
    """Makes spans from the records of requests and batches, and sends the spans. The methods raise
    no errors, and only `close` waits."""

    @property
    def settings(self) -> tuple[str, str, str]:
        """Endpoint, name of the service, and protocol, to make such a tracer elsewhere."""
        ...

    def begin(self, scope: Mapping[str, Any]) -> Trace | None:
        """Return the trace of the request with this ASGI scope, or None if it is not sampled."""

    def end(self, trace: Trace, route: str | None) -> None:
        """Make the spans of a request that has ended. `route` is the pattern of the request's path,
        or None if no route matches the path."""

    def trace_batch(self, run: BatchRun, futures: Sequence[FutureTrace]) -> None:
        """Make the span of a batch with links to the requests that it computes, and add `run` and
        the context of the span to `futures`, the records of these requests."""

    def context_of(self, trace: Trace) -> str:
        """Return the context of the span of a request, for `read_trace` in another process."""
        ...

    def read_trace(self, context: str) -> Trace:
        """Return a record of a request that another process traces, to link batches to it."""
        ...

    def write_context(self, context: Any) -> str:
        """Return the context of a batch's span, for `read_context` in another process."""
        ...

    def read_context(self, context: str) -> Any:
        """Return the context of a span that another process made."""

    def close(self, timeout_s: float) -> None:
        """Send the spans that were not sent yet, within `timeout_s` seconds."""


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)

current_trace = _current.get
"""Returns the trace of the request that the current asyncio task answers, or None."""


@contextmanager
def as_current(trace: Trace) -> Iterator[None]:
    """Make `trace` the current trace of this task, and of tasks that it starts, in the block."""
    reset_token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(reset_token)
