"""Native kernels: matrix products and attention on x86-64 and Arm, written in C for XLA:CPU.

XLA:CPU runs a transformer as many small loops over memory. With the kernels in calls.h a layer of
BERT and similar models takes two calls; other backbones use kernels for matrix products and
attention. The kernels multiply bfloat16, with AMX, AVX512_BF16 or BF16 of Arm, or float32, with
AVX512F, with AVX2 and FMA or with NEON; the wheel for x86-64 holds a library for each of its four,
that for Arm one for each of its two. On other CPUs XLA computes everything.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxembed.models.native.compiler import NativeUnavailable as NativeUnavailable
from jaxembed.models.native.compiler import find_compiler as find_compiler
from jaxembed.models.native.library import CALLS as CALLS
from jaxembed.models.native.library import load_library as load_library
from jaxembed.models.native.library import load_means as load_means
from jaxembed.models.native.library import operand_names, target
from jaxembed.models.native.library import source_digest as source_digest
from jaxembed.models.quantized import QuantizedWeight, quantized
from jaxembed.models.tokens import Segments

# Maximum length * dimensions of a row for `self_attention`: one core computes a whole row, which
# must fit the core's cache.
MAX_ROW_ELEMENTS = 2**19
TILE = 16  # lines of a tile: tokens, or units of neighbouring features
PANEL = 32  # a panel is a block of 32 columns of a weight, packed together

# The numbers of neighbouring features in a unit of 32 bits, by the dtype of the kernels, and by
# that of a weight.
UNIT = {"bfloat16": 2, "float32": 1}
UNIT_OF_WEIGHT = UNIT | {"int8": 4}
QUANTIZED_STEP = 4 * TILE  # groups of a quantized weight have a multiple of so many features

Heads = Float[Array, "rows length heads width"]
Grouped = Float[Array, "rows length groups width"]
Joint = Float[Array, "rows length three heads width"]
Panels = Float[Array, "columns steps two units lanes unit"] | QuantizedWeight

# What the kernel `linear` computes after its product, by mode. Trials of kernels use these names.
EPILOGUES = (
    *("linear", "norm", "gelu", "gelu_tanh", "quick_gelu"),
    *("gated_gelu", "gated_silu", "gated_gelu_tanh"),
)
# Bits of the attribute `mode` of a call, which say which optional operands the call has.
BIASED, ROTATED = 1, 2  # in attention kernels: a bias by distance, and cosines and sines
ADAPTED = 8  # in any kernel: adapters
ADAPTS = {"out": 16, "up": 32, "down": 64}  # in `mlp`: the products that have adapters
SCALES = "_scales"  # ends the name of the operand with the scales of a quantized weight
QUANTIZED = 128  # in any kernel with products: quantized weights
PADDED = 256  # in `linear` and `mlp`: segments, whose padding is skipped

DistanceBias = Float[Array, "heads distances"]  # the `bias` of models.attention.attend
Angles = Float[Array, "rows length half"]


class AdapterOperands(NamedTuple):
    """The low-rank adapters of a matrix product. `down` and `up` are packed weights."""

    numbers: Int[Array, "rows length"]  # the number of each token's adapter, or 0 for no adapter
    down: Panels
    up: Panels
    owners: Int[Array, " narrow"]  # the number of the adapter that each column of `down` belongs to


@dataclass(frozen=True)
class NativeCall:
    """A call of a native kernel: its target, the shapes of its operands, and its attributes."""

    target: str  # one of CALLS
    kernels: str  # the dtype of the kernels, a key of UNIT
    shape: tuple[int, ...]  # the shape of the result
    dtype: str  # the dtype of the result
    operands: tuple[tuple[str, jax.ShapeDtypeStruct], ...]  # (name, shape) of each operand
    attributes: tuple[tuple[str, Any], ...]  # (name, value) of each attribute

    @property
    def name(self) -> str:
        """The name of the call: its target, or for the target `linear` its entry of EPILOGUES."""
        return self.end if self.target == "linear" else self.target

    @property
    def end(self) -> str:
        """The entry of EPILOGUES that says what follows the product of `linear`, or the product
        with `up` in `mlp`."""
        return EPILOGUES[self.mode % ADAPTED]

    @property
    def mode(self) -> int:
        """The attribute `mode`, whose bits say which operands the call has."""
        return int(dict(self.attributes)["mode"])

    def run(self, operands: Mapping[str, Array]) -> Array:
        """Add the call to the program that is being traced, and return its result.

        `operands` are arrays by name; the library defines their order. Raises TypeError if an
        operand is missing or unknown, and RuntimeError if the library is not loaded.
        """
        names = operand_names(self.target, self.kernels, self.mode)
        if operands.keys() != set(names):
            raise TypeError(
                f"native {self.target} takes {', '.join(names)}, not {', '.join(operands)}"
            )
        result = jax.ShapeDtypeStruct(self.shape, self.dtype)
        call = jax.ffi.ffi_call(target(self.target, self.kernels), result)
        return call(*(operands[name] for name in names), **dict(self.attributes))


_recorded: ContextVar[dict[NativeCall, None] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording(calls: dict[NativeCall, None]) -> Iterator[None]:
    """Record the native calls that this thread traces in the block, instead of making them.

    Each different call is added once to `calls`, in the order of the trace. The results of recorded
    calls are zeros.
    """
    reset_token = _recorded.set(calls)
    try:
        yield
    finally:
        _recorded.reset(reset_token)


_segments: ContextVar[Segments | None] = ContextVar("segments", default=None)


@contextmanager
def skipping_padding(segments: Segments | None) -> Iterator[None]:
    """Let the calls of `linear` and `mlp` that this thread traces in the block skip padding, the
    tokens with segment 0. Their results are zeros there.

    All these calls must have inputs `[rows, length, features]`, of the shape of `segments`.
    """
    reset_token = _segments.set(segments)
    try:
        yield
    finally:
        _segments.reset(reset_token)


def is_packable(name: str, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a parameter is a weight that can be packed into panels for `linear`.

    `name` is the parameter's dotted name; `shape` and `dtype` describe it before packing.
    """
    is_matrix = name.endswith(".kernel") and len(shape) == 2 and dtype in UNIT_OF_WEIGHT
    if dtype == "int8" and is_matrix and shape[0] % QUANTIZED_STEP:
        return False
    return is_matrix and shape[0] % PANEL == 0 and shape[1] % PANEL == 0


def packed(kernel: np.ndarray) -> np.ndarray:
    """Pack a weight `[K, N]` into the panels that product.h takes, on the host.

    K is the number of input features, and N is the number of columns. The result is
    `[N / 32, K / (16 * unit), 2, 16, 16, unit]`, where a unit has the features of UNIT. The axes
    are: blocks of 32 columns, blocks of features, tiles of 16 columns, units, columns of a tile,
    and the features of a unit.
    """
    k, n = kernel.shape
    unit = UNIT_OF_WEIGHT[str(kernel.dtype)]
    split = kernel.reshape(k // (TILE * unit), TILE, unit, n // PANEL, 2, TILE)
    return np.ascontiguousarray(split.transpose(3, 0, 4, 1, 5, 2))


def packed_quantized(kernel: np.ndarray, groups: int, dtype: str) -> QuantizedWeight:
    """Quantize a weight `[K, N]` and pack it for kernels of a dtype, on the host.

    K is divided into `groups` of features, each a multiple of QUANTIZED_STEP. The values are packed
    as by `packed`. The scales are `[N / 32, groups, 2, 32]`: those of the columns, and the scales
    times the sums of the values. Raises ValueError for a weight that is not finite.
    """
    n = kernel.shape[1]
    values, scales = quantized(kernel, groups)
    sums = values.reshape(groups, -1, n).sum(axis=1, dtype=np.int32).astype(np.float32)
    both = np.stack([scales, scales * sums], axis=1).reshape(groups, 2, n // PANEL, PANEL)
    return QuantizedWeight(packed(values), np.ascontiguousarray(both.transpose(2, 0, 1, 3)), dtype)


def packed_quantized_shape(shape: tuple[int, ...], groups: int, dtype: str) -> QuantizedWeight:
    """Describe what `packed_quantized` returns for a weight of a shape `[K, N]`."""
    return QuantizedWeight(
        jax.ShapeDtypeStruct(packed_shape(shape, "int8"), np.int8),
        jax.ShapeDtypeStruct((shape[1] // PANEL, groups, 2, PANEL), np.float32),
        dtype,
    )


def packed_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Return the shape of a packed weight of a dtype, given its shape `[K, N]` before packing."""
    unit = UNIT_OF_WEIGHT[dtype]
    return (shape[1] // PANEL, shape[0] // (TILE * unit), 2, TILE, TILE, unit)


def is_packed(kernel: Any) -> bool:
    """Whether a weight, on a device or on the host, is packed into panels."""
    return kernel.ndim == 6


def unpacked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a packed weight had before; other shapes are returned unchanged."""
    return (shape[1] * TILE * shape[5], shape[0] * PANEL) if len(shape) == 6 else shape


def linear(
    x: Float[Array, "... in"],
    kernel: Panels,
    bias: Float[Array, " width"] | None,
    end: str = "linear",
    *,
    norm: tuple[Float[Array, "... out"], Float[Array, " out"], Float[Array, " out"], float]
    | None = None,
    dtype: str = "float32",
    adapters: AdapterOperands | None = None,
) -> Float[Array, "... out"]:
    """Compute x . weight + bias, then the operation `end`, and round the result to `dtype`.

    `kernel` is the packed weight; a `bias` of None means zeros. `x` has the dtype of the weight, or
    is float32, which the kernel rounds to that dtype; `dtype` is one of the two as well. Sums are
    float32, and include the product of the `adapters`. `end` is one of EPILOGUES: "linear" adds no
    operation; "gelu" is the exact GELU, as in models.layers.ACTIVATIONS, and so are "gelu_tanh" and
    "quick_gelu"; "gated_NAME" returns NAME(gate) * up, where NAME is an
    activation, and gate and up are the two halves of the columns (the weight must satisfy
    `supports_gated`); "norm" is the layer norm of residual + x . weight + bias, with
    `norm` = (residual, scale, shift, epsilon).
    """
    columns = _columns(kernel)
    out = columns // 2 if end.startswith("gated") else columns
    weight, mode = _weight_operands(kernel)
    operands = {"x": x, **weight, "bias": _or_zeros(bias, columns)}
    mode, eps = mode | EPILOGUES.index(end), 0.0
    if norm is not None:
        operands["residual"], operands["scale"], operands["shift"], eps = norm
    if adapters is not None:
        operands |= _adapter_operands(adapters)
        mode |= ADAPTED
    padding, padded_bit = _padding_operands()
    return _call(
        "linear",
        kernel.dtype,
        (*x.shape[:-1], out),
        jnp.dtype(dtype),
        operands | padding,
        mode=np.int64(mode | padded_bit),
        eps=np.float32(eps),
    )


def supports_gated(kernel: Any, activation: str) -> bool:
    """Whether `linear` and `mlp` can compute a gated product with this weight and activation.

    `kernel` holds the columns of gate and up, and each half must consist of whole panels.
    `activation` is a name in models.layers.ACTIVATIONS.
    """
    return f"gated_{activation}" in EPILOGUES and is_packed(kernel) and kernel.shape[0] % 2 == 0


def step(kernels: str) -> int:
    """Return the number of features of which the width of heads in `attention` is a multiple.
    `kernels` is a key of UNIT."""
    return TILE * UNIT[kernels]


def takes(length: int, width: int, kernels: str) -> bool:
    """Whether `joint_attention` takes rows of this length, and heads of this width. `kernels` is a
    key of UNIT."""
    return length % TILE == 0 and width % step(kernels) == 0


def attention(
    query: Heads,
    key: Grouped,
    value: Grouped,
    segments: Segments,
    causal: bool,
    reach: int | None,
    cap: float | None = None,
    distance_bias: DistanceBias | None = None,
) -> Heads:
    """Compute attention as models.attention.attend does; padding gets zeros.

    `causal`, `reach` and `cap` are the fields of an AttentionMask. `distance_bias` is the `bias` of
    `attend`. Keys of other segments are skipped and take no time. Shapes must satisfy `takes`.
    """
    operands = {"query": query, "key": key, "value": value, "segments": segments}
    optional, mode = _position_operands(distance_bias, angles=None)
    return _call(
        "attention",
        query.dtype,
        query.shape,
        query.dtype,
        operands | optional,
        **mode,
        **_mask_attributes(causal, reach, cap),
    )


def joint_attention(
    joint: Joint,
    segments: Segments,
    causal: bool,
    reach: int | None,
    cap: float | None = None,
    distance_bias: DistanceBias | None = None,
    angles: tuple[Angles, Angles] | None = None,
) -> Heads:
    """Compute attention with query, key and value side by side in one array.

    `angles` are the cosines and sines by which queries and keys are rotated first; dimensions k and
    k + width / 2 form a pair. The other arguments are those of `attention`. The result is
    `[rows, length, heads, width]`.
    """
    rows, length, _, heads, width = joint.shape
    operands = {"joint": joint, "segments": segments}
    optional, mode = _position_operands(distance_bias, angles)
    return _call(
        "joint_attention",
        joint.dtype,
        (rows, length, heads, width),
        joint.dtype,
        operands | optional,
        **mode,
        **_mask_attributes(causal, reach, cap),
    )


def supports_mlp(*kernels: Any) -> bool:
    """Whether `mlp` takes these weights, which must be all quantized, or none."""
    alike = len({isinstance(kernel, QuantizedWeight) for kernel in kernels}) == 1
    return alike and all(map(is_packed, kernels))


def supports_self_attention(
    hidden: Float[Array, "rows length dim"], heads: int, kernel: Any
) -> bool:
    """Whether `self_attention` takes these hidden states and this weight, and is faster than two
    calls, one for the product and one for attention.

    Two calls are faster for rows that do not fit the cache of a core.
    """
    _, length, dim = hidden.shape
    takes_shape = length % TILE == 0 and dim % (heads * PANEL) == 0
    fits = takes_shape and length * dim <= MAX_ROW_ELEMENTS
    return fits and is_packed(kernel)


def self_attention(
    hidden: Float[Array, "rows length dim"],
    kernel: Panels,
    bias: Float[Array, " joint"] | None,
    segments: Segments,
    heads: int,
    causal: bool = False,
    reach: int | None = None,
    cap: float | None = None,
    distance_bias: DistanceBias | None = None,
    angles: tuple[Angles, Angles] | None = None,
    adapters: AdapterOperands | None = None,
) -> Float[Array, "rows length dim"]:
    """Compute self-attention of hidden states in one call: the matrix product that gives queries,
    keys and values, and then attention.

    `kernel` is the packed weight of the product, `adapters` are the product's adapters, and `heads`
    is the number of heads. The other arguments are those of `joint_attention`.
    """
    bias = _or_zeros(bias, 3 * hidden.shape[2])
    weight, quantized_bit = _weight_operands(kernel)
    operands = {"hidden": hidden, **weight, "bias": bias, "segments": segments}
    optional, mode = _position_operands(distance_bias, angles)
    mode["mode"] |= quantized_bit
    if adapters is not None:
        optional |= _adapter_operands(adapters)
        mode["mode"] |= ADAPTED
    return _call(
        "self_attention",
        kernel.dtype,
        hidden.shape,
        kernel.dtype,
        operands | optional,
        **mode,
        heads=np.int64(heads),
        **_mask_attributes(causal, reach, cap),
    )


def mlp(
    mixed: Float[Array, "rows length dim"],
    hidden: Float[Array, "rows length dim"],
    out: tuple[Any, ...],
    up: tuple[Any, ...],
    down: tuple[Any, ...],
    eps: float,
    end: str = "gelu",
    adapters: Mapping[str, AdapterOperands | None] | None = None,
) -> Float[Array, "rows length dim"]:
    """Compute the rest of a BERT layer after attention, in one call.

    The result is norm(h + end(h . up) . down), where h = norm(hidden + mixed . out). `mixed` is the
    result of attention, of the dtype of the weights. `up` is (packed weight, bias or None); `out`
    and `down` also hold the scale and the shift of the norm that follows. `end` is one of EPILOGUES
    but "linear" and "norm". The keys of `adapters` are the names of the products: "out", "up" or
    "down".
    """
    mode = EPILOGUES.index(end)
    operands = {"mixed": mixed, "hidden": hidden}
    for name, (kernel, *parameters) in (("out", out), ("up", up), ("down", down)):
        weight, quantized_bit = _weight_operands(kernel, f"{name}_")
        operands |= weight
        mode |= quantized_bit
        # strict=False, because `up` has no norm and so no scale and shift
        for part, parameter in zip(("bias", "scale", "shift"), parameters, strict=False):
            operands[f"{name}_{part}"] = _or_zeros(parameter, _columns(kernel))
    for name, product_adapters in (adapters or {}).items():
        if product_adapters is not None:
            operands |= _adapter_operands(product_adapters, prefix=f"{name}_")
            mode |= ADAPTED | ADAPTS[name]
    padding, padded_bit = _padding_operands()
    return _call(
        "mlp",
        mixed.dtype,
        hidden.shape,
        jnp.float32,
        operands | padding,
        mode=np.int64(mode | padded_bit),
        eps=np.float32(eps),
    )


def _mask_attributes(causal: bool, reach: int | None, cap: float | None) -> dict[str, Any]:
    """Return a mask as attributes of a call. For None, reach is -1 and cap is 0."""
    return {
        "causal": np.int64(causal),
        "reach": np.int64(-1 if reach is None else reach),
        "cap": np.float32(0 if cap is None else cap),
    }


def _position_operands(
    distance_bias: DistanceBias | None, angles: tuple[Angles, Angles] | None
) -> tuple[dict[str, Array], dict[str, np.int64]]:
    """Return the optional operands of an attention call that depend on positions, by name, and the
    attribute `mode` of the call, whose bits say which of these operands there are."""
    operands, mode = {}, 0
    if distance_bias is not None:
        operands["distance_bias"] = distance_bias
        mode |= BIASED
    if angles is not None:
        operands["cos"], operands["sin"] = angles
        mode |= ROTATED
    return operands, {"mode": np.int64(mode)}


def _weight_operands(kernel: Any, prefix: str = "") -> tuple[dict[str, Any], int]:
    """Return the operands of a packed weight by name, with the product's `prefix`, and the bits
    that they add to the mode of the call."""
    if not isinstance(kernel, QuantizedWeight):
        return {f"{prefix}kernel": kernel}, 0
    return {f"{prefix}kernel": kernel.values, f"{prefix}kernel{SCALES}": kernel.scales}, QUANTIZED


def _padding_operands() -> tuple[dict[str, Array], int]:
    """Return the operand by which a call skips padding, if it does, and its bit of the mode."""
    segments = _segments.get()
    return ({}, 0) if segments is None else ({"segments": segments}, PADDED)


def _adapter_operands(adapters: AdapterOperands, prefix: str = "") -> dict[str, Any]:
    """Return the operands of a product's adapters by name. In a call with several products the
    names of all operands but `numbers`, the adapter of each token, begin with the product's
    `prefix`."""
    return {
        "numbers": adapters.numbers,
        f"{prefix}adapter_down": adapters.down,
        f"{prefix}adapter_up": adapters.up,
        f"{prefix}adapter_owners": adapters.owners,
    }


def _call(
    name: str,
    kernels: Any,
    shape: tuple[int, ...],
    dtype: Any,
    operands: dict[str, Array],
    **attributes,
):
    """Make a native call of the kernels of a dtype, and return its result of another `dtype`. In a
    `recording` block record the call instead, and return zeros."""
    shapes = tuple((k, jax.ShapeDtypeStruct(x.shape, x.dtype)) for k, x in operands.items())
    kernels, dtype = str(jnp.dtype(kernels)), str(jnp.dtype(dtype))
    call = NativeCall(name, kernels, shape, dtype, shapes, tuple(attributes.items()))
    recorded_calls = _recorded.get()
    if recorded_calls is None:
        return call.run(operands)
    recorded_calls[call] = None  # the dict is an ordered set
    return jnp.zeros(shape, dtype)


def _columns(kernel: Any) -> int:
    """Return the number of columns of a packed weight."""
    assert kernel is not None
    return kernel.shape[0] * PANEL


def _or_zeros(vector: Array | None, size: int) -> Array:
    return jnp.zeros(size, jnp.float32) if vector is None else vector
