"""Which kernels stand in for XLA's own programs. On an accelerator every attention there is tried
beside XLA's in each row length; on a CPU it is the native kernels, for products too, or none.

A kernel is used where its numbers are right and it is faster. No failure in here stops the start.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.compiles import compile_lowered
from jaxembed.engine.drawn import packed_segments
from jaxembed.engine.native_trial import NEEDED, Verdicts, try_native
from jaxembed.engine.replica import FLOAT32, Device, compiler_options
from jaxembed.errors import ConfigError
from jaxembed.models import Program, kernels, native
from jaxembed.models.attention import Attend, ByNative, Sight, by_xla, using
from jaxembed.models.kernels import SHORTEST_PROBED_ROW, Call, Kernel
from jaxembed.models.tokens import PackedTokens
from jaxembed.spec import DType

logger = logging.getLogger(__name__)

AUTO, XLA, NATIVE = "auto", "xla", "native"
UNSUITED = f"takes multiples of {native.PANEL}, this model has none"
PROBE_S = 20.0  # rows whose turn comes later stay with XLA
PROBE_TOKENS = 16_384  # in a batch that is timed, or one row if it is longer
PROBE_RUNS = 10  # one behind the other, timed together

# What a kernel may differ from float32 attention of the same operands, absolutely and relatively.
# bfloat16 has 8 bits: the query or the scores, the weights and the result are each rounded to them.
TOLERANCE: dict[DType, float] = {"bfloat16": 0.02, "float16": 0.003, "float32": 1e-4}

Kernels = Mapping[str, Callable[[], Kernel]]


@dataclass(frozen=True)
class Choice:
    """A kernel for some row lengths, XLA for the others, and why kernels were not taken."""

    lengths: tuple[int, ...] = ()
    taken: Mapping[int, Kernel] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    native: ByNative | None = None  # the native kernels
    joins: bool = False  # a sequence costs the same however long its row is

    @property
    def native_layout(self) -> bool:
        """Whether weights lie as native.linear takes them."""
        return self.native is not None and "linear" not in self.native.without

    def implementation(self, bucket: Bucket) -> Attend:
        """What the programs of a bucket attend with."""
        if self.native is not None:
            return self.native
        kernel = self.taken.get(bucket.length)
        return partial(kernel.attend, slots=bucket.slots) if kernel else by_xla

    def name_of(self, length: int) -> str:
        """The name of the kernel that rows of a length use."""
        if length in self.taken:
            return self.taken[length].name
        if self.native is None:
            return XLA
        return "_without_".join([NATIVE, *sorted(self.native.without)])

    def describe(self) -> dict[str, dict[str, str]]:
        """What rows of each length use, and the last reason why a kernel is not used in some."""
        used = {str(length): self.name_of(length) for length in self.lengths}
        return {"used": used, "not_used": dict(self.refused)}


def choose_kernels(
    program: Program,
    device: Device,
    dtype: DType,
    grid: BucketGrid,
    wanted: str = AUTO,
    known: Kernels | None = None,
    native_choice: Choice = Choice(),
) -> Choice:
    """Try kernels on what this model asks of attention, each row length of the grid for itself.

    `wanted` is "auto", "xla", or the kernel to use wherever it is right, fast or not. `known` are
    the kernels by name; None: those of the device's platform. `native_choice` is `choose_native`'s.
    Raises ConfigError, naming --kernels, where what was wanted can be used nowhere.
    """
    known = _of_platform(device.platform) if known is None else known
    there = [AUTO, XLA, *([NATIVE] if device.platform == "cpu" else []), *known]
    if wanted not in there:
        raise ConfigError(f"--kernels {wanted}: on {device.platform} there are {', '.join(there)}")
    lengths = tuple(sorted({bucket.length for bucket in grid.buckets}))
    if native_choice.native is not None:
        choice = replace(native_choice, lengths=lengths)
    else:
        if wanted != AUTO:
            known = {name: known[name] for name in known if name == wanted}
        taken, refused = {}, {}
        if known:
            taken, refused = _tried(program, device, dtype, lengths, known, wanted == AUTO)
        choice = Choice(lengths, taken, {**native_choice.refused, **refused})
    if wanted not in (AUTO, XLA) and not choice.taken and choice.native is None:
        reason = choice.refused.get(wanted, f"no row holds {SHORTEST_PROBED_ROW} tokens")
        raise ConfigError(f"--kernels {wanted} can be used nowhere: {reason}")
    if choice.taken or choice.native is not None or choice.refused:
        logger.info("kernels: used %(used)s, not used %(not_used)s", choice.describe())
    return choice


def choose_native(
    program: Program,
    device: Device,
    dtype: DType,
    wanted: str,
    cache_dir: Path,
    verdicts: Callable[[], Verdicts] | None = None,
) -> Choice:
    """Whether a CPU runs the native kernels, and which of their calls; or why not.

    Compiled ones are kept in `cache_dir`. `verdicts` gives those of the model's calls; None: they
    are tried. It holds for rows of any length, and so is known before there is a grid.
    """
    if device.platform != "cpu" or wanted not in (AUTO, NATIVE):
        return Choice()
    if dtype != "bfloat16":
        return Choice(refused={NATIVE: f"computes in bfloat16, this model in {dtype}"})
    try:
        native.load_library(cache_dir)
        found = try_native(program, device, dtype) if verdicts is None else verdicts()
    except native.Unavailable as error:
        return Choice(refused={NATIVE: str(error)})
    except Exception as error:  # whatever it is, XLA goes on
        return Choice(refused={NATIVE: _line(error)})
    if not found:
        return Choice(refused={NATIVE: UNSUITED})
    reasons = {name: one.refusal(faster=wanted == AUTO) for name, one in found.items()}
    without = frozenset(name for name, reason in reasons.items() if reason)
    refused = {f"{NATIVE} {name}": reason for name, reason in reasons.items() if reason}
    used = {name for name in found if name not in without and not NEEDED.get(name, set()) & without}
    if not used:
        return Choice(refused=refused)
    widths = {call.width for call in calls(program, dtype)}
    takes_all = all(native.takes(native.TILE, n, dtype) for n in widths)
    joins = takes_all and not without & {"attention", "joint_attention"}
    return Choice(refused=refused, native=ByNative(without), joins=joins)


def calls(program: Program, dtype: DType) -> Counter[Call]:
    """What the layers of a model ask of attention, and how many of them ask it."""
    noted: Counter[Call] = Counter()

    def note(query, key, value, segments, sight: Sight):
        noted[Call(query.shape[2], key.shape[2], query.shape[3], str(query.dtype), sight)] += 1
        return jnp.zeros(query.shape, jnp.float32)

    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype) if len(leaf.shape) > 1 else leaf.dtype)
        for leaf in program.shapes.values()
    ]
    planes = jax.ShapeDtypeStruct((PackedTokens.PLANES, 1, SHORTEST_PROBED_ROW), jnp.int32)
    with using(note):
        jax.eval_shape(
            lambda leaves, planes: program.forward(leaves, planes, 1, (program.primary,)),
            leaves,
            planes,
        )
    return noted


def _of_platform(platform: str) -> Kernels:
    paths = kernels.KERNELS.get(platform, {})
    return {name: partial(kernels.kernel, path) for name, path in paths.items()}


def _tried(
    program: Program,
    device: Device,
    dtype: DType,
    lengths: tuple[int, ...],
    known: Kernels,
    faster: bool,
) -> tuple[dict[int, Kernel], dict[str, str]]:
    """The kernel for each row length that has one, and why the others were not taken."""
    asked = calls(program, dtype)
    stop_at = time.monotonic() + PROBE_S
    refused: dict[str, str] = {}
    there: list[Kernel] = []
    for name, make in known.items():
        try:
            there.append(make())
        except Exception as error:  # not installed, or not for this machine
            refused[name] = _line(error)
    taken: dict[int, Kernel] = {}
    for length in (n for n in lengths if n >= SHORTEST_PROBED_ROW and there):
        try:
            trial = KernelTrial(device, dtype, asked, length)
            best = trial.xla_ms if faster else float("inf")
        except Exception as error:  # rows that XLA itself does not manage, here or at all
            refused |= {kernel.name: f"rows of {length}: XLA: {_line(error)}" for kernel in there}
            continue
        for kernel in there:
            if time.monotonic() > stop_at:
                refused[kernel.name] = f"rows of {length}: {PROBE_S:.0f} s of probing are over"
                continue
            try:
                ms = trial.milliseconds_if_right(kernel)
            except Exception as error:
                refused[kernel.name] = f"rows of {length}: {_line(error)}"
                continue
            if ms < best:
                taken[length], best = kernel, ms
            else:
                refused[kernel.name] = f"rows of {length}: {ms:.3f} ms, where there is {best:.3f}"
    return taken, refused


class NotRight(Exception):
    """A kernel does not take a call, or its numbers are wrong."""


class KernelTrial:
    """The attention of one model in rows of one length. Raises what XLA raises."""

    def __init__(self, device: Device, dtype: DType, asked: Counter[Call], length: int):
        self._device = device
        self._dtype: DType = dtype
        self._asked = asked
        self._bucket = Bucket(max(PROBE_TOKENS // length, 1), length)
        self._segments = packed_segments(self._bucket)
        self._operands = {call: self._drawn(call) for call in asked}
        self._exact = {call: self._in_float32(call) for call in asked}
        self.xla_ms = sum(self._run(by_xla, call)[1] * n for call, n in asked.items())

    def milliseconds_if_right(self, kernel: Kernel) -> float:
        """Of all layers together. Raises NotRight, and whatever the kernel raises."""
        total = 0.0
        for call, layers in self._asked.items():
            if reason := kernel.refuses(call, self._bucket.length):
                raise NotRight(reason)
            attend = partial(kernel.attend, slots=self._bucket.slots)
            mixed, ms = self._run(attend, call)
            self._check(mixed, call)
            total += ms * layers
        return total

    def _check(self, mixed: np.ndarray, call: Call) -> None:
        exact, real = self._exact[call], self._segments != 0
        off = np.abs(mixed - exact) / (1 + np.abs(exact))
        worst = np.where(np.isfinite(off), off, np.inf)[real].max()
        if worst > TOLERANCE[self._dtype]:
            allowed = TOLERANCE[self._dtype]
            raise NotRight(f"{call}: off by {worst:.2g}, {allowed:.2g} are allowed")

    def _run(self, attend: Attend, call: Call) -> tuple[np.ndarray, float]:
        """What comes out, and milliseconds of a run."""
        precision = "highest" if self._dtype == FLOAT32 else None
        jitted = jax.jit(lambda q, k, v, segments: attend(q, k, v, segments, call.sight))
        with jax.default_matmul_precision(precision):
            lowered = jitted.lower(*self._operands[call])
        run = compile_lowered(lowered, compiler_options(self._device.platform))
        last = run(*self._operands[call])
        mixed = np.asarray(last)
        started_at = time.perf_counter()
        for _ in range(PROBE_RUNS):
            last = run(*self._operands[call])
        jax.block_until_ready(last)
        return mixed, (time.perf_counter() - started_at) / PROBE_RUNS * 1000

    def _in_float32(self, call: Call) -> np.ndarray:
        *operands, segments = self._operands[call]
        wide = [x.astype(jnp.float32) for x in operands]
        with jax.default_matmul_precision("highest"):
            lowered = jax.jit(partial(by_xla, sight=call.sight)).lower(*wide, segments)
        run = compile_lowered(lowered, compiler_options(self._device.platform))
        return np.asarray(run(*wide, segments))

    def _drawn(self, call: Call) -> list[jax.Array]:
        """Query, key and value of size one, NaN in padding, and the segments: on the device."""
        draw = np.random.default_rng(0)
        padding = (self._segments == 0)[..., None, None]
        operands: list[Any] = [self._segments]
        for heads in (call.groups, call.groups, call.heads):
            shape = (*self._segments.shape, heads, call.width)
            x = np.where(padding, np.float32(np.nan), draw.standard_normal(shape, np.float32))
            operands.insert(0, x.astype(jnp.dtype(call.dtype)))
        return jax.device_put(operands, SingleDeviceSharding(self._device))


def _line(error: Exception) -> str:
    """The first line of an error, which may be a compiler's."""
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return first if isinstance(error, NotRight) else f"{type(error).__name__}: {first}"
