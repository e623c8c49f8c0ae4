"""Samples traffic for three loads, predicts the speed of a grid from the costs of its buckets, and
measures two grids alternately on the real engine, so that disturbances of the machine hit both.

The loads are a lone text on an idle server, requests of 4, 16 and 64 texts on an idle server, and
full load, which is a queue that is never empty.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import cast

import numpy as np

from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.engine.autotune.costs import BucketCosts, repeat_timings
from jaxembed.engine.batch import HOST_MS, choose_bucket, place
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.engine import Engine, Worker
from jaxembed.engine.future import QueuedSequence, WorkFuture
from jaxembed.engine.queue import WINDOW_BUCKETS
from jaxembed.engine.replica import Replica
from jaxembed.engine.scheduler import DeviceScheduler
from jaxembed.observability.metrics import Telemetry
from jaxembed.tools.tune.cost import Workbench
from jaxembed.tools.tune.lengths import Lengths

REQUEST_SIZES = (4, 16, 64)  # texts
REQUESTS = 6  # requests of each size; fewer if texts are long
LONE = 64  # number of lone texts
MIN_TEXTS, MAX_TEXTS = 64, 8192  # bounds of the number of texts at full load
SEQUENCES_A_REQUEST = 32  # sequences in each request at full load
RUNS_A_ROUND = 4  # runs of each grid in a round: a shared machine's speed changes every second


@dataclass(frozen=True)
class Traffic:
    """Random sequences for each load: lone texts, requests, and the queue at full load. In rows
    they start at multiples of `alignment` tokens."""

    lone: list[Encoding]
    requests: list[list[Encoding]]
    full: list[Encoding]
    alignment: int = 1

    @property
    def full_tokens(self) -> int:
        """The number of tokens at full load."""
        return sum(encoding.length for encoding in self.full)

    @cached_property
    def lone_lengths(self) -> list[int]:
        """The tokens of each lone text."""
        return [encoding.length for encoding in self.lone]

    @cached_property
    def queues(self) -> list[list[QueuedSequence]]:
        """The sequences that wait at full load, then those of each request."""
        return [
            WorkFuture(work_from_encodings(each), {"dense": 1}).sequences
            for each in (self.full, *self.requests)
        ]


def traffic_of(
    lengths: Lengths, vocab_size: int, full_tokens: int, seed: int, alignment: int = 1
) -> Traffic:
    """Draw random traffic with these lengths and about `full_tokens` tokens at full load.

    Token ids are random below `vocab_size`; the same `seed` gives the same traffic. `alignment` is
    that of the runner.
    """
    random = np.random.default_rng(seed)

    def draw(count: int) -> list[Encoding]:
        return [
            Encoding(random.integers(0, vocab_size, length, np.int32))
            for length in lengths.draw(count, random)
        ]

    full_texts = int(np.clip(full_tokens / lengths.mean, MIN_TEXTS, MAX_TEXTS))
    share = full_tokens / len(REQUEST_SIZES) / lengths.mean  # texts for the requests of one size
    sizes = [n for n in REQUEST_SIZES for _ in range(int(np.clip(share / n, 1, REQUESTS)))]
    return Traffic(draw(LONE), [draw(size) for size in sizes], draw(full_texts), alignment)


@dataclass(frozen=True)
class Figures:
    """The speed of a grid under each load, predicted or measured."""

    full_tokens_per_s: float  # useful tokens
    full_fill: float  # useful tokens divided by the tokens of the buckets
    request_ms: float  # geometric mean over the requests of several texts
    lone_ms: float  # geometric mean over the lone texts
    lone_p50_ms: float
    lone_p95_ms: float

    def ratios(self, other: "Figures") -> tuple[float, float, float]:
        """Return the times of full load, requests and lone texts, divided by those of `other`."""
        return (
            other.full_tokens_per_s / self.full_tokens_per_s,
            self.request_ms / other.request_ms,
            self.lone_ms / other.lone_ms,
        )

    def describe(self) -> dict[str, float]:
        """Return the figures by name, rounded to five digits for JSON."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}


def figures(
    full_tokens: int, full_ms: float, padded: int, requests: Sequence[float], lone: Sequence[float]
) -> Figures:
    """Summarise the times of all loads, which are in milliseconds.

    At full load, `full_tokens` useful tokens took `full_ms` in buckets of `padded` tokens in total.
    `requests` and `lone` are the times of each request and each lone text.
    """
    return Figures(
        full_tokens_per_s=full_tokens / full_ms * 1000,
        full_fill=full_tokens / padded,
        request_ms=float(np.exp(np.mean(np.log(requests)))),
        lone_ms=float(np.exp(np.mean(np.log(lone)))),
        lone_p50_ms=float(np.percentile(lone, 50)),
        lone_p95_ms=float(np.percentile(lone, 95)),
    )


def predict_figures(
    traffic: Traffic,
    cost: Mapping[Bucket, float],
    max_sequences: int | None = None,
    pair_ms: float = 0.0,
) -> Figures:
    """Predict the figures of a grid by composing batches as the engine does and adding their costs.

    `cost` holds the milliseconds of each bucket of the grid. A sequence takes `pair_ms` more
    milliseconds for each pair of its tokens. A batch has at most `max_sequences` sequences. The
    host's time is counted for each batch, not for each request.
    """
    (full_ms, padded), *requests = [
        _drain(queue, cost, max_sequences, pair_ms, traffic.alignment) for queue in traffic.queues
    ]
    alone = {
        length: HOST_MS + min(ms for bucket, ms in cost.items() if bucket.length >= length)
        for length in set(traffic.lone_lengths)
    }
    lone = [alone[length] + pair_ms * length**2 for length in traffic.lone_lengths]
    return figures(traffic.full_tokens, full_ms, padded, [ms for ms, _ in requests], lone)


def _drain(
    waiting: Sequence[QueuedSequence],
    cost: Mapping[Bucket, float],
    max_count: int | None,
    pair_ms: float,
    alignment: int,
) -> tuple[float, int]:
    """Compose batches of up to `max_count` sequences until no sequence waits. Return the total time
    in milliseconds, and the total tokens of the buckets. `cost` and `pair_ms` are arguments of
    `predict_figures`, and `alignment` is that of the runner."""
    enough = WINDOW_BUCKETS * max(bucket.tokens for bucket in cost)
    ms, padded = pair_ms * sum(entry.length**2 for entry in waiting), 0
    while waiting:
        # choose from the first entries that have enough tokens together, or from all
        sums = accumulate(entry.length for entry in waiting)
        count = next((n for n, tokens in enumerate(sums, 1) if tokens >= enough), len(waiting))
        window = waiting[:count][:max_count]
        bucket = choose_bucket(window, cost, alignment=alignment)
        groups = window[:1], window[1:]
        batch = place(bucket, *groups, max_sequences=max_count, alignment=alignment)
        ms += cost[bucket] + HOST_MS
        padded += bucket.tokens
        placed = set(batch.sequences)
        rest = [entry for entry in window if entry not in placed]
        waiting = [*rest, *waiting[len(window) :]]
    return ms, padded


@contextmanager
def trial_engine(
    workbench: Workbench,
    grids: Sequence[BucketGrid],
    widths: Mapping[OutputName, int],
    platform: str,
    max_batch_requests: int | None = None,
) -> Iterator[Engine]:
    """Yield an engine that has the buckets of all grids under trial, each compiled and timed.

    The grids share one engine because two engines differ in speed: the memory of their threads is
    at other addresses. The engine has the costs of the workbench.
    """
    union = BucketGrid(tuple({bucket for grid in grids for bucket in grid.buckets}))
    for bucket in union.buckets:
        workbench.compile(bucket)
    engine = Engine(
        [Worker(cast(Replica, workbench), DeviceScheduler.for_platform(platform))],
        union,
        widths,
        Telemetry(union.max_length),
        BucketCosts(
            default_ms=1.0,
            timings={b: repeat_timings([c.ms]) for b, c in workbench.costs.items()},
        ),
        name="the grids tried",
        max_batch_requests=max_batch_requests,
        full_warmup=True,
    )
    engine.start()
    engine.warmup.wait()
    try:
        yield engine
    finally:
        engine.close()


@dataclass(eq=False)
class GridTrial:
    """Runs traffic with one grid on an engine that has the buckets of several grids."""

    workbench: Workbench
    engine: Engine
    grid: BucketGrid

    def run(self, traffic: Traffic, turns: "RoundTimes") -> None:
        """Run each load of the traffic once, and add the times to `turns`."""
        self.engine.restrict(self.grid.buckets)
        turns.lone += [self._run_ms([text], size=1) for text in traffic.lone]
        turns.requests += [self._run_ms(request, len(request)) for request in traffic.requests]
        before = self.workbench.tokens_run
        turns.full_ms += self._run_ms(traffic.full, SEQUENCES_A_REQUEST)
        turns.padded += self.workbench.tokens_run - before
        turns.full_tokens += traffic.full_tokens

    def _run_ms(self, encodings: Sequence[Encoding], size: int) -> float:
        """Submit sequences in requests of `size`. Return the milliseconds until all are run."""
        start = time.perf_counter()
        futures = [  # all as bulk: after an interactive request the engine limits bulk batches
            self.engine.submit(
                work_from_encodings(encodings[first : first + size]), priority="bulk"
            )
            for first in range(0, len(encodings), size)
        ]
        for future in futures:
            future.result()
        return (time.perf_counter() - start) * 1000


@dataclass
class RoundTimes:
    """The arguments of `figures` for all runs of one grid in a round together."""

    full_tokens: int = 0  # useful tokens at full load
    full_ms: float = 0.0
    padded: int = 0  # tokens of the buckets run at full load
    requests: list[float] = field(default_factory=list)  # milliseconds
    lone: list[float] = field(default_factory=list)  # milliseconds


@dataclass(frozen=True)
class Comparison:
    """The figures of two grids in each round."""

    before: list[Figures]
    after: list[Figures]

    @property
    def by_round(self) -> np.ndarray:
        """The times of full load, requests and lone texts with the grid after, divided by those
        with the grid before, float64 `[rounds, 3]`."""
        rounds = zip(self.after, self.before, strict=True)
        return np.array([after.ratios(before) for after, before in rounds])


def compare(before: GridTrial, after: GridTrial, traffic: Traffic, rounds: int) -> Comparison:
    """Run traffic with the present grid and the proposed one, after a warm-up run of each.

    Returns the figures of each round. In a round each grid runs RUNS_A_ROUND times; the grid
    that runs first alternates.
    """
    figures_of: dict[GridTrial, list[Figures]] = {before: [], after: []}  # by round
    for trial in figures_of:
        trial.run(traffic, RoundTimes())
    for _ in range(rounds):
        times_of = {trial: RoundTimes() for trial in figures_of}
        for number in range(RUNS_A_ROUND):
            for trial in [before, after][:: 1 if number % 2 else -1]:
                trial.run(traffic, times_of[trial])
        for trial, times in times_of.items():
            figures_of[trial].append(figures(**vars(times)))
    return Comparison(figures_of[before], figures_of[after])


def median(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure over some runs."""
    fields = {name: [getattr(run, name) for run in runs] for name in runs[0].describe()}
    return Figures(**{name: float(np.median(values)) for name, values in fields.items()})
