"""From a length mix to the grid of least cost: measure, search, measure what was found, try it."""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jaxembed.engine.bucket import MOST_DEFAULT_BUCKETS, SHORTEST_ROW, Bucket, BucketGrid
from jaxembed.engine.build import tuned_for
from jaxembed.errors import ConfigError
from jaxembed.files import replacing
from jaxembed.models import native
from jaxembed.telemetry import row_lengths
from jaxembed.tune.cost import Cost, CostTable, probes
from jaxembed.tune.lengths import Lengths
from jaxembed.tune.model import MeasuredModel
from jaxembed.tune.search import WORTH, Search, objective, row_counts
from jaxembed.tune.traffic import Figures, Traffic, predict_figures, traffic_of
from jaxembed.tune.trial import Comparison, GridTrial, Stage, compare, median
from jaxembed.work import Encoding

logger = logging.getLogger(__name__)

BATCHES = 32  # of the token budget, at full load: the last ones, not full, shall count for little;
SEARCHED_TEXTS = 100  # in the search, which looks at thousands of grids, rather so many texts, or
LEAST_BATCHES = 8
REPEATS = 4  # searches at most, each followed by measuring what it found
PROBING = 0.35  # of the time given, for buckets that tell about others;
MEASURING = 0.6  # by then what the search chose is measured too, and the rest is for trying
SEARCH_S = 15.0
LAST_TIMINGS = 3  # more of every bucket at least, before the last search
QUICK_MS = 500.0  # a bucket may take to tell what long sequences cost
MOST_TOKENS = 4  # times the token budget in use: buckets no larger than this are looked at
ROOM = 4  # usual inputs in the longest row looked at
STRAYS = 4  # lone texts of any length, beside traffic.LONE of the mix in the search
SLOWER = 1.05  # than the slowest bucket in use no bucket may be: whoever comes next waits for it
BETTER = 0.01  # a grid must gain at least this much to replace the one in use
NO_SLOWER = 0.005  # what noise may make of two equal grids in the median of the rounds
MOST_ROUNDS = 0.75  # of the trial must agree
NOISY = 1.25
NOISE = 1.05  # that a load may take longer in a round
PACKAGES = ("jaxembed", "jax", "jaxlib")


TuningProgress = Callable[[str, int, int], object]  # what, how many of it, of how many


@dataclass(frozen=True)
class Budget:
    """What a grid may cost, and finding it."""

    seconds: float = 120.0  # of finding: about, the trial is finished in any case
    most_buckets: int = MOST_DEFAULT_BUCKETS
    compile_s: float | None = None  # of all buckets, one after the other, nothing cached
    rounds: int = 5  # of the trial


@dataclass(frozen=True)
class GridResult:
    """A grid, what it costs to compile, and what it makes of the traffic."""

    grid: BucketGrid
    costs: dict[Bucket, Cost]
    predicted: Figures
    measured: Figures

    @property
    def compile_s(self) -> float:
        return sum(self.costs[bucket].compile_s for bucket in self.grid.buckets)

    @property
    def covering_s(self) -> float:
        """Of what is compiled before a server with --warmup minimal is ready."""
        return sum(self.costs[bucket].compile_s for bucket in self.grid.covering)

    @property
    def temporary_bytes(self) -> int:
        return max(self.costs[bucket].temporary_bytes for bucket in self.grid.buckets)

    @property
    def max_batch_tokens(self) -> int:
        return max(bucket.tokens for bucket in self.grid.buckets)

    @property
    def slowest_ms(self) -> float:
        return max(self.costs[bucket].ms for bucket in self.grid.buckets)

    def describe(self) -> dict[str, Any]:
        return {
            "buckets": [[bucket.rows, bucket.length] for bucket in self.grid.buckets],
            "max_batch_tokens": self.max_batch_tokens,
            "compile_s": self.compile_s,
            "covering_compile_s": self.covering_s,
            "temporary_mb": self.temporary_bytes / 1e6,
            "slowest_ms": self.slowest_ms,
            "predicted": self.predicted.describe(),
            "measured": self.measured.describe(),
        }


@dataclass(frozen=True)
class Tuning:
    """The grid in use and the one found, tried against each other."""

    model: MeasuredModel
    lengths: Lengths
    before: GridResult
    after: GridResult
    comparison: Comparison
    seconds: float

    @property
    def is_better(self) -> bool:
        """Whether the trial bore out the search: no slower, and better with what each bucket saved
        is worth."""
        rounds = zip(self.comparison.after, self.comparison.before, strict=True)
        gains = -np.array([objective(after, before, NOISE) for after, before in rounds])
        saved = WORTH * (len(self.before.grid.buckets) - len(self.after.grid.buckets))
        agreed = np.mean(gains + saved > 0) >= MOST_ROUNDS
        return bool(agreed and np.median(gains) > -NO_SLOWER and np.median(gains) + saved > BETTER)

    @property
    def is_noisy(self) -> bool:
        """Whether one and the same grid was now fast and now slow: the machine was busy."""
        rates = [figures.full_tokens_per_s for figures in self.comparison.before]
        return max(rates) > NOISY * min(rates)

    def write(self, path: Path) -> None:
        """The better grid, for --buckets, with what it was tuned on. Raises ConfigError."""
        side, plan = self.after if self.is_better else self.before, self.model.plan
        file = {
            "buckets": [[bucket.rows, bucket.length] for bucket in side.grid.buckets],
            # no less than before: as many batches' worth of tokens may wait
            "max_batch_tokens": max(side.max_batch_tokens // plan.shards, plan.max_batch_tokens),
            "tuned": {
                "model": self.model.name,
                **tuned_for(self.model.spec, plan.devices, plan.dtype),
                "costs": self._costs(side),
                "versions": {name: metadata.version(name) for name in PACKAGES},
                "max_input_tokens": plan.max_input_tokens,
                "lengths": self.lengths.describe(),
                "before": self.before.measured.describe(),
                "after": side.measured.describe(),
            },
        }
        text = re.sub(r"\[\s+([\d., \s]+?)\s+\]", _on_one_line, json.dumps(file, indent=1))
        try:
            with replacing(path) as partial:
                partial.write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    def _costs(self, side: GridResult) -> dict[str, Any] | None:
        """The timings of a grid's buckets, so that a server need not take them again."""
        file = self.model.plan.cost_file
        assert file is not None  # there is no tuning of the null model
        timings = {bucket: self.model.workbench.timings[bucket] for bucket in side.grid.buckets}
        return {"identity": file.identity, "timings": file.encode(timings)}


def _on_one_line(numbers: re.Match) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def tune(
    model: MeasuredModel,
    lengths: Lengths,
    budget: Budget,
    on_progress: TuningProgress = lambda what, done, total: None,
) -> Tuning:
    """Find the buckets of least cost for these lengths, and try them against `model.plan.grid`.

    Least means: the weighted geometric mean of the time at full load, of requests of several texts
    and of a lone text, none of them over 1 % worse than before, no bucket slower than the slowest
    in use. Raises what XLA raises on a bucket.
    """
    started_at = time.monotonic()
    lengths = lengths.cut(model.plan.max_input_tokens)
    tuner = _Tuner(model, lengths, budget, started_at, on_progress)
    found = tuner.find()
    before, after, comparison = tuner.tried(found)
    return Tuning(model, lengths, before, after, comparison, time.monotonic() - started_at)


def check_grid_path(path: Path) -> None:
    """Raises ConfigError unless a grid can be written there."""
    if path.suffix != ".json":
        raise ConfigError(f"--output {path}: wanted a name that ends in .json")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.absolute().parent}")


class _Tuner:
    def __init__(
        self,
        model: MeasuredModel,
        lengths: Lengths,
        budget: Budget,
        started_at: float,
        on_progress: TuningProgress,
    ):
        self.model, self.lengths, self.budget = model, lengths, budget
        self.workbench, self.grid = model.workbench, model.plan.grid
        self.deadline = started_at + MEASURING * budget.seconds
        self.probes_until = started_at + PROBING * budget.seconds
        self.on_progress = on_progress
        self.most = model.config.max_batch_requests
        self.most_tokens = max(bucket.tokens for bucket in self.grid.buckets)
        least, most = LEAST_BATCHES * self.most_tokens, BATCHES * self.most_tokens
        tokens = int(np.clip(SEARCHED_TEXTS * self.lengths.mean, least, most))
        self.traffic = self._with_strays(self._traffic(tokens, seed=0))
        self.pair_ms = 0.0

    def find(self) -> BucketGrid:
        """The grid with the least predicted cost of those whose buckets are all measured."""
        self._measure(self.grid.buckets, "the grid in use", math.inf)
        costs = self.workbench.costs
        rows = [b for b in self.grid.buckets if b.length <= self._covering_length]
        quick = [b for b in rows if costs[b].ms < QUICK_MS] or [min(rows)]
        self.pair_ms = self.workbench.pair_ms(max(quick, key=lambda bucket: bucket.length))
        slowest = max(self.workbench.costs[bucket].ms for bucket in self.grid.buckets)
        self.slowest_ms = SLOWER * slowest
        useful = self._lengths()
        sparse = [*useful[:: max(len(useful) // 8, 1)], useful[-1]]
        around = self._allowed(probes(sparse, 2 * self.most_tokens, self._shards))
        self._measure(around, "probes", self.probes_until)
        for _ in range(REPEATS):
            chosen = self._search(self._allowed(self._lattice()))
            unknown = chosen - self.workbench.costs.keys()
            if not unknown or time.monotonic() > self.deadline:
                break
            self._measure(sorted(unknown), "what the search chose", self.deadline)
        timings = 0
        while timings < LAST_TIMINGS or time.monotonic() < self.deadline:
            timings += 1
            self.on_progress("timing every bucket again", timings, max(timings, LAST_TIMINGS))
            self.workbench.time_again(self.workbench.costs)
        chosen = self._search(self._allowed(self.workbench.costs))
        return BucketGrid(tuple(sorted(chosen)))

    def tried(self, found: BucketGrid) -> tuple[GridResult, GridResult, Comparison]:
        """Both grids on the engine, with texts that the search has not seen."""
        self.on_progress("trying the grid found beside the one in use", 1, 1)
        traffic = self._traffic(BATCHES * self.most_tokens, seed=1)
        plan = self.model.plan
        grids = (self.grid, found)
        with Stage(
            self.workbench, grids, self.model.spec.widths, plan.platform, self.most
        ) as stage:
            before, after = (GridTrial(stage, grid) for grid in grids)
            comparison = compare(before, after, traffic, self.budget.rounds)
        sides = [
            GridResult(grid, self.workbench.costs, self._predicted(grid, traffic), median(runs))
            for grid, runs in ((self.grid, comparison.before), (found, comparison.after))
        ]
        return sides[0], sides[1], comparison

    def _traffic(self, tokens: int, seed: int) -> Traffic:
        vocabulary = int(self.model.spec.config["vocab_size"])
        return traffic_of(self.lengths, vocabulary, tokens, seed)

    def _with_strays(self, traffic: Traffic) -> Traffic:
        """And lone texts of lengths that nobody has sent yet, or seldom: they shall not wait for a
        row of the limit each."""
        lengths = np.geomspace(min(SHORTEST_ROW, self._limit), self._limit, STRAYS).astype(int)
        strays = [Encoding(np.full(length, 1, np.int32)) for length in lengths]
        return replace(traffic, lone=[*traffic.lone, *strays])

    def _predicted(self, grid: BucketGrid, traffic: Traffic) -> Figures:
        cost = {bucket: self.workbench.costs[bucket].ms for bucket in grid.buckets}
        return predict_figures(traffic, cost, self.most, self.pair_ms)

    @property
    def _shards(self) -> int:
        return self.model.plan.shards

    @property
    def _limit(self) -> int:
        return self.model.plan.max_input_tokens

    def _lengths(self) -> list[int]:
        """Row lengths up to what holds the longest input, or several usual ones; beyond only the
        limit and those in use."""
        in_use = {bucket.length for bucket in self.grid.buckets}
        kernels = self.model.plan.kernels
        if kernels.taken:  # in other rows no kernel was tried
            return sorted(in_use)
        fitting = row_lengths(self._limit)
        if kernels.joins:
            fitting = row_lengths(max(self._limit, self.most_tokens // self._shards))
        if kernels.native:  # takes no attention of others, which makes them slower than the next
            fitting = [n for n in fitting if n % native.TILE == 0]
        longest = next((n for n in fitting if n >= self.lengths.longest), self._limit)
        most = max(longest, ROOM * self.lengths.mean)
        return sorted({n for n in fitting if n <= most} | {self._limit} | in_use)

    @property
    def _covering_length(self) -> int:
        """Of the rows in use, the shortest that hold every input."""
        return min(b.length for b in self.grid.buckets if b.length >= self._limit)

    def _lattice(self) -> list[Bucket]:
        return [
            Bucket(rows * self._shards, length)
            for length in self._lengths()
            for rows in row_counts(
                max(MOST_TOKENS * self.most_tokens // (length * self._shards), 1)
            )
        ]

    def _allowed(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Those that are not slower than what runs now, as far as is known."""
        table = CostTable(self.workbench.costs)
        return [bucket for bucket in buckets if table.ms(bucket) <= self.slowest_ms]

    def _search(self, candidates: list[Bucket]) -> frozenset[Bucket]:
        self.on_progress("searching", 1, 1)
        search = Search(
            CostTable(self.workbench.costs),
            self.traffic,
            self._predicted(self.grid, self.traffic),
            candidates,
            min(b for b in self.grid.buckets if b.length == self._covering_length),
            self._affords,
            time.monotonic() + SEARCH_S,
            self.most,
            self.pair_ms,
        )
        return search.run()

    def _affords(self, buckets: Iterable[Bucket]) -> bool:
        chosen = list(buckets)
        if len(chosen) > self.budget.most_buckets:
            return False
        if self.budget.compile_s is None:
            return True
        costs = self.workbench.costs
        usual = float(np.median([cost.compile_s for cost in costs.values()]))
        seconds = sum(costs[b].compile_s if b in costs else usual for b in chosen)
        return seconds <= self.budget.compile_s

    def _measure(self, buckets: Iterable[Bucket], what: str, until: float) -> None:
        new = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self.workbench.costs]
        for number, bucket in enumerate(new, start=1):
            if time.monotonic() > until:
                logger.info("out of time after %d of %d of %s", number - 1, len(new), what)
                return
            self.on_progress(f"measuring {what}", number, len(new))
            self.workbench.compile(bucket)
