"""What is noted of a traced request, for spans that are made of it later. Imports no library."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

MOST_STAGES = 64  # that are noted of a request: one of many parts has several of each name
MOST_LINKS = 64  # of a batch to requests, and of a request to batches

StageName = Literal["decode", "tokenize", "queue", "device", "encode"]


@dataclass(frozen=True)
class BatchRun:
    """A batch that was run."""

    model: str
    bucket: str
    fill: float  # share of the bucket's tokens that are useful
    sequences: int
    tokens: int
    replica: int
    failed: bool  # nothing in it was answered
    started_at: float  # time.monotonic()
    ended_at: float


@dataclass(frozen=True)
class StageTimes:
    """A part of a request's time; `links` are the contexts of the spans of its batches."""

    name: StageName
    started_at: float  # time.monotonic()
    ended_at: float
    links: tuple[Any, ...] = ()


class Trace:
    """A request whose spans are wanted, and what is noted of it until it is answered.

    `span` is the tracer's own. Threads of the engine and the tokenizer may add stages.
    """

    task: str | None = None  # that the model does for it
    model: str | None = None  # as the request named it
    lane: str | None = None
    inputs = 0
    tokens = 0
    truncated = 0
    cached = 0
    status: int | None = None  # of HTTP; None if its client went away before
    request_id: str | None = None
    error: str | None = None  # the class of what it failed with

    def __init__(self, trace_id: str, span: Any, tracer: "Tracer"):
        """`trace_id` is in hexadecimal digits."""
        self.trace_id = trace_id
        self.span = span
        self.tracer = tracer
        self.stages: list[StageTimes] = []

    def note(self, name: StageName, started_at: float, ended_at: float, *links: Any) -> None:
        """Add a stage, unless there are many; times are time.monotonic()."""
        if len(self.stages) < MOST_STAGES:
            self.stages.append(StageTimes(name, started_at, ended_at, links))

    def count(self, inputs: int, tokens: int, truncated: int, cached: int) -> None:
        """Add what was answered: inputs and their tokens, and how many inputs were cut to the limit
        or had an answer in the cache."""
        self.inputs += inputs
        self.tokens += tokens
        self.truncated += truncated
        self.cached += cached


class TicketTrace:
    """What the engine notes of one ticket of a traced request."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.queued_at: float | None = None  # time.monotonic(); None: the cache had every answer
        self.runs: list[tuple[BatchRun, Any]] = []  # its batches, with the contexts of their spans

    def finish(self) -> None:
        """Note the stages of a ticket that is complete or was dropped: it waited until its first
        batch began, and was on the device, with pauses, until its last batch ended. One that was
        not queued has none."""
        if self.queued_at is None:
            return
        runs = list(self.runs)
        began_at = min((run.started_at for run, _ in runs), default=time.monotonic())
        self.trace.note("queue", self.queued_at, began_at)
        if runs:
            links = [context for _, context in runs[:MOST_LINKS]]
            self.trace.note("device", began_at, max(run.ended_at for run, _ in runs), *links)


@runtime_checkable
class Tracer(Protocol):
    """Makes spans of what was noted, and sends them. None of its methods raises or waits."""

    def begin(self, scope: Mapping[str, Any]) -> Trace | None:
        """The trace of a request with this ASGI scope; None if it is not sampled."""

    def end(self, trace: Trace, route: str | None) -> None:
        """Make the spans of a request that has ended. `route` is the pattern of its path, None if
        no route has it."""

    def trace_batch(self, run: BatchRun, tickets: Sequence[TicketTrace]) -> None:
        """Make the span of a batch, linked to the requests, and add the run to their tickets."""

    def close(self, timeout_s: float) -> None:
        """Send what was not sent yet, for so many seconds at most."""


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)

current_trace = _current.get
"""The trace of the request that this task answers; None if it has none."""


@contextmanager
def as_current(trace: Trace) -> Iterator[None]:
    """Make it the trace of this task, and of those that it starts, in the context."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)
