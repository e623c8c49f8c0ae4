"""Queues requests and runs them in batches, on threads that resolve the futures of the requests.

`submit` puts the sequences of a request into a priority queue. A worker is a replica of the model
with the scheduler of its device. A thread of a worker waits until the scheduler grants it the
device, and only then takes a batch of the sequences that wait. It runs the batch and writes the
answers into the futures. No timer delays a batch: batches grow while the devices are busy.
"""

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jaxembed import memory
from jaxembed.data.inputs import Priority
from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, Work, work_of
from jaxembed.engine.answer_cache import AnswerCache
from jaxembed.engine.autotune.costs import BucketCosts, CostSource
from jaxembed.engine.autotune.timing import BucketTimer
from jaxembed.engine.autotune.warmup import Warmup
from jaxembed.engine.batch import HOST_MS, Batch, place
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.lanes import Lanes
from jaxembed.engine.recovery import Recovery, reference_to
from jaxembed.engine.replica import Runner
from jaxembed.engine.ticket import Answers, Ticket, fail_entries
from jaxembed.engine.turn import Claim, DeviceTurn, Share
from jaxembed.engine.watchdog import OVERDUE_S, Watchdog, WatchedCall
from jaxembed.errors import (
    BackendError,
    DeviceStuck,
    EmptyInput,
    InputTooLong,
    TooManySpans,
)
from jaxembed.observability.metrics import Telemetry
from jaxembed.observability.tracing import BatchRun, TicketTrace

logger = logging.getLogger(__name__)

FAILURES_TO_SICK = 3  # consecutive failed batches after which a worker is sick
EXIT_S = 5.0  # time limit for an engine that is still open when the interpreter ends
PROBE_EVERY_S = 1.0  # seconds between two probes of a sick worker
RATE_BATCHES = 10  # the throughput is computed from about this many recent batches
INTERNAL = "an internal error, see the server's log"
NOT_COMPILED = "the model could not be compiled"
# Device time in seconds by which interactive work of a model goes first: two batches on a CPU.
BORROWED_S = 0.3


@dataclass(eq=False)
class Seat:
    """A runner, the scheduler of its device, and the virtual time of the runner there."""

    runner: Runner
    turn: DeviceTurn
    failures: int = 0  # number of consecutive failed batches; protected by the engine's lock
    share: Share = field(default_factory=Share)

    @property
    def sick(self) -> bool:
        """Whether its last FAILURES_TO_SICK batches have failed."""
        return self.failures >= FAILURES_TO_SICK


@dataclass(frozen=True)
class BucketUse:
    """Totals over the batches of one bucket since the start of the engine."""

    runs: int = 0
    useful_tokens: int = 0
    device_s: float = 0.0

    def __sub__(self, other: "BucketUse") -> "BucketUse":
        return BucketUse(
            self.runs - other.runs,
            self.useful_tokens - other.useful_tokens,
            self.device_s - other.device_s,
        )


@dataclass(frozen=True)
class LaneState:
    """The state of one priority queue. Duplicates count as often as they occur."""

    inputs: int
    tokens: int
    oldest_s: float  # seconds that the oldest waiting request has waited; 0 if none waits


@dataclass(frozen=True)
class EngineState:
    """The state of an engine at one moment."""

    waiting_inputs: int  # duplicates count as often as they occur
    waiting_tokens: int
    lanes: dict[Priority, LaneState]
    failures: tuple[int, ...]  # number of consecutive failed batches of each worker
    stuck: int  # number of workers that are stuck
    costs: dict[Bucket, float]  # milliseconds of a run of each usable bucket
    cost_sources: dict[Bucket, CostSource]
    drift: float  # factor of all costs, see BucketCosts
    lost_share: float  # share of the time of timings in which other programs had the cores
    timed: bool  # whether every bucket was timed often enough
    compiled: tuple[Bucket, ...]
    covered: bool  # whether every request has a compiled bucket
    ran: dict[Bucket, BucketUse]
    longest_call_s: float  # age of the oldest device call in progress; 0 if there is none
    closing: bool
    threads: int  # number of threads that are alive


class Engine:
    """Batches the sequences of requests and runs the batches on all workers.

    A bucket is the shape of a batch, for which each worker has a compiled program. A queued
    sequence may belong to several requests.

    Any thread may call `submit`. No request starts a compilation: batches use a bucket once it is
    compiled, and a sequence that fits in no compiled bucket waits.

    `widths` gives the number of columns of each output. `max_batch_requests` is the largest number
    of sequences in a batch. `cache_bytes` is the size of the AnswerCache; 0 means no cache.
    `keep_costs` saves the costs of the buckets; it is called when every bucket has been timed often
    enough, and when the engine closes. See Warmup for `full_warmup`, `compile_workers` and
    `on_progress`, and Watchdog for `overdue_s`.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        grid: BucketGrid,
        widths: Mapping[OutputName, int],
        telemetry: Telemetry,
        costs: BucketCosts,
        *,
        name: str = "model",
        max_batch_requests: int | None = None,
        cache_bytes: int = 0,
        full_warmup: bool = False,
        compile_workers: int = 2,
        probe_every_s: float = PROBE_EVERY_S,
        overdue_s: float = OVERDUE_S,
        on_progress: Callable[[int, int], None] | None = None,
        keep_costs: Callable[[BucketCosts], object] = lambda costs: None,
    ):
        """Prepare the threads; `start` starts them."""
        self.grid = grid
        self.name = name  # name of the model in the log
        self._costs = costs
        self._keep_costs = partial(keep_costs, costs)
        self.seats = tuple(seats)
        self._widths = widths
        self._telemetry = telemetry
        self._most = max_batch_requests
        self._cache = AnswerCache(cache_bytes, telemetry) if cache_bytes else None
        self._probe_every_s = probe_every_s
        self._lanes = Lanes(max(bucket.tokens for bucket in grid.buckets))
        self._ran: dict[Bucket, BucketUse] = {}
        self._ran_tokens = self._ran_s = 0.0  # decaying sums over the recent batches
        self._closing = False
        self._is_traced = False  # whether any request was traced
        self._lock = threading.RLock()
        self._idle = {seat: threading.Condition(self._lock) for seat in seats}  # idle threads
        self.warmup = Warmup(
            grid,
            self._compile,
            self._needed_length,
            name=name,
            full=full_warmup,
            workers=compile_workers,
            idle_s=lambda: min(seat.turn.idle_s for seat in seats),
            on_progress=on_progress,
            on_failure=lambda error: self._fail_waiting(BackendError(NOT_COMPILED)),
            on_finish=lambda: self._timer.thread.start(),
        )
        self._watchdog = Watchdog(
            lambda bucket: costs.usable.get(bucket, 0.0) / 1000,
            self._fail_overdue,
            self._check_stuck,
            overdue_s,
        )
        self._timer = BucketTimer(
            seats[0].runner,
            seats[0].turn,
            costs,
            self._lock,
            telemetry,
            name=name,
            is_bulk_alone=lambda: self._lanes.is_bulk_alone(time.monotonic()),
            on_timed=self._keep_costs,
            watch=self._watchdog.watch,
        )
        # one thread more than programs in flight: it writes answers while the others run programs
        self._threads = [
            threading.Thread(
                target=memory.in_kept_heap,
                args=(partial(self._serve, seat),),
                name=f"seat-{n}-{k}",
                daemon=True,
            )
            for n, seat in enumerate(seats)
            for k in range(seat.turn.permits + 1)
        ]
        telemetry.add_to(telemetry.queue_size, lambda: self._lanes.inputs)
        telemetry.add_to(telemetry.queue_tokens, lambda: self._lanes.tokens)
        telemetry.add_to(telemetry.stuck_seats, lambda: sum(seat.turn.stuck for seat in seats))
        for priority, lane in self._lanes.lanes.items():
            telemetry.add_to(telemetry.lane_size.labels(priority), lambda lane=lane: lane.inputs)

    @property
    def ready(self) -> bool:
        """Whether every request can be served: buckets are compiled, and a worker is healthy."""
        return self.warmup.ready and self.healthy

    @property
    def healthy(self) -> bool:
        """Whether some worker is neither sick nor stuck.

        A sick worker only probes its device while another is healthy; a stuck one does nothing.
        """
        return not all(seat.sick or seat.turn.stuck for seat in self.seats)

    @property
    def stuck(self) -> bool:
        """Whether every worker is stuck: its device does not return from a call of any model.

        Then waiting requests fail and new requests are refused. If the call returns after all, the
        worker is used again.
        """
        return all(seat.turn.stuck for seat in self.seats)

    @property
    def tokens_per_s(self) -> float:
        """The recent throughput of all workers, in useful tokens per second of device time.

        It is 0 before the first batch.
        """
        return len(self.seats) * self._ran_tokens / max(self._ran_s, 1e-6)

    @property
    def temporary_bytes(self) -> int:
        """The largest device memory in bytes that runs need at once besides the parameters."""
        seat, compiled = self.seats[0], tuple(self.warmup.compiled)
        return seat.turn.permits * max(map(seat.runner.temporary_bytes, compiled), default=0)

    def restrict(self, buckets: Iterable[Bucket]) -> None:
        """Use only `buckets`, which must be compiled, for batches from now on."""
        with self._lock:
            self._costs.restrict(buckets)
            self._lanes.lengthen(max(bucket.length for bucket in self._costs.usable))

    def snapshot(self) -> EngineState:
        """Return the current state of the engine."""
        calls = self._watchdog.calls
        with self._lock:
            now = time.monotonic()
            lanes: dict[Priority, LaneState] = {
                name: LaneState(lane.inputs, lane.tokens, self._lanes.oldest_s(lane, now))
                for name, lane in self._lanes.lanes.items()
            }
            return EngineState(
                waiting_inputs=self._lanes.inputs,
                waiting_tokens=self._lanes.tokens,
                lanes=lanes,
                failures=tuple(seat.failures for seat in self.seats),
                stuck=sum(seat.turn.stuck for seat in self.seats),
                costs=self._costs.usable,
                cost_sources={b: self._costs.source_of(b) for b in self._costs.usable},
                drift=self._costs.drift,
                lost_share=self._costs.lost_share,
                timed=self._timer.timed.is_set(),
                compiled=tuple(self.warmup.compiled),
                covered=self.warmup.ready,
                ran=dict(self._ran),
                longest_call_s=max((call.age_s for call in calls), default=0.0),
                closing=self._closing,
                threads=sum(thread.is_alive() for thread in self._all_threads),
            )

    def start(self) -> None:
        """Start the threads that compile buckets and serve requests."""
        atexit.register(self._close_at_exit)
        self.warmup.start()
        self._watchdog.thread.start()
        for thread in self._threads:
            thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until the model is ready. Raises TimeoutError, BackendError or XLA's error."""
        self.warmup.wait(timeout_s)

    def submit(
        self,
        work: Work,
        wake: Callable[[], object] | None = None,
        priority: Priority | None = None,
        trace: TicketTrace | None = None,
    ) -> Ticket:
        """Queue one request and return its future.

        `wake` is called once when the future is complete: from an engine thread, or from this
        thread if the cache has all answers. Without a `priority`, a small request is interactive
        and a large request is bulk. Equal sequences that wait at the same time, even in different
        requests, are computed once. `trace` belongs to a request that is traced.

        Raises EmptyInput, InputTooLong or TooManySpans for a sequence that no bucket can hold,
        BackendError if the engine is closed or the model could not be compiled, and DeviceStuck if
        every worker is stuck.
        """
        lengths = work.lengths.tolist()
        longest = max(lengths)
        if min(lengths) == 0:
            raise EmptyInput(index=lengths.index(0))
        if longest > self.grid.max_length:
            raise InputTooLong(self.grid.max_length, longest, lengths.index(longest))
        if work.has_spans:
            slots, limit = work.slots.tolist(), self.grid.most_slots
            if max(slots) > limit:
                raise TooManySpans(limit, max(slots), slots.index(max(slots)))
        ticket = Ticket(work, self._widths, wake, trace)
        cached = None if self._cache is None else self._cache.take(ticket)
        with self._lock:
            if self._closing:
                raise BackendError("the engine is closed")
            if self.warmup.error is not None:
                raise BackendError(NOT_COMPILED)
            if self.stuck:
                raise DeviceStuck
            if ticket.entries:
                self._lanes.add(ticket, priority)
                self._is_traced |= trace is not None
                for idle in self._idle.values():
                    idle.notify(self._lanes.inputs)  # more threads would only slow the others down
        if cached is not None:
            cached.settle(ticket.queued_at, 0.0)
        return ticket

    def wait_timed(self, timeout_s: float | None = None) -> None:
        """Block until every bucket has been timed often enough.

        Buckets are timed while the device is idle, and slowly while only bulk work runs. Raises
        TimeoutError after `timeout_s` seconds.
        """
        if not self._timer.timed.wait(timeout_s):
            raise TimeoutError(f"not every bucket was timed within {timeout_s} s")

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request: mark its future, and remove its sequences from the queue."""
        with self._lock:
            if not ticket.cancel():
                return
            self._lanes.cancel(ticket)
        self._telemetry.cancelled_requests.inc()

    def close(self, timeout_s: float = 20.0) -> None:
        """Refuse new requests, serve the queued requests, and end the threads.

        Requests that are not answered within `timeout_s` seconds, or that fit in no compiled
        bucket, fail with a BackendError.
        """
        self.warmup.stop()
        self._timer.stop()
        with self._lock:
            was_open, self._closing = not self._closing, True
            self._wake_all()
        deadline = time.monotonic() + timeout_s
        _join_until(self._threads, deadline)
        closed = BackendError("the engine is closed")
        self._fail_waiting(closed)
        self._watchdog.stop()
        for call in self._watchdog.calls:  # calls of threads that did not end in time
            fail_entries(call.batch.entries if call.batch else [], closed)
        _join_until([*self.warmup.threads, self._timer.thread, self._watchdog.thread], deadline)
        if was_open:
            self._keep_costs()
        if not any(thread.is_alive() for thread in self.warmup.threads):
            atexit.unregister(self._close_at_exit)

    def free(self) -> None:
        """Free the memory of all workers, after `close`.

        Nothing is freed if a thread has not ended, because it may be in a device call."""
        if any(thread.is_alive() for thread in self._all_threads):
            logger.warning("%s: a thread has not ended, so its memory is not freed", self.name)
            return
        for seat in self.seats:
            seat.runner.free()
        if self._cache is not None:
            self._cache.clear()

    @property
    def _all_threads(self) -> list[threading.Thread]:
        return [*self._threads, *self.warmup.threads, self._timer.thread, self._watchdog.thread]

    def _close_at_exit(self) -> None:
        """Close the engine when the interpreter ends.

        It waits for the compiling threads, because the interpreter aborts if a thread is inside XLA
        when it ends.
        """
        self.close(EXIT_S)
        _join_until(self.warmup.threads, math.inf)

    def _serve(self, seat: Seat) -> None:
        """Serve batches on a worker until the engine is closed and its queue is empty."""
        while self._wait_for_work(seat):
            try:
                self._serve_batch(seat)
            except Exception:
                logger.exception("the turn could not be had. This is a bug in jaxembed")
                self._fail_waiting(BackendError(INTERNAL))

    def _serve_batch(self, seat: Seat) -> None:
        """Wait for the worker's device, take a batch (or a probe), run it, and write its answers.

        Every sequence of the batch gets an answer or an error, even if an exception is raised.
        """
        batch = None
        try:
            with seat.turn.hold(partial(self._urgency, seat), seat.share) as claim:
                batch = None if self._is_unusable(seat) else self._take_batch()
                if batch is None and seat.sick:
                    batch = self._probe_batch(seat)
                if batch is None:
                    return
                seat.turn.charge(claim, (self._costs.usable[batch.bucket] + HOST_MS) / 1000)
                started_at = time.monotonic()
                with self._watchdog.watch(claim, batch.bucket, batch) as call:
                    recovery = Recovery(
                        seat.runner, lambda: self._costs.usable, self._telemetry, call.begin
                    )
                    results = recovery.run(batch)
                seconds = time.monotonic() - started_at
            if self._is_traced:
                self._trace(seat, batch, results, started_at, seconds)
            if claim.overdue:
                logger.warning("%s: the device returned after %.0f s", self.name, seconds)
                return  # its sequences have failed when it became overdue
            self._note(seat, batch, results, claim)
            for answers in results:
                if self._cache is not None:  # before the client can send the same request again
                    self._cache.keep(answers)
                answers.settle(started_at, seconds)
        except BaseException:  # a thread that ends must not leave its batch unanswered
            if batch is None:
                raise
            logger.exception("a batch could not be run or settled. This is a bug in jaxembed")
            fail_entries(batch.entries, BackendError(INTERNAL))

    def _is_unusable(self, seat: Seat) -> bool:
        """Return whether a worker takes no batches: it is stuck, or sick while another is healthy.

        A sick worker would take most batches, because they fail fast.
        """
        return seat.turn.stuck or (seat.sick and self.healthy)

    def _wait_for_work(self, seat: Seat) -> bool:
        """Wait for work of a worker. Returns False when the engine is closed and nothing is left.

        For a sick worker it also returns True after `probe_every_s` seconds, for a probe.
        """
        with self._lock:
            until = time.monotonic() + self._probe_every_s if seat.sick else None
            while True:
                has_work = self._lanes.runnable and not self._is_unusable(seat)
                if has_work or self._closing:
                    return has_work
                left_s = None if until is None else until - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return True
                self._idle[seat].wait(left_s)

    def _wake_all(self) -> None:
        """Wake the idle threads of all workers. The caller holds the lock."""
        for idle in self._idle.values():
            idle.notify_all()

    def _urgency(self, seat: Seat) -> float:
        """Return how urgently a worker wants its device; a probe counts as work.

        With work, it is minus the virtual time at which its next program begins, so that all models
        with work get equal device time. Interactive work adds BORROWED_S; otherwise it would wait
        for a batch of each other model. Without work, it is minus infinity, or infinity when the
        engine closes: its threads then release the device at once.
        """
        with self._lock:
            if self._lanes.runnable or (seat.sick and not self._closing):
                ahead = BORROWED_S if self._lanes.has_interactive else 0.0
                return ahead - seat.turn.begin(seat.share)
            return math.inf if self._closing else -math.inf

    def _take_batch(self) -> Batch | None:
        """Take the next batch out of the queue; None if no waiting sequence fits in a bucket."""
        with self._lock:
            try:
                return self._lanes.take(self._costs.usable, time.monotonic(), self._most)
            except Exception:
                logger.exception("no batch could be composed. This is a bug in jaxembed")
                waiting = self._lanes.clear()  # under the lock, because they may be inconsistent
        fail_entries(waiting, BackendError(INTERNAL))
        return None

    def _probe_batch(self, seat: Seat) -> Batch | None:
        """Make a batch of one token on the smallest bucket, to test the device of a sick worker.

        Returns None if the worker is stuck, no bucket is compiled, or the engine closes."""
        usable = self._costs.usable
        if seat.turn.stuck or not usable or self._closing:
            return None
        work = work_of([Encoding(np.ones(1, np.int32))], frozenset({seat.runner.primary}))
        ticket = Ticket(work, self._widths)
        return place(min(usable, key=lambda bucket: bucket.tokens), ticket.entries)

    def _note(self, seat: Seat, batch: Batch, results: Sequence[Answers], claim: Claim) -> None:
        """Record the results of a batch, and its device time `claim.took_s`.

        If the batch got no answer, the worker has one more consecutive failure, otherwise none. The
        totals of the bucket and the metrics count every batch. The throughput counts a batch only
        if it was answered as a whole. The cost of the bucket counts it only if, in addition, no
        program of another model ran at the same time.
        """
        answered = [answers for answers in results if answers.error is None and answers.entries]
        tokens = batch.useful_tokens
        with self._lock:
            seat.failures = 0 if answered else seat.failures + 1
            use = self._ran.get(batch.bucket, BucketUse())
            self._ran[batch.bucket] = BucketUse(
                use.runs + 1, use.useful_tokens + tokens, use.device_s + claim.took_s
            )
            if [answers.entries for answers in answered] == [batch.entries]:  # not split
                if not claim.mixed and batch.bucket in self._costs.usable:
                    self._costs.observe(batch.bucket, 1000 * claim.took_s)
                decay = 1 - 1 / RATE_BATCHES
                self._ran_tokens = decay * self._ran_tokens + tokens
                self._ran_s = decay * self._ran_s + claim.took_s
        self._telemetry.batch_size.observe(len(batch.entries))
        self._telemetry.batch_tokens.observe(tokens)
        self._telemetry.batch_fill.observe(tokens / batch.bucket.tokens)

    def _trace(
        self,
        seat: Seat,
        batch: Batch,
        results: Sequence[Answers],
        started_at: float,
        seconds: float,
    ) -> None:
        """Add the run of a batch, which began at the time.monotonic() `started_at`, to traces."""
        tickets = dict.fromkeys(ticket for entry in batch.entries for ticket in entry.claims)
        traces = [ticket.trace for ticket in tickets if ticket.trace is not None]
        if traces:
            run = BatchRun(
                model=self.name,
                bucket=str(batch.bucket),
                fill=batch.useful_tokens / batch.bucket.tokens,
                sequences=len(batch.entries),
                tokens=batch.useful_tokens,
                replica=self.seats.index(seat),
                failed=all(answers.error is not None for answers in results),
                started_at=started_at,
                ended_at=started_at + seconds,
            )
            traces[0].trace.tracer.trace_batch(run, traces)

    def _compile(self, bucket: Bucket) -> None:
        """Compile a bucket on every worker, then let batches use it and wake the idle threads.

        The threads of Warmup call it. Raises the errors of the compiler; then no batch uses the
        bucket.
        """
        for seat in self.seats:
            seat.runner.compile(bucket)
        with self._lock:
            self._costs.add(bucket)
            self._lanes.lengthen(max(bucket.length for bucket in self._costs.usable))
            self._wake_all()

    def _fail_waiting(self, error: Exception) -> None:
        """Fail all waiting requests with `error`."""
        with self._lock:
            waiting = self._lanes.clear()
        fail_entries(waiting, error)

    def _fail_overdue(self, call: WatchedCall) -> None:
        """Fail the sequences of a batch whose device call is overdue, with a BackendError.

        The watchdog calls it once for each overdue call. It has already taken the device out of use
        until the call returns. A call without a batch times a bucket, and is only logged.
        """
        text = "%s: %s is overdue: nothing more runs on its device until it returns"
        if call.batch is None:
            logger.error(text, self.name, f"the timing of bucket {call.bucket}")
            return
        reference, words = reference_to(call.batch)
        logger.error(text, self.name, words)
        self._telemetry.failed_batches.inc()
        failure = f"the device did not return in time from this batch (reference {reference})"
        fail_entries(call.batch.entries, BackendError(failure))

    def _check_stuck(self) -> None:
        """Fail all waiting requests if every worker is stuck; otherwise wake threads if work waits.

        The watchdog calls it once a second. Requests may have been queued just before the last
        device got stuck, and threads may have gone to sleep while their device was stuck.
        """
        if self.stuck:
            self._fail_waiting(DeviceStuck())
            return
        with self._lock:
            if self._lanes.runnable:
                self._wake_all()

    def _needed_length(self) -> int | None:
        """Return the row length that the oldest sequence in no compiled bucket needs, or None."""
        with self._lock:
            return self._lanes.needed_length


def _join_until(threads: Sequence[threading.Thread], deadline: float) -> None:
    """Wait until all started threads have ended, at most until `deadline`.

    `deadline` is a time.monotonic(), or infinity.
    """
    for thread in threads:
        if thread.ident is not None:
            left_s = deadline - time.monotonic()
            thread.join(None if math.isinf(left_s) else max(0.0, left_s))
