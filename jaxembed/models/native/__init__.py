"""Products and attention in bfloat16 on x86-64, in C, called by XLA:CPU's programs.

XLA:CPU runs a transformer as many small loops over memory. calls.h does a layer of BERT in two
calls, of a few tokens in five; other towers take its products and attention. It is compiled where
it runs, by the machine's own compiler, against the headers that jaxlib brings: without a compiler,
or without AVX512_BF16, XLA does it all.
"""

import ctypes
import hashlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float

from jaxembed.cache_folder import make_private
from jaxembed.files import replacing
from jaxembed.models.tokens import Segments

SOURCE = Path(__file__).with_name("native.c")  # which includes the headers beside it
CPU = Path("/proc/cpuinfo")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 120.0
CHECK_S = 20.0
CALLS = ("linear", "attention", "joint_attention", "self_attention", "mlp")
FAULTS = {  # what jaxembed_check of check.h returns
    2: "the system does not let this process use AMX",
    3: "there was no memory for the check",
    4: "what was compiled gives wrong numbers on this machine",
}

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


class Unavailable(Exception):
    """Why this machine has no native kernels, in one line."""


_noted: ContextVar[dict[NativeCall, None] | None] = ContextVar("noted", default=None)
_loading = threading.Lock()
_library: ctypes.CDLL | None = None


def load_library(cache_dir: Path) -> None:
    """Let XLA call the kernels, which are compiled and tried once and then kept in `cache_dir`.

    The first ones serve the whole process: XLA refuses others of the same name. Raises Unavailable.
    """
    global _library
    with _loading:
        if _library is None:
            _library = _loaded(cache_dir)


@contextmanager
def noting(noted: dict[NativeCall, None]) -> Iterator[None]:
    """Let what this thread traces meanwhile note its different calls, in order, and make none."""
    before = _noted.set(noted)
    try:
        yield
    finally:
        _noted.reset(before)


def source_digest() -> str:
    """Names the source that the kernels are compiled from, and the flags."""
    digest = hashlib.sha256(b"\0".join([*_sources(), " ".join(FLAGS).encode()]))
    return digest.hexdigest()[:16]


def operand_names(call: str, mode: int = 0) -> tuple[str, ...]:
    """The operands of a call in their order, as the table in C has them."""
    if _library is None:
        raise RuntimeError("native kernels are used before they are loaded: a bug in jaxembed")
    operand = _library.jaxembed_operand
    operand.restype, operand.argtypes = ctypes.c_char_p, (ctypes.c_char_p, *[ctypes.c_int64] * 2)
    names: list[str] = []
    while name := operand(call.encode(), mode, len(names)):
        names.append(name.decode())
    return tuple(names)


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


def _loaded(cache_dir: Path) -> ctypes.CDLL:
    _require_bfloat16()
    path = _compiled(cache_dir)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # such as half of a file: the next start makes it anew
        with suppress(OSError):
            path.unlink()
        raise Unavailable(f"cannot load what was compiled: {error}") from error
    if library.jaxembed_prepare():
        raise Unavailable(FAULTS[2])
    for name in CALLS:
        entry = jax.ffi.pycapsule(getattr(library, f"jaxembed_{name}"))
        jax.ffi.register_ffi_target(f"jaxembed_{name}", entry, platform="cpu")
    return library


def _require_bfloat16() -> None:
    try:
        abilities = CPU.read_text()
    except OSError:
        abilities = ""
    if "avx512_bf16" not in abilities:
        raise Unavailable("this CPU has no AVX512_BF16, or the system does not say so")


def _compiled(cache_dir: Path) -> Path:
    """The shared library for this machine. A failed one is never kept."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        parts = [*_sources(), header.read_bytes(), " ".join(FLAGS).encode()]
    except OSError as error:
        raise Unavailable(f"cannot read {error.filename}: {error.strerror}") from error
    key = hashlib.sha256(b"\0".join([*parts, _abilities()])).hexdigest()[:16]
    library = cache_dir.absolute() / f"native-{key}.so"  # a bare name is looked up elsewhere
    if library.exists():
        return library
    compiler = _compiler()
    try:
        make_private(cache_dir)
        with replacing(library) as partial:
            _compile(compiler, partial)
            partial.chmod(0o700)  # whatever the umask is: it runs in this process
            _check(partial)
    except OSError as error:
        raise Unavailable(f"cannot compile in {cache_dir}: {error.strerror}") from error
    return library


def _sources() -> list[bytes]:
    return [path.read_bytes() for path in [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]]


def _compiler() -> str:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise Unavailable("there is no C compiler: install gcc or clang")
    return found


def _abilities() -> bytes:
    """What the compiler looks at when it compiles for this machine."""
    lines = CPU.read_bytes().splitlines()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model", b"flags"))}))


def _compile(compiler: str, library: Path) -> None:
    include = f"-I{jax.ffi.include_dir()}"
    done = _run([compiler, *FLAGS, include, str(SOURCE), "-o", str(library)], COMPILE_S)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "nothing")
        raise Unavailable(f"{compiler} exited with {done.returncode}: {said[:200]}")


def _check(library: Path) -> None:
    """In a process of its own: what crashes there does not take the server with it.

    It is isolated (-I): Python would import a ctypes.py of the working directory, and run it. It
    needs the standard library alone, which is found without any path of ours.
    """
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL({str(library)!r}).jaxembed_check())"
    status = _run([sys.executable, "-I", "-c", code], CHECK_S).returncode
    if status:
        crash = f"what was compiled does not run on this machine: exit status {status}"
        raise Unavailable(FAULTS.get(status, crash))


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {seconds:.0f} s") from error
