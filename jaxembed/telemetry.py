"""Defines every metric once, with its name and help text.

The names, labels and buckets of te_ metrics are those of Text Embeddings Inference 1.9, so its
dashboards work. Each series is present from the start.
"""

import re
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

DURATION_BUCKETS = tuple(1e-5 * 1.5**k for k in range(1, 36))  # 15 us to 14.6 s, those of TEI
POWERS = [2**k for k in range(21)]
FILL_BUCKETS = tuple(k / 20 for k in range(1, 21))
INPUT_LENGTH = "Tokens of an input after truncation"
MOST_KEPT = 1024  # values that a histogram buffers before it counts them
FAILURES = (
    "validation",
    "batch_size",
    "model_type",
    "tokenization",
    "inference",
    "overloaded",
    "dropped",
)
LANES = ("interactive", "bulk")
ANSWER_STAGES = ("tokenization", "queue", "inference")  # which every answer of a model has
STAGES = ("decode", *ANSWER_STAGES, "encode")
OF_THE_PROCESS = {
    "jaxembed_compile_count",
    "jaxembed_compile_cache_hits",
    "jaxembed_compile_seconds",
}


class Counter(Gauge):
    """A counter without the suffix `_total`, which prometheus_client appends but TEI does not."""

    _type = "counter"


class BulkHistogram(Histogram):
    """A histogram that counts values when it has many of them, or when it is read: counting each
    one as it comes takes 2 us."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._kept: deque[float] = deque()
        self._counting = threading.Lock()

    def observe(self, amount: int | float, exemplar: dict[str, str] | None = None) -> None:
        """Add one value. Exemplars are ignored."""
        self._kept.append(amount)
        if len(self._kept) >= MOST_KEPT:
            self._count_kept()

    def observe_many(self, values: np.ndarray) -> None:
        """Add all values of an array."""
        self._kept.extend(values.tolist())
        if len(self._kept) >= MOST_KEPT:
            self._count_kept()

    def totals(self) -> tuple[int, float]:
        """The number of values and their sum."""
        self._count_kept()
        return int(sum(bucket.get() for bucket in self._buckets)), self._sum.get()

    def _child_samples(self) -> Iterable[Sample]:
        self._count_kept()
        return super()._child_samples()

    def _count_kept(self) -> None:
        with self._counting:
            values = [self._kept.popleft() for _ in range(len(self._kept))]
            places = np.searchsorted(self._upper_bounds, values, side="left")
            for place, count in zip(*np.unique(places, return_counts=True), strict=True):
                self._buckets[place].inc(int(count))
            self._sum.inc(sum(values))


class LengthCounts(Collector):
    """Counts inputs of each length exactly, and shows them as two histograms.

    The buckets of `jaxembed_input_tokens` are as fine as `jaxembed tune` needs them.
    """

    def __init__(self, most: int):
        self._counts = np.zeros(most + 1, np.int64)
        self._lock = threading.Lock()

    def observe_many(self, lengths: np.ndarray) -> None:
        """Count answered inputs of these numbers of tokens."""
        with self._lock:
            np.add.at(self._counts, np.minimum(lengths, len(self._counts) - 1), 1)

    def collect(self) -> Iterable[Metric]:
        """The counts as the histograms of TEI and of ours."""
        with self._lock:
            counts = self._counts.copy()
        most = len(counts) - 1
        powers = [power for power in POWERS[:20] if power <= most]
        yield _histogram_of(counts, "te_request_input_length", INPUT_LENGTH, powers)
        yield _histogram_of(counts, "jaxembed_input_tokens", INPUT_LENGTH, row_lengths(most))


def row_lengths(most: int) -> list[int]:
    """The row lengths that are told apart, up to the limit: every eighth token up to 128, then
    eight to an octave."""
    octaves = (range(2**k, 2 ** (k + 1), max(2**k // 8, 8)) for k in range(3, 19))
    return [*(length for octave in octaves for length in octave if length < most), most]


def _histogram_of(
    counts: np.ndarray, name: str, text: str, bounds: Sequence[int]
) -> HistogramMetricFamily:
    """Make a histogram with these upper bounds from `counts[n]` observations of each value n."""
    upto = np.cumsum(counts)
    buckets = [(str(float(bound)), float(upto[bound])) for bound in bounds]
    total = float(counts @ np.arange(len(counts)))
    return HistogramMetricFamily(
        name, text, buckets=[*buckets, ("+Inf", float(upto[-1]))], sum_value=total
    )


class Telemetry:
    """The metrics of one model, in a registry of their own."""

    def __init__(self, max_input_tokens: int = 2**19):
        self.registry = CollectorRegistry()
        self._add_series_of_tei(max_input_tokens)
        self._add_our_series()
        self._start_at_zero()

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format, version 0.0.4."""
        return _text(self.registry)

    def _add_series_of_tei(self, max_input_tokens: int) -> None:
        self.request_count = self._counter("te_request_count", "Requests accepted", "method")
        self.request_success = self._counter("te_request_success", "Requests answered", "method")
        self.request_failure = self._counter(
            "te_request_failure", "Requests refused or failed", "err"
        )
        self.embed_count = self._counter("te_embed_count", "Inputs to embed")
        self.embed_success = self._counter("te_embed_success", "Inputs embedded")
        self.predict_count = self._counter("te_predict_count", "Inputs to classify or score")
        self.predict_success = self._counter("te_predict_success", "Inputs classified or scored")

        self.request_duration = self._duration("te_request_duration", "Seconds for a request")
        self.request_tokenization = self._duration(
            "te_request_tokenization_duration", "Seconds of tokenizing, mean over the inputs"
        )
        self.request_queue = self._duration(
            "te_request_queue_duration", "Seconds in the queue, mean over the inputs"
        )
        self.request_inference = self._duration(
            "te_request_inference_duration", "Seconds on the device, mean over the inputs"
        )
        self.embed_duration = self._duration("te_embed_duration", "Seconds for an input")
        self.embed_tokenization = self._duration(
            "te_embed_tokenization_duration", "Seconds of tokenizing, by input"
        )
        self.embed_queue = self._duration(
            "te_embed_queue_duration", "Seconds in the queue, by input"
        )
        self.embed_inference = self._duration(
            "te_embed_inference_duration", "Seconds on the device, by input"
        )
        self.predict_duration = self._duration(
            "te_predict_duration", "Seconds for an input to classify or score"
        )
        self.predict_tokenization = self._duration(
            "te_predict_tokenization_duration", "Seconds of tokenizing, by input"
        )
        self.predict_queue = self._duration(
            "te_predict_queue_duration", "Seconds in the queue, by input"
        )
        self.predict_inference = self._duration(
            "te_predict_inference_duration", "Seconds on the device, by input"
        )
        self.input_length = LengthCounts(max_input_tokens)
        self.registry.register(self.input_length)
        self.batch_size = self._histogram("te_batch_next_size", "Sequences in a batch", POWERS[:13])
        self.batch_tokens = self._histogram(
            "te_batch_next_tokens", "Useful tokens in a batch", POWERS
        )
        self.queue_size = self._gauge("te_queue_size", "Inputs waiting for a batch")

    def _add_our_series(self) -> None:
        self.queue_tokens = self._gauge("jaxembed_queue_tokens", "Tokens waiting for a batch")
        self.admitted_inputs = self._gauge(
            "jaxembed_admitted_inputs", "Inputs admitted and not answered"
        )
        self.admitted_tokens = self._gauge(
            "jaxembed_admitted_tokens", "Tokens of these, roughly until they are tokenized"
        )
        self.held_bytes = self._gauge(
            "jaxembed_held_bytes", "Memory that the requests of all models hold"
        )
        self.lane_size = self._gauge(
            "jaxembed_lane_size", "Inputs waiting for a batch, by lane", "lane"
        )
        self.batch_fill = self._histogram(
            "jaxembed_batch_fill_ratio", "Useful tokens over the bucket's tokens", FILL_BUCKETS
        )
        self.compile_count = self._counter(
            "jaxembed_compile_count", "Programs compiled, persistent cache hits not counted"
        )
        self.compile_cache_hits = self._counter(
            "jaxembed_compile_cache_hits", "Programs found in the persistent cache"
        )
        self.compile_seconds = self._counter("jaxembed_compile_seconds", "Seconds spent compiling")
        self.bucket_timings = self._counter(
            "jaxembed_bucket_timings", "Times that a bucket was timed while nothing waited"
        )
        self.truncated_inputs = self._counter(
            "jaxembed_truncated_inputs", "Inputs cut to the limit"
        )
        self.cancelled_requests = self._counter(
            "jaxembed_cancelled_requests", "Requests whose client went away"
        )
        self.not_finite = self._counter(
            "jaxembed_not_finite_sequences", "Sequences run again because of NaN or infinity"
        )
        self.split_batches = self._counter(
            "jaxembed_split_batches", "Batches run again in halves for want of device memory"
        )
        self.failed_batches = self._counter(
            "jaxembed_failed_batches", "Batches that failed for good"
        )
        self.stuck_seats = self._gauge(
            "jaxembed_stuck_seats", "Devices that do not return from a call, and are not used"
        )
        self.stage = self._histogram(
            "jaxembed_stage_seconds", "Seconds in a stage of a request", DURATION_BUCKETS, "stage"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Iterable[int | float], *labels: str
    ) -> BulkHistogram:
        return BulkHistogram(name, text, labels, buckets=tuple(buckets), registry=self.registry)

    def _duration(self, name: str, text: str) -> BulkHistogram:
        return self._histogram(name, text, DURATION_BUCKETS)

    def _start_at_zero(self) -> None:
        for metric, values in (
            (self.request_count, ("single", "batch")),
            (self.request_success, ("single", "batch")),
            (self.request_failure, FAILURES),
            (self.stage, STAGES),
            (self.lane_size, LANES),
        ):
            labelled: MetricWrapperBase = metric
            for value in values:
                labelled.labels(value)


class _ByModel:
    """The series of several models together, each with the label `model`.

    Series that count the whole process are the same in each model; they appear once, without it.
    """

    def __init__(self, telemetries: Mapping[str, Telemetry]):
        self.telemetries = telemetries

    def collect(self) -> Iterable[Metric]:
        """The merged metrics of all models."""
        families: dict[str, Metric] = {}
        for model, telemetry in self.telemetries.items():
            for metric in telemetry.registry.collect():
                if metric.name in OF_THE_PROCESS:
                    families[metric.name] = metric
                    continue
                family = Metric(metric.name, metric.documentation, metric.type)
                families.setdefault(metric.name, family).samples += [
                    sample._replace(labels={**sample.labels, "model": model})
                    for sample in metric.samples
                ]
        return families.values()


def exposition(telemetries: Mapping[str, Telemetry]) -> bytes:
    """The metrics in Prometheus' text format, for models by served name.

    With a single model the series are exactly TEI's and ours; with several each gets the label
    `model`.
    """
    if len(telemetries) == 1:
        return next(iter(telemetries.values())).exposition()
    return _text(_ByModel(telemetries))


def _text(collector: CollectorRegistry | _ByModel) -> bytes:
    text = generate_latest(collector)
    return re.sub(rb"^(# (?:HELP|TYPE) \S+)_total ", rb"\1 ", text, flags=re.MULTILINE)
