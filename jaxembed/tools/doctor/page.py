"""Writes facts and findings as plain text: answers to ten questions that an operator asks."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from jaxembed.engine.autotune.costs import CostSource
from jaxembed.runtime.diagnostics.facts import (
    Bound,
    BucketFacts,
    DeviceFacts,
    Examination,
    Facts,
    Finding,
    KernelFacts,
    LocalExamination,
    MachineFacts,
    name_of_route,
)
from jaxembed.runtime.diagnostics.findings import tokenizing_share
from jaxembed.tools.doctor.probe import Probe

BOUNDS: dict[Bound, str] = {
    "idle": "nothing: there is hardly any work",
    "clients": "the clients: the server waits for requests",
    "device": "the device",
    "host": "the host: decoding, encoding and answering",
    "tokenizing": "the host: tokenizing",
    "admission": "admission: requests are refused while the device has time",
    "compiling": "the compiler: the model is not ready",
}
WIDTH = 100  # characters of a line
MOST_BUCKETS = 6  # that are shown, those that took the most time


def model_page(url: str, examination: Examination, probe: Probe | None = None) -> str:
    """Write the page of one served model: answers, the probe if there was one, and findings."""
    facts = examination.facts
    lines = [f"{url} serves {name_of_route(facts.model, facts.route)}", ""]
    for number, (question, answer) in enumerate(QUESTIONS, start=1):
        lines.append(f"{number:2}. {question}")
        for line in answer(examination):
            lines += _wrapped("    ", line)
    if probe is not None:
        lines += ["", *_wrapped("", _probed(probe))]
    return "\n".join([*lines, "", *_finding_lines(examination.findings, "this server")])


def local_page(examination: LocalExamination) -> str:
    """Write the page of a model that is not served: what this machine offers, and findings."""
    facts = examination.facts
    device, machine = facts.device, facts.machine
    parts = [
        ("device", _device_line(device)),
        ("", f"{machine.cores} of {machine.machine_cores} cores"),
        ("memory", _memory_line(machine)),
        ("compiler", facts.compiler or "none, which only a source checkout needs"),
        (
            "cache",
            f"{facts.cache_dir}, {facts.kept_programs} programs; nobody else can write there",
        ),
        ("limits", f"{facts.max_input_tokens} tokens an input, {facts.max_batch_tokens} a batch"),
        ("buckets", ", ".join(facts.buckets) or "none"),
        *(("kernels", line) for line in _kernel_lines(facts.kernels)),
    ]
    lines = [f"Here, {facts.model} would have:", ""]
    for name, text in parts:
        lines += _wrapped(f"    {name:8}  ", text)
    return "\n".join([*lines, "", *_finding_lines(examination.findings, "this machine")])


def _finding_lines(findings: Sequence[Finding], subject: str) -> list[str]:
    """The lines that say what is wrong and what helps."""
    if not findings:
        return [f"Nothing is wrong with {subject}."]
    lines = ["Findings, worst first:"]
    for number, finding in enumerate(findings, start=1):
        lines += [
            f"{number:2}. {finding.cause}",
            *_wrapped("    evidence: ", finding.evidence),
            *_wrapped("    remedy:   ", finding.remedy),
        ]
    return lines


def _wrapped(before: str, text: str) -> list[str]:
    """The text in lines of at most WIDTH, words and flags unbroken, all indented alike."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=before,
        subsequent_indent=" " * len(before),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _is_up(examination: Examination) -> Iterator[str]:
    programs, device = examination.facts.programs, examination.facts.device
    state = "ready" if programs.ready else "not ready"
    yield f"{state}, {'healthy' if programs.healthy else 'unhealthy'}"
    if device.longest_call_s > 1.0 or device.stuck:
        yield f"a device call has lasted {device.longest_call_s:.0f} s; {device.stuck} devices hang"


def _runs_on(examination: Examination) -> Iterator[str]:
    device, machine = examination.facts.device, examination.facts.machine
    yield _device_line(device)
    quota = f", a quota of {machine.quota_cores:g}" if machine.quota_cores else ""
    yield (
        f"{machine.cores} of {machine.machine_cores} cores{quota}; "
        f"{examination.facts.admission.tokenization_workers} tokenizer threads"
    )
    yield _memory_line(machine)


def _device_line(device: DeviceFacts) -> str:
    line = f"{device.count} x {device.name}, {device.dtype}: {device.dtype_reason}"
    if device.estimated:
        line += "; its speed is estimated, because other programs used it when it was measured"
    return line


def _memory_line(machine: MachineFacts) -> str:
    state = f"kept, in {machine.kept_bytes / 2**30:.1f} GiB of address space"
    if machine.not_kept is not None:
        state = f"not kept: {machine.not_kept}"
    return f"freed memory is {state}; huge pages: {machine.huge_pages or 'unknown'}"


def _computes_with(examination: Examination) -> Iterator[str]:
    yield from _kernel_lines(examination.facts.kernels)


def _kernel_lines(kernels: KernelFacts) -> Iterator[str]:
    """The lines that say which kernel computes which row lengths, and why others do not."""
    lengths: dict[str, list[str]] = {}
    for length, name in kernels.used.items():
        lengths.setdefault(name, []).append(length)
    for name, rows in lengths.items():
        yield f"{name} for rows of {', '.join(rows)} tokens"
    for name, reason in kernels.not_used.items():
        yield f"not {name}: {reason}"
    if not lengths and not kernels.not_used:
        yield "none: nothing runs on a device"


def _is_compiled(examination: Examination) -> Iterator[str]:
    facts = examination.facts
    programs = facts.programs
    sources = [bucket.cost_from for bucket in facts.buckets]
    counts = [f"{sources.count(name)} {name}" for name in get_args(CostSource)]
    yield f"{programs.compiled} of {programs.buckets} buckets compiled; costs: {', '.join(counts)}"
    yield (
        f"programs since the start: {programs.compiles} compiled, {programs.cache_hits} from the "
        f"cache; timings lost {programs.lost_share:.0%} to other programs, drift since then "
        f"{programs.drift:.2f}"
    )


def _time_of_a_query(examination: Examination) -> Iterator[str]:
    facts = examination.facts
    stages = facts.window.stages
    if any(stage.count for stage in stages.values()):
        times = [f"{name} {stage.mean_ms:.2f} ms" for name, stage in stages.items() if stage.count]
        yield f"{', '.join(times)}: means of {_of_late(facts)}"
    else:
        yield f"no request was answered in {_of_late(facts)}; --probe sends some"
    costs = [bucket for bucket in facts.buckets if bucket.cost_ms is not None]
    if costs:
        least = min(costs, key=lambda bucket: (bucket.tokens, bucket.length))
        yield f"alone, a short query takes {least.cost_ms:.1f} ms of the device, in {least.name}"


def _waits(examination: Examination) -> Iterator[str]:
    for name, lane in examination.facts.lanes.items():
        oldest = f", the oldest for {lane.oldest_s:.1f} s" if lane.inputs else ""
        yield f"{name}: {lane.inputs} inputs of {lane.tokens} tokens{oldest}"


def _is_bound(examination: Examination) -> Iterator[str]:
    facts = examination.facts
    window = facts.window
    yield BOUNDS[examination.bound_by]
    of_all = window.device_share_of_all
    others = f" ({of_all:.0%} by all models)" if of_all > window.device_share + 0.01 else ""
    yield (
        f"{_of_late(facts)}: {window.requests} requests, {window.inputs} inputs; busy were "
        f"the device {window.device_share:.1%}{others}, the event loop {window.loop_share:.1%}, "
        f"the tokenizer threads {tokenizing_share(facts):.1%}"
    )


def _fits(examination: Examination) -> Iterator[str]:
    facts = examination.facts
    ran = sorted((b for b in facts.buckets if b.runs), key=lambda b: -b.device_ms)
    if not ran:
        yield f"no batch ran in {_of_late(facts)}"
        return
    yield from map(_bucket_line, ran[:MOST_BUCKETS])
    if len(ran) > MOST_BUCKETS:
        yield f"and {len(ran) - MOST_BUCKETS} more buckets"
    yield "`jaxembed tune URL` finds the buckets of least cost for the lengths of this traffic"


def _bucket_line(bucket: BucketFacts) -> str:
    return (
        f"{bucket.name}: {bucket.runs} batches, {bucket.fill or 0.0:.0%} full, "
        f"{bucket.padding_tokens / bucket.runs:.0f} tokens of padding each, "
        f"{bucket.cost_ms or 0.0:.1f} ms ({bucket.cost_from})"
    )


def _is_short(examination: Examination) -> Iterator[str]:
    admission = examination.facts.admission
    inputs, tokens, memory = admission.inputs, admission.tokens, admission.bytes
    yield (
        f"held: {inputs.held} of {inputs.limit} inputs, {tokens.held} of {tokens.limit} tokens, "
        f"{memory.held / 2**20:.1f} of {memory.limit / 2**20:.0f} MiB"
    )
    window = examination.facts.window
    yield (
        f"{_of_late(examination.facts)}: {window.refused} requests refused, {window.truncated} "
        f"inputs cut to {admission.max_input_tokens} tokens"
    )


def _is_shared(examination: Examination) -> Iterator[str]:
    facts = examination.facts
    window = facts.window
    others = "unknown" if window.other_cores is None else f"{window.other_cores:.2f}"
    yield (
        f"{_of_late(facts)}: other programs kept {others} of {facts.machine.cores} cores busy, "
        f"this one {window.cpu_cores:.2f}; the quota stopped it for {window.throttled_share:.0%}"
    )


def _of_late(facts: Facts) -> str:
    return f"the last {facts.window.seconds:.0f} s"


def _probed(probe: Probe) -> str:
    line = f"Probe: {len(probe.milliseconds)} lone queries were answered"
    if probe.milliseconds:
        p50, p95 = probe.quantile(0.5), probe.quantile(0.95)
        line += f", p50 {p50:.1f} ms, p95 {p95:.1f} ms, as seen from outside"
    return line if probe.error is None else f"{line}; {probe.failed} failed: {probe.error}"


QUESTIONS: tuple[tuple[str, Callable[[Examination], Iterator[str]]], ...] = (
    ("Is it up and ready?", _is_up),
    ("What does it run on?", _runs_on),
    ("Which kernels compute, and why not faster ones?", _computes_with),
    ("Is everything compiled and timed?", _is_compiled),
    ("Where does the time of a request go?", _time_of_a_query),
    ("Does work wait, and in which lane?", _waits),
    ("What bounds the throughput?", _is_bound),
    ("Do the buckets fit the traffic?", _fits),
    ("Is room short?", _is_short),
    ("Does something else use the machine?", _is_shared),
)
