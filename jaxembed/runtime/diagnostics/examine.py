"""Collects the facts of a served model for `jaxembed doctor`: its current state, and how much its
counters grew over the last minute. Locks are held only while values are copied."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from jaxembed.config import EngineConfig
from jaxembed.engine.admission import Limit
from jaxembed.engine.autotune.calibrate import BATCH_S, Calibration
from jaxembed.engine.bucket import SHORTEST_ROW, TPU_TILE, Bucket
from jaxembed.engine.build import Plan
from jaxembed.engine.engine import BucketUse
from jaxembed.models import position_limit
from jaxembed.observability.metrics import STAGES, Counter, Labelled
from jaxembed.runtime.diagnostics.facts import (
    AdmissionFacts,
    BucketFacts,
    DeviceFacts,
    Examination,
    Facts,
    KernelFacts,
    LimitFacts,
    ProgramFacts,
    QueueFacts,
    StageFacts,
    WindowFacts,
    name_of_route,
)
from jaxembed.runtime.diagnostics.findings import bound_by, findings_of
from jaxembed.runtime.diagnostics.machine import has_avx512_bf16, machine_counts, machine_facts
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.routes import LoadedRoute

WINDOW_S = 60.0  # samples older than this are dropped
SAMPLE_S = 5.0  # seconds between two samples

Counts = dict[str, float]  # values by the name of the counter


@dataclass(frozen=True)
class ModelTotals:
    """The counters of a model since its start, and the batches of one of its routes by bucket."""

    counts: Counts
    ran: Mapping[Bucket, BucketUse]


@dataclass(frozen=True)
class Sample:
    """A sample of the counters of the machine and of all models."""

    at: float  # time.monotonic()
    machine: Counts
    models: Mapping[str, ModelTotals]  # the keys are those of `name_of_route`
    delay_s: float = 0.0  # how late the event loop's timer was


class Window:
    """The increase of all counters from the first to the last of some samples.

    `seconds` is the time between the first and the last sample. `delay_s` is the largest delay of
    all samples.
    """

    def __init__(self, samples: list[Sample]):
        self._first, self._last = samples[0], samples[-1]
        self.seconds = self._last.at - self._first.at
        self.delay_s = max(sample.delay_s for sample in samples)

    def machine(self, name: str) -> float | None:
        """Return the seconds by which a counter of `machine_counts` grew in this window; None if
        the system lacks the counter."""
        if name not in self._last.machine:
            return None
        return self._last.machine[name] - self._first.machine.get(name, 0.0)

    def count(self, model: str, name: str) -> float:
        """Return the increase of a counter of a model, such as "requests", in this window. Raises
        KeyError for an unknown model or counter."""
        return self._last.models[model].counts[name] - self._at_start(model).counts.get(name, 0.0)

    def total(self, model: str, name: str) -> float:
        """Return the value of a counter of a model at the end of this window. Raises KeyError for
        an unknown model or counter."""
        return self._last.models[model].counts[name]

    def ran(self, model: str) -> dict[Bucket, BucketUse]:
        """Return the totals of the batches that a model ran in this window, by bucket."""
        before, after = self._at_start(model).ran, self._last.models[model].ran
        return {bucket: use - before.get(bucket, BucketUse()) for bucket, use in after.items()}

    @property
    def device_s(self) -> dict[str, float]:
        """The device time of each model in this window, in seconds, by `name_of_route`."""
        return {
            model: sum((use.device_s for use in self.ran(model).values()), 0.0)
            for model in self._last.models
        }

    def _at_start(self, model: str) -> ModelTotals:
        """Return a model's totals at the first sample; empty totals if the model was loaded after
        that sample. A counter that decreased shows that the model was loaded again."""
        first, last = self._first.models.get(model), self._last.models[model]
        if first is None or any(last.counts[name] < count for name, count in first.counts.items()):
            return ModelTotals({}, {})
        return first


class History:
    """The samples of the last WINDOW_S seconds. Only the thread of the event loop may use it."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def note(self, models: Mapping[str, LoadedModel], delay_s: float = 0.0) -> None:
        """Take a sample now, and drop the samples that are older than WINDOW_S seconds."""
        self._samples.append(_sample(models, delay_s))
        oldest_at = self._samples[-1].at - WINDOW_S
        while self._samples[0].at < oldest_at:
            self._samples.popleft()

    def window(self, models: Mapping[str, LoadedModel]) -> Window:
        """Return the window from the oldest sample until now; 0 seconds if there is no sample."""
        return Window([*self._samples, _sample(models, 0.0)])


def _sample(models: Mapping[str, LoadedModel], delay_s: float) -> Sample:
    """Copy the counters of all models now; `delay_s` is the delay of the event loop.

    The routes of a model share its counters, but each has its own batches.
    """
    totals: dict[str, ModelTotals] = {}
    for name, loaded in models.items():
        telemetry, refused = loaded.telemetry, loaded.admission.capacity.refused
        counts = {  # only the counters that findings need: to read all takes milliseconds
            "requests": _sum_of(telemetry.request_count),
            "inputs": sum(float(series.count) for series in telemetry.inputs.values()),
            "refused": _sum_of(telemetry.request_failure.labels("overloaded")),
            "truncated": _sum_of(telemetry.truncated_inputs),
            "failed_batches": _sum_of(telemetry.failed_batches),
            "split_batches": _sum_of(telemetry.split_batches),
            "not_finite": _sum_of(telemetry.not_finite),
            "compiles": _sum_of(telemetry.compile_count),
            "cache_hits": _sum_of(telemetry.compile_cache_hits),
        }
        for stage in STAGES:
            count, seconds = telemetry.stage.labels(stage).totals()
            counts |= {f"{stage} count": float(count), f"{stage} seconds": seconds}
        counts |= {f"refused {limit}": float(refused[limit]) for limit in get_args(Limit)}
        for route, state in loaded.snapshot().items():
            totals[name_of_route(name, route)] = ModelTotals(counts, state.ran)
    return Sample(time.monotonic(), machine_counts(), totals, delay_s)


def _sum_of(counter: Counter | Labelled[Counter]) -> float:
    """Return the sum of a counter over all values of its labels."""
    return sum(sample.value for family in counter.collect() for sample in family.samples)


def examine(models: Mapping[str, LoadedModel], window: Window) -> dict[str, Examination]:
    """Collect the facts of each model and derive its findings.

    The keys of `models` are served names. `window` has the increase of counters in the last minute.
    Returns an examination for each route that takes texts, by `name_of_route`.
    """
    examinations = {}
    for name, loaded in models.items():
        for route in loaded.text_routes:
            facts = facts_of(name, loaded, window, route)
            examinations[name_of_route(name, route)] = Examination(
                bound_by(facts), findings_of(facts), facts
            )
    return examinations


def facts_of(model: str, loaded: LoadedModel, window: Window, route: str = "") -> Facts:
    """Collect the facts of one route of the model with the served name `model`. `window` has the
    increase of counters in the last minute."""
    served, name = loaded.routes[route], name_of_route(model, route)
    state, grid = served.engine.snapshot(), served.plan.grid
    device = device_facts(served.plan, loaded.config)
    group_size = served.plan.shards * served.plan.degree
    device.failing = group_size * sum(failures > 0 for failures in state.failures)
    device.stuck = group_size * state.stuck
    device.not_joined = group_size * (len(state.failures) - state.joined)
    device.longest_call_s = state.longest_call_s
    ran, compiled, no_use = window.ran(name), set(state.compiled), BucketUse()
    buckets = [
        BucketFacts(
            rows=bucket.rows,
            length=bucket.length,
            compiled=bucket in compiled,
            cost_ms=state.costs.get(bucket),
            cost_from=state.cost_sources.get(bucket),
            runs=ran.get(bucket, no_use).runs,
            useful_tokens=ran.get(bucket, no_use).useful_tokens,
            device_ms=1000 * ran.get(bucket, no_use).device_s,
            runs_since_start=state.ran.get(bucket, no_use).runs,
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
        programs=ProgramFacts(
            ready=state.covered,
            healthy=served.engine.healthy,
            buckets=len(grid.buckets),
            compiled=len(state.compiled),
            timed=state.timed,
            drift=state.drift,
            lost_share=state.lost_share,
            compiles=int(window.total(name, "compiles")),
            cache_hits=int(window.total(name, "cache_hits")),
        ),
        buckets=buckets,
        lanes={
            priority: QueueFacts(queue.inputs, queue.tokens, queue.oldest_s)
            for priority, queue in state.queues.items()
        },
        admission=_admission(name, loaded, served, window),
        window=_window_facts(name, served, window),
    )


def device_facts(plan: Plan, config: EngineConfig) -> DeviceFacts:
    """Describe the devices of a plan, its dtype, and why this dtype was chosen."""
    if config.dtype == plan.dtype:
        reason = f"--dtype {config.dtype} is set"
    elif plan.platform == "host":
        reason = "the host computes static embeddings in float32"
    elif plan.dtype == "bfloat16":
        reason = "the device multiplies bfloat16 natively"
    else:
        reason = "bfloat16 is not faster on this device"
    if plan.quantize is not None:
        reason += f"; --quantize {plan.quantize} is set"
    if plan.platform == "cpu":
        multiplies_bfloat16 = has_avx512_bf16()
    else:
        native = Calibration(plan.devices[0]).native_dtype() if plan.devices else None
        multiplies_bfloat16 = native == "bfloat16"
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
    """Return the kernel of a plan for each row length, and why each other kernel is not used."""
    choice = plan.kernels.describe()
    return KernelFacts(config.kernels, choice["used"], choice["not_used"])


def _admission(
    name: str, loaded: LoadedModel, served: LoadedRoute, window: Window
) -> AdmissionFacts:
    """Collect the limits of a route, and how much of each limit is in use. `name` is the name of
    the route in `window`."""
    plan, config, capacity = served.plan, loaded.config, loaded.admission.capacity
    checkpoint_limit = served.spec.max_input_tokens
    positions = position_limit(served.spec) or checkpoint_limit

    def limit(kind: Limit, allowed: int, used: int) -> LimitFacts:
        return LimitFacts(allowed, used, int(window.count(name, f"refused {kind}")))

    return AdmissionFacts(
        inputs=limit("inputs", capacity.max_inputs, capacity.inputs),
        tokens=limit("tokens", capacity.max_tokens, capacity.tokens),
        bytes=limit("bytes", capacity.max_bytes, capacity.bytes),
        tokens_asked=config.max_queue_tokens is not None,
        max_batch_tokens=plan.max_batch_tokens,
        batch_tokens_asked=config.max_batch_tokens is not None,
        batch_target_ms=1000 * BATCH_S if plan.platform == "cpu" else None,
        least_batch_tokens=plan.shards * (TPU_TILE if plan.platform == "tpu" else SHORTEST_ROW),
        buckets_asked=config.buckets is not None,
        max_input_tokens=plan.max_input_tokens,
        model_input_tokens=min(checkpoint_limit, positions),
        tokenization_workers=loaded.tokenization_workers,
    )


def _window_facts(name: str, served: LoadedRoute, window: Window) -> WindowFacts:
    """Collect what a route did in a window. `name` is the name of the route in `window`."""
    seconds, devices = max(window.seconds, 1e-9), max(len(served.plan.groups), 1)
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
