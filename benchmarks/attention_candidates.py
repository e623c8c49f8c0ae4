"""Implementations of attention for packed segments, and a trial of one on a case.

It says whether an implementation compiles, runs and agrees with float32, and how long it takes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from jaxembed.engine.bucket import Bucket
from jaxembed.models import attention, kernels
from jaxembed.models.attention import EVERYTHING, AttentionMask

AGREES = 0.02  # largest allowed difference of bfloat16 to float32, for values of about 1


@dataclass(frozen=True)
class Case:
    """A batch for attention: packed, with several segments a row, or padded, with one each."""

    rows: int
    length: int
    heads: int
    width: int
    packed: bool
    groups: int | None = None  # heads of keys and values, if they are fewer
    attention_mask: AttentionMask = EVERYTHING

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
        visible = (distance >= 0) | (not self.attention_mask.causal)
        if self.attention_mask.reach is not None:
            visible &= abs(distance) <= self.attention_mask.reach
        return (of_query == of_key) & visible

    def operands(self, dtype: str) -> list[jax.Array]:
        """Random query, key and value, `[rows, length, heads or groups, width]`."""
        draw = np.random.default_rng(1)
        groups = self.groups or self.heads
        shapes = [(self.rows, self.length, n, self.width) for n in (self.heads, groups, groups)]
        return [jnp.asarray(draw.standard_normal(shape, np.float32), dtype) for shape in shapes]

    def __str__(self) -> str:
        kind = "packed" if self.packed else "padded"
        shape = f"{self.rows}x{self.length} {self.heads}"
        groups = f"/{self.groups}" if self.groups else ""
        causal = " causal" if self.attention_mask.causal else ""
        reach = (
            f" within {self.attention_mask.reach}" if self.attention_mask.reach is not None else ""
        )
        return f"{kind} {shape}{groups}x{self.width}{causal}{reach}"


def our_attend(case: Case) -> Callable:
    """jaxembed's `attend`."""
    segments = jnp.asarray(case.segments)
    return lambda q, k, v: attention.attend(q, k, v, segments, case.attention_mask)


def our_kernel(case: Case, name: str, **blocks: int) -> Callable:
    """A kernel of jaxembed; on other platforms it is interpreted, which only shows that it agrees.

    Raises ValueError if the kernel refuses the case.
    """
    platform = next(platform for platform, names in kernels.KERNELS.items() if name in names)
    kernel = kernels.kernel(kernels.KERNELS[platform][name])
    groups = case.groups or case.heads
    call = kernels.Call(case.heads, groups, case.width, "bfloat16", case.attention_mask)
    if reason := kernel.refuses(call, case.length):
        raise ValueError(reason)
    slots = Bucket(case.rows, case.length).slots
    attend = partial(kernel.attend, attention_mask=case.attention_mask, slots=slots, **blocks)
    if name != "flash":
        attend = partial(attend, interpret=jax.local_devices()[0].platform != platform)
    segments = jnp.asarray(case.segments)
    return lambda q, k, v: attend(q, k, v, segments)


def cudnn_packed(case: Case) -> Callable:
    """cuDNN's attention for packed rows, by lengths and offsets: a private function of JAX.

    Raises ValueError for groups, causal masks and windows.
    """
    if case.groups is not None or case.attention_mask != EVERYTHING:
        raise ValueError("takes whole segments only")
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


# Each candidate makes a function of query, key and value for a case, or raises if it cannot.
CANDIDATES: dict[str, Callable[[Case], Callable]] = {
    "attend": our_attend,
    "triton": partial(our_kernel, name="triton"),
    "flash": partial(our_kernel, name="flash"),  # FlashAttention 3 on Hopper, 2 elsewhere
    "cudnn-packed": cudnn_packed,
    "splash": partial(our_kernel, name="splash"),
    "triton-64x64": partial(our_kernel, name="triton", query_block=64, key_block=64),
    "triton-64x32": partial(our_kernel, name="triton", query_block=64, key_block=32),
    "triton-128x32": partial(our_kernel, name="triton", query_block=128, key_block=32),
    "triton-128x128": partial(our_kernel, name="triton", query_block=128, key_block=128),
}


def cases(on_cpu: bool) -> list[Case]:
    """The cases to try: 16,384 tokens each on an accelerator, and few tokens on a CPU."""
    if on_cpu:
        causal = Case(
            2, 128, 4, 32, packed=True, groups=2, attention_mask=AttentionMask(causal=True)
        )
        return [Case(2, 128, 2, 32, packed=True), Case(2, 128, 2, 32, packed=False), causal]
    return [
        Case(32, 512, 12, 64, packed=True),
        Case(128, 128, 12, 64, packed=True),
        Case(32, 512, 12, 64, packed=False),
        Case(16, 1024, 12, 64, packed=True, attention_mask=AttentionMask(reach=64)),
        Case(32, 512, 16, 128, packed=True, groups=8, attention_mask=AttentionMask(causal=True)),
        Case(32, 512, 12, 32, packed=True),
    ]


def tried(name: str, case: Case, runs: int) -> dict[str, Any]:
    """Compile, check and time a candidate on a case. Returns a row.

    Raises whatever the candidate raises when it is compiled and run.
    """
    try:
        attend = CANDIDATES[name](case)
    except ValueError as error:
        return {"skipped": str(error)}
    operands = case.operands("bfloat16")
    started_at = time.perf_counter()
    compiled = jax.jit(attend).lower(*operands).compile()
    compile_s = time.perf_counter() - started_at
    result = np.asarray(compiled(*operands), np.float32)
    expected = exact(case, operands)
    real = case.segments != 0
    times = report.timed(lambda: compiled(*operands), runs)
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
        "temporary_mb": getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0) / 1e6,
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
