"""Fits the buckets of a model to the memory of an accelerator, before the model is loaded.

The compiler says how much memory the program of a bucket needs, without running it.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxembed.data.spec import DType
from jaxembed.engine.autotune.cost_file import SavedFile
from jaxembed.engine.autotune.kernels import Choice
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.placement import Device, placed_bytes
from jaxembed.engine.replica import compile_described, output_variants, run_bytes
from jaxembed.errors import ConfigError
from jaxembed.models import Program
from jaxembed.models.attention import Attend

logger = logging.getLogger(__name__)

MB = 1_000_000
OUT_OF_MEMORY = "memory space hbm"  # in the error of a TPU's compiler for a program that cannot fit


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one device, and what a model needs of it.

    `room` is the bytes that models may take, `parameters` those of the model's parameters, and
    `permits` the number of programs that may be in flight. `run_bytes` returns the bytes of a run
    of a bucket besides parameters, infinity if its program cannot fit. `kernel_of` returns the name
    of the attention kernel for rows of a length.
    """

    device_name: str
    room: int
    parameters: int
    permits: int
    run_bytes: Callable[[Bucket], float]
    kernel_of: Callable[[int], str] = lambda length: ""

    def fit(
        self,
        grid_of: Callable[[int], BucketGrid],
        budget: int,
        remedy: str,
        fixed_by: str | None = None,
    ) -> tuple[int, BucketGrid]:
        """Return the largest token budget with which the model fits, and the grid with this budget.

        The result is `budget`, or `budget` halved as often as needed. `grid_of` makes the grid with
        a budget. `remedy` tells the user what to do if no budget is small enough. If `fixed_by` is
        not None, it names the setting that fixes the budget. Raises ConfigError with the figures if
        the model does not fit, and XLA's errors for programs that it cannot compile.
        """
        wanted, grid = budget, grid_of(budget)
        if self.parameters > self.room:
            raise ConfigError(
                self._refusal(
                    "", "use a device with more memory, or several with --tensor-parallel"
                )
            )
        while not self._fits(bucket := max(self.candidates(grid), key=self.run_bytes)):
            smaller = grid_of(budget // 2)
            runs = f", and {self.permits} runs of a batch of {bucket} tokens {self._runs(bucket)}"
            if fixed_by is not None:
                raise ConfigError(f"{fixed_by}: {self._refusal(runs, remedy)}")
            if bucket in self.candidates(smaller):
                raise ConfigError(self._refusal(runs, remedy))
            budget, grid = budget // 2, smaller
        if budget < wanted:
            logger.info(
                "batches have at most %d tokens instead of %d, so that the model fits into the "
                "memory of %s",
                budget,
                wanted,
                self.device_name,
            )
        return budget, grid

    def candidates(self, grid: BucketGrid) -> set[Bucket]:
        """Return the buckets of which one needs the most memory.

        For each kernel they are the longest row, and of the buckets with most tokens those with the
        longest rows and with most slots, which sparse outputs have."""
        found: set[Bucket] = set()
        for name in {self.kernel_of(bucket.length) for bucket in grid.buckets}:
            buckets = [b for b in grid.buckets if self.kernel_of(b.length) == name]
            found |= {
                max(buckets, key=lambda b: (b.length, b.tokens)),
                max(buckets, key=lambda b: (b.tokens, b.length)),
                max(buckets, key=lambda b: (b.tokens, b.rows * b.slots)),
            }
        return found

    def _fits(self, bucket: Bucket) -> bool:
        """Return whether parameters and concurrent runs of the bucket fit into the memory."""
        return self.parameters + self.permits * self.run_bytes(bucket) <= self.room

    def _runs(self, bucket: Bucket) -> str:
        """Describe the memory of concurrent runs of a bucket, as part of a message."""
        taken = self.permits * self.run_bytes(bucket)
        return "more than there is" if math.isinf(taken) else f"{taken / MB:.0f} MB"

    def _refusal(self, runs: str, remedy: str) -> str:
        """Return the message for a model that does not fit."""
        return (
            f"the model does not fit into the memory of {self.device_name}: parameters take "
            f"{self.parameters / MB:.0f} MB{runs}, of {self.room / MB:.0f} MB; {remedy}"
        )


def memory_plan(
    program: Program,
    devices: Sequence[Device],
    dtype: DType,
    kernels: Choice,
    room: int,
    permits: int,
    saved: SavedFile,
) -> MemoryPlan:
    """Make the memory plan of a model on devices that share each batch, and may each give `room`
    bytes to models.

    To know what a bucket needs, its program is compiled, unless `saved` has the number from an
    earlier start; new numbers are added to it.
    """
    known: dict[str, float] = saved.load(_decode) or {}

    def bytes_of(bucket: Bucket) -> float:
        key = f"{bucket} {kernels.name_of(bucket.length)}"
        if key not in known:
            attend = kernels.implementation(bucket)
            known[key] = _compiled_bytes(program, devices, bucket, dtype, attend)
            saved.save({key: count for key, count in known.items() if math.isfinite(count)})
        return known[key]

    shapes = {name: program.share_of(name) for name in program.shapes}
    name, parameters = devices[0].device_kind, placed_bytes(shapes, dtype, program.quantize)
    return MemoryPlan(name, room, parameters, permits, bytes_of, kernels.name_of)


def _decode(content: Any) -> dict[str, float]:
    """Convert what a file holds to bytes by bucket and kernel. Raises ValueError, TypeError or
    AttributeError for content of another form."""
    return {key: float(count) for key, count in content.items()}


def _compiled_bytes(
    program: Program, devices: Sequence[Device], bucket: Bucket, dtype: DType, attend: Attend
) -> float:
    """Return the bytes that a run of a bucket needs on each device besides parameters, by the
    program that needs most.

    Infinity if XLA finds that a program cannot fit. Raises XLA's other errors.
    """
    try:
        return max(
            run_bytes(compile_described(program, devices, bucket, dtype, attend, outputs))
            for outputs in output_variants(program, devices[0].platform)
        )
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        return math.inf
