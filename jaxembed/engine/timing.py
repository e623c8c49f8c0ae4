"""Times buckets: a thread that does it while nothing waits, and what a timing is."""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Barrier, Thread

import numpy as np

from jaxembed import memory
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.costs import BucketCosts
from jaxembed.engine.replica import Runner
from jaxembed.engine.turn import Claim, DeviceTurn
from jaxembed.models.tokens import PackedTokens
from jaxembed.telemetry import Telemetry

logger = logging.getLogger(__name__)

TIMING_S = 0.03  # at least, of runs of a bucket that make one timing
MOST_RUNS = 16  # of one timing
SEGMENT = 20  # tokens of a sequence in a timed bucket: across tiles of 16, as real ones lie
LULL = 4.0  # times as long as a run takes the device must have been idle before one
SHORTEST_LULL_S = 0.02
LOOK_S = 0.05  # between looks whether the device is idle
WHILE_IDLE, BESIDE_BULK = -math.inf, math.inf  # urgencies
BULK_SHARE = 0.01  # of the time, while bulk work leaves none idle
AGAIN_S = 60.0  # between timings of buckets that were all timed often enough


class BucketTimer:
    """Times the buckets of one engine on one device.

    It runs a bucket once at a time and gives the turn back in between, so that what comes waits for
    one run at most; and it begins only after the device has been idle for several times as long. A
    timing that is interrupted or hangs is dropped. Bulk work that never ends would keep it from
    ever timing anything: beside that alone, which `is_bulk_alone` tells, it takes a hundredth of
    the time.

    `on_timed` is called once every bucket was timed often enough, and `timed` is set; after that
    one bucket is timed again now and then. A run is inside `watch`.
    """

    def __init__(
        self,
        runner: Runner,
        turn: DeviceTurn,
        costs: BucketCosts,
        lock: threading.RLock,
        telemetry: Telemetry,
        *,
        name: str,
        is_bulk_alone: Callable[[], bool],
        on_timed: Callable[[], object] = lambda: None,
        watch: Callable[[Claim, Bucket], AbstractContextManager] = lambda *run: nullcontext(),
    ):
        self._runner = runner
        self._turn = turn
        self._costs = costs
        self._lock = lock  # of the costs
        self._telemetry = telemetry
        self._name = name
        self._is_bulk_alone = is_bulk_alone
        self._on_timed = on_timed
        self._watch = watch
        self._beside_bulk_at = 0.0  # time.monotonic() from which on a run may be
        self._stop = threading.Event()
        self.timed = threading.Event()
        self._again = 0  # timings after every bucket was timed often enough
        self.thread = Thread(target=self._work, name="time-buckets", daemon=True)

    def start(self) -> None:
        """Begin; until `stop` it times each bucket again now and then."""
        self.thread.start()

    def stop(self) -> None:
        """Time nothing more."""
        self._stop.set()

    def _work(self) -> None:
        pair = Together(self._turn.permits)
        try:
            while not self._stop.is_set():
                bucket = self._next()
                if bucket is None:
                    continue
                try:
                    self._time(bucket, pair)
                except Exception:  # batches on it will say so to those who wait
                    with self._lock:
                        self._costs.fail(bucket)
                    logger.warning(
                        "%s: bucket %s could not be timed", self._name, bucket, exc_info=True
                    )
                    self._stop.wait(AGAIN_S)
        finally:
            pair.close()

    def _next(self) -> Bucket | None:
        """The bucket to time now; one that was timed often enough comes after a long wait only."""
        with self._lock:
            bucket, usable = self._costs.untimed(), sorted(self._costs.usable)
        if bucket is not None:
            return bucket
        if usable and not self.timed.is_set():
            logger.info("%s: %d buckets timed", self._name, len(usable))
            self.timed.set()
        if self._stop.wait(AGAIN_S) or not usable:
            return None
        self._again += 1
        return usable[self._again % len(usable)]

    def _time(self, bucket: Bucket, pair: "Together") -> None:
        """One timing, unless it is interrupted. The first of several runs finds cold caches and
        does not count; beside bulk work caches are warm and one run is enough."""
        planes = full_planes(bucket, SEGMENT)
        runs: list[float] = []
        while not runs or (sum(runs) < TIMING_S and len(runs) < MOST_RUNS):
            urgency = self._urgency(bucket)
            if urgency is None:
                self._stop.wait(LOOK_S)
                return
            with self._turn.hold(lambda urgency=urgency: urgency, whole=True) as claim:
                if self._stop.is_set():
                    return
                with self._watch(claim, bucket):
                    runs.append(pair.run(self._runner, bucket, planes))
            if claim.overdue:  # how long it hung says nothing of the bucket
                raise TimeoutError("the run was overdue")
            if urgency == BESIDE_BULK:
                runs = runs[-1:]
                self._beside_bulk_at = time.monotonic() + runs[0] * self._turn.permits / BULK_SHARE
                break
        counted = runs[1:] or runs
        with self._lock:
            was_lacking = self._costs.untimed() is not None
            self._costs.record(bucket, 1000 * sum(counted) / len(counted))
            is_timed = was_lacking and self._costs.untimed() is None
        self._telemetry.bucket_timings.inc()
        if is_timed:
            self._on_timed()

    def _urgency(self, bucket: Bucket) -> float | None:
        """That of a run of the bucket now: WHILE_IDLE if it is likely to end before the next
        request comes. None if it must not be."""
        expected_s = self._costs.usable.get(bucket, 0.0) / 1000
        if self._turn.idle_s > max(LULL * expected_s, SHORTEST_LULL_S):
            return WHILE_IDLE
        if self._is_bulk_alone() and time.monotonic() > self._beside_bulk_at:
            return BESIDE_BULK
        return None


class Together:
    """Threads that run one bucket at the same time, as the engine's threads do."""

    def __init__(self, count: int):
        self._begin, self._end = Barrier(count + 1), Barrier(count + 1)
        self._count = count
        self._call: Callable[[], object] = lambda: None
        self._per_s: list[float] = []
        self._errors: list[Exception] = []
        self._seconds = 0.0
        self._threads = [
            Thread(target=memory.in_kept_heap, args=(self._work,), name=f"timing-{k}", daemon=True)
            for k in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(
        self, runner: Runner, bucket: Bucket, planes: np.ndarray, seconds: float = 0.0
    ) -> float:
        """Seconds of the device for a run: each thread runs the bucket once, or again and again for
        so many seconds, and what each made in its time adds up. Raises what the runner raises."""
        self._call = lambda: runner.run(bucket, planes, (runner.primary,))
        self._seconds = seconds
        self._per_s, self._errors = [], []
        self._begin.wait()
        self._end.wait()
        if self._errors:
            raise self._errors[0]
        return 1 / sum(self._per_s)

    def close(self) -> None:
        """End the threads."""
        self._begin.abort()

    def _work(self) -> None:
        while True:
            try:
                self._begin.wait()
            except threading.BrokenBarrierError:
                return
            count, took = 0, 0.0
            start = time.perf_counter()
            try:
                while not count or (took < self._seconds and not self._errors):
                    self._call()
                    count, took = count + 1, time.perf_counter() - start
            except Exception as error:
                self._errors.append(error)
            self._per_s.append(count / max(took, 1e-9))
            self._end.wait()


def milliseconds(
    runner: Runner,
    bucket: Bucket,
    together: int = 1,
    seconds: float = TIMING_S,
    planes: np.ndarray | None = None,
) -> float:
    """Of a bucket on the device, copies to and from it included, of `planes` or of short sequences:
    kernels that skip what lies in other sequences take longer for long ones, but as much longer in
    any bucket. For whoever has the device for himself. Raises what the runner raises."""
    pair = Together(together)
    try:
        filled = full_planes(bucket, SEGMENT) if planes is None else planes
        return 1000 * pair.run(runner, bucket, filled, seconds)
    finally:
        pair.close()


def full_planes(bucket: Bucket, segment: int) -> np.ndarray:
    """A full bucket as `Runner.run` takes it, int32 `[planes, rows, length]`: every row sequences
    of so many tokens, one after the other, the last one cut."""
    segment = max(segment, -(-bucket.length // bucket.slots))
    planes = np.zeros((PackedTokens.PLANES, bucket.rows, bucket.length), np.int32)
    ids, positions, segments, _, bounds = planes
    place = np.arange(bucket.length)
    ids[:], positions[:] = 1, place % segment
    segments[:] = place // segment + 1
    starts = place[::segment]
    bounds[:, : len(starts)] = starts
    ends = np.minimum(starts + segment, bucket.length)
    bounds[:, bucket.slots : bucket.slots + len(starts)] = ends
    return planes
