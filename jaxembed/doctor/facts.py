"""What is known of a served model and of its machine, as plain values for JSON.

Findings and pages are made of these alone.
"""

from typing import Literal

import msgspec

# What limits the throughput of the last while. "clients" is none of these: the server waits for
# requests more than for anything else.
Bound = Literal["idle", "clients", "device", "host", "tokenizing", "admission", "compiling"]


class DeviceFacts(msgspec.Struct):
    """Where a model computes."""

    name: str
    platform: str  # "cpu", "gpu", "tpu", or "null" for the null model
    count: int
    dtype: str
    dtype_reason: str
    dtype_asked: bool  # by --dtype
    multiplies_bfloat16: bool
    failing: int = 0  # devices whose batches failed in a row
    stuck: int = 0  # devices that do not return from a call
    longest_call_s: float = 0.0  # the age of the oldest call under way


class KernelFacts(msgspec.Struct):
    """What computes products and attention, by row length, and why others do not."""

    asked: str  # --kernels
    used: dict[str, str]
    not_used: dict[str, str]


class MachineFacts(msgspec.Struct):
    """What the process has of its machine."""

    cores: int  # that it may use, and so the threads of XLA's pool on a CPU
    machine_cores: int
    quota_cores: float | None  # by its control group
    kept_bytes: int  # of heap, which freed memory stays in for the next batch
    not_kept: str | None  # why there is no such heap
    huge_pages: str | None  # "always", "madvise", "never", "off for this process"; None: no Linux


class ProgramFacts(msgspec.Struct):
    """How far a model is compiled and timed."""

    ready: bool
    healthy: bool
    buckets: int
    compiled: int
    timed: bool  # every bucket often enough
    drift: float  # of all costs, by real batches
    spread: float  # of the timings of one bucket: third quartile over first
    compiles: int  # of the process, since its start
    cache_hits: int


class BucketFacts(msgspec.Struct):
    """One bucket: its cost, and its batches of the last while."""

    rows: int
    length: int
    compiled: bool
    cost_ms: float | None = None
    cost_from: str | None = None  # "kept" by an earlier run, "timed" by this one, or "assumed"
    runs: int = 0
    useful_tokens: int = 0
    device_ms: float = 0.0
    runs_since_start: int = 0
    fill: float | None = None  # useful tokens over those of the bucket; None without batches
    padding_tokens: int = 0

    def __post_init__(self) -> None:
        if self.runs:
            self.fill = self.useful_tokens / (self.runs * self.tokens)
            self.padding_tokens = self.runs * self.tokens - self.useful_tokens

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.length}"


class LaneFacts(msgspec.Struct):
    """What waits in one lane."""

    inputs: int
    tokens: int
    oldest_s: float


class LimitFacts(msgspec.Struct):
    """One limit on what is admitted, over all models."""

    limit: int
    held: int
    refused: int  # requests of the last while


class AdmissionFacts(msgspec.Struct):
    """What may enter."""

    inputs: LimitFacts
    tokens: LimitFacts
    bytes: LimitFacts
    tokens_asked: bool  # by --max-queue-tokens
    max_batch_tokens: int
    batch_tokens_asked: bool  # by --max-batch-tokens
    batch_target_ms: float | None  # what a full batch takes by default; None: no such aim
    least_batch_tokens: int  # of the smallest batch that this kind of device has by default
    buckets_asked: bool  # by --buckets
    max_input_tokens: int
    model_input_tokens: int  # that the model itself takes
    tokenization_workers: int


class StageFacts(msgspec.Struct):
    """One stage of the requests of the last while."""

    count: int
    mean_ms: float


class WindowFacts(msgspec.Struct):
    """The work of the last while. Shares are of its seconds."""

    seconds: float
    requests: int
    inputs: int  # answered
    refused: int  # requests, for want of room
    truncated: int  # inputs
    failed_batches: int
    split_batches: int
    not_finite: int
    stages: dict[str, StageFacts]
    device_share: float  # that this model had of its devices
    device_share_of_all: float  # that all models of the process had
    loop_share: float  # that the event loop computed: decoding, encoding, answering
    loop_delay_ms: float  # the longest that a timer of the event loop came late
    cpu_cores: float  # cores that the process kept busy
    other_cores: float | None  # cores that other programs kept busy, of those it may use
    throttled_share: float  # in which its quota let the process not run


class Facts(msgspec.Struct):
    """All that is known of one model."""

    model: str
    task: str
    device: DeviceFacts
    kernels: KernelFacts
    machine: MachineFacts
    programs: ProgramFacts
    buckets: list[BucketFacts]
    lanes: dict[str, LaneFacts]
    admission: AdmissionFacts
    window: WindowFacts


class Finding(msgspec.Struct):
    """One cause of slowness or loss, what shows it, and what helps."""

    cause: str
    evidence: str
    remedy: str


class Examination(msgspec.Struct):
    """What `/info?verbose` says of one model; findings are worst first."""

    bound_by: Bound
    findings: list[Finding]
    facts: Facts


class LocalFacts(msgspec.Struct):
    """What a model would have on this machine, were it served."""

    model: str
    device: DeviceFacts
    kernels: KernelFacts
    machine: MachineFacts
    compiler: str | None  # of C, that would compile the native kernels
    cache_dir: str
    kept_programs: int  # in the cache, of this kind of CPU
    max_input_tokens: int
    max_batch_tokens: int
    buckets: list[str]


class LocalExamination(msgspec.Struct):
    """What `jaxembed doctor` says without a server; findings are worst first."""

    findings: list[Finding]
    facts: LocalFacts
