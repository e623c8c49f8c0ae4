"""Traces: spans of requests and batches, as receivers of OpenTelemetry get them."""

import asyncio
import logging
import socket
import threading
import time
from concurrent import futures
from contextlib import contextmanager
from itertools import pairwise

import pytest
import sources
import test_front_ends
from conftest import save_tiny
from fake_embedder import FakeEmbedder
from fakes import WAIT_S, encoding
from live_server import answering
from test_docs import DOCS, codes, sections
from test_server_app import KEYS
from test_server_run import serving
from test_static import OF_SENTENCE_TRANSFORMERS

from jaxembed import Embedder
from jaxembed.config import EngineConfig, ServerConfig
from jaxembed.observability.log import LINE, JsonFormatter, TextFormatter
from jaxembed.observability.tracing import MAX_LINKS, MAX_STAGES, FutureTrace, Trace, as_current
from jaxembed.server.app import create_app
from jaxembed.server.registry.models import Models

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
grpc = pytest.importorskip("grpc")
SERVICE = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
messages, services = (pytest.importorskip(SERVICE + end) for end in ("", "_grpc"))
otlp = pytest.importorskip("jaxembed.server.otlp")

PROTOCOLS = ("grpc", "http/protobuf")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SERVER_KIND, ERROR = 2, 2
EXPORT_S = 1  # that the tracer waits for a receiver that does not answer
STAGES = {"decode", "tokenize", "queue", "device", "encode"}
SECRETS = ("zebra", "quagga", "first-key")


class Receiver:
    """A receiver of spans on loopback, in this process."""

    def __init__(self):
        self.requests = []
        self.url = ""

    @property
    def spans(self):
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name):
        return [span for span in self.spans if span.name == name]


@contextmanager
def grpc_receiver():
    receiver = Receiver()

    class Service(services.TraceServiceServicer):
        def Export(self, request, context):
            receiver.requests.append(request)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(Service(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield receiver
    server.stop(None).wait()


@contextmanager
def http_receiver():
    receiver = Receiver()

    def reply(request, body):
        assert request.headers["content-type"] == "application/x-protobuf"
        receiver.requests.append(messages.ExportTraceServiceRequest.FromString(body))
        return 200, b""

    with answering(reply) as url:
        receiver.url = f"{url}/v1/traces"
        yield receiver


@contextmanager
def tracing(protocol="grpc"):
    """A receiver, and a tracer that sends to it; what was sent is there after the context."""
    with grpc_receiver() if protocol == "grpc" else http_receiver() as receiver:
        tracer = otlp.OtlpTracer(receiver.url, "test", protocol)
        yield receiver, tracer
        tracer.close(WAIT_S)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """The library's loggers, as they were before a test: one leaves out what it said of late."""
    for one in logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters:
        monkeypatch.setattr(one, "last_log", None, raising=False)
    library = logging.getLogger("opentelemetry")
    before = library.handlers, library.propagate
    monkeypatch.setattr(otlp, "COMPLAINT_S", otlp.COMPLAINT_S)
    yield
    library.handlers, library.propagate = before


def ask(model, tracer, path="/v1/embeddings", config=None, method="POST", **options):
    """One request to a server of the model; its status."""
    options = options or {"json": {"input": ["the cat", "sat on the mat"]}}

    async def go():
        app = create_app(Models([model]), config or ServerConfig(), tracer=tracer)
        response = await app.test_client().open(path, method=method, **options)
        await response.get_data()
        return response.status_code

    return asyncio.run(go())


def attributes(span):
    kinds = {one.key: one.value.WhichOneof("value") for one in span.attributes}
    return {one.key: getattr(one.value, kinds[one.key]) for one in span.attributes}


def ids(span):
    return span.trace_id.hex(), span.span_id.hex()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_trace_of_one_request_shows_its_life(embedder, protocol):
    with tracing(protocol) as (receiver, tracer):
        started_ns = time.time_ns()
        assert ask(embedder.model, tracer) == 200
        ended_ns = time.time_ns()
    by_name = {span.name: span for span in receiver.spans}
    root, batch = by_name.pop("POST /v1/embeddings"), by_name.pop("batch")
    assert len(receiver.spans) == 2 + len(by_name)
    assert by_name.keys() == STAGES
    assert (root.kind, root.parent_span_id) == (SERVER_KIND, b"")
    for child in by_name.values():
        assert (child.trace_id, child.parent_span_id) == (root.trace_id, root.span_id)
    assert batch.trace_id != root.trace_id
    assert not batch.parent_span_id
    assert [ids(link) for link in batch.links] == [ids(root)]
    assert [ids(link) for link in by_name["device"].links] == [ids(batch)]

    order = [by_name[name] for name in ("decode", "tokenize", "queue", "device", "encode")]
    times = [started_ns, root.start_time_unix_nano]
    times += [at for one in order for at in (one.start_time_unix_nano, one.end_time_unix_nano)]
    times += [root.end_time_unix_nano, ended_ns]
    assert all(later >= earlier - 1e6 for earlier, later in pairwise(times))
    device = by_name["device"]
    assert device.start_time_unix_nano == batch.start_time_unix_nano
    assert device.end_time_unix_nano == batch.end_time_unix_nano
    assert attributes(receiver.requests[0].resource_spans[0].resource)["service.name"] == "test"


async def test_a_trace_joins_a_front_end_and_the_engine(embedder):
    with tracing("http/protobuf") as (receiver, tracer):
        async with test_front_ends.serving(embedder, 1, tracer) as server:
            assert (await server.ask()).status_code == 200
    by_name = {span.name: span for span in receiver.spans}
    root, batch = by_name.pop("POST /v1/embeddings"), by_name.pop("batch")
    assert by_name.keys() == STAGES
    assert [ids(link) for link in batch.links] == [ids(root)]
    assert [ids(link) for link in by_name["device"].links] == [ids(batch)]
    begins = by_name["device"].start_time_unix_nano, batch.start_time_unix_nano
    assert begins[0] == pytest.approx(begins[1], abs=10**6)  # each process reads the clock


def test_a_clock_that_is_set_while_the_server_runs_is_followed(embedder, monkeypatch):
    hour_ns = 3600 * 10**9
    with tracing() as (receiver, tracer):
        now_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + hour_ns)
        started_ns = time.time_ns()
        assert ask(embedder.model, tracer) == 200
    begun = [span.start_time_unix_nano - started_ns + 1e6 for span in receiver.spans]
    assert begun
    assert all(0 <= one < hour_ns for one in begun)


def test_a_span_says_what_was_asked_and_how_it_went(embedder):
    with tracing() as (receiver, tracer):
        json = {"input": ["cat", "the " * 99]}
        ask(embedder.model, tracer, headers={"x-request-id": "r-1"}, json=json)
    (root,) = receiver.named("POST /v1/embeddings")
    assert attributes(root) == {
        "http.request.method": "POST",
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "jaxembed",
        "gen_ai.request.model": embedder.name,
        "gen_ai.usage.input_tokens": 3 + embedder.max_input_tokens,
        "jaxembed.request_id": "r-1",
        "jaxembed.lane": "bulk",
        "jaxembed.inputs": 2,
        "jaxembed.truncated_inputs": 1,
        "jaxembed.cache_hits": 0,
    }
    batches = [attributes(span) for span in receiver.named("batch")]
    assert {one["jaxembed.replica"] for one in batches} == {0}
    assert {one["jaxembed.model"] for one in batches} == {embedder.name}
    assert sum(one["jaxembed.sequences"] for one in batches) == 2
    assert sum(one["jaxembed.tokens"] for one in batches) == 3 + embedder.max_input_tokens
    for one in batches:
        rows, length = map(int, one["jaxembed.bucket"].split("x"))
        assert one["jaxembed.fill"] == one["jaxembed.tokens"] / (rows * length)


def test_no_text_and_no_key_is_in_a_span(embedder):
    with tracing() as (receiver, tracer):
        headers = {"authorization": "Bearer first-key", "user-agent": "zebra", "cookie": "zebra"}
        for path, body in (
            ("?input=zebra", {"input": ["the zebra", "a quagga"], "user": "zebra"}),
            ("/zebra", {"input": "zebra"}),
            ("/zebra?zebra", {"input": "zebra"}),
            ("", {"input": {"zebra": "quagga"}}),
            ("", {"model": "zebra", "input": "quagga"}),
        ):
            path = "/v1/embeddings" + path
            ask(embedder.model, tracer, path, KEYS, headers=headers, json=body)
    assert len([span for span in receiver.spans if span.kind == SERVER_KIND]) == 5
    sent = b"".join(request.SerializeToString() for request in receiver.requests)
    assert not [word for word in SECRETS if word.encode() in sent]


@pytest.mark.parametrize(
    ("path", "options", "name", "expected"),
    [
        ("/nowhere", {}, "POST", {"http.response.status_code": 404}),
        ("/embed", {"method": "PURGE"}, "HTTP", {"http.request.method": "_OTHER"}),
        ("/embed", {"json": {"inputs": 5}}, "POST /embed", {"error.type": "BadField"}),
        ("/embed", {"config": KEYS}, "POST /embed", {"error.type": "Unauthorized"}),
        ("/embed", {"data": b"{"}, "POST /embed", {"http.response.status_code": 415}),
    ],
)
def test_refused_requests_have_spans_too(path, options, name, expected):
    with tracing() as (receiver, tracer):
        ask(FakeEmbedder(), tracer, path, **{"headers": {}, **options})
    (root,) = [span for span in receiver.spans if span.kind == SERVER_KIND]
    assert root.name == name
    assert expected.items() <= attributes(root).items()
    assert root.status.code != ERROR


def test_probes_and_metrics_are_not_traced():
    with tracing() as (receiver, tracer):
        for path in ("/", "/health", "/livez", "/ready", "/metrics", "/docs"):
            ask(FakeEmbedder(), tracer, path, method="GET", headers={})
    assert not receiver.spans


async def test_a_client_that_goes_away_leaves_a_span():
    model = FakeEmbedder()
    model.gate = asyncio.Event()
    with tracing() as (receiver, tracer):
        async with serving(model, tracer=tracer) as (client, _, _):
            work = asyncio.create_task(client.post("/embed", json={"inputs": "a"}))
            await model.entered.wait()
            work.cancel()
            await model.cancelled.wait()
    (root,) = receiver.named("POST /embed")
    assert attributes(root)["error.type"] == "client_disconnected"
    assert "http.response.status_code" not in attributes(root)


def test_a_static_model_is_traced_without_a_queue(tmp_path):
    sources.write_static(tmp_path / "static", OF_SENTENCE_TRANSFORMERS)
    cache = tmp_path / "cache"
    static = Embedder(str(tmp_path / "static"), cache_dir=cache)
    with static, tracing() as (receiver, tracer):
        assert ask(static.model, tracer) == 200
    names = {span.name for span in receiver.spans}
    assert names == {"POST /v1/embeddings", *STAGES} - {"queue"}


def test_answers_from_the_cache_wait_for_no_queue_and_no_device(tmp_path):
    save_tiny(tmp_path / "model")
    config = EngineConfig(cache_bytes=2**20, null_model=True)
    cached = Embedder(str(tmp_path / "model"), config=config, cache_dir=tmp_path / "cache")
    with cached, tracing() as (receiver, tracer):
        assert ask(cached.model, None, json={"input": "cat"}) == 200
        assert ask(cached.model, tracer, json={"input": "cat"}) == 200
        assert ask(cached.model, tracer, json={"input": ["cat", "sat"]}) == 200
    roots = receiver.named("POST /v1/embeddings")
    whole, part = sorted(roots, key=lambda root: attributes(root)["jaxembed.inputs"])
    assert [attributes(root)["jaxembed.cache_hits"] for root in (whole, part)] == [1, 1]
    of_whole = {span.name for span in receiver.spans if span.parent_span_id == whole.span_id}
    of_part = {span.name for span in receiver.spans if span.parent_span_id == part.span_id}
    assert (of_whole, of_part) == (STAGES - {"queue", "device"}, STAGES)
    assert "jaxembed.lane" not in attributes(whole)


def test_the_clients_trace_is_continued_also_where_it_failed_or_its_state_is_malformed(caplog):
    states = [None, "a=b,c=d", "", "=", "a=b,,=,c", "x" * 10_000, "é=é"]
    model = FakeEmbedder(failure=RuntimeError("boom"))
    with tracing() as (receiver, tracer):
        for state in states:
            headers = {"traceparent": SAMPLED} | ({} if state is None else {"tracestate": state})
            assert ask(model, tracer, headers=headers, json={"input": "a"}) == 500
    roots = receiver.named("POST /v1/embeddings")
    for root in roots:
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
        assert root.status.code == ERROR
        assert attributes(root)["error.type"] == "RuntimeError"
        assert not root.status.message
    assert [root.trace_state for root in roots[:2]] == ["", "a=b,c=d"]
    assert len(roots) == len(states)


MALFORMED_PARENTS = ["", "cat", SAMPLED + "-extra", f"ff-{TRACE}-{PARENT}-01", "0" * 10_000]
MALFORMED_PARENTS += [f"00-{'0' * 32}-{PARENT}-00", f"00-{TRACE}-{'0' * 16}-00"]
MALFORMED_PARENTS += [f"00-{TRACE[1:]}-{PARENT}-01"]
MALFORMED_PARENTS += [f"00-{TRACE}-{PARENT}-0", f"00-{TRACE}-{PARENT}-é"]


def test_a_malformed_traceparent_is_ignored():
    given = [*([value] for value in MALFORMED_PARENTS), [UNSAMPLED, UNSAMPLED]]
    with tracing() as (receiver, tracer):
        for values in given:
            headers = [("traceparent", value) for value in values]
            assert ask(FakeEmbedder(), tracer, headers=headers, json={"input": "a"}) == 200
    for values, root in zip(given, receiver.named("POST /v1/embeddings"), strict=True):
        assert root.trace_id.hex() != TRACE, values
        assert not root.parent_span_id, values


@pytest.mark.parametrize(
    ("sampler", "share", "headers", "is_sampled"),
    [
        ("", "", {"traceparent": UNSAMPLED}, False),
        ("always_off", "", {"traceparent": SAMPLED}, False),
        ("parentbased_always_off", "", {}, False),
        ("parentbased_always_off", "", {"traceparent": SAMPLED}, True),
        ("traceidratio", "0.0001", {"traceparent": f"00-{'0' * 31}1-{PARENT}-00"}, True),
        ("parentbased_traceidratio", "1", {"traceparent": UNSAMPLED}, False),
    ],
)
def test_the_sampler_of_the_environment_is_used(
    embedder, monkeypatch, sampler, share, headers, is_sampled
):
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    with tracing() as (receiver, tracer):
        ask(embedder.model, tracer, headers=headers, json={"input": "cat"})
    assert len(receiver.named("POST /v1/embeddings")) == is_sampled
    assert len(receiver.named("batch")) == is_sampled  # which the sampler is not asked about
    assert len(receiver.named("device")) == is_sampled


def test_a_batch_is_linked_to_at_most_64_requests_and_known_to_all(start, runner):
    with tracing() as (receiver, tracer):
        engine = start(runner)
        runner.gate.clear()
        first = engine.ask([encoding(2)])
        assert runner.entered.acquire(timeout=WAIT_S)
        traces = [tracer.begin(SCOPE) for _ in range(MAX_LINKS + 6)]
        noted = [FutureTrace(trace) for trace in traces]
        futures = [engine.ask([encoding(3, 4 + k)], trace=one) for k, one in enumerate(noted)]
        plain = engine.ask([encoding(5)])
        runner.gate.set()
        for future in (first, *futures, plain):
            future.result(WAIT_S)
        for one in noted:
            one.finish()
        for trace in traces:
            tracer.end(trace, "/embed")
        engine.close(WAIT_S)
    contexts = {ids(span) for span in receiver.named("batch")}
    assert max(len(span.links) for span in receiver.named("batch")) <= MAX_LINKS
    devices = receiver.named("device")
    assert len(devices) == len(traces)
    assert all({ids(link) for link in span.links} <= contexts for span in devices)
    assert all(span.links for span in devices)


def test_a_batch_that_failed_has_failed_in_its_trace(start, runner):
    runner.broken = True
    with tracing() as (receiver, tracer):
        engine = start(runner)
        noted = FutureTrace(tracer.begin(SCOPE))
        with pytest.raises(Exception, match="the device failed"):
            engine.ask([encoding(2)], trace=noted).result(WAIT_S)
        engine.close(WAIT_S)
    (batch,) = receiver.named("batch")
    assert batch.status.code == ERROR


SCOPE = {"method": "POST", "path": "/embed", "headers": [], "scheme": "http", "http_version": "1.1"}


def test_what_is_noted_of_a_request_is_bounded():
    trace = Trace("0" * 32, None, None)
    for k in range(2 * MAX_STAGES):
        trace.note("queue", float(k), k + 1.0)
    assert len(trace.stages) == MAX_STAGES


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_a_receiver_that_fails_holds_nothing_up(monkeypatch, caplog, protocol, kind):
    sizes = {"SCHEDULE_DELAY": "1", "MAX_QUEUE_SIZE": "16", "MAX_EXPORT_BATCH_SIZE": "8"}
    for name, value in sizes.items():
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(EXPORT_S))
    exporter = otlp.GrpcExporter if protocol == "grpc" else otlp.HttpExporter
    export, exporting = exporter.export, set()

    def noted_export(self, spans):
        exporting.add(threading.current_thread())
        return export(self, spans)

    monkeypatch.setattr(exporter, "export", noted_export)
    with socket.socket() as silent, caplog.at_level(logging.WARNING):
        silent.bind(("127.0.0.1", 0))
        if kind == "silent":  # it takes connections and answers nothing
            silent.listen(16)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracer = otlp.OtlpTracer(url, "test", protocol)
        for _ in range(40):
            assert ask(FakeEmbedder(), tracer, "/embed", json={"inputs": "a"}) == 200
        tracer.close(0.01)
        for thread in threading.enumerate():
            if thread.name == "spans":
                thread.join(WAIT_S)
    assert exporting
    assert threading.current_thread() not in exporting  # which answers requests
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if line.startswith("OpenTelemetry: ")]) == 1
    assert {record.name for record in caplog.records} == {"jaxembed.server.otlp"}
    assert kind == "closed" or "the last spans could not be sent within 0.01 s" in told


def test_a_span_that_cannot_be_made_fails_no_request(monkeypatch, caplog):
    with tracing() as (receiver, tracer):
        monkeypatch.setattr(tracer, "_ns", lambda at: 1 / 0)
        assert ask(FakeEmbedder(), tracer) == 200
    assert not receiver.spans
    assert "a span could not be built" in caplog.text


def test_log_lines_of_a_traced_request_carry_its_trace_id():
    record = logging.makeLogRecord({"msg": "cut", "levelname": "INFO", "name": "jaxembed"})
    for formatter in (TextFormatter(LINE), JsonFormatter()):
        assert TRACE not in formatter.format(record)
        with as_current(Trace(TRACE, None, None)):
            line = formatter.format(record)
        assert ("cut trace_id=" + TRACE in line) or f'"trace_id":"{TRACE}"' in line


def test_the_documents_name_every_attribute():
    assert set(codes(sections(DOCS / "operations.md")["Traces"])) >= set(otlp.ATTRIBUTES.values())
