"""Defines the facts of a served model and of its machine: structs that `/info?verbose` sends as
JSON.

Findings and pages are computed from these structs alone. "The window" is the time over which
events are counted, about the last minute.
"""

from typing import Literal

import msgspec

# What limited the throughput in the window. "clients" means that the server waited for requests.
Bound = Literal["idle", "clients", "device", "host", "tokenizing", "admission", "compiling"]


class DeviceFacts(msgspec.Struct):
    """The devices that a model computes on, its dtype, and their failures."""

    name: str
    platform: str  # "cpu", "gpu", "tpu", "host" for static models, or "null"
    count: int
    dtype: str
    dtype_reason: str  # why this dtype was chosen, as text for people
    dtype_asked: bool  # whether --dtype was given
    multiplies_bfloat16: bool
    estimated: bool = False  # whether the CPU's speed is an estimate, as in calibrate.Rate
    failing: int = 0  # devices whose last batches failed
    stuck: int = 0  # devices that do not return from a call
    not_joined: int = 0  # devices that take no batches, because their programs are not compiled
    longest_call_s: float = 0.0  # age of the oldest device call in progress


class KernelFacts(msgspec.Struct):
    """The kernels that compute matrix products and attention, and why others are not used."""

    asked: str  # the value of --kernels
    used: dict[str, str]  # row length -> name of the kernel
    not_used: dict[str, str]  # name of a kernel -> why it is not used


class MachineFacts(msgspec.Struct):
    """The cores and the memory settings that the process has on its machine."""

    cores: int  # cores that this process may use, and threads of XLA's pool on a CPU
    machine_cores: int  # all cores of the machine
    quota_cores: float | None  # limit set by the control group; None: no limit
    kept_bytes: int  # size of the heap that keeps freed memory for the next batch
    not_kept: str | None  # why freed memory is not kept; None: it is kept
    # "always", "madvise", "never" or "off for this process"; None: not Linux
    huge_pages: str | None


class ProgramFacts(msgspec.Struct):
    """How many buckets of a model are compiled and timed, and how reliable the timings are."""

    ready: bool
    healthy: bool
    buckets: int
    compiled: int  # number of compiled buckets
    timed: bool  # whether every bucket was timed often enough
    drift: float  # ratio of the time of recent batches to the timed costs of their buckets
    lost_share: float  # fraction of the time for timings in which other programs had the cores
    compiles: int  # programs compiled since the start of the process
    cache_hits: int  # programs taken from the compile cache since the start of the process


class BucketFacts(msgspec.Struct):
    """The cost of one bucket, and totals of the batches that ran in this bucket in the window."""

    rows: int
    length: int
    compiled: bool
    cost_ms: float | None = None  # device time of one batch
    cost_from: str | None = None  # "kept" by an earlier run, "timed" by this one, or "assumed"
    runs: int = 0  # batches in the window
    useful_tokens: int = 0  # tokens of those batches that are not padding
    device_ms: float = 0.0  # device time of those batches
    runs_since_start: int = 0
    fill: float | None = None  # useful tokens over tokens of those batches; None without batches
    padding_tokens: int = 0  # padding tokens of those batches

    def __post_init__(self) -> None:
        if self.runs:
            self.fill = self.useful_tokens / (self.runs * self.tokens)
            self.padding_tokens = self.runs * self.tokens - self.useful_tokens

    @property
    def tokens(self) -> int:
        """The number of tokens of one batch of this bucket, including padding."""
        return self.rows * self.length

    @property
    def name(self) -> str:
        """The rows and the length as text, such as "4x128"."""
        return f"{self.rows}x{self.length}"


class QueueFacts(msgspec.Struct):
    """The inputs that wait in the queue of one priority."""

    inputs: int
    tokens: int
    oldest_s: float  # seconds that the oldest input has waited


class LimitFacts(msgspec.Struct):
    """One limit of admission, which all models of the server share."""

    limit: int
    held: int  # how much of the limit is in use now
    refused: int  # requests refused because of it in the window


class AdmissionFacts(msgspec.Struct):
    """The limits of the queue, of a batch and of an input."""

    inputs: LimitFacts
    tokens: LimitFacts
    bytes: LimitFacts
    tokens_asked: bool  # whether --max-queue-tokens was given
    max_batch_tokens: int
    batch_tokens_asked: bool  # whether --max-batch-tokens was given
    batch_target_ms: float | None  # time that a full batch should take by default; None: none
    least_batch_tokens: int  # tokens of the smallest default batch on this kind of device
    buckets_asked: bool  # whether --buckets was given
    max_input_tokens: int  # the server's limit of an input
    model_input_tokens: int  # the model's own limit of an input
    tokenization_workers: int  # number of tokenizer threads


class StageFacts(msgspec.Struct):
    """How long one stage of the requests took in the window."""

    count: int  # requests that passed the stage
    mean_ms: float


class WindowFacts(msgspec.Struct):
    """The work of a model in the window. Shares are fractions of the window's seconds."""

    seconds: float  # length of the window
    requests: int
    inputs: int  # inputs that were answered
    refused: int  # requests refused because a limit was reached
    truncated: int  # inputs that were truncated to the limit
    failed_batches: int
    split_batches: int  # batches run again in parts because the device's memory was full
    not_finite: int  # results with infinities or NaN
    stages: dict[str, StageFacts]
    device_share: float  # time in which the devices computed for this model
    device_share_of_all: float  # time in which the devices computed for any model of the process
    loop_share: float  # time in which the event loop was busy: decoding, encoding, answering
    loop_delay_ms: float  # the largest delay of a timer of the event loop
    cpu_cores: float  # mean number of cores that the process kept busy
    other_cores: float | None  # mean number of usable cores that other programs kept busy
    throttled_share: float  # time in which the CPU quota stopped the process


def name_of_route(model: str, route: str) -> str:
    """Return the name of a route in diagnostics: "model, route", or "model" if `route` is empty."""
    return f"{model}, {route}" if route else model


class Setup(msgspec.Struct):
    """The facts that need no traffic: the devices, kernels and machine that a model uses or would
    use."""

    model: str
    device: DeviceFacts
    kernels: KernelFacts
    machine: MachineFacts


class Facts(Setup):
    """All facts of one served model, or of one of its routes."""

    task: str
    programs: ProgramFacts
    buckets: list[BucketFacts]
    lanes: dict[str, QueueFacts]
    admission: AdmissionFacts
    window: WindowFacts
    route: str = ""


class Finding(msgspec.Struct):
    """A cause of slow or failing work, the evidence for it, and a remedy, as text for people."""

    cause: str
    evidence: str
    remedy: str


class Examination(msgspec.Struct):
    """The entry of `/info?verbose` for one route of a model. The worst finding is first."""

    bound_by: Bound
    findings: list[Finding]
    facts: Facts


class LocalFacts(Setup):
    """The devices, kernels and limits that a model would have if it were served on this machine."""

    compiler: str | None  # the C compiler that would build the native kernels
    cache_dir: str
    kept_programs: int  # compiled programs in the cache for this kind of device
    max_input_tokens: int
    max_batch_tokens: int
    buckets: list[str]


class LocalExamination(msgspec.Struct):
    """The answer of `jaxembed doctor` without a server. The worst finding is first."""

    findings: list[Finding]
    facts: LocalFacts
