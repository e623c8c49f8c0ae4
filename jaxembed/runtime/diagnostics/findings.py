"""Derives findings from facts. Each rule is a pure function that returns one finding or None.

A rule must not report a healthy server. It tests for the cause itself and, if the cause alone does
no harm, also for work that is slower because of it.
"""

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxembed.engine.autotune.kernels import NATIVE, UNSUITED
from jaxembed.observability.metrics import ANSWER_STAGES
from jaxembed.platform.cores import MOST_WAITED
from jaxembed.runtime.diagnostics.facts import (
    Bound,
    BucketFacts,
    DeviceFacts,
    Facts,
    Finding,
    KernelFacts,
    MachineFacts,
)

# Shares of the time of the last minute
BUSY = 0.6  # from which on a device, the event loop or the tokenizer threads are the limit
IDLE = 0.02
LOADED = 0.3  # of the devices: enough work for what slows down batches to be felt
OTHERS_SHARE = 0.3  # of the usable cores that other programs take
THROTTLED_SHARE = 0.1
SLOWER = 1.3  # ratio of the time of batches to their timings that is mentioned

FEWEST = 10  # batches, requests or inputs; fewer do not make a reliable share
MISFIT = 2.0  # ratio of the tokens run to the tokens needed from which a grid misfits
SMALL_BATCH = 8  # reported if the target time is this many times that of the largest bucket
FEW_BATCHES = 4  # batches a queue must hold so that devices do not wait for requests
CUT_SHARE = 0.05  # share of the inputs
SLOW_TOKENIZING_MS = 5.0
LONG_WAIT_S = 1.0  # a longer wait is reported; the time of four of the longest batches is added


@runtime_checkable
class Setup(Protocol):
    """The facts that are known before a model is served."""

    device: DeviceFacts
    kernels: KernelFacts
    machine: MachineFacts


def findings_of(facts: Facts) -> list[Finding]:
    """Apply all rules to a served model. Returns the findings, the worst first."""
    return [finding for rule in MODEL_RULES if (finding := rule(facts)) is not None]


def findings_before(setup: Setup) -> list[Finding]:
    """Apply the rules that need no traffic. Returns the findings, the worst first."""
    return [finding for rule in SETUP_RULES if (finding := rule(setup)) is not None]


def bound_by(facts: Facts) -> Bound:
    """What limited the throughput in the last minute."""
    window, programs = facts.window, facts.programs
    if programs.compiled < programs.buckets and not programs.ready:
        return "compiling"
    if window.device_share_of_all >= BUSY:
        return "device"
    if window.refused:
        return "admission"
    shares: dict[Bound, float] = {"host": window.loop_share, "tokenizing": tokenizing_share(facts)}
    most = max(shares, key=lambda name: shares[name])
    if shares[most] >= BUSY:
        return most
    used = max(window.device_share_of_all, *shares.values())
    return "clients" if window.requests and used >= IDLE else "idle"


def tokenizing_share(facts: Facts) -> float:
    """The share of their time that all tokenizer threads were busy, waits for each other
    included."""
    stage, seconds = facts.window.stages["tokenization"], facts.window.seconds
    return (
        stage.count
        * stage.mean_ms
        / 1000
        / max(seconds * facts.admission.tokenization_workers, 1e-9)
    )


def needed_tokens(bucket: BucketFacts, least: int) -> int:
    """The approximate size, in tokens, of the smallest bucket that holds an average batch of this
    bucket: a power of two, as in the default grid."""
    useful = max(bucket.useful_tokens / max(bucket.runs, 1), least, 1.0)
    return min(2 ** math.ceil(math.log2(useful)), bucket.tokens)


def _has_smaller(facts: Facts, bucket: BucketFacts) -> bool:
    """Whether the grid has a bucket of the needed size. If so, the larger one was chosen because it
    costs no more."""
    useful = bucket.useful_tokens / bucket.runs
    needed = needed_tokens(bucket, facts.admission.least_batch_tokens)
    return any(
        other.compiled and useful <= other.tokens <= needed and useful / bucket.rows <= other.length
        for other in facts.buckets
    )


def _device_hangs(facts: Facts) -> Finding | None:
    device = facts.device
    if not device.stuck:
        return None
    return Finding(
        "a device does not return from a call",
        f"{device.stuck} of {device.count} devices, for {device.longest_call_s:.0f} s by now",
        "end the process and let its supervisor start it again (/livez tells it when); the log has "
        "the batch",
    )


def _batches_fail(facts: Facts) -> Finding | None:
    window, device = facts.window, facts.device
    if not window.failed_batches and not device.failing:
        return None
    return Finding(
        "batches fail on the device",
        f"{window.failed_batches} batches failed in {window.seconds:.0f} s; {device.failing} of "
        f"{device.count} devices fail again and again",
        "look for `failed` and its reference in the log; /health is 503 while no device answers",
    )


def _memory_is_short(facts: Facts) -> Finding | None:
    if not facts.window.split_batches:
        return None
    return Finding(
        "batches do not fit the device's memory",
        f"{facts.window.split_batches} batches ran in halves in {facts.window.seconds:.0f} s",
        f"lower --max-batch-tokens, now {facts.admission.max_batch_tokens}, or raise "
        "--device-memory-fraction",
    )


def _runs_twice(facts: Facts) -> Finding | None:
    window, dtype = facts.window, facts.device.dtype
    if window.not_finite < FEWEST:
        return None
    return Finding(
        "results are not finite and are computed again",
        f"{window.not_finite} sequences in {window.seconds:.0f} s, in {dtype}",
        "serve with --dtype bfloat16 or float32, which hold larger numbers"
        if dtype == "float16"
        else "check the checkpoint: `jaxembed info MODEL --verify`, `jaxembed verify MODEL`",
    )


def _compiles_still(facts: Facts) -> Finding | None:
    programs = facts.programs
    if programs.compiled >= programs.buckets:
        return None
    ready = "ready" if programs.ready else "not ready"
    return Finding(
        "not every bucket is compiled",
        f"{programs.compiled} of {programs.buckets} buckets, {ready}; since the start "
        f"{programs.compiles} programs were compiled and {programs.cache_hits} found in the cache",
        "wait; keep --cache-dir on a disk that outlives the process, so that the next start finds "
        "them; the log names a bucket that does not compile",
    )


def _quota_is_used_up(facts: Facts) -> Finding | None:
    share = facts.window.throttled_share
    if share < THROTTLED_SHARE:
        return None
    quota = facts.machine.quota_cores
    return Finding(
        "the CPU quota stops the process",
        f"for {share:.0%} of {facts.window.seconds:.0f} s it was throttled"
        + (f"; its control group may use {quota:g} cores" if quota else ""),
        "raise the CPU limit of the container, or remove it and keep the request",
    )


def _machine_is_shared(facts: Facts) -> Finding | None:
    machine, window, programs = facts.machine, facts.window, facts.programs
    others = window.other_cores or 0.0
    evidence = []
    if others >= OTHERS_SHARE * machine.cores:
        evidence.append(
            f"other programs kept {others:.1f} of the {machine.cores} cores busy that this process "
            f"may use, over {window.seconds:.0f} s"
        )
    if programs.lost_share > MOST_WAITED:
        lost = f"{programs.lost_share:.0%}"
        evidence.append(f"while buckets were timed, threads waited for a core {lost} of the time")
    if not evidence:
        return None
    if programs.drift > SLOWER:
        evidence.append(f"batches take {programs.drift:.1f} times as long as was timed")
    return Finding(
        "something else uses the machine",
        "; ".join(evidence),
        "stop it, give it a lower priority (`nice`), or pin it to other cores (`taskset`); costs "
        "that were timed meanwhile are timed again after the next start",
    )


def _one_core(facts: Setup) -> Finding | None:
    machine = facts.machine
    if machine.cores > 1 or machine.machine_cores == 1:
        return None
    return Finding(
        "the process may use one core only",
        f"1 of the machine's {machine.machine_cores} cores: the model, the tokenizer and the "
        "server take turns on it",
        "start it without `taskset`, or give its container more cores (cpuset)",
    )


def _xla_computes(facts: Setup) -> Finding | None:
    device, kernels = facts.device, facts.kernels
    possible = device.dtype == "bfloat16" and device.multiplies_bfloat16
    if device.platform != "cpu" or not possible or set(kernels.used.values()) != {"xla"}:
        return None
    if kernels.not_used.get(NATIVE) == UNSUITED:
        return None
    if kernels.asked == "xla":
        reason, remedy = "--kernels xla asks for it", "leave out --kernels xla"
    else:
        reason = kernels.not_used.get(NATIVE, "the log says why")
        remedy = "install gcc or clang, and start again"
        if "compiler" not in reason:
            remedy = "remove the reason, and start again; `--kernels native` insists"
    return Finding(
        "the native kernels are not used",
        f"XLA computes all rows in {device.dtype}: {reason}",
        remedy,
    )


def _dtype_is_slow(facts: Setup) -> Finding | None:
    device = facts.device
    # an accelerator is as fast in float16 as in bfloat16
    is_slow = device.dtype == "float32" or (device.dtype == "float16" and device.platform == "cpu")
    if not (device.dtype_asked and is_slow and device.multiplies_bfloat16):
        return None
    return Finding(
        "bfloat16 would be faster",
        f"{device.dtype_reason}, and {device.name} multiplies bfloat16 natively",
        f"leave out --dtype {device.dtype}; `jaxembed verify` measures what bfloat16 changes",
    )


def _memory_is_given_back(facts: Setup) -> Finding | None:
    machine = facts.machine
    if facts.device.platform != "cpu":
        return None
    if machine.not_kept is not None:
        return Finding(
            "freed memory is not kept for the next batch",
            f"{machine.not_kept}; each batch faults its pages in again",
            "unset GLIBC_TUNABLES, `ulimit -v unlimited`, or run where glibc is 2.33 or later",
        )
    if machine.huge_pages in ("never", "off for this process"):
        return Finding(
            "huge pages are off",
            f"transparent huge pages: {machine.huge_pages}",
            "as root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`; in a process "
            "whose parent has switched them off (prctl), start it otherwise",
        )
    return None


def _grid_misfits(facts: Facts) -> Finding | None:
    ran = [bucket for bucket in facts.buckets if bucket.runs]
    runs = sum(bucket.runs for bucket in ran)
    if runs < FEWEST:
        return None
    least = facts.admission.least_batch_tokens
    tokens = sum(bucket.runs * bucket.tokens for bucket in ran)
    needed = sum(
        bucket.runs
        * (bucket.tokens if _has_smaller(facts, bucket) else needed_tokens(bucket, least))
        for bucket in ran
    )
    if tokens < MISFIT * needed:
        return None
    padding = sum(bucket.padding_tokens for bucket in ran)
    most = max(ran, key=lambda bucket: bucket.runs * bucket.tokens)
    grid = "leave out --buckets, or " if facts.admission.buckets_asked else ""
    return Finding(
        "the buckets do not fit the traffic",
        f"{padding / tokens:.0%} of the tokens of {runs} batches were padding, most "
        f"in bucket {most.name}: its batches hold {most.useful_tokens / most.runs:.0f} of "
        f"{most.tokens} tokens",
        f"{grid}run `jaxembed tune URL -o buckets.json` and serve with --buckets buckets.json",
    )


def _batches_are_small(facts: Facts) -> Finding | None:
    admission, window = facts.admission, facts.window
    target_ms = admission.batch_target_ms
    costs = [(b.tokens, b.cost_ms) for b in facts.buckets if b.cost_ms is not None]
    is_loaded = window.refused or window.device_share_of_all >= LOADED
    if not (admission.batch_tokens_asked and target_ms and costs and is_loaded):
        return None
    tokens, cost_ms = max(costs)
    if SMALL_BATCH * cost_ms > target_ms:
        return None
    return Finding(
        "batches may hold few tokens",
        f"--max-batch-tokens {admission.max_batch_tokens}: the largest bucket, of {tokens} tokens, "
        f"takes {cost_ms:.1f} ms, where {target_ms:.0f} ms are the default's aim",
        "leave out --max-batch-tokens, or raise it",
    )


def _more_comes_than_fits(facts: Facts) -> Finding | None:
    admission, window = facts.admission, facts.window
    limits = {"inputs": admission.inputs, "tokens": admission.tokens, "bytes": admission.bytes}
    name, limit = max(limits.items(), key=lambda item: item[1].refused)
    if not limit.refused:
        return None
    flag = QUEUE_FLAGS[name]
    evidence = (
        f"{limit.refused} requests were refused (429) in {window.seconds:.0f} s, for want of "
        f"room for {name}: {limit.held} of {limit.limit} are held now ({flag})"
    )
    if name == "tokens" and limit.limit < FEW_BATCHES * admission.max_batch_tokens:
        return Finding(
            "the queue holds too few tokens",
            f"{evidence}; a batch takes up to {admission.max_batch_tokens}",
            f"leave out {flag}: by default there is room for 64 batches",
        )
    if name == "bytes":
        remedy = f"raise {flag}, or send less in a request; token vectors and JSON take most"
        return Finding("requests hold all the memory they may", evidence, remedy)
    return Finding(
        "more work comes than the server does",
        f"{evidence}; {_waiting(facts)}",
        "add servers behind a load balancer, or let clients wait as Retry-After says; a higher "
        f"{flag} only lets them wait longer",
    )


def _somebody_waits(facts: Facts) -> Finding | None:
    lane = facts.lanes["interactive"]
    longest_ms = max((bucket.cost_ms or 0.0 for bucket in facts.buckets), default=0.0)
    if lane.oldest_s < LONG_WAIT_S + 4 * longest_ms / 1000 or not facts.programs.ready:
        return None
    return Finding(
        "interactive requests wait",
        f"{_waiting(facts)}; the oldest interactive one for {lane.oldest_s:.1f} s",
        'send what nobody waits for with "priority": "bulk" (or x-priority), or add servers',
    )


def _tokenizing_is_slow(facts: Facts) -> Finding | None:
    stages = facts.window.stages
    tokenizing, queue, inference = (stages[name] for name in ANSWER_STAGES)
    is_slow = tokenizing.mean_ms > max(SLOW_TOKENIZING_MS, queue.mean_ms + inference.mean_ms)
    if tokenizing.count < FEWEST or not is_slow:
        return None
    workers, cores = facts.admission.tokenization_workers, facts.machine.cores
    remedy = "send shorter texts, or token ids; more cores help"
    if workers < max(cores, 4):
        remedy = f"leave out --tokenization-workers {workers}: by default there are four at least"
    return Finding(
        "tokenizing takes longer than the model",
        f"{tokenizing.mean_ms:.1f} ms of a request on average, {inference.mean_ms:.1f} ms on the "
        f"device and {queue.mean_ms:.1f} ms in the queue; {workers} tokenizer threads",
        remedy,
    )


def _host_is_busy(facts: Facts) -> Finding | None:
    window = facts.window
    if window.loop_share < BUSY or window.requests < FEWEST:
        return None
    return Finding(
        "the event loop is busy",
        f"decoding and encoding took {window.loop_share:.0%} of its time; a timer came "
        f"{window.loop_delay_ms:.0f} ms late",
        'ask for base64 or raw float32 instead of JSON numbers (`"encoding_format": "base64"`), or '
        "run several servers",
    )


def _texts_are_cut(facts: Facts) -> Finding | None:
    window, admission = facts.window, facts.admission
    if window.truncated < max(FEWEST, CUT_SHARE * window.inputs):
        return None
    limit, of_model = admission.max_input_tokens, admission.model_input_tokens
    remedy = 'split texts before they are sent; with "truncate": false they are refused instead'
    if limit < of_model:
        remedy = (
            f"the model takes {of_model}: raise --max-input-length, --max-batch-tokens or the "
            "longest row of --buckets"
        )
    return Finding(
        "texts are cut",
        f"{window.truncated} of {window.inputs} inputs were longer than {limit} tokens, in "
        f"{window.seconds:.0f} s",
        remedy,
    )


def _waiting(facts: Facts) -> str:
    lanes = [f"{lane.inputs} {name}" for name, lane in facts.lanes.items()]
    return f"{' and '.join(lanes)} inputs wait"


QUEUE_FLAGS = {
    "inputs": "--max-concurrent-requests",
    "tokens": "--max-queue-tokens",
    "bytes": "--max-queue-bytes",
}

SETUP_RULES: tuple[Callable[[Setup], Finding | None], ...] = (
    _one_core,
    _xla_computes,
    _dtype_is_slow,
    _memory_is_given_back,
)
MODEL_RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    _device_hangs,
    _batches_fail,
    _memory_is_short,
    _runs_twice,
    _compiles_still,
    _quota_is_used_up,
    _machine_is_shared,
    *SETUP_RULES,
    _grid_misfits,
    _batches_are_small,
    _more_comes_than_fits,
    _somebody_waits,
    _tokenizing_is_slow,
    _host_is_busy,
    _texts_are_cut,
)
