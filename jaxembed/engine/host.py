"""Runs static models on the host: no device, no compilation, no buckets.

A small request is computed at once by the thread that submits it. The others wait in two lanes for
one thread, which computes a step of one request at a time. The requests of a lane take turns, so
that a small one never waits for a whole large one, and bulk leads at least every fourth step.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np

from jaxembed.engine.engine import INTERNAL
from jaxembed.engine.lanes import INTERACTIVE_INPUTS
from jaxembed.engine.state import EngineState, LaneState
from jaxembed.engine.ticket import Ticket
from jaxembed.errors import BackendError, NotFinite
from jaxembed.inputs import Priority
from jaxembed.models.static import StaticModel
from jaxembed.outputs import OUTPUTS
from jaxembed.telemetry import Telemetry
from jaxembed.work import Work, WorkResult, part_of

logger = logging.getLogger(__name__)

STEP_TOKENS = 8192  # of a step, at most unless one sequence has more: some milliseconds
BULK_EVERY = 4  # steps: how often bulk leads while interactive work waits too
RATE_STEPS = 10  # the throughput is computed from about this many recent steps
CLOSED = "the engine is closed"


@dataclass(eq=False)
class Job:
    """A request whose sequences up to number `done` are computed."""

    ticket: Ticket
    ends: np.ndarray  # of each sequence, in tokens of the request
    done: int = 0

    @property
    def inputs(self) -> int:
        """The number of sequences left."""
        return len(self.ends) - self.done

    @property
    def tokens(self) -> int:
        """The number of tokens left."""
        return int(self.ends[-1] - (self.ends[self.done - 1] if self.done else 0))

    def step(self, most_tokens: int) -> range:
        """The next sequences, one or more, with `most_tokens` together if there are several."""
        before = self.ends[self.done - 1] if self.done else 0
        stop = int(np.searchsorted(self.ends, before + most_tokens, side="right"))
        return range(self.done, max(stop, self.done + 1))


class HostEngine:
    """Computes the sequences of requests with a static model. See ServedEngine for its methods.

    `submit` may be called from any thread.
    """

    def __init__(
        self,
        model: StaticModel,
        telemetry: Telemetry,
        *,
        name: str = "model",
        step_tokens: int = STEP_TOKENS,
    ):
        """Prepare the thread; `start` starts it. `name` is the model's, for the log."""
        self.name = name
        self._model = model
        self._telemetry = telemetry
        self._step_tokens = step_tokens
        self._lanes: dict[Priority, deque[Job]] = {lane: deque() for lane in get_args(Priority)}
        self._closing = False
        self._ran_tokens = self._ran_s = 0.0  # decaying sums over the recent steps
        self._failures = 0  # consecutive steps that failed
        self._steps = 0  # taken since the start
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._serve, name="host-engine", daemon=True)
        self._show_gauges()

    @property
    def ready(self) -> bool:
        """Whether it was started and not closed: there is nothing to compile."""
        return self._thread.is_alive() and not self._closing

    @property
    def healthy(self) -> bool:
        """Always true: there is no device that could fail."""
        return True

    @property
    def stuck(self) -> bool:
        """Never true: there is no device that could hang."""
        return False

    @property
    def tokens_per_s(self) -> float:
        """The recent throughput in tokens per second of computing; 0 before the first step."""
        return self._ran_tokens / max(self._ran_s, 1e-6)

    def start(self) -> None:
        """Start the thread that computes large requests."""
        atexit.register(self.close)
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return at once. Raises BackendError if the engine is closed."""
        if self._closing:
            raise BackendError(CLOSED)

    def submit(
        self,
        work: Work,
        wake: Callable[[], object] | None = None,
        priority: Priority | None = None,
    ) -> Ticket:
        """Compute a small request, or queue a large one, and return its ticket.

        `wake` is called once when the ticket is complete, for a small request before this returns.
        Without a priority a request of few inputs and tokens is interactive, else bulk. Raises
        BackendError if the engine is closed.
        """
        ticket = Ticket(work, self._model.widths, wake, by_entry=False)
        is_small = len(work) <= INTERACTIVE_INPUTS and work.tokens <= self._model.block_tokens
        with self._lock:
            if self._closing:
                raise BackendError(CLOSED)
            if not is_small:
                job = Job(ticket, np.cumsum(work.lengths, dtype=np.int64))
                self._lanes[priority or self._priority(work)].append(job)
                self._idle.notify()
        if is_small:
            self._run(ticket, range(len(work)))
        return ticket

    def _priority(self, work: Work) -> Priority:
        small = len(work) <= INTERACTIVE_INPUTS and work.tokens <= self._step_tokens
        return "interactive" if small else "bulk"

    def cancel(self, ticket: Ticket) -> None:
        """Mark the ticket as abandoned by its client, and compute no more of it."""
        with self._lock:
            if not ticket.cancel():
                return
            for lane, jobs in self._lanes.items():
                self._lanes[lane] = deque(job for job in jobs if job.ticket is not ticket)
        self._telemetry.cancelled_requests.inc()

    def snapshot(self) -> EngineState:
        """The state of the engine at this moment. It has no buckets."""
        with self._lock:
            lanes: dict[Priority, LaneState]
            lanes = {lane: _lane_state(jobs) for lane, jobs in self._lanes.items()}
            return EngineState(
                waiting_inputs=sum(state.inputs for state in lanes.values()),
                waiting_tokens=sum(state.tokens for state in lanes.values()),
                lanes=lanes,
                failures=(self._failures,),
                stuck=0,
                shares=(0.0,),
                costs={},
                cost_sources={},
                drift=1.0,
                spread=1.0,
                timed=True,
                compiled=(),
                covered=True,
                ran={},
                longest_call_s=0.0,
                closing=self._closing,
                threads=int(self._thread.is_alive()),
            )

    def close(self, timeout_s: float = 20.0) -> None:
        """Compute what is queued, and end the thread. Requests that are not answered within
        `timeout_s` seconds fail."""
        with self._lock:
            self._closing = True
            self._idle.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        with self._lock:
            left = [job for jobs in self._lanes.values() for job in jobs]
            self._lanes = {lane: deque() for lane in self._lanes}
        for job in left:
            job.ticket.fail(list(range(job.done, len(job.ends))), BackendError(CLOSED))
        atexit.unregister(self.close)

    def _serve(self) -> None:
        """Compute steps until the engine is closed and nothing waits."""
        while (job := self._next()) is not None:
            step = job.step(self._step_tokens)
            self._run(job.ticket, step)

    def _next(self) -> Job | None:
        """Wait for work, and take the next job out of its lane; None when closed and empty.

        The part of it that is not in this step is put back as a job behind the others of its lane.
        """
        with self._lock:
            self._idle.wait_for(lambda: self._closing or any(self._lanes.values()))
            self._steps += 1
            bulk_leads = self._steps % BULK_EVERY == 0
            order: tuple[Priority, ...] = ("interactive", "bulk")
            for jobs in map(self._lanes.__getitem__, order[::-1] if bulk_leads else order):
                if jobs:
                    job = jobs.popleft()
                    after = job.step(self._step_tokens).stop
                    if after < len(job.ends):
                        jobs.append(Job(job.ticket, job.ends, after))
                    return job
            return None

    def _run(self, ticket: Ticket, step: range) -> None:
        """Compute some sequences of a request, and answer or fail them."""
        index = slice(step.start, step.stop)
        started_at = time.monotonic()
        ticket.queue_s[index] = started_at - ticket.queued_at
        try:
            part = part_of(ticket.work, step)
            values = self._model.compute(part)
            seconds = time.monotonic() - started_at
            ticket.inference_s[index] = seconds
            _check_finite(values)
            ticket.answer(index, values)
        except Exception as error:
            failure = error if isinstance(error, NotFinite) else BackendError(INTERNAL)
            logger.exception("%s: %d sequences could not be computed", self.name, len(step))
            self._failures += 1
            self._telemetry.failed_batches.inc()
            ticket.fail(list(step), failure)
            return
        self._note(part, seconds)

    def _note(self, part: Work, seconds: float) -> None:
        """Record a step that was answered."""
        self._failures = 0
        with self._lock:
            decay = 1 - 1 / RATE_STEPS
            self._ran_tokens = decay * self._ran_tokens + part.tokens
            self._ran_s = decay * self._ran_s + seconds
        self._telemetry.batch_size.observe(len(part))
        self._telemetry.batch_tokens.observe(part.tokens)

    def _show_gauges(self) -> None:
        telemetry = self._telemetry
        telemetry.add_to(telemetry.queue_size, lambda: self.snapshot().waiting_inputs)
        telemetry.add_to(telemetry.queue_tokens, lambda: self.snapshot().waiting_tokens)
        for priority in self._lanes:
            size = partial(self._inputs_of, priority)
            telemetry.add_to(telemetry.lane_size.labels(priority), size)

    def _inputs_of(self, priority: Priority) -> int:
        return self.snapshot().lanes[priority].inputs


def _lane_state(jobs: deque[Job]) -> LaneState:
    oldest_at = min((job.ticket.queued_at for job in jobs), default=None)
    oldest_s = 0.0 if oldest_at is None else time.monotonic() - oldest_at
    return LaneState(sum(job.inputs for job in jobs), sum(job.tokens for job in jobs), oldest_s)


def _check_finite(values: WorkResult) -> None:
    """Raise NotFinite if an output holds NaN or infinity: the checkpoint is damaged."""
    for name, value in values.items():
        array = value if OUTPUTS[name].per == "slot" else value.values
        if not np.isfinite(array).all():
            raise NotFinite("the result is not finite: verify the checkpoint")
