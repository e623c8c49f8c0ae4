"""Defines every metric of a model, with its name and help text.

The names, labels and buckets of te_ metrics are those of Text Embeddings Inference (TEI) 1.9, so
that dashboards for TEI work. A series is a metric with one value of its label, or a metric without
labels. Each series is present from the start.
"""

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

DURATION_BUCKETS = tuple(1e-5 * 1.5**k for k in range(1, 36))  # 15 us to 14.6 s, as in TEI
POWERS = [2**k for k in range(21)]
FILL_BUCKETS = tuple(k / 20 for k in range(1, 21))
INPUT_LENGTH = "Tokens of an input after truncation"
MAX_BUFFERED = 1024  # values that a histogram buffers before it adds them to its buckets
METHODS = ("single", "batch")
FAILURES = (
    "validation",
    "batch_size",
    "model_type",
    "tokenization",
    "inference",
    "overloaded",
    "dropped",
)
PRIORITIES = ("interactive", "bulk")
ANSWER_STAGES = ("tokenization", "queue", "inference")  # stages of a request that a model answers
STAGES = ("decode", *ANSWER_STAGES, "encode")
PROCESS_METRICS = {
    "jaxembed_compile_count",
    "jaxembed_compile_cache_hits",
    "jaxembed_compile_seconds",
}
NO_MODEL = ""  # the label `model` of requests whose model is unknown
# the metrics that count requests whose model is unknown
NO_MODEL_METRICS = {"te_request_failure", "jaxembed_stage_seconds"}


Observed = TypeVar("Observed")
Added = TypeVar("Added", bound=Collector)


class Counter(Collector):
    """A counter without the suffix `_total`, which prometheus_client appends but TEI does not."""

    def __init__(self, name: str, text: str, read: Callable[[], float] | None = None):
        """Make a counter that shows what `read` returns, or else the sum of what `inc` adds."""
        self.name, self._text = name, text
        self._value = self._told = 0.0
        self._lock = threading.Lock()
        self._read = read or (lambda: self._value)

    def inc(self, amount: int | float = 1) -> None:
        """Add `amount` to the counter."""
        with self._lock:
            self._value += amount

    def set_function(self, read: Callable[[], float]) -> None:
        """Show what `read` returns, instead of the sum of what `inc` adds."""
        self._read = read

    def growth(self) -> float:
        """Return what `inc` has added since the last call."""
        with self._lock:
            self._told, before = self._value, self._told
            return self._told - before

    def grow(self, growth: float) -> None:
        """Add the growth of the same counter in another process. Raises ValueError if it is
        negative."""
        if growth < 0:
            raise ValueError("a counter does not get smaller")
        self.inc(growth)

    @property
    def value(self) -> float:
        """The current value."""
        return float(self._read())

    def collect(self) -> Iterable[Metric]:
        """Return the counter with its current value."""
        family = CounterMetricFamily(self.name, self._text)
        family.samples.append(Sample(self.name, {}, self.value))
        return [family]


class BufferedHistogram(Collector):
    """A histogram that buffers values, and adds many of them to its buckets at a time, because to
    add a single value takes 2 us. Reading the histogram adds the buffered values."""

    def __init__(self, name: str, text: str, bounds: Sequence[int | float]):
        """`bounds` are the upper bounds of the buckets, ascending and without infinity."""
        self.name, self._text = name, text
        self._bounds = np.append(bounds, math.inf)
        self._created_at = time.time()
        self._counts = np.zeros(len(self._bounds), np.int64)
        self._sum = 0.0
        self._told: tuple[Any, float] = (0, 0.0)  # what `growth` has told so far
        self._has_grown = False  # whether values were added to the buckets since then
        self._buffer: deque[float] = deque()
        self._lock = threading.Lock()

    def observe(self, value: int | float) -> None:
        """Add one value."""
        self._buffer.append(value)
        if len(self._buffer) >= MAX_BUFFERED:
            self._count_buffered()

    def observe_many(self, values: Sequence[float]) -> None:
        """Add several values."""
        if len(self._buffer) + len(values) < MAX_BUFFERED:
            self._buffer.extend(values)
        else:
            self._count_buffered(values)

    def growth(self) -> list[Any]:
        """Return the number of values in each bucket that has grown since the last call, by the
        index of the bucket, and the sum of these values. The list is empty if there are none."""
        if not (self._buffer or self._has_grown):  # true of most histograms in most seconds
            return []
        self._has_grown = False
        counts, total = self._count_buffered()
        more, places = counts - self._told[0], np.flatnonzero(counts != self._told[0]).tolist()
        growth = [dict(zip(places, more[places].tolist(), strict=True)), total - self._told[1]]
        self._told = counts, total
        return growth if places else []

    def grow(self, growth: list[Any]) -> None:
        """Add the growth of the same histogram in another process. Raises ValueError for any other
        growth."""
        if not growth:
            return
        counts, total = growth
        places, more = np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)
        if (places < 0).any() or (places >= len(self._counts)).any() or (more < 0).any():
            raise ValueError("the growth is not that of this histogram")
        with self._lock:
            self._counts[places] += more
            self._sum += float(total)

    def totals(self) -> tuple[int, float]:
        """Return the number of all values observed so far, and the sum of these values."""
        counts, total = self._count_buffered()
        return int(counts.sum()), total

    def collect(self) -> Iterable[Metric]:
        """Return the histogram of all values observed so far."""
        counts, total = self._count_buffered()
        family = _histogram_of(self.name, self._text, self._bounds, np.cumsum(counts), total)
        family.samples.append(Sample(f"{self.name}_created", {}, self._created_at))
        return [family]

    def _count_buffered(self, more: Sequence[float] = ()) -> tuple[np.ndarray, float]:
        """Add the buffered values and `more` to the buckets. Returns the number of values in each
        bucket, as a copy, and the sum of all values so far."""
        with self._lock:
            values = [*_drain(self._buffer), *more]
            self._has_grown |= bool(values)
            np.add.at(self._counts, self._buckets_of(values), 1)
            self._sum += sum(values)
            return self._counts.copy(), self._sum

    def _buckets_of(self, values: list[float]) -> np.ndarray:
        """Return the index of the bucket of each value."""
        return np.searchsorted(self._bounds, values, side="left")


def _drain(buffer: deque[Observed]) -> list[Observed]:
    """Remove and return the items of a deque, while other threads may append to it."""
    return [buffer.popleft() for _ in range(len(buffer))]


Series = TypeVar("Series", Counter, BufferedHistogram)


class Labelled(Collector, Generic[Series]):
    """A metric with a series for each value of one label."""

    def __init__(self, label: str, series: Mapping[str, Series]):
        self._label, self._series = label, series
        # returns the series of a value of the label
        self.labels: Callable[[str], Series] = series.__getitem__

    def growth(self) -> dict[str, Any]:
        """Return the growth of each series that has grown, by its value of the label."""
        return {name: grown for name, one in self._series.items() if (grown := one.growth())}

    def grow(self, growth: dict[str, Any]) -> None:
        """Add the growth of the same metric in another process."""
        for name, grown in growth.items():
            self._series[name].grow(grown)

    def collect(self) -> Iterable[Metric]:
        """Return all series as one metric."""
        families: dict[str, Metric] = {}
        for value, series in self._series.items():
            for metric in series.collect():
                _merge(families, metric, self._label, value)
        return families.values()


class InputSeries(Collector):
    """The metrics of the answered inputs of one kind of task, with TEI's names: two counters, and
    four histograms of the seconds of an input, in total and by stage."""

    def __init__(self, prefix: str, verb: str, participle: str):
        """`prefix` begins the names of the metrics. `verb` and `participle`, such as "embed" and
        "embedded", are for the help texts."""
        self._counters = (
            Counter(f"{prefix}_count", f"Inputs to {verb}", lambda: self.count),
            Counter(f"{prefix}_success", f"Inputs {participle}", lambda: self.count),
        )
        self._stages = [
            BufferedHistogram(f"{prefix}{name}_duration", text, DURATION_BUCKETS)
            for name, text in (
                ("_tokenization", "Seconds of tokenizing, by input"),
                ("_queue", "Seconds in the queue, by input"),
                ("_inference", "Seconds on the device, by input"),
            )
        ]
        self._total = BufferedHistogram(
            f"{prefix}_duration", f"Seconds for an input to {verb}", DURATION_BUCKETS
        )
        self._buffer: deque[tuple[float, float, float]] = deque()
        self._lock = threading.Lock()

    def growth(self) -> list[Any]:
        """Return the growth of each histogram; an empty list if none has grown."""
        self._count_buffered()
        growth = [series.growth() for series in (self._total, *self._stages)]
        return growth if any(growth) else []

    def grow(self, growth: list[Any]) -> None:
        """Add the growth of the same metrics in another process."""
        if growth:
            for series, grown in zip((self._total, *self._stages), growth, strict=True):
                series.grow(grown)

    @property
    def count(self) -> int:
        """The number of answered inputs."""
        self._count_buffered()
        return self._total.totals()[0]

    def observe_many(
        self, tokenization_s: float, queue_s: Sequence[float], inference_s: Sequence[float]
    ) -> None:
        """Add answered inputs with their seconds in three stages. `tokenization_s` is the same for
        all inputs; `queue_s` and `inference_s` have an element for each input."""
        columns = [tokenization_s] * len(queue_s), queue_s, inference_s
        if len(queue_s) >= MAX_BUFFERED:
            self._count(*columns)
            return
        self._buffer.extend(zip(*columns, strict=True))
        if len(self._buffer) >= MAX_BUFFERED:
            self._count_buffered()

    def _count_buffered(self) -> None:
        """Add the buffered inputs to the histograms."""
        with self._lock:
            rows = _drain(self._buffer)
        if rows:
            self._count(*zip(*rows, strict=True))

    def _count(self, *columns: Sequence[float]) -> None:
        """Add inputs to the histograms. Each column has the seconds of all inputs in one stage, in
        the order of the stages."""
        for stage, seconds in zip(self._stages, columns, strict=True):
            stage.observe_many(seconds)
        self._total.observe_many(list(map(sum, zip(*columns, strict=True))))

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics of the inputs observed so far."""
        self._count_buffered()
        for series in (*self._counters, self._total, *self._stages):
            yield from series.collect()


class LengthCounts(BufferedHistogram):
    """Counts the inputs of each length in tokens, and shows the counts as two histograms.

    One histogram has TEI's name and buckets. The other, `jaxembed_input_tokens`, has as many
    buckets as `jaxembed tune` needs.
    """

    def __init__(self, max_length: int):
        """`max_length` is the largest length that is counted separately, in tokens. Longer inputs
        count as inputs of `max_length` tokens."""
        super().__init__("jaxembed_input_tokens", INPUT_LENGTH, ())
        self._counts = np.zeros(max_length + 1, np.int64)  # number of inputs by length

    def _buckets_of(self, values: list[float]) -> np.ndarray:
        return np.minimum(values, len(self._counts) - 1).astype(np.int64)

    def collect(self) -> Iterable[Metric]:
        """Yield the counts as a histogram with TEI's buckets and one with jaxembed's."""
        counts, _ = self._count_buffered()
        # cumulative[length] is the number of inputs of at most this length
        max_length, cumulative = len(counts) - 1, np.cumsum(counts)
        total = float(counts @ np.arange(max_length + 1))
        for name, bounds in (
            ("te_request_input_length", [power for power in POWERS[:20] if power <= max_length]),
            (self.name, row_lengths(max_length)),
        ):
            yield _histogram_of(
                name, INPUT_LENGTH, (*bounds, math.inf), cumulative[[*bounds, max_length]], total
            )


def row_lengths(limit: int) -> list[int]:
    """Return the upper bounds of the buckets of `jaxembed_input_tokens`, which are row lengths in
    tokens up to `limit`. They are every eighth token up to 128, then eight lengths between a power
    of two and the next, and `limit` itself."""
    octaves = (range(2**k, 2 ** (k + 1), max(2**k // 8, 8)) for k in range(3, 19))
    return [*(length for octave in octaves for length in octave if length < limit), limit]


def _histogram_of(
    name: str, text: str, bounds: Iterable[int | float], cumulative: np.ndarray, total: float
) -> HistogramMetricFamily:
    """Return a histogram that has `cumulative[i]` values up to `bounds[i]`, and the sum `total`.
    The last bound is infinity."""
    buckets = zip(map(floatToGoString, bounds), map(float, cumulative), strict=True)
    return HistogramMetricFamily(name, text, buckets=list(buckets), sum_value=total)


class Telemetry:
    """The metrics of one model, in their own registry."""

    def __init__(self, max_input_tokens: int = 2**19):
        self.registry = CollectorRegistry()
        self._reads: dict[int, list[Callable[[], float]]] = {}
        self._grown: dict[str, Any] = {}  # by number, in the order in which they were added
        self._add_tei_metrics(max_input_tokens)
        self._add_jaxembed_metrics()

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format, version 0.0.4."""
        return text_format(self.registry)

    def growth(self) -> dict[str, Any]:
        """Return the growth of each metric that has grown since the last call, by its number."""
        return {name: grown for name, one in self._grown.items() if (grown := one.growth())}

    def grow(self, growth: Mapping[str, Any]) -> None:
        """Add the growth of the metrics of the same model in another process. Raises KeyError,
        TypeError or ValueError for any other growth."""
        for name, grown in growth.items():
            self._grown[name].grow(grown)

    def set_compile_events(self, events: Any) -> None:
        """Show the counts and seconds of `events`, the CompileEvents of the process."""
        self.compile_count.set_function(lambda: events.compiles)
        self.compile_cache_hits.set_function(lambda: events.cache_hits)
        self.compile_seconds.set_function(lambda: events.seconds)

    def add_to(self, gauge: Gauge, read: Callable[[], float]) -> None:
        """Add what `read` returns to the value of a gauge. The value is the sum over all functions
        that were added, because the engines of a model share the gauges."""
        reads = self._reads.setdefault(id(gauge), [])
        reads.append(read)
        gauge.set_function(lambda: sum(function() for function in reads))

    def _add_tei_metrics(self, max_input_tokens: int) -> None:
        self.request_count = self._counters(
            "te_request_count", "Requests accepted", "method", METHODS
        )
        self.request_success = self._counters(
            "te_request_success", "Requests answered", "method", METHODS
        )
        self.request_failure = self._counters(
            "te_request_failure", "Requests refused or failed", "err", FAILURES
        )
        self.inputs = {
            "embed": self._add(InputSeries("te_embed", "embed", "embedded")),
            "predict": self._add(
                InputSeries("te_predict", "classify or score", "classified or scored")
            ),
        }
        self.request_duration = self._histogram("te_request_duration", "Seconds for a request")
        self.request_tokenization = self._histogram(
            "te_request_tokenization_duration", "Seconds of tokenizing, mean over the inputs"
        )
        self.request_queue = self._histogram(
            "te_request_queue_duration", "Seconds in the queue, mean over the inputs"
        )
        self.request_inference = self._histogram(
            "te_request_inference_duration", "Seconds on the device, mean over the inputs"
        )
        self.input_length = self._add(LengthCounts(max_input_tokens))
        self.batch_size = self._histogram("te_batch_next_size", "Sequences in a batch", POWERS[:13])
        self.batch_tokens = self._histogram(
            "te_batch_next_tokens", "Useful tokens in a batch", POWERS
        )
        self.queue_size = self._gauge("te_queue_size", "Inputs waiting for a batch")

    def _add_jaxembed_metrics(self) -> None:
        self.queue_tokens = self._gauge("jaxembed_queue_tokens", "Tokens waiting for a batch")
        self.admitted_inputs = self._gauge(
            "jaxembed_admitted_inputs", "Inputs admitted and not answered"
        )
        self.admitted_tokens = self._gauge(
            "jaxembed_admitted_tokens",
            "Tokens of admitted inputs, estimated until they are tokenized",
        )
        self.held_bytes = self._gauge(
            "jaxembed_held_bytes", "Memory that the requests of all models hold"
        )
        self.priority_queue_size = self._gauge(
            "jaxembed_lane_size", "Inputs waiting for a batch, by priority", "lane"
        )
        for queue in PRIORITIES:
            self.priority_queue_size.labels(queue)
        self.batch_fill = self._histogram(
            "jaxembed_batch_fill_ratio", "Useful tokens over the bucket's tokens", FILL_BUCKETS
        )
        self.compile_count = self._counter(
            "jaxembed_compile_count", "Programs compiled, without hits of the persistent cache"
        )
        self.compile_cache_hits = self._counter(
            "jaxembed_compile_cache_hits", "Programs found in the persistent cache"
        )
        self.compile_seconds = self._counter("jaxembed_compile_seconds", "Seconds spent compiling")
        self.bucket_timings = self._counter(
            "jaxembed_bucket_timings", "Timings of buckets while no request waited"
        )
        self.truncated_inputs = self._counter(
            "jaxembed_truncated_inputs", "Inputs truncated to the limit"
        )
        self.cache_hits = self._counter(
            "jaxembed_cache_hits", "Inputs whose answer was in the cache"
        )
        self.cache_misses = self._counter(
            "jaxembed_cache_misses", "Inputs whose answer was looked up in the cache and not found"
        )
        self.cache_bytes = self._gauge("jaxembed_cache_bytes", "Memory that cached answers take")
        self.cancelled_requests = self._counter(
            "jaxembed_cancelled_requests", "Requests whose client disconnected"
        )
        self.not_finite = self._counter(
            "jaxembed_not_finite_sequences", "Sequences run again because of NaN or infinity"
        )
        self.split_batches = self._counter(
            "jaxembed_split_batches", "Batches run again in parts because device memory was full"
        )
        self.failed_batches = self._counter(
            "jaxembed_failed_batches", "Batches that failed on a device"
        )
        self.joined_workers = self._gauge(
            "jaxembed_joined_devices", "Devices that have compiled their programs and take batches"
        )
        self.stuck_workers = self._gauge(
            "jaxembed_stuck_seats", "Devices that do not return from a call, and are not used"
        )
        stages = {
            stage: BufferedHistogram(
                "jaxembed_stage_seconds", "Seconds in a stage of a request", DURATION_BUCKETS
            )
            for stage in STAGES
        }
        self.stage = self._add(Labelled("stage", stages))

    def _add(self, series: Added) -> Added:
        """Register a series and return it."""
        self.registry.register(series)
        self._grown[str(len(self._grown))] = series
        return series

    def _counter(self, name: str, text: str) -> Counter:
        return self._add(Counter(name, text))

    def _counters(
        self, name: str, text: str, label: str, values: Iterable[str]
    ) -> Labelled[Counter]:
        """Register a counter with a series for each of the `values` of a label."""
        return self._add(Labelled(label, {value: Counter(name, text) for value in values}))

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, bounds: Sequence[int | float] = DURATION_BUCKETS
    ) -> BufferedHistogram:
        return self._add(BufferedHistogram(name, text, bounds))


class _ByModel:
    """The metrics of several models together, each series with the label `model`.

    Metrics of the whole process are the same in each model: they appear once, without the label.
    For requests whose model is unknown, only the series of NO_MODEL_METRICS appear.
    """

    def __init__(self, telemetries: Mapping[str, Telemetry]):
        self.telemetries = telemetries

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all models, merged by name."""
        families: dict[str, Metric] = {}
        for model, telemetry in self.telemetries.items():
            for metric in telemetry.registry.collect():
                if metric.name in PROCESS_METRICS:  # the same in each model
                    families[metric.name] = metric
                elif model != NO_MODEL or metric.name in NO_MODEL_METRICS:
                    _merge(families, metric, "model", model)
        return families.values()


def _merge(families: dict[str, Metric], metric: Metric, label: str, value: str) -> None:
    """Add the samples of a metric to the metric of the same name in `families`.

    Each of the samples gets the label `label` with the value `value`."""
    metric.samples = [
        sample._replace(labels={**sample.labels, label: value}) for sample in metric.samples
    ]
    family = families.setdefault(metric.name, metric)
    if family is not metric:
        family.samples += metric.samples


def exposition(telemetries: Mapping[str, Telemetry], *, label_one: bool = False) -> bytes:
    """Return the metrics of models, by served name, in Prometheus' text format.

    Series have the label `model`. If there is a single model, its series have no label `model`, as
    in TEI, unless `label_one` is true.
    """
    if len(telemetries) == 1 and not label_one:
        return next(iter(telemetries.values())).exposition()
    return text_format(_ByModel(telemetries))


def text_format(collector: CollectorRegistry | _ByModel) -> bytes:
    """Return the metrics of a collector in Prometheus' text format, version 0.0.4."""
    return re.sub(
        rb"^(# (?:HELP|TYPE) \S+)_total ", rb"\1 ", generate_latest(collector), flags=re.MULTILINE
    )
