"""Derives findings from facts. Each rule is a pure function that yields what it finds.

A rule must find nothing on a healthy server. It tests for a cause and, if the cause alone does no
harm, also for work that is slower because of it.
"""

import math
from collections.abc import Iterator

from jaxembed.engine.autotune.kernels import DIVIDED, NATIVE, UNSUITED
from jaxembed.errors import counted
from jaxembed.observability.metrics import ANSWER_STAGES
from jaxembed.platform.cores import MAX_WAITED
from jaxembed.runtime.diagnostics.facts import Bound, BucketFacts, Facts, Finding, Setup

# Shares of the time of the last minute:
BUSY = 0.6  # from this share on, the device, event loop or tokenizer threads limit the throughput
IDLE = 0.02  # below this share there is hardly any work
LOADED = 0.3  # from this share of device time on, slow batches delay requests
OTHERS_SHARE = 0.3  # a larger share of the usable cores' time in other programs is reported
THROTTLED_SHARE = 0.1  # from this share on, a CPU quota is reported

SLOWER = 1.3  # a larger ratio of the time of batches to the timed costs is reported
FEWEST = 10  # a share of fewer batches, requests or inputs is not reliable
MISFIT = 2.0  # a grid does not fit if batches have this many times the tokens that they need
SMALL_BATCH = 8  # batches are small if the target time is this many times the largest bucket's time
FEW_BATCHES = 4  # a queue that holds fewer batches may leave devices waiting for requests
CUT_SHARE = 0.05  # share of truncated inputs that is reported
SLOW_TOKENIZING_MS = 5.0  # milliseconds a request, above which tokenization may be too slow
LONG_WAIT_S = 1.0  # a wait is long if it exceeds this plus four times the time of a slow batch

QUEUE_FLAGS = {
    "inputs": "--max-concurrent-requests",
    "tokens": "--max-queue-tokens",
    "bytes": "--max-queue-bytes",
}


def findings_of(facts: Facts) -> list[Finding]:
    """Apply all rules to a served model. Return the findings, the worst first."""
    return [
        *_failures(facts),
        *_disturbances(facts),
        *findings_without_traffic(facts),
        *_batches(facts),
        *_waits(facts),
        *_host_work(facts),
    ]


def bound_by(facts: Facts) -> Bound:
    """Return what limited the throughput in the last minute."""
    window, programs = facts.window, facts.programs
    if programs.compiled < programs.buckets and not programs.ready:
        return "compiling"
    if window.device_share_of_all >= BUSY:
        return "device"
    if window.refused:
        return "admission"
    shares: dict[Bound, float] = {"host": window.loop_share, "tokenizing": tokenizing_share(facts)}
    busiest = max(shares, key=shares.__getitem__)
    if shares[busiest] >= BUSY:
        return busiest
    used = max(window.device_share_of_all, *shares.values())
    return "clients" if window.requests and used >= IDLE else "idle"


def tokenizing_share(facts: Facts) -> float:
    """Return the share (0 to 1) of the window in which the tokenizer threads were busy. The time
    in which tokenizer threads wait for each other counts as busy."""
    stage, seconds = facts.window.stages["tokenization"], facts.window.seconds
    return (
        stage.count
        * stage.mean_ms
        / 1000
        / max(seconds * facts.admission.tokenization_workers, 1e-9)
    )


def needed_tokens(bucket: BucketFacts, least: int) -> int:
    """Return about how many tokens a bucket must have to hold an average batch of `bucket`. It is a
    power of two, as in the default grid, of at least `least`, but not above `bucket.tokens`."""
    useful = max(bucket.useful_tokens / max(bucket.runs, 1), least, 1.0)
    return min(2 ** math.ceil(math.log2(useful)), bucket.tokens)


def _failures(facts: Facts) -> Iterator[Finding]:
    """Find devices and batches that fail, and sequences that are computed again."""
    window, device = facts.window, facts.device
    if device.stuck:
        yield Finding(
            "a device does not return from a call",
            f"{device.stuck} of {counted(device.count, 'device')}, for "
            f"{device.longest_call_s:.0f} s so far",
            "end the process and let its supervisor restart it (/livez fails when this is needed); "
            "the log names the batch",
        )
    if window.failed_batches or device.failing:
        yield Finding(
            "batches fail on the device",
            f"{window.failed_batches} batches failed in {window.seconds:.0f} s; {device.failing} "
            f"of {counted(device.count, 'device')} failed on the last batches",
            "search the log for `failed` and its reference; /health returns 503 while no device "
            "answers",
        )
    if window.split_batches:
        yield Finding(
            "batches do not fit in the device's memory",
            f"{window.split_batches} batches were run again in parts in {window.seconds:.0f} s",
            f"lower --max-batch-tokens, now {facts.admission.max_batch_tokens}, or raise "
            "--device-memory-fraction",
        )
    if window.not_finite >= FEWEST:
        yield Finding(
            "results are not finite and are computed again",
            f"{counted(window.not_finite, 'sequence')} in {window.seconds:.0f} s, in "
            f"{device.dtype}",
            "serve with --dtype bfloat16 or float32, which hold larger numbers"
            if device.dtype == "float16"
            else "check the checkpoint: `jaxembed info MODEL --verify`, `jaxembed verify MODEL`",
        )


def _disturbances(facts: Facts) -> Iterator[Finding]:
    """Find what takes the cores from the model: compilation, a CPU quota, other programs."""
    machine, window, programs = facts.machine, facts.window, facts.programs
    if facts.device.not_joined:
        yield Finding(
            "not every device takes batches",
            f"{facts.device.not_joined} of {counted(facts.device.count, 'device')} have not "
            "compiled their programs",
            "wait; the log names a replica whose programs do not compile",
        )
    if programs.compiled < programs.buckets:
        ready = "ready" if programs.ready else "not ready"
        yield Finding(
            "not every bucket is compiled",
            f"{programs.compiled} of {counted(programs.buckets, 'bucket')}, {ready}; since the "
            f"start {programs.compiles} programs were compiled and {programs.cache_hits} found in "
            "the cache",
            "wait; put --cache-dir on a persistent disk, so that the next start finds the "
            "programs; the log names the buckets that do not compile",
        )
    if window.throttled_share >= THROTTLED_SHARE:
        yield Finding(
            "the CPU quota stops the process",
            f"it was throttled for {window.throttled_share:.0%} of {window.seconds:.0f} s"
            + (f" (quota: {machine.quota_cores:g} cores)" if machine.quota_cores else ""),
            "raise the CPU limit of the container, or remove it and keep the request",
        )
    others = window.other_cores or 0.0
    evidence = []
    if others >= OTHERS_SHARE * machine.cores:
        evidence.append(
            f"other programs kept {others:.1f} of the {machine.cores} cores busy that this process "
            f"may use, over {window.seconds:.0f} s"
        )
    if programs.lost_share > MAX_WAITED:
        evidence.append(
            "while buckets were timed, threads waited for a core "
            f"{programs.lost_share:.0%} of the time"
        )
    if evidence and programs.drift > SLOWER:
        evidence.append(f"batches take {programs.drift:.1f} times as long as was timed")
    if evidence:
        yield Finding(
            "something else uses the machine",
            "; ".join(evidence),
            "stop it, give it a lower priority (`nice`), or pin it to other cores (`taskset`); "
            "costs that were timed meanwhile are timed again after the next start",
        )


def findings_without_traffic(facts: Setup) -> Iterator[Finding]:
    """Apply the rules that need no traffic.

    These rules find cores, native kernels and bfloat16 that the machine has and the model does not
    use, and settings that make the memory of a CPU slow.
    """
    device, kernels, machine = facts.device, facts.kernels, facts.machine
    if machine.cores == 1 < machine.machine_cores:
        yield Finding(
            "the process may use only one core",
            f"1 of the machine's {machine.machine_cores} cores: the model, the tokenizer and the "
            "server share it",
            "start it without `taskset`, or give its container more cores (cpuset)",
        )
    is_cpu = device.platform == "cpu"
    runs_in_xla = is_cpu and set(kernels.used.values()) == {"xla"}
    asks_for_xla, is_float32 = kernels.asked == "xla", device.dtype == "float32"
    could_do_better = device.dtype == "bfloat16" and device.multiplies_bfloat16
    could_do_better |= is_float32 and (asks_for_xla or NATIVE in kernels.not_used)
    reason = kernels.not_used.get(NATIVE, "the log says why")
    lacks_instructions = is_float32 and reason.startswith("this CPU has no")
    is_told = reason in (UNSUITED, DIVIDED) or lacks_instructions
    if runs_in_xla and could_do_better and not is_told:
        remedy = "install gcc or clang, and start again"
        if "compiler" not in reason:
            remedy = (
                "remove this reason, and start again; `--kernels native` uses them even if slower"
            )
        if asks_for_xla:
            reason, remedy = "--kernels xla is set", "leave out --kernels xla"
        yield Finding(
            "the native kernels are not used",
            f"XLA computes all rows in {device.dtype}: {reason}",
            remedy,
        )
    # an accelerator is as fast in float16 as in bfloat16
    is_slow = device.dtype == "float32" or (device.dtype == "float16" and is_cpu)
    if device.dtype_asked and is_slow and device.multiplies_bfloat16:
        yield Finding(
            "bfloat16 would be faster",
            f"{device.dtype_reason}, and {device.name} multiplies bfloat16 natively",
            f"leave out --dtype {device.dtype}; `jaxembed verify` measures what bfloat16 changes",
        )
    if is_cpu and machine.not_kept is not None:
        yield Finding(
            "freed memory is not kept for the next batch",
            f"{machine.not_kept}; each batch faults its pages in again",
            "unset GLIBC_TUNABLES, run `ulimit -v unlimited`, or use a system with glibc 2.33 or "
            "later",
        )
    elif is_cpu and machine.huge_pages in ("never", "off for this process"):
        yield Finding(
            "huge pages are off",
            f"transparent huge pages: {machine.huge_pages}",
            "as root, run `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`; if the "
            "parent process has switched them off (prctl), start this process in another way",
        )


def _batches(facts: Facts) -> Iterator[Finding]:
    """Find a grid that does not fit the traffic, and a limit that keeps batches small."""
    admission, window = facts.admission, facts.window
    ran = [bucket for bucket in facts.buckets if bucket.runs]
    runs, tokens = sum(b.runs for b in ran), sum(b.runs * b.tokens for b in ran)
    needed = 0  # tokens of all batches if each had a bucket that fits
    for bucket in ran:
        useful = bucket.useful_tokens / bucket.runs
        fitting = needed_tokens(bucket, admission.least_batch_tokens)
        # If a smaller bucket of the grid would hold such a batch, the engine chose `bucket` because
        # it costs less. Then the tokens of `bucket` count as needed.
        has_smaller = any(
            other.compiled
            and useful <= other.tokens <= fitting
            and useful / bucket.rows <= other.length
            for other in facts.buckets
        )
        needed += bucket.runs * (bucket.tokens if has_smaller else fitting)
    if runs >= FEWEST and tokens >= MISFIT * needed:
        padding = sum(bucket.padding_tokens for bucket in ran)
        main = max(ran, key=lambda bucket: bucket.runs * bucket.tokens)
        grid = "leave out --buckets, or " if admission.buckets_asked else ""
        yield Finding(
            "the buckets do not fit the traffic",
            f"{padding / tokens:.0%} of the tokens of {runs} batches were padding, most "
            f"in bucket {main.name}: its batches hold {main.useful_tokens / main.runs:.0f} of "
            f"{main.tokens} tokens",
            f"{grid}run `jaxembed tune URL -o buckets.json` and serve with --buckets buckets.json",
        )
    target_ms = admission.batch_target_ms
    costs = [(b.tokens, b.cost_ms) for b in facts.buckets if b.cost_ms is not None]
    is_loaded = window.refused or window.device_share_of_all >= LOADED
    if admission.batch_tokens_asked and target_ms and costs and is_loaded:
        largest, cost_ms = max(costs)
        if SMALL_BATCH * cost_ms <= target_ms:
            yield Finding(
                "batches may hold few tokens",
                f"--max-batch-tokens {admission.max_batch_tokens}: the largest bucket, of "
                f"{largest} tokens, takes {cost_ms:.1f} ms, and the default target is "
                f"{target_ms:.0f} ms",
                "leave out --max-batch-tokens, or raise it",
            )


def _waits(facts: Facts) -> Iterator[Finding]:
    """Find requests that are refused because a limit is reached, and requests that wait long."""
    admission, window = facts.admission, facts.window
    counts = [f"{queue.inputs} {priority}" for priority, queue in facts.lanes.items()]
    waiting = f"{' and '.join(counts)} inputs wait"
    limits = {"inputs": admission.inputs, "tokens": admission.tokens, "bytes": admission.bytes}
    name, limit = max(limits.items(), key=lambda item: item[1].refused)
    flag = QUEUE_FLAGS[name]
    evidence = (
        f"{limit.refused} requests were refused (429) in {window.seconds:.0f} s because the limit "
        f"of {name} was reached: {limit.held} of {limit.limit} are in use now ({flag})"
    )
    few_tokens = name == "tokens" and limit.limit < FEW_BATCHES * admission.max_batch_tokens
    if limit.refused and few_tokens:
        yield Finding(
            "the queue holds too few tokens",
            f"{evidence}; a batch takes up to {admission.max_batch_tokens}",
            f"leave out {flag}: by default there is room for 64 batches",
        )
    elif limit.refused and name == "bytes":
        remedy = f"raise {flag}, or send less in a request; token vectors and JSON take most"
        yield Finding("requests hold all the memory that they may use", evidence, remedy)
    elif limit.refused:
        yield Finding(
            "more work arrives than the server can do",
            f"{evidence}; {waiting}",
            "add servers behind a load balancer, or let clients wait as Retry-After says; a higher "
            f"{flag} only lets them wait longer",
        )
    oldest_s = facts.lanes["interactive"].oldest_s
    longest_ms = max((bucket.cost_ms or 0.0 for bucket in facts.buckets), default=0.0)
    if oldest_s >= LONG_WAIT_S + 4 * longest_ms / 1000 and facts.programs.ready:
        yield Finding(
            "interactive requests wait",
            f"{waiting}; the oldest interactive one for {oldest_s:.1f} s",
            'send requests that nobody waits for with "priority": "bulk" (or x-priority), or add '
            "servers",
        )


def _host_work(facts: Facts) -> Iterator[Finding]:
    """Find slow tokenization, a busy event loop, and many truncated texts."""
    window, admission = facts.window, facts.admission
    tokenizing, queue, inference = (window.stages[name] for name in ANSWER_STAGES)
    is_slow = tokenizing.mean_ms > max(SLOW_TOKENIZING_MS, queue.mean_ms + inference.mean_ms)
    if tokenizing.count >= FEWEST and is_slow:
        workers, cores = admission.tokenization_workers, facts.machine.cores
        remedy = "send shorter texts, or token ids; more cores help"
        if workers < max(cores, 4):
            remedy = (
                f"leave out --tokenization-workers {workers}: by default there are at least four"
            )
        yield Finding(
            "tokenizing takes longer than the model",
            f"{tokenizing.mean_ms:.1f} ms per request on average, {inference.mean_ms:.1f} ms on "
            f"the device and {queue.mean_ms:.1f} ms in the queue; tokenizer threads: {workers}",
            remedy,
        )
    if window.loop_share >= BUSY and window.requests >= FEWEST:
        yield Finding(
            "the event loop is busy",
            f"decoding and encoding took {window.loop_share:.0%} of its time; a timer was "
            f"delayed by {window.loop_delay_ms:.0f} ms",
            'request base64 or raw float32 instead of JSON numbers (`"encoding_format": '
            '"base64"`), or add --front-ends on a machine with eight cores or more',
        )
    if window.truncated >= max(FEWEST, CUT_SHARE * window.inputs):
        limit, model_limit = admission.max_input_tokens, admission.model_input_tokens
        remedy = 'split texts before they are sent; with "truncate": false they are refused instead'
        if limit < model_limit:
            remedy = (
                f"the model accepts {model_limit} tokens: raise --max-input-length, "
                "--max-batch-tokens or the longest row of --buckets"
            )
        yield Finding(
            "texts are truncated",
            f"{window.truncated} of {window.inputs} inputs were longer than {limit} tokens, in "
            f"{window.seconds:.0f} s",
            remedy,
        )
