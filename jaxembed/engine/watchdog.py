"""Detects device calls that do not return.

Nothing can stop a thread inside native code. So waiting requests get an error, and the supervisor
of the process must end the process when `/livez` fails.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jaxembed.engine.batch import Batch
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.scheduler import Waiter

logger = logging.getLogger(__name__)

OVERDUE_FACTOR = 20.0  # a device call is overdue after this many times the cost of its bucket,
OVERDUE_S = 60.0  # but not before these seconds: a first run has page faults, on a GPU autotuning
CHECK_EVERY_S = 1.0  # largest number of seconds between two checks
MIN_CHECKS = 5  # smallest number of checks before a call is overdue


@dataclass(eq=False)
class WatchedCall:
    """A device call in progress."""

    waiter: Waiter  # the thread that holds the device
    bucket: Bucket
    batch: Batch | None  # None if a bucket is timed
    age_s: float = 0.0

    def begin(self, bucket: Bucket) -> None:
        """Note that the next device call of the batch begins, on `bucket`; restart `age_s` at 0."""
        self.bucket, self.age_s = bucket, 0.0


class Watchdog:
    """A thread that checks the device calls of one engine once a second.

    A call is overdue after OVERDUE_FACTOR times the cost of its bucket, `cost_s(bucket)` seconds,
    but not before `overdue_s` seconds. Then `call.waiter.overdue` is set, which takes the device
    out of use until the call returns, and `on_overdue` is called once. `on_check` is called at
    every check.
    """

    def __init__(
        self,
        cost_s: Callable[[Bucket], float],
        on_overdue: Callable[[WatchedCall], object],
        on_check: Callable[[], object],
        overdue_s: float = OVERDUE_S,
    ):
        self._cost_s = cost_s
        self._on_overdue = on_overdue
        self._on_check = on_check
        self._overdue_s = overdue_s
        self._interval_s = min(CHECK_EVERY_S, overdue_s / MIN_CHECKS)
        # the device calls in progress; the list is replaced at changes, so readers need no lock
        self.calls: list[WatchedCall] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._work, name="watch-calls", daemon=True)

    @contextmanager
    def watch(
        self, waiter: Waiter, bucket: Bucket, batch: Batch | None = None
    ) -> Iterator[WatchedCall]:
        """Watch the device calls within the block. Yields the watched call.

        `waiter` is the thread's waiter, which holds the device. `batch` is None if the block times
        the bucket.
        """
        call = WatchedCall(waiter, bucket, batch)
        with self._lock:
            self.calls = [*self.calls, call]
        try:
            yield call
        finally:
            with self._lock:
                self.calls = [other for other in self.calls if other is not call]

    def stop(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._stop.set()

    def _work(self) -> None:
        """Check every device call in progress at regular intervals until `stop`."""
        checked_at = time.monotonic()
        while not self._stop.wait(self._interval_s):
            now = time.monotonic()
            # a delayed check, for example after a sleep of the machine, adds two intervals at most
            passed_s = min(now - checked_at, 2 * self._interval_s)
            checked_at = now
            try:
                for call in self.calls:
                    self._check(call, passed_s)
                self._on_check()
            except Exception:
                logger.exception("the watchdog failed. This is a bug in jaxembed")

    def _check(self, call: WatchedCall, passed_s: float) -> None:
        """Add `passed_s` seconds to the age of a device call. Mark the waiter and call `on_overdue`
        once the device call is overdue."""
        call.age_s += passed_s
        allowed_s = max(OVERDUE_FACTOR * self._cost_s(call.bucket), self._overdue_s)
        if call.age_s > allowed_s and not call.waiter.overdue:
            call.waiter.overdue = True
            self._on_overdue(call)
