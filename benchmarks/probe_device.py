"""Probes what an accelerator can do for jaxembed: it tries everything, and no failure is fatal.

The tasks are:

- about, ceilings, latencies: versions, rates of matrix products and copies, times of small steps
- attention: each known implementation for packed segments, also with windows and with causal
  grouped heads, and other block sizes of the Triton kernel: whether it compiles, runs and agrees
  with float32, and how long it takes
- choice: the kernels that a server would choose at its start, and how long the choice takes
- model: compile and run time of a BERT in bfloat16 and float32 and with some XLA options, and
  whether the same text gets the same vector in every bucket

Each task is independent: a failure is one line in its row.

    python -m benchmarks.probe_device --isolate                    # each task in its own process
    python -m benchmarks.probe_device --isolate --quick            # under two minutes
    python -m benchmarks.probe_device --quick --only attention     # tasks whose name begins so
    python -m benchmarks.probe_device --isolate --flash-library libdew_flash_attn3.so

It needs JAX, flax, jaxtyping, msgspec and numpy, and of jaxembed only the models and some engine
files. A task that would start after --budget-s is left out and reported as such.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.subject import random_subject
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.engine.compiles import compiler_options
from jaxembed.engine.kernels import choose_kernels
from jaxembed.models import attention, kernels
from jaxembed.models.attention import EVERYTHING, Sight
from jaxembed.models.tokens import PackedTokens

LIBRARIES = ("nvidia-", "jax", "flax", "tokamax", "dew-flash-attn", "libtpu", "ml-dtypes")
AGREES = 0.02  # largest allowed difference of bfloat16 to float32, for values of about 1
TIMEOUT_S = 150  # of one task with --isolate

Task = Callable[[Namespace], dict[str, Any]]

plain_attention: Any = jax.nn.dot_product_attention  # Any: its overloads lack some arguments


@dataclass(frozen=True)
class Case:
    """A batch for attention: packed, with several segments a row, or padded, with one each."""

    rows: int
    length: int
    heads: int
    width: int
    packed: bool
    groups: int | None = None  # heads of keys and values, if they are fewer
    sight: Sight = EVERYTHING

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The lengths of the segments of each row; the rest of the row is padding."""
        draw = np.random.default_rng(0)
        rows = []
        for _ in range(self.rows):
            parts = draw.dirichlet(np.full(4 if self.packed else 1, 2.0)) * self.length
            share = draw.uniform(0.8, 1.0) if self.packed else draw.uniform(0.3, 1.0)
            rows.append([max(int(part * share), 1) for part in parts])
        return rows

    @cached_property
    def segments(self) -> np.ndarray:
        """The segment of each token, int32 `[rows, length]`: 1, 2, ..., and 0 for padding."""
        segments = np.zeros((self.rows, self.length), np.int32)
        for row, lengths in zip(segments, self.lengths, strict=True):
            ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            row[: len(ids)] = ids
        return segments

    @cached_property
    def mask(self) -> np.ndarray:
        """The mask, bool `[rows, 1, length, length]`. Padding sees padding, so no row is empty."""
        of_query, of_key = self.segments[:, None, :, None], self.segments[:, None, None, :]
        distance = np.arange(self.length)[:, None] - np.arange(self.length)
        visible = (distance >= 0) | (not self.sight.causal)
        if self.sight.reach is not None:
            visible &= abs(distance) <= self.sight.reach
        return (of_query == of_key) & visible

    def operands(self, dtype: str) -> list[jax.Array]:
        """Random query, key and value, `[rows, length, heads or groups, width]`."""
        draw = np.random.default_rng(1)
        groups = self.groups or self.heads
        shapes = [(self.rows, self.length, n, self.width) for n in (self.heads, groups, groups)]
        return [jnp.asarray(draw.standard_normal(shape, np.float32), dtype) for shape in shapes]

    @property
    def is_plain(self) -> bool:
        """Whether each token sees its whole segment, and each query head has its own key head."""
        return self.groups is None and self.sight == EVERYTHING

    def __str__(self) -> str:
        kind = "packed" if self.packed else "padded"
        shape = f"{self.rows}x{self.length} {self.heads}"
        groups = f"/{self.groups}" if self.groups else ""
        causal = " causal" if self.sight.causal else ""
        reach = f" within {self.sight.reach}" if self.sight.reach is not None else ""
        return f"{kind} {shape}{groups}x{self.width}{causal}{reach}"


def our_attend(case: Case) -> Callable:
    """jaxembed's `attend`."""
    segments = jnp.asarray(case.segments)
    return lambda q, k, v: attention.attend(q, k, v, segments, case.sight)


def our_kernel(case: Case, name: str, **blocks: int) -> Callable:
    """A kernel of jaxembed; on other platforms it is interpreted, which only shows that it agrees.

    Raises ValueError if the kernel refuses the case.
    """
    platform = next(platform for platform, names in kernels.KERNELS.items() if name in names)
    kernel = kernels.kernel(kernels.KERNELS[platform][name])
    groups = case.groups or case.heads
    call = kernels.Call(case.heads, groups, case.width, "bfloat16", case.sight)
    if reason := kernel.refuses(call, case.length):
        raise ValueError(reason)
    slots = Bucket(case.rows, case.length).slots
    attend = partial(kernel.attend, sight=case.sight, slots=slots, **blocks)
    if name != "flash":
        attend = partial(attend, interpret=jax.local_devices()[0].platform != platform)
    segments = jnp.asarray(case.segments)
    return lambda q, k, v: attend(q, k, v, segments)


def our_attend_whole(case: Case) -> Callable:
    """jaxembed's `attend`, with all scores of a row at once whatever its length."""

    def call(q, k, v):
        before, attention.WHOLE_SCORES = attention.WHOLE_SCORES, case.length
        try:
            return attention.attend(q, k, v, jnp.asarray(case.segments), case.sight)
        finally:
            attention.WHOLE_SCORES = before

    return call


def jax_nn(case: Case, implementation: str) -> Callable:
    """JAX's public function with a mask of segments."""
    mask = jnp.asarray(case.mask)
    attend: Any = partial(plain_attention, mask=mask, implementation=implementation)
    return lambda q, k, v: attend(q, k, v)


def cudnn_bias(case: Case) -> Callable:
    """cuDNN's attention with the mask as a bias."""
    bias = jnp.where(case.mask, 0.0, -1e9).astype(jnp.bfloat16)
    bias = jnp.broadcast_to(bias, (case.rows, case.heads, case.length, case.length))
    attend: Any = partial(plain_attention, implementation="cudnn")
    return lambda q, k, v: attend(q, k, v, bias)


def cudnn_lengths(case: Case) -> Callable:
    """cuDNN's attention with sequence lengths. Raises ValueError for packed rows."""
    if case.packed:
        raise ValueError("sequence lengths say one segment a row")
    lengths = jnp.asarray([sum(row) for row in case.lengths], jnp.int32)
    attend: Any = partial(
        plain_attention,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return lambda q, k, v: attend(q, k, v)


def cudnn_thd(case: Case) -> Callable:
    """cuDNN's attention for packed rows, by lengths and offsets: a private function of JAX."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    most = max(map(len, case.lengths))
    lengths = np.full((case.rows, most), -1, np.int32)
    offsets = np.full((case.rows, most + 1), -1, np.int32)
    for row, parts in enumerate(case.lengths):
        lengths[row, : len(parts)] = parts
        offsets[row, : len(parts) + 1] = np.cumsum([0, *parts])
    sizes, starts = jnp.asarray(lengths), jnp.asarray(offsets)
    return lambda q, k, v: cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=sizes,
        kv_seqlen=sizes,
        q_offsets=starts,
        kv_offsets=starts,
        scale=case.width**-0.5,
        mask_type=cudnn.MaskType.PADDING,
    )


def starts_of(case: Case) -> tuple[np.ndarray, int]:
    """The offsets of all segments in the flat buffer, padding included, and the longest length."""
    sizes = []
    for parts in case.lengths:
        sizes += [*parts, case.length - sum(parts)]
    return np.cumsum([0, *sizes]).astype(np.int32), max(sizes)


def flash3(case: Case, library: Path | None) -> Callable:
    """FlashAttention-3 by XLA's FFI, from the package dew-flash-attn or from its library alone.

    Layout and attributes are those of dew_flash_attn 0.3.6 (BSD-3).
    """
    register_flash3(library)
    starts, longest = starts_of(case)
    offsets = jnp.asarray(starts)
    flat = (case.rows * case.length, case.heads, case.width)

    def call(q, k, v):
        results = (
            jax.ShapeDtypeStruct(flat, q.dtype),
            jax.ShapeDtypeStruct((case.heads, flat[0]), jnp.float32),
            jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32),
            jax.ShapeDtypeStruct((1, 1, 1), jnp.float32),
        )
        out, *_ = jax.ffi.ffi_call("dew_flash3_mha_varlen_fwd", results)(
            *(x.reshape(flat) for x in (q, k, v)),
            offsets,
            offsets,
            max_seqlen=np.int64(longest),
            max_seqlen_k=np.int64(longest),
            softmax_scale=np.float64(case.width**-0.5),
            is_causal=False,
            window_size_left=np.int64(-1),
            window_size_right=np.int64(-1),
        )
        return out.reshape(q.shape)

    return call


def register_flash3(library: Path | None) -> None:
    """Register FlashAttention-3 with XLA. Raises ModuleNotFoundError without package or library."""
    if library is None:
        package = importlib.util.find_spec("dew_flash_attn")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("no dew_flash_attn and no --flash-library")
        library = Path(package.origin).with_name("libdew_flash_attn3.so")
    name = "dew_flash3_mha_varlen_fwd"
    target = getattr(ctypes.cdll.LoadLibrary(str(library.resolve())), name)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(target), platform="CUDA")


def tokamax_mask(case: Case, implementation: str) -> Callable:
    """tokamax's attention with a mask of segments."""
    tokamax: Any = import_module("tokamax")
    mask = jnp.asarray(case.mask)
    return lambda q, k, v: tokamax.dot_product_attention(
        q, k, v, mask=mask, implementation=implementation
    )


def tokamax_ranges(case: Case) -> Callable:
    """tokamax's Hopper kernel with a range of keys for each query, so that it skips blocks."""
    folder = "tokamax._src.ops.attention"
    base = import_module(f"{folder}.base")
    try:
        kernel = import_module(f"{folder}.pallas_mosaic_gpu")
    except ModuleNotFoundError:  # its name in older wheels
        kernel = import_module(f"{folder}.pallas_mosaic_gpu_flash_attention")
    start = np.zeros((case.rows, 1, case.length), np.int32)
    stop = np.full((case.rows, 1, case.length), case.length, np.int32)
    for row, parts in enumerate(case.lengths):
        edges = np.cumsum([0, *parts, case.length - sum(parts)])
        for first, last in pairwise(edges):
            start[row, 0, first:last], stop[row, 0, first:last] = first, last
    mask = base.Mask(k_start=jnp.asarray(start), k_end=jnp.asarray(stop))
    run = kernel.PallasMosaicGpuFlashAttention()
    return lambda q, k, v: run(q, k, v, mask=mask, logits_scale=case.width**-0.5)


def splash(case: Case) -> Callable:
    """JAX's TPU kernel; on other platforms it is interpreted, which only shows that it agrees."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    full = masks.FullMask((case.length, case.length))
    interpret = jax.local_devices()[0].platform != "tpu"
    attend: Any = kernel.make_splash_mha_single_device(
        masks.MultiHeadMask([full] * case.heads), interpret=interpret
    )
    segments = jnp.asarray(case.segments)

    def call(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q * case.width**-0.5, k, v))
        ids = kernel.SegmentIds(q=segments, kv=segments)
        mixed: Any = jax.vmap(attend)(q, k, v, ids)
        return mixed.swapaxes(1, 2)

    return call


def pallas_gpu(case: Case) -> Callable:
    """JAX's own Triton kernel, deprecated in JAX 0.11."""
    from jax.experimental.pallas.ops.gpu import attention as kernel

    segments = jnp.asarray(case.segments)
    interpret = jax.local_devices()[0].platform != "gpu"
    return lambda q, k, v: kernel.mha(
        q, k, v, segments, sm_scale=case.width**-0.5, interpret=interpret
    )


# Each candidate makes a function of query, key and value for a case, or raises if it cannot.
CANDIDATES: dict[str, Callable[[Case, Namespace], Callable]] = {
    "attend": lambda case, args: our_attend(case),
    "attend-whole": lambda case, args: our_attend_whole(case),
    "triton": lambda case, args: our_kernel(case, "triton"),
    "flash": lambda case, args: our_kernel(case, "flash"),
    "splash": lambda case, args: our_kernel(case, "splash"),
    "triton-64x64": lambda case, args: our_kernel(case, "triton", query_block=64, key_block=64),
    "triton-64x32": lambda case, args: our_kernel(case, "triton", query_block=64, key_block=32),
    "triton-128x32": lambda case, args: our_kernel(case, "triton", query_block=128, key_block=32),
    "triton-128x128": lambda case, args: our_kernel(case, "triton", query_block=128, key_block=128),
    "jax-nn-xla": lambda case, args: jax_nn(case, "xla"),
    "cudnn-lengths": lambda case, args: cudnn_lengths(case),
    "cudnn-mask": lambda case, args: jax_nn(case, "cudnn"),
    "cudnn-bias": lambda case, args: cudnn_bias(case),
    "cudnn-packed": lambda case, args: cudnn_thd(case),
    "flash3-varlen": lambda case, args: flash3(case, args.flash_library),
    "tokamax-mosaic": lambda case, args: tokamax_mask(case, "mosaic"),
    "tokamax-ranges": lambda case, args: tokamax_ranges(case),
    "tokamax-triton": lambda case, args: tokamax_mask(case, "triton"),
    "pallas-splash": lambda case, args: splash(case),
    "pallas-gpu": lambda case, args: pallas_gpu(case),
}

# The candidates that take windows, causal masks and groups; others are tried on plain cases only.
ALL_CASES = ("attend", "triton", "flash", "splash", "jax-nn-xla")


def cases(args: Namespace) -> list[Case]:
    """The cases to try: 16,384 tokens each on an accelerator, and few tokens on a CPU."""
    if jax.local_devices()[0].platform == "cpu":
        causal = Case(2, 128, 4, 32, packed=True, groups=2, sight=Sight(causal=True))
        return [*(Case(2, 128, 2, 32, packed) for packed in (True, False)), causal]
    sizes = [(32, 512, 12, 64)]
    if not args.quick:
        sizes += [(128, 128, 12, 64), (32, 512, 12, 32)]
    return [
        *(Case(*size, packed=True) for size in sizes),
        Case(32, 512, 12, 64, packed=False),
        Case(16, 1024, 12, 64, packed=True, sight=Sight(reach=64)),
        Case(32, 512, 16, 128, packed=True, groups=8, sight=Sight(causal=True)),
    ]


def attention_task(name: str, args: Namespace) -> dict[str, Any]:
    """Try a candidate on every case. Returns a row for each."""
    return {"cases": [attempt(partial(try_case, name, case, args), case) for case in cases(args)]}


def try_case(name: str, case: Case, args: Namespace) -> dict[str, Any]:
    """Compile, check and time a candidate on a case. Returns a row.

    Raises ValueError if the candidate does not take the case, and whatever it raises itself.
    """
    if not case.is_plain and not name.startswith(ALL_CASES):
        raise ValueError("tried on whole segments only")
    operands = case.operands("bfloat16")
    started_at = time.perf_counter()
    compiled = jax.jit(CANDIDATES[name](case, args)).lower(*operands).compile()
    compile_s = time.perf_counter() - started_at
    result = np.asarray(compiled(*operands), np.float32)
    expected = exact(case, operands)
    real = case.segments != 0
    times = report.timed(lambda: compiled(*operands), args.repeat)
    difference = float(np.abs(result[real] - expected[real]).max())
    pairs = int((case.mask[:, 0] & real[:, :, None]).sum())
    useful = 4.0 * case.heads * case.width * pairs
    return {
        "compile_s": compile_s,
        **times.row(),
        "difference": difference,
        "agrees": bool(difference < AGREES),
        "padding_finite": bool(np.isfinite(result[~real]).all()),
        "useful_tflop_per_s": useful / times.median / 1e9,
        "temporary_mb": temporary_mb(compiled),
    }


def exact(case: Case, operands: Sequence[jax.Array]) -> np.ndarray:
    """Attention of the same operands, computed by XLA in float32."""

    def call(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bshk,bthk->bhst", q, k) * case.width**-0.5
        weights = jax.nn.softmax(jnp.where(case.mask, scores, -1e30), axis=-1)
        return jnp.einsum("bhst,bthk->bshk", weights, v)

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(call)(*(x.astype(jnp.float32) for x in operands)))


def choice_task(args: Namespace) -> dict[str, Any]:
    """Choose kernels for the model of --size as a server does at its start, and time it."""
    program = random_subject(model_size(args)).program
    grid = BucketGrid(tuple(Bucket(1, length) for length in (64, 128, 256, 512)))
    started_at = time.perf_counter()
    choice = choose_kernels(program, jax.local_devices()[0], "bfloat16", grid)
    return {"seconds": time.perf_counter() - started_at, **choice.describe()}


PARTS = (5, 17, 40)  # lengths of the texts whose vectors are compared


def buckets_of(args: Namespace) -> list[Bucket]:
    """The buckets of the model tasks."""
    if model_size(args) == "tiny":
        return [Bucket(1, 48), Bucket(2, 64), Bucket(4, 64)]
    if args.quick:
        return [Bucket(16, 512), Bucket(8, 128)]
    return [Bucket(32, 512), Bucket(64, 128), Bucket(1, 64)]


def model_size(args: Namespace) -> str:
    """The size of the model: --size, or one that suits the device."""
    on_cpu = jax.local_devices()[0].platform == "cpu"
    return args.size or ("tiny" if on_cpu and args.quick else "bert-base")


def model_task(
    dtype: str, options: dict[str, Any], only_first: bool, args: Namespace
) -> dict[str, Any]:
    """Compile and run buckets of a BERT with random weights.

    `options` are XLA's; `only_first` runs only the first bucket. Returns a row for each bucket, and
    the vectors of the same texts in each.
    """
    model = random_subject(model_size(args))
    device = jax.local_devices()[0]
    leaves = [
        jax.device_put(x.astype(jnp.dtype(dtype)) if x.ndim > 1 else x, device)
        for x in model.program.order(model.parameters)
    ]
    rows, vectors = [], {}
    for bucket in buckets_of(args)[: 1 if only_first else None]:
        row, dense = run_bucket(model.program.forward, leaves, bucket, dtype, options, args)
        rows.append(row)
        vectors[str(bucket)] = dense.tolist()
    return {"size": model.name, "dtype": dtype, "buckets": rows, "vectors": vectors}


def run_bucket(forward, leaves, bucket: Bucket, dtype: str, options: dict, args: Namespace):
    """Compile and time a bucket. Returns its row, and the vectors of its first row's texts."""
    planes = jax.device_put(packed_planes(bucket), jax.local_devices()[0])
    exactly = "highest" if dtype == "float32" else None
    started_at = time.perf_counter()
    with jax.default_matmul_precision(exactly):
        names = ("dense",)
        run = jax.jit(lambda leaves, planes: forward(leaves, planes, bucket.slots, names)["dense"])
        lowered = run.lower(leaves, planes)
    lower_s = time.perf_counter() - started_at
    usual = compiler_options(jax.local_devices()[0].platform)
    compiled = lowered.compile(compiler_options={**usual, **options})
    compile_s = time.perf_counter() - started_at - lower_s
    times = report.timed(lambda: compiled(leaves, planes), args.repeat)
    row = {
        "bucket": str(bucket),
        "lower_s": lower_s,
        "compile_s": compile_s,
        **times.row(),
        "tokens_per_s": bucket.tokens / times.median * 1000,
        "temporary_mb": temporary_mb(compiled),
    }
    return row, unit(np.asarray(compiled(leaves, planes), np.float32)[0, : parts_in(bucket)])


def parts_in(bucket: Bucket) -> int:
    """The number of PARTS that the first row of a bucket holds."""
    fitting = np.cumsum(PARTS) <= bucket.length
    return int(min(fitting.sum(), bucket.slots))


def packed_planes(bucket: Bucket) -> np.ndarray:
    """Make a batch with PARTS in the first row and one long sequence in each of the others."""
    planes = np.ones((PackedTokens.PLANES, bucket.rows, bucket.length), np.int32)
    planes[0] = np.random.default_rng(2).integers(5, 1000, (bucket.rows, bucket.length))
    planes[1] = np.arange(bucket.length)
    planes[3] = 0
    planes[:, 0] = 0
    at = 0
    for slot, size in enumerate(PARTS[: parts_in(bucket)], start=1):
        part = slice(at, at + size)
        planes[0, 0, part] = np.random.default_rng(size).integers(5, 1000, size)
        planes[1, 0, part] = np.arange(size)
        planes[2, 0, part] = planes[4, 0, part] = slot
        at += size
    return planes


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors to length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def temporary_mb(compiled: jax.stages.Compiled) -> float | None:
    """The temporary memory of a program in MB; None if the platform does not tell."""
    try:
        memory: Any = compiled.memory_analysis()
        return memory.temp_size_in_bytes / 1e6
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def about(args: Namespace) -> dict[str, Any]:
    """The versions of libraries, and the properties of the device."""
    devices = jax.local_devices()
    names = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    packages = {n: v for n, v in sorted(names.items()) if n and n.lower().startswith(LIBRARIES)}
    return {
        "python": platform.python_version(),
        "packages": packages,
        "cudnn": cudnn_version(),
        "driver": driver(),
        "platform_version": devices[0].client.platform_version.splitlines(),
        "devices": [f"{d.platform} {d.device_kind}" for d in devices],
        "compute_capability": getattr(devices[0], "compute_capability", None),
        "memory": devices[0].memory_stats(),
        "cores": os.cpu_count(),
    }


def cudnn_version() -> int | None:
    """The version of cuDNN, or None."""
    try:
        versions: Any = import_module("jax._src.lib").cuda_versions
        return versions.cudnn_get_version()
    except Exception:  # the module is private, and absent without CUDA
        return None


def driver() -> str | None:
    """What nvidia-smi says of each GPU, or None."""
    query = "--query-gpu=name,driver_version,memory.total,memory.used,clocks.sm"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None


def ceilings(args: Namespace) -> dict[str, Any]:
    """Measure the rates of a large product in each dtype, and of a copy."""
    on_cpu = jax.local_devices()[0].platform == "cpu"
    n = 512 if on_cpu and args.quick else 1024 if on_cpu else 8192
    rows = []
    for dtype, precision in (("bfloat16", None), ("float32", None), ("float32", "highest")):
        a = jax.random.normal(jax.random.key(0), (n, n), jnp.float32).astype(dtype)
        with jax.default_matmul_precision(precision):
            product = jax.jit(partial(jnp.dot, preferred_element_type=jnp.float32))
            ms = report.timed(lambda a=a, f=product: f(a, a), args.repeat).median
        name = f"{dtype} {precision or 'default'}"
        rows.append({"product": name, "ms": ms, "tflop_per_s": 2 * n**3 / ms / 1e9})
    x = jnp.ones(2**20 if on_cpu else 2**29, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    ms = report.timed(lambda: copy(x), args.repeat).median
    return {"size": n, "products": rows, "copy_gb_per_s": 2 * x.nbytes / ms / 1e6}


def latencies(args: Namespace) -> dict[str, Any]:
    """Measure the milliseconds of the steps that every batch needs besides its program."""
    device = jax.local_devices()[0]
    planes = np.ones((PackedTokens.PLANES, 8, 128), np.int32)
    vectors = jax.device_put(np.ones((32, 128, 768), np.float32), device)
    nothing = jax.jit(lambda x: x + 1).lower(vectors[0, 0]).compile()
    small = jax.block_until_ready(vectors[0, 0])
    fresh = jax.jit(lambda x: x * 2)  # a new array each time: JAX keeps the host copy of one
    put = report.timed(lambda: jax.device_put(planes, device), args.repeat)
    call = report.timed(lambda: nothing(small), args.repeat)
    both = report.timed(lambda: np.asarray(fresh(vectors)), args.repeat)
    return {
        "put_20_kb_ms": put.median,
        "smallest_program_ms": call.median,
        "program_and_get_12_mb_ms": both.median,
    }


def tasks(args: Namespace) -> dict[str, Task]:
    """The tasks that the arguments choose, by name, the most important first."""
    every: dict[str, Task] = {"about": about, "ceilings": ceilings, "latencies": latencies}
    every |= {f"attention:{name}": partial(attention_task, name) for name in CANDIDATES}
    every["choice"] = choice_task
    every["model:bfloat16"] = partial(model_task, "bfloat16", {}, False)
    every["model:float32"] = partial(model_task, "float32", {}, True)
    exactly = {"xla_allow_excess_precision": False}
    every["model:bfloat16-no-excess"] = partial(model_task, "bfloat16", exactly, False)
    cublas = {"xla_gpu_enable_triton_gemm": False}
    every["model:bfloat16-no-triton"] = partial(model_task, "bfloat16", cublas, True)
    if not args.quick:
        untuned = {"xla_gpu_autotune_level": 0}
        every["model:bfloat16-no-autotune"] = partial(model_task, "bfloat16", untuned, True)
    return {name: task for name, task in every.items() if name.startswith(args.only or "")}


def attempt(call: Callable[[], dict[str, Any]], label: object = "") -> dict[str, Any]:
    """Call a function and return its row, or a row with the first line of its error."""
    about = {"case": str(label)} if label else {}
    try:
        return {**about, "ok": True, **call()}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {**about, "ok": False, "error": f"{type(error).__name__}: {lines[0]}"[:300]}


def isolated(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """Run a task in a process of its own, which may crash or hang. Returns its result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "task.json"
        command = [sys.executable, "-m", "benchmarks.probe_device", *argv]
        command += ["--only", name, "--task-file", str(out)]
        # no preallocation, so that a task takes only the device memory that it needs
        spawned = dict(os.environ) | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            process = subprocess.run(
                command,
                cwd=report.ROOT,
                env=spawned,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return {"ok": False, "error": f"no end within {TIMEOUT_S} s"}
        if out.is_file():
            return json.loads(out.read_text())
        last = (process.stderr.strip().splitlines() or [""])[-1]
        return {"ok": False, "error": f"crashed with status {process.returncode}: {last}"[:300]}


def tell(results: dict[str, dict[str, Any]]) -> None:
    """Print the results of all tasks as tables."""
    for name in ("about", "ceilings", "latencies", "choice"):
        for key, value in results.get(name, {}).items():
            print(f"{name}: {key}: {value}")
    attentions = [
        {"attention": name.split(":")[1], **case}
        for name, result in results.items()
        if name.startswith("attention:")
        for case in result.get("cases", [result])
    ]
    report.show(attentions, "attention")
    models = [
        {"model": name.split(":")[1], **bucket}
        for name, result in results.items()
        if name.startswith("model:")
        for bucket in result.get("buckets", [result])
    ]
    report.show(models, "models")


def agreements(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the vectors of the same texts between buckets and between tasks. Returns rows."""
    vectors = {
        (name.split(":")[1], bucket): np.array(rows_of_bucket)
        for name, result in results.items()
        for bucket, rows_of_bucket in result.pop("vectors", {}).items()
    }
    rows = []
    for first, a in vectors.items():
        for second, b in vectors.items():
            if first < second and (first[0] == second[0] or first[1] == second[1]):
                shared = min(len(a), len(b))
                rows.append(
                    {
                        "first": " ".join(first),
                        "second": " ".join(second),
                        # a million times (1 - cosine), for vectors of length 1
                        "cosine_ppm": float(np.square(a[:shared] - b[:shared]).sum(1).max() * 5e5),
                        "difference": float(np.abs(a[:shared] - b[:shared]).max()),
                    }
                )
    return rows


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases; tiny on a CPU")
    parser.add_argument("--isolate", action="store_true", help="each task in its own process")
    parser.add_argument("--only", help="tasks whose names begin so, such as attention:cudnn")
    parser.add_argument("--size", help="of the model, as in subject.py; default: bert-base")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--budget-s", type=float, help="default: 330, with --quick 100")
    parser.add_argument("--flash-library", type=Path, help="libdew_flash_attn3.so")
    parser.add_argument("--task-file", type=Path, help="used by --isolate")
    report.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the tasks, and print and write their results; with --task-file, only one task."""
    args = parse(argv)
    if args.task_file is not None:
        (task,) = (task for name, task in tasks(args).items() if name == args.only)
        args.task_file.write_text(json.dumps(attempt(partial(task, args)), default=float))
        return
    results = run_all(args)
    rows = agreements(results)
    tell(results)
    report.show(rows, "agreement of vectors")
    report.finish("probe_device", argv, {"tasks": results, "agreement": rows}, args.out)


def run_all(args: Namespace) -> dict[str, dict[str, Any]]:
    """Run the tasks until the budget is used up. Returns their results by name."""
    started_at = time.monotonic()
    budget_s = args.budget_s or (100 if args.quick else 330)
    results: dict[str, dict[str, Any]] = {}
    for name, task in tasks(args).items():
        elapsed = time.monotonic() - started_at
        if elapsed > budget_s:
            results[name] = {"ok": False, "error": f"left out: {elapsed:.0f} s are gone"}
            continue
        results[name] = (
            isolated(name, child_arguments(args)) if args.isolate else attempt(partial(task, args))
        )
        took = time.monotonic() - started_at - elapsed
        print(f"{elapsed:6.1f} s  {name}: {took:.1f} s", flush=True)
    return results


def child_arguments(args: Namespace) -> list[str]:
    """The arguments of this program that a task in its own process needs too."""
    arguments = ["--repeat", str(args.repeat)]
    arguments += ["--quick"] if args.quick else []
    arguments += ["--size", args.size] if args.size else []
    arguments += ["--flash-library", str(args.flash_library)] if args.flash_library else []
    return arguments


if __name__ == "__main__":
    main()
