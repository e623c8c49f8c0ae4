"""Keeps the totals of the last minute, one sample every few seconds, and their differences."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from jaxembed.engine.admission import Limit
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.engine import BucketUse
from jaxembed.observability.metrics import STAGES, Counter, Labelled
from jaxembed.runtime.diagnostics.facts import name_of_route
from jaxembed.runtime.diagnostics.machine import machine_counts
from jaxembed.runtime.model import LoadedModel

WINDOW_S = 60.0  # samples older than this are dropped
SAMPLE_S = 5.0  # time between two samples

Counts = dict[str, float]


@dataclass(frozen=True)
class ModelTotals:
    """The counts of one model since its start, and its batches by bucket."""

    counts: Counts
    ran: Mapping[Bucket, BucketUse]


@dataclass(frozen=True)
class Moment:
    """A sample: the totals of the machine and of all models at one time."""

    at: float  # time.monotonic()
    machine: Counts
    models: Mapping[str, ModelTotals]  # by served name; of a model with routes by `name_of_route`
    delay_s: float = 0.0  # delay of the event loop's timer


class Window:
    """The differences of all counts between the first and the last of some moments."""

    def __init__(self, moments: list[Moment]):
        self._first, self._last = moments[0], moments[-1]
        self.seconds = self._last.at - self._first.at
        self.delay_s = max(moment.delay_s for moment in moments)

    def machine(self, name: str) -> float | None:
        """The increase of one of `machine_counts` in seconds; None if it is not counted here."""
        if name not in self._last.machine:
            return None
        return self._last.machine[name] - self._first.machine.get(name, 0.0)

    def count(self, model: str, name: str) -> float:
        """The increase of a model's count, such as "requests", in this window.

        Raises KeyError for an unknown model or count.
        """
        return self._last.models[model].counts[name] - self._begin(model).counts.get(name, 0.0)

    def total(self, model: str, name: str) -> float:
        """The value of a model's count since its start. Raises KeyError as `count` does."""
        return self._last.models[model].counts[name]

    def ran(self, model: str) -> dict[Bucket, BucketUse]:
        """The batches of a model in this window, by bucket."""
        before, after = self._begin(model).ran, self._last.models[model].ran
        return {bucket: use - before.get(bucket, BucketUse()) for bucket, use in after.items()}

    @property
    def device_s(self) -> dict[str, float]:
        """Device time of each model in this window, in seconds, by served name."""
        models = self._last.models
        return {
            model: sum((use.device_s for use in self.ran(model).values()), 0.0) for model in models
        }

    def _begin(self, model: str) -> ModelTotals:
        """The counts at the first moment; nothing of a model that was loaded since."""
        begin, end = self._first.models.get(model), self._last.models[model]
        if begin is None or any(end.counts[name] < count for name, count in begin.counts.items()):
            return ModelTotals({}, {})
        return begin


class History:
    """The moments of the last WINDOW_S. Only the thread of the event loop may call it."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()

    def __len__(self) -> int:
        return len(self._moments)

    def note(self, models: Mapping[str, LoadedModel], delay_s: float = 0.0) -> None:
        """Take a sample now, and drop those older than WINDOW_S."""
        self._moments.append(_moment(models, delay_s))
        oldest_at = self._moments[-1].at - WINDOW_S
        while self._moments[0].at < oldest_at:
            self._moments.popleft()

    def window(self, models: Mapping[str, LoadedModel]) -> Window:
        """The window from the oldest sample until now; its length is 0 if there is no sample."""
        return Window([*self._moments, _moment(models, 0.0)])


def _moment(models: Mapping[str, LoadedModel], delay_s: float) -> Moment:
    """The totals of each route now. The counts are those of the whole model; only batches are told
    apart."""
    totals: dict[str, ModelTotals] = {}
    for name, loaded in models.items():
        telemetry, refused = loaded.telemetry, loaded.admission.capacity.refused
        counts = {  # the few that findings need: reading all of them takes milliseconds
            "requests": _value(telemetry.request_count),
            "inputs": sum(float(series.count) for series in telemetry.inputs.values()),
            "refused": _value(telemetry.request_failure.labels("overloaded")),
            "truncated": _value(telemetry.truncated_inputs),
            "failed_batches": _value(telemetry.failed_batches),
            "split_batches": _value(telemetry.split_batches),
            "not_finite": _value(telemetry.not_finite),
            "compiles": _value(telemetry.compile_count),
            "cache_hits": _value(telemetry.compile_cache_hits),
        }
        for stage in STAGES:
            count, seconds = telemetry.stage.labels(stage).totals()
            counts |= {f"{stage} count": float(count), f"{stage} seconds": seconds}
        counts |= {f"refused {limit}": float(refused[limit]) for limit in get_args(Limit)}
        for route, state in loaded.snapshot().items():
            totals[name_of_route(name, route)] = ModelTotals(counts, state.ran)
    return Moment(time.monotonic(), machine_counts(), totals, delay_s)


def _value(counter: Counter | Labelled[Counter]) -> float:
    """The sum of a counter over the values of its label."""
    return sum(sample.value for family in counter.collect() for sample in family.samples)
