"""Every metric, named and documented once.

The te_ names, labels and buckets are those of Text Embeddings Inference 1.9, so its dashboards
work. Each series is present from the start.
"""

import re

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

DURATION_BUCKETS = tuple(1e-5 * 1.5**k for k in range(1, 36))  # 15 us to 14.6 s, as TEI's
FILL_BUCKETS = tuple(k / 20 for k in range(1, 21))
FAILURES = (
    "validation",
    "batch_size",
    "model_type",
    "tokenization",
    "inference",
    "overloaded",
    "dropped",
)
STAGES = ("decode", "tokenization", "queue", "inference", "encode")


class Counter(Gauge):
    """A counter without the `_total` that prometheus_client appends and TEI's names lack."""

    _type = "counter"


class BulkHistogram(Histogram):
    """A histogram that takes many values in one step: one by one they cost 2 us each."""

    def observe_many(self, values: np.ndarray) -> None:
        places = np.searchsorted(self._upper_bounds, values, side="left")
        for place, count in zip(*np.unique(places, return_counts=True), strict=True):
            self._buckets[place].inc(int(count))
        self._sum.inc(float(values.sum()))


class Telemetry:
    """The metrics of one server or Embedder, in a registry of their own."""

    def __init__(self, max_input_tokens: int = 2**19):
        self.registry = CollectorRegistry()
        powers = [2**k for k in range(21)]
        inputs = [p for p in powers[:20] if p <= max_input_tokens]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=self.registry)

        def histogram(name: str, text: str, buckets, *labels: str) -> BulkHistogram:
            return BulkHistogram(name, text, labels, buckets=tuple(buckets), registry=self.registry)

        def duration(name: str, text: str) -> BulkHistogram:
            return histogram(name, text, DURATION_BUCKETS)

        self.request_count = counter("te_request_count", "Requests accepted", "method")
        self.request_success = counter("te_request_success", "Requests answered", "method")
        self.request_failure = counter("te_request_failure", "Requests refused or failed", "err")
        self.embed_count = counter("te_embed_count", "Inputs to embed")
        self.embed_success = counter("te_embed_success", "Inputs embedded")
        self.predict_count = counter("te_predict_count", "Inputs to classify or score")
        self.predict_success = counter("te_predict_success", "Inputs classified or scored")

        self.request_duration = duration("te_request_duration", "Seconds for a request")
        self.request_tokenization = duration(
            "te_request_tokenization_duration", "Seconds of tokenizing, mean over the inputs"
        )
        self.request_queue = duration(
            "te_request_queue_duration", "Seconds in the queue, mean over the inputs"
        )
        self.request_inference = duration(
            "te_request_inference_duration", "Seconds on the device, mean over the inputs"
        )
        self.embed_duration = duration("te_embed_duration", "Seconds for an input")
        self.embed_tokenization = duration(
            "te_embed_tokenization_duration", "Seconds of tokenizing, by input"
        )
        self.embed_queue = duration("te_embed_queue_duration", "Seconds in the queue, by input")
        self.embed_inference = duration(
            "te_embed_inference_duration", "Seconds on the device, by input"
        )
        for name, text in (
            ("te_predict_duration", "Seconds for an input to classify or score"),
            ("te_predict_tokenization_duration", "Seconds of tokenizing, by input"),
            ("te_predict_queue_duration", "Seconds in the queue, by input"),
            ("te_predict_inference_duration", "Seconds on the device, by input"),
        ):
            duration(name, text)
        self.input_length = histogram(
            "te_request_input_length", "Tokens of an input after truncation", inputs
        )
        self.batch_size = histogram("te_batch_next_size", "Sequences in a batch", powers[:13])
        self.batch_tokens = histogram("te_batch_next_tokens", "Useful tokens in a batch", powers)
        self.queue_size = gauge("te_queue_size", "Inputs waiting for a batch")

        self.queue_tokens = gauge("jaxembed_queue_tokens", "Tokens waiting for a batch")
        self.batch_fill = histogram(
            "jaxembed_batch_fill_ratio", "Useful tokens over the bucket's tokens", FILL_BUCKETS
        )
        self.compile_count = counter(
            "jaxembed_compile_count", "Programs compiled, persistent cache hits not counted"
        )
        self.compile_cache_hits = counter(
            "jaxembed_compile_cache_hits", "Programs found in the persistent cache"
        )
        self.compile_seconds = counter("jaxembed_compile_seconds", "Seconds spent compiling")
        self.truncated_inputs = counter("jaxembed_truncated_inputs", "Inputs cut to the limit")
        self.cancelled_requests = counter(
            "jaxembed_cancelled_requests", "Requests whose client went away"
        )
        self.not_finite = counter(
            "jaxembed_not_finite_sequences", "Sequences run again because of NaN or infinity"
        )
        self.split_batches = counter(
            "jaxembed_split_batches", "Batches run again in halves for want of device memory"
        )
        self.failed_batches = counter("jaxembed_failed_batches", "Batches that failed for good")
        self.stage = histogram(
            "jaxembed_stage_seconds", "Seconds in a stage of a request", DURATION_BUCKETS, "stage"
        )
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        for metric, values in (
            (self.request_count, ("single", "batch")),
            (self.request_success, ("single", "batch")),
            (self.request_failure, FAILURES),
            (self.stage, STAGES),
        ):
            labelled: MetricWrapperBase = metric
            for value in values:
                labelled.labels(value)

    def exposition(self) -> bytes:
        """The Prometheus text format, version 0.0.4."""
        text = generate_latest(self.registry)
        return re.sub(rb"^(# (?:HELP|TYPE) \S+)_total ", rb"\1 ", text, flags=re.MULTILINE)
