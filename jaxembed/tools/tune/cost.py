"""Loads the model that a grid is tuned for onto the device, measures the cost of some buckets
there, and interpolates the cost of the others."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import cast

import jax
import numpy as np

from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.inputs import Text
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import ModelSpec
from jaxembed.engine.autotune.timing import SEGMENT, full_planes, milliseconds
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.build import Plan, make_plan, workers_of
from jaxembed.engine.replica import Outputs, Replica
from jaxembed.engine.scheduler import DeviceScheduler
from jaxembed.errors import ConfigError, WrongTask
from jaxembed.models import program
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.runtime.tasks import KIND

PAIRS = 7  # how often `Workbench.pair_ms` times a bucket with long sequences and with short ones
TOKENIZERS = 4  # threads


@dataclass(frozen=True)
class BucketCost:
    """The measured cost of one compiled bucket."""

    ms: float  # a run of short sequences, including the copies to and from the device
    compile_s: float  # seconds to compile it, with an empty compile cache
    temporary_bytes: int  # device memory of a run, besides the parameters


class Workbench:
    """A model on the device that compiles each bucket only once, even if several grids have it.

    An engine can use it as its runner.
    """

    def __init__(self, replica: Replica):
        self.costs: dict[Bucket, BucketCost] = {}
        self.timings: dict[Bucket, list[float]] = {}  # milliseconds
        self.tokens_run = 0  # padding included
        self.primary: OutputName = replica.primary
        self.planes = replica.planes
        self.alignment, self.is_remote = replica.alignment, replica.is_remote
        self.temporary_bytes = replica.temporary_bytes
        self.free = replica.free
        self._replica = replica
        # maximum number of runs at the same time
        self._permits = DeviceScheduler.for_platform(replica.devices[0].platform).permits

    @property
    def float32_bucket(self) -> Bucket | None:
        """The bucket that has a second program in float32; None if there is none."""
        return self._replica.float32_bucket

    def lower(self, bucket: Bucket, for_any: bool = False) -> Bucket:
        """Return the bucket, which `compile` lowers."""
        return bucket

    def start(self, bucket: Bucket) -> Callable[[], None]:
        """Return a function that compiles a bucket."""
        return partial(self.compile, bucket)

    def compile(self, bucket: Bucket) -> None:
        """Compile and time a bucket, unless that was done before. Raises the errors of XLA."""
        if bucket in self.costs:
            return
        start = time.perf_counter()
        self._replica.compile(bucket)
        seconds = time.perf_counter() - start
        ms = self._time(bucket)
        self.costs[bucket] = BucketCost(ms, seconds, self._replica.temporary_bytes(bucket))

    def run(
        self,
        bucket: Bucket,
        planes: np.ndarray,
        outputs: Iterable[OutputName],
        *,
        in_float32: bool = False,
    ) -> Outputs:
        """Run a batch as `Replica.run` does, and count its tokens. The tokens of a run in float32
        are not counted, because it repeats another run."""
        self.tokens_run += 0 if in_float32 else bucket.tokens
        return self._replica.run(bucket, planes, outputs, in_float32=in_float32)

    def time_again(self, buckets: Iterable[Bucket]) -> None:
        """Time each of these buckets once more; its cost becomes the median of its timings."""
        for bucket in buckets:
            self.costs[bucket] = replace(self.costs[bucket], ms=self._time(bucket))

    def pair_ms(self, bucket: Bucket) -> float:
        """Measure what attention costs for each pair of tokens of one sequence, in milliseconds.

        A compiled bucket is timed with one sequence in each row, and with many short sequences. The
        times differ only if the kernel skips the other sequences of a row.
        """
        whole = full_planes(bucket, bucket.length, self.planes)
        # a Workbench has what `milliseconds` uses of a Replica
        extra_ms = [
            milliseconds(cast(Replica, self), bucket, self._permits, planes=whole)
            - milliseconds(cast(Replica, self), bucket, self._permits)
            for _ in range(PAIRS)
        ]
        # pairs of tokens in rows of one sequence, less those in rows of short sequences
        pairs = bucket.rows * bucket.length * max(bucket.length - SEGMENT, 1)
        return max(median(extra_ms), 0.0) / pairs

    def _time(self, bucket: Bucket) -> float:
        """Time a compiled bucket. Return the median of all its timings in milliseconds."""
        times = self.timings.setdefault(bucket, [])
        times.append(milliseconds(cast(Replica, self), bucket, self._permits))
        return median(times)


class CostTable:
    """The cost of any bucket in milliseconds, measured or interpolated.

    Costs are interpolated linearly, first over the tokens of a batch, then over the row length: the
    cost of matrix products grows with the tokens, that of attention with tokens times row length.
    Below the smallest measured batch of a length the cost is proportional to the tokens. Above the
    largest one it grows with the last slope, or in proportion to the tokens if that is steeper.
    """

    def __init__(self, costs: Mapping[Bucket, BucketCost]):
        self._measured_ms = {bucket: cost.ms for bucket, cost in costs.items()}
        # by row length: tokens of the measured buckets, ascending, and their milliseconds
        self._curves: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for length in sorted({bucket.length for bucket in costs}):
            points = sorted((b.tokens, cost.ms) for b, cost in costs.items() if b.length == length)
            tokens, ms = np.array(points, float).T
            self._curves[length] = tokens, ms
        self._lengths = list(self._curves)  # sorted

    def ms(self, bucket: Bucket) -> float:
        """Return the milliseconds of a run of this bucket: measured, or else interpolated."""
        if bucket in self._measured_ms:
            return self._measured_ms[bucket]
        right = bisect_left(self._lengths, bucket.length)
        if right == len(self._lengths):
            return self._on_curve(self._lengths[-1], bucket.tokens)
        upper = self._on_curve(self._lengths[right], bucket.tokens)
        if right == 0 or self._lengths[right] == bucket.length:
            return upper
        short, long = self._lengths[right - 1 : right + 1]
        lower = self._on_curve(short, bucket.tokens)
        return lower + (bucket.length - short) / (long - short) * (upper - lower)

    def _on_curve(self, length: int, tokens: int) -> float:
        """Estimate the milliseconds of a batch of `tokens` tokens in rows of a measured length."""
        measured, ms = self._curves[length]
        if len(measured) == 1 or tokens < measured[0]:
            return float(ms[0] * tokens / measured[0])
        if tokens > measured[-1]:
            slope = (ms[-1] - ms[-2]) / (measured[-1] - measured[-2])
            return float(ms[-1] + max(slope, ms[-1] / measured[-1]) * (tokens - measured[-1]))
        return float(np.interp(tokens, measured, ms))


def probes(lengths: Sequence[int], max_tokens: int, shards: int) -> list[Bucket]:
    """Choose a few buckets to measure, from which the costs of the rest are interpolated.

    For each row length these are one row, and batches of a sixteenth, a quarter and all of
    `max_tokens` tokens. The rows of a bucket are a multiple of `shards`, the devices of a batch.
    """
    steps = (0, max_tokens // 16, max_tokens // 4, max_tokens)
    shapes = (
        (max(tokens // (length * shards), 1), length) for length in lengths for tokens in steps
    )
    return list(dict.fromkeys(Bucket(rows * shards, length) for rows, length in shapes))


@dataclass(frozen=True)
class MeasuredModel:
    """A model as a server with the same settings would run it, but with one replica only.

    All replicas of a server have the same grid, so one is enough to tune it.
    """

    name: str
    spec: ModelSpec
    plan: Plan  # with the grid before the tuning
    config: EngineConfig
    workbench: Workbench
    processor: TextProcessor

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text with its prompt, truncated to the input limit.

        Raises EmptyInput, TokenizerError, or WrongTask if the model takes pairs of texts.
        """
        if self.spec.task == "rerank":
            raise WrongTask(
                f"{self.name} is {KIND['rerank']}, and single texts do not tell the lengths of "
                "pairs; give lengths in a .json file or the URL of a server"
            )
        tokenization = TokenizationOptions(
            self.processor.prompt(None, None), truncate=True, side="right"
        )
        inputs = [Text(text) for text in texts]
        work = self.processor.encode(inputs, tokenization).work
        return [encoding.length for encoding in work.encodings]

    def close(self) -> None:
        """Stop the tokenizer threads."""
        self.processor.executor.shutdown()


def load_measured(source: ModelSource, *, config: EngineConfig, text: TextConfig) -> MeasuredModel:
    """Load a model onto the device to tune its grid.

    Raises CheckpointError if the model cannot be read, and ConfigError if the settings do not fit
    or the model runs without buckets.
    """
    if config.null_model:
        raise ConfigError("--null-model does not use a device, so there is nothing to tune")
    if config.parallel == "replicas":
        # all replicas have the same grid
        few = min(config.tensor_parallel, jax.local_device_count())
        config = replace(config, devices=few)
    path = hub.resolve(source)
    spec = checkpoint.load_spec(path)
    if spec.is_static:
        raise ConfigError(
            f"{spec.source} holds static embeddings, which do not use buckets, so there is "
            "nothing to tune"
        )
    forward = program(spec, config.tensor_parallel, config.quantize)
    plan = make_plan(spec, forward, config, source.cache_dir)
    processor = TextProcessor(
        checkpoint.tokenizer_path(path), spec, plan.max_input_tokens, text, TOKENIZERS
    )
    worker = workers_of(plan, forward, checkpoint.stream_params(path, spec, forward.order))[0]
    assert isinstance(worker.runner, Replica)
    return MeasuredModel(source.name, spec, plan, config, Workbench(worker.runner), processor)
