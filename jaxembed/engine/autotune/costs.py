"""Holds the cost of a run of each bucket: timed, or estimated from the buckets that were timed.

A cost is a number of milliseconds of device time. A thread must hold a lock to use costs that other
threads also use.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal

from jaxembed.engine.batch import HOST_MS
from jaxembed.engine.bucket import Bucket
from jaxembed.platform.cores import MAX_WAITED

TIMINGS = 25  # timings that a bucket needs; the median counts, so a busy moment has little effect
LATEST = 100  # number of latest timings, of all buckets, that say whether the machine is busy
TIMED_MS = 1000.0  # a bucket with fewer timings needs no more after this total time
MAX_FAILURES = 3  # failures after which a bucket is not timed any more
LONG_RUN_MS = 1000.0  # a bucket that would run longer is not timed, because requests would wait
LONG_RUN_FACTOR = 2.0  # an estimate of a long run is multiplied by this, for attention in long rows
DRIFT_BATCHES = 50  # approximate number of recent batches that decide the drift
FIRST_BATCHES = 10  # number of batches at the timed cost that are assumed before the first batch
MAX_DRIFT = 8.0  # the drift is at most this, and at least 1 / MAX_DRIFT
DRIFT_STEP = 1.02  # smaller relative changes of the drift do not change the costs

Timings = dict[Bucket, list[float]]
# "kept": the bucket was timed by an earlier run; "timed": by this run; "assumed": it was not timed
CostSource = Literal["kept", "timed", "assumed"]


def repeat_timings(timings: list[float]) -> list[float]:
    """Return the timings of a bucket, repeated until there are TIMINGS timings.

    The median stays about the same. Use it for a few timings that were measured with care, so that
    the bucket counts as timed.
    """
    return (timings * TIMINGS)[:TIMINGS]


class BucketCosts:
    """The cost of a run of each usable bucket, in milliseconds, in `usable`.

    A cost is that of a bucket full of short sequences. Long sequences take longer, but by the same
    amount in any bucket, so the time of a slow batch says nothing about its bucket. Instead, the
    recent batches together give `drift`, by which every cost is multiplied. The drift differs from
    1 if the machine is slower or faster than when buckets were timed, or if sequences are long.

    `default_ms` is the cost of a token until a bucket is timed. `timings` has the milliseconds that
    an earlier run measured for each bucket, the latest last.
    """

    def __init__(self, default_ms: float, timings: Mapping[Bucket, Iterable[float]] | None = None):
        self.usable: dict[Bucket, float] = {}  # replaced and never changed, so reads need no lock
        self.drift = 1.0
        self._default_ms = default_ms
        self._timings: Timings = {b: [*ms][-TIMINGS:] for b, ms in (timings or {}).items()}
        self._undisturbed: Timings = {b: list(ms) for b, ms in self._timings.items()}
        self._lost: deque[float] = deque(maxlen=LATEST)  # `lost_share` of the latest timings
        self._recorded: set[Bucket] = set()
        self._failures: Counter[Bucket] = Counter()
        self._buckets: list[Bucket] = []
        self._took_ms = self._expected_ms = 0.0  # decaying sums over the recent batches
        # recent mean of the host time of a batch while it holds the device, in milliseconds; a
        # batch counts with at most MAX_DRIFT * HOST_MS
        self.host_ms = HOST_MS

    def add(self, bucket: Bucket) -> None:
        """Make a bucket usable."""
        self._buckets.append(bucket)
        self._update()

    def restrict(self, buckets: Iterable[Bucket]) -> None:
        """Make only these buckets usable. All must have been added before."""
        self._buckets = list(buckets)
        self._update()

    def record(self, bucket: Bucket, ms: float, lost_share: float = 0.0) -> None:
        """Add a timing of a bucket, in milliseconds. The last TIMINGS timings of a bucket count.

        `lost_share` is the share of the time during which other programs had the cores that the
        threads needed. If it is above MAX_WAITED, the timing counts in this process, but is not
        among the `timings` to save.
        """
        histories = [self._timings]
        if lost_share <= MAX_WAITED:
            histories.append(self._undisturbed)
        for timings in histories:
            timings[bucket] = [*timings.get(bucket, ()), ms][-TIMINGS:]
        self._lost.append(lost_share)
        self._recorded.add(bucket)
        self._update()

    def fail(self, bucket: Bucket) -> None:
        """Count a failure to time a bucket, which `untimed` takes into account."""
        self._failures[bucket] += 1

    def observe(self, bucket: Bucket, took_ms: float, host_ms: float) -> None:
        """Update the drift and `host_ms` with the device time of a batch and the part of this time
        in which the host worked, in milliseconds.

        A batch counts with at most MAX_DRIFT times its cost, so that a batch that nearly hung has
        little effect. Raises KeyError if the bucket is not usable.
        """
        decay = 1 - 1 / DRIFT_BATCHES
        cost = self.usable[bucket] / self.drift
        if not self._expected_ms:  # assume earlier batches, so that the first one does not decide
            self._took_ms = self._expected_ms = FIRST_BATCHES * cost
        run_ms = max(took_ms - host_ms, 0.0)
        self._took_ms = decay * self._took_ms + min(run_ms, MAX_DRIFT * cost)
        self.host_ms = decay * self.host_ms + (1 - decay) * min(host_ms, MAX_DRIFT * HOST_MS)
        self._expected_ms = decay * self._expected_ms + cost
        ratio = self._took_ms / max(self._expected_ms, 1e-9)
        factor = min(max(ratio, 1 / MAX_DRIFT), MAX_DRIFT)
        if not 1 / DRIFT_STEP < factor / self.drift < DRIFT_STEP:
            self.drift = factor
            self._update()

    def untimed(self) -> Bucket | None:
        """Return the bucket to time next; None if every usable bucket is timed or cannot be timed.

        It is the bucket with the fewest failures; among equals the one with the fewest timings, and
        then the one with the fewest tokens. Buckets that could not be timed MAX_FAILURES times, or
        would run too long, are left out.
        """
        candidates: list[tuple[int, int, int, Bucket]] = []  # the numbers order the buckets
        for bucket in self._buckets:
            timings, failures = self._timings.get(bucket, []), self._failures[bucket]
            if failures >= MAX_FAILURES or len(timings) >= TIMINGS or sum(timings) >= TIMED_MS:
                continue
            if timings or self._ms_of(bucket) <= LONG_RUN_MS:
                candidates.append((failures, len(timings), bucket.tokens, bucket))
        return min(candidates, key=lambda item: item[:3])[3] if candidates else None

    def source_of(self, bucket: Bucket) -> CostSource:
        """Return where the cost of a bucket comes from, as CostSource describes."""
        if bucket in self._recorded:
            return "timed"
        return "kept" if self._timings.get(bucket) else "assumed"

    @property
    def timings(self) -> Timings:
        """A copy of the timings in milliseconds of each bucket, to save for the next start.

        Timings that other programs disturbed are left out. Readers need no lock.
        """
        return {bucket: list(ms) for bucket, ms in list(self._undisturbed.items())}

    @property
    def lost_share(self) -> float:
        """The median of the `lost_share` of the latest timings; 0 if there are no timings."""
        return median(list(self._lost) or [0.0])

    def _update(self) -> None:
        """Replace `usable` with the current costs."""
        self.usable = {bucket: self.drift * self._ms_of(bucket) for bucket in self._buckets}

    def _ms_of(self, bucket: Bucket) -> float:
        """Return the cost of a bucket in milliseconds, without the drift.

        For a timed bucket it is the median of its timings. For another bucket it is an estimate:
        its tokens times the median cost per token of the timed buckets with the same row length, or
        of all timed buckets if none has this row length. An estimate of a long run is multiplied by
        LONG_RUN_FACTOR.
        """
        if timings := self._timings.get(bucket):
            return median(timings)
        rate_of = {b: median(ms) / b.tokens for b, ms in self._timings.items() if ms}
        rates = [rate for b, rate in rate_of.items() if b.length == bucket.length]
        rates = rates or list(rate_of.values()) or [self._default_ms]
        ms = bucket.tokens * median(rates)
        return LONG_RUN_FACTOR * ms if LONG_RUN_FACTOR * ms > LONG_RUN_MS else ms
