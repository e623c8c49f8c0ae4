"""Writes facts and findings as plain text: answers to ten questions that an operator asks."""

import textwrap
from collections.abc import Sequence
from typing import get_args

from jaxembed.engine.autotune.costs import CostSource
from jaxembed.errors import counted
from jaxembed.runtime.diagnostics.facts import (
    Bound,
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
MAX_BUCKETS = 6  # how many buckets are shown, beginning with the one that took the most time


def model_page(url: str, examination: Examination, probe: Probe | None = None) -> str:
    """Return the page of a served model as text: answers, the probe if any, and findings."""
    facts = examination.facts
    lines = [f"{url} serves {name_of_route(facts.model, facts.route)}", ""]
    answers = {**answers_of_state(facts), **answers_of_work(examination)}
    for number, (question, answer) in enumerate(answers.items(), start=1):
        lines.append(f"{number:2}. {question}")
        for line in answer:
            lines += _wrapped("    ", line)
    if probe is not None:
        text = f"Probe: {len(probe.milliseconds)} single queries were answered"
        if probe.milliseconds:
            p50, p95 = probe.quantile(0.5), probe.quantile(0.95)
            text += f", p50 {p50:.1f} ms, p95 {p95:.1f} ms, as seen from outside"
        if probe.error is not None:
            text += f"; {probe.failed} failed: {probe.error}"
        lines += ["", *_wrapped("", text)]
    return "\n".join([*lines, "", *_finding_lines(examination.findings, "this server")])


def local_page(examination: LocalExamination) -> str:
    """Return the page of a model that is not served: what this machine offers, and findings."""
    facts = examination.facts
    device, machine = facts.device, facts.machine
    parts = [
        ("device", _device_line(device)),
        ("", f"{machine.cores} of {machine.machine_cores} cores"),
        ("memory", _memory_line(machine)),
        ("compiler", facts.compiler or "none (only a source checkout needs one)"),
        (
            "cache",
            f"{facts.cache_dir}, {counted(facts.kept_programs, 'program')}; nobody else can "
            "write there",
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
    """Return the lines of the findings about a `subject`, such as "this server"."""
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


def _wrapped(prefix: str, text: str) -> list[str]:
    """Wrap text into lines of at most WIDTH characters, after `prefix` and indented by its length,
    without breaking words or flags."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    )


def answers_of_state(facts: Facts) -> dict[str, list[str]]:
    """Answer what a model runs on and whether it is ready. Return the lines of each answer, by
    question."""
    device, machine, programs = facts.device, facts.machine, facts.programs
    state = "ready" if programs.ready else "not ready"
    lines = [f"{state}, {'healthy' if programs.healthy else 'unhealthy'}"]
    if device.longest_call_s > 1.0 or device.stuck:
        lines.append(
            f"a device call has lasted {device.longest_call_s:.0f} s; devices that hang: "
            f"{device.stuck}"
        )
    quota = f", a quota of {machine.quota_cores:g}" if machine.quota_cores else ""
    sources = [bucket.cost_from for bucket in facts.buckets]
    costs = ", ".join(f"{sources.count(name)} {name}" for name in get_args(CostSource))
    return {
        "Is it up and ready?": lines,
        "What does it run on?": [
            _device_line(device),
            f"{machine.cores} of {machine.machine_cores} cores{quota}; "
            f"{facts.admission.tokenization_workers} tokenizer threads",
            _memory_line(machine),
        ],
        "Which kernels compute, and why not faster ones?": _kernel_lines(facts.kernels),
        "Is everything compiled and timed?": [
            f"{programs.compiled} of {counted(programs.buckets, 'bucket')} compiled; costs: "
            f"{costs}",
            f"programs since the start: {programs.compiles} compiled, {programs.cache_hits} from "
            f"the cache; timings lost {programs.lost_share:.0%} to other programs, drift since "
            f"then {programs.drift:.2f}",
        ],
    }


def answers_of_work(examination: Examination) -> dict[str, list[str]]:
    """Answer where the time of requests goes and what limits throughput. Return the lines of each
    answer, by question."""
    facts = examination.facts
    window, admission = facts.window, facts.admission
    period = f"the last {window.seconds:.0f} s"

    stages = [f"{name} {s.mean_ms:.2f} ms" for name, s in window.stages.items() if s.count]
    unanswered = f"no request was answered in {period}; --probe sends some"
    times = [f"{', '.join(stages)}: means of {period}" if stages else unanswered]
    costs = [bucket for bucket in facts.buckets if bucket.cost_ms is not None]
    if costs:
        bucket = min(costs, key=lambda bucket: (bucket.tokens, bucket.length))
        times.append(
            f"alone, a short query takes {bucket.cost_ms:.1f} ms of the device, in {bucket.name}"
        )

    waits = [
        f"{priority}: {counted(queue.inputs, 'input')} of {queue.tokens} tokens"
        + (f", the oldest for {queue.oldest_s:.1f} s" if queue.inputs else "")
        for priority, queue in facts.lanes.items()
    ]

    of_all = window.device_share_of_all
    others = f" ({of_all:.0%} by all models)" if of_all > window.device_share + 0.01 else ""

    ran = sorted((b for b in facts.buckets if b.runs), key=lambda b: -b.device_ms)
    buckets = [
        f"{bucket.name}: {bucket.runs} batches, {bucket.fill or 0.0:.0%} full, "
        f"{bucket.padding_tokens / bucket.runs:.0f} tokens of padding each, "
        f"{bucket.cost_ms or 0.0:.1f} ms ({bucket.cost_from})"
        for bucket in ran[:MAX_BUCKETS]
    ]
    if len(ran) > MAX_BUCKETS:
        buckets.append(f"and {len(ran) - MAX_BUCKETS} more buckets")
    if ran:
        buckets.append(
            "`jaxembed tune URL` finds the buckets of least cost for the lengths of this traffic"
        )

    inputs, tokens, memory = admission.inputs, admission.tokens, admission.bytes
    other_cores = "unknown" if window.other_cores is None else f"{window.other_cores:.2f}"
    return {
        "Where does the time of a request go?": times,
        "Does work wait, and at which priority?": waits,
        "What bounds the throughput?": [
            BOUNDS[examination.bound_by],
            f"{period}: {counted(window.requests, 'request')}, "
            f"{counted(window.inputs, 'input')}; the device was busy for "
            f"{window.device_share:.1%}{others} of the time, the event loop for "
            f"{window.loop_share:.1%}, the tokenizer threads for {tokenizing_share(facts):.1%}",
        ],
        "Do the buckets fit the traffic?": buckets or [f"no batch ran in {period}"],
        "Are the limits on waiting work reached?": [
            f"held: {inputs.held} of {counted(inputs.limit, 'input')}, {tokens.held} of "
            f"{tokens.limit} tokens, {memory.held / 2**20:.1f} of {memory.limit / 2**20:.0f} MiB",
            f"{period}: {counted(window.refused, 'request')} refused, "
            f"{counted(window.truncated, 'input')} "
            f"truncated to {admission.max_input_tokens} tokens",
        ],
        "Does something else use the machine?": [
            f"{period}: other programs kept {other_cores} of {facts.machine.cores} cores busy, "
            f"this one {window.cpu_cores:.2f}; the quota stopped it for "
            f"{window.throttled_share:.0%} of the time"
        ],
    }


def _device_line(device: DeviceFacts) -> str:
    line = f"{device.count} x {device.name}, {device.dtype}: {device.dtype_reason}"
    if device.estimated:
        line += "; its speed is estimated, because other programs used it when it was measured"
    return line


def _memory_line(machine: MachineFacts) -> str:
    kept = f"kept, in {machine.kept_bytes / 2**30:.1f} GiB of address space"
    state = kept if machine.not_kept is None else f"not kept: {machine.not_kept}"
    return f"freed memory is {state}; huge pages: {machine.huge_pages or 'unknown'}"


def _kernel_lines(kernels: KernelFacts) -> list[str]:
    """Return lines that say which kernel computes which row lengths, and why others do not."""
    rows_of: dict[str, list[str]] = {}
    for length, name in kernels.used.items():
        rows_of.setdefault(name, []).append(length)
    lines = [f"{name} for rows of {', '.join(rows)} tokens" for name, rows in rows_of.items()]
    lines += [f"not {name}: {reason}" for name, reason in kernels.not_used.items()]
    return lines or ["none: nothing runs on a device"]
