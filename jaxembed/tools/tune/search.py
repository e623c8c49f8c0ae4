"""Searches the grid of least cost: adds buckets greedily, then drops and replaces some."""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.tools.tune.cost import CostTable
from jaxembed.tools.tune.traffic import Figures, Traffic, predict_figures

LOAD_WEIGHTS = (0.5, 0.25, 0.25)  # of full load, requests of several texts, lone texts
SLACK = 1.01  # the ratio of the time to the grid before that no load may exceed
PENALTY = 5.0  # added to the objective for each factor e beyond the slack
WORTH = 0.003  # a bucket that improves the objective by less is not worth compiling


def objective(figures: Figures, before: Figures, slack: float = SLACK) -> float:
    """Compare the figures of a grid with those before; below 0 is better.

    It is the weighted mean of the logarithms of each load's time relative to before, plus a penalty
    for each load that takes more than `slack` times as long.
    """
    logs = np.log(figures.ratios(before))
    beyond = np.maximum(logs - np.log(slack), 0.0)
    return float(logs @ LOAD_WEIGHTS + PENALTY * beyond.sum())


def row_counts(most: int) -> list[int]:
    """Row counts to try, up to `most`: 1, 2, 3, 4, 6, 8, 12, ..., two to an octave."""
    return sorted({n for k in range(20) for n in (2**k, 3 * 2**k) if n <= most})


@dataclass
class Search:
    """A search for the set of buckets, out of `candidates`, with the least objective."""

    table: CostTable
    traffic: Traffic
    before: Figures  # predicted for the grid in use
    candidates: Sequence[Bucket]
    required: Bucket  # a bucket that holds the longest input; it is always chosen
    affords: Callable[[Iterable[Bucket]], bool]  # whether buckets keep to the compile budget
    deadline: float  # time.monotonic() at which the search stops with the best set so far
    most: int | None = None  # sequences in a batch; None: no limit
    pair_ms: float = 0.0  # as `predict_figures` takes it
    _scores: dict[frozenset[Bucket], float] = field(default_factory=dict)

    def run(self) -> frozenset[Bucket]:
        """Search until nothing improves or the deadline passes. Returns the chosen buckets."""
        chosen = self._grow(frozenset({self.required}))
        while time.monotonic() < self.deadline:
            better = self._shift(self._prune(chosen))
            if better == chosen:
                break
            chosen = better
        return self._prune(chosen)

    def score(self, buckets: frozenset[Bucket]) -> float:
        """The predicted objective of a set of buckets; the lower, the better."""
        if buckets not in self._scores:
            cost = {bucket: self.table.ms(bucket) for bucket in sorted(buckets)}
            figures = predict_figures(self.traffic, cost, self.most, self.pair_ms)
            self._scores[buckets] = objective(figures, self.before)
        return self._scores[buckets]

    def _grow(self, chosen: frozenset[Bucket]) -> frozenset[Bucket]:
        """Add the bucket with the largest gain until no gain is worth it.

        A bucket's gain mostly shrinks as others are added. So a heap holds the last known gains,
        and a gain is computed again only when it leads the heap (lazy greedy search).
        """
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
        """Drop the buckets that are not worth compiling beside the others, the slowest first."""
        for bucket in sorted(chosen - {self.required}, key=self.table.ms, reverse=True):
            if self.score(chosen - {bucket}) - self.score(chosen) < WORTH:
                chosen -= {bucket}
        return chosen

    def _shift(self, chosen: frozenset[Bucket]) -> frozenset[Bucket]:
        """Replace each bucket by the neighbour that lowers the objective most, if one does."""
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
        """The candidates next to a bucket.

        For its own and both adjacent row lengths, the two whose tokens are closest to the bucket's.
        """
        lengths = sorted({b.length for b in self.candidates})
        place = lengths.index(bucket.length) if bucket.length in lengths else -1
        neighbours = []
        for length in lengths[max(place - 1, 0) : place + 2]:
            rows = [b for b in self.candidates if b.length == length and b != bucket]
            rows.sort(key=lambda b: abs(np.log(b.tokens / bucket.tokens)))
            neighbours += rows[:2]
        return neighbours
