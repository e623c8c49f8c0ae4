"""Collects the facts of a served model. It starts nothing, and holds locks only to copy values."""

from collections.abc import Mapping

from jaxembed.config import EngineConfig
from jaxembed.engine.admission import Limit
from jaxembed.engine.autotune.calibrate import BATCH_S, Calibration
from jaxembed.engine.bucket import SHORTEST_ROW, TPU_TILE
from jaxembed.engine.build import Plan
from jaxembed.engine.engine import BucketUse
from jaxembed.models import position_limit
from jaxembed.observability.metrics import STAGES
from jaxembed.runtime.diagnostics.facts import (
    AdmissionFacts,
    BucketFacts,
    DeviceFacts,
    Examination,
    Facts,
    KernelFacts,
    LaneFacts,
    LimitFacts,
    ProgramFacts,
    StageFacts,
    WindowFacts,
    name_of_route,
)
from jaxembed.runtime.diagnostics.findings import bound_by, findings_of
from jaxembed.runtime.diagnostics.history import Window
from jaxembed.runtime.diagnostics.machine import has_avx512_bf16, machine_facts
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.routes import LoadedRoute


def examine(models: Mapping[str, LoadedModel], window: Window) -> dict[str, Examination]:
    """Collect the facts of each model and derive its findings.

    `models` are the loaded models by served name. Returns one examination for each, by the same
    name, and of a model with several routes one for each route. `window` holds the counts of the
    last seconds.
    """
    examinations = {}
    for name, loaded in models.items():
        for route in loaded.text_routes:
            facts = facts_of(name, loaded, window, route)
            examination = Examination(bound_by(facts), findings_of(facts), facts)
            examinations[name_of_route(name, route)] = examination
    return examinations


def facts_of(model: str, loaded: LoadedModel, window: Window, route: str = "") -> Facts:
    """Collect the facts of one route. `window` holds what was counted in the last seconds."""
    served, name = loaded.routes[route], name_of_route(model, route)
    state, grid = served.engine.snapshot(), served.plan.grid
    device = device_facts(served.plan, loaded.config)
    device.failing = sum(failures > 0 for failures in state.failures)
    device.stuck = state.stuck
    device.longest_call_s = state.longest_call_s
    programs = ProgramFacts(
        ready=state.covered,
        healthy=served.engine.healthy,
        buckets=len(grid.buckets),
        compiled=len(state.compiled),
        timed=state.timed,
        drift=state.drift,
        lost_share=state.lost_share,
        compiles=int(window.total(name, "compiles")),
        cache_hits=int(window.total(name, "cache_hits")),
    )
    ran, compiled, unused = window.ran(name), set(state.compiled), BucketUse()
    buckets = [
        BucketFacts(
            rows=bucket.rows,
            length=bucket.length,
            compiled=bucket in compiled,
            cost_ms=state.costs.get(bucket),
            cost_from=state.cost_sources.get(bucket),
            runs=ran.get(bucket, unused).runs,
            useful_tokens=ran.get(bucket, unused).useful_tokens,
            device_ms=1000 * ran.get(bucket, unused).device_s,
            runs_since_start=state.ran.get(bucket, unused).runs,
        )
        for bucket in grid.buckets
    ]
    return Facts(
        model=model,
        route=route,
        task=loaded.spec.task,
        device=device,
        kernels=kernel_facts(served.plan, loaded.config),
        machine=machine_facts(),
        programs=programs,
        buckets=buckets,
        lanes={
            lane: LaneFacts(held.inputs, held.tokens, held.oldest_s)
            for lane, held in state.lanes.items()
        },
        admission=_admission(name, loaded, served, window),
        window=_work(name, served, window),
    )


def device_facts(plan: Plan, config: EngineConfig) -> DeviceFacts:
    """Describe the device of a plan, and the dtype with the reason for its choice."""
    if config.dtype == plan.dtype:
        reason = f"--dtype {config.dtype} asks for it"
    elif plan.platform == "host":
        reason = "the host computes static embeddings in it"
    elif plan.dtype == "bfloat16":
        reason = "the device multiplies bfloat16 natively"
    else:
        reason = "bfloat16 is not faster on this device"
    multiplies_bfloat16 = has_avx512_bf16() if plan.platform == "cpu" else False
    if plan.platform != "cpu" and plan.devices:
        multiplies_bfloat16 = Calibration(plan.devices[0]).native_dtype() == "bfloat16"
    return DeviceFacts(
        name=plan.device_name,
        platform=plan.platform,
        count=max(len(plan.devices), 1),
        dtype=plan.dtype,
        dtype_reason=reason,
        dtype_asked=config.dtype is not None,
        multiplies_bfloat16=multiplies_bfloat16,
        estimated=plan.estimated,
    )


def kernel_facts(plan: Plan, config: EngineConfig) -> KernelFacts:
    """Name the kernels of a plan for each row length, and why the others are not used."""
    choice = plan.kernels.describe()
    return KernelFacts(config.kernels, choice["used"], choice["not_used"])


def _admission(
    name: str, loaded: LoadedModel, served: LoadedRoute, window: Window
) -> AdmissionFacts:
    plan, config, capacity = served.plan, loaded.config, loaded.admission.capacity
    most = served.spec.max_input_tokens
    positions = position_limit(served.spec) or most

    def limit(kind: Limit, allowed: int, held: int) -> LimitFacts:
        return LimitFacts(allowed, held, int(window.count(name, f"refused {kind}")))

    shortest = TPU_TILE if plan.platform == "tpu" else SHORTEST_ROW
    return AdmissionFacts(
        inputs=limit("inputs", capacity.max_inputs, capacity.inputs),
        tokens=limit("tokens", capacity.max_tokens, capacity.tokens),
        bytes=limit("bytes", capacity.max_bytes, capacity.bytes),
        tokens_asked=config.max_queue_tokens is not None,
        max_batch_tokens=plan.max_batch_tokens,
        batch_tokens_asked=config.max_batch_tokens is not None,
        batch_target_ms=1000 * BATCH_S if plan.platform == "cpu" else None,
        least_batch_tokens=shortest * plan.shards,
        buckets_asked=config.buckets is not None,
        max_input_tokens=plan.max_input_tokens,
        model_input_tokens=min(most, positions),
        tokenization_workers=loaded.tokenization_workers,
    )


def _work(name: str, served: LoadedRoute, window: Window) -> WindowFacts:
    seconds, devices = max(window.seconds, 1e-9), max(len(served.plan.devices), 1)
    cpu_s, busy_s = window.machine("cpu") or 0.0, window.machine("busy")
    device_s = window.device_s
    stages: dict[str, StageFacts] = {}
    for stage in STAGES:
        count = window.count(name, f"{stage} count")
        mean_ms = 1000 * window.count(name, f"{stage} seconds") / max(count, 1)
        stages[stage] = StageFacts(int(count), mean_ms)
    return WindowFacts(
        seconds=window.seconds,
        requests=int(window.count(name, "requests")),
        inputs=int(window.count(name, "inputs")),
        refused=int(window.count(name, "refused")),
        truncated=int(window.count(name, "truncated")),
        failed_batches=int(window.count(name, "failed_batches")),
        split_batches=int(window.count(name, "split_batches")),
        not_finite=int(window.count(name, "not_finite")),
        stages=stages,
        device_share=device_s[name] / seconds / devices,
        device_share_of_all=sum(device_s.values()) / seconds / devices,
        loop_share=(window.machine("loop") or 0.0) / seconds,
        loop_delay_ms=1000 * window.delay_s,
        cpu_cores=cpu_s / seconds,
        other_cores=None if busy_s is None else max(busy_s - cpu_s, 0.0) / seconds,
        throttled_share=(window.machine("throttled") or 0.0) / seconds,
    )
