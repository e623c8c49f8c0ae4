"""Queues requests and runs them in batches, on threads that resolve the futures of the requests.

`submit` puts the sequences of a request into a priority queue. A worker is a replica of the model
with the scheduler of its device. A thread of a worker waits until the scheduler grants it the
device, and only then takes a batch of the sequences that wait. It runs the batch and writes the
answers into the futures. No timer delays a batch: batches grow while the devices are busy.

The first worker compiles the buckets that the model needs to be ready. Then each other worker joins
as soon as it has compiled them too: a worker that has not joined takes no batches.
"""

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from jaxembed import memory
from jaxembed.data.inputs import Priority
from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, Work, work_from_encodings
from jaxembed.engine.answer_cache import AnswerCache
from jaxembed.engine.autotune.costs import BucketCosts, CostSource
from jaxembed.engine.autotune.timing import BucketTimer
from jaxembed.engine.autotune.warmup import Warmup
from jaxembed.engine.batch import Batch, choose_bucket, place, place_all
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.future import Answers, WorkFuture, fail_sequences
from jaxembed.engine.queue import RequestQueue
from jaxembed.engine.recovery import Recovery, is_finite, reference_to
from jaxembed.engine.replica import Runner
from jaxembed.engine.scheduler import DeviceScheduler, VirtualTime, Waiter
from jaxembed.engine.watchdog import OVERDUE_S, Watchdog, WatchedCall
from jaxembed.errors import (
    BackendError,
    DeviceStuck,
    EmptyInput,
    InputTooLong,
    TooManySpans,
    counted,
)
from jaxembed.observability.metrics import Telemetry
from jaxembed.observability.tracing import BatchRun, FutureTrace

logger = logging.getLogger(__name__)

FAILURES_TO_SICK = 3  # consecutive failed batches after which a worker is sick
EXIT_S = 5.0  # time limit to close an engine that is still open when the interpreter ends
PROBE_EVERY_S = 1.0  # seconds between two probes of a sick worker
RATE_BATCHES = 10  # the throughput is computed from about this many recent batches
INTERNAL = "an internal error, see the server's log"
NOT_COMPILED = "the model could not be compiled"
# A model with interactive work goes before other models as if it had used the device for this many
# seconds less, which is the time of two batches on a CPU.
BORROWED_S = 0.3


@dataclass(eq=False)
class Worker:
    """A runner, the scheduler of its device, and the runner's virtual time on that device."""

    runner: Runner
    scheduler: DeviceScheduler
    failures: int = 0  # number of consecutive failed batches; protected by the engine's lock
    share: VirtualTime = field(default_factory=VirtualTime)
    # A worker takes batches once it has joined, which it does with the programs of all usable
    # buckets. It is left out if they do not compile. Protected by the engine's lock.
    state: Literal["joining", "joined", "left out"] = "joining"

    @property
    def healthy(self) -> bool:
        """Whether the worker has joined, and is neither sick nor stuck."""
        return self.state == "joined" and not self.sick and not self.scheduler.stuck

    @property
    def sick(self) -> bool:
        """Whether the worker's last FAILURES_TO_SICK batches have failed."""
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
class QueueState:
    """The state of one priority queue. Equal inputs count as often as they occur."""

    inputs: int
    tokens: int
    oldest_s: float  # seconds that the oldest waiting request has waited; 0 if none waits


@dataclass(frozen=True)
class EngineState:
    """The state of an engine at one moment."""

    waiting_inputs: int  # equal inputs count as often as they occur
    waiting_tokens: int
    queues: dict[Priority, QueueState]
    failures: tuple[int, ...]  # number of consecutive failed batches of each worker
    stuck: int  # number of workers that are stuck
    joined: int  # number of workers that take batches, even if they are sick or stuck now
    costs: dict[Bucket, float]  # milliseconds of a run of each usable bucket
    cost_sources: dict[Bucket, CostSource]
    drift: float  # ratio of the recent batches' times to the buckets' timed costs
    lost_share: float  # share of the time for timings in which other programs had the cores
    timed: bool  # whether every bucket was timed often enough
    compiled: tuple[Bucket, ...]
    covered: bool  # whether every request has a compiled bucket
    ran: dict[Bucket, BucketUse]
    longest_call_s: float  # age of the oldest device call in progress; 0 if there is none
    closing: bool
    threads: int  # number of threads that are alive


class Engine:
    """Batches the sequences of requests and runs the batches on all workers.

    A bucket is the shape of a batch; each worker that has joined has a compiled program for each
    usable bucket. A queued sequence may belong to several requests.

    Any thread may call `submit`. No request starts a compilation: batches use a bucket once it is
    compiled, and a sequence that fits in no compiled bucket waits.

    `widths` gives the number of columns of each output. `max_batch_requests` is the largest number
    of sequences in a batch. `cache_bytes` is the size of the AnswerCache; 0 means no cache.
    `keep_costs` saves the costs of the buckets; it is called when every bucket has enough timings
    for its cost, and when the engine closes. See Warmup for `full_warmup`, `compile_workers` and
    `on_progress`, and Watchdog for `overdue_s`.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
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
        self.workers = tuple(workers)
        self._widths = widths
        self._telemetry = telemetry
        self._max_sequences = max_batch_requests
        self._cache = AnswerCache(cache_bytes, telemetry) if cache_bytes else None
        self._probe_every_s = probe_every_s
        self._queue = RequestQueue(
            max(bucket.tokens for bucket in grid.buckets), workers[0].runner.alignment
        )
        # batches that failed on a worker and wait for another one, with that worker
        self._failed: list[tuple[Batch, Worker]] = []
        self.workers[0].state = "joined"
        # what the first worker has lowered, while other workers have yet to compile it
        self._lowered: dict[Bucket, Any] = {}
        self._ran: dict[Bucket, BucketUse] = {}
        self._ran_tokens = self._ran_s = 0.0  # decaying sums over the recent batches
        self._closing = False
        self._is_traced = False  # whether any request was traced
        self._lock = threading.RLock()
        self._here = threading.Lock()  # held while `compute_here` computes
        self._left_here = True  # whether `close` found that nothing is computed there any more
        self._idle = {worker: threading.Condition(self._lock) for worker in workers}  # idle threads
        self.warmup = Warmup(
            grid,
            self._compile,
            self._needed_length,
            name=name,
            full=full_warmup,
            workers=compile_workers,
            joins=[partial(self._join, worker) for worker in workers[1:]],
            idle_s=lambda: min(worker.scheduler.idle_s for worker in workers),
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
            workers[0].runner,
            workers[0].scheduler,
            costs,
            self._lock,
            telemetry,
            name=name,
            is_bulk_alone=lambda: self._queue.is_bulk_alone(time.monotonic()),
            on_timed=self._keep_costs,
            watch=self._watchdog.watch,
        )
        self._threads = self._serving_threads()
        self._add_gauges()

    def _serving_threads(self) -> list[threading.Thread]:
        """Make the threads of all workers."""
        # one thread more than programs in flight, to write answers while the others run programs
        return [
            threading.Thread(
                target=memory.in_kept_heap,
                args=(partial(self._serve, worker),),
                name=f"worker-{n}-{k}",
                daemon=True,
            )
            for n, worker in enumerate(self.workers)
            for k in range(worker.scheduler.permits + 1)
        ]

    def _add_gauges(self) -> None:
        """Add the sizes of the queues, and the numbers of joined and stuck workers, to the
        metrics."""
        telemetry, queue = self._telemetry, self._queue
        telemetry.add_to(telemetry.queue_size, lambda: queue.inputs)
        telemetry.add_to(telemetry.queue_tokens, lambda: queue.tokens)
        telemetry.add_to(
            telemetry.stuck_workers, lambda: sum(worker.scheduler.stuck for worker in self.workers)
        )
        telemetry.add_to(telemetry.joined_workers, lambda: self._joined)
        for priority, waiting in queue.queues.items():
            telemetry.add_to(
                telemetry.priority_queue_size.labels(priority), lambda of=waiting: of.inputs
            )

    @property
    def ready(self) -> bool:
        """Whether every request can be served: it has a compiled bucket, and a worker is healthy.

        With a full warm-up, all buckets must be compiled, and no worker is joining."""
        return self.warmup.ready and self.healthy

    @property
    def healthy(self) -> bool:
        """Whether some worker has joined and is neither sick nor stuck.

        While another worker is healthy, a sick worker only probes its device. A stuck worker does
        nothing.
        """
        return any(worker.healthy for worker in self.workers)

    @property
    def stuck(self) -> bool:
        """Whether every worker is left out or stuck: a program of this or another model hangs on
        its device.

        Then waiting requests fail and new requests are refused. If the program ends after all, the
        worker is used again.
        """
        return all(worker.scheduler.stuck or worker.state == "left out" for worker in self.workers)

    @property
    def _joined(self) -> int:
        """The number of workers that have joined."""
        return sum(worker.state == "joined" for worker in self.workers)

    @property
    def tokens_per_s(self) -> float:
        """The recent throughput of all joined workers, in useful tokens per second of device time.

        It is 0 before the first batch.
        """
        return self._joined * self._ran_tokens / max(self._ran_s, 1e-6)

    @property
    def temporary_bytes(self) -> int:
        """The most device memory that concurrent runs need besides the parameters, in bytes."""
        worker, compiled = self.workers[0], tuple(self.warmup.compiled)
        return worker.scheduler.permits * max(
            map(worker.runner.temporary_bytes, compiled), default=0
        )

    def restrict(self, buckets: Iterable[Bucket]) -> None:
        """Use only `buckets`, which must be compiled, for batches from now on."""
        with self._lock:
            self._costs.restrict(buckets)
            self._queue.set_longest_row(max(bucket.length for bucket in self._costs.usable))

    def snapshot(self) -> EngineState:
        """Return the current state of the engine."""
        with self._lock:
            now = time.monotonic()
            return EngineState(
                waiting_inputs=self._queue.inputs,
                waiting_tokens=self._queue.tokens,
                queues={
                    name: QueueState(queue.inputs, queue.tokens, self._queue.oldest_s(queue, now))
                    for name, queue in self._queue.queues.items()
                },
                failures=tuple(worker.failures for worker in self.workers),
                stuck=sum(worker.scheduler.stuck for worker in self.workers),
                joined=self._joined,
                costs=self._costs.usable,
                cost_sources={b: self._costs.source_of(b) for b in self._costs.usable},
                drift=self._costs.drift,
                lost_share=self._costs.lost_share,
                timed=self._timer.timed.is_set(),
                compiled=tuple(self.warmup.compiled),
                covered=self.warmup.ready,
                ran=dict(self._ran),
                longest_call_s=max((call.age_s for call in self._watchdog.calls), default=0.0),
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
        """Block until the model is ready.

        Raises TimeoutError after `timeout_s` seconds, XLA's error for a bucket that must be
        compiled, or BackendError if the engine is closed first."""
        self.warmup.wait(timeout_s)

    def submit(
        self,
        work: Work,
        wake: Callable[[], object] | None = None,
        priority: Priority | None = None,
        trace: FutureTrace | None = None,
        call_soon: Callable[[Callable[[], object]], object] | None = None,
    ) -> WorkFuture:
        """Queue one request and return its future.

        `wake` is called once when the future is complete: from an engine thread, or from this
        thread if the cache has all answers. Without a `priority`, a small request is interactive
        and a large request is bulk. Equal sequences that wait at the same time, even in different
        requests, are computed once. `trace` belongs to a request that is traced. An event loop
        gives its `call_soon`, so that it queues all requests that have arrived before an engine
        thread competes with it for the interpreter.

        Raises InvalidInput for an unknown priority, EmptyInput, InputTooLong or TooManySpans for a
        sequence that no bucket can hold, BackendError if the engine is closed or the model could
        not be compiled, and DeviceStuck if every worker is stuck.
        """
        lengths = work.lengths.tolist()
        longest = max(lengths)
        if min(lengths) == 0:
            raise EmptyInput(index=lengths.index(0))
        if longest > self.grid.max_length:
            raise InputTooLong(self.grid.max_length, longest, lengths.index(longest))
        if work.has_spans:
            slots, limit = work.slots.tolist(), self.grid.max_slots
            if max(slots) > limit:
                raise TooManySpans(limit, max(slots), slots.index(max(slots)))
        future = WorkFuture(work, self._widths, wake, trace)
        # removes from the future the sequences that the cache answers
        cached = None if self._cache is None else self._cache.take(future)
        with self._lock:
            if self._closing:
                raise BackendError("the engine is closed")
            if self.warmup.error is not None:
                raise BackendError(NOT_COMPILED)
            if self.stuck:
                raise DeviceStuck
            if future.sequences:
                self._queue.add(future, priority)
                self._is_traced |= trace is not None
                if call_soon is None:
                    self._wake_some()
                else:
                    call_soon(self._wake_some)
        if cached is not None:
            cached.resolve(future.queued_at, seconds=0.0)
        return future

    def compute_here(self, work: Work, priority: Priority | None = None) -> WorkFuture | None:
        """Compute a single short sequence in the calling thread, if nothing waits or runs.

        Returns its complete future, or None for any other request and after a failure; `submit` it
        then. It saves the two changes of threads, 0.1 to 0.2 ms. Only for devices in the host's
        memory: nothing watches the call. It takes no turn at the device and changes nothing that
        threads depend on, so that a thread may be interrupted here.
        """
        worker = self.workers[0]
        is_short = len(work) == 1 and work.tokens > 0 and self._queue.is_small(work)
        is_suited = is_short and priority in (None, "interactive") and self._cache is None
        if not is_suited or worker.runner.is_remote or not worker.healthy:
            return None
        if self._queue.runnable or not worker.scheduler.idle_s or self._here.locked():
            return None
        with self._here:
            try:
                is_open = not self._closing and self.warmup.error is None
                return self._compute(work, worker) if is_open else None
            except Exception:  # the thread of a worker tells the client and the log
                return None

    def _compute(self, work: Work, worker: Worker) -> WorkFuture | None:
        """Compute a single sequence on a worker, without its device's turn. Returns its complete
        future, or None if the result is not finite. Raises the errors of the runner."""
        future = WorkFuture(work, self._widths)
        bucket = choose_bucket(future.sequences, self._costs.usable)
        batch = place(bucket, future.sequences)
        recovery = Recovery(worker.runner, lambda: (), self._telemetry)
        worker.scheduler.note_use()
        answers = recovery.attempt(batch)
        worker.scheduler.note_use()
        if not is_finite(answers).all():
            return None
        with self._lock:
            self._count(batch, recovery.run_s)
        self._observe(batch)
        answers.resolve(future.queued_at, recovery.run_s)
        return future

    def wait_timed(self, timeout_s: float | None = None) -> None:
        """Block until every bucket has enough timings for its cost.

        Buckets are timed while the device is idle, and at a slow rate while only bulk work runs.
        Raises TimeoutError after `timeout_s` seconds.
        """
        if not self._timer.timed.wait(timeout_s):
            raise TimeoutError(f"not every bucket was timed within {timeout_s} s")

    def cancel(self, future: WorkFuture) -> None:
        """Cancel a request: mark its future, and remove its sequences from the queue."""
        with self._lock:
            if not future.cancel():
                return
            self._queue.cancel(future)
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
        self._left_here = self._here.acquire(timeout=max(deadline - time.monotonic(), 0.0))
        if self._left_here:
            self._here.release()
        self._watchdog.stop()
        for call in self._watchdog.calls:  # device calls of threads that did not end in time
            fail_sequences(call.batch.sequences if call.batch else [], closed)
        _join_until([*self.warmup.threads, self._timer.thread, self._watchdog.thread], deadline)
        if was_open:
            self._keep_costs()
        if not any(thread.is_alive() for thread in self.warmup.threads):
            atexit.unregister(self._close_at_exit)

    def free(self) -> None:
        """Free the memory of all workers, after `close`.

        Nothing is freed if a thread has not ended, because it may be in a device call."""
        if any(thread.is_alive() for thread in self._all_threads) or not self._left_here:
            logger.warning("%s: a thread has not ended, so its memory is not freed", self.name)
            return
        for worker in self.workers:
            worker.runner.free()
        self._lowered.clear()
        if self._cache is not None:
            self._cache.clear()

    @property
    def _all_threads(self) -> list[threading.Thread]:
        return [*self._threads, *self.warmup.threads, self._timer.thread, self._watchdog.thread]

    def _close_at_exit(self) -> None:
        """Close the engine when the interpreter ends.

        Waits for the compiling threads without a time limit, because the interpreter aborts if it
        ends while a thread is inside XLA.
        """
        self.close(EXIT_S)
        _join_until(self.warmup.threads, math.inf)

    def _serve(self, worker: Worker) -> None:
        """Serve batches on a worker until the engine is closed and its queue is empty."""
        while self._wait_for_work(worker):
            try:
                self._serve_batch(worker)
            except Exception:
                logger.exception("a worker could not take a batch. This is a bug in jaxembed")
                self._fail_waiting(BackendError(INTERNAL))

    def _serve_batch(self, worker: Worker) -> None:
        """Wait for the worker's device, take a batch (or a probe), run it, and write its answers.

        Returns early if there is no batch. Sequences that fail are run once more on another worker,
        if there is a healthy one. Every other sequence of the batch gets an answer or an error,
        even if an exception is raised.
        """
        batch = None
        try:
            with worker.scheduler.hold(partial(self._urgency, worker), worker.share) as waiter:
                granted_at = time.monotonic()
                batch, is_last_try = self._take_batch(worker)
                if batch is None and worker.sick:
                    batch, is_last_try = self._probe_batch(worker), True
                if batch is None:
                    return
                # a bucket that is no longer used may still have a batch that failed before
                cost_ms = self._costs.usable.get(batch.bucket, 0.0)
                expected_ms = cost_ms + self._costs.host_ms
                worker.scheduler.charge(waiter, expected_ms / 1000)
                started_at = time.monotonic()
                with self._watchdog.watch(waiter, batch.bucket, batch) as call:
                    recovery = Recovery(
                        worker.runner, lambda: self._costs.usable, self._telemetry, call.begin
                    )
                    results = recovery.run(batch)
                ended_at = time.monotonic()
                seconds = ended_at - started_at
            if self._is_traced:
                self._trace(worker, batch, results, started_at, seconds)
            if waiter.overdue:
                logger.warning("%s: the device returned after %.0f s", self.name, seconds)
                return  # the sequences failed when the batch became overdue
            host_s = waiter.took_s * (1 - recovery.run_s / max(ended_at - granted_at, 1e-9))
            self._note(worker, batch, results, waiter, host_s, is_last_try)
            for answers in results if is_last_try else self._leave_failed(worker, batch, results):
                # stored before the client gets its answer and can send the same request again
                if self._cache is not None:
                    self._cache.keep(answers)
                answers.resolve(started_at, seconds)
        except BaseException:  # a thread that ends must not leave its batch unanswered
            if batch is None:
                raise
            logger.exception("a batch could not be answered. This is a bug in jaxembed")
            fail_sequences(batch.sequences, BackendError(INTERNAL))

    def _is_unusable(self, worker: Worker) -> bool:
        """Return whether a worker takes no batches: it has not joined, is stuck, or is sick while
        another is healthy.

        A sick worker would take most of the batches, because its batches fail fast.
        """
        has_joined = worker.state == "joined"
        return not has_joined or worker.scheduler.stuck or (worker.sick and self.healthy)

    def _wait_for_work(self, worker: Worker) -> bool:
        """Wait until a worker has work, and return True; False if the engine closes and no work is
        left. For a sick worker, a probe is due after `probe_every_s` seconds and counts as work."""
        with self._lock:
            probe_at = time.monotonic() + self._probe_every_s if worker.sick else None
            while True:
                has_work = self._has_work(worker) and not self._is_unusable(worker)
                if has_work or self._closing:
                    return has_work
                left_s = None if probe_at is None else probe_at - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return True
                self._idle[worker].wait(left_s)

    def _has_work(self, worker: Worker) -> bool:
        """Return whether a sequence waits that fits in a compiled bucket, or a batch that failed
        before. The caller holds the lock."""
        return self._queue.runnable or any(
            self._repeats(worker, first) for _, first in self._failed
        )

    def _repeats(self, worker: Worker, first: Worker) -> bool:
        """Return whether a worker runs batches that failed on the worker `first`."""
        return worker is not first or not self._healthy_beside(first)

    def _healthy_beside(self, worker: Worker) -> bool:
        """Return whether another worker has joined and is neither sick nor stuck."""
        return any(other.healthy for other in self.workers if other is not worker)

    def _leave_failed(
        self, worker: Worker, batch: Batch, results: Sequence[Answers]
    ) -> Sequence[Answers]:
        """Leave the sequences of a batch that got an error to the other workers, if one of them is
        healthy. Returns the other answers."""
        failed = [s for answers in results if answers.error is not None for s in answers.sequences]
        with self._lock:
            if not failed or self._closing or not self._healthy_beside(worker):
                return results
            batches = place_all(batch.bucket, failed, worker.runner.alignment)
            self._failed += [(again, worker) for again in batches]
            self._wake_all()
        logger.warning("%s: %s run on another device", self.name, counted(len(failed), "sequence"))
        return [answers for answers in results if answers.error is None]

    def _wake_some(self) -> None:
        """Wake idle threads of each worker, at most one for each waiting input: more would only
        slow the others down."""
        with self._lock:
            for idle in self._idle.values():
                idle.notify(self._queue.inputs)

    def _wake_all(self) -> None:
        """Wake the idle threads of all workers. The caller holds the lock."""
        for idle in self._idle.values():
            idle.notify_all()

    def _urgency(self, worker: Worker) -> float:
        """Return how urgently a worker wants its device: the scheduler serves the highest first.

        For a worker with work, or with a probe to run, the urgency is minus the virtual time at
        which its next program begins, so that all models with work get equal device time.
        Interactive work adds BORROWED_S, or it would wait for a batch of each other model. Without
        work the urgency is minus infinity, or infinity when the engine closes, so that the worker's
        threads get the device at once and can end.
        """
        with self._lock:
            if self._has_work(worker) or (worker.sick and not self._closing):
                borrowed_s = BORROWED_S if self._queue.has_interactive else 0.0
                return borrowed_s - worker.scheduler.begin(worker.share)
            return math.inf if self._closing else -math.inf

    def _take_batch(self, worker: Worker) -> tuple[Batch | None, bool]:
        """Take the next batch for a worker: one that failed on another worker, or else one out of
        the queue. Also returns whether its errors are final, because it has run before.

        The batch is None if the worker is unusable, if no waiting sequence fits in a bucket, and
        after an internal error, which fails all waiting sequences."""
        with self._lock:
            if self._is_unusable(worker):
                return None, False
            for k, (batch, first) in enumerate(self._failed):
                if self._repeats(worker, first):
                    del self._failed[k]
                    return batch, True
            try:
                now = time.monotonic()
                costs, limit = self._costs, self._max_sequences
                return self._queue.take(costs.usable, now, limit, costs.host_ms), False
            except Exception:
                logger.exception("no batch could be composed. This is a bug in jaxembed")
                waiting = self._queue.clear()  # still locked: the queue may be inconsistent
        fail_sequences(waiting, BackendError(INTERNAL))
        return None, False

    def _probe_batch(self, worker: Worker) -> Batch | None:
        """Make a batch of one token on the smallest bucket, to test the device of a sick worker.

        Returns None if the worker is stuck, no bucket is compiled, or the engine closes."""
        usable = self._costs.usable
        if worker.scheduler.stuck or not usable or self._closing:
            return None
        work = work_from_encodings(
            [Encoding(np.ones(1, np.int32))], frozenset({worker.runner.primary})
        )
        smallest = min(usable, key=lambda bucket: bucket.tokens)
        return place(smallest, WorkFuture(work, self._widths).sequences)

    def _note(
        self,
        worker: Worker,
        batch: Batch,
        results: Sequence[Answers],
        waiter: Waiter,
        host_s: float,
        is_last_try: bool,
    ) -> None:
        """Record the results of a batch, and its device time `waiter.took_s`, of which the host
        worked `host_s` seconds.

        If no sequence was answered, the worker has one more consecutive failure, unless the batch
        had failed before or was a probe; otherwise its count of failures restarts at 0. The totals
        of the bucket and the metrics count every batch. The throughput counts only batches that
        were answered in one run. The costs count such a batch only if no program of another model
        ran at the same time.
        """
        answered = [answers for answers in results if answers.error is None and answers.sequences]
        tokens = batch.useful_tokens
        with self._lock:
            worker.failures = 0 if answered else worker.failures + (not is_last_try)
            self._count(batch, waiter.took_s)
            if [answers.sequences for answers in answered] == [batch.sequences]:  # not split
                if not waiter.mixed and batch.bucket in self._costs.usable:
                    self._costs.observe(batch.bucket, 1000 * waiter.took_s, 1000 * host_s)
                decay = 1 - 1 / RATE_BATCHES
                self._ran_tokens = decay * self._ran_tokens + tokens
                self._ran_s = decay * self._ran_s + waiter.took_s
        self._observe(batch)

    def _count(self, batch: Batch, device_s: float) -> None:
        """Add a batch to the totals of its bucket. The caller holds the lock."""
        old = self._ran.get(batch.bucket, BucketUse())
        self._ran[batch.bucket] = BucketUse(
            old.runs + 1, old.useful_tokens + batch.useful_tokens, old.device_s + device_s
        )

    def _observe(self, batch: Batch) -> None:
        """Add a batch to the metrics."""
        self._telemetry.batch_size.observe(len(batch.sequences))
        self._telemetry.batch_tokens.observe(batch.useful_tokens)
        self._telemetry.batch_fill.observe(batch.useful_tokens / batch.bucket.tokens)

    def _trace(
        self,
        worker: Worker,
        batch: Batch,
        results: Sequence[Answers],
        started_at: float,
        seconds: float,
    ) -> None:
        """Add the run of a batch to the traces of the requests that it computes.

        The run began at `started_at`, a time.monotonic(), and took `seconds`."""
        futures = dict.fromkeys(
            future for sequence in batch.sequences for future in sequence.futures
        )
        if traces := [future.trace for future in futures if future.trace is not None]:
            run = BatchRun(
                model=self.name,
                bucket=str(batch.bucket),
                fill=batch.useful_tokens / batch.bucket.tokens,
                sequences=len(batch.sequences),
                tokens=batch.useful_tokens,
                replica=self.workers.index(worker),
                failed=all(answers.error is not None for answers in results),
                started_at=started_at,
                ended_at=started_at + seconds,
            )
            traces[0].trace.tracer.trace_batch(run, traces)

    def _compile(self, bucket: Bucket) -> None:
        """Compile a bucket on every joined worker, then let batches use it and wake the idle
        threads.

        The first worker compiles it before the others, which on GPUs then find the program in the
        compile cache. The threads of Warmup call this method. If the compiler raises an error, this
        method raises it, and no batch uses the bucket.
        """
        lowered = self.workers[0].runner.lower(bucket, for_any=len(self.workers) > 1)
        missing, compiled = [self.workers[0]], set[Worker]()
        while missing:
            _finish_all([worker.runner.start(lowered) for worker in missing])
            compiled.update(missing)
            with self._lock:
                missing = [
                    worker
                    for worker in self.workers
                    if worker.state == "joined" and worker not in compiled
                ]
                if not missing:
                    self._lowered[bucket] = lowered
                    self._costs.add(bucket)
                    self._queue.set_longest_row(max(b.length for b in self._costs.usable))
                    self._forget_lowered()
                    self._wake_all()

    def _join(self, worker: Worker) -> bool:
        """Compile all usable buckets on a worker, and let it take batches from then on.

        Returns whether the worker has joined. If the compiler raises an error, it is logged, and
        the worker is left out.
        """
        compiled: set[Bucket] = set()
        while True:
            with self._lock:
                missing = {b: self._lowered[b] for b in self._lowered if b not in compiled}
                if not missing:
                    worker.state = "joined"
                    self._forget_lowered()
                    self._wake_all()
                    return True
            try:
                _finish_all([worker.runner.start(lowered) for lowered in missing.values()])
            except Exception:
                if not self._closing:  # when the interpreter ends, compilations are cancelled
                    logger.exception(
                        "%s: the programs of replica %d do not compile: it is left out",
                        self.name,
                        self.workers.index(worker),
                    )
                with self._lock:
                    worker.state = "left out"
                    self._forget_lowered()
                return False
            compiled.update(missing)

    def _forget_lowered(self) -> None:
        """Free the lowered programs if no worker is joining. The caller holds the lock."""
        if not any(worker.state == "joining" for worker in self.workers):
            self._lowered.clear()

    def _fail_waiting(self, error: Exception) -> None:
        """Fail all waiting requests with `error`."""
        with self._lock:
            waiting = [
                *self._queue.clear(),
                *(s for batch, _ in self._failed for s in batch.sequences),
            ]
            self._failed.clear()
        fail_sequences(waiting, error)

    def _fail_overdue(self, call: WatchedCall) -> None:
        """Fail the sequences of a batch whose device call is overdue, with a BackendError.

        The watchdog calls this method once for each overdue device call, after it has taken the
        device out of use until the call returns. A device call without a batch times a bucket, and
        is only logged.
        """
        text = "%s: %s is overdue: its device runs nothing else until the call returns"
        if call.batch is None:
            logger.error(text, self.name, f"the timing of bucket {call.bucket}")
            return
        reference, description = reference_to(call.batch)
        logger.error(text, self.name, description)
        self._telemetry.failed_batches.inc()
        message = f"the device did not return in time from this batch (reference {reference})"
        fail_sequences(call.batch.sequences, BackendError(message))

    def _check_stuck(self) -> None:
        """Fail all waiting requests if every worker is stuck; otherwise wake threads if work waits.

        The watchdog calls this method once a second, because requests may have been queued just
        before the last device got stuck, and threads may sleep since their device was stuck.
        """
        if self.stuck:
            self._fail_waiting(DeviceStuck())
            return
        with self._lock:
            if self._queue.runnable or self._failed:
                self._wake_all()

    def _needed_length(self) -> int | None:
        """Return the row length for the oldest sequence that fits in no compiled bucket, or None.

        Warmup compiles a bucket of this length or more next."""
        with self._lock:
            return self._queue.needed_length


def _finish_all(started: Sequence[Callable[[], None]]) -> None:
    """Wait for programs whose compilation has started. Raises the errors of XLA."""
    for finish in started:
        finish()
    memory.trim()


def _join_until(threads: Sequence[threading.Thread], deadline: float) -> None:
    """Wait until all started threads have ended, but not beyond `deadline`.

    `deadline` is a value of time.monotonic(), or infinity.
    """
    for thread in threads:
        if thread.ident is not None:
            thread.join(min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
