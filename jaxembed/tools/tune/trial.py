"""Measures two grids on the real engine in turns, so that disturbances of the machine hit both."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, work_of
from jaxembed.engine.autotune.costs import BucketCosts, often_enough
from jaxembed.engine.bucket import BucketGrid
from jaxembed.engine.engine import Engine, Seat
from jaxembed.engine.turn import DeviceTurn
from jaxembed.observability.metrics import Telemetry
from jaxembed.tools.tune.cost import Workbench
from jaxembed.tools.tune.traffic import Figures, Traffic, figures

TICKET = 32  # sequences in each request at full load
TURNS = 4  # turns of each grid in a round; a shared machine changes from second to second


@contextmanager
def engine_of_all(
    workbench: Workbench,
    grids: Sequence[BucketGrid],
    widths: Mapping[OutputName, int],
    platform: str,
    max_batch_requests: int | None = None,
) -> Iterator[Engine]:
    """An engine with the buckets of all grids under trial, each compiled and timed.

    The grids share one engine because two engines differ in speed: their threads' memory is at
    other addresses. The engine takes the bucket costs from the workbench and times none again.
    """
    every = BucketGrid(tuple({bucket for grid in grids for bucket in grid.buckets}))
    for bucket in every.buckets:
        workbench.compile(bucket)
    engine = Engine(
        [Seat(workbench, DeviceTurn.for_platform(platform))],
        every,
        widths,
        Telemetry(every.max_length),
        BucketCosts(1.0, {b: often_enough([c.ms]) for b, c in workbench.costs.items()}),
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
    """Runs traffic with one grid, on an engine that has the buckets of several."""

    workbench: Workbench
    engine: Engine
    grid: BucketGrid

    def run(self, traffic: Traffic, turns: "Turns") -> None:
        """Run each load once, and add the times to `turns`."""
        self.engine.restrict(self.grid.buckets)
        turns.lone += [self._ms([one], 1) for one in traffic.lone]
        turns.requests += [self._ms(request, len(request)) for request in traffic.requests]
        padded = self.workbench.tokens_run
        turns.full_ms += self._ms(traffic.full, TICKET)
        turns.padded += self.workbench.tokens_run - padded
        turns.full_tokens += traffic.full_tokens

    def _ms(self, encodings: Sequence[Encoding], size: int) -> float:
        """Milliseconds of sequences, so many in each request, all submitted at once."""
        start = time.perf_counter()
        tickets = [  # as bulk: after interactive texts the engine would keep batches short
            self.engine.submit(work_of(encodings[first : first + size]), priority="bulk")
            for first in range(0, len(encodings), size)
        ]
        for ticket in tickets:
            ticket.result()
        return (time.perf_counter() - start) * 1000


@dataclass
class Turns:
    """The times of one grid for each load in a round, all its turns together, as `figures` takes
    them."""

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
    def ratios(self) -> np.ndarray:
        """The time of each load relative to before, in the median round.

        The three loads are full load, requests and lone texts.
        """
        return np.median(self.by_round, axis=0)

    @property
    def by_round(self) -> np.ndarray:
        """The time of each load relative to before in each round, float64 `[rounds, loads]`."""
        rounds = zip(self.after, self.before, strict=True)
        return np.array([after.ratios(before) for after, before in rounds])


def compare(before: GridTrial, after: GridTrial, traffic: Traffic, rounds: int) -> Comparison:
    """Run traffic with both grids, after a round of warm-up that does not count.

    In each round both take TURNS turns; which of them goes first alternates.
    """
    runs: dict[GridTrial, list[Figures]] = {before: [], after: []}
    for trial in runs:
        trial.run(traffic, Turns())
    for _ in range(rounds):
        turns_of = {trial: Turns() for trial in runs}
        for number in range(TURNS):
            for trial in [before, after][:: 1 if number % 2 else -1]:
                trial.run(traffic, turns_of[trial])
        for trial, turns in turns_of.items():
            runs[trial].append(figures(**vars(turns)))
    return Comparison(runs[before], runs[after])


def median(runs: Sequence[Figures]) -> Figures:
    """The median of each figure over these runs."""
    fields = {name: [getattr(run, name) for run in runs] for name in runs[0].describe()}
    return Figures(**{name: float(np.median(values)) for name, values in fields.items()})
