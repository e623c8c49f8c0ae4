"""The default token budget: measured once on a CPU, fixed elsewhere."""

import itertools
import json
from types import SimpleNamespace

import jax
import pytest
from conftest import measure_product, tiny_spec

from jaxembed.data.spec import DType
from jaxembed.engine.autotune import calibrate
from jaxembed.engine.autotune.calibrate import (
    ACCELERATOR_TOKENS,
    ROUNDS,
    Calibration,
    Rate,
    device_id,
)
from jaxembed.models import program
from jaxembed.platform.cores import CpuTimes


@pytest.fixture(name="measured")
def _measured(monkeypatch) -> dict:
    """A machine of a given rate; counts how often it is measured."""
    machine = {"rate": 1e12, "times": 0, "quiet": True}

    def measure(dtype):
        machine["times"] += 1
        return Rate(machine["rate"], machine["quiet"])

    monkeypatch.setattr(calibrate, "_measure", measure)
    return machine


def budget(cache_dir, dtype: DType = "float32", native_layers=False) -> int:
    calibration = Calibration(jax.local_devices()[0], cache_dir)
    return calibration.batch_tokens(program(tiny_spec()), dtype, native_layers)


def flops_per_token() -> float:
    """Of tiny_spec by hand: qkv, out, up and down in two layers."""
    return 2 * 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64)


@pytest.mark.parametrize("wanted", [256, 1024, 8192, 16384])
def test_a_cpu_gets_the_power_of_two_that_takes_150_ms_at_such_a_rate(tmp_path, measured, wanted):
    measured["rate"] = 1.5 * wanted * flops_per_token() / (0.15 * 0.3)
    assert budget(tmp_path / "not" / "there") == wanted
    assert (tmp_path / "not" / "there" / "cpu-rates.json").exists()
    measured["rate"] = {256: 1.0, 16384: 1e30}.get(wanted, measured["rate"])  # it has bounds
    assert budget(tmp_path / "other") == wanted


@pytest.mark.parametrize(
    ("of_a_thousand", "without", "wanted"),
    [(0.2, 256, 256), (0.5, 256, 512), (0.9, 256, 1024), (1.5, 512, 1024), (5.0, 2048, 2048)],
)
def test_native_kernels_get_a_thousand_tokens(tmp_path, measured, of_a_thousand, without, wanted):
    measured["rate"] = 1024 * of_a_thousand * flops_per_token() / (0.15 * 0.7)
    assert budget(tmp_path) == without
    assert budget(tmp_path, native_layers=True) == wanted


def test_a_machine_is_measured_once_for_each_dtype(tmp_path, measured):
    assert budget(tmp_path) == budget(tmp_path)
    assert measured["times"] == ROUNDS
    budget(tmp_path, "bfloat16")
    budget(tmp_path, "float32")
    assert measured["times"] == 2 * ROUNDS
    assert len(json.loads((tmp_path / "cpu-rates.json").read_text())) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["cpu-rates.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"another machine": 1}', "KEY 0", "KEY -1", "KEY NaN",
             'KEY "fast"', "KEY null", "KEY [1]", "KEY Infinity", "KEY true"]
)  # fmt: skip
def test_a_file_that_says_nothing_of_this_machine_is_measured_anew(tmp_path, measured, text):
    key = f"{device_id(jax.local_devices()[0])}/float32"
    text = f'{{"{key}": {text[4:]}}}' if text.startswith("KEY") else text
    (tmp_path / "cpu-rates.json").write_text(text)
    budget(tmp_path)
    budget(tmp_path)
    assert measured["times"] == ROUNDS


def test_a_round_that_was_slow_is_not_used_and_the_rate_not_kept(tmp_path, monkeypatch):
    rates = iter([218e9, 202e9, 400e9, 209e9])
    monkeypatch.setattr(calibrate, "_measure", lambda dtype: Rate(next(rates), sure=True))
    calibration = Calibration(jax.local_devices()[0], tmp_path)
    assert calibration.native_dtype() == "bfloat16"
    assert not calibration.sure
    kept = json.loads((tmp_path / "cpu-rates.json").read_text())
    assert [key.split("/")[1] for key in kept] == ["float32"]


def test_a_rate_of_a_busy_machine_serves_one_start_and_no_other(tmp_path, measured, caplog):
    measured["quiet"] = False
    calibration = Calibration(jax.local_devices()[0], tmp_path)
    for _ in range(2):
        assert calibration.native_dtype() == "float32"
        calibration.batch_tokens(program(tiny_spec()), "float32")
        calibration.token_ms(program(tiny_spec()), "float32")
    assert not calibration.sure
    assert measured["times"] == 2 * ROUNDS  # of each dtype
    assert "other programs use this machine" in caplog.text
    assert list(tmp_path.iterdir()) == []
    measured["quiet"] = True
    budget(tmp_path)
    budget(tmp_path)
    assert measured["times"] == 3 * ROUNDS
    kept = Calibration(jax.local_devices()[0], tmp_path)
    kept.token_ms(program(tiny_spec()), "float32")
    assert kept.sure


def test_other_cores_are_another_device_with_a_rate_of_its_own(tmp_path, measured, monkeypatch):
    device, names = jax.local_devices()[0], []
    for cores, count in ({0, 1, 2, 3}, 4.0), ({1, 2}, 2.0), ({1, 2}, 1.5), ({2}, 1.0):
        monkeypatch.setattr(calibrate, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(calibrate, "core_count", lambda count=count: count)
        names.append(device_id(device).removeprefix(f"cpu-{calibrate.host_id()}-"))
        budget(tmp_path)
        budget(tmp_path)
    assert names == ["4-cores", "2-cores", "1.5-of-2-cores", "1-cores"]
    assert measured["times"] == 4 * ROUNDS


@pytest.mark.parametrize(
    ("bfloat16", "wanted"),
    [(2.0, "bfloat16"), (1.25, "bfloat16"), (1.1, "float32"), (1.0, "float32"), (0.4, "float32")],
)
def test_a_cpu_multiplies_bfloat16_where_that_is_faster(tmp_path, monkeypatch, bfloat16, wanted):
    rates = {"bfloat16": bfloat16 * 1e11, "float32": 1e11}
    monkeypatch.setattr(calibrate, "_measure", lambda dtype: Rate(rates[dtype], sure=True))
    device = jax.local_devices()[0]
    assert Calibration(device).native_dtype() == wanted  # with nowhere to remember it
    assert Calibration(device, tmp_path).native_dtype() == wanted
    rates.update(bfloat16=1e11 * 1.2 - 1, float32=1e11)
    assert Calibration(device, tmp_path).native_dtype() == wanted  # as remembered


def test_an_accelerator_is_asked_what_it_is_and_not_measured(measured):
    kinds = {
        ("gpu", "9.0"): "bfloat16",
        ("gpu", "7.5"): "float32",
        ("gpu", "gfx942"): "bfloat16",
        ("tpu", ""): "bfloat16",
    }
    for (platform, capability), dtype in kinds.items():
        calibration = Calibration(jax.local_devices()[0])
        calibration._device = SimpleNamespace(platform=platform, compute_capability=capability)
        assert calibration.native_dtype() == dtype
        assert calibration.batch_tokens(program(tiny_spec()), "bfloat16") == ACCELERATOR_TOKENS
        assert calibration.sure
    assert measured["times"] == 0


FLOPS = 2.0 * 1024 * 768 * 3072


def rate_of(*runs: tuple[float, float, float], cores: float = 2.0) -> tuple[float, bool]:
    """The rate in GFLOP/s of runs with milliseconds by the clock, of CPU time and waited for."""
    times = [CpuTimes(*(ms / 1e3 for ms in run)) for run in runs]
    rate = calibrate._rate_of(times, FLOPS, cores, threads=2)
    return rate.flops / 1e9, rate.sure


def test_the_rate_is_that_of_the_fastest_run_although_others_waited():
    assert rate_of((11.8, 23.5, 0.0), (20.0, 23.8, 14.0)) == (pytest.approx(409, abs=1), True)
    assert rate_of((12.4, 23.9, 3.2), (14.3, 24.1, 14.4)) == (pytest.approx(404, abs=1), True)
    assert not rate_of((24.0, 47.9, 24.0))[1]  # threads that wait for others of their process


@pytest.mark.parametrize(
    "runs",
    [  # as measured on two cores that gave 412 GFLOP/s when they were quiet
        [(48.4, 29.9, 74.7), (34.9, 24.6, 49.9), (47.2, 31.2, 70.0)],  # beside one program
        [(111.9, 34.0, 185.3), (78.1, 26.1, 159.0)],  # beside two
        [(203.0, 31.4, 332.4), (230.7, 26.4, 431.6), (146.7, 25.9, 285.6)],  # beside six
    ],
)
def test_runs_that_waited_for_cores_give_an_estimate_from_their_cpu_time(runs):
    flops, sure = rate_of(*runs)
    assert not sure
    assert 412 / 1.15 < flops < 412 * 1.15


@pytest.mark.parametrize(
    ("run", "sure"),
    [
        ((11.8, 23.6, 0.0), True),  # before the quota is used up
        ((48.5, 24.2, 71.0), True),  # it stops the run
        ((200.0, 24.2, 370.0), False),  # and so do other programs
    ],
)
def test_a_quota_limits_the_rate_although_short_runs_have_more_cores(run, sure):
    assert rate_of(run, cores=0.5) == (pytest.approx(409 / 4, abs=3), sure)


@pytest.mark.parametrize(("waited", "runs", "sure"), [(0, 7, True), (9, 7, False), (0, 3, True)])
def test_a_product_runs_for_as_much_cpu_time_on_a_busy_machine(monkeypatch, waited, runs, sure):
    """Of two cores, unless that takes too long by the clock."""
    clock = itertools.count(step=5) if runs == 3 else itertools.repeat(0)
    ran = []

    def timed(run):
        ran.append(run())
        return None, CpuTimes(wall=0.03 + waited, cpu=0.0625, waited=waited)

    monkeypatch.setattr(calibrate, "SHAPE", (64, 64, 64))
    monkeypatch.setattr(calibrate, "timed", timed)
    monkeypatch.setattr(calibrate, "core_count", lambda: 2.0)
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert measure_product("float32").sure is sure
    assert len(ran) == runs
