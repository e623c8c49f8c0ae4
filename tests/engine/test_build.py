"""From settings to a plan and an engine."""

import json
import logging

import jax
import pytest
from conftest import TOWERS, tiny_spec

from benchmarks.parameters import random_parameters
from jaxembed.config import EngineConfig
from jaxembed.engine import build as build_module
from jaxembed.engine.autotune import calibrate
from jaxembed.engine.autotune.calibrate import ACCELERATOR_TOKENS, Calibration, Rate
from jaxembed.engine.autotune.kernels import Choice
from jaxembed.engine.autotune.native_trial import LATE, TrialResult
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.build import build, make_plan, stored_results, workers_of
from jaxembed.engine.replica import NullReplica, Replica
from jaxembed.errors import ConfigError
from jaxembed.models import program
from jaxembed.models.attention import by_native
from jaxembed.observability.metrics import Telemetry


@pytest.fixture(name="planned")
def _planned(tmp_path, monkeypatch):
    """Plan the tiny model on a machine whose measured budget is 512 tokens."""
    monkeypatch.setattr(Calibration, "batch_tokens", lambda *of: 1024 if of[-1] else 512)

    def planned(spec=None, **fields):
        spec = spec or tiny_spec()
        config = EngineConfig(**({"devices": 1, "dtype": "float32"} | fields))
        return make_plan(spec, program(spec), config, tmp_path)

    return planned


def long_spec(limit=32_768):
    return tiny_spec(config=tiny_spec().config | {"max_positions": 100_000}, max_input_tokens=limit)


def grid_of(tmp_path, *buckets):
    path = tmp_path / "buckets.json"
    path.write_text(json.dumps({"buckets": buckets}))
    return path


def test_a_model_that_overflows_float16_is_not_computed_in_it(planned):
    gemma = tiny_spec(**TOWERS["gemma3"])
    with pytest.raises(ConfigError, match=r"--dtype float16: .* use bfloat16 or float32"):
        planned(gemma, dtype="float16")
    assert planned(gemma, dtype="bfloat16").dtype == "bfloat16"
    assert planned(dtype="float16").dtype == "float16"


def test_by_default_the_checkpoint_and_the_machine_decide(planned, monkeypatch):
    made = planned()
    assert made.max_input_tokens == 64
    assert made.max_batch_tokens == 512
    assert made.devices == tuple(jax.local_devices()[:1])
    assert (made.shards, made.full_warmup, made.dtype) == (1, False, "float32")
    assert planned(warmup="full").full_warmup
    assert (made.platform, made.device_name) == ("cpu", "cpu")
    assert [len(planned(devices=count).devices) for count in (None, 3)] == [8, 3]
    for count in (9, 0, -1):
        with pytest.raises(ConfigError, match=f"--devices {count}: this machine has 8"):
            planned(devices=count)
    monkeypatch.setattr(Calibration, "native_dtype", lambda self: "bfloat16")
    assert planned(dtype=None).dtype == "bfloat16"
    assert planned(dtype="float16").dtype == "float16"


def test_a_limit_over_the_positions_of_the_model_is_refused(planned):
    assert planned(max_input_tokens=64).max_input_tokens == 64
    assert planned(max_input_tokens=20).max_input_tokens == 20
    assert planned(tiny_spec(max_input_tokens=512)).max_input_tokens == 64
    with pytest.raises(ConfigError, match="--max-input-length 65 exceeds the 64 positions"):
        planned(max_input_tokens=65)


def test_a_limit_over_the_grid_or_the_budget_is_cut_unless_it_was_set(planned, tmp_path, caplog):
    made = planned(long_spec())
    assert made.max_input_tokens == made.grid.max_length == 8192
    assert made.max_batch_tokens == 512
    assert "accepts inputs of 32768 tokens, but the longest row" in caplog.text
    made = planned(long_spec(limit=2048), max_batch_tokens=1024)
    assert made.max_input_tokens == made.grid.max_length == 1024
    assert "longer inputs are truncated" in caplog.text
    with pytest.raises(ConfigError, match=r"--max-input-length 2048 does not fit.*1024 tokens"):
        planned(long_spec(), max_batch_tokens=1024, max_input_tokens=2048)
    made = planned(long_spec(), buckets=grid_of(tmp_path, [1, 32_768]))
    assert made.max_input_tokens == made.max_batch_tokens == 32_768


def test_a_plan_says_whether_the_speed_of_the_cpu_is_an_estimate(planned, monkeypatch):
    rate = Rate(1e11, sure=True)
    monkeypatch.setattr(calibrate, "_measure", lambda dtype: rate)
    assert not planned(dtype="bfloat16").estimated
    rate = Rate(1e11, sure=False)
    assert planned().estimated
    assert not planned(dtype="bfloat16").estimated  # of which the rate was kept
    assert not planned(null_model=True).estimated


def test_costs_are_those_of_the_cores_and_the_quota_that_the_process_has(planned, monkeypatch):
    usual = planned().cost_file.identity
    monkeypatch.setattr(build_module, "core_count", lambda: 0.5)
    assert planned().cost_file.identity == usual | {"cores": 0.5}


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        (TrialResult(0.001, 0.5), True),
        (TrialResult(0.001, 1.5), True),
        (TrialResult(0.001, 1.5, busy=True), False),
        (TrialResult(0.001, 0.5, busy=True), False),
        (TrialResult(failed=LATE), False),
    ],
)
def test_kernels_are_tried_again_unless_all_was_quiet(tmp_path, monkeypatch, caplog, first, kept):
    def results_of_a_start(result):
        results = {"linear": TrialResult(0.001, 0.5), "mlp": result}
        monkeypatch.setattr(build_module, "try_native", lambda *arguments: results)
        device = jax.local_devices()[0]
        return stored_results(program(tiny_spec()), device, "bfloat16", tmp_path, {})["mlp"]

    assert results_of_a_start(first) == first
    assert ("other programs use this machine" in caplog.text) == first.busy
    second = TrialResult(0.001, 0.75)
    assert results_of_a_start(second) == (first if kept else second)


@pytest.mark.usefixtures("whole_grids")
def test_inputs_over_the_measured_budget_have_rows_of_their_own(planned):
    made = planned(long_spec(limit=2048))
    assert (made.max_input_tokens, made.max_batch_tokens) == (2048, 512)
    assert max(b.tokens for b in made.grid.buckets if b.rows > 1) == 512


def test_with_native_kernels_a_row_of_the_whole_budget_holds_several_inputs(planned, monkeypatch):
    assert planned().grid.max_length == 64
    native_choice = Choice(native=by_native, joins=True)
    monkeypatch.setattr(build_module, "choose_native", lambda *arguments: native_choice)
    made = planned()
    assert (made.max_input_tokens, made.max_batch_tokens) == (64, 1024)
    assert made.kernels.native
    longer = [bucket for bucket in made.grid.buckets if bucket.length > 64]
    assert longer == [Bucket(1, 1024)]
    assert planned(max_batch_tokens=128).grid.max_length == 128
    native_choice = Choice(native=by_native)
    made = planned()
    assert (made.grid.max_length, made.max_batch_tokens) == (64, 512)


def test_rows_of_native_kernels_are_whole_tiles_whatever_the_limit_is(planned, monkeypatch):
    assert planned(max_input_tokens=50).grid.max_length == 50
    monkeypatch.setattr(build_module, "choose_native", lambda *arguments: Choice(native=by_native))
    assert planned(max_input_tokens=50).grid.max_length == 64


def test_a_grid_from_a_file_is_used_and_checked_against_the_limit(planned, tmp_path):
    path = grid_of(tmp_path, [1, 64], [8, 16])
    made = planned(buckets=path, max_batch_tokens=128)
    assert made.grid.buckets == (Bucket(1, 64), Bucket(8, 16))
    with pytest.raises(ConfigError, match="the model's limit is 2048"):
        planned(long_spec(limit=2048), buckets=path)


def test_sharded_buckets_have_rows_for_every_device(planned, tmp_path):
    made = planned(devices=8, parallel="sharded")
    assert made.shards == 8
    assert all(bucket.rows % 8 == 0 for bucket in made.grid.buckets)
    assert planned(devices=8, parallel="replicas").shards == 1
    with pytest.raises(ConfigError, match="bucket 1x64 cannot be divided into 8 equal parts"):
        planned(devices=8, parallel="sharded", buckets=grid_of(tmp_path, [1, 64]))


def test_the_null_model_has_no_devices_and_loads_no_parameters(planned):
    made = planned(null_model=True, devices=None)
    assert made.devices == ()
    assert made.max_batch_tokens == ACCELERATOR_TOKENS
    assert (made.platform, made.device_name, made.dtype) == ("null", "null", "float32")

    def load():
        raise AssertionError("parameters were loaded")

    spec = tiny_spec()
    engine = build(made, program(spec), load, spec, EngineConfig(null_model=True), Telemetry())
    assert [type(worker.runner) for worker in engine.workers] == [NullReplica]


@pytest.mark.parametrize(
    ("parallel", "groups"), [("replicas", [[0], [1], [2]]), ("sharded", [[0, 1, 2]])]
)
def test_a_replica_for_each_device_or_one_over_all(planned, parallel, groups):
    spec, config = tiny_spec(), EngineConfig(parallel=parallel, devices=3, dtype="float32")
    made = planned(parallel=parallel, devices=3)
    engine = build(
        made, program(spec), lambda: random_parameters(spec).items(), spec, config, Telemetry()
    )
    runners = [worker.runner for worker in engine.workers]
    assert all(isinstance(runner, Replica) for runner in runners)
    local = jax.local_devices()
    assert [list(r.devices) for r in runners] == [[local[i] for i in group] for group in groups]
    assert len({id(worker.scheduler) for worker in engine.workers}) == len(groups)


@pytest.mark.usefixtures("whole_grids")
def test_only_float16_keeps_a_float32_program_of_the_longest_bucket(planned):
    spec = tiny_spec()
    for dtype, bucket in (("float16", Bucket(1, 64)), ("bfloat16", None)):
        made = planned(dtype=dtype, devices=1)
        (worker,) = workers_of(made, program(spec), random_parameters(spec).items())
        assert worker.runner._float32_bucket == bucket


def tuned_grid(tmp_path, **tuned):
    path = tmp_path / "buckets.json"
    file = {"buckets": [[1, 64], [64, 16]], "max_batch_tokens": 1024, "tuned": tuned}
    path.write_text(json.dumps(file))
    return path


def warnings_of(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_grid_tuned_for_something_else_serves_with_a_warning(planned, tmp_path, caplog):
    made = planned(buckets=tuned_grid(tmp_path, dtype="float32", content_hash=""))
    assert not warnings_of(caplog)
    assert made.max_batch_tokens == 1024  # of the file
    assert made.grid.buckets == (Bucket(1, 64), Bucket(64, 16))
    with pytest.raises(ConfigError, match="64x16 has 1024 tokens, more than max_batch_tokens=512"):
        planned(buckets=tuned_grid(tmp_path), max_batch_tokens=512)
    planned(buckets=tuned_grid(tmp_path, dtype="bfloat16", device="abacus"))
    (line,) = warnings_of(caplog)
    assert "was tuned for dtype bfloat16 (now float32) and device abacus (now " in line
