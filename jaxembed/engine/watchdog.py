"""Notices device calls that do not return. Knows no device and no request.

A thread inside native code can be neither stopped nor joined, so nothing here ends it: those who
wait are told, and whoever supervises the process must end it (`/livez` says when).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jaxembed.engine.batch import Batch
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.turn import Claim

logger = logging.getLogger(__name__)

OVERDUE_FACTOR = 20.0  # times the expected cost of a bucket, and at least
OVERDUE_S = 60.0  # the first run of a program takes longer: page faults, a GPU's autotuning
LOOK_EVERY_S = 1.0  # between two looks
LOOKS_AT_LEAST = 5  # before a call is overdue


@dataclass(eq=False)
class WatchedCall:
    """A device call under way, in a turn of the device."""

    claim: Claim
    bucket: Bucket
    batch: Batch | None  # None where a bucket is timed
    age_s: float = 0.0

    def begin(self, bucket: Bucket) -> None:
        """Another call for the same batch begins."""
        self.bucket, self.age_s = bucket, 0.0


class Watchdog:
    """Looks at the device calls of one engine once a second.

    A call is overdue when it takes OVERDUE_FACTOR times as long as its bucket should, and at least
    `overdue_s`. Its claim is marked so, which takes the device out of use until the call returns,
    and `on_overdue` is called once. `on_look` is called at each look.
    """

    def __init__(
        self,
        cost_s: Callable[[Bucket], float],
        on_overdue: Callable[[WatchedCall], object],
        on_look: Callable[[], object],
        overdue_s: float = OVERDUE_S,
    ):
        self._cost_s = cost_s
        self._on_overdue = on_overdue
        self._on_look = on_look
        self._overdue_s = overdue_s
        self._look_s = min(LOOK_EVERY_S, overdue_s / LOOKS_AT_LEAST)
        self._calls: list[WatchedCall] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._work, name="watch-calls", daemon=True)

    @property
    def calls(self) -> list[WatchedCall]:
        """The calls under way."""
        with self._lock:
            return list(self._calls)

    @contextmanager
    def watch(
        self, claim: Claim, bucket: Bucket, batch: Batch | None = None
    ) -> Iterator[WatchedCall]:
        """Watch what is called inside."""
        call = WatchedCall(claim, bucket, batch)
        with self._lock:
            self._calls.append(call)
        try:
            yield call
        finally:
            with self._lock:
                self._calls.remove(call)

    def start(self) -> None:
        """Begin to look."""
        self.thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def _work(self) -> None:
        looked_at = time.monotonic()
        while not self._stop.wait(self._look_s):
            now = time.monotonic()
            # a process that was stopped, or a machine that slept, has not waited meanwhile
            passed_s = min(now - looked_at, 2 * self._look_s)
            looked_at = now
            try:
                for call in self.calls:
                    self._look_at(call, passed_s)
                self._on_look()
            except Exception:
                logger.exception("the watchdog failed. This is a bug in jaxembed")

    def _look_at(self, call: WatchedCall, passed_s: float) -> None:
        call.age_s += passed_s
        allowed_s = max(OVERDUE_FACTOR * self._cost_s(call.bucket), self._overdue_s)
        if call.age_s > allowed_s and not call.claim.overdue:
            call.claim.overdue = True
            self._on_overdue(call)
