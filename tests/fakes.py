"""Fake runners and engines, and helpers that several test files use on an engine."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from prometheus_client.registry import Collector

from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.engine.autotune.costs import BucketCosts, repeat_timings
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.engine import Engine, Worker
from jaxembed.engine.future import WorkFuture
from jaxembed.engine.scheduler import DeviceScheduler, VirtualTime
from jaxembed.models.tokens import PackedTokens
from jaxembed.observability.metrics import Telemetry

SMALL_GRID = BucketGrid((Bucket(1, 16), Bucket(8, 16), Bucket(1, 64)))
WIDTHS: dict[OutputName, int] = {"dense": 1, "tokens": 1}  # of what a SumRunner answers
WAIT_S = 60.0  # for what must happen: reached only when it doesn't


def is_work_in(planes: np.ndarray) -> bool:
    """Whether a batch is of a request: sequences that are timed or probed have only the id 1."""
    ids, _, segments = planes[:3]
    return bool((ids[segments > 0] != 1).any())


class SumRunner:
    """Answers each sequence with the sum of its ids, so that an answer shows whose it is.

    `gate` holds runs back, `broken` and `error` fail them, more than `max_tokens` do not fit the
    memory. The id BAD makes its sequence infinite, or with `poison` its whole row; WORSE does so in
    float32 too, which only a runner with a bucket for `float32` has. What is timed or probed,
    sequences of the id 1 alone, passes the gate and is noted in `timed` instead of `ran`.
    """

    BAD, WORSE = 666, 667
    primary: OutputName = "dense"
    planes = PackedTokens.PLANES
    alignment = 1
    is_remote = False

    def __init__(
        self,
        max_tokens: int = 10**9,
        poison: bool = False,
        float32: Bucket | None = None,
        error: Exception | None = None,
    ):
        self.max_tokens = max_tokens
        self.poison = poison
        self._float32 = float32
        self.error = error
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)  # released by each run of real work
        self.on_run: Callable[[Bucket, np.ndarray], None] = lambda bucket, planes: None
        self.slow_to_compile: dict[Bucket, threading.Event] = {}
        self.cannot_compile: set[Bucket] = set()
        self.compiling = threading.Semaphore(0)  # released by each compilation that begins
        self.compiled: list[Bucket] = []
        self.ran: list[Bucket] = []
        self.timed: list[Bucket] = []
        self.wide_runs = 0
        self.seen: list[int] = []  # first ids of the sequences that ran
        self.inside = self.max_inside = 0
        self._lock = threading.Lock()

    def lower(self, bucket: Bucket, for_any: bool = False) -> Bucket:
        return bucket

    def start(self, bucket: Bucket) -> Callable[[], None]:
        return partial(self._compile, bucket)

    def _compile(self, bucket: Bucket) -> None:
        self.compiling.release()
        if bucket in self.slow_to_compile:
            assert self.slow_to_compile[bucket].wait(WAIT_S)
        if bucket in self.cannot_compile:
            raise RuntimeError(f"XLA cannot compile {bucket}")
        self.compiled.append(bucket)

    def run(
        self,
        bucket: Bucket,
        planes: np.ndarray,
        outputs: Iterable[OutputName],
        *,
        in_float32: bool = False,
    ) -> dict[OutputName, np.ndarray]:
        if in_float32:
            self.wide_runs += 1
            assert bucket == self._float32
            return self._sums(planes, bucket.slots, outputs, guilty=(self.WORSE,))
        ids, positions, segments = planes[:3]
        is_work = is_work_in(planes)
        with self._lock:
            self.inside += 1
            self.max_inside = max(self.max_inside, self.inside)
            (self.ran if is_work else self.timed).append(bucket)
        try:
            if is_work:
                self.entered.release()
                assert self.gate.wait(WAIT_S)
                self.seen += ids[(segments > 0) & (positions == 0)].tolist()
            self.on_run(bucket, planes)
        finally:
            with self._lock:
                self.inside -= 1
        if self.error is not None:
            raise self.error
        if self.broken:
            raise RuntimeError("INTERNAL: broken")
        if bucket.tokens > self.max_tokens:
            raise RuntimeError(f"RESOURCE_EXHAUSTED: out of memory at 0xdead, {bucket.tokens}")
        return self._sums(planes, bucket.slots, outputs, guilty=(self.BAD, self.WORSE))

    @property
    def float32_bucket(self) -> Bucket | None:
        return self._float32

    def temporary_bytes(self, bucket: Bucket) -> int:
        return bucket.tokens

    def free(self) -> None:
        self.freed = True

    def _sums(self, planes, slots, outputs, guilty) -> dict[OutputName, np.ndarray]:
        ids, segments = planes[0].astype(np.float32), planes[2]
        for row in range(len(ids)):
            bad = np.isin(ids[row], guilty)
            if bad.any():
                of_bad = np.isin(segments[row], segments[row][bad])
                ids[row, ... if self.poison else of_bad] = np.inf
        starts, ends = planes[4][:, :slots, None], planes[4][:, slots : 2 * slots, None]
        place = np.arange(ids.shape[1])[None, None, :]
        member = (place >= starts) & (place < ends)
        dense = np.where(member, ids[:, None, :], 0.0).sum(axis=2)[:, :, None]
        everything = {"dense": dense.astype(np.float32), "tokens": ids[:, :, None]}
        return {name: everything[name] for name in outputs}


def timed_costs(costs: Mapping[Bucket, float]) -> BucketCosts:
    """Costs that were timed already, in milliseconds: an engine that has them times nothing."""
    return BucketCosts(1.0, {bucket: repeat_timings([ms]) for bucket, ms in costs.items()})


class EngineUnderTest(Engine):
    """An engine of runners of ours; every bucket costs a tenth of a millisecond a token unless
    `costs` says otherwise, and outputs are one wide unless `widths` does."""

    def __init__(self, runners: Iterable[SumRunner], grid: BucketGrid, turns=None, **options):
        self.telemetry = Telemetry()
        runners = list(runners)
        turns = turns or [DeviceScheduler() for _ in runners]
        shares = options.pop("shares", None) or [VirtualTime() for _ in runners]
        workers = [
            Worker(runner, scheduler, share=share)
            for runner, scheduler, share in zip(runners, turns, shares, strict=True)
        ]
        costs = options.pop("costs", None) or timed_costs({b: b.tokens / 10 for b in grid.buckets})
        widths = options.pop("widths", WIDTHS)
        super().__init__(workers, grid, widths, self.telemetry, costs, **options)

    def ask(
        self,
        encodings: Sequence[Encoding],
        outputs: frozenset[OutputName] = frozenset({"dense"}),
        **options,
    ) -> WorkFuture:
        """Submit one request."""
        return self.submit(work_from_encodings(encodings, outputs), **options)

    @property
    def waiting(self) -> tuple[int, int]:
        """The inputs and the tokens that wait."""
        state = self.snapshot()
        return state.waiting_inputs, state.waiting_tokens


class Clock:
    """The time in seconds, as a test sets it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def encoding(*ids: int) -> Encoding:
    return Encoding(np.array(ids, np.int32))


def future_of(
    encodings: Sequence[Encoding], outputs: frozenset[OutputName] = frozenset({"dense"}), **options
) -> WorkFuture:
    """A future of no engine."""
    return WorkFuture(
        work_from_encodings(encodings, outputs), options.pop("widths", WIDTHS), **options
    )


def sums(future: WorkFuture) -> list[float]:
    """The answer of a SumRunner's engine."""
    return future.result(WAIT_S)["dense"][:, 0].tolist()


def entered(runner: SumRunner) -> None:
    """Wait until the runner is inside a run of real work."""
    assert runner.entered.acquire(timeout=WAIT_S)


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that nothing signals, such as a thread that is in line."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def count_of(metric: Collector) -> float:
    """The value of a counter or gauge."""
    (family,) = metric.collect()
    return sum(sample.value for sample in family.samples)
