"""The default token budget: measured once on a CPU, fixed elsewhere."""

import json
import os

import jax
import pytest
from conftest import measure_product, tiny_spec

from jaxembed.engine import calibrate
from jaxembed.engine.calibrate import ACCELERATOR_TOKENS, batch_tokens, native_dtype
from jaxembed.models import program


@pytest.fixture(name="measured")
def _measured(monkeypatch) -> dict:
    """A machine of a given rate; counts how often it is measured."""
    machine = {"rate": 1e12, "times": 0, "spread": 1.1}

    def measure(dtype):
        machine["times"] += 1
        return machine["rate"], machine["spread"]

    monkeypatch.setattr(calibrate, "_measure", measure)
    return machine


def budget(cache_dir, dtype="float32", native_layers=False) -> int:
    return batch_tokens(
        program(tiny_spec()), jax.local_devices()[0], dtype, cache_dir, native_layers
    )


def flops_per_token() -> float:
    """Of tiny_spec by hand: qkv, out, up and down in two layers."""
    return 2 * 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64)


@pytest.mark.parametrize("wanted", [256, 1024, 8192, 16384])
def test_a_cpu_gets_the_power_of_two_that_takes_150_ms_at_a_share_of_the_rate(
    tmp_path, measured, wanted
):
    measured["rate"] = 1.5 * wanted * flops_per_token() / (0.15 * 0.3)
    assert budget(tmp_path) == wanted


@pytest.mark.parametrize(
    ("of_a_thousand", "without", "wanted"),
    [(0.2, 256, 256), (0.5, 256, 512), (0.9, 256, 1024), (1.5, 512, 1024), (5.0, 2048, 2048)],
)
def test_the_native_kernels_get_up_to_a_thousand_tokens_where_they_take_about_as_long(
    tmp_path, measured, of_a_thousand, without, wanted
):
    measured["rate"] = 1024 * of_a_thousand * flops_per_token() / (0.15 * 0.7)
    assert budget(tmp_path) == without
    assert budget(tmp_path, native_layers=True) == wanted


@pytest.mark.parametrize(("rate", "wanted"), [(1.0, 256), (1e30, ACCELERATOR_TOKENS)])
def test_the_budget_stays_within_its_bounds(tmp_path, measured, rate, wanted):
    measured["rate"] = rate
    assert budget(tmp_path) == wanted


def test_a_machine_is_measured_once_for_each_dtype(tmp_path, measured):
    assert budget(tmp_path) == budget(tmp_path)
    assert measured["times"] == 1
    budget(tmp_path, "bfloat16")
    budget(tmp_path, "float32")
    assert measured["times"] == 2
    assert len(json.loads((tmp_path / "cpu-rates.json").read_text())) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["cpu-rates.json"]


def test_what_is_remembered_decides_even_if_the_machine_is_faster_today(tmp_path, measured):
    measured["rate"] = 1.0
    assert budget(tmp_path) == 256
    measured["rate"] = 1e30
    assert budget(tmp_path) == 256


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"another machine": 1}', "KEY 0", "KEY -1", "KEY NaN",
             'KEY "fast"', "KEY null", "KEY [1]", "KEY Infinity", "KEY true"]
)  # fmt: skip
def test_a_file_that_says_nothing_of_this_machine_is_measured_anew(tmp_path, measured, text):
    key = f"{calibrate.host_id()}/{os.cpu_count()}/float32"
    text = f'{{"{key}": {text[4:]}}}' if text.startswith("KEY") else text
    (tmp_path / "cpu-rates.json").write_text(text)
    budget(tmp_path)
    budget(tmp_path)
    assert measured["times"] == 1


def test_a_rate_of_a_busy_machine_is_noticed_and_not_kept(tmp_path, measured, caplog):
    measured["spread"] = 2.0
    budget(tmp_path)
    assert "something else uses this machine" in caplog.text
    measured["spread"] = 1.0
    budget(tmp_path)
    budget(tmp_path)
    assert measured["times"] == 2


def test_the_rates_of_other_machines_are_kept(tmp_path, measured):
    (tmp_path / "cpu-rates.json").write_text('{"another machine": 5.0}')
    budget(tmp_path)
    rates = json.loads((tmp_path / "cpu-rates.json").read_text())
    assert rates["another machine"] == 5.0
    assert len(rates) == 2


def test_the_cache_directory_is_made(tmp_path, measured):
    budget(tmp_path / "not" / "there")
    assert (tmp_path / "not" / "there" / "cpu-rates.json").exists()


def test_an_accelerator_gets_a_fixed_budget_and_is_not_measured(tmp_path, measured, monkeypatch):
    class Gpu:
        platform = "gpu"

    unchecked = getattr(batch_tokens, "__wrapped__", batch_tokens)  # Gpu is no jax.Device
    assert unchecked(program(tiny_spec()), Gpu(), "bfloat16", tmp_path) == ACCELERATOR_TOKENS
    assert measured["times"] == 0


@pytest.mark.parametrize(
    ("bfloat16", "wanted"),
    [(2.0, "bfloat16"), (1.25, "bfloat16"), (1.1, "float32"), (1.0, "float32"), (0.4, "float32")],
)
def test_a_cpu_multiplies_bfloat16_where_that_is_clearly_faster(
    tmp_path, monkeypatch, bfloat16, wanted
):
    rates = {"bfloat16": bfloat16 * 1e11, "float32": 1e11}
    monkeypatch.setattr(calibrate, "_measure", lambda dtype: (rates[dtype], 1.0))
    device = jax.local_devices()[0]
    assert native_dtype(device) == wanted  # with nowhere to remember it
    assert native_dtype(device, tmp_path) == wanted
    rates.update(bfloat16=1e11 * 1.2 - 1, float32=1e11)
    assert native_dtype(device, tmp_path) == wanted  # as remembered, also when the machine is busy


def test_an_accelerator_is_asked_what_it_is_and_not_measured(measured):
    class Gpu:
        platform = "gpu"
        compute_capability = "9.0"

    class Older(Gpu):
        compute_capability = "7.5"

    class Amd(Gpu):
        compute_capability = "gfx942"

    class Tpu:
        platform = "tpu"

    unchecked = getattr(native_dtype, "__wrapped__", native_dtype)
    kinds = {kind.__name__: unchecked(kind()) for kind in (Gpu, Older, Amd, Tpu)}
    assert kinds == {"Gpu": "bfloat16", "Older": "float32", "Amd": "bfloat16", "Tpu": "bfloat16"}
    assert measured["times"] == 0


def test_a_product_is_measured_for_real(monkeypatch):
    monkeypatch.setattr(calibrate, "SHAPE", (64, 64, 64))
    rate, spread = measure_product("float32")
    assert 1e5 < rate < 1e15
    assert 1.0 <= spread < 1e3
