"""Which buckets serve a traffic at least cost: greedy choice, then dropping and shifting."""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.tune.cost import CostTable
from jaxembed.tune.traffic import Figures, Traffic, predict_figures

LOAD_WEIGHTS = (0.5, 0.25, 0.25)  # of full load, requests of several texts, a lone text
SLACK = 1.01  # no load may take longer than this against the grid before
PENALTY = 5.0  # for each e-fold beyond
WORTH = 0.003  # a bucket that gains less is not worth compiling


def objective(figures: Figures, before: Figures, slack: float = SLACK) -> float:
    """The weighted logarithm of what the loads take longer than before: below 0 is better. None
    shall take `slack` times as long."""
    logs = np.log(figures.ratios(before))
    beyond = np.maximum(logs - np.log(slack), 0.0)
    return float(logs @ LOAD_WEIGHTS + PENALTY * beyond.sum())


def row_counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: two to an octave."""
    return sorted({n for k in range(20) for n in (2**k, 3 * 2**k) if n <= most})


@dataclass
class Search:
    """Looks for the grid with the least objective, out of `candidates`.

    `before` is what the grid in use makes of the traffic, `affords` tells whether a set of buckets
    keeps to the compile budget. It stops at `deadline` (time.monotonic()) with the best so far.
    """

    table: CostTable
    traffic: Traffic
    before: Figures
    candidates: Sequence[Bucket]
    required: Bucket  # one that holds every input
    affords: Callable[[Iterable[Bucket]], bool]
    deadline: float
    most: int | None = None  # sequences in a batch
    pair_ms: float = 0.0  # as `predict` takes it
    _scores: dict[frozenset[Bucket], float] = field(default_factory=dict)

    def run(self) -> frozenset[Bucket]:
        chosen = self._grow(frozenset({self.required}))
        while time.monotonic() < self.deadline:
            better = self._shift(self._prune(chosen))
            if better == chosen:
                break
            chosen = better
        return self._prune(chosen)

    def score(self, buckets: frozenset[Bucket]) -> float:
        if buckets not in self._scores:
            cost = {bucket: self.table.ms(bucket) for bucket in sorted(buckets)}
            figures = predict_figures(self.traffic, cost, self.most, self.pair_ms)
            self._scores[buckets] = objective(figures, self.before)
        return self._scores[buckets]

    def _grow(self, chosen: frozenset[Bucket]) -> frozenset[Bucket]:
        """Add the bucket that gains most, again and again. What a bucket gains mostly shrinks as
        others join, so those that once gained little are not looked at again until they lead."""
        gains = [(-np.inf, bucket) for bucket in self.candidates if bucket not in chosen]
        while gains and time.monotonic() < self.deadline:
            _, bucket = heapq.heappop(gains)
            grown = chosen | {bucket}
            gain = self.score(chosen) - self.score(grown) if self.affords(grown) else 0.0
            if gain < WORTH:
                continue
            if gains and gain < -gains[0][0]:
                heapq.heappush(gains, (-gain, bucket))
            else:
                chosen = grown
        return chosen

    def _prune(self, chosen: frozenset[Bucket]) -> frozenset[Bucket]:
        """Drop what is not worth compiling beside the others, the slowest first."""
        for bucket in sorted(chosen - {self.required}, key=self.table.ms, reverse=True):
            if self.score(chosen - {bucket}) - self.score(chosen) < WORTH:
                chosen -= {bucket}
        return chosen

    def _shift(self, chosen: frozenset[Bucket]) -> frozenset[Bucket]:
        """Try for each bucket those next to it."""
        for bucket in sorted(chosen - {self.required}):
            if time.monotonic() > self.deadline:
                break
            others = chosen - {bucket}
            shifted = [others | {near} for near in self._near(bucket) if near not in chosen]
            best = min((s for s in shifted if self.affords(s)), key=self.score, default=chosen)
            if self.score(best) < self.score(chosen) - WORTH / 10:
                chosen = best
        return chosen

    def _near(self, bucket: Bucket) -> list[Bucket]:
        """The candidates with a step more or fewer rows, or of the next lengths and about as many
        tokens."""
        lengths = sorted({b.length for b in self.candidates})
        place = lengths.index(bucket.length) if bucket.length in lengths else -1
        near = []
        for length in lengths[max(place - 1, 0) : place + 2]:
            rows = [b for b in self.candidates if b.length == length and b != bucket]
            rows.sort(key=lambda b: abs(np.log(b.tokens / bucket.tokens)))
            near += rows[:2]
        return near
