"""Times buckets: in a background thread of an engine, or at once on an otherwise unused device."""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from threading import Barrier, Thread

import numpy as np

from jaxembed import memory
from jaxembed.engine import compiles
from jaxembed.engine.autotune.costs import BucketCosts
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Runner
from jaxembed.engine.scheduler import DeviceScheduler, Waiter
from jaxembed.models.tokens import PackedTokens
from jaxembed.observability.metrics import Telemetry
from jaxembed.platform.cores import CpuTimes, core_count, timed

logger = logging.getLogger(__name__)

TIMING_S = 0.03  # smallest total time of the runs of a timing
MAX_RUNS = 16  # largest number of runs of a timing
SEGMENT = 20  # tokens of a sequence in a timed bucket: not aligned to tiles of 16, like real ones
LULL = 4.0  # before a run, the device must have been idle for this multiple of its cost
SHORTEST_LULL_S = 0.02  # the device must have been idle for at least this long
# and nothing may have been compiled for this long: compilations take cores, so that timings of
# large buckets are too long
COMPILE_LULL_S = 0.5
LOOK_S = 0.05  # seconds between two checks whether the device is idle
# The urgency with which a run waits for the device: after all requests while the device is idle, or
# before all bulk work.
WHILE_IDLE, BESIDE_BULK = -math.inf, math.inf
BULK_SHARE = 0.01  # share of the time for timings while bulk work never ends
AGAIN_S = 60.0  # seconds between timings once every bucket has enough timings for its cost


class BucketTimer:
    """Times the buckets of one engine on one device, in a thread.

    A timing is the mean of several runs. A run starts only after the device has been idle for
    several times as long as the run takes, and while the process compiles nothing. After a run
    the device is free again, so that a request waits for one run at most. A timing that is
    interrupted or hangs is dropped. While only bulk work runs (`is_bulk_alone`), the device is not
    idle, and timings take a hundredth of the time.

    When every bucket has enough timings for its cost, `on_timed` is called and `timed` is set.
    After that, one bucket is timed again every AGAIN_S seconds. Each run is made within the context
    manager `watch(waiter, bucket)`. The thread holds `lock` to use `costs` and `is_bulk_alone`.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: DeviceScheduler,
        costs: BucketCosts,
        lock: threading.RLock,
        telemetry: Telemetry,
        *,
        name: str,
        is_bulk_alone: Callable[[], bool],
        on_timed: Callable[[], object] = lambda: None,
        watch: Callable[[Waiter, Bucket], AbstractContextManager] = lambda *run: nullcontext(),
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._costs = costs
        self._lock = lock
        self._telemetry = telemetry
        self._name = name
        self._is_bulk_alone = is_bulk_alone
        self._on_timed = on_timed
        self._watch = watch
        self._cores = core_count()
        self._beside_bulk_at = 0.0  # time.monotonic() from which the next run beside bulk may start
        self._stop = threading.Event()
        self.timed = threading.Event()
        self.thread = Thread(target=self._work, name="time-buckets", daemon=True)

    def stop(self) -> None:
        """End the thread after its current run, without waiting for it."""
        self._stop.set()

    def _work(self) -> None:
        """Time one bucket after the other until `stop` is called."""
        repeats = 0  # number of timings since every bucket has enough timings
        with closing(ConcurrentRuns(self._scheduler.permits)) as concurrent:
            while not self._stop.is_set():
                with self._lock:
                    bucket, usable = self._costs.untimed(), sorted(self._costs.usable)
                if bucket is None:
                    if usable and not self.timed.is_set():
                        logger.info("%s: %d buckets timed", self._name, len(usable))
                        self.timed.set()
                    if self._stop.wait(AGAIN_S) or not usable:
                        continue
                    repeats += 1
                    bucket = usable[repeats % len(usable)]
                try:
                    self._time(bucket, concurrent)
                except Exception:  # only logged: a request gets an error when its own batch fails
                    with self._lock:
                        self._costs.fail(bucket)
                    logger.warning(
                        "%s: bucket %s could not be timed", self._name, bucket, exc_info=True
                    )
                    self._stop.wait(AGAIN_S)

    def _time(self, bucket: Bucket, concurrent: "ConcurrentRuns") -> None:
        """Time a bucket by several runs and record their mean, unless work interrupts them.

        The first of several runs does not count, because the CPU's caches are cold then. While bulk
        work runs, the caches are warm and one run is enough. Raises TimeoutError if a run is
        overdue, and the errors of the runner.
        """
        planes = full_planes(bucket, SEGMENT, self._runner.planes)
        run = partial(concurrent.run, self._runner, bucket, planes)
        runs_s: list[float] = []
        runs_cpu: list[CpuTimes] = []
        while not runs_s or (sum(runs_s) < TIMING_S and len(runs_s) < MAX_RUNS):
            expected_s = self._costs.usable.get(bucket, 0.0) / 1000
            with self._lock:
                is_bulk_alone = self._is_bulk_alone()
            lull_s = max(LULL * expected_s, SHORTEST_LULL_S)
            if self._scheduler.idle_s > lull_s and compiles.idle_s() > COMPILE_LULL_S:
                urgency = WHILE_IDLE  # the run will probably end before the next request comes
            elif is_bulk_alone and time.monotonic() > self._beside_bulk_at:
                urgency = BESIDE_BULK
            else:
                self._stop.wait(LOOK_S)
                return
            with self._scheduler.hold(lambda urgency=urgency: urgency, whole=True) as waiter:
                if self._stop.is_set():
                    return
                with self._watch(waiter, bucket):
                    device_s, cpu_times = timed(run)
                runs_s.append(device_s)
                runs_cpu.append(cpu_times)
            if waiter.overdue:  # the time of a hung run says nothing about the bucket
                raise TimeoutError("the run was overdue")
            if urgency == BESIDE_BULK:  # this run alone is the timing
                runs_s, runs_cpu = runs_s[-1:], runs_cpu[-1:]
                self._beside_bulk_at = (
                    time.monotonic() + runs_s[0] * self._scheduler.permits / BULK_SHARE
                )
                break
        counted_runs = runs_s[1:] or runs_s
        lost_share = sum(runs_cpu[1:] or runs_cpu, CpuTimes()).lost_share(self._cores)
        with self._lock:
            had_untimed = self._costs.untimed() is not None
            self._costs.record(bucket, 1000 * sum(counted_runs) / len(counted_runs), lost_share)
            became_timed = had_untimed and self._costs.untimed() is None
        self._telemetry.bucket_timings.inc()
        if became_timed:
            self._on_timed()


class ConcurrentRuns:
    """Threads that run the same bucket at the same time, as the engine's threads do."""

    def __init__(self, count: int):
        """Start `count` threads, which wait for `run`."""
        self._begin, self._end = Barrier(count + 1), Barrier(count + 1)
        self._call: Callable[[], object] = lambda: None
        self._per_s: list[float] = []
        self._errors: list[Exception] = []
        self._seconds = 0.0
        for k in range(count):
            Thread(
                target=memory.in_kept_heap,  # calls `_work` with the memory of an engine's thread
                args=(self._work,),
                name=f"timing-{k}",
                daemon=True,
            ).start()

    def run(
        self, runner: Runner, bucket: Bucket, planes: np.ndarray, seconds: float = 0.0
    ) -> float:
        """Measure and return the device time of a run of a bucket, in seconds.

        Each thread runs the bucket once if `seconds` is 0, otherwise repeatedly for `seconds`.
        `planes` is the packed batch. The result is the time for one of the runs of all threads: 1
        divided by the sum of the threads' rates in runs per second. Raises the errors of the
        runner.
        """
        self._call = lambda: runner.run(bucket, planes, (runner.primary,))
        self._seconds = seconds
        self._per_s, self._errors = [], []
        self._begin.wait()  # the threads start now
        self._end.wait()  # all threads have finished
        if self._errors:
            raise self._errors[0]
        return 1 / sum(self._per_s)

    def close(self) -> None:
        """End the threads."""
        self._begin.abort()

    def _work(self) -> None:
        """Take part in each measurement of `run` until `close`."""
        while True:
            try:
                self._begin.wait()
            except threading.BrokenBarrierError:
                return
            run_count, took_s = 0, 0.0
            started_at = time.perf_counter()
            try:
                while not run_count or (took_s < self._seconds and not self._errors):
                    self._call()
                    run_count, took_s = run_count + 1, time.perf_counter() - started_at
            except Exception as error:
                self._errors.append(error)
            self._per_s.append(run_count / max(took_s, 1e-9))
            self._end.wait()


def milliseconds(
    runner: Runner,
    bucket: Bucket,
    together: int = 1,
    seconds: float = TIMING_S,
    planes: np.ndarray | None = None,
) -> float:
    """Time a bucket on a device that nothing else uses. Returns milliseconds per run.

    The time of a run includes the copies to and from the device. `together` threads run the bucket
    at the same time, each for `seconds`, and the result is the time for one of all their runs.
    `planes` is the packed batch; by default it holds short sequences. Raises the errors of the
    runner.
    """
    with closing(ConcurrentRuns(together)) as concurrent:
        filled = full_planes(bucket, SEGMENT, runner.planes) if planes is None else planes
        return 1000 * concurrent.run(runner, bucket, filled, seconds)


def full_planes(bucket: Bucket, segment: int, count: int = PackedTokens.PLANES) -> np.ndarray:
    """Make a batch without padding for `Runner.run`: the planes of PackedTokens as one int32 array.

    The result is `[count, rows, length]`, where `count` is the number of planes. Every token has id
    1 and no adapter. Each row holds sequences of `segment` tokens, or of more tokens if the row has
    too few slots for so many sequences. The last sequence of a row may be shorter.
    """
    segment = max(segment, -(-bucket.length // bucket.slots))
    planes = np.zeros((count, bucket.rows, bucket.length), np.int32)
    ids, positions, segments, _, bounds = planes[: PackedTokens.PLANES]
    token_index = np.arange(bucket.length)
    ids[:], positions[:] = 1, token_index % segment
    segments[:] = token_index // segment + 1
    # a row of `bounds` has `slots` starts and then `slots` ends
    starts = token_index[::segment]
    bounds[:, : len(starts)] = starts
    bounds[:, bucket.slots : bucket.slots + len(starts)] = np.minimum(
        starts + segment, bucket.length
    )
    return planes
