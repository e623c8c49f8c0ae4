"""The costs of buckets on this device: some are measured, the others are interpolated."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Outputs, Replica
from jaxembed.engine.timing import SEGMENT, full_planes, milliseconds
from jaxembed.engine.turn import DeviceTurn
from jaxembed.outputs import OutputName

PAIRS = 7  # of timings with long sequences and with short ones


@dataclass(frozen=True)
class Cost:
    """The cost of one compiled bucket: milliseconds of a run of short sequences with its copies,
    seconds to compile with nothing cached, and bytes of device memory besides the parameters."""

    ms: float
    compile_s: float
    temporary_bytes: int


class Workbench:
    """A model on the device, and every bucket compiled once however many grids have it.

    It answers an engine as a runner, to which compiling what is compiled costs nothing.
    """

    def __init__(self, replica: Replica):
        self.costs: dict[Bucket, Cost] = {}
        self.timings: dict[Bucket, list[float]] = {}  # milliseconds each
        self.tokens_run = 0  # padding counted
        self.primary: OutputName = replica.primary
        self.run_in_float32 = replica.run_in_float32
        self._replica = replica

    @property
    def float32_bucket(self) -> Bucket | None:
        """As of the replica."""
        return self._replica.float32_bucket

    def compile(self, bucket: Bucket) -> None:
        """Compile and time a bucket, unless that is done. Raises the errors of XLA."""
        if bucket not in self.costs:
            self._measure(bucket)

    def run(self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]) -> Outputs:
        self.tokens_run += bucket.tokens
        return self._replica.run(bucket, planes, outputs)

    def time_again(self, buckets: Iterable[Bucket]) -> None:
        """Time each once more: the median counts."""
        for bucket in buckets:
            self.costs[bucket] = replace(self.costs[bucket], ms=self._time(bucket))

    def _measure(self, bucket: Bucket) -> None:
        start = time.perf_counter()
        self._replica.compile(bucket)
        seconds = time.perf_counter() - start
        ms = self._time(bucket)
        self.costs[bucket] = Cost(ms, seconds, self._replica.temporary_bytes(bucket))

    def pair_ms(self, bucket: Bucket) -> float:
        """Milliseconds for each pair of tokens in one sequence, by the difference that long ones
        make to a compiled bucket of long rows: what kernels take that skip other sequences."""
        whole = full_planes(bucket, bucket.length)
        times = [
            milliseconds(self, bucket, self._permits, planes=whole)
            - milliseconds(self, bucket, self._permits)
            for _ in range(PAIRS)
        ]
        pairs = bucket.rows * bucket.length * max(bucket.length - SEGMENT, 1)
        return max(median(times), 0.0) / pairs

    def _time(self, bucket: Bucket) -> float:
        times = self.timings.setdefault(bucket, [])
        times.append(milliseconds(self, bucket, self._permits))
        return median(times)

    @property
    def _permits(self) -> int:
        return DeviceTurn.for_platform(self._replica.devices[0].platform).permits


class CostTable:
    """Milliseconds of any bucket, from those measured.

    Along the tokens of a batch, and then along the length of its rows, costs are read off straight
    lines between neighbours: products cost by the token, attention by the token and the length.
    Below the first measured batch of a length they shrink with the tokens, beyond the last they
    grow on as before.
    """

    def __init__(self, costs: Mapping[Bucket, Cost]):
        self._known = {bucket: cost.ms for bucket, cost in costs.items()}
        self._curves: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for length in sorted({bucket.length for bucket in costs}):
            points = sorted((b.tokens, cost.ms) for b, cost in costs.items() if b.length == length)
            tokens, ms = np.array(points, float).T
            self._curves[length] = tokens, ms
        self._lengths = list(self._curves)  # sorted

    def ms(self, bucket: Bucket) -> float:
        """The measured cost of a bucket, or an estimate."""
        if bucket in self._known:
            return self._known[bucket]
        right = bisect_left(self._lengths, bucket.length)
        if right == len(self._lengths):
            return self._on_curve(self._lengths[-1], bucket.tokens)
        long = self._lengths[right]
        upper = self._on_curve(long, bucket.tokens)
        if right == 0 or long == bucket.length:
            return upper
        short = self._lengths[right - 1]
        lower = self._on_curve(short, bucket.tokens)
        return lower + (bucket.length - short) / (long - short) * (upper - lower)

    def _on_curve(self, length: int, tokens: int) -> float:
        known, ms = self._curves[length]
        if len(known) == 1 or tokens < known[0]:
            return float(ms[0] * tokens / known[0])
        if tokens > known[-1]:
            slope = (ms[-1] - ms[-2]) / (known[-1] - known[-2])
            return float(ms[-1] + max(slope, ms[-1] / known[-1]) * (tokens - known[-1]))
        return float(np.interp(tokens, known, ms))


def probes(lengths: Sequence[int], most_tokens: int, shards: int) -> list[Bucket]:
    """A sparse set of buckets whose costs tell about the rest: of each length one row, and batches
    of a sixteenth, a quarter and all of `most_tokens`."""
    steps = (0, most_tokens // 16, most_tokens // 4, most_tokens)
    pairs = (
        (max(tokens // (length * shards), 1), length) for length in lengths for tokens in steps
    )
    return list(dict.fromkeys(Bucket(rows * shards, length) for rows, length in pairs))
