"""Sends OpenTelemetry spans of requests and batches to a receiver.

The module needs the extra `otel`, and is imported only with `--otlp-endpoint`. Spans of stages and
batches are built from recorded times when the request or batch has ended. A request that the
sampler does not select costs only the sampler's decision. A thread of the exporter sends the spans.
Spans are dropped while the receiver is slow or unreachable.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxembed import __version__
from jaxembed.observability.tracing import MAX_LINKS, BatchRun, FutureTrace, Trace
from jaxembed.server.access import is_open

logger = logging.getLogger(__name__)

Protocol = Literal["grpc", "http/protobuf"]

COMPLAINT_S = 60.0  # minimum seconds between two log lines about a failing receiver
CLOCK_STEP_NS = 1_000_000  # smaller changes of the system clock are ignored
HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
UNKNOWN_METHOD = "_OTHER"  # OpenTelemetry's name for methods that are not in HTTP_METHODS
FAILED_STATUS = 500  # the lowest HTTP status that marks a span as failed
OPERATIONS = {"embed": "embeddings"}  # OpenTelemetry's names of tasks; other tasks keep their names

# The attributes of spans. Names without `jaxembed.` are those of OpenTelemetry's semantic
# conventions; those that begin with `gen_ai.` are in development there and may change.
ATTRIBUTES = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "scheme": "url.scheme",
    "http_version": "network.protocol.version",
    "error": "error.type",
    "operation": "gen_ai.operation.name",
    "provider": "gen_ai.provider.name",
    "model": "gen_ai.request.model",
    "tokens": "gen_ai.usage.input_tokens",
    "request_id": "jaxembed.request_id",
    "lane": "jaxembed.lane",
    "inputs": "jaxembed.inputs",
    "truncated": "jaxembed.truncated_inputs",
    "cached": "jaxembed.cache_hits",
    "bucket": "jaxembed.bucket",
    "fill": "jaxembed.fill",
    "replica": "jaxembed.replica",
    "sequences": "jaxembed.sequences",
    "batch_tokens": "jaxembed.tokens",
    "served_model": "jaxembed.model",
}

# A `traceparent` header of version 00: trace id, span id, flags. OpenTelemetry's propagator parses
# headers that do not match.
PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")

_EMPTY = Context()  # explicit, so that another library's current span does not become the parent
_W3C = TraceContextTextMapPropagator()


def _harmless(
    method: Callable[Arguments, Made],
) -> Callable[Arguments, Made | None]:
    """Make a method log its exceptions and return None, so that a request succeeds even if its span
    cannot be built."""

    @wraps(method)
    def harmless(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made | None:
        try:
            return method(*args, **kwargs)
        except Exception:
            logger.exception("a span could not be built. This is a bug in jaxembed")
            return None

    return harmless


class OtlpTracer:
    """Builds spans with OpenTelemetry and sends them to a receiver. Implements Tracer.
    OpenTelemetry's environment variables configure the sampler and the exporters."""

    def __init__(self, endpoint: str, service_name: str, protocol: Protocol = "grpc"):
        """`endpoint` is the URL of the receiver, or with http/protobuf of its route for spans."""
        self.settings = endpoint, service_name, protocol
        # OpenTelemetry would log a line for each batch of spans that it cannot send
        library = logging.getLogger("opentelemetry")
        library.handlers, library.propagate = [_Complaints()], False
        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        exporter = (
            GrpcExporter(endpoint=endpoint)
            if protocol == "grpc"
            else HttpExporter(endpoint=endpoint)
        )
        self._processor = BatchSpanProcessor(exporter)
        sampling = TracerProvider(resource=resource, shutdown_on_exit=False)
        recording_all = TracerProvider(ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        for provider in (sampling, recording_all):
            provider.add_span_processor(self._processor)
        self._sampler = sampling.sampler
        # whether the sampler obeys the decision that the client sends
        self._follows_parents = isinstance(sampling.sampler, ParentBased)
        self._request_tracer = sampling.get_tracer("jaxembed", __version__)
        self._child_tracer = recording_all.get_tracer("jaxembed", __version__)  # records all spans
        self._offset_ns = time.time_ns() - time.monotonic_ns()  # system clock - monotonic clock

    @_harmless
    def begin(self, scope: Mapping[str, Any]) -> Trace | None:
        """Start the span of the request with this ASGI scope, if the sampler selects the request.

        Returns the trace of the request, or None if the request is not traced. Reading a route that
        needs no key is not traced. A malformed `traceparent` is ignored.
        """
        method = scope["method"]
        if method in ("GET", "HEAD") and is_open(scope["path"]):
            return None
        started_at = time.monotonic()
        parent = self._parent(scope["headers"])
        if parent is None:
            return None
        span = self._request_tracer.start_span(
            method, parent, SpanKind.SERVER, start_time=self._ns(started_at)
        )
        if not span.is_recording():
            return None
        method = method if method in HTTP_METHODS else UNKNOWN_METHOD
        _set(span, method=method, scheme=scope["scheme"], http_version=scope["http_version"])
        return Trace(format_trace_id(span.get_span_context().trace_id), (span, method), self)

    @_harmless
    def end(self, trace: Trace, route: str | None) -> None:
        """End the span of a request, and build a child span for each of its stages. `route` is the
        pattern that matched the path of the request; None if none did."""
        ended_at = time.monotonic()
        span, method = trace.span
        parent = set_span_in_context(span, _EMPTY)
        for stage in trace.stages:
            self._child_tracer.start_span(
                stage.name,
                parent,
                links=[Link(context) for context in stage.links],
                start_time=self._ns(stage.started_at),
            ).end(self._ns(stage.ended_at))
        name = "HTTP" if method == UNKNOWN_METHOD else method
        span.update_name(name if route is None else f"{name} {route}")
        attributes: dict[str, Any] = {
            "route": route,
            "status": trace.status,
            "error": trace.error,
            "request_id": trace.request_id,
        }
        if trace.model is not None:
            attributes |= {"model": trace.model, "lane": trace.priority}
            if trace.task is not None:
                operation = OPERATIONS.get(trace.task, trace.task)
                attributes |= {"operation": operation, "provider": "jaxembed"}
            if trace.inputs:
                attributes |= {
                    "tokens": trace.tokens,
                    "inputs": trace.inputs,
                    "truncated": trace.truncated,
                    "cached": trace.cached,
                }
        _set(span, **attributes)
        if trace.status is None or trace.status >= FAILED_STATUS:
            span.set_status(StatusCode.ERROR)
        span.end(self._ns(ended_at))

    @_harmless
    def trace_batch(self, run: BatchRun, futures: Sequence[FutureTrace]) -> None:
        """Build the span of a batch in a separate trace, with links to the spans of at most
        MAX_LINKS requests in the batch. Append the run and the context of its span to the `runs` of
        each of `futures`, so that the spans of these requests can link to the batch."""
        traces = dict.fromkeys(future.trace for future in futures)
        contexts = [trace.span[0].get_span_context() for trace in list(traces)[:MAX_LINKS]]
        span = self._child_tracer.start_span(
            "batch",
            _EMPTY,
            links=[Link(context) for context in contexts],
            start_time=self._ns(run.started_at),
        )
        _set(
            span,
            served_model=run.model,
            bucket=run.bucket,
            fill=run.fill,
            replica=run.replica,
            sequences=run.sequences,
            batch_tokens=run.tokens,
        )
        if run.failed:
            span.set_status(StatusCode.ERROR)
        span.end(self._ns(run.ended_at))
        for future in futures:
            future.runs.append((run, span.get_span_context()))

    def context_of(self, trace: Trace) -> str:
        """Return the context of the span of a request."""
        return self.write_context(trace.span[0].get_span_context())

    def read_trace(self, context: str) -> Trace:
        """Return a record of a request that another process traces."""
        trace_id, _, _ = context.partition("-")
        return Trace(trace_id, (NonRecordingSpan(self.read_context(context)), ""), self)

    def write_context(self, context: SpanContext) -> str:
        """Return the ids of a span in hexadecimal digits."""
        return f"{context.trace_id:032x}-{context.span_id:016x}"

    def read_context(self, context: str) -> SpanContext:
        """Return the context of a span with these ids. It is sampled."""
        trace_id, _, span_id = context.partition("-")
        ids = int(trace_id, 16), int(span_id, 16)
        return SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def close(self, timeout_s: float) -> None:
        """Send the remaining spans, for at most `timeout_s` seconds. Spans that are not sent in
        this time are lost, and a log line says so."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            logger.warning("the last spans could not be sent within %g s", timeout_s)

    def _parent(self, headers: Sequence[tuple[bytes, bytes]]) -> Context | None:
        """Return the context of the client's span, or an empty context if the client sends no valid
        `traceparent`. Return None if the sampler does not select the request.

        The sampler is asked before `tracestate` is parsed and a span is started, which take longer.
        """
        parents = [value for name, value in headers if name == b"traceparent"]
        if len(parents) != 1:
            return _EMPTY
        parent = parents[0].decode("latin-1")
        if (parsed := PARENT.fullmatch(parent)) is not None:
            trace_id = int(parsed[1], 16)
            flags = TraceFlags(int(parsed[3], 16))
            if self._follows_parents and not flags.sampled:
                return None
            client = SpanContext(trace_id, int(parsed[2], 16), is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(client), _EMPTY)
            result = self._sampler.should_sample(context, trace_id, "", SpanKind.SERVER)
            if not result.decision.is_sampled():
                return None
        states = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
        return _W3C.extract({"traceparent": [parent], "tracestate": states}, _EMPTY)

    def _ns(self, at: float) -> int:
        """Convert a time of time.monotonic() to nanoseconds since 1970 by the system clock. Changes
        of the system clock up to CLOCK_STEP_NS are ignored, so that equal times give equal
        results."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        if abs(offset_ns - self._offset_ns) > CLOCK_STEP_NS:
            self._offset_ns = offset_ns
        return int(at * 1e9) + self._offset_ns


class _Complaints(logging.Handler):
    """Logs warnings of OpenTelemetry through the logger of this module, at most one line every
    COMPLAINT_S seconds."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_at = -math.inf
        self._skipped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record's first line, and the number of records skipped since the last log
        line."""
        if time.monotonic() < self._next_at:
            self._skipped += 1
            return
        self._next_at = time.monotonic() + COMPLAINT_S
        more = f" (earlier lines left out: {self._skipped})" if self._skipped else ""
        self._skipped = 0
        first_line = "".join(record.getMessage().splitlines()[:1])
        logger.warning("OpenTelemetry: %s%s", first_line, more)


def _set(span: Span, **values: Any) -> None:
    """Set attributes of a span. The arguments are named by the keys of ATTRIBUTES. Values of None
    are left out."""
    attributes = {ATTRIBUTES[name]: value for name, value in values.items() if value is not None}
    span.set_attributes(attributes)
