"""Two grids on the real engine, in turns: what disturbs the machine for a while disturbs both."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxembed.engine.bucket import BucketGrid
from jaxembed.engine.costs import BucketCosts, often_enough
from jaxembed.engine.engine import Engine, Seat
from jaxembed.engine.turn import DeviceTurn
from jaxembed.outputs import OutputName
from jaxembed.telemetry import Telemetry
from jaxembed.tune.cost import Workbench
from jaxembed.tune.traffic import Figures, Traffic, figures
from jaxembed.work import Encoding, work_of

TICKET = 32  # sequences in each request at full load
TURNS = 4  # of each grid in a round: a machine that others use changes from second to second


class Stage:
    """An engine with the buckets of all grids that are tried, each compiled and timed.

    They share it, for two engines are never the same: their threads' memory lies elsewhere. Buckets
    cost what the workbench has measured; none is timed again.
    """

    def __init__(
        self,
        workbench: Workbench,
        grids: Sequence[BucketGrid],
        widths: Mapping[OutputName, int],
        platform: str,
        max_batch_requests: int | None = None,
    ):
        self.workbench = workbench
        for bucket in {bucket for grid in grids for bucket in grid.buckets}:
            workbench.compile(bucket)
        every = BucketGrid(tuple({bucket for grid in grids for bucket in grid.buckets}))
        self.engine = Engine(
            [Seat(workbench, DeviceTurn.for_platform(platform))],
            every,
            widths,
            Telemetry(every.max_length),
            BucketCosts(1.0, {b: often_enough([c.ms]) for b, c in workbench.costs.items()}),
            name="the grids tried",
            max_batch_requests=max_batch_requests,
            full_warmup=True,
        )
        self.engine.start()
        self.engine.warmup.wait()

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


class GridTrial:
    """One grid on a stage."""

    def __init__(self, stage: Stage, grid: BucketGrid):
        self._workbench, self._engine = stage.workbench, stage.engine
        self._grid = grid

    def run(self, traffic: Traffic, turns: "Turns") -> None:
        """Once through each load."""
        self._engine.restrict(self._grid.buckets)
        turns.lone += [self._ms([one]) for one in traffic.lone]
        turns.requests += [self._ms(request) for request in traffic.requests]
        padded = self._workbench.tokens_run
        turns.full_ms += self._ms_of_all(traffic.full)
        turns.padded += self._workbench.tokens_run - padded
        turns.full_tokens += traffic.full_tokens

    def _ms(self, encodings: Sequence[Encoding]) -> float:
        # as bulk, or the engine would keep batches brief at full load for the lone texts before it
        start = time.perf_counter()
        self._engine.submit(work_of(encodings), priority="bulk").result()
        return (time.perf_counter() - start) * 1000

    def _ms_of_all(self, encodings: Sequence[Encoding]) -> float:
        start = time.perf_counter()
        tickets = [
            self._engine.submit(work_of(encodings[first : first + TICKET]), priority="bulk")
            for first in range(0, len(encodings), TICKET)
        ]
        for ticket in tickets:
            ticket.result()
        return (time.perf_counter() - start) * 1000


@dataclass
class Turns:
    """What one grid took for each load in a round, all its turns together."""

    full_tokens: int = 0
    full_ms: float = 0.0
    padded: int = 0  # tokens of the buckets run at full load
    requests: list[float] = field(default_factory=list)
    lone: list[float] = field(default_factory=list)

    @property
    def figures(self) -> Figures:
        return figures(self.full_tokens, self.full_ms, self.padded, self.requests, self.lone)


@dataclass(frozen=True)
class Comparison:
    """Figures of two grids, round by round."""

    before: list[Figures]
    after: list[Figures]

    @property
    def ratios(self) -> np.ndarray:
        """What each load takes longer after than before, in the median round: full, requests,
        lone."""
        return np.median(self.by_round, axis=0)

    @property
    def by_round(self) -> np.ndarray:
        """The same of each round, `[rounds, loads]`."""
        rounds = zip(self.after, self.before, strict=True)
        return np.array([after.ratios(before) for after, before in rounds])


def compare(before: GridTrial, after: GridTrial, traffic: Traffic, rounds: int) -> Comparison:
    """In each round both take several turns, and the one that goes first changes."""
    runs: dict[GridTrial, list[Figures]] = {before: [], after: []}
    for trial in runs:
        trial.run(traffic, Turns())
    for _ in range(rounds):
        taken = {trial: Turns() for trial in runs}
        for number in range(TURNS):
            for trial in [before, after][:: 1 if number % 2 else -1]:
                trial.run(traffic, taken[trial])
        for trial, turns in taken.items():
            runs[trial].append(turns.figures)
    return Comparison(runs[before], runs[after])


def median(runs: Sequence[Figures]) -> Figures:
    """Of each figure."""
    fields = {name: [getattr(run, name) for run in runs] for name in runs[0].describe()}
    return Figures(**{name: float(np.median(values)) for name, values in fields.items()})
