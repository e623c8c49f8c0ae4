"""What a run of each bucket costs: timed, or estimated from those that were timed.

Pure data: it starts no threads and asks no clock. Whoever shares it holds a lock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal

from jaxembed.engine.batch import HOST_MS
from jaxembed.engine.bucket import Bucket

TIMINGS = 25  # of a bucket, whose median counts: a slow moment hits few of them
TIMED_MS = 1000.0  # of one bucket in all, after which it counts as timed: the longer a run takes,
# the less its timings differ
MOST_FAILURES = 3  # of a bucket, after which it is not timed
LONG_RUN_MS = 1000.0  # a bucket that would run longer is never timed: traffic would wait
LONG_RUN_FACTOR = 2.0  # such a bucket has long rows, in which attention takes longer
DRIFT_BATCHES = 50  # that the factor of drift looks back on, about
FIRST_BATCHES = 10  # that are taken to be as expected, before the first
MOST_DRIFT = 8.0
DRIFT_STEP = 1.02  # a smaller change of the factor is not worth new costs

Timings = dict[Bucket, list[float]]
CostSource = Literal["kept", "timed", "assumed"]  # by an earlier run, by this one, by none


def often_enough(timings: list[float]) -> list[float]:
    """Timings with the same median, as many as are wanted: of somebody who has measured with more
    care."""
    return (timings * TIMINGS)[:TIMINGS]


class BucketCosts:
    """The cost of every bucket that may be used, in milliseconds of a run.

    A cost is that of a bucket full of short sequences: what long ones take on top they take in any
    bucket. So a batch that took longer than expected says nothing of its own bucket. All batches
    together give one factor, `drift`, by which every cost is multiplied: the machine is slower or
    faster than when it was timed, or sequences are long.

    `default_ms` is the cost of a token while nothing is timed. `timings` are those of an earlier
    run, the latest last.
    """

    def __init__(self, default_ms: float, timings: Mapping[Bucket, Iterable[float]] | None = None):
        self.usable: dict[Bucket, float] = {}  # never changed, only replaced
        self.drift = 1.0
        self._default_ms = default_ms
        self._timings: Timings = {b: [*ms][-TIMINGS:] for b, ms in (timings or {}).items()}
        self._recorded: set[Bucket] = set()
        self._failures: Counter[Bucket] = Counter()
        self._buckets: list[Bucket] = []
        self._took_ms = self._expected_ms = 0.0  # of the latest batches, the older the less

    def add(self, bucket: Bucket) -> None:
        """Let a bucket be used."""
        self._buckets.append(bucket)
        self._update()

    def restrict(self, buckets: Iterable[Bucket]) -> None:
        """Let only these buckets be used, all of which were added before."""
        self._buckets = list(buckets)
        self._update()

    def record(self, bucket: Bucket, ms: float) -> None:
        """A bucket was timed. The median of the latest timings counts."""
        timings = self._timings.setdefault(bucket, [])
        timings.append(ms)
        self._recorded.add(bucket)
        del timings[:-TIMINGS]
        self._update()

    def fail(self, bucket: Bucket) -> None:
        """A bucket could not be timed: the others come before it, and after a few times it keeps
        what is estimated."""
        self._failures[bucket] += 1

    def observe(self, bucket: Bucket, took_ms: float) -> None:
        """A batch took so long of the device. One that nearly hung counts no more than a batch on a
        device that is as slow as is believed."""
        kept = 1 - 1 / DRIFT_BATCHES
        cost = self.usable[bucket] / self.drift
        if not self._expected_ms:  # one odd batch at the start shall not count for all
            self._took_ms = self._expected_ms = FIRST_BATCHES * cost
        self._took_ms = kept * self._took_ms + min(max(took_ms - HOST_MS, 0.0), MOST_DRIFT * cost)
        self._expected_ms = kept * self._expected_ms + cost
        factor = self._took_ms / max(self._expected_ms, 1e-9)
        factor = min(max(factor, 1 / MOST_DRIFT), MOST_DRIFT)
        if not 1 / DRIFT_STEP < factor / self.drift < DRIFT_STEP:
            self.drift = factor
            self._update()

    def untimed(self) -> Bucket | None:
        """The bucket to time next: the one with the fewest timings, of these the smallest. None if
        every bucket that may be used was timed often enough, or failed too often."""
        lacking = [b for b in self._buckets if not self._is_timed(b)]
        return min(lacking, key=self._place_in_line, default=None)

    def source_of(self, bucket: Bucket) -> CostSource:
        """Where the cost of a bucket comes from."""
        if bucket in self._recorded:
            return "timed"
        return "kept" if self._timings.get(bucket) else "assumed"

    @property
    def timings(self) -> Timings:
        """The timings of each bucket, for the next run. May be asked while others record."""
        return {bucket: list(ms) for bucket, ms in list(self._timings.items())}

    @property
    def spread(self) -> float:
        """How much the timings of a bucket differ: the third quartile over the first one, in the
        median bucket. 1 where they are all equal."""
        ratios = [_quartile_ratio(ms) for ms in self.timings.values() if len(ms) >= 4]
        return median(ratios) if ratios else 1.0

    def _place_in_line(self, bucket: Bucket) -> tuple[int, int, int]:
        return self._failures[bucket], len(self._timings.get(bucket, ())), bucket.tokens

    def _is_timed(self, bucket: Bucket) -> bool:
        if self._failures[bucket] >= MOST_FAILURES:
            return True
        timings = self._timings.get(bucket, [])
        if not timings:
            return self._estimate(bucket) > LONG_RUN_MS
        return len(timings) >= TIMINGS or sum(timings) >= TIMED_MS

    def _update(self) -> None:
        self.usable = {bucket: self.drift * self._cost(bucket) for bucket in self._buckets}

    def _cost(self, bucket: Bucket) -> float:
        timings = self._timings.get(bucket)
        return median(timings) if timings else self._estimate(bucket)

    def _estimate(self, bucket: Bucket) -> float:
        """The tokens of a bucket at the usual rate of those that were timed, of its own length
        where there are any."""
        timed = {b: median(ms) / b.tokens for b, ms in self._timings.items() if ms}
        rates = [rate for b, rate in timed.items() if b.length == bucket.length]
        rates = rates or list(timed.values()) or [self._default_ms]
        ms = bucket.tokens * median(rates)
        return LONG_RUN_FACTOR * ms if LONG_RUN_FACTOR * ms > LONG_RUN_MS else ms


def _quartile_ratio(timings: list[float]) -> float:
    ordered = sorted(timings)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] / max(ordered[quarter], 1e-9)
