"""In which dtype a CPU multiplies and how many tokens a batch should hold: measured once for a
machine, then remembered."""

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
from jaxembed.engine.replica import Device
from jaxembed.files import replacing
from jaxembed.models import Program
from jaxembed.spec import DType

logger = logging.getLogger(__name__)

ACCELERATOR_TOKENS = 16384  # TEI's default
ACCELERATOR_TOKEN_MS = 0.001  # a million tokens a second: only ratios count before a timing
LEAST_TOKENS = 256
BATCH_S = 0.15  # what a batch may take on a CPU: nothing else runs meanwhile
SHARE_REACHED = 0.3  # of the rate of a single product, by a whole model on long rows
# The native kernels reach more: 1024 tokens of BERT-base take as long as planned, not the 256 that
# the above would give it, and abstracts are 15 % faster. More than that gains 0 to 4 %.
NATIVE_SHARE = 0.7
NATIVE_TOKENS = 1024
SHAPE = (1024, 768, 3072)
PRODUCT_RUNS = 30  # the best one counts, for the machine may be busy
MEASURE_S = 0.2  # fewer runs, but three, where a product is slow
# bfloat16 costs accuracy, so it must be worth it. Measured: 2.0 times as fast with AVX512_BF16,
# and where a CPU cannot multiply it XLA converts to float32 first, which is slower.
CLEARLY_FASTER = 1.2
BUSY_PRODUCT_SPREAD = 1.5  # of the runs: a quiet machine has 1.02 to 1.2


def batch_tokens(
    program: Program, device: Device, dtype: DType, cache_dir: Path, native_layers: bool = False
) -> int:
    """The default token budget of a batch: 16,384 on an accelerator, on a CPU the power of two
    that takes about 150 ms, but 256 at least. `native_layers`: native kernels do all of a layer."""
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
    """Milliseconds that a token of a full bucket takes, roughly: until buckets are timed."""
    if device.platform != "cpu":
        return ACCELERATOR_TOKEN_MS
    share = NATIVE_SHARE if native_layers else SHARE_REACHED
    return float(1000 * _flops_per_token(program) / (share * _rate(dtype, cache_dir)))


def native_dtype(device: Device, cache_dir: Path | None = None) -> DType:
    """bfloat16 where the device multiplies it natively, else float32.

    On a CPU a product in each decides; the rates are remembered in `cache_dir`, if given.
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
    """Names this kind of host by what its CPU can do: on a shared home directory, another kind has
    another speed and may not run programs compiled here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    abilities = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    identity = "\n".join([platform.machine(), *sorted(abilities)])
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def device_id(device: Device) -> str:
    """Names a kind of device: two of one name run a program equally fast."""
    if device.platform != "cpu":
        return device.device_kind
    return f"cpu-{host_id()}-{os.cpu_count()}-cores"


def _flops_per_token(program: Program) -> float:
    """Of the products with the parameters: two for each element of every matrix."""
    shapes = program.shapes.items()
    return 2.0 * sum(np.prod(s.shape) for name, s in shapes if name.endswith(".kernel"))


def _rate(dtype: DType, cache_dir: Path | None) -> float:
    """FLOP/s of a product on this machine. Kept in a file: a figure that moved from start to start
    would choose other buckets, and compile them anew."""
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
    """The rates in the file; what is no rate is left out."""
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
    try:
        make_private(file.parent)
        with replacing(file) as partial:
            partial.write_text(json.dumps(rates))
    except OSError as error:
        logger.warning("cannot keep this CPU's rate in %s: %s", file, error.strerror)


def _measure(dtype: DType) -> tuple[float, float]:
    """The rate of a product by its best run, and the third quartile of the runs over the first."""
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
