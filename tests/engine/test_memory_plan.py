"""Token budgets and grids for the memory of devices that are only described."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from conftest import tiny_spec

from jaxembed.config import EngineConfig
from jaxembed.engine import build
from jaxembed.engine.autotune import memory_plan as plans
from jaxembed.engine.autotune.cost_file import SavedFile
from jaxembed.engine.autotune.kernels import Choice
from jaxembed.engine.autotune.memory_plan import MemoryPlan, memory_plan
from jaxembed.engine.bucket import Bucket, BucketGrid, default_grid
from jaxembed.engine.placement import room_for_models
from jaxembed.errors import ConfigError
from jaxembed.models import program

GB = 1_000_000_000
REMEDY = "set --max-input-length to less than 8192"
# bytes of parameters, bytes of a run for each token, and the longest input: the order of real ones
MODELS = {
    "BERT-base": (0.22 * GB, 13_000, 512),
    "Qwen3-0.6B": (1.2 * GB, 40_000, 8192),
    "Qwen3-8B": (15.1 * GB, 156_000, 8192),
}
REFUSED = {("Qwen3-8B", 16)}  # on a device of so many gigabytes


def plan_of(name: str, gigabytes: float, permits: int = 2) -> MemoryPlan:
    parameters, a_token, _ = MODELS[name]
    room = int(gigabytes * GB) * 9 // 10
    return MemoryPlan(
        "a device", room, int(parameters), permits, lambda bucket: a_token * bucket.tokens
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gigabytes", [16, 32, 80, 141])
def test_models_fit_on_devices_or_are_refused_with_the_figures(name, gigabytes):
    grid_of = partial(default_grid, MODELS[name][2])
    if (name, gigabytes) in REFUSED:
        refusal = r"not fit into the memory of a device: parameters take 15100 MB, of 14400 MB"
        with pytest.raises(ConfigError, match=refusal):
            plan_of(name, gigabytes).fit(grid_of, 16_384, REMEDY)
    else:
        assert plan_of(name, gigabytes).fit(grid_of, 16_384, REMEDY) == (16_384, grid_of(16_384))


def test_the_budget_is_halved_until_the_model_fits(caplog):
    grid_of = partial(default_grid, 8192)
    caplog.set_level("INFO")
    # of 18.45 GB two runs may take 3.3 GB: 10,700 tokens each
    assert plan_of("Qwen3-8B", 20.5).fit(grid_of, 16_384, REMEDY) == (8192, grid_of(8192))
    assert "batches have at most 8192 tokens instead of 16384" in caplog.text
    assert plan_of("Qwen3-8B", 20.5, permits=1).fit(grid_of, 16_384, REMEDY)[0] == 16_384
    # the longest input is in a bucket of its own, which no budget divides
    with pytest.raises(ConfigError) as refused:
        plan_of("Qwen3-8B", 19).fit(grid_of, 16_384, REMEDY)
    assert str(refused.value) == (
        "the model does not fit into the memory of a device: parameters take 15100 MB, and 2 runs "
        "of a batch of 1x8192 tokens 2556 MB, of 17100 MB; set --max-input-length to less than 8192"
    )
    short = partial(default_grid, 512)
    assert plan_of("Qwen3-8B", 19).fit(short, 16_384, REMEDY)[0] == 4096


def test_a_budget_that_the_user_has_set_is_refused_by_its_name():
    grid = default_grid(512, 65_536)
    plan = MemoryPlan("a device", 15_300 * 10**6, GB, 2, lambda bucket: 10**6 * bucket.tokens)
    with pytest.raises(ConfigError, match=r"^--max-batch-tokens 65536: .* of 15300 MB; lower it$"):
        plan.fit(lambda budget: grid, 65_536, "lower it", "--max-batch-tokens 65536")


def test_a_program_that_the_compiler_refuses_does_not_fit():
    def run_bytes(bucket: Bucket) -> float:
        return math.inf if bucket.tokens > 4096 else 0.0

    plan = MemoryPlan("a device", GB, 1, 2, run_bytes)
    assert plan.fit(partial(default_grid, 512), 16_384, REMEDY)[0] == 4096
    plan = MemoryPlan("a device", GB, 1, 2, lambda bucket: math.inf)
    with pytest.raises(ConfigError, match="tokens more than there is, of 1000 MB"):
        plan.fit(partial(default_grid, 512), 16_384, REMEDY)


def test_the_longest_rows_and_the_most_slots_are_candidates():
    grid = BucketGrid((Bucket(64, 16), Bucket(4, 128), Bucket(1, 512), Bucket(1, 1024)))
    plan = MemoryPlan("a device", GB, 1, 2, lambda bucket: 10**6 * bucket.rows * bucket.slots)
    assert plan.candidates(grid) == {Bucket(1, 1024), Bucket(64, 16)}
    by_kernel = replace(plan, kernel_of=lambda length: "triton" if length > 512 else "xla")
    assert by_kernel.candidates(grid) == {Bucket(1, 1024), Bucket(1, 512), Bucket(64, 16)}
    assert plan.fit(partial(default_grid, 512), 16_384, REMEDY)[0] == 1024


def test_the_compiler_is_asked_once(monkeypatch, tmp_path):
    model, device = program(tiny_spec()), jax.local_devices()[0]
    compiled = []
    usual = plans.compile_described

    def compile_described(*arguments):
        compiled.append(arguments[2])
        return usual(*arguments)

    monkeypatch.setattr(plans, "compile_described", compile_described)

    def needed() -> tuple[int, float]:
        saved = SavedFile(tmp_path, {"device": "a"}, "run_bytes")
        plan = memory_plan(model, [device], "float32", Choice(), GB, 2, saved)
        return plan.parameters, plan.run_bytes(Bucket(4, 16))

    parameters, run = needed()
    assert parameters == sum(4 * math.prod(leaf.shape) for leaf in model.shapes.values())
    assert run > 4 * 16 * 32 * 4  # at least the states of one layer
    assert needed() == (parameters, run)
    assert compiled == [Bucket(4, 16)]

    def refuse(*arguments):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(plans, "compile_described", refuse)
    saved = SavedFile(tmp_path, {"device": "b"}, "run_bytes")
    plan = memory_plan(model, [device], "float32", Choice(), GB, 2, saved)
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 15.87G of 15.75G"
    assert plan.run_bytes(Bucket(4, 16)) == math.inf
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem: a bug"
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        plan.run_bytes(Bucket(8, 16))


def test_a_model_is_planned_for_the_memory_of_its_device(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "is_remote", lambda platform: True)
    room = [None]
    monkeypatch.setattr(build, "room_for_models", lambda device: room[0])
    spec = tiny_spec()

    def planned(**options) -> build.Plan:
        config = EngineConfig(devices=1, dtype="float32", kernels="xla", **options)
        return build.make_plan(spec, program(spec), config, tmp_path)

    whole = planned()
    room[0] = 10 * GB
    assert (planned().grid, planned().max_batch_tokens) == (whole.grid, whole.max_batch_tokens)
    (saved,) = (tmp_path / "costs").glob("*-memory.json")
    run_bytes = max(json.loads(saved.read_text())["run_bytes"].values())
    room[0] = int(1.5 * run_bytes)
    assert planned().max_batch_tokens == whole.max_batch_tokens // 2
    assert planned().grid != whole.grid
    room[0] = int(run_bytes / 100)
    with pytest.raises(ConfigError, match=r"^--max-batch-tokens 4096: the model does not fit"):
        planned(max_batch_tokens=4096)


def test_without_the_compilers_figures_the_plan_stays(monkeypatch, tmp_path, caplog):
    def fail(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction")

    monkeypatch.setattr(build, "is_remote", lambda platform: True)
    monkeypatch.setattr(build, "room_for_models", lambda device: 10**6)
    monkeypatch.setattr(plans, "compile_described", fail)
    spec, config = tiny_spec(), EngineConfig(devices=1, dtype="float32", kernels="xla")
    assert build.make_plan(spec, program(spec), config, tmp_path).grid.buckets
    assert "the memory that batches need is not known" in caplog.text


def test_what_jax_may_use_is_the_memory_of_a_device():
    """--device-memory-fraction lowers the limit that the device reports."""
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 40 * GB})
    assert room_for_models(device) == 36 * GB
    device.memory_stats = lambda: None
    assert room_for_models(device) is None
