"""Compiles the buckets: what covers every request first, the rest behind traffic."""

import logging
import math
import threading
import time
from collections.abc import Callable

from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.errors import BackendError

logger = logging.getLogger(__name__)

QUIET_S = 5.0  # a device that has been idle for so long is not in use
PAUSE = 2.0  # times as long as a bucket took is the pause after it, while the device is in use
LULL_S, LOOK_S = 0.1, 0.02  # the next one begins when the device has been idle for so long,
LONGEST_WAIT_S = 1.0  # or after so long all the same


class CompilePlan:
    """Which bucket to compile next. A bucket that a waiting sequence needs jumps the queue."""

    def __init__(self, grid: BucketGrid):
        self._pending = list(grid.by_use)
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether every bucket is taken."""
        return not self._pending

    def next(self, needed_length: int | None) -> Bucket | None:
        """The next bucket, or None when all are taken. `needed_length` is the length of the oldest
        sequence that no compiled bucket holds, if there is one."""
        with self._lock:
            if not self._pending:
                return None
            urgent = [b for b in self._pending if needed_length and b.length >= needed_length]
            bucket = min(urgent, key=lambda b: b.tokens) if urgent else self._pending[0]
            self._pending.remove(bucket)
            return bucket


class Warmup:
    """Compiles a grid on background threads and tells the engine of every bucket that is ready."""

    def __init__(
        self,
        grid: BucketGrid,
        compile_bucket: Callable[[Bucket], None],
        needed_length: Callable[[], int | None],
        *,
        name: str = "model",
        full: bool,
        workers: int,
        idle_s: Callable[[], float] = lambda: math.inf,
        on_progress: Callable[[int, int], None] | None = None,
        on_failure: Callable[[Exception], None] = lambda error: None,
        on_finish: Callable[[], None] = lambda: None,
    ):
        """`idle_s` says for how long the device has had nothing to do. Once ready and in use, one
        thread goes on, with pauses."""
        self.error: Exception | None = None
        self.compiled: list[Bucket] = []
        self._name = name
        self._done = 0  # compiled or left out
        self._compile_bucket = compile_bucket
        self._needed_length = needed_length
        self._idle_s = idle_s
        self._on_progress = on_progress or (lambda done, total: None)
        self._on_failed = on_failure
        self._on_finish = on_finish
        self._plan = CompilePlan(grid)
        self._required = set(grid.buckets if full else grid.covering)
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._started_at = time.monotonic()
        self.threads = [
            threading.Thread(target=self._work, args=(k == 0,), name=f"compile-{k}", daemon=True)
            for k in range(workers)
        ]
        self._total = len(grid.buckets)
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether every request has a compiled bucket, or with `full` every bucket is compiled."""
        return self._ready.is_set() and self.error is None

    def start(self) -> None:
        """Begin; the threads end when every bucket is taken."""
        for thread in self.threads:
            thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until ready. Raises what the compiler raised on a bucket that is required."""
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"not ready within {timeout_s} s")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Compile no further bucket. Whoever waits for readiness is told that it will not come."""
        self._stop.set()
        with self._lock:
            if not self._ready.is_set():
                self.error = BackendError("closed before the model was ready")
                self._ready.set()

    def _work(self, goes_on: bool) -> None:
        took_s = 0.0
        while not self._stop.is_set():
            if self._ready.is_set():
                self._pause(took_s, goes_on)
            bucket = self._plan.next(self._needed_length())
            if bucket is None:
                return
            started_at = time.monotonic()
            try:
                self._compile_bucket(bucket)
            except Exception as error:
                self._on_failure(bucket, error)
            else:
                self._on_success(bucket)
            took_s = time.monotonic() - started_at
            self._count()

    def _pause(self, took_s: float, goes_on: bool) -> None:
        """While the device is in use, take a third of the time at most, and begin while it is idle.
        Only one thread goes on."""
        if self._plan.is_done:
            return
        if self._idle_s() < QUIET_S and goes_on:
            self._stop.wait(PAUSE * took_s)
        until = time.monotonic() + (LONGEST_WAIT_S if goes_on else math.inf)
        lull_s = LULL_S if goes_on else QUIET_S
        while self._idle_s() < lull_s and time.monotonic() < until:
            if self._plan.is_done or self._stop.wait(LOOK_S):
                return

    def _on_success(self, bucket: Bucket) -> None:
        with self._lock:
            self.compiled.append(bucket)
            done = len(self.compiled)
            became_ready = not self._ready.is_set() and self._required <= set(self.compiled)
        elapsed = time.monotonic() - self._started_at
        logger.debug("%s: bucket %s compiled, %d of %d", self._name, bucket, done, self._total)
        if became_ready:
            logger.info(
                "%s: ready: %d of %d buckets in %.1f s", self._name, done, self._total, elapsed
            )
            self._ready.set()

    def _count(self) -> None:
        """One bucket more is dealt with: tell whoever follows the progress, and at the end."""
        with self._lock:
            self._done += 1
            done = self._done
        try:
            self._on_progress(done, self._total)
        except Exception:  # a bar on a terminal that has gone must not stop the compiler
            logger.warning("%s: the progress could not be shown", self._name, exc_info=True)
        if done == self._total:
            elapsed = time.monotonic() - self._started_at
            compiled = len(self.compiled)
            logger.info(
                "%s: %d of %d buckets compiled in %.1f s", self._name, compiled, done, elapsed
            )
            self._on_finish()

    def _on_failure(self, bucket: Bucket, error: Exception) -> None:
        if bucket not in self._required:
            logger.warning(
                "%s: bucket %s does not compile and is left out",
                self._name, bucket, exc_info=error,
            )  # fmt: skip
            return
        logger.error("%s: bucket %s does not compile", self._name, bucket, exc_info=error)
        self.error = error
        self._stop.set()
        self._ready.set()
        self._on_failed(error)
