"""Compiles the buckets in the background: first those that cover every request, then the rest.

With several workers, the first one compiles the covering buckets alone. Then the others join.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.errors import BackendError, counted

logger = logging.getLogger(__name__)

QUIET_S = 5.0  # a device that has been idle for this long is not in use
PAUSE = 2.0  # pause after a compilation while the device is in use, in times of the compilation
LULL_S = 0.1  # the next compilation begins when the device has been idle for this long
IDLE_CHECK_S = 0.02  # seconds between two checks whether the device is idle
LONGEST_WAIT_S = 1.0  # after this wait the next compilation begins even if the device is not idle


class Warmup:
    """Compiles the buckets of a grid on background threads, and reports the progress."""

    def __init__(
        self,
        grid: BucketGrid,
        compile_bucket: Callable[[Bucket], None],
        needed_length: Callable[[], int | None],
        *,
        name: str = "model",
        full: bool,
        workers: int,
        joins: Sequence[Callable[[], bool]] = (),
        idle_s: Callable[[], float] = lambda: math.inf,
        on_progress: Callable[[int, int], None] | None = None,
        on_failure: Callable[[Exception], None] = lambda error: None,
        on_finish: Callable[[], None] = lambda: None,
    ):
        """Prepare `workers` threads; `start` starts them.

        `compile_bucket` compiles a bucket and makes it usable. `needed_length` returns the row
        length for the oldest waiting sequence that fits in no compiled bucket, or None; a bucket of
        this length or more is compiled next. The required buckets are all buckets with `full`,
        otherwise the covering buckets. Once they are compiled, each of `joins` is called: it
        compiles the usable buckets on one more worker, and returns whether this worker can be used.
        The model is ready before the joins, but with `full` after them. `idle_s` returns the
        seconds for which the device has been idle: once the model is ready and in use, a single
        thread compiles, with pauses. `on_progress` is called with the numbers of buckets done and
        in total, `on_failure` with the error of a required bucket, and `on_finish` when all buckets
        are done.
        """
        self.error: Exception | None = None
        self.compiled: list[Bucket] = []
        self._name = name
        self._pending = list(grid.by_use)  # buckets that no thread has begun to compile
        self._done = 0  # number of buckets that are compiled or could not be compiled
        self._compile_bucket = compile_bucket
        self._needed_length = needed_length
        self._idle_s = idle_s
        self._on_progress = on_progress or (lambda done, total: None)
        self._on_failure = on_failure
        self._on_finish = on_finish
        self._full = full
        self._required = set(grid.buckets if full else grid.covering)
        self._covered = False  # whether the required buckets are compiled
        self._joins = joins
        self._in_use = 1  # number of workers that are in use
        self.joined = threading.Event()  # set when no further worker will join
        if not joins:
            self.joined.set()
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._started_at = time.monotonic()
        self.threads = [  # the first thread goes on while the model serves
            threading.Thread(target=self._work, args=(k == 0,), name=f"compile-{k}", daemon=True)
            for k in range(workers)
        ]
        self._total = len(grid.buckets)
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether every request has a compiled bucket, or with `full` every bucket is compiled and
        every worker has joined or was left out."""
        return self._ready.is_set() and self.error is None

    def start(self) -> None:
        """Start the threads, which end when no bucket is left."""
        logger.info(
            "%s: preparing %d buckets, %d of them before the model is ready; buckets that are not "
            "in the compile cache are compiled",
            self._name,
            self._total,
            len(self._required),
        )
        for thread in self.threads:
            thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the model is ready.

        Raises TimeoutError after `timeout_s` seconds, the compiler's error for a required bucket,
        or BackendError if `stop` was called before.
        """
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"not ready within {timeout_s} s")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Compile no further bucket. A thread in `wait` gets a BackendError."""
        self._stop.set()
        self.joined.set()
        with self._lock:
            if not self._ready.is_set():
                self.error = BackendError("closed before the model was ready")
                self._ready.set()

    def _work(self, goes_on: bool) -> None:
        """Compile buckets until no bucket is left or `stop` is called.

        Once the model is ready and while the device is in use, only the thread with `goes_on`
        compiles, for at most a third of the time, and begins when the device is idle for a moment.
        The other threads wait until the device is not in use. Buckets that are not required wait
        for the joins.
        """
        took_s = 0.0
        while not self._stop.is_set():
            with self._lock:
                waits = self._required.isdisjoint(self._pending)
            if waits:
                self.joined.wait()
            if self._ready.is_set() and self._pending:
                if self._idle_s() < QUIET_S and goes_on:
                    self._stop.wait(PAUSE * took_s)
                until = time.monotonic() + (LONGEST_WAIT_S if goes_on else math.inf)
                lull_s = LULL_S if goes_on else QUIET_S
                while self._idle_s() < lull_s and time.monotonic() < until and self._pending:
                    if self._stop.wait(IDLE_CHECK_S):
                        break
            needed = self._needed_length()
            with self._lock:
                if not self._pending or self._stop.is_set():
                    return
                urgent = [b for b in self._pending if needed and b.length >= needed]
                bucket = min(urgent, key=lambda b: b.tokens) if urgent else self._pending[0]
                self._pending.remove(bucket)
            started_at = time.monotonic()
            error = None
            try:
                self._compile_bucket(bucket)
            except Exception as raised:
                error = raised
            took_s = time.monotonic() - started_at
            self._note(bucket, error)

    def _note(self, bucket: Bucket, error: Exception | None) -> None:
        """Record that a bucket is compiled, or that its compilation raised `error`.

        A bucket with an error is left out, but an error of a required bucket stops the warm-up.
        Reports the progress. After the last required bucket, calls the joins; after the last bucket
        of all, reports the end."""
        name, total = self._name, self._total
        with self._lock:
            if error is None:
                self.compiled.append(bucket)
            self._done += 1
            compiled, done = len(self.compiled), self._done
            is_last_required = not self._covered and self._required <= set(self.compiled)
            self._covered |= is_last_required
        if error is None:
            logger.debug("%s: bucket %s compiled, %d of %d", name, bucket, compiled, total)
        elif bucket not in self._required:
            logger.warning(
                "%s: bucket %s does not compile and is left out", name, bucket, exc_info=error
            )
        else:
            logger.error("%s: bucket %s does not compile", name, bucket, exc_info=error)
            self.error = error
            for event in (self._stop, self._ready, self.joined):
                event.set()
            self._on_failure(error)
        if is_last_required and not self._full:
            self._become_ready()
        try:
            self._on_progress(done, total)
        except Exception:  # a progress bar on a closed terminal must not stop the compilation
            logger.warning("%s: the progress could not be shown", name, exc_info=True)
        if is_last_required:
            self._join()
        if is_last_required and self._full:
            self._become_ready()
        if done == total:
            elapsed = time.monotonic() - self._started_at
            logger.info("%s: %d of %d buckets compiled in %.1f s", name, compiled, done, elapsed)
            self._on_finish()

    def _join(self) -> None:
        """Call the joins one by one, until `stop` is called."""
        try:
            for join in self._joins:
                if self._stop.is_set():
                    break
                self._in_use += join()
                logger.info("%s: in use: %s", self._name, self._devices)
        finally:
            self.joined.set()

    def _become_ready(self) -> None:
        """Note that the model is ready, unless `stop` was called before."""
        with self._lock:
            if self._ready.is_set():
                return
            logger.info(
                "%s: ready: %d of %d buckets%s in %.1f s",
                self._name,
                len(self.compiled),
                self._total,
                f" on {self._devices}" if self._joins else "",
                time.monotonic() - self._started_at,
            )
            self._ready.set()

    @property
    def _devices(self) -> str:
        """How many of the devices are in use, in words."""
        return f"{self._in_use} of {counted(1 + len(self._joins), 'device')}"
