"""Products and attention in bfloat16 on x86-64, in C, called by XLA:CPU's programs.

XLA:CPU runs a transformer as many small loops over memory. calls.h does a layer of BERT in two
calls, of a few tokens in five; other towers take its products and attention. Wheels bring the
kernels compiled, for AVX512_BF16 and for AMX: without either, XLA does it all.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float

from jaxembed.models.native.compiler import Unavailable as Unavailable
from jaxembed.models.native.compiler import find_compiler as find_compiler
from jaxembed.models.native.library import CALLS as CALLS
from jaxembed.models.native.library import load_library as load_library
from jaxembed.models.native.library import operand_names
from jaxembed.models.native.library import source_digest as source_digest
from jaxembed.models.tokens import Segments

MOST_OF_A_ROW = 2**19  # elements: each item of `self_attention` holds a row, in a core's cache
TILE = 16  # lines of a tile: tokens, or neighbouring pairs of features
PANEL = 32  # columns that lie together

RoundedHeads = BFloat16[Array, "rows length heads width"]
RoundedGrouped = BFloat16[Array, "rows length groups width"]
RoundedJoint = BFloat16[Array, "rows length three heads width"]
Panels = BFloat16[Array, "columns steps two pairs lanes both"]


# What a call is named where it is tried: a product by what is at its end.
ENDS = ("linear", "gelu", "norm")


@dataclass(frozen=True)
class NativeCall:
    """A call with the shapes and dtypes of its operands, by name, and its attributes."""

    target: str
    shape: tuple[int, ...]
    dtype: str
    operands: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    attributes: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """That of the target, but for products: linear, gelu or norm, by what is at their end."""
        mode = dict(self.attributes).get("mode")
        return self.target if mode is None else ENDS[mode]

    def run(self, operands: Mapping[str, Array]) -> Array:
        """The result, in a program that is being traced. Raises TypeError unless it has each of its
        operands, whose order the library tells."""
        attributes = dict(self.attributes)
        names = operand_names(self.target, int(attributes.get("mode", 0)))
        if operands.keys() != set(names):
            came = ", ".join(operands)
            raise TypeError(f"native {self.target} takes {', '.join(names)}, not {came}")
        result = jax.ShapeDtypeStruct(self.shape, self.dtype)
        call = jax.ffi.ffi_call(f"jaxembed_{self.target}", result)
        return call(*(operands[name] for name in names), **attributes)


_noted: ContextVar[dict[NativeCall, None] | None] = ContextVar("noted", default=None)


@contextmanager
def noting(noted: dict[NativeCall, None]) -> Iterator[None]:
    """Let what this thread traces meanwhile note its different calls, in order, and make none."""
    before = _noted.set(noted)
    try:
        yield
    finally:
        _noted.reset(before)


def packable(name: str, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a parameter is the kernel of a product that `linear` takes."""
    matrix = name.endswith(".kernel") and len(shape) == 2 and dtype == "bfloat16"
    return matrix and shape[0] % PANEL == 0 and shape[1] % PANEL == 0


def packed(kernel: np.ndarray) -> np.ndarray:
    """`[K, N]` as the panels product.h takes: `[N / 32, K / 32, 2, 16, 16, 2]`, the axes being
    columns by 32, features by 32, tiles of 16 columns, pairs of features, columns, a pair."""
    k, n = kernel.shape
    split = kernel.reshape(k // PANEL, TILE, 2, n // PANEL, 2, TILE)
    return np.ascontiguousarray(split.transpose(3, 0, 4, 1, 5, 2))


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of a parameter once it is packed."""
    return (shape[1] // PANEL, shape[0] // PANEL, 2, TILE, TILE, 2)


def is_packed(kernel: Any) -> bool:
    """Whether a parameter, on a device or on the host, lies in panels."""
    return kernel.ndim == 6


def plain_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of a parameter before it was packed, or as it is."""
    return (shape[1] * PANEL, shape[0] * PANEL) if len(shape) == 6 else shape


def linear(
    x: Float[Array, "... in"],
    kernel: Panels,
    bias: Float[Array, " out"] | None,
    *,
    gelu: bool = False,
    dtype: str = "float32",
) -> Float[Array, "... out"]:
    """x . kernel + bias, through the exact gelu if wanted, rounded to `dtype` at the end.

    x is bfloat16, or float32 that is rounded to it; sums are float32.
    """
    return _linear(x, kernel, bias, {}, mode=int(gelu), eps=0.0, dtype=dtype)


def linear_norm(
    x: Float[Array, "rows length in"],
    kernel: Panels,
    bias: Float[Array, " out"] | None,
    residual: Float[Array, "rows length out"],
    scale: Float[Array, " out"],
    shift: Float[Array, " out"],
    eps: float,
) -> Float[Array, "rows length out"]:
    """The layer norm of residual + x . kernel + bias, in float32."""
    norm = {"residual": residual, "scale": scale, "shift": shift}
    return _linear(x, kernel, bias, norm, mode=2, eps=eps, dtype="float32")


def takes(length: int, width: int, dtype: str) -> bool:
    """Whether `attention` takes rows of a length and heads of a width."""
    return length % TILE == 0 and width % PANEL == 0 and dtype == "bfloat16"


def attention(
    query: RoundedHeads,
    key: RoundedGrouped,
    value: RoundedGrouped,
    segments: Segments,
    causal: bool,
    reach: int | None,
) -> RoundedHeads:
    """As models.attention.attend; zeros in padding. Keys of other segments cost nothing."""
    operands = {"query": query, "key": key, "value": value, "segments": segments}
    return _call("attention", query.shape, query.dtype, operands, **_sight(causal, reach))


def joint_attention(
    joint: RoundedJoint, segments: Segments, causal: bool, reach: int | None
) -> RoundedHeads:
    """The same for query, key and value side by side, as one product makes them."""
    rows, length, _, heads, width = joint.shape
    shape = (rows, length, heads, width)
    operands = {"joint": joint, "segments": segments}
    return _call("joint_attention", shape, joint.dtype, operands, **_sight(causal, reach))


def takes_mlp(hidden: Float[Array, "rows length dim"], *kernels: Array) -> bool:
    """Whether `mlp` takes what is behind attention. A few tokens are faster product by product:
    their columns are shared out over the cores."""
    return hidden.shape[0] * hidden.shape[1] > PANEL and all(map(is_packed, kernels))


def takes_self_attention(
    hidden: Float[Array, "rows length dim"], heads: int, kernel: Array
) -> bool:
    """Whether `self_attention` takes these rows: few tokens are faster in two calls, as above, and
    so are rows too long for a core's cache."""
    rows, length, dim = hidden.shape
    fits = takes(length, dim // heads, "bfloat16") and length * dim <= MOST_OF_A_ROW
    return fits and rows * length > PANEL and is_packed(kernel)


def self_attention(
    hidden: Float[Array, "rows length dim"],
    kernel: Panels,
    bias: Float[Array, " joint"] | None,
    segments: Segments,
    heads: int,
) -> BFloat16[Array, "rows length dim"]:
    """The product that makes queries, keys and values, and their attention."""
    bias = _or_zeros(bias, 3 * hidden.shape[2])
    operands = {"hidden": hidden, "kernel": kernel, "bias": bias, "segments": segments}
    return _call("self_attention", hidden.shape, jnp.bfloat16, operands, heads=np.int64(heads))


def mlp(
    mixed: BFloat16[Array, "rows length dim"],
    hidden: Float[Array, "rows length dim"],
    out: tuple[Array | None, ...],
    up: tuple[Array | None, ...],
    down: tuple[Array | None, ...],
    eps: float,
) -> Float[Array, "rows length dim"]:
    """What is behind attention in a layer: hidden = norm(hidden + mixed . out), then
    norm(hidden + gelu(hidden . up) . down). Each has kernel and bias, `out` and `down` their norm's
    scale and shift too."""
    parameters = {"out": out, "up": up, "down": down}
    parts = ("kernel", "bias", "scale", "shift")
    operands = {
        f"{name}_{part}": _or_zeros(vector, _columns(of[0]))
        for name, of in parameters.items()
        for part, vector in zip(parts, of, strict=False)  # `up` has no norm
    }
    operands = {"mixed": mixed, "hidden": hidden, **operands}
    return _call("mlp", hidden.shape, jnp.float32, operands, eps=np.float32(eps))


def _sight(causal: bool, reach: int | None) -> dict[str, np.int64]:
    return {"causal": np.int64(causal), "reach": np.int64(-1 if reach is None else reach)}


def _linear(x, kernel, bias, norm, *, mode: int, eps: float, dtype: str):
    out = _columns(kernel)
    operands = {"x": x, "kernel": kernel, "bias": _or_zeros(bias, out), **norm}
    attributes = {"mode": np.int64(mode), "eps": np.float32(eps)}
    return _call("linear", (*x.shape[:-1], out), jnp.dtype(dtype), operands, **attributes)


def _call(name: str, shape: tuple[int, ...], dtype: Any, operands: dict[str, Array], **attributes):
    """What a call in C gives, of one shape; or a note of it."""
    shapes = ((k, jax.ShapeDtypeStruct(x.shape, x.dtype)) for k, x in operands.items())
    call = NativeCall(name, shape, str(jnp.dtype(dtype)), tuple(shapes), tuple(attributes.items()))
    noted = _noted.get()
    if noted is None:
        return call.run(operands)
    noted[call] = None
    return jnp.zeros(shape, dtype)


def _columns(kernel: Array | None) -> int:
    assert kernel is not None
    return kernel.shape[0] * PANEL


def _or_zeros(vector: Array | None, size: int) -> Array:
    return jnp.zeros(size, jnp.float32) if vector is None else vector
