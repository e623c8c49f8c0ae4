"""Builds the engine of a model from its spec and the settings.

`make_plan` decides on devices, limits, grid and kernels. `build` then loads the parameters.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxembed.config import EngineConfig
from jaxembed.data.spec import DType, ModelSpec, Quantize
from jaxembed.engine.autotune.calibrate import ACCELERATOR_TOKENS, Calibration, device_id
from jaxembed.engine.autotune.cost_file import CostFile, SavedFile
from jaxembed.engine.autotune.costs import BucketCosts, Timings, repeat_timings
from jaxembed.engine.autotune.kernels import Choice, choose_kernels, choose_native
from jaxembed.engine.autotune.memory_plan import memory_plan
from jaxembed.engine.autotune.native_trial import TrialResult, TrialResults, try_native
from jaxembed.engine.bucket import (
    LONGEST_DEFAULT_ROW,
    SHORTEST_ROW,
    TPU_TILE,
    BucketGrid,
    GridFile,
    default_grid,
    one_length_grid,
    read_grid,
)
from jaxembed.engine.compiles import keep_programs_of
from jaxembed.engine.engine import Engine, Worker
from jaxembed.engine.placement import Device, Form, form_of, place_parameters, room_for_models
from jaxembed.engine.replica import NullReplica, Replica
from jaxembed.engine.scheduler import DeviceScheduler
from jaxembed.engine.transfer import is_remote
from jaxembed.errors import ConfigError, counted
from jaxembed.models import Program, native, position_limit
from jaxembed.models import kernels as attention_kernels
from jaxembed.observability.metrics import Telemetry
from jaxembed.platform.cores import MAX_WAITED, core_count

logger = logging.getLogger(__name__)

NULL_TOKEN_MS = 1e-5  # cost of a token of the null model, which returns constants


@dataclass(frozen=True)
class Plan:
    """The decisions that are made before a model is loaded."""

    devices: tuple[Device, ...]  # empty for the null model and for static models
    dtype: DType
    max_input_tokens: int
    # token budget of a batch on one device; a row longer than this is alone in its batch
    max_batch_tokens: int
    grid: BucketGrid  # a grid without buckets for static models
    shards: int  # parts of each batch, computed by different devices
    full_warmup: bool
    kernels: Choice = field(default_factory=Choice)
    # estimated milliseconds per token of a full bucket, for use until buckets are timed
    token_ms: float = NULL_TOKEN_MS
    cost_file: CostFile | None = None  # where timings are saved; None without devices
    timings: Timings = field(default_factory=dict)  # milliseconds of buckets in an earlier run
    without_device: Literal["null", "host"] = "null"  # what `platform` is if there are no devices
    estimated: bool = False  # whether the CPU's speed is an estimate, as in calibrate.Rate
    degree: int = 1  # devices that hold the model together
    quantize: Quantize | None = None  # what is computed in int8

    @property
    def platform(self) -> str:
        """JAX's name for the kind of device: "cpu", "gpu" or "tpu"; "null" for the null model,
        "host" for static models."""
        return self.devices[0].platform if self.devices else self.without_device

    @property
    def groups(self) -> list[tuple[Device, ...]]:
        """The devices in groups, each of which has a replica of the model."""
        size = self.shards * self.degree
        return [self.devices[k : k + size] for k in range(0, len(self.devices), size)]

    @cached_property
    def device_name(self) -> str:
        """The name of the device's model, such as "cpu" or "NVIDIA H200"."""
        return self.devices[0].device_kind if self.devices else self.without_device


def make_plan(spec: ModelSpec, program: Program, config: EngineConfig, cache_dir: Path) -> Plan:
    """Choose devices, dtype, limits, bucket grid and kernels for a model that is not loaded yet.

    It tries the kernels, and on a CPU measures the speed of the CPU, unless `cache_dir` has the
    results of an earlier run; new results are saved there. Raises ConfigError, which names the
    flag, if a setting cannot be used.
    """
    degree = program.degree
    devices: tuple[Device, ...] = () if config.null_model else _devices_of(config, degree)
    if config.dtype == "float16" and spec.config.get("overflows_float16"):
        raise ConfigError(
            "--dtype float16: this model's hidden states exceed its range; use bfloat16 or float32"
        )
    calibration = Calibration(devices[0], cache_dir) if devices else None
    dtype: DType = config.dtype or (calibration.native_dtype() if calibration else "float32")
    grid_file = read_grid(config.buckets) if config.buckets is not None else None
    shards = len(devices) // degree if config.parallel == "sharded" and devices else 1
    native_choice, identity = Choice(), {}
    if devices:
        identity = _identity(spec, program, devices, dtype, shards)
        native_choice = _native_choice(program, devices[0], dtype, config, cache_dir, identity)
    budget = (
        config.max_batch_tokens
        or (grid_file and grid_file.max_batch_tokens)
        or (calibration and calibration.batch_tokens(program, dtype, native_choice.joins))
        or ACCELERATOR_TOKENS
    )
    limit, budget = _limits(spec, config, budget)
    platform = devices[0].platform if devices else None
    grid_of = partial(_grid_of, spec, limit, shards, platform, native_choice)
    if grid_file is not None:
        grid = grid_file.grid(limit, budget, shards)
        grid_of = lambda budget: grid  # noqa: E731 - a def could not have another name
        if devices:
            _warn_of_another_tuning(grid_file, tuned_for(spec, devices, dtype))
    full_warmup = config.warmup == "full" or (config.warmup is None and platform == "gpu")
    plan = Plan(
        devices,
        dtype,
        limit,
        budget,
        grid_of(budget),
        shards,
        full_warmup,
        degree=degree,
        quantize=program.quantize if devices else None,
    )
    if calibration is None:
        return plan
    identity |= _of_kernels(devices[0])

    def with_kernels(plan: Plan) -> Plan:
        return replace(
            plan,
            kernels=choose_kernels(
                program,
                devices[0],
                dtype,
                plan.grid,
                config.kernels,
                native_choice=native_choice,
                saved=SavedFile(cache_dir, identity, what="attention", suffix="-attention"),
            ),
        )

    plan = with_kernels(plan)
    saved = SavedFile(cache_dir, identity, what="run_bytes", suffix="-memory")
    fitted = _fit_to_memory(plan, program, grid_of, _remedies(spec, config, limit), saved)
    if fitted.grid != plan.grid:  # rows of images have other lengths then
        plan = with_kernels(fitted)
    file = CostFile(cache_dir, identity, lambda bucket: plan.kernels.name_of(bucket.length))
    return replace(
        plan,
        token_ms=calibration.token_ms(program, dtype, native_choice.joins),
        cost_file=file,
        timings=file.load() | (_tuned_timings(grid_file, file) if grid_file is not None else {}),
        estimated=not calibration.sure,
    )


def _identity(
    spec: ModelSpec, program: Program, devices: Sequence[Device], dtype: DType, shards: int
) -> dict[str, Any]:
    """Return everything that the costs of buckets depend on, except the kernel of each bucket."""
    identity = {
        **tuned_for(spec, devices, dtype),
        "devices": len(devices),
        "shards": shards,
        "degree": program.degree,
        "cores": core_count(),
        "native": native.source_digest(dtype),
        "versions": package_versions(),
    }
    return identity if program.quantize is None else identity | {"quantize": program.quantize}


def _native_choice(
    program: Program,
    device: Device,
    dtype: DType,
    config: EngineConfig,
    cache_dir: Path,
    identity: dict[str, Any],
) -> Choice:
    """Choose the native kernels by trials. Raises ConfigError if --quantize needs them and they
    cannot be used."""
    results = partial(stored_results, program, device, dtype, cache_dir, identity)
    choice = choose_native(program, device, dtype, config.kernels, cache_dir, results)
    if program.quantize == "int8" and not choice.native_layout:
        reason = f"this is a {device.platform}"
        if device.platform == "cpu":
            reasons = [f"{name}: {reason}" for name, reason in choice.refused.items()]
            reason = "; ".join(reasons) or f"--kernels {config.kernels} is set"
        raise ConfigError(
            f"--quantize int8 needs the native kernels of a CPU ({reason}); use --quantize "
            "int8-weights"
        )
    forms = {
        form_of(name, leaf.shape, dtype, program.quantize) for name, leaf in program.shapes.items()
    }
    if program.quantize == "int8" and Form.QUANTIZED_PANELS not in forms:
        raise ConfigError(
            "--quantize int8: no layer of this model has a multiple of "
            f"{native.QUANTIZED_STEP} inputs; use --quantize int8-weights"
        )
    if program.quantize == "int8-weights" and choice.native_layout:
        logger.warning(
            "--quantize int8-weights saves memory, but XLA multiplies its weights, which takes "
            "several times as long as native kernels; int8 is faster"
        )
    return choice


def _devices_of(config: EngineConfig, degree: int) -> tuple[Device, ...]:
    """Return the devices that --devices chooses. Raises ConfigError if there are fewer, or if they
    cannot be divided into groups of `degree`."""
    # jax.devices() would also return the devices of other hosts, where a program would hang
    local = jax.local_devices()
    if config.devices is not None and not 0 < config.devices <= len(local):
        raise ConfigError(
            f"--devices {config.devices}: this machine has {counted(len(local), 'device')}"
        )
    try:
        keep_programs_of(local[0])
    except OSError as error:
        logger.warning("compiled programs are saved with those of the CPU: %s", error)
    devices = tuple(local[: config.devices])
    if len(devices) % degree:
        remedy = "; set --devices to a multiple" if len(devices) > degree else ""
        raise ConfigError(
            f"--tensor-parallel {degree}: {counted(len(devices), 'device')} cannot be divided into "
            f"groups of {degree}{remedy}"
        )
    return devices


def _of_kernels(device: Device) -> dict[str, str]:
    """Return what results of attention kernels depend on besides the device, such as CUDA's
    version; empty for a CPU, which has no such kernels."""
    if not is_remote(device.platform):
        return {}
    digest, version = attention_kernels.source_digest(), device.client.platform_version
    return {"kernels": digest, "platform": version}


def _grid_of(
    spec: ModelSpec,
    limit: int,
    shards: int,
    platform: str | None,
    native_choice: Choice,
    budget: int,
) -> BucketGrid:
    """Return the default grid of a model for inputs of up to `limit` tokens, with `budget` tokens
    in a batch of a device."""
    tile = TPU_TILE if platform == "tpu" else native.TILE if native_choice.native else 1
    if not spec.takes_texts or spec.filled is not None:
        # All sequences have nearly the same length. Texts that are filled with augmentation tokens
        # have exactly the same. Images that keep their aspect ratio have 225 to 256 tokens, unless
        # one side is over three times the other. XLA on a CPU takes rows of any length, and is
        # slower if a row has padding or several sequences.
        by_xla = platform == "cpu" and not native_choice.native
        return one_length_grid(limit, budget, shards, 1 if by_xla else max(tile, SHORTEST_ROW))
    return default_grid(limit, budget, shards, tile, join=native_choice.joins)


def _remedies(spec: ModelSpec, config: EngineConfig, limit: int) -> tuple[str, str | None]:
    """Return what a user can do if a model does not fit into the memory of a device, and the
    setting that fixes the token budget, if there is one."""
    if config.buckets is not None:
        return "remove its largest buckets", f"--buckets {config.buckets}"
    if config.max_batch_tokens is not None:
        return "lower it", f"--max-batch-tokens {config.max_batch_tokens}"
    if not spec.takes_texts or spec.filled is not None:  # all inputs have one length
        return "use a device with more memory, or several with --tensor-parallel", None
    return f"set --max-input-length to less than {limit}", None


def _fit_to_memory(
    plan: Plan,
    program: Program,
    grid_of: Callable[[int], BucketGrid],
    remedies: tuple[str, str | None],
    saved: SavedFile,
) -> Plan:
    """Return the plan with the largest token budget with which the model fits into the memory of a
    device, if the device says how much it has.

    `grid_of` and `remedies` are arguments of MemoryPlan.fit. If a program cannot be compiled, this
    is logged and the plan is not changed: the engine may do without it. Raises ConfigError if the
    model does not fit.
    """
    devices = plan.groups[0]
    room = room_for_models(devices[0]) if is_remote(devices[0].platform) else None
    if room is None:
        return plan
    permits = scheduler_of(devices[0]).permits
    memory = memory_plan(program, devices, plan.dtype, plan.kernels, room, permits, saved)
    try:
        budget, grid = memory.fit(grid_of, plan.max_batch_tokens, *remedies)
    except jax.errors.JaxRuntimeError:
        logger.warning("the memory that batches need is not known", exc_info=True)
        return plan
    return replace(plan, max_batch_tokens=budget, grid=grid)


def host_plan(spec: ModelSpec, config: EngineConfig) -> Plan:
    """Make the plan of a static model, which runs on the host without buckets.

    Raises ConfigError if --buckets or --null-model is set. Other settings without effect on a
    static model are only logged, because other models of the process may need them.
    """
    if config.buckets is not None:
        raise ConfigError(
            f"--buckets {config.buckets}: {spec.source} has static embeddings, which run without "
            "buckets; leave out --buckets"
        )
    if config.null_model:
        raise ConfigError(
            f"--null-model replaces a device, and {spec.source} runs without one; leave out "
            "--null-model"
        )
    names = ("dtype", "devices", "parallel", "tensor_parallel", "warmup", "kernels", "quantize")
    unused = [
        "--" + name.replace("_", "-")
        for name in (*names, "max_batch_requests", "cache_bytes")
        if getattr(config, name) != getattr(EngineConfig(), name)
    ]
    if unused:
        logger.warning(
            "%s runs on the host in float32 and ignores %s",
            spec.source,
            ", ".join(unused),
        )
    return Plan(
        devices=(),
        dtype="float32",
        max_input_tokens=config.max_input_tokens or spec.max_input_tokens,
        max_batch_tokens=config.max_batch_tokens or ACCELERATOR_TOKENS,
        grid=BucketGrid(()),
        shards=1,
        full_warmup=False,
        without_device="host",
    )


def build(
    plan: Plan,
    program: Program,
    load: Callable[[], Iterable[tuple[str, np.ndarray]]],
    spec: ModelSpec,
    config: EngineConfig,
    telemetry: Telemetry,
    on_progress: Callable[[int, int], None] | None = None,
    name: str = "model",
) -> Engine:
    """Place the parameters on the devices, and make an engine that is not started yet.

    `load` returns the parameters as pairs of name and array; with a generator the host holds one
    array at a time. `load` is not called for the null model. `on_progress` is called after each
    bucket with the numbers of buckets done and in total. Raises CheckpointError if the parameters
    do not fit the program, and the errors of `load`.
    """
    if plan.devices:
        workers = workers_of(plan, program, load())
    else:
        workers = [Worker(NullReplica(spec.primary, spec.widths), DeviceScheduler())]
    return Engine(
        workers,
        plan.grid,
        spec.widths,
        telemetry,
        BucketCosts(plan.token_ms, plan.timings),
        name=name,
        max_batch_requests=config.max_batch_requests,
        cache_bytes=config.cache_bytes,
        full_warmup=plan.full_warmup,
        on_progress=on_progress,
        keep_costs=partial(_keep, plan.cost_file),
    )


def stored_results(
    program: Program, device: Device, dtype: DType, cache_dir: Path, identity: dict[str, Any]
) -> TrialResults:
    """Return the trial results of a model's native calls by name, such as "linear".

    The results come from a file in `cache_dir`, or else from new trials. `identity` holds all that
    the results depend on. New results are saved unless a trial failed or other programs used the
    cores.
    """
    file = SavedFile(cache_dir, identity, what="verdicts", suffix="-native")  # codespell:ignore
    saved = file.load(lambda content: {name: TrialResult(**part) for name, part in content.items()})
    if saved is not None:
        return saved
    results = try_native(program, device, dtype)
    if any(result.busy for result in results.values()):
        logger.warning(
            "other programs use this machine, so the speed of the native kernels is not saved; it "
            "is measured again at the next start"
        )
    elif not any(result.failed for result in results.values()):
        file.save({name: asdict(result) for name, result in results.items()})
    return results


def _keep(file: CostFile | None, costs: BucketCosts) -> None:
    """Save the timings that no other program disturbed, if the model has a cost file."""
    if file is None:
        return
    if costs.lost_share > MAX_WAITED:
        logger.warning(
            "other programs use this machine: while buckets were timed, threads waited for a core "
            "%.0f %% of the time. Disturbed timings are not saved; their buckets are timed again "
            "after the next start",
            100 * costs.lost_share,
        )
    if costs.timings:
        file.save(costs.timings)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a bucket costs."""
    return {name: metadata.version(name) for name in ("jaxembed", "jax", "jaxlib")}


def _tuned_timings(grid_file: GridFile, file: CostFile) -> Timings:
    """Return the timings that `jaxembed tune` wrote into a grid file, in milliseconds by bucket.

    The list of timings of each bucket is filled with copies until it is as long as the engine
    requires, so that the engine does not time these buckets at the start. If the timings have
    another identity than `file`, or are invalid, the result is empty; invalid timings are logged.
    """
    costs = grid_file.tuned.get("costs")
    if not isinstance(costs, dict) or costs.get("identity") != file.identity:
        return {}
    try:
        return {b: repeat_timings(ms) for b, ms in file.decode(costs["timings"]).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("--buckets %s: the costs in it are ignored: %s", grid_file.path, error)
        return {}


def workers_of(
    plan: Plan, program: Program, parameters: Iterable[tuple[str, np.ndarray]]
) -> list[Worker]:
    """Make a worker with a replica for each group of devices.

    `parameters` are pairs of name and array. Raises CheckpointError if they do not fit the program.
    """
    # the smallest bucket that holds even the longest sequence; it also gets a program in float32
    float32_bucket = None
    if plan.dtype == "float16":
        longest = [b for b in plan.grid.buckets if b.length == plan.grid.max_length]
        float32_bucket = min(longest, key=lambda b: b.rows)
    return [
        Worker(
            Replica(
                program,
                placed,
                devices,
                plan.dtype,
                float32_bucket,
                plan.kernels.implementation,
                plan.kernels.native_layout,
            ),
            scheduler_of(devices[0]),
        )
        for placed, devices in zip(
            place_parameters(
                program, parameters, plan.groups, plan.dtype, plan.kernels.native_layout
            ),
            plan.groups,
            strict=True,
        )
    ]


# This is a dict and not functools.cache, which could make two schedulers for one device if two
# threads call scheduler_of at the same time.
_schedulers: dict[Device, DeviceScheduler] = {}


def scheduler_of(device: Device) -> DeviceScheduler:
    """Return the scheduler of a device, which the engines of all models in this process share."""
    return _schedulers.setdefault(device, DeviceScheduler.for_platform(device.platform))


def _limits(spec: ModelSpec, config: EngineConfig, budget: int) -> tuple[int, int]:
    """Return the largest number of tokens of an input, and the token budget of a device.

    The limit of an input is --max-input-length, or else the limit of the model, which is lowered
    with a warning if it exceeds the longest row of the default grid. With --buckets, no limit is
    compared with rows here, because `GridFile.grid` does so later; and unless
    --max-batch-tokens is set, a `budget` below the limit of an input is raised to this limit.

    Raises ConfigError if --max-input-length exceeds the positions of the model, or the longest row
    of the default grid.
    """
    positions = position_limit(spec)
    limit = config.max_input_tokens
    if limit is None:
        limit = (
            spec.max_input_tokens if positions is None else min(spec.max_input_tokens, positions)
        )
    elif positions is not None and limit > positions:
        raise ConfigError(
            f"--max-input-length {limit} exceeds the {positions} positions of this model"
        )
    if config.buckets is not None:
        return limit, budget if config.max_batch_tokens is not None else max(budget, limit)
    longest, remedy = LONGEST_DEFAULT_ROW, "set --buckets to a file with longer buckets"
    if config.max_batch_tokens is not None and budget < longest:
        longest, remedy = budget, f"raise --max-batch-tokens (now {budget})"
    if limit <= longest:
        return limit, budget
    if config.max_input_tokens is not None:
        raise ConfigError(
            f"--max-input-length {limit} does not fit in the default buckets, whose longest row "
            f"has {longest} tokens; {remedy}"
        )
    logger.warning(
        "the model accepts inputs of %d tokens, but the longest row of the default buckets has %d: "
        "longer inputs are truncated; %s",
        limit,
        longest,
        remedy,
    )
    return longest, budget


def tuned_for(spec: ModelSpec, devices: Sequence[Device], dtype: DType) -> dict[str, str]:
    """Return the model, dtype and device that a grid is tuned for, as `jaxembed tune` saves it."""
    return {
        "content_hash": spec.content_hash,
        "dtype": dtype,
        "device": device_id(devices[0]),
    }


def _warn_of_another_tuning(grid_file: GridFile, current: dict[str, str]) -> None:
    """Warn if a grid was tuned for something else than `current`, the result of `tuned_for`."""
    differences = [
        f"{name} {grid_file.tuned[name]} (now {value})"
        for name, value in current.items()
        if grid_file.tuned.get(name, value) != value
    ]
    if differences:
        logger.warning(
            "--buckets %s was tuned for %s: run `jaxembed tune` again",
            grid_file.path,
            " and ".join(differences),
        )
