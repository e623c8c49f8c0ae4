"""Finds the grid of least cost for a distribution of input lengths, and tries it on the engine.

It measures some buckets, and searches with their costs: the search adds buckets greedily, then
drops and replaces some. Then it measures the buckets that the search chose.
"""

import heapq
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxembed.data.work import Encoding
from jaxembed.engine.bucket import MAX_DEFAULT_BUCKETS, SHORTEST_ROW, Bucket, BucketGrid
from jaxembed.engine.build import package_versions, tuned_for
from jaxembed.errors import ConfigError
from jaxembed.models import native
from jaxembed.observability.metrics import row_lengths
from jaxembed.platform.files import replacing
from jaxembed.tools.tune.cost import BucketCost, CostTable, MeasuredModel, probes
from jaxembed.tools.tune.lengths import Lengths
from jaxembed.tools.tune.traffic import (
    Comparison,
    Figures,
    GridTrial,
    Traffic,
    compare,
    median,
    predict_figures,
    traffic_of,
    trial_engine,
)

logger = logging.getLogger(__name__)

BATCHES = 32  # full batches at full load in the trial: many, so that partial ones count little
SEARCHED_TEXTS = 100  # texts at full load in the search: few, because the search tries many grids
MIN_BATCHES = 8  # minimum of full batches at full load in the search
REPEATS = 4  # maximum number of searches; after each search the buckets it chose are measured
PROBING = 0.35  # share of the given time after which no bucket is measured for interpolation
MEASURING = 0.6  # share of the given time after which the trial starts
SEARCH_S = 15.0  # time limit of one search
LAST_TIMINGS = 3  # minimum of further timings of every bucket before the last search
QUICK_MS = 500.0  # only a bucket faster than this is used to measure what long sequences cost
MAX_TOKENS = 4  # the largest candidate bucket, in multiples of the largest bucket in use
ROOM = 4  # the longest candidate row, in multiples of the mean input
STRAYS = 4  # lone texts of rare lengths that the search adds to the sampled ones
# A bucket may take at most this many times as long as the slowest bucket in use, because the next
# request waits for it.
SLOWER = 1.05
BETTER = 0.01  # a grid needs this gain in the objective to replace the grid in use
NO_SLOWER = 0.005  # a loss up to this in the median round may be noise between equal grids
MIN_BETTER_SHARE = 0.75  # share of the rounds in which the grid must be better
NOISY = 1.25  # the machine is busy if a grid's best tokens/s are over this many times its worst
NOISE = 1.05  # a load may take this many times as long in one round without a penalty

LOAD_WEIGHTS = (0.5, 0.25, 0.25)  # shares of full load, requests of several texts, lone texts
SLACK = 1.01  # a load that takes more than this many times as long as before is penalised
PENALTY = 5.0  # a penalty is this number times log(ratio of times / slack)
WORTH = 0.003  # a bucket must improve the objective by this to be worth compiling


def objective(figures: Figures, before: Figures, slack: float = SLACK) -> float:
    """Rate the figures of a grid. A rating below 0 means that it is better than the grid `before`.

    The rating is the mean over the loads of log(time / time before), weighted by LOAD_WEIGHTS. Each
    load that takes more than `slack` times as long as before adds PENALTY * log(ratio / slack).
    """
    logs = np.log(figures.ratios(before))
    beyond = np.maximum(logs - np.log(slack), 0.0)
    return float(logs @ LOAD_WEIGHTS + PENALTY * beyond.sum())


def row_counts(max_rows: int) -> list[int]:
    """Return row counts to try, up to `max_rows`: 1, 2, 3, 4, 6, 8, 12, ..., two per doubling."""
    return sorted({n for k in range(20) for n in (2**k, 3 * 2**k) if n <= max_rows})


@dataclass
class Search:
    """A search for the set of buckets, out of `candidates`, with the least objective."""

    table: CostTable
    traffic: Traffic
    before: Figures  # predicted for the grid in use
    candidates: Sequence[Bucket]
    required: Bucket  # holds the longest input, and is always chosen
    affords: Callable[[Iterable[Bucket]], bool]  # whether these buckets are within the budget
    deadline: float  # time.monotonic() at which the search returns its best set
    max_sequences: int | None = None  # maximum of sequences in a batch; None: no limit
    pair_ms: float = 0.0  # milliseconds that each pair of tokens of one sequence adds
    _scores: dict[frozenset[Bucket], float] = field(default_factory=dict)

    def run(self) -> frozenset[Bucket]:
        """Search until nothing improves or the deadline passes. Return the chosen buckets."""
        chosen = self._grow(frozenset({self.required}))
        while time.monotonic() < self.deadline:
            better = self._shift(self._prune(chosen))
            if better == chosen:
                break
            chosen = better
        return self._prune(chosen)

    def score(self, buckets: frozenset[Bucket]) -> float:
        """Return the predicted objective of a set of buckets. Lower is better."""
        if buckets not in self._scores:
            cost = {bucket: self.table.ms(bucket) for bucket in sorted(buckets)}
            figures = predict_figures(self.traffic, cost, self.max_sequences, self.pair_ms)
            self._scores[buckets] = objective(figures, self.before)
        return self._scores[buckets]

    def _grow(self, chosen: frozenset[Bucket]) -> frozenset[Bucket]:
        """Add the bucket with the largest gain until no gain reaches WORTH. Return the buckets.

        A bucket's gain mostly shrinks as others are added. So a heap holds the last known gains,
        and a gain is computed again only when it leads the heap (lazy greedy search).
        """
        # pairs of a negated gain and its bucket; a gain that is not known yet counts as infinite
        gains = [(-np.inf, bucket) for bucket in self.candidates if bucket not in chosen]
        while gains and time.monotonic() < self.deadline:
            _, bucket = heapq.heappop(gains)
            grown = chosen | {bucket}
            gain = self.score(chosen) - self.score(grown) if self.affords(grown) else 0.0
            if gain < WORTH:
                continue  # drop the bucket
            if gains and gain < -gains[0][0]:
                heapq.heappush(gains, (-gain, bucket))
            else:
                chosen = grown
        return chosen

    def _prune(self, chosen: frozenset[Bucket]) -> frozenset[Bucket]:
        """Drop each bucket without which the objective rises by less than WORTH, the slowest bucket
        first. Return the remaining buckets."""
        for bucket in sorted(chosen - {self.required}, key=self.table.ms, reverse=True):
            if self.score(chosen - {bucket}) - self.score(chosen) < WORTH:
                chosen -= {bucket}
        return chosen

    def _shift(self, chosen: frozenset[Bucket]) -> frozenset[Bucket]:
        """Replace each bucket by its best neighbour, if this lowers the objective. Return the
        buckets."""
        for bucket in sorted(chosen - {self.required}):
            if time.monotonic() > self.deadline:
                break
            others = chosen - {bucket}
            shifted = [others | {near} for near in self._neighbours(bucket) if near not in chosen]
            best = min((s for s in shifted if self.affords(s)), key=self.score, default=chosen)
            if self.score(best) < self.score(chosen) - WORTH / 10:
                chosen = best
        return chosen

    def _neighbours(self, bucket: Bucket) -> list[Bucket]:
        """Return the candidates most like a bucket: for its row length and for the two adjacent row
        lengths, the two candidates whose number of tokens is closest to that of the bucket."""
        lengths = sorted({b.length for b in self.candidates})
        index = lengths.index(bucket.length) if bucket.length in lengths else -1
        neighbours = []
        for length in lengths[max(index - 1, 0) : index + 2]:
            similar = [b for b in self.candidates if b.length == length and b != bucket]
            similar.sort(key=lambda b: abs(np.log(b.tokens / bucket.tokens)))
            neighbours += similar[:2]
        return neighbours


TuningProgress = Callable[[str, int, int], object]  # step, number done, total number


@dataclass(frozen=True)
class Budget:
    """Limits on a grid and on the time for finding it."""

    seconds: float = 120.0  # approximate time to find the grid; the trial is always finished
    max_buckets: int = MAX_DEFAULT_BUCKETS
    # time to compile all buckets one after the other, with an empty cache; None: no limit
    compile_s: float | None = None
    rounds: int = 5  # rounds of the trial


@dataclass(frozen=True)
class GridResult:
    """A grid, the costs of its buckets, and its predicted and measured figures."""

    grid: BucketGrid
    costs: dict[Bucket, BucketCost]
    predicted: Figures
    measured: Figures

    def describe(self) -> dict[str, Any]:
        """Return the grid and its figures as values for JSON."""
        buckets = self.grid.buckets
        costs = [self.costs[bucket] for bucket in buckets]
        return {
            "buckets": [[bucket.rows, bucket.length] for bucket in buckets],
            "max_batch_tokens": max(bucket.tokens for bucket in buckets),
            "compile_s": sum(cost.compile_s for cost in costs),  # seconds with an empty cache
            # for the buckets that a server with --warmup minimal needs to be ready
            "covering_compile_s": sum(self.costs[b].compile_s for b in self.grid.covering),
            # device memory of the largest bucket besides the parameters
            "temporary_mb": max(cost.temporary_bytes for cost in costs) / 1e6,
            "slowest_ms": max(cost.ms for cost in costs),
            "predicted": self.predicted.describe(),
            "measured": self.measured.describe(),
        }


@dataclass(frozen=True)
class Tuning:
    """The result of a tuning: the grid in use (before), the one found (after), and their trial."""

    model: MeasuredModel
    lengths: Lengths
    before: GridResult
    after: GridResult
    comparison: Comparison
    seconds: float  # that the tuning took

    @property
    def is_better(self) -> bool:
        """Whether the trial confirms the new grid. The gain of a round is minus its objective. The
        median gain must exceed -NO_SLOWER. If each bucket that the new grid saves counts as a gain
        of WORTH, the median gain must exceed BETTER, and the gains of most rounds must exceed 0."""
        rounds = zip(self.comparison.after, self.comparison.before, strict=True)
        gains = -np.array([objective(after, before, NOISE) for after, before in rounds])
        saved = WORTH * (len(self.before.grid.buckets) - len(self.after.grid.buckets))
        agreed = np.mean(gains + saved > 0) >= MIN_BETTER_SHARE
        return bool(agreed and np.median(gains) > -NO_SLOWER and np.median(gains) + saved > BETTER)

    @property
    def is_noisy(self) -> bool:
        """Whether the speed of the old grid varied much over the rounds: the machine was busy."""
        rates = [figures.full_tokens_per_s for figures in self.comparison.before]
        return max(rates) > NOISY * min(rates)

    def write(self, path: Path) -> None:
        """Write the better grid as JSON for --buckets, with the facts that it was tuned on.

        Raises ConfigError if the file cannot be written.
        """
        result, plan = self.after if self.is_better else self.before, self.model.plan
        buckets, cost_file = result.grid.buckets, plan.cost_file
        assert cost_file is not None  # the null model, which has none, cannot be tuned
        largest = max(bucket.tokens for bucket in buckets)
        timings = {bucket: self.model.workbench.timings[bucket] for bucket in buckets}
        data = {
            "buckets": [[bucket.rows, bucket.length] for bucket in buckets],
            # not below the number in use, so that the queue may hold as many tokens as before
            "max_batch_tokens": max(largest // plan.shards, plan.max_batch_tokens),
            "tuned": {
                "model": self.model.name,
                **tuned_for(self.model.spec, plan.devices, plan.dtype),
                # so that a server need not time the buckets
                "costs": {"identity": cost_file.identity, "timings": cost_file.encode(timings)},
                "versions": package_versions(),
                "max_input_tokens": plan.max_input_tokens,
                "lengths": self.lengths.describe(),
                "before": self.before.measured.describe(),
                "after": result.measured.describe(),
            },
        }
        text = re.sub(
            r"\[\s+([\d., \s]+?)\s+\]",
            lambda numbers: f"[{' '.join(numbers[1].split())}]",  # a list on one line
            json.dumps(data, indent=1),
        )
        try:
            with replacing(path) as partial:
                partial.write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def tune(
    model: MeasuredModel,
    lengths: Lengths,
    budget: Budget,
    on_progress: TuningProgress = lambda what, done, total: None,
) -> Tuning:
    """Find the buckets of least cost for these lengths, and try them against `model.plan.grid`.

    The cost is the weighted geometric mean of the times at full load, of requests of several texts
    and of lone texts. A load more than 1 % slower than before is penalised, and buckets more than
    5 % slower than the slowest in use are excluded. `on_progress` is called with each step. Raises
    the errors of XLA if it cannot compile or run a bucket.
    """
    started_at = time.monotonic()
    lengths = lengths.cut(model.plan.max_input_tokens)
    tuner = _Tuner(model, lengths, budget, started_at, on_progress)
    before, after, comparison = tuner.tried(tuner.find())
    return Tuning(model, lengths, before, after, comparison, time.monotonic() - started_at)


class _Tuner:
    """The state of one tuning: the model, the sampled traffic, and the deadlines of the steps."""

    def __init__(
        self,
        model: MeasuredModel,
        lengths: Lengths,
        budget: Budget,
        started_at: float,
        on_progress: TuningProgress,
    ):
        self.model, self.lengths, self.budget = model, lengths, budget
        self.workbench, self.grid, self.plan = model.workbench, model.plan.grid, model.plan
        self.deadline = started_at + MEASURING * budget.seconds
        self.probes_until = started_at + PROBING * budget.seconds
        self.on_progress = on_progress
        self.max_sequences = model.config.max_batch_requests
        self.max_tokens = max(bucket.tokens for bucket in self.grid.buckets)
        low, high = MIN_BATCHES * self.max_tokens, BATCHES * self.max_tokens
        tokens = int(np.clip(SEARCHED_TEXTS * self.lengths.mean, low, high))
        traffic = self._traffic(tokens, seed=0)
        # add lone texts of rare lengths, so that the search also chooses rows for these lengths
        limit = self.plan.max_input_tokens
        strays = np.geomspace(min(SHORTEST_ROW, limit), limit, STRAYS).astype(int)
        lone = [*traffic.lone, *(Encoding(np.full(length, 1, np.int32)) for length in strays)]
        self.traffic = replace(traffic, lone=lone)
        self.pair_ms = 0.0

    def find(self) -> BucketGrid:
        """Measure buckets and search. Return the grid of least predicted cost, fully measured."""
        self._measure(self.grid.buckets, "buckets of the current grid", until=math.inf)
        costs = self.workbench.costs
        usable = [b for b in self.grid.buckets if b.length <= self._covering_length]
        quick = [b for b in usable if costs[b].ms < QUICK_MS] or [min(usable)]
        self.pair_ms = self.workbench.pair_ms(max(quick, key=lambda bucket: bucket.length))
        self.slowest_ms = SLOWER * max(costs[bucket].ms for bucket in self.grid.buckets)
        lengths = self._lengths()
        sparse = [*lengths[:: max(len(lengths) // 8, 1)], lengths[-1]]
        shards, max_tokens = self.plan.shards, MAX_TOKENS * self.max_tokens
        probed = self._allowed(probes(sparse, 2 * self.max_tokens, shards))
        self._measure(probed, "buckets for interpolation", self.probes_until)
        candidates = [  # every row length with every row count
            Bucket(rows * shards, length)
            for length in lengths
            for rows in row_counts(max(max_tokens // (length * shards), 1))
        ]
        for _ in range(REPEATS):
            chosen = self._search(self._allowed(candidates))
            unmeasured = chosen - self.workbench.costs.keys()
            if not unmeasured or time.monotonic() > self.deadline:
                break
            self._measure(sorted(unmeasured), "buckets that the search chose", self.deadline)
        rounds = 0
        while rounds < LAST_TIMINGS or time.monotonic() < self.deadline:
            rounds += 1
            self.on_progress("timing every bucket again", rounds, max(rounds, LAST_TIMINGS))
            self.workbench.time_again(self.workbench.costs)
        chosen = self._search(self._allowed(self.workbench.costs))
        return BucketGrid(tuple(sorted(chosen)))

    def tried(self, candidate: BucketGrid) -> tuple[GridResult, GridResult, Comparison]:
        """Try the grid in use and `candidate` on the engine, with texts not seen by the search.

        Returns the results of both, and their comparison.
        """
        self.on_progress("comparing the new grid with the current one", 1, 1)  # one step
        traffic = self._traffic(BATCHES * self.max_tokens, seed=1)
        grids, widths = (self.grid, candidate), self.model.spec.widths
        bench = self.workbench
        with trial_engine(bench, grids, widths, self.plan.platform, self.max_sequences) as engine:
            before, after = (GridTrial(bench, engine, grid) for grid in grids)
            comparison = compare(before, after, traffic, self.budget.rounds)
        results = [
            GridResult(grid, bench.costs, self._predicted(grid, traffic), median(rounds))
            for grid, rounds in zip(grids, (comparison.before, comparison.after), strict=True)
        ]
        return results[0], results[1], comparison

    def _traffic(self, tokens: int, seed: int) -> Traffic:
        vocabulary = int(self.model.spec.config["vocab_size"])
        return traffic_of(self.lengths, vocabulary, tokens, seed, self.workbench.alignment)

    def _predicted(self, grid: BucketGrid, traffic: Traffic) -> Figures:
        cost = {bucket: self.workbench.costs[bucket].ms for bucket in grid.buckets}
        return predict_figures(traffic, cost, self.max_sequences, self.pair_ms)

    def _lengths(self) -> list[int]:
        """Return the row lengths of candidates: the usual lengths, up to that of the longest input
        or ROOM times the mean length; the input limit; and the row lengths in use."""
        in_use = {bucket.length for bucket in self.grid.buckets}
        kernels, limit = self.plan.kernels, self.plan.max_input_tokens
        if kernels.taken:  # the kernels were tried only with the row lengths in use
            return sorted(in_use)
        batch_tokens = self.max_tokens // self.plan.shards
        fitting = row_lengths(max(limit, batch_tokens) if kernels.joins else limit)
        if kernels.native:  # native attention needs multiples of TILE; other kernels are slower
            fitting = [n for n in fitting if n % native.TILE == 0]
        longest = next((n for n in fitting if n >= self.lengths.longest), limit)
        max_length = max(longest, ROOM * self.lengths.mean)
        return sorted({n for n in fitting if n <= max_length} | {limit} | in_use)

    @property
    def _covering_length(self) -> int:
        """The shortest row length in use that holds every input."""
        return min(b.length for b in self.grid.buckets if b.length >= self.plan.max_input_tokens)

    def _allowed(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Return the buckets whose measured or estimated time is within the limit."""
        table = CostTable(self.workbench.costs)
        return [bucket for bucket in buckets if table.ms(bucket) <= self.slowest_ms]

    def _search(self, candidates: list[Bucket]) -> frozenset[Bucket]:
        """Search the candidates for the best buckets, by the costs measured so far."""
        self.on_progress("searching", 1, 1)  # one step
        search = Search(
            CostTable(self.workbench.costs),
            self.traffic,
            self._predicted(self.grid, self.traffic),
            candidates,
            min(b for b in self.grid.buckets if b.length == self._covering_length),
            self._affords,
            time.monotonic() + SEARCH_S,
            self.max_sequences,
            self.pair_ms,
        )
        return search.run()

    def _affords(self, buckets: Iterable[Bucket]) -> bool:
        """Return whether the budget allows these buckets. A bucket that is not measured is expected
        to compile in the median time of the measured ones."""
        chosen = list(buckets)
        if len(chosen) > self.budget.max_buckets:
            return False
        if self.budget.compile_s is None:
            return True
        costs = self.workbench.costs
        typical = float(np.median([cost.compile_s for cost in costs.values()]))
        seconds = sum(costs[b].compile_s if b in costs else typical for b in chosen)
        return seconds <= self.budget.compile_s

    def _measure(self, buckets: Iterable[Bucket], what: str, until: float) -> None:
        """Compile and time the buckets that are not measured yet, until time.monotonic() passes
        `until`. `what` is the name of the buckets in the progress and the log."""
        new = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self.workbench.costs]
        for number, bucket in enumerate(new, start=1):
            if time.monotonic() > until:
                logger.info("out of time after %d of %d %s", number - 1, len(new), what)
                return
            self.on_progress(f"measuring {what}", number, len(new))
            self.workbench.compile(bucket)
