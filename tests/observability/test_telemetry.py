"""The metrics as Prometheus reads them."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxembed.observability.metrics import (
    DURATION_BUCKETS,
    FAILURES,
    MAX_BUFFERED,
    NO_MODEL,
    STAGES,
    BufferedHistogram,
    Labelled,
    Telemetry,
    exposition,
    row_lengths,
)
from jaxembed.server.errors import REPLIES


def families(telemetry):
    text = telemetry.exposition().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def sums(family):
    """The samples of a family that have no label, by name."""
    return {sample.name: sample.value for sample in family.samples if not sample.labels}


def labels(family, label):
    return {sample.labels[label] for sample in family.samples if label in sample.labels}


def test_every_series_is_present_from_the_start():
    found = families(Telemetry())
    assert labels(found["te_request_count"], "method") == {"single", "batch"}
    assert labels(found["te_request_success"], "method") == {"single", "batch"}
    assert labels(found["te_request_failure"], "err") == set(FAILURES)
    assert labels(found["jaxembed_stage_seconds"], "stage") == set(STAGES)
    assert all(family.samples for family in found.values())
    assert {reply.err for reply in REPLIES.values()} <= {None, *FAILURES}


def test_counters_are_typed_counters_under_the_names_of_tei():
    telemetry = Telemetry()
    telemetry.inputs["embed"].observe_many(0.5, [1.0] * 3, [2.0] * 3)
    text = telemetry.exposition().decode()
    assert "# TYPE te_embed_count counter" in text
    assert "\nte_embed_count 3.0\n" in text
    assert "_total" not in text
    assert (len(DURATION_BUCKETS), DURATION_BUCKETS[0]) == (35, pytest.approx(1.5e-5))
    assert 14.5 < DURATION_BUCKETS[-1] < 14.6


def test_lengths_are_counted_and_shown_as_tei_does_and_finer():
    telemetry = Telemetry(max_input_tokens=20)
    telemetry.input_length.observe_many([1, 9, 9, 16])
    telemetry.input_length.observe_many([20])
    found = families(telemetry)

    def shown(name):
        return {
            sample.labels["le"]: sample.value
            for sample in found[name].samples
            if sample.name.endswith("_bucket")
        }

    assert shown("te_request_input_length") == {
        "1.0": 1, "2.0": 1, "4.0": 1, "8.0": 1, "16.0": 4, "+Inf": 5
    }  # fmt: skip
    assert shown("jaxembed_input_tokens") == {"8.0": 1, "16.0": 4, "20.0": 5, "+Inf": 5}
    told = {"jaxembed_input_tokens_count": 5, "jaxembed_input_tokens_sum": 55}
    assert sums(found["jaxembed_input_tokens"]) == told
    telemetry.input_length.observe_many([20] * (MAX_BUFFERED + 1))  # more than are kept uncounted
    found = families(telemetry)
    assert shown("jaxembed_input_tokens")["+Inf"] == MAX_BUFFERED + 6


@pytest.mark.parametrize("most", [1, 7, 8, 64, 100, 256, 520, 8192])
def test_row_lengths_grow_by_an_eighth_at_most_or_by_eight_and_end_at_the_limit(most):
    lengths = row_lengths(most)
    assert lengths[-1] == most
    for shorter, longer in pairwise([0, *lengths]):
        assert 0 < longer - shorter <= max(8, shorter / 8)


def test_several_models_are_told_apart_by_a_label():
    one, other = Telemetry(max_input_tokens=512), Telemetry(max_input_tokens=64)
    one.queue_size.set(2)
    other.queue_size.set(3)
    other.request_count.labels("batch").inc()
    one.compile_count.set_function(lambda: 7)
    other.compile_count.set_function(lambda: 7)
    text = exposition({"org/a": one, 'b"': other}).decode()
    found = {f.name: f for f in text_string_to_metric_families(text)}
    shown = {one.labels["model"]: one.value for one in found["te_queue_size"].samples}
    assert shown == {"org/a": 2, 'b"': 3}
    assert '\nte_request_count{method="batch",model="org/a"} 0.0\n' in text
    assert "\njaxembed_compile_count 7.0\n" in text
    assert text.count("# TYPE te_request_input_length histogram") == 1
    assert 'te_request_input_length_bucket{le="512.0",model="org/a"}' in text
    assert "_total" not in text


def test_requests_without_a_model_have_only_the_series_that_count_them():
    """The others would be 800 lines of zeros, and count the compiles of the process as none."""
    one, nobody = Telemetry(), Telemetry()
    one.compile_count.set_function(lambda: 7)
    nobody.compile_count.set_function(lambda: 7)
    nobody.request_failure.labels("validation").inc()
    text = exposition({"a": one, NO_MODEL: nobody}, label_one=True).decode()
    found = {f.name: f for f in text_string_to_metric_families(text)}
    counted = {
        name.removesuffix("_created")
        for name, family in found.items()
        if "" in labels(family, "model")
    }
    assert counted == {"te_request_failure", "jaxembed_stage_seconds"}
    assert '\nte_request_failure{err="validation",model=""} 1.0\n' in text
    assert found["jaxembed_compile_count"].samples[0].value == 7


def test_no_observation_of_many_threads_is_lost():
    telemetry = Telemetry()
    values = [1.0, 2.0, 3.0, 5000.0]

    def observe():
        for _ in range(MAX_BUFFERED):
            for value in values:
                telemetry.batch_size.observe(value)
            telemetry.batch_size.observe_many(values)

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(observe) for _ in range(4)]
        while not all(one.done() for one in done):
            telemetry.exposition()
    count = 2 * 4 * MAX_BUFFERED  # of each value
    family = families(telemetry)["te_batch_next_size"]
    shown = {one.labels["le"]: one.value for one in family.samples if one.labels}
    wanted = {"1.0": count, "2.0": 2 * count, "4096.0": 3 * count}
    assert shown == shown | wanted
    told = {"te_batch_next_size_count": 4 * count, "te_batch_next_size_sum": sum(values) * count}
    assert sums(family) == told


@pytest.mark.parametrize("bounds", [DURATION_BUCKETS, (0.5, 1, 4, 2**20)])
def test_a_histogram_is_written_as_prometheus_client_writes_its_own(bounds, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.75e9)
    theirs = Histogram("seconds", "How long", ["stage"], buckets=bounds, registry=None)
    ours = Labelled("stage", {"queue": BufferedHistogram("seconds", "How long", bounds)})
    for value in (0.0, 0.5, 0.75, 3e6, *bounds):
        for histogram in (theirs, ours):
            histogram.labels("queue").observe(value)
    texts = []
    for histogram in (theirs, ours):
        registry = CollectorRegistry()
        registry.register(histogram)
        texts.append(generate_latest(registry).decode())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("count", [3, MAX_BUFFERED + 3])
def test_inputs_have_a_time_in_each_stage_and_their_sum(count):
    telemetry = Telemetry()
    telemetry.inputs["predict"].observe_many(0.5, [1.0] * count, [2.0] * count)
    found = families(telemetry)
    for name, seconds in {"_tokenization": 0.5, "_queue": 1.0, "_inference": 2.0, "": 3.5}.items():
        name = f"te_predict{name}_duration"
        wanted = {f"{name}_count": count, f"{name}_sum": count * seconds}
        assert sums(found[name]) == wanted
    assert found["te_predict_success"].samples[0].value == count
    assert telemetry.inputs["embed"].count == 0
