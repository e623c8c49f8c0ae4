"""What is recorded of a traced request, from which a tracer makes spans when the request ends.

It imports no tracing library. Times are those of time.monotonic(), in seconds.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

MAX_STAGES = 64  # stages of a request; a request in several parts has several of a name
MAX_LINKS = 64  # links of a batch to requests, and of a stage of a request to batches

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
    """A stage of a request: when it began and ended. `links` are the span contexts of the batches
    of the stage."""

    name: StageName
    started_at: float  # time.monotonic()
    ended_at: float
    links: tuple[Any, ...] = ()


@dataclass(eq=False)
class Trace:
    """What is recorded of a sampled request until it is answered.

    Threads of the engine and the tokenizer may add stages.
    """

    trace_id: str  # in hexadecimal digits
    span: Any  # the tracer's span of the request
    tracer: "Tracer"
    stages: list[StageTimes] = field(default_factory=list)
    task: str | None = None  # what the model does for the request
    model: str | None = None  # as the request named it
    priority: str | None = None
    inputs: int = 0
    tokens: int = 0
    truncated: int = 0
    cached: int = 0
    status: int | None = None  # the HTTP status; None if the client disconnected first
    request_id: str | None = None
    error: str | None = None  # the class name of the error that it failed with, or another reason

    def note(self, name: StageName, started_at: float, ended_at: float, *links: Any) -> None:
        """Add a stage with its batches' span contexts, unless there are MAX_STAGES stages."""
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
    """What the engine records of one future of a traced request."""

    trace: Trace
    queued_at: float | None = None  # None: the cache had every answer
    runs: list[tuple[BatchRun, Any]] = field(default_factory=list)  # with their span contexts

    def finish(self) -> None:
        """Add the stages of a future that is complete or was dropped.

        The queue stage lasts until the first batch begins, or until now without batches. The device
        stage lasts from then until the last batch ends, pauses included. A future that was never
        queued has neither stage.
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
    """Makes and sends spans from what was recorded. Its methods neither raise nor wait."""

    def begin(self, scope: Mapping[str, Any]) -> Trace | None:
        """Return the trace of the request with this ASGI scope, or None if it is not sampled."""

    def end(self, trace: Trace, route: str | None) -> None:
        """Make the spans of a request that has ended. `route` is the pattern of its path, or None
        if no route matches it."""

    def trace_batch(self, run: BatchRun, futures: Sequence[FutureTrace]) -> None:
        """Make the span of a batch with links to its requests, and add the run to the traces."""

    def close(self, timeout_s: float) -> None:
        """Send the unsent spans, within a timeout in seconds."""


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)

current_trace = _current.get
"""The trace of the request that this asyncio task answers, or None."""


@contextmanager
def as_current(trace: Trace) -> Iterator[None]:
    """Make `trace` the current trace of this task, and of tasks that it starts, in the block."""
    reset_token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(reset_token)
