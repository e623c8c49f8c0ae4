"""Which attention is taken: a kernel that is right and faster; no failure stops a start."""

import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from conftest import TOWERS, WIDER_TOWERS, tiny_spec
from representatives import each

from jaxembed.engine.autotune import kernels, native_trial
from jaxembed.engine.autotune.cost_file import SavedFile
from jaxembed.engine.autotune.kernels import (
    Choice,
    KernelTrial,
    calls,
    choose_kernels,
    choose_native,
)
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.transfer import gather_parts
from jaxembed.errors import ConfigError
from jaxembed.models import native, program
from jaxembed.models.attention import EVERYTHING, AttentionMask, by_native, by_xla
from jaxembed.models.kernels import Call, Kernel, triton

pytestmark = pytest.mark.usefixtures("engines_try_native")


GRID = BucketGrid((Bucket(1, 16), Bucket(1, 128), Bucket(2, 128)))


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch):
    monkeypatch.setattr(kernels, "PROBE_TOKENS", 256)
    monkeypatch.setattr(kernels, "PROBE_RUNS", 1)


def right(query, key, value, segments, attention_mask, slots):
    return by_xla(query, key, value, segments, attention_mask)


def wrong(query, key, value, segments, attention_mask, slots):
    """Forgets where segments end."""
    return by_xla(query, key, value, (segments != 0).astype(jnp.int32), attention_mask)


def broken(*operands, **slots):
    """NaN in a real token."""
    return right(*operands, **slots).at[0, 0, 0, 0].set(jnp.nan)


def failing(query, key, value, segments, attention_mask, slots):
    raise RuntimeError("no such instruction\nand a long story")


def kernel(attend, name="mine", refuses=lambda call, length: None):
    return {name: lambda: Kernel(name, attend, refuses)}


@pytest.fixture(name="times")
def _times(monkeypatch) -> dict:
    """Milliseconds by attention, XLA's 2.0: in place of the clock's."""
    found = {by_xla: 2.0}
    usual = KernelTrial._run

    def run(self, attend, call):
        mixed, _ = usual(self, attend, call)
        return mixed, found[getattr(attend, "attend", attend)]

    monkeypatch.setattr(KernelTrial, "_run", run)
    return found


def chosen(known, wanted="auto", backbone="bert", dtype="float32") -> Choice:
    model = program(tiny_spec(**TOWERS[backbone]))
    return choose_kernels(model, jax.local_devices()[0], dtype, GRID, wanted, known)


def test_the_calls_of_a_model_are_read_off_its_layers():
    def of(backbone, dtype="bfloat16"):
        return calls(program(tiny_spec(**TOWERS[backbone])), dtype)

    whole = Call(4, 4, 8, "bfloat16", EVERYTHING)
    assert of("bert") == Counter({whole: 2})
    near = Call(4, 4, 8, "bfloat16", AttentionMask(reach=3))
    assert of("modernbert") == Counter({whole: 1, near: 2})
    assert of("qwen3", "float32") == {Call(4, 2, 8, "float32", AttentionMask(causal=True)): 2}


@pytest.mark.parametrize("backbone", ["bert", "qwen3"])
def test_a_kernel_that_is_right_and_faster_is_taken_in_all_but_short_rows(times, backbone):
    times[right] = 1.0
    choice = chosen(kernel(right), backbone=backbone)
    assert choice.describe()["used"] == {"16": "xla", "128": "mine"}
    assert choice.implementation(Bucket(1, 16)) is by_xla
    taken = choice.implementation(Bucket(1, 128))
    assert (taken.attend, taken.slots) == (right, 32)


def test_a_kernel_that_is_slower_is_not_taken_unless_it_is_asked_for(times):
    times[right] = 3.0
    choice = chosen(kernel(right))
    assert not choice.taken
    assert choice.refused == {"mine": "rows of 128: 6.000 ms, not faster than 4.000 ms"}
    assert set(chosen(kernel(right), "mine").taken) == {128}


def test_the_fastest_of_several_is_taken(times):
    times |= {right: 1.5, wrong: 0.1, broken: 0.1}

    def another(*operands, **slots):
        return right(*operands, **slots)

    times[another] = 1.0
    known = kernel(right, "slow") | kernel(another, "fast")
    choice = chosen(known | kernel(wrong, "wrong") | kernel(broken, "broken"))
    assert choice.describe()["used"] == {"16": "xla", "128": "fast"}
    assert "off by" in choice.refused["wrong"]
    assert "off by inf" in choice.refused["broken"]


@pytest.mark.parametrize("dtype", each(["float32", "bfloat16", "float16"], "bfloat16"))
def test_a_kernel_with_wrong_numbers_is_never_taken(dtype):
    choice = chosen(kernel(wrong), dtype=dtype)
    assert not choice.taken
    assert "4/4 heads of 8" in choice.refused["mine"]
    with pytest.raises(ConfigError, match=r"--kernels mine cannot be used: .* off by"):
        chosen(kernel(wrong), "mine", dtype=dtype)


def test_a_kernel_that_gathers_outputs_wrongly_is_never_taken(times):
    def misplaced(flat, order, sizes):
        return gather_parts(flat, order[::-1], sizes)

    times[right] = 1.0
    for gather, reason in ((gather_parts, None), (misplaced, "gathers outputs")):
        candidate = Kernel("mine", right, lambda call, length: None, gather=gather)
        choice = chosen({"mine": lambda candidate=candidate: candidate})
        assert set(choice.taken) == (set() if reason else {128})
        assert (reason or "") in choice.refused.get("mine", "")


def test_a_kernel_that_fails_or_is_not_installed_is_named_with_its_reason():
    def missing():
        raise ImportError("No module named 'dew_flash_attn'")

    known = kernel(failing, "broken") | {"absent": missing}
    known |= kernel(right, "picky", lambda call, length: f"{length} tokens are too few")
    choice = chosen(known)
    assert not choice.taken
    assert choice.refused == {
        "absent": "ImportError: No module named 'dew_flash_attn'",
        "broken": "rows of 128: RuntimeError: no such instruction",
        "picky": "rows of 128: 128 tokens are too few",
    }


def test_rows_that_xla_does_not_manage_stop_nothing(monkeypatch):
    def too_long(self, call):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(KernelTrial, "_in_float32", too_long)
    choice = chosen(kernel(right))
    assert choice.refused == {"mine": "rows of 128: XLA: RuntimeError: RESOURCE_EXHAUSTED"}


def test_probing_ends(monkeypatch):
    monkeypatch.setattr(kernels, "PROBE_S", -1.0)
    choice = chosen(kernel(right))
    assert not choice.taken
    assert "not tried within" in choice.refused["mine"]


def test_long_rows_are_tried_first_and_results_are_kept(monkeypatch, tmp_path, times):
    """A start with too little time is followed by one that tries the rest, and what failed."""
    times |= {right: 1.0, broken: 0.1, failing: 0.1}
    model, device = program(tiny_spec()), jax.local_devices()[0]
    grid = BucketGrid((Bucket(1, 128), Bucket(1, 256)))
    known = kernel(right, "fast") | kernel(broken, "wrong") | kernel(failing, "failing")
    seconds, tried = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: seconds[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(kernels, "time", clock)
    usual = KernelTrial.milliseconds_if_right

    def milliseconds(self, kernel):
        tried.append((self._bucket.length, kernel.name))
        seconds[0] = 1e6
        return usual(self, kernel)

    monkeypatch.setattr(KernelTrial, "milliseconds_if_right", milliseconds)

    def start() -> Choice:
        seconds[0] = 0.0
        tried.clear()
        saved = SavedFile(tmp_path, {"device": "a"}, "attention")
        return choose_kernels(model, device, "float32", grid, "auto", known, saved=saved)

    first = start()
    assert tried == [(256, "fast"), (256, "wrong"), (256, "failing")]
    assert first.describe()["used"] == {"128": "xla", "256": "fast"}
    assert "rows of 128: not tried within 60 s" in first.refused["fast"]
    start()
    assert tried == [(256, "failing")]
    monkeypatch.setitem(times, failing, 0.1)
    monkeypatch.setattr(kernels, "PROBE_S", 2e6)
    third = start()
    assert tried == [(256, "failing"), *((128, name) for name in known)]
    assert third.describe()["used"] == {"128": "fast", "256": "fast"}
    assert "off by" in third.refused["wrong"]
    (path,) = (tmp_path / "costs").iterdir()
    path.write_text(path.read_text().replace('"xla": 4.0', '"xla": "soon"'))
    assert start().describe()["used"] == {"128": "fast", "256": "fast"}
    assert len(tried) == 6  # of a damaged file nothing is used


def test_a_kernel_of_another_platform_is_refused_by_name():
    with pytest.raises(ConfigError, match="--kernels splash: on cpu the choices are auto, xla"):
        chosen(None, "splash")


def test_our_kernel_passes_the_trial(times):
    """The one a GPU would run, interpreted: what is drawn, compared and allowed fits it."""
    interpreted = partial(triton.attend, interpret=True)

    def attend(*operands, slots):
        return interpreted(*operands, slots=slots)

    times[attend] = 1.0
    assert set(chosen(kernel(attend), backbone="qwen3", dtype="bfloat16").taken) == {128}


def chosen_on_cpu(cache_dir, wanted="auto", dtype="bfloat16") -> Choice:
    model, device = program(tiny_spec(**WIDER_TOWERS["bert"])), jax.local_devices()[0]
    native_choice = choose_native(model, device, dtype, wanted, cache_dir)
    return choose_kernels(model, device, dtype, GRID, wanted, native_choice=native_choice)


@pytest.fixture(name="never_slower")
def _never_slower(monkeypatch, native_kernels):
    """Native calls this small may take as long as XLA's."""
    monkeypatch.setattr(native_trial, "CLEARLY_SLOWER", float("inf"))


@pytest.mark.usefixtures("never_slower")
@pytest.mark.parametrize("wanted", ["auto", "native"])
def test_on_cpu_the_native_kernels_are_taken_in_every_row(wanted, tmp_path):
    choice = chosen_on_cpu(tmp_path, wanted)
    assert choice.native_layout
    assert choice.describe() == {"used": {"16": "native", "128": "native"}, "not_used": {}}
    assert choice.implementation(Bucket(1, 16)) == by_native


def test_the_native_kernels_are_not_loaded_where_xla_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "load_library", None)
    choice = chosen_on_cpu(tmp_path, "xla")
    assert choice.native is None
    assert choice.describe() == {"used": {"16": "xla", "128": "xla"}, "not_used": {}}


def test_the_native_kernels_do_not_compute_in_float16(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "load_library", None)
    reason = "computes in bfloat16 or float32, but this model in float16"
    assert chosen_on_cpu(tmp_path, dtype="float16").describe()["not_used"] == {"native": reason}
    with pytest.raises(ConfigError, match=f"--kernels native cannot be used: {reason}"):
        chosen_on_cpu(tmp_path, "native", "float16")


def test_without_native_kernels_xla_does_it_and_says_why(monkeypatch, tmp_path):
    def refuse(cache_dir, dtype):
        raise native.NativeUnavailable(reason)

    monkeypatch.setattr(native, "load_library", refuse)
    reason = "there is no C compiler"
    choice = chosen_on_cpu(tmp_path)
    assert choice.native is None
    not_used = {"native": reason}
    assert choice.describe() == {"used": {"16": "xla", "128": "xla"}, "not_used": not_used}
    assert choice.implementation(Bucket(1, 128)) is by_xla
    with pytest.raises(ConfigError, match=f"--kernels native cannot be used: {reason}"):
        chosen_on_cpu(tmp_path, "native")


@pytest.mark.usefixtures("never_slower")
def test_rows_may_be_long_where_all_attention_is_native(tmp_path):
    device = jax.local_devices()[0]
    results = dict.fromkeys(("linear", "attention"), native_trial.TrialResult(times_xla=0.5))
    for backbone in ("bert", "modernbert", "qwen3"):
        for sizes, joins in ((WIDER_TOWERS, True), (TOWERS, False)):  # heads of 32, and narrower
            model = program(tiny_spec(**sizes[backbone]))
            choice = choose_native(model, device, "bfloat16", "auto", tmp_path, lambda: results)
            assert choice.native == by_native
            assert choice.joins == joins, backbone
    model = program(tiny_spec(**WIDER_TOWERS["deberta"]))  # which has attention of its own
    choice = choose_native(model, device, "bfloat16", "auto", tmp_path)
    assert choice.native is not None
    assert not choice.joins


def test_a_model_with_attention_of_its_own_tries_nothing(tmp_path):
    saved = SavedFile(tmp_path, {"device": "a"}, "attention")
    model, device = program(tiny_spec(**TOWERS["deberta"])), jax.local_devices()[0]
    choice = choose_kernels(model, device, "float32", GRID, "auto", kernel(right), saved=saved)
    assert choice.refused == {"mine": f"rows of 128: {kernels.NO_CALLS}"}
    assert not (tmp_path / "costs").exists()
