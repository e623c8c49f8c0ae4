"""Chooses the dtype and the default token budget of a batch; on a CPU it measures its speed once.

The measured rates are kept in the cache directory.
"""

import hashlib
import json
import logging
import math
import os
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxembed.cache_folder import make_private
from jaxembed.engine.compiles import compile_lowered
from jaxembed.engine.placement import Device
from jaxembed.files import replacing
from jaxembed.models import Program
from jaxembed.spec import DType

logger = logging.getLogger(__name__)

ACCELERATOR_TOKENS = 16384  # default token budget on an accelerator, as TEI's
ACCELERATOR_TOKEN_MS = 0.001  # a million tokens a second; only ratios matter until a timing
LEAST_TOKENS = 256  # smallest default token budget
BATCH_S = 0.15  # target time of a full batch on a CPU, in which nothing else runs
SHARE_REACHED = 0.3  # share of the rate of a single product that a whole model reaches
# The native kernels reach a larger share: with it BERT-base gets 1024 tokens in the target time
# instead of 256, and abstracts are 15 % faster. Larger budgets gain 0 to 4 %.
NATIVE_SHARE = 0.7
NATIVE_TOKENS = 1024  # largest token budget that the native kernels' share may give
SHAPE = (1024, 768, 3072)  # m, k, n of the measured product
PRODUCT_RUNS = 30  # the fastest counts, because the machine may be busy
MEASURE_S = 0.2  # a slow product runs for so long, at least three times
# bfloat16 costs accuracy, so it must be this much faster than float32. It is 2.0 times as fast with
# AVX512_BF16; a CPU that cannot multiply it is slower, because XLA converts to float32 first.
CLEARLY_FASTER = 1.2
BUSY_PRODUCT_SPREAD = 1.5  # spread of the runs on a busy machine; a quiet one has 1.02 to 1.2


def batch_tokens(
    program: Program, device: Device, dtype: DType, cache_dir: Path, native_layers: bool = False
) -> int:
    """The default token budget of a batch.

    It is 16,384 on an accelerator. On a CPU it is the power of two that takes about 150 ms, at
    least 256. `native_layers` says whether native kernels compute whole layers.
    """
    if device.platform != "cpu":
        return ACCELERATOR_TOKENS
    most = max(BATCH_S * _rate(dtype, cache_dir) / _flops_per_token(program), 1.0)
    tokens = 2 ** np.floor(np.log2(SHARE_REACHED * most))
    if native_layers:
        tokens = max(tokens, min(2 ** np.round(np.log2(NATIVE_SHARE * most)), NATIVE_TOKENS))
    return int(np.clip(tokens, LEAST_TOKENS, ACCELERATOR_TOKENS))


def token_ms(
    program: Program, device: Device, dtype: DType, cache_dir: Path, native_layers: bool = False
) -> float:
    """Estimate the milliseconds per token of a full bucket, for use until buckets are timed.

    `native_layers` says whether native kernels compute whole layers.
    """
    if device.platform != "cpu":
        return ACCELERATOR_TOKEN_MS
    share = NATIVE_SHARE if native_layers else SHARE_REACHED
    return float(1000 * _flops_per_token(program) / (share * _rate(dtype, cache_dir)))


def native_dtype(device: Device, cache_dir: Path | None = None) -> DType:
    """The fastest dtype of the device: bfloat16 if it multiplies that natively, else float32.

    On a CPU the dtypes are measured by a product each; the rates are kept in `cache_dir`, if given.
    """
    if device.platform == "cpu":
        bfloat16, float32 = (_rate(dtype, cache_dir) for dtype in ("bfloat16", "float32"))
        native = bfloat16 > CLEARLY_FASTER * float32
    elif device.platform == "gpu":
        # NVIDIA's Ampere is 8.0; AMD reports names such as gfx942
        capability = str(getattr(device, "compute_capability", ""))
        native = not capability.replace(".", "").isdigit() or float(capability) >= 8.0
    else:
        native = device.platform == "tpu"
    return "bfloat16" if native else "float32"


def host_id() -> str:
    """A hash that names this kind of host by its CPU's model and features.

    Hosts that share a home directory may differ in speed, and may not run each other's compiled
    programs.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    abilities = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    identity = "\n".join([platform.machine(), *sorted(abilities)])
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def device_id(device: Device) -> str:
    """A name for this kind of device: devices with the same name run a program equally fast."""
    if device.platform != "cpu":
        return device.device_kind
    return f"cpu-{host_id()}-{os.cpu_count()}-cores"


def _flops_per_token(program: Program) -> float:
    """The floating-point operations per token in products with weights: two per weight element."""
    shapes = program.shapes.items()
    return 2.0 * sum(np.prod(s.shape) for name, s in shapes if name.endswith(".kernel"))


def _rate(dtype: DType, cache_dir: Path | None) -> float:
    """The rate of a product on this machine, in FLOP/s, from the cache or measured now.

    It is kept in a file because a rate that varies from start to start would give other buckets,
    which would have to be compiled again.
    """
    if cache_dir is None:
        return _measure(dtype)[0]
    key = f"{host_id()}/{os.cpu_count()}/{dtype}"
    file = cache_dir / "cpu-rates.json"
    rates = _kept(file)
    if key in rates:
        return rates[key]
    rate, spread = _measure(dtype)
    logger.info("this CPU multiplies %s at %.0f GFLOP/s", dtype, rate / 1e9)
    if spread > BUSY_PRODUCT_SPREAD:
        logger.warning(
            "its products differ by a factor of %.2f: something else uses this machine. The rate "
            "is not kept, and is measured anew at the next start",
            spread,
        )
    else:
        _keep(rates | {key: rate}, file)
    return rate


def _kept(file: Path) -> dict[str, float]:
    """Read the rates in the file; values that are not rates are left out."""
    try:
        rates = json.loads(file.read_text())
    except (OSError, RecursionError, ValueError):
        return {}
    if not isinstance(rates, dict):
        return {}
    return {
        key: float(rate)
        for key, rate in rates.items()
        if type(rate) in (int, float) and 0 < rate < math.inf
    }


def _keep(rates: dict, file: Path) -> None:
    """Write the rates into the file. A failure is logged and raises nothing."""
    try:
        make_private(file.parent)
        with replacing(file) as partial:
            partial.write_text(json.dumps(rates))
    except OSError as error:
        logger.warning("cannot keep this CPU's rate in %s: %s", file, error.strerror)


def _measure(dtype: DType) -> tuple[float, float]:
    """Measure a product. Returns the FLOP/s of its fastest run, and the runs' quartile ratio."""
    m, k, n = SHAPE
    a, b = (jax.device_put(np.ones(shape, jnp.dtype(dtype))) for shape in ((m, k), (k, n)))
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    product = compile_lowered(product.lower(a, b), {})
    product(a, b).block_until_ready()
    times: list[float] = []
    while len(times) < 3 or (len(times) < PRODUCT_RUNS and sum(times) < MEASURE_S):
        start = time.perf_counter()
        product(a, b).block_until_ready()
        times.append(time.perf_counter() - start)
    first, third = np.percentile(times, [25, 75])
    return 2.0 * m * k * n / min(times), float(third / first)
