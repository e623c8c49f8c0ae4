"""Chooses the kernels that replace parts of XLA's programs, by trials on the device.

On an accelerator, each attention kernel is compared with XLA in each row length. On a CPU, the
native kernels for attention and matrix products are tried. A kernel is used if its results are
right and it is faster. A kernel that fails is not used, and the start goes on.

An attention call is the attention of one layer, as a kernel sees it. A native call is a call of a
native kernel.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxembed.data.spec import DType
from jaxembed.engine.autotune.cost_file import SavedFile
from jaxembed.engine.autotune.native_trial import (
    LATE,
    NEEDED,
    TrialResults,
    first_line,
    packed_segments,
    try_native,
)
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.compiles import compile_lowered, compiler_options
from jaxembed.engine.placement import FLOAT32, Device
from jaxembed.engine.transfer import part_sizes
from jaxembed.errors import ConfigError
from jaxembed.models import Program, kernels, native
from jaxembed.models.attention import Attend, AttentionMask, ByKernel, ByNative, by_xla, using
from jaxembed.models.kernels import SHORTEST_PROBED_ROW, Call, Kernel
from jaxembed.models.parallel import AXIS

logger = logging.getLogger(__name__)

AUTO, XLA, NATIVE = "auto", "xla", "native"
HIDING = "cannot hide keys, and the queries of this model have hidden keys"  # a reason: see Choice
UNSUITED = f"supports only sizes that are multiples of {native.PANEL}, and this model has none"
DIVIDED = "it runs on one device, but several hold the model"
# The time limit of all trials at a start. Row lengths that are not tried by then use XLA; they are
# tried at the next start, because results are saved.
PROBE_S = 60.0
NO_CALLS = "this model computes attention in a way of its own"
PROBE_TOKENS = 16_384  # tokens of a timed batch, which has at least one row
HIDDEN_EVERY = 8  # trials for a model that hides keys hide every eighth key
PROBE_RUNS = 10  # consecutive runs that are timed together

# The largest allowed difference of a result to float32 attention of the same operands, divided by
# one plus the float32 result. In bfloat16, the query or the scores, the attention weights and the
# result are rounded to 8 bits.
TOLERANCE: dict[DType, float] = {"bfloat16": 0.02, "float16": 0.003, "float32": 1e-4}

Kernels = Mapping[str, Callable[[], Kernel]]
LengthResults = dict[int, dict[str, float | str]]
"""The results of trials: by row length and the name of the kernel, the milliseconds for all layers,
or the reason why the kernel cannot be used. XLA always has milliseconds."""


@dataclass(frozen=True)
class Choice:
    """The chosen kernels: native kernels for all row lengths, or an attention kernel for each row
    length in `taken` and XLA for the others."""

    lengths: tuple[int, ...] = ()  # all row lengths of the grid
    taken: Mapping[int, Kernel] = field(default_factory=dict)  # row length -> kernel in use
    refused: Mapping[str, str] = field(default_factory=dict)  # kernel's name -> why it is not used
    native: ByNative | None = None  # the native kernels, if they are used
    joins: bool = False  # whether a sequence costs the same in a row of any length

    @property
    def native_layout(self) -> bool:
        """Whether weights must be packed into panels, the form that native.linear takes."""
        return self.native is not None and "linear" not in self.native.without

    def implementation(self, bucket: Bucket) -> Attend:
        """Return the attention implementation for the program of a bucket."""
        if self.native is not None:
            return self.native
        kernel = self.taken.get(bucket.length)
        return kernel.implementation(bucket.slots) if kernel else by_xla

    def name_of(self, length: int) -> str:
        """Return the name of the kernel that rows of `length` tokens use."""
        if length in self.taken:
            return self.taken[length].name
        if self.native is None:
            return XLA
        return "_without_".join([NATIVE, *sorted(self.native.without)])

    def describe(self) -> dict[str, dict[str, str]]:
        """Return the choice for JSON: kernels "used" by row length, and reasons "not_used"."""
        return {
            "used": {str(length): self.name_of(length) for length in self.lengths},
            "not_used": dict(self.refused),
        }


def choose_kernels(
    program: Program,
    device: Device,
    dtype: DType,
    grid: BucketGrid,
    option: str = AUTO,
    candidates: Kernels | None = None,
    native_choice: Choice = Choice(),
    saved: SavedFile | None = None,
) -> Choice:
    """Choose the attention kernel for each row length of the grid, by trials of the attention calls
    of the model.

    Results in the file `saved` are used, and new results are added to it.

    `option` is the value of --kernels: "auto", "xla", or the name of a kernel that is used wherever
    its results are right, even if it is slower than XLA. `candidates` are functions that make the
    kernels, by name; None means all kernels for the device's platform. `native_choice` is the
    result of `choose_native`; native kernels in it are used for all row lengths. Raises ConfigError
    if the option is unknown, or if its kernel can be used for no row length.
    """
    if candidates is None:
        paths = kernels.KERNELS.get(device.platform, {})
        candidates = {name: partial(kernels.kernel, path) for name, path in paths.items()}
    options = [AUTO, XLA, *([NATIVE] if device.platform == "cpu" else []), *candidates]
    if option not in options:
        raise ConfigError(
            f"--kernels {option}: on {device.platform} the choices are {', '.join(options)}"
        )
    lengths = tuple(sorted({bucket.length for bucket in grid.buckets}))
    if native_choice.native is not None:
        choice = replace(native_choice, lengths=lengths)
    else:
        if option != AUTO:
            candidates = {name: candidates[name] for name in candidates if name == option}
        taken, refused = {}, {}
        if candidates:
            taken, refused = _try_each(
                program, device, dtype, lengths, candidates, option == AUTO, saved
            )
        choice = Choice(lengths, taken, {**native_choice.refused, **refused})
    if option not in (AUTO, XLA) and not choice.taken and choice.native is None:
        reason = choice.refused.get(option, f"no row has {SHORTEST_PROBED_ROW} tokens")
        raise ConfigError(f"--kernels {option} cannot be used: {reason}")
    if choice.taken or choice.native is not None or choice.refused:
        logger.info("kernels: used %(used)s, not used %(not_used)s", choice.describe())
    return choice


def choose_native(
    program: Program,
    device: Device,
    dtype: DType,
    option: str,
    cache_dir: Path,
    results: Callable[[], TrialResults] | None = None,
) -> Choice:
    """Choose the native kernels that a model uses on a CPU, for rows of any length.

    `option` is the value of --kernels. The library of native kernels is compiled and saved in
    `cache_dir`. `results` returns the trial results, saved or new; None means that the native calls
    of the model are tried now. If no native kernel can be used, the choice has only the reasons.
    """
    if device.platform != "cpu" or option not in (AUTO, NATIVE):
        return Choice()
    if program.degree > 1:
        return Choice(refused={NATIVE: DIVIDED})
    if dtype not in native.UNIT:
        known = " or ".join(native.UNIT)
        return Choice(refused={NATIVE: f"computes in {known}, but this model in {dtype}"})
    try:
        native.load_library(cache_dir, dtype)
        result_of = try_native(program, device, dtype) if results is None else results()
    except native.NativeUnavailable as error:
        return Choice(refused={NATIVE: str(error)})
    except Exception as error:  # after any failure XLA is used
        return Choice(refused={NATIVE: _line(error)})
    if not result_of:
        return Choice(refused={NATIVE: UNSUITED})
    # XLA does not compute in int8, so its time says nothing about what int8 gains
    faster = option == AUTO and program.quantize != "int8"
    reasons = {name: trial.refusal(faster) for name, trial in result_of.items()}
    without = frozenset(name for name, reason in reasons.items() if reason)
    refused = {f"{NATIVE} {name}": reason for name, reason in reasons.items() if reason}
    if late := [name for name, reason in refused.items() if reason == LATE]:
        logger.warning(
            "%s was not tried in time, because this machine is busy, so XLA computes it, perhaps "
            "more slowly; the next start tries again",
            ", ".join(late),
        )
    # a native call is used only if all native calls that it needs are used
    used = {
        name for name in result_of if name not in without and not NEEDED.get(name, set()) & without
    }
    if not used:
        return Choice(refused=refused)
    call_counts = calls(program, dtype)
    if any(call.hides_keys for call in call_counts):
        refused = {f"{NATIVE} attention": HIDING, **refused}
        without |= {"attention"}
    # a backbone with an attention of its own makes no attention call
    widths = {call.width for call in call_counts}
    takes_all = bool(widths) and all(native.takes(native.TILE, n, dtype) for n in widths)
    return Choice(
        refused=refused,
        native=ByNative(without, dtype),
        joins=takes_all and not without & {"attention", "joint_attention"},
    )


def calls(program: Program, dtype: DType) -> Counter[Call]:
    """Return the attention calls of a model, each with the number of layers that make it.

    Layers make the same Call if they agree in the numbers of heads, the head width, the dtype, the
    attention mask, whether scores have a bias, and whether keys are hidden. The program is only
    traced with abstract values of `dtype`; nothing is computed.
    """
    counts: Counter[Call] = Counter()

    # this function replaces the attention of the model while the program is traced
    def count(
        query, key, value, segments, attention_mask: AttentionMask, bias=None, key_segments=None
    ):
        heads, groups, width = query.shape[2], key.shape[2], query.shape[3]
        has_bias, hides_keys = bias is not None, key_segments is not None
        counts[
            Call(heads, groups, width, str(query.dtype), attention_mask, has_bias, hides_keys)
        ] += 1
        return jnp.zeros(query.shape, jnp.float32)

    leaves = [
        jax.ShapeDtypeStruct(
            program.share_of(name), jnp.dtype(dtype) if len(leaf.shape) > 1 else leaf.dtype
        )
        for name, leaf in program.shapes.items()
    ]
    planes = jax.ShapeDtypeStruct((program.planes, 1, SHORTEST_PROBED_ROW), jnp.int32)
    with using(count):
        jax.make_jaxpr(
            # 1 is the number of slots in each row
            lambda leaves, planes: program.forward(leaves, planes, 1, (program.primary,)),
            axis_env=[(AXIS, program.degree)],
        )(leaves, planes)
    return counts


def _try_each(
    program: Program,
    device: Device,
    dtype: DType,
    lengths: tuple[int, ...],
    candidates: Kernels,
    faster: bool,
    saved: SavedFile | None,
) -> tuple[dict[int, Kernel], dict[str, str]]:
    """Try each kernel in each row length, unless `saved` has the result.

    Returns the fastest kernel with right results by row length, and for each refused kernel, by
    name, a reason. With `faster`, a kernel that is not faster than XLA is refused.
    """
    refused: dict[str, str] = {}
    usable: dict[str, Kernel] = {}
    for name, make in candidates.items():
        try:
            usable[name] = make()
        except Exception as error:  # not installed, or not for this machine
            refused[name] = _line(error)
    results: LengthResults = (saved and saved.load(_decode_results)) or {}
    known = {length: set(found) for length, found in results.items()}
    # long rows first: what attention costs, and what a kernel saves, grows with the length
    longest_first = [n for n in sorted(lengths, reverse=True) if n >= SHORTEST_PROBED_ROW]
    failed = _try_lengths(program, device, dtype, longest_first, usable, results)
    if saved is not None and known != {length: set(found) for length, found in results.items()}:
        saved.save(results)
    taken: dict[int, Kernel] = {}
    for length, name in product(longest_first, usable):
        found = results.get(length, {})
        result = found.get(name, failed.get((length, name), ""))
        best = found.get(taken[length].name if length in taken else XLA, math.inf)
        if length not in taken and not faster:
            best = math.inf
        if isinstance(result, str):
            refused[name] = f"rows of {length}: {result}"
        elif result < float(best):
            taken[length] = usable[name]
        else:
            refused[name] = f"rows of {length}: {result:.3f} ms, not faster than {best:.3f} ms"
    return taken, refused


def _try_lengths(
    program: Program,
    device: Device,
    dtype: DType,
    lengths: Sequence[int],
    usable: Mapping[str, Kernel],
    results: LengthResults,
) -> dict[tuple[int, str], str]:
    """Try the kernels that have no result yet, and add the results to `results`.

    Returns the reason for each length and kernel that got no result, because the time was over or
    because of an error, which may be another one at the next start.
    """
    call_counts = calls(program, dtype)
    if not call_counts:  # a backbone with an attention of its own
        return {(length, name): NO_CALLS for length in lengths for name in usable}
    stop_at = time.monotonic() + PROBE_S
    failed: dict[tuple[int, str], str] = {}
    for length in lengths:
        untried = [name for name in usable if name not in results.get(length, {})]
        if not untried:
            continue
        try:
            if time.monotonic() > stop_at:
                raise NotRight(f"not tried within {PROBE_S:.0f} s; tried at the next start")
            trial = KernelTrial(device, dtype, call_counts, length)
        except Exception as error:  # XLA itself cannot compute these rows
            reason = _line(error) if isinstance(error, NotRight) else f"XLA: {_line(error)}"
            failed |= {(length, name): reason for name in untried}
            continue
        results.setdefault(length, {})[XLA] = trial.xla_ms
        for name in untried:
            try:
                results[length][name] = trial.milliseconds_if_right(usable[name])
            except NotRight as error:
                results[length][name] = _line(error)
            except Exception as error:
                failed[length, name] = _line(error)
    return failed


def _decode_results(content: Any) -> LengthResults:
    """Convert what a file holds to results. Raises ValueError, TypeError or AttributeError for
    content of another form."""
    results: LengthResults = {}
    for length, found in content.items():
        for name, result in found.items():
            if type(result) not in (float, str) or isinstance(found.get(XLA, ""), str):
                raise ValueError(f"{name!r} has the result {result!r}")
        results[int(length)] = dict(found)
    return results


class NotRight(Exception):
    """A kernel does not take an attention call, or its results are not right."""


class KernelTrial:
    """A trial of the attention calls of one model in rows of `length` tokens.

    The constructor runs the attention calls in XLA for comparison, and raises XLA's errors.
    `xla_ms` is XLA's time for the attention of all layers.
    """

    def __init__(self, device: Device, dtype: DType, call_counts: Counter[Call], length: int):
        self._device = device
        self._dtype: DType = dtype
        self._call_counts = call_counts
        self._bucket = Bucket(max(PROBE_TOKENS // length, 1), length)
        self._segments = packed_segments(self._bucket)
        self._operands = {call: self._random_operands(call) for call in call_counts}
        self._exact = {call: self._in_float32(call) for call in call_counts}
        self.xla_ms = sum(self._run(by_xla, call)[1] * n for call, n in call_counts.items())

    def milliseconds_if_right(self, kernel: Kernel) -> float:
        """Run all attention calls with a kernel. Returns the milliseconds for all layers together.

        If the kernel also gathers outputs, try that too. Raises NotRight if the kernel refuses an
        attention call or a result is not right, and the errors of the kernel.
        """
        total_ms = 0.0
        for call, layers in self._call_counts.items():
            if reason := kernel.refuses(call, self._bucket.length):
                raise NotRight(reason)
            attend = kernel.implementation(self._bucket.slots)
            output, ms = self._run(attend, call)
            self._check(output, call)
            if attend.attend_joint is not None and call.heads == call.groups:
                self._check(self._run(partial(_joined, attend), call)[0], call)
            total_ms += ms * layers
        if kernel.gather is not None:
            self._check_gather(kernel.gather)
        return total_ms

    def _check_gather(self, gather: Callable[..., list[jax.Array]]) -> None:
        """Gather the parts of an output with a kernel. Raises NotRight if a number is not right,
        and the errors of the kernel."""
        rows, slots = self._bucket.rows, self._bucket.slots
        sizes = part_sizes(rows, slots)
        width = max(call.heads * call.width for call in self._call_counts)
        rng = np.random.default_rng(0)
        flat = rng.standard_normal((rows * slots, width), np.float32)
        order = rng.permutation(rows * slots).astype(np.int32)
        operands = jax.device_put([flat, order], SingleDeviceSharding(self._device))
        lowered = jax.jit(lambda flat, order: gather(flat, order, sizes)).lower(*operands)
        parts = compile_lowered(lowered, compiler_options(self._device.platform))(*operands)
        if not np.array_equal(np.concatenate(parts), flat[order]):
            raise NotRight("the kernel that gathers outputs returns other numbers")

    def _check(self, output: np.ndarray, call: Call) -> None:
        """Compare the result of an attention call with attention in float32, except in padding.
        Raises NotRight if it differs too much."""
        exact, allowed = self._exact[call], TOLERANCE[self._dtype]
        difference = np.abs(output.astype(np.float32) - exact) / (1 + np.abs(exact))
        # NaN is an infinite difference
        worst = np.where(np.isfinite(difference), difference, np.inf)[self._segments != 0].max()
        if worst > allowed:
            raise NotRight(f"{call}: off by {worst:.2g}; at most {allowed:.2g} is allowed")

    def _run(self, attend: Attend, call: Call) -> tuple[np.ndarray, float]:
        """Compile an attention call with the implementation `attend`, and run it several times.

        Returns the result of the first run, and the mean milliseconds of the runs after it.
        """
        operands = self._operands[call]
        run = self._compiled(attend, call, operands, "highest" if self._dtype == FLOAT32 else None)
        result = run(*operands)
        output = np.asarray(result)
        started_at = time.perf_counter()
        for _ in range(PROBE_RUNS):
            result = run(*operands)
        jax.block_until_ready(result)
        return output, (time.perf_counter() - started_at) / PROBE_RUNS * 1000

    def _in_float32(self, call: Call) -> np.ndarray:
        """Compute an attention call with XLA in float32, and return the result."""
        *operands, segments = self._operands[call]
        wide = [*(x.astype(jnp.float32) for x in operands), segments]
        return np.asarray(self._compiled(by_xla, call, wide, "highest")(*wide))

    def _compiled(
        self, attend: Attend, call: Call, operands: list[jax.Array], precision: str | None
    ) -> jax.stages.Compiled:
        """Compile an attention call for these operands, with the implementation `attend`.

        If the attention call hides keys, every eighth key is hidden. `precision` is JAX's precision
        of matrix products; None means the default."""

        def attended(query, key, value, segments):
            if not call.hides_keys:
                return attend(query, key, value, segments, call.attention_mask)
            hidden = jnp.arange(self._bucket.length) % HIDDEN_EVERY == HIDDEN_EVERY - 1
            key_segments = jnp.where(hidden[None], jnp.full_like(segments, -1), segments)
            return attend(
                query, key, value, segments, call.attention_mask, key_segments=key_segments
            )

        with jax.default_matmul_precision(precision):
            lowered = jax.jit(attended).lower(*operands)
        return compile_lowered(lowered, compiler_options(self._device.platform))

    def _random_operands(self, call: Call) -> list[jax.Array]:
        """Make a random query, key and value, with variance 1 and NaN in padding.

        Returns query, key, value and segments, on the device.
        """
        rng = np.random.default_rng(0)
        padding = (self._segments == 0)[..., None, None]
        operands: list[Any] = [self._segments]
        # value, key and query are made in this order, and each is inserted before the others
        for heads in (call.groups, call.groups, call.heads):
            shape = (*self._segments.shape, heads, call.width)
            x = np.where(padding, np.float32(np.nan), rng.standard_normal(shape, np.float32))
            operands.insert(0, x.astype(jnp.dtype(call.dtype)))
        return jax.device_put(operands, SingleDeviceSharding(self._device))


def _joined(
    attend: ByKernel, query, key, value, segments, attention_mask, **optional: Any
) -> jax.Array:
    """Compute attention with the kernel that reads queries, keys and values from one array."""
    assert attend.attend_joint is not None
    joint = jnp.stack([query, key, value], axis=2)
    return attend.attend_joint(joint, segments, attention_mask, slots=attend.slots, **optional)


def _line(error: Exception) -> str:
    """Return the message of an error in one line of at most about 200 characters."""
    return str(error)[:200] if isinstance(error, NotRight) else first_line(error)
