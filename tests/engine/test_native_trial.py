"""Native calls are tried beside XLA: wrong and slow ones are not used, the others are."""

import logging

import jax
import jax.numpy as jnp
import pytest
from conftest import TOWERS, WIDER_TOWERS, open_tiny, save_tiny, tiny_spec
from native_builds import AVX2, AVX512, calling
from representatives import each
from test_adapters import adapted_spec

from jaxembed.engine import build
from jaxembed.engine.autotune import native_trial
from jaxembed.engine.autotune.kernels import UNSUITED, choose_native
from jaxembed.engine.autotune.native_trial import TrialResult, native_calls_of, try_native
from jaxembed.models import native, program
from jaxembed.models.attention import ByNative
from jaxembed.platform.cores import CpuTimes

pytestmark = pytest.mark.usefixtures("native_kernels", "engines_try_native")

# What is left out of a call, or taken for another, is in one operand.
PLANTED = {
    **dict.fromkeys(("linear", "gelu", "quick_gelu", "gated_gelu", "gated_silu"), "bias"),
    **dict.fromkeys(("attention", "joint_attention", "self_attention"), "segments"),
    "norm": "shift",
    "mlp": "down_bias",
}
POST_NORM = {"linear", "norm", "joint_attention", "self_attention", "mlp"}
CALLS = {
    "bert": POST_NORM | {"gelu"},
    "mpnet": POST_NORM | {"gelu"},
    "nomic_bert": POST_NORM | {"gated_silu"},
    "nomic_moe": POST_NORM | {"gelu"},
    "gte": POST_NORM | {"gated_gelu"},
    "jina_bert": POST_NORM | {"gated_gelu"},
    "jina_bert_code": {"linear", "norm", "joint_attention", "gated_gelu"},
    "clip": {"linear", "quick_gelu", "joint_attention", "self_attention"},
    "clip, gelu": {"linear", "gelu", "joint_attention", "self_attention"},
    "siglip": {"linear", "gelu_tanh", "joint_attention", "self_attention"},
    "modernbert": {"linear", "gated_gelu", "joint_attention", "self_attention"},
    "qwen3": {"linear", "gated_silu", "attention"},
    "gemma2": {"linear", "gated_gelu_tanh", "attention"},
    "t5": {"linear", "joint_attention", "self_attention"},
    "t5, gated": {"linear", "gated_gelu_tanh", "joint_attention", "self_attention"},
}


@pytest.fixture(autouse=True)
def _never_slower(monkeypatch):
    """Native calls this small may take as long as XLA's."""
    monkeypatch.setattr(native_trial, "CLEARLY_SLOWER", float("inf"))


def backbone(name: str, sizes=WIDER_TOWERS, quantize=None):
    tower = of_bytes(sizes[name]) if quantize else sizes[name]
    return program(tiny_spec(**tower), quantize=quantize)


def of_bytes(tower):
    """A tower with multiples of 64 features, which quantized weights need."""
    return tower | {"config": tower["config"] | {"intermediate_size": 128}}


def chosen(name: str, tmp_path, wanted="auto", quantize=None, **options):
    model, device = backbone(name, quantize=quantize), jax.local_devices()[0]
    return choose_native(model, device, "bfloat16", wanted, tmp_path, **options)


def plant(monkeypatch, name: str, operand: str) -> None:
    """Let calls of this name take an operand for zeros, and all segments for one."""
    usual = native.NativeCall.run

    def run(self, operands):
        if self.name == name:
            most = int(operand == "segments")
            operands = {**operands, operand: jnp.clip(operands[operand], 0, most)}
        return usual(self, operands)

    monkeypatch.setattr(native.NativeCall, "run", run)


@pytest.mark.parametrize("name", each(CALLS, "bert", "qwen3"))
def test_all_calls_of_a_model_are_right(name, tmp_path):
    results = try_native(backbone(name), jax.local_devices()[0], "bfloat16")
    assert set(results) == CALLS[name]
    for result in results.values():
        assert result.failed == ""
        assert 0 <= result.off < result.allowed / 2
        assert result.times_xla > 0
    assert chosen(name, tmp_path, results=lambda: results).native == ByNative()


@pytest.mark.parametrize("name", each(["bert", "nomic_bert", "qwen3"], "nomic_bert"))
def test_calls_with_adapters_are_right_too(name):
    model = program(adapted_spec(WIDER_TOWERS[name]))
    adapted = {one.name for one in native_calls_of(model, "bfloat16") if one.mode & native.ADAPTED}
    assert adapted == CALLS[name] - {"attention", "joint_attention"}
    results = try_native(model, jax.local_devices()[0], "bfloat16")
    assert set(results) == CALLS[name]
    for result in results.values():
        assert result.refusal(faster=False) is None


@pytest.fixture(name="in_float32", params=(AVX512, AVX2), ids=lambda of: of.name)
def _in_float32(request, native_kernels, tmp_path):
    """Both ways through product.h in float32."""
    with calling(request.param, tmp_path) as name:
        yield name


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("name", each(CALLS, "bert", "qwen3", "jina_bert"))
def test_all_calls_of_a_model_are_right_in_float32(name):
    results = try_native(backbone(name), jax.local_devices()[0], "float32")
    assert set(results) == CALLS[name]
    for result in results.values():
        assert result.failed == ""
        assert 0 <= result.off < 2e-5


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("name", each(["bert", "nomic_bert", "qwen3"], "bert"))
def test_calls_with_adapters_are_right_in_float32(name):
    results = try_native(
        program(adapted_spec(WIDER_TOWERS[name])), jax.local_devices()[0], "float32"
    )
    assert set(results) == CALLS[name]
    for result in results.values():
        assert result.failed == ""
        assert 0 <= result.off < 2e-5


@pytest.mark.parametrize("dtype", each(["bfloat16", "float32"], "bfloat16"))
@pytest.mark.parametrize("name", each(CALLS, "nomic_bert", "qwen3"))
def test_all_calls_of_a_quantized_model_are_right(name, dtype):
    model = backbone(name, quantize="int8")
    calls = native_calls_of(model, dtype)
    quantized = {call.name for call in calls if call.mode & native.QUANTIZED}
    assert quantized == CALLS[name] - {"attention", "joint_attention"}
    results = try_native(model, jax.local_devices()[0], dtype)
    assert set(results) == CALLS[name]
    for result in results.values():
        assert result.failed == ""
        assert 0 <= result.off < result.allowed


@pytest.mark.parametrize("name", each(["bert", "nomic_bert", "qwen3"], "nomic_bert"))
def test_calls_of_a_quantized_model_with_adapters_are_right(name):
    model = program(adapted_spec(of_bytes(WIDER_TOWERS[name])), quantize="int8")
    results = try_native(model, jax.local_devices()[0], "bfloat16")
    assert set(results) == CALLS[name]
    for result in results.values():
        assert result.refusal(faster=False) is None


@pytest.mark.parametrize("name", each(("linear", "norm", "gelu", "mlp", "gated_silu"), "mlp"))
def test_a_wrong_scale_is_found(name, monkeypatch, tmp_path):
    plant(monkeypatch, name, "down_kernel_scales" if name == "mlp" else "kernel_scales")
    choice = chosen(
        next(model for model in CALLS if name in CALLS[model]), tmp_path, quantize="int8"
    )
    assert "off by" in choice.refused[f"native {name}"]


@pytest.mark.parametrize("name", each(PLANTED, "linear", "attention"))
def test_a_planted_error_is_found_and_only_its_call_is_not_used(name, monkeypatch, tmp_path):
    plant(monkeypatch, name, PLANTED[name])
    choice = chosen(next(model for model in CALLS if name in CALLS[model]), tmp_path)
    assert set(choice.refused) == {f"native {name}"}
    assert "off by" in choice.refused[f"native {name}"]
    assert choice.native == ByNative(frozenset({name}))
    assert choice.native_layout == (name != "linear")
    assert choice.name_of(64) == f"native_without_{name}"


def test_a_call_that_raises_is_not_used_and_says_why(monkeypatch, tmp_path):
    def run(self, operands):
        raise RuntimeError("no such instruction\nand a long story")

    monkeypatch.setattr(native.NativeCall, "run", run)
    choice = chosen("qwen3", tmp_path)
    assert choice.native is None
    reason = "RuntimeError: no such instruction"
    assert choice.refused == {f"native {name}": reason for name in CALLS["qwen3"]}


def test_a_slower_call_is_not_used_unless_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(native_trial, "CLEARLY_SLOWER", 1.1)
    results = {"linear": TrialResult(0.001, 0.5), "attention": TrialResult(0.001, 1.3)}
    choice = chosen("qwen3", tmp_path, results=lambda: results)
    assert choice.native == ByNative(frozenset({"attention"}))
    assert choice.refused == {"native attention": "takes 1.30 times as long as XLA"}
    assert not choice.joins
    choice = chosen("qwen3", tmp_path, "native", results=lambda: results)
    assert choice.native == ByNative()
    assert choice.joins


@pytest.mark.parametrize(("waited_s", "busy"), [(0.0, False), (30.0, True)])
def test_a_call_timed_beside_other_programs_is_refused_for_this_start(monkeypatch, waited_s, busy):
    def timed(work):
        assert work() > 0
        return 1.5, CpuTimes(wall=30.0, cpu=0.3, waited=waited_s)

    monkeypatch.setattr(native_trial, "CLEARLY_SLOWER", 1.1)
    monkeypatch.setattr(native_trial, "MAX_WAITED", 1 / 3)
    monkeypatch.setattr(native_trial, "timed", timed)
    results = try_native(backbone("qwen3"), jax.local_devices()[0], "bfloat16")
    assert {result.busy for result in results.values()} == {busy}
    refusal = "takes 1.50 times as long as XLA"
    refusal += " while other programs ran; the next start tries again" if busy else ""
    assert results["linear"].refusal(faster=True) == refusal
    assert results["linear"].refusal(faster=False) is None


def test_numbers_that_are_none_are_wrong():
    assert "off by nan" in (TrialResult(float("nan"), 0.5).refusal(faster=True) or "")


def test_calls_whose_turn_comes_too_late_are_not_used(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native_trial, "TRIAL_S", 0.0)
    choice = chosen("qwen3", tmp_path)
    assert choice.native is None
    (warning,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "native linear" in warning
    assert "was not tried in time" in warning
    assert set(choice.refused.values()) == {native_trial.LATE}


def test_a_model_of_other_widths_says_so(tmp_path):
    sizes = {**TOWERS["bert"]["config"], "hidden_size": 36, "num_heads": 4, "intermediate_size": 40}
    model = program(tiny_spec(architecture="bert", config=sizes, hidden_size=36))
    choice = choose_native(model, jax.local_devices()[0], "bfloat16", "auto", tmp_path)
    assert choice.native is None
    assert choice.refused == {"native": UNSUITED}


def test_results_are_kept_and_the_next_start_tries_nothing(monkeypatch, tmp_path, caplog):
    checkpoint = save_tiny(tmp_path / "tiny", **WIDER_TOWERS["qwen3"])

    def kernels():
        with open_tiny(checkpoint, tmp_path, (1, 64), dtype="bfloat16") as embedder:
            return embedder.model.describe()["kernels"]

    with monkeypatch.context() as planted:
        plant(planted, "attention", "segments")
        first = kernels()
        assert "off by" in first["not_used"]["native attention"]
        planted.setattr(build, "try_native", None)
        with caplog.at_level(logging.WARNING):
            assert kernels() == first
    usual = build.try_native
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not any("native" in record.getMessage() for record in warnings)
    (file,) = (tmp_path / "cache" / "costs").glob("*-native.json")
    file.write_text("{}")
    monkeypatch.setattr(native_trial, "CLEARLY_SLOWER", float("inf"))
    late = TrialResult(failed=native_trial.LATE)
    monkeypatch.setattr(build, "try_native", lambda *of: usual(*of) | {"linear": late})
    assert kernels()["not_used"] == {"native linear": native_trial.LATE}
    monkeypatch.setattr(build, "try_native", usual)
    assert kernels()["not_used"] == {}
    assert "is ignored" in caplog.text
