"""Compares each native call that a model makes with XLA: is the result right, and is it faster?

A native call is a call of a native kernel. It computes a matrix product (perhaps gated, or followed
by GELU or a norm), a variant of attention, or a fused half of a layer. Each native call is tried
with the shapes of the model.
"""

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from jaxembed.data.spec import DType
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.compiles import WORKERS, compile_lowered, compiler_options
from jaxembed.engine.placement import Device, described_parameters
from jaxembed.models import Program, native
from jaxembed.models.adapters import LowRank, chosen
from jaxembed.models.attention import AttentionMask, ByNative, by_xla, using
from jaxembed.models.layers import ACTIVATIONS, LayerNorm, Linear
from jaxembed.models.quantized import dequantized, quantized
from jaxembed.models.rope import Rotation
from jaxembed.platform.cores import MAX_WAITED, core_count, timed

# The native calls that compute half a layer; without them a layer makes several calls.
HALVES = frozenset({"self_attention", "mlp"})
# The tried buckets, with few tokens and with many, and the native calls that are not used there.
# They are fixed, because the trials come before the grid is chosen.
TRIED = (
    (Bucket(2, 16), HALVES),
    (Bucket(2, 16), frozenset[str]()),
    (Bucket(8, 128), frozenset[str]()),
)
TRIAL_S = 20.0  # time limit of all trials; native calls that are not tried by then are not used
RUNS = 30  # largest number of runs; the fastest run counts, because the machine may be busy
RUNS_S = 0.05  # fewer runs, but at least three, are enough after these seconds
CLEARLY_SLOWER = 1.1  # ratio of a native call's time to XLA's; a smaller ratio may be noise
MAX_TIMINGS = 3  # a native call is refused as slower after this many timings that agree
# The largest allowed difference to XLA's result, divided by one plus that result, by the dtype of
# the kernels. In bfloat16 both results are rounded to 8 bits, in different orders, and the largest
# difference seen is 0.007, in attention. Tests of float32 allow 2e-5.
MAX_DIFFERENCE = {"bfloat16": 0.02, "float32": 1e-4}
# The same with quantized weights: an input between two steps may be rounded to either. The largest
# seen is 0.023, in a gated MLP with adapters.
MAX_QUANTIZED_DIFFERENCE = 0.05
# Name of a native call -> names of the native calls that it needs. They need `linear`, because
# weights are packed into panels only if `linear` is used.
NEEDED = {name: {"linear"} for name in (*native.EPILOGUES[1:], *HALVES)}
RUN = 8  # number of neighbouring tokens or columns with the same adapter
GATED = "gated_"  # begins the name of a gated native call; the name of its activation follows
LATE = f"was not tried within {TRIAL_S:.0f} s"

Operands = Mapping[str, Any]  # arrays by name, on the host or traced


@dataclass(frozen=True)
class TrialResult:
    """The result of the trials of one native call, in one shape or over all shapes."""

    off: float = 0.0  # largest difference to XLA's result, divided by one plus that result
    times_xla: float = 0.0  # time of the native call over XLA's; the geometric mean over shapes
    failed: str = ""  # why the native call could not be tried; "" if it was tried
    busy: bool = False  # whether other programs used the cores during the timing
    allowed: float = MAX_DIFFERENCE["bfloat16"]  # the largest `off` with which it may be used

    def refusal(self, faster: bool) -> str | None:
        """Return the reason not to use the native call; None if it may be used.

        With `faster`, being clearly slower than XLA is also a reason.
        """
        if self.failed:
            return self.failed
        if not self.off <= self.allowed:  # also refuses NaN
            return f"off by {self.off:.2g}; at most {self.allowed:.2g} is allowed"
        if faster and self.times_xla > CLEARLY_SLOWER:
            beside = " while other programs ran; the next start tries again" if self.busy else ""
            return f"takes {self.times_xla:.2f} times as long as XLA{beside}"
        return None


TrialResults = dict[str, TrialResult]  # by the name of the native call


def try_native(program: Program, device: Device, dtype: DType) -> TrialResults:
    """Try each native call that the model makes, and return the trial results by name of the call.

    Native calls of one name may have several shapes. The trial result of a name is the first
    failure in any of its shapes, or else the largest difference and the mean ratio of times.
    """
    stop_at = time.monotonic() + TRIAL_S
    calls = native_calls_of(program, dtype)
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="trial") as pool:
        compiled = [pool.submit(_compile_both, call, device, stop_at) for call in calls]
    results_of: dict[str, list[TrialResult]] = {}
    for call, programs in zip(calls, compiled, strict=True):
        results = results_of.setdefault(call.name, [])
        if time.monotonic() < stop_at:
            results.append(_try_call(call, programs, device))
    quantized_names = {call.name for call in calls if call.mode & native.QUANTIZED}
    # a native call without results was not tried, because the time was over
    combined: TrialResults = {}
    for name, results in results_of.items():
        failures = [trial for trial in results if trial.failed]
        if failures or not results:
            combined[name] = failures[0] if failures else TrialResult(failed=LATE)
        else:
            combined[name] = TrialResult(
                off=float(np.max([trial.off for trial in results])),  # NaN if any `off` is NaN
                times_xla=geometric_mean(trial.times_xla for trial in results),
                busy=any(trial.busy for trial in results),
                allowed=MAX_QUANTIZED_DIFFERENCE
                if name in quantized_names
                else MAX_DIFFERENCE[dtype],
            )
    return combined


def native_calls_of(program: Program, dtype: DType) -> list[native.NativeCall]:
    """Return the different native calls that a model makes with few and with many tokens, and those
    that it makes in place of the calls for half a layer."""
    leaves = described_parameters(program, dtype, native_layout=True)
    calls: dict[native.NativeCall, None] = {}
    for bucket, without in TRIED:
        planes = jax.ShapeDtypeStruct((program.planes, bucket.rows, bucket.length), jnp.int32)

        def forward(leaves, planes, slots: int = bucket.slots):
            return program.forward(leaves, planes, slots, (program.primary,))

        with using(ByNative(without, dtype)), native.recording(calls):
            jax.eval_shape(forward, leaves, planes)
    return list(calls)


def _compile_both(
    call: native.NativeCall, device: Device, stop_at: float
) -> list[jax.stages.Compiled]:
    """Compile a native call with packed weights, and the same in XLA with plain weights.

    Returns both programs in this order, or fewer if the time.monotonic() `stop_at` passes. Raises
    XLA's errors.
    """
    sharding = SingleDeviceSharding(device)

    def in_xla(args: Operands) -> Array:
        with chosen(args.get("numbers")):
            return XLA_CALLS[call.target](call, args)

    programs: list[jax.stages.Compiled] = []
    for run, operands in ((call.run, dict(call.operands)), (in_xla, _plain(call))):
        if time.monotonic() < stop_at:
            shapes = [
                jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
                for struct in operands.values()
            ]

            # takes values in order and not a dict of them, whose names JAX would sort
            def of_values(*values: Array, run=run, names=tuple(operands)) -> Array:
                return run(dict(zip(names, values, strict=True)))

            lowered = jax.jit(of_values).lower(*shapes)
            programs.append(compile_lowered(lowered, compiler_options(device.platform)))
    return programs


def _try_call(
    call: native.NativeCall, compiled: Future[list[jax.stages.Compiled]], device: Device
) -> TrialResult:
    """Run the programs that `_compile_both` compiled several times; compare results and times.

    If a program failed to compile or fails to run, the trial result says so; no error is raised.
    """
    try:
        programs = compiled.result()
        if len(programs) < 2:
            return TrialResult(failed=LATE)
        plain, packed = _operands_of(call)
        runs = []
        for program, operands in zip(programs, (packed, plain), strict=True):
            placed = jax.device_put(tuple(operands.values()), SingleDeviceSharding(device))
            runs.append(partial(program, *placed))
        by_native, xla = (np.asarray(run()).astype(np.float32) for run in runs)
        # the tokens to compare: all but padding
        useful = plain["segments"] != 0 if "segments" in plain else ...
        difference = np.abs(by_native - xla)[useful] / (1 + np.abs(xla[useful]))
        times_xla, cpu_times = timed(lambda: _ratio_to_xla(*runs))
        busy = cpu_times.lost_share(core_count()) > MAX_WAITED
        return TrialResult(float(difference.max()), times_xla, busy=busy)
    except Exception as error:  # after any failure XLA is used
        return TrialResult(failed=first_line(error))


def _plain(call: native.NativeCall) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the operands of a native call by name as XLA takes them: weights are not packed, and
    float32 if they are quantized, without scales."""
    return {
        name: jax.ShapeDtypeStruct(
            native.unpacked_shape(struct.shape),
            np.float32 if struct.dtype == np.int8 else struct.dtype,
        )
        for name, struct in call.operands
        if not name.endswith(native.SCALES)
    }


def _operands_of(call: native.NativeCall) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Make random operands for a native call, with NaN in padding.

    Returns two dicts of arrays by name: first with plain weights for XLA, then with packed weights
    for the native call.
    """
    rng = np.random.default_rng(0)
    shapes = dict(call.operands)
    plain = {}
    for name, struct in _plain(call).items():
        shape = struct.shape
        values = rng.standard_normal(shape, np.float32)
        if shape != shapes[name].shape:  # scale a weight so that products get about variance 1
            values *= shape[0] ** -0.5 * (0.25 if name.endswith("adapter_up") else 1)
        elif len(shape) == 1:  # scales near 1, shifts and biases near 0
            values = 0.1 * values + name.endswith("scale")
        # numbers of adapters: runs of 0 (no adapter), 1 and 2
        if name == "numbers" or name.endswith("owners"):
            values = np.broadcast_to(np.arange(shape[-1]) // RUN % 3, shape)
        plain[name] = values.astype(struct.dtype)
    if "segments" in plain:
        segments = packed_segments(Bucket(*plain["segments"].shape))
        for values in plain.values():
            if values.shape[:2] == segments.shape and values.ndim > 2:
                values[segments == 0] = np.nan
        plain["segments"] = segments
    packed = dict(plain)
    for name, values in plain.items():
        if shapes[name].dtype == np.int8:
            groups = shapes[f"{name}{native.SCALES}"].shape[1]
            weight = native.packed_quantized(values, groups, call.kernels)
            packed |= {name: weight.values, f"{name}{native.SCALES}": weight.scales}
            plain[name] = dequantized(*quantized(values, groups))
        elif values.shape != shapes[name].shape:
            packed[name] = native.packed(values)
    return plain, {name: packed[name] for name in shapes}


def packed_segments(bucket: Bucket) -> np.ndarray:
    """Make random segments for a batch, int32 `[rows, length]`, always the same for a bucket.

    They are the segment number of each token, or 0 for padding. The first row is one segment. Each
    other row has up to four segments, and padding at the end.
    """
    rng = np.random.default_rng(0)
    segments = np.zeros((bucket.rows, bucket.length), np.int32)
    segments[0] = 1
    for row in segments[1:]:
        ends = np.sort(rng.integers(1, bucket.length, size=4))
        for segment, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
            row[first:last] = segment
    return segments


def first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message, at most 200 characters."""
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first}"


def _ratio_to_xla(*runs: Callable[[], Any]) -> float:
    """Return the fastest time of a native program divided by the fastest time of XLA's program.

    `runs` are functions that run the native program and XLA's; they are called alternately. If the
    native program is clearly slower, both are timed again, up to MAX_TIMINGS times in total, and
    the smallest ratio counts.
    """
    times_xla = math.inf
    for _ in range(MAX_TIMINGS):
        if times_xla <= CLEARLY_SLOWER:
            break
        fastest = [math.inf] * len(runs)
        began_at = time.perf_counter()
        for repeat in range(RUNS):
            if repeat >= 3 and time.perf_counter() - began_at > RUNS_S * len(runs):
                break
            for i, run in enumerate(runs):
                started_at = time.perf_counter()
                jax.block_until_ready(run())
                fastest[i] = min(fastest[i], time.perf_counter() - started_at)
        times_xla = min(times_xla, fastest[0] / fastest[1])
    return times_xla


def _linear_in_xla(call: native.NativeCall, args: Operands) -> Array:
    """Compute the native call `linear` in XLA: a product, then a norm, gate or activation."""
    linear = _linear(call, args)
    if call.name == "norm":
        eps = float(dict(call.attributes)["eps"])
        norm = _layer_norm(args["scale"], args["shift"], eps)
        return norm.norm_of_sum(args["residual"], linear, args["x"])
    if call.name.startswith(GATED):
        return _gated(linear(args["x"]), call.name).astype(call.dtype)
    activation = ACTIVATIONS["identity" if call.name == "linear" else call.name]
    return activation(linear(args["x"])).astype(call.dtype)


def _joint_attention_in_xla(call: native.NativeCall, args: Operands) -> Array:
    """Compute the native call `joint_attention` in XLA: query, key and value in one array."""
    query, key, value = (args["joint"][:, :, i] for i in range(3))
    if "cos" in args:
        rotation = Rotation(args["cos"], args["sin"])
        query, key = (rotation(x.astype(jnp.float32)).astype(x.dtype) for x in (query, key))
    return _attend(call, args, query, key, value)


def _self_attention_in_xla(call: native.NativeCall, args: Operands) -> Array:
    """Compute the native call `self_attention` in XLA: query, key, value and their attention."""
    rows, length, dim = call.shape
    heads = int(dict(call.attributes)["heads"])
    joint = _linear(call, args).apply_rounded(args["hidden"]).astype(call.kernels)
    joint = joint.reshape(rows, length, 3, heads, dim // heads)
    return _joint_attention_in_xla(call, {**args, "joint": joint}).reshape(call.shape)


def _mlp_in_xla(call: native.NativeCall, args: Operands) -> Array:
    """Compute the native call `mlp` in XLA: output projection, norm, MLP and second norm."""
    eps, end = float(dict(call.attributes)["eps"]), call.end
    out, up, down = (_linear(call, args, f"{name}_") for name in ("out", "up", "down"))
    first, second = (
        _layer_norm(args[f"{name}_scale"], args[f"{name}_shift"], eps) for name in ("out", "down")
    )
    hidden = first.norm_of_sum(args["hidden"], out, args["mixed"])
    inner = _gated(up(hidden), end) if end.startswith(GATED) else up.apply_rounded(hidden, end)
    return second.norm_of_sum(hidden, down, inner)


def _gated(halves: Array, name: str) -> Array:
    """Return activation(first half) * second half; the activation follows GATED in `name`."""
    gate, up = jnp.split(halves, 2, axis=-1)
    return ACTIVATIONS[name.removeprefix(GATED)](gate) * up


def _attend(call: native.NativeCall, args: Operands, query, key, value) -> Array:
    """Compute attention in XLA, with the attention mask that the attributes of a native call
    describe."""
    attributes = dict(call.attributes)
    # a negative `reach` and a `cap` of 0 mean no limit
    reach, cap = int(attributes["reach"]), float(attributes["cap"])
    attention_mask = AttentionMask(
        bool(attributes["causal"]), None if reach < 0 else reach, cap or None
    )
    output = by_xla(query, key, value, args["segments"], attention_mask, args.get("distance_bias"))
    return output.astype(call.dtype)


class _OfQuantized(Linear):
    """A linear layer whose input, but not its adapters', is quantized as native kernels do it, and
    then multiplied in float32."""

    group: int

    def __call__(self, x: Array) -> Array:
        term = 0.0 if self.adapter is None else self.adapter(x)
        kernel, bias = self.parameters
        groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.group)
        low = jnp.minimum(groups.min(axis=-1, keepdims=True), 0.0)
        high = jnp.maximum(groups.max(axis=-1, keepdims=True), 0.0)
        scale = jnp.where(high > low, high / 255 - low / 255, 1.0)
        inverse = 1 / scale
        zero = jnp.round(-low * inverse)
        values = jnp.clip(jnp.round(groups * inverse + zero), 0, 255) - zero
        y = jnp.matmul((values * scale).reshape(x.shape), kernel, precision="highest")
        return y + bias[None, None] + term


def _linear(call: native.NativeCall, args: Operands, name: str = "") -> Linear:
    """Make a linear layer from the weight, bias and adapters of a product in `args`, where their
    names begin with `name`."""
    scales = dict(call.operands).get(f"{name}kernel{native.SCALES}")
    # the size has no effect, because the parameters are replaced
    linear = Linear(1, 1) if scales is None else _OfQuantized(1, 1)
    kernel = args[f"{name}kernel"]
    if isinstance(linear, _OfQuantized) and scales is not None:
        linear.group = kernel.shape[0] // scales.shape[1]
    linear.kernel, linear.bias = nnx.Param(kernel), nnx.Param(args[f"{name}bias"])
    if f"{name}adapter_owners" in args:
        linear.adapter = adapter = LowRank(linear, args[f"{name}adapter_owners"])
        assert isinstance(adapter.down, Linear)
        adapter.down.kernel = nnx.Param(args[f"{name}adapter_down"])
        adapter.up.kernel = nnx.Param(args[f"{name}adapter_up"])
    return linear


def _layer_norm(scale: Array, shift: Array, eps: float) -> LayerNorm:
    """Make a layer norm with this scale and shift."""
    norm = LayerNorm(1, eps=eps)
    norm.scale, norm.bias = nnx.Param(scale), nnx.Param(shift)
    return norm


XLA_CALLS: dict[str, Callable[[native.NativeCall, Operands], Array]] = {
    "linear": _linear_in_xla,
    "attention": lambda call, of: _attend(call, of, of["query"], of["key"], of["value"]),
    "joint_attention": _joint_attention_in_xla,
    "self_attention": _self_attention_in_xla,
    "mlp": _mlp_in_xla,
}
