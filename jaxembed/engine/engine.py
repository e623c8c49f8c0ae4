"""One queue, and threads that pull from it: sequences in, tickets answered.

Life of a sequence: `submit` puts it in a lane; a thread of a free replica takes the device's turn,
then the lanes choose a batch out of what waits at that moment, the replica runs it, and the answers
are written into the tickets. There are no timers: batches grow while the devices are busy.
"""

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import numpy as np

from jaxembed import memory
from jaxembed.engine.batch import HOST_MS, Batch, place
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.costs import BucketCosts, CostSource
from jaxembed.engine.lanes import Lanes
from jaxembed.engine.recovery import Answers, Recovery, reference_to
from jaxembed.engine.replica import Runner
from jaxembed.engine.ticket import Entry, Ticket
from jaxembed.engine.timing import BucketTimer
from jaxembed.engine.turn import Claim, DeviceTurn, Share
from jaxembed.engine.warmup import Warmup
from jaxembed.engine.watchdog import OVERDUE_S, Watchdog, WatchedCall
from jaxembed.errors import (
    BackendError,
    DeviceStuck,
    EmptyInput,
    InputTooLong,
    NotFinite,
    TooManySpans,
)
from jaxembed.inputs import Priority
from jaxembed.outputs import OutputName
from jaxembed.telemetry import Telemetry
from jaxembed.work import Encoding, Work, work_of

logger = logging.getLogger(__name__)

FAILURES_TO_SICK = 3
EXIT_S = 5.0  # for the threads of an engine nobody closed, when the interpreter ends
PROBE_EVERY_S = 1.0
RATE_OVER = 10  # batches, about
INTERNAL = "an internal error, see the server's log"
NOT_COMPILED = "the model could not be compiled"
BORROWED_S = 0.3  # of device time, by a model with interactive work: two batches of a CPU


@dataclass(eq=False)
class Seat:
    """A runner, the turn of its devices and what it has had of them."""

    runner: Runner
    turn: DeviceTurn
    failures: int = 0  # batches in a row, under the engine's lock
    share: Share = field(default_factory=Share)

    @property
    def sick(self) -> bool:
        return self.failures >= FAILURES_TO_SICK

    @property
    def stuck(self) -> bool:
        """Whether its device does not return from a call: of this model or of one that shares it.
        It takes no work until then."""
        return self.turn.stuck


@dataclass(frozen=True)
class BucketUse:
    """What the batches of one bucket come to, since the start."""

    runs: int = 0
    useful_tokens: int = 0
    device_s: float = 0.0

    def __add__(self, other: "BucketUse") -> "BucketUse":
        return BucketUse(
            self.runs + other.runs,
            self.useful_tokens + other.useful_tokens,
            self.device_s + other.device_s,
        )

    def __sub__(self, other: "BucketUse") -> "BucketUse":
        return BucketUse(
            self.runs - other.runs,
            self.useful_tokens - other.useful_tokens,
            self.device_s - other.device_s,
        )


@dataclass(frozen=True)
class LaneState:
    """What waits in one lane; what is the same counts as often as it was asked for."""

    inputs: int
    tokens: int
    oldest_s: float  # the wait of the oldest request so far


@dataclass(frozen=True)
class EngineState:
    """What an engine holds and does at one moment."""

    waiting_inputs: int  # what is the same counts as often as it was asked for
    waiting_tokens: int
    lanes: dict[Priority, LaneState]
    failures: tuple[int, ...]  # batches that failed in a row, of each seat
    shares: tuple[float, ...]  # seconds on the device's clock that each seat has had
    costs: dict[Bucket, float]  # milliseconds of a run of each bucket that may be used
    cost_sources: dict[Bucket, CostSource]
    drift: float  # by which every cost is multiplied, see BucketCosts
    spread: float  # of the timings of a bucket
    timed: bool  # every bucket often enough
    ran: dict[Bucket, BucketUse]
    longest_call_s: float  # the age of the oldest device call under way
    closing: bool
    threads: int  # alive


class Engine:
    """Batches sequences and runs them on every seat.

    `submit` may be called from any thread. Nothing compiles on its way: buckets are used as they
    become ready, and a sequence that fits none yet waits.
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
        full_warmup: bool = False,
        compile_workers: int = 2,
        probe_every_s: float = PROBE_EVERY_S,
        overdue_s: float = OVERDUE_S,
        on_progress: Callable[[int, int], None] | None = None,
        keep_costs: Callable[[BucketCosts], object] = lambda costs: None,
    ):
        """`widths` are those of the model's outputs, in floats. `keep_costs` is called when every
        bucket was timed often enough, and when the engine closes."""
        self.grid = grid
        self.name = name  # of the model, for the log
        self._costs = costs
        self._keep_costs = partial(keep_costs, costs)
        self.seats = tuple(seats)
        self._widths = widths
        self._telemetry = telemetry
        self._most = max_batch_requests
        self._probe_every_s = probe_every_s
        self._lanes = Lanes(max(bucket.tokens for bucket in grid.buckets))
        self._ran: dict[Bucket, BucketUse] = {}
        self._ran_tokens = self._ran_s = 0.0  # of late, useful tokens and seconds of batches
        self._closing = False
        self._lock = threading.RLock()
        self._idle = {seat: threading.Condition(self._lock) for seat in seats}  # who waits for work
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
            on_finish=lambda: self._timer.start(),
        )
        self._watchdog = Watchdog(
            lambda bucket: self._costs.usable.get(bucket, 0.0) / 1000,
            self._fail_overdue,
            self._look,
            overdue_s,
        )
        self._timer = self._timer_of(seats[0])
        # one thread more than programs in flight: it settles answers while the others run
        self._threads = [
            self._thread(seat, f"seat-{n}-{k}")
            for n, seat in enumerate(seats)
            for k in range(seat.turn.permits + 1)
        ]
        self._show_gauges()

    @property
    def ready(self) -> bool:
        """Compiled far enough to serve anything, and not failing batch after batch."""
        return self.warmup.ready and self.healthy

    @property
    def healthy(self) -> bool:
        """Whether some seat answers: one that fails batch after batch only probes meanwhile, and
        one that is stuck does nothing."""
        return not all(seat.sick or seat.stuck for seat in self.seats)

    @property
    def stuck(self) -> bool:
        """Whether no seat returns from the call it is in. What waits fails and what comes is
        refused; if a call does return after all, its seat is in use again."""
        return all(seat.stuck for seat in self.seats)

    @property
    def tokens_per_s(self) -> float:
        """Useful tokens of the latest batches over the seconds that they took of their devices, of
        all devices together; 0 before the first batch."""
        return len(self.seats) * self._ran_tokens / max(self._ran_s, 1e-6)

    def restrict(self, buckets: Iterable[Bucket]) -> None:
        """Let batches use only these of the compiled buckets, from now on."""
        with self._lock:
            self._costs.restrict(buckets)
            self._lanes.lengthen(max(bucket.length for bucket in self._costs.usable))

    def snapshot(self) -> "EngineState":
        """What the engine holds and does at this moment."""
        spread = self._costs.spread  # sorts every timing: not under the lock
        calls = self._watchdog.calls
        with self._lock:
            return EngineState(
                waiting_inputs=self._lanes.inputs,
                waiting_tokens=self._lanes.tokens,
                lanes={name: self._lane_state(name) for name in get_args(Priority)},
                failures=tuple(seat.failures for seat in self.seats),
                shares=tuple(seat.share.end for seat in self.seats),
                costs=self._costs.usable,
                cost_sources={b: self._costs.source_of(b) for b in self._costs.usable},
                drift=self._costs.drift,
                spread=spread,
                timed=self._timer.timed.is_set(),
                ran=dict(self._ran),
                longest_call_s=max((call.age_s for call in calls), default=0.0),
                closing=self._closing,
                threads=sum(thread.is_alive() for thread in self._all_threads),
            )

    def _lane_state(self, name: Priority) -> LaneState:
        lanes, oldest_at = self._lanes, self._lanes.oldest_of(name)
        oldest_s = 0.0 if oldest_at is None else time.monotonic() - oldest_at
        return LaneState(lanes.inputs_of(name), lanes.tokens_of(name), oldest_s)

    def start(self) -> None:
        """Start compiling and serving."""
        atexit.register(self._leave)
        self.warmup.start()
        self._watchdog.start()
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        work: Work,
        wake: Callable[[], object] | None = None,
        priority: Priority | None = None,
    ) -> Ticket:
        """Queue one request. `wake` is called once, from an engine thread, when it is answered.

        Without a priority a small request is interactive and a large one bulk. A sequence that
        waits already, for this request or another, is computed once for all. Raises EmptyInput,
        InputTooLong, TooManySpans, BackendError and DeviceStuck.
        """
        self._check(work)
        ticket = Ticket(work, self._widths, wake)
        with self._lock:
            if self._closing:
                raise BackendError("the engine is closed")
            if self.warmup.error is not None:
                raise BackendError(NOT_COMPILED)
            if self.stuck:
                raise DeviceStuck
            self._lanes.add(ticket, priority)
            for idle in self._idle.values():
                idle.notify(self._lanes.inputs)  # more threads would only be in its way
        return ticket

    def _check(self, work: Work) -> None:
        """Raise the error of the first sequence that no bucket of the grid holds."""
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

    def wait_timed(self, timeout_s: float | None = None) -> None:
        """Block until every bucket was timed. Needs times in which nothing runs. Raises
        TimeoutError."""
        if not self._timer.timed.wait(timeout_s):
            raise TimeoutError(f"not every bucket was timed within {timeout_s} s")

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for the ticket: what is queued of it will not run."""
        with self._lock:
            if not ticket.cancel():
                return
            self._lanes.cancel(ticket)
        self._telemetry.cancelled_requests.inc()

    def close(self, timeout_s: float = 20.0) -> None:
        """Finish the queue, stop the threads. What waits for a bucket not compiled yet fails, and
        what is not answered when the time is up."""
        self.warmup.stop()
        self._timer.stop()
        with self._lock:
            was_open, self._closing = not self._closing, True
            self._wake_all()
        deadline = time.monotonic() + timeout_s
        _join(self._threads, deadline)
        closed = BackendError("the engine is closed")
        self._fail_waiting(closed)
        self._watchdog.stop()
        for call in self._watchdog.calls:  # its thread did not end in time
            _fail(call.batch.entries if call.batch else [], closed)
        _join([*self.warmup.threads, self._timer.thread, self._watchdog.thread], deadline)
        if was_open:
            self._keep_costs()
        if not any(thread.is_alive() for thread in self.warmup.threads):
            atexit.unregister(self._leave)

    @property
    def _all_threads(self) -> list[threading.Thread]:
        others = [self._timer.thread, self._watchdog.thread]
        return [*self._threads, *self.warmup.threads, *others]

    def _leave(self) -> None:
        """The interpreter ends: a thread that is still inside XLA then aborts it."""
        self.close(EXIT_S)
        _join(self.warmup.threads, math.inf)

    def _timer_of(self, seat: Seat) -> BucketTimer:
        return BucketTimer(
            seat.runner,
            seat.turn,
            self._costs,
            self._lock,
            self._telemetry,
            name=self.name,
            is_bulk_alone=self._is_bulk_alone,
            on_timed=self._keep_costs,
            watch=self._watchdog.watch,
        )

    def _show_gauges(self) -> None:
        telemetry = self._telemetry
        telemetry.queue_size.set_function(lambda: self._lanes.inputs)
        telemetry.queue_tokens.set_function(lambda: self._lanes.tokens)
        telemetry.stuck_seats.set_function(lambda: sum(seat.stuck for seat in self.seats))
        for priority in get_args(Priority):
            size = partial(self._lanes.inputs_of, priority)
            telemetry.lane_size.labels(priority).set_function(size)

    def _thread(self, seat: Seat, name: str) -> threading.Thread:
        serve = partial(self._serve, seat)
        return threading.Thread(target=memory.in_kept_heap, args=(serve,), name=name, daemon=True)

    def _serve(self, seat: Seat) -> None:
        """A thread's life: wait, take the device's turn, take a batch, run it, settle it."""
        while self._wait_for_work(seat):
            try:
                self._serve_batch(seat)
            except Exception:
                logger.exception("the turn could not be had. This is a bug in jaxembed")
                self._fail_waiting(BackendError(INTERNAL))

    def _serve_batch(self, seat: Seat) -> None:
        """Take a batch in the device's turn and settle it: each of its entries is answered or
        failed, whatever is raised."""
        batch = None
        try:
            with seat.turn.hold(lambda: self._urgency(seat), seat.share) as claim:
                batch = None if self._is_out(seat) else self._take()
                batch = batch or self._probe(seat)
                if batch is None:
                    return
                seat.turn.charge(claim, (self._costs.usable[batch.bucket] + HOST_MS) / 1000)
                started_at = time.monotonic()
                with self._watchdog.watch(claim, batch.bucket, batch) as call:
                    results = self._recovery(seat, call).run(batch)
                seconds = time.monotonic() - started_at
            if claim.overdue:
                logger.warning("%s: the device returned after %.0f s", self.name, seconds)
                return  # those who waited were told
            self._note(seat, batch, results, claim)
            for answers in results:
                _settle(answers, started_at, seconds)
        except BaseException:  # a thread must not take its batch with it
            if batch is None:
                raise
            logger.exception("a batch could not be run or settled. This is a bug in jaxembed")
            _fail(batch.entries, BackendError(INTERNAL))

    def _recovery(self, seat: Seat, call: WatchedCall) -> Recovery:
        return Recovery(seat.runner, lambda: self._costs.usable, self._telemetry, call.begin)

    def _is_out(self, seat: Seat) -> bool:
        """Whether a seat is stuck, or fails while another is well: failing fast, it would take most
        batches."""
        return seat.stuck or (seat.sick and self.healthy)

    def _wait_for_work(self, seat: Seat) -> bool:
        """Wait for something to run; False when the engine is closed and the queue empty."""

        def has_work() -> bool:
            return self._lanes.runnable and not self._is_out(seat)

        with self._lock:
            timeout_s = self._probe_every_s if seat.sick else None
            self._idle[seat].wait_for(lambda: self._closing or has_work(), timeout_s)
            return not self._closing or has_work()

    def _wake_all(self) -> None:
        for idle in self._idle.values():
            idle.notify_all()

    def _urgency(self, seat: Seat) -> float:
        """The model whose next program begins first on the turn's clock is the most urgent, so that
        all that have work get equal time, however much of it they have. A probe is work too. For
        interactive work a model goes ahead of its time, else it waited for one batch of each other
        model."""
        with self._lock:
            if self._lanes.runnable or (seat.sick and not self._closing):
                ahead = BORROWED_S if self._lanes.has_interactive else 0.0
                return ahead - seat.turn.begin(seat.share)
            return self._idle_urgency()

    def _idle_urgency(self) -> float:
        """After everybody else; before them when the engine closes, for it only leaves."""
        return math.inf if self._closing else -math.inf

    def _take(self) -> Batch | None:
        """Take the next batch out of the lanes. None if nothing waits that a bucket holds."""
        with self._lock:
            try:
                return self._lanes.take(self._costs.usable, time.monotonic(), self._most)
            except Exception:
                logger.exception("no batch could be composed. This is a bug in jaxembed")
                waiting = self._lanes.clear()  # before anybody sees lanes that are half changed
        _fail(waiting, BackendError(INTERNAL))
        return None

    def _probe(self, seat: Seat) -> Batch | None:
        """One token on the smallest bucket when batches have failed in a row, to see whether the
        device is well again."""
        usable = self._costs.usable
        if not seat.sick or seat.stuck or not usable or self._closing:
            return None
        work = work_of([Encoding(np.ones(1, np.int32))], frozenset({seat.runner.primary}))
        ticket = Ticket(work, self._widths)
        return place(min(usable, key=lambda bucket: bucket.tokens), ticket.entries)

    def _note(self, seat: Seat, batch: Batch, results: Sequence[Answers], claim: Claim) -> None:
        """Count a batch that was run, and what it took of the device."""
        answered = [answers for answers in results if answers.error is None and answers.entries]
        with self._lock:
            seat.failures = 0 if answered else seat.failures + 1
            use = BucketUse(1, batch.useful_tokens, claim.took_s)
            self._ran[batch.bucket] = self._ran.get(batch.bucket, BucketUse()) + use
            if [answers.entries for answers in answered] == [batch.entries]:  # as it was placed
                if not claim.mixed and batch.bucket in self._costs.usable:
                    self._costs.observe(batch.bucket, 1000 * claim.took_s)
                kept = 1 - 1 / RATE_OVER
                self._ran_tokens = kept * self._ran_tokens + batch.useful_tokens
                self._ran_s = kept * self._ran_s + claim.took_s
        self._telemetry.batch_size.observe(len(batch.entries))
        self._telemetry.batch_tokens.observe(batch.useful_tokens)
        self._telemetry.batch_fill.observe(batch.fill)

    def _compile(self, bucket: Bucket) -> None:
        """Compile a bucket on every seat, and only then let batches use it."""
        for seat in self.seats:
            seat.runner.compile(bucket)
        with self._lock:
            self._costs.add(bucket)
            self._lanes.lengthen(max(bucket.length for bucket in self._costs.usable))
            self._wake_all()

    def _is_bulk_alone(self) -> bool:
        """Whether bulk work waits and nothing else has for a while."""
        with self._lock:
            return self._lanes.is_bulk_alone(time.monotonic())

    def _fail_waiting(self, error: Exception) -> None:
        """Nothing that waits will be answered: tell those who wait."""
        with self._lock:
            waiting = self._lanes.clear()
        _fail(waiting, error)

    def _fail_overdue(self, call: WatchedCall) -> None:
        """A device does not return from a call: tell those who wait for it."""
        text = "%s: %s is overdue: nothing more runs on its device until it returns"
        if call.batch is None:
            logger.error(text, self.name, f"the timing of bucket {call.bucket}")
            return
        reference, words = reference_to(call.batch)
        logger.error(text, self.name, words)
        self._telemetry.failed_batches.inc()
        failure = f"the device did not return in time from this batch (reference {reference})"
        _fail(call.batch.entries, BackendError(failure))

    def _look(self) -> None:
        """Once a second: fail what came to wait before the last device got stuck, and wake threads
        that went to sleep while theirs was."""
        if self.stuck:
            self._fail_waiting(DeviceStuck())
            return
        with self._lock:
            if self._lanes.runnable:
                self._wake_all()

    def _needed_length(self) -> int | None:
        """The length of the oldest sequence that no compiled bucket holds."""
        with self._lock:
            return self._lanes.needed_length


def _join(threads: Sequence[threading.Thread], deadline: float) -> None:
    for thread in threads:
        if thread.ident is not None:  # it was started
            left_s = deadline - time.monotonic()
            thread.join(None if math.isinf(left_s) else max(0.0, left_s))


def _settle(answers: Answers, started_at: float, seconds: float) -> None:
    """Write the answers into their tickets, in one step for each ticket."""
    by_ticket: dict[Ticket, tuple[list[int], list[int]]] = {}
    for k, entry in enumerate(answers.entries):
        for ticket, index in entry.claims.items():
            if ticket not in by_ticket:
                by_ticket[ticket] = ([], [])
            chosen, places = by_ticket[ticket]
            chosen += [k] * len(index)
            places += index
    for ticket, (chosen, places) in by_ticket.items():
        at = np.array(places)
        ticket.queue_s[at] = started_at - ticket.queued_at
        ticket.inference_s[at] = seconds
        if answers.error is not None:
            ticket.fail(places, _named(answers.error, places))
            continue
        ticket.answer(at, answers.values_of(chosen, ticket.work.outputs))


def _fail(entries: Iterable[Entry], error: Exception) -> None:
    for entry in entries:
        for ticket, index in entry.claims.items():
            ticket.fail(index, error)


def _named(error: Exception, places: list[int]) -> Exception:
    """Whose text it is at whom the error lies, for the one who asked."""
    return NotFinite(f"input {min(places)}: {error}") if isinstance(error, NotFinite) else error
