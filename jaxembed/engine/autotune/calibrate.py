"""Chooses the dtype and the default token budget of a batch, on a CPU by its measured speed."""

import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxembed.data.spec import DType
from jaxembed.engine.autotune.cost_file import save_json
from jaxembed.engine.compiles import compile_lowered
from jaxembed.engine.placement import Device
from jaxembed.models import Program
from jaxembed.platform.cores import MAX_WAITED, CpuTimes, core_count, host_id, timed, usable_cores

logger = logging.getLogger(__name__)

ACCELERATOR_TOKENS = 16384  # default token budget on an accelerator, the same as TEI's
# The assumed milliseconds per token on an accelerator. Until buckets are timed, only the ratios of
# costs matter.
ACCELERATOR_TOKEN_MS = 0.001
MIN_TOKENS = 256  # smallest default token budget
BATCH_S = 0.15  # target time of a full batch on a CPU, during which nothing else runs
XLA_SHARE = 0.3  # FLOP/s of a whole model in XLA, as a share of the FLOP/s of one matrix product
# The same share with native kernels. It gives BERT-base a budget of 1024 tokens instead of 256, and
# abstracts are 15 % faster. Larger budgets gain 0 to 4 %.
NATIVE_SHARE = 0.7
NATIVE_TOKENS = 1024  # largest token budget that NATIVE_SHARE may give
SHAPE = (1024, 768, 3072)  # m, k, n of the measured product
PRODUCT_RUNS = 30  # number of runs; the fastest run counts, because the machine may be busy
MEASURE_S = 0.2  # fewer runs are enough if they have taken this CPU time on each core,
WAIT_S = 2.0  # or if these seconds have passed
# Another virtual machine on the same core can slow a product down although no thread waits: one of
# five starts on a quiet machine measured half the rate. So there are several rounds, which must
# agree.
ROUNDS = 2
MAX_ROUND_RATIO = 1.25  # largest ratio of the rate in the fastest round to that in the slowest
# bfloat16 costs accuracy, so it is used only if it is this many times as fast as float32. With
# AVX512_BF16 it is 2.0 times as fast. A CPU without bfloat16 instructions is slower in it, because
# XLA converts to float32 first.
CLEARLY_FASTER = 1.2


@dataclass(frozen=True)
class Rate:
    """The speed of this CPU in matrix products."""

    flops: float  # floating-point operations per second
    # False for an estimate: other programs used the cores, or repeated measurements differ too much
    sure: bool


class Calibration:
    """Chooses the dtype and the default token budget for a device, on a CPU by its speed.

    The speed of a CPU is measured once for each dtype, by a matrix product. The rates are saved in
    `cache_dir`, if it is given: other rates at the next start would give other buckets, which would
    have to be compiled again. Estimated rates are not saved.
    """

    def __init__(self, device: Device, cache_dir: Path | None = None):
        self._device = device
        self._file = cache_dir / "cpu-rates.json" if cache_dir is not None else None
        self._rates: dict[DType, Rate] = {}

    @property
    def sure(self) -> bool:
        """Whether none of the rates used so far is an estimate."""
        return all(rate.sure for rate in self._rates.values())

    def native_dtype(self) -> DType:
        """Return the best dtype for the device: bfloat16 if it is natively fast, else float32.

        On a CPU, matrix products in both dtypes are measured.
        """
        device = self._device
        if device.platform == "cpu":
            bfloat16, float32 = self._flops("bfloat16", "float32")
            native = bfloat16 > CLEARLY_FASTER * float32
        elif device.platform == "gpu":
            # NVIDIA's Ampere is 8.0; AMD reports names such as gfx942
            capability = str(getattr(device, "compute_capability", ""))
            native = not capability.replace(".", "").isdigit() or float(capability) >= 8.0
        else:
            native = device.platform == "tpu"
        return "bfloat16" if native else "float32"

    def batch_tokens(self, program: Program, dtype: DType, native_layers: bool = False) -> int:
        """Return the default token budget of a batch.

        It is 16,384 on an accelerator. On a CPU it is the power of two, at least 256, whose
        computation takes about 150 ms. `native_layers` says whether native kernels compute whole
        layers.
        """
        if self._device.platform != "cpu":
            return ACCELERATOR_TOKENS
        # tokens that would be computed in BATCH_S at the FLOP/s of a single matrix product
        peak = max(BATCH_S * self._flops(dtype)[0] / _flops_per_token(program), 1.0)
        tokens = 2 ** np.floor(np.log2(XLA_SHARE * peak))
        if native_layers:
            tokens = max(tokens, min(2 ** np.round(np.log2(NATIVE_SHARE * peak)), NATIVE_TOKENS))
        return int(np.clip(tokens, MIN_TOKENS, ACCELERATOR_TOKENS))

    def token_ms(self, program: Program, dtype: DType, native_layers: bool = False) -> float:
        """Estimate the milliseconds per token of a full bucket, for use until buckets are timed.

        `native_layers` says whether native kernels compute whole layers.
        """
        if self._device.platform != "cpu":
            return ACCELERATOR_TOKEN_MS
        # the model's share of the FLOP/s of a single matrix product
        share = NATIVE_SHARE if native_layers else XLA_SHARE
        return float(1000 * _flops_per_token(program) / (share * self._flops(dtype)[0]))

    def _flops(self, *dtypes: DType) -> list[float]:
        """Return the rates of matrix products in these dtypes on this CPU, in FLOP/s.

        Rates that an earlier run has not saved are measured now, with the dtypes in alternation."""
        keys: dict[DType, str] = {dtype: f"{device_id(self._device)}/{dtype}" for dtype in dtypes}
        saved = _rates_in(self._file)
        for dtype in dtypes:
            if dtype not in self._rates and keys[dtype] in saved:
                self._rates[dtype] = Rate(saved[keys[dtype]], sure=True)
        unknown: list[DType] = [dtype for dtype in dtypes if dtype not in self._rates]
        rounds = [[_measure(dtype) for dtype in unknown] for _ in range(ROUNDS)]
        for dtype, measured in zip(unknown, zip(*rounds, strict=True), strict=True):
            # The fastest round counts, because disturbances only slow it down. The rate is an
            # estimate if a round is an estimate, or if the rounds do not agree.
            flops = [rate.flops for rate in measured]
            agree = max(flops) <= MAX_ROUND_RATIO * min(flops)
            rate = Rate(max(flops), sure=agree and all(rate.sure for rate in measured))
            self._rates[dtype] = rate
            logger.info("this CPU multiplies %s at %.0f GFLOP/s", dtype, rate.flops / 1e9)
            if not rate.sure:
                logger.warning(
                    "this rate is an estimate, because other programs use this machine. It is not "
                    "saved and is measured again at the next start"
                )
            elif self._file is not None:
                save_json(
                    self._file, _rates_in(self._file) | {keys[dtype]: rate.flops}, "this CPU's rate"
                )
        return [self._rates[dtype].flops for dtype in dtypes]


def device_id(device: Device) -> str:
    """Return a name for this kind of device. Devices with one name run a program equally fast.

    On a CPU the name contains a hash of the CPU, the number of cores that the process may use and,
    if a CPU quota allows fewer, the number of cores by the quota.
    """
    if device.platform != "cpu":
        return device.device_kind
    threads, cores = len(usable_cores()), core_count()
    part = "" if cores == threads else f"{cores:g}-of-"
    return f"cpu-{host_id()}-{part}{threads}-cores"


def _flops_per_token(program: Program) -> float:
    """Return the floating-point operations per token of a model: two per element of a kernel."""
    return 2.0 * sum(map(math.prod, program.products))


def _rates_in(file: Path | None) -> dict[str, float]:
    """Read the rates in a file, in FLOP/s by key; empty if the file is missing or damaged."""
    try:
        rates = json.loads(file.read_text()) if file is not None else {}
        return {
            key: float(rate)
            for key, rate in rates.items()
            if type(rate) in (int, float) and 0 < rate < math.inf
        }
    except (OSError, RecursionError, ValueError, AttributeError):
        return {}


def _measure(dtype: DType) -> Rate:
    """Measure the rate of a matrix product in this dtype on this CPU."""
    m, k, n = SHAPE
    a, b = (jax.device_put(np.ones(shape, jnp.dtype(dtype))) for shape in ((m, k), (k, n)))
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    product = compile_lowered(product.lower(a, b), options={})

    def run() -> None:
        product(a, b).block_until_ready()

    run()
    times: list[CpuTimes] = []
    cores, cpu_s, stop_at = core_count(), 0.0, time.monotonic() + WAIT_S
    while len(times) < 3 or (
        len(times) < PRODUCT_RUNS and cpu_s < MEASURE_S * cores and time.monotonic() < stop_at
    ):
        times.append(timed(run)[1])
        cpu_s += times[-1].cpu
    return _rate_of(times, 2.0 * m * k * n, cores, threads=len(usable_cores()))


def _rate_of(runs: list[CpuTimes], flops: float, cores: float, threads: int) -> Rate:
    """Compute the rate of a matrix product from the times of several runs.

    Each run does `flops` operations on `threads` threads. The rate is `flops` over the time of the
    fastest run, without the time in which its threads waited for cores. If they waited too long,
    the rate is an estimate instead: `flops` over the least CPU time of a run, times `cores`, the
    number of cores that the process may use. No rate is above this estimate, because a CPU quota
    lets a short run use more cores than it grants for long.
    """
    fastest = min(runs, key=lambda run: run.wall)
    by_cpu_time = cores * flops / max(min(run.cpu for run in runs), 1e-9)
    # under a quota, threads wait although no other program runs
    waited_share = fastest.lost_share(cores) if cores < threads else fastest.waited_share
    if waited_share > MAX_WAITED:
        return Rate(by_cpu_time, sure=False)
    by_clock = flops / (fastest.wall * (1 - fastest.waited_share))
    return Rate(min(by_clock, by_cpu_time), sure=True)
