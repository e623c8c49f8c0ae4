"""The native kernels: products and attention against float32, with AMX's tiles and without, and
what keeps a machine from having them."""

import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import AMX, AVX512_BF16, calling
from representatives import each
from test_attention import reference

from jaxembed.models import native
from jaxembed.models.adapters import column_owners
from jaxembed.models.attention import (
    EVERYTHING,
    AttentionMask,
    attend_joint,
    by_native,
    using,
)
from jaxembed.models.layers import ACTIVATIONS, gelu
from jaxembed.models.rope import Rotation

pytestmark = pytest.mark.usefixtures("engines_try_native")

WAYS = (AVX512_BF16, AMX)
ROUNDED = 2.0**-8  # twice what rounding to bfloat16 changes: a sum may round to either side


@pytest.fixture(name="way", scope="module", params=each(WAYS, AVX512_BF16), ids=lambda of: of.name)
def _way(request, native_kernels, tmp_path_factory):
    """Both ways through product.h in bfloat16."""
    with calling(request.param, tmp_path_factory.mktemp("native")) as name:
        yield name


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float32)


def kernel_of(k: int, n: int) -> np.ndarray:
    return rounded(drawn(k, n, seed=1) * np.float32(k**-0.5))


def panels(kernel: np.ndarray) -> np.ndarray:
    return native.packed(kernel.astype(jnp.bfloat16))


def assert_near(got, wanted, dtype: str, atol: float = 2e-5) -> None:
    """Sums of at most 1536 terms of size one over their root, in float32."""
    got = np.asarray(got)
    assert got.dtype == jnp.dtype(dtype)
    rtol = 1e-5 if dtype == "float32" else ROUNDED
    np.testing.assert_allclose(got.astype(np.float32), wanted, rtol=rtol, atol=atol)


# the dtype of x, whether there is a bias, the end, the dtype of the result
VARIANTS = (
    ("float32", True, "linear", "float32"),
    ("float32", False, "gelu", "bfloat16"),
    ("float32", True, "linear", "bfloat16"),
    ("bfloat16", False, "gelu_tanh", "float32"),
    ("bfloat16", True, "gelu", "float32"),
    ("bfloat16", True, "quick_gelu", "bfloat16"),
    ("bfloat16", False, "linear", "bfloat16"),
)
ROWS = (1, 7, 16, 40, 129, 2048)
SIZES = (
    (32, 32), (32, 1536), (64, 64), (64, 96), (96, 32), (96, 384), (384, 64), (384, 1536),
    (1536, 96), (1536, 384),
)  # fmt: skip


@pytest.mark.parametrize(("k", "n"), each(SIZES, (64, 96)))
def test_a_product_is_that_of_the_rounded_operands(way, k, n):
    """Each number of rows at each size, the variants in turn."""
    x, kernel, bias = drawn(max(ROWS), k), kernel_of(k, n), drawn(n, seed=2)
    scheduler = SIZES.index((k, n))
    variants = [VARIANTS[(scheduler + i) % len(VARIANTS)] for i in range(len(ROWS))]

    @jax.jit
    def products(xs, kernel, bias):
        return [
            native.linear(x, kernel, bias if has_bias else None, end, dtype=dtype)
            for x, (_, has_bias, end, dtype) in zip(xs, variants, strict=True)
        ]

    xs = [x[None, :rows].astype(narrow) for rows, (narrow, *_) in zip(ROWS, variants, strict=True)]
    got = products(xs, panels(kernel), bias)
    plain = rounded(x) @ kernel
    for rows, y, (_, has_bias, end, dtype) in zip(ROWS, got, variants, strict=True):
        activation = ACTIVATIONS["identity" if end == "linear" else end]
        assert_near(y[0], activation(jnp.asarray(plain[:rows] + has_bias * bias)), dtype)


@pytest.mark.parametrize(
    ("k", "n"), each([(32, 32), (384, 96), (96, 1536), (1536, 384)], (384, 96))
)
def test_the_norm_of_a_sum_is_that_of_its_parts(way, k, n):
    x, kernel, bias = drawn(max(ROWS), k), kernel_of(k, n), drawn(n, seed=2)
    residual, scale, shift = drawn(max(ROWS), n, seed=3), drawn(n, seed=4), drawn(n, seed=5)

    @jax.jit
    def norms(xs, residuals, kernel, bias, scale, shift):
        return [
            native.linear(
                x, kernel, bias if i % 2 else None, "norm", norm=(residual, scale, shift, 1e-12)
            )
            for i, (x, residual) in enumerate(zip(xs, residuals, strict=True))
        ]

    dtypes = ["bfloat16", "float32", "float32"] * 2
    xs = [x[None, :rows].astype(dtype) for rows, dtype in zip(ROWS, dtypes, strict=True)]
    residuals = [residual[None, :rows] for rows in ROWS]
    got = norms(xs, residuals, panels(kernel), bias, scale, shift)
    for i, (rows, y) in enumerate(zip(ROWS, got, strict=True)):
        total = residual[:rows] + (rounded(x) @ kernel)[:rows] + i % 2 * bias
        centred = total - total.mean(axis=-1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
        assert_near(y[0], normal * scale + shift, "float32")


@pytest.mark.parametrize("activation", each(["gelu", "silu", "gelu_tanh"], "silu"))
@pytest.mark.parametrize(("k", "n"), each([(32, 32), (384, 96), (416, 1536)], (32, 32)))
def test_a_gated_product_is_that_of_its_halves(way, k, n, activation):
    x, kernel, bias = drawn(max(ROWS), k), kernel_of(k, 2 * n), drawn(2 * n, seed=2)

    @jax.jit
    def products(xs, kernel, bias):
        return [
            native.linear(x, kernel, bias if i % 2 else None, f"gated_{activation}", dtype=dtype)
            for i, (x, dtype) in enumerate(zip(xs, ["bfloat16", "float32"] * 3, strict=True))
        ]

    got = products([x[None, :rows] for rows in ROWS], panels(kernel), bias)
    for i, (rows, y) in enumerate(zip(ROWS, got, strict=True)):
        gate, up = np.split((rounded(x) @ kernel)[:rows] + i % 2 * bias, 2, axis=1)
        wanted = np.asarray(ACTIVATIONS[activation](jnp.asarray(gate))) * up
        # the approximations of activations are off by 6e-6 of the gate
        atol = 2e-5 * np.abs(up).max()
        assert_near(y[0], wanted, ["bfloat16", "float32"][i % 2], atol=atol)


def test_the_ends_of_activations(way):
    """What is far below zero vanishes, what is far above stays, NaN is seen."""
    x = np.ones((1, 12, 64), np.float32)
    ends = [-(2.0**66), -8192, -8, -4, -3.25, -0.5, 3.25, 8, 8192, 2.0**66]
    x[0, :, 0] = [*ends, 0, np.nan]
    identity = jnp.asarray(panels(np.eye(64, dtype=np.float32)))
    for name in ("gelu", "silu", "gelu_tanh"):
        y = native.linear(jnp.asarray(x), identity, None, f"gated_{name}")
        assert_activated(y, ACTIVATIONS[name], x[:, :, :32], up=x[:, :, 32:])
    for name in ("gelu", "gelu_tanh", "quick_gelu"):
        y = native.linear(jnp.asarray(x), identity, None, name)
        assert_activated(y, ACTIVATIONS[name], x, up=1)


def assert_activated(got, activation, x: np.ndarray, up) -> None:
    assert np.isnan(np.asarray(got)[0, -1]).any()
    off = np.abs(np.asarray(got) - np.asarray(activation(jnp.asarray(x))) * up)[0, :-1]
    # the approximations are off by 6e-6 of what is multiplied with them
    np.testing.assert_array_less(off, 6e-6 * np.abs(x * up)[0, :-1] + 1e-9)


def test_rows_of_several_sequences_are_multiplied_one_by_one(way):
    """And NaN or a huge number in one row stays there."""
    x, kernel = drawn(3, 43, 96), kernel_of(96, 64)
    run = jax.jit(lambda x: native.linear(x, jnp.asarray(panels(kernel)), None))
    clean = np.asarray(run(x))
    assert clean.shape == (3, 43, 64)
    x[1, 5], x[2, 42] = np.nan, 1e30
    poisoned = np.asarray(run(x))
    assert np.isnan(poisoned[1, 5]).all()
    others = np.ones((3, 43), bool)
    others[1, 5] = others[2, 42] = False
    np.testing.assert_array_equal(poisoned[others], clean[others])


@pytest.mark.parametrize("end", each(native.EPILOGUES, "norm"))
@pytest.mark.parametrize("is_quantized", [False, True])
def test_skipped_padding_is_zeros_and_changes_no_other_bit(way, end, is_quantized):
    """Wherever it lies. With adapters, groups of other rows add in another order."""
    k, n, shape = 128, 96, (3, 176)
    columns = 2 * n if end.startswith("gated") else n
    kernel, draw = kernel_of(k, columns), np.random.default_rng(6)
    weight: Any = native.packed_quantized(kernel, 2, "bfloat16") if is_quantized else panels(kernel)
    numbers = draw.integers(0, 3, shape).astype(np.int32)
    adapters = adapters_of(k, columns, numbers, (8, 16))
    adapters = adapters._replace(down=adapters.down / k, up=adapters.up / 4)
    x, residual = drawn(*shape, k), drawn(*shape, n, seed=3)
    rest = (*map(jnp.asarray, drawn(2, n, seed=4)), 1e-6)

    @jax.jit
    def run(x, residual, segments, weight, adapters):
        norm = (residual, *rest) if end == "norm" else None
        whole, got = [], []
        for one in (None, adapters):
            whole.append(native.linear(x, weight, None, end, norm=norm, adapters=one))
            with native.skipping_padding(segments):
                got.append(native.linear(x, weight, None, end, norm=norm, adapters=one))
        return whole, got

    for share in (0.0, 0.03, 0.3, 0.9, 1.0):
        segments = (draw.random(shape) < share).astype(np.int32)
        inputs = [np.where(segments[..., None] != 0, y, np.float32("nan")) for y in (x, residual)]
        whole, got = run(*inputs, segments, weight, adapters)
        for y in map(np.asarray, got):
            np.testing.assert_array_equal(y[segments == 0], 0.0)
        real = segments != 0
        np.testing.assert_array_equal(np.asarray(got[0])[real], np.asarray(whole[0])[real])
        assert_near(got[1][real], np.asarray(whole[1])[real], "float32", atol=1e-4)


@pytest.mark.parametrize("end", each(["gelu", "gated_silu"], "gelu"))
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("rows", [3, 40])  # with few rows threads share columns
def test_padding_in_half_a_layer_is_zeros_and_changes_no_other_bit(way, end, is_quantized, rows):
    """Wherever it lies, and however threads divide what is left."""
    dim, inner, shape = 128, 256, (rows, 16)
    draw = np.random.default_rng(7)

    def product_of(k: int, n: int, has_norm: bool = True):
        kernel = kernel_of(k, n)
        weight: Any = (
            native.packed_quantized(kernel, 2, "bfloat16") if is_quantized else panels(kernel)
        )
        norm = (1 + drawn(n, seed=4) / 8, drawn(n, seed=5)) if has_norm else ()
        return (weight, drawn(n, seed=2), *norm)

    up = product_of(dim, 2 * inner if end.startswith("gated") else inner, has_norm=False)
    weights = product_of(dim, dim), up, product_of(inner, dim)

    @jax.jit
    def run(x, segments, weights):
        whole = native.mlp(x.astype(jnp.bfloat16), x, *weights, 1e-6, end)
        with native.skipping_padding(segments):
            return whole, native.mlp(x.astype(jnp.bfloat16), x, *weights, 1e-6, end)

    for share in (0.0, 0.03, 0.3, 0.9, 1.0):
        segments = (draw.random(shape) < share).astype(np.int32)
        real = segments != 0
        x = np.where(real[..., None], drawn(*shape, dim), np.float32("nan"))
        whole, got = map(np.asarray, run(x, segments, weights))
        np.testing.assert_array_equal(got[~real], 0.0)
        np.testing.assert_array_equal(got[real], whole[real])


def test_only_kernels_of_whole_panels_are_packable():
    kernel = "tower.layers.0.mlp.up.kernel"
    assert native.is_packable(kernel, (64, 96), "bfloat16")
    for name, shape, dtype in (
        (kernel, (64, 96), "float16"),
        (kernel, (48, 96), "bfloat16"),
        (kernel, (64, 80), "bfloat16"),
        ("tower.embeddings.word.embedding", (64, 96), "bfloat16"),
        ("tower.layers.0.mlp.up.bias", (64,), "bfloat16"),
    ):
        assert not native.is_packable(name, shape, dtype)
    packed = jnp.zeros((4, 1, 2, 16, 16, 2), jnp.bfloat16)
    assert native.supports_gated(packed, "silu")
    for other, activation in (
        (packed[:3], "silu"),
        (packed, "relu"),
        (jnp.zeros((32, 128)), "silu"),
    ):
        assert not native.supports_gated(other, activation)


def small_integers(*shape: int, seed: int) -> np.ndarray:
    """Sums of their products are integers, exact in float32, and below 256 in bfloat16 too."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


def adapters_of(k: int, n: int, numbers: np.ndarray, ranks) -> native.AdapterOperands:
    owners = np.array(column_owners(ranks), np.int32)
    down, up = small_integers(k, len(owners), seed=5), small_integers(len(owners), n, seed=6)
    if n > 64:  # two weights side by side, the first of which is changed by the first columns
        up[: len(owners) // 2, 64:] = up[len(owners) // 2 :, :64] = 0
    return native.AdapterOperands(*map(jnp.asarray, (numbers, panels(down), panels(up), owners)))


def unpacked(weight) -> np.ndarray:
    columns, steps = weight.shape[:2]
    tiles = np.asarray(weight, np.float32).transpose(1, 3, 5, 0, 2, 4)
    return tiles.reshape(steps * 32, columns * 32)


def added(x: np.ndarray, adapters: native.AdapterOperands) -> np.ndarray:
    numbers, owners = np.asarray(adapters.numbers), np.asarray(adapters.owners)
    between = np.where(numbers[..., None] == owners, x @ unpacked(adapters.down), np.float32(0))
    return between @ unpacked(adapters.up)


ADAPTED = (
    *((384, 64, ranks) for ranks in ((4,), (8, 8), (3, 1, 5), (24, 24), (1, 70, 2))),
    (32, 96, (16, 16, 16, 16)),
    (1536, 32, (4, 4, 4, 4, 4)),
    (1536, 32, (1, 70, 2)),
)


@pytest.mark.parametrize(("k", "n", "ranks"), each(ADAPTED, (384, 64, (3, 1, 5))))
def test_each_row_gets_the_product_of_its_own_adapter(way, k, n, ranks):
    """To the bit, whatever adapters the rows beside it have."""
    x, kernel = small_integers(max(ROWS), k, seed=0), small_integers(k, n, seed=1)
    draw, weight = np.random.default_rng(2), jnp.asarray(panels(kernel))

    @jax.jit
    def products(cases):
        return [native.linear(x, weight, None, adapters=adapters) for x, adapters in cases]

    cases = []
    for rows in ROWS:
        mixed = draw.integers(0, len(ranks) + 1, rows).astype(np.int32)
        runs = np.repeat(mixed, 13)[:rows]
        for numbers in (mixed, runs, np.full(rows, len(ranks), np.int32)):
            cases.append((x[None, :rows], adapters_of(k, n, numbers[None], ranks)))
    for (x, adapters), got in zip(cases, products(cases), strict=True):
        np.testing.assert_array_equal(np.asarray(got), x @ kernel + added(x, adapters))


@pytest.mark.parametrize("rows", each(ROWS, 40))
def test_adapters_are_added_before_what_follows_a_product(way, rows):
    k, n = 64, 96
    x, residual = small_integers(1, rows, k, seed=0), drawn(1, rows, n, seed=3)
    numbers = (np.arange(rows, dtype=np.int32) // 5 % 3)[None]
    kernel, bias, scale, shift = (small_integers(*of, seed=8) for of in ((k, n), (n,), (n,), (n,)))
    halves, of_halves = small_integers(k, 2 * n, seed=9), drawn(2 * n, seed=4)
    one, two = (adapters_of(k, width, numbers, (8, 3)) for width in (n, 2 * n))
    plain = x @ kernel + bias + added(x, one)

    @jax.jit
    def run(x, kernel, bias, residual, scale, shift, halves, of_halves, one, two):
        return (
            native.linear(x, kernel, bias, "gelu", adapters=one),
            native.linear(
                x, kernel, bias, "norm", norm=(residual, scale, shift, 1e-6), adapters=one
            ),
            native.linear(x, halves, of_halves, "gated_silu", adapters=two),
        )

    weights = panels(kernel), bias, residual, scale, shift, panels(halves), of_halves
    active, normed, gated = run(x, *weights, one, two)
    assert_near(active, gelu(jnp.asarray(plain)), "float32", atol=1e-4)
    total = residual + plain
    centred = total - total.mean(axis=-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    assert_near(normed, normal * scale + shift, "float32")
    gate, up = np.split(x @ halves + of_halves + added(x, two), 2, axis=-1)
    # the approximation of the activation is off by 6e-6 of the gate
    atol = 6e-6 * np.abs(gate).max() * np.abs(up).max()
    assert_near(gated, np.asarray(jax.nn.silu(gate)) * up, "float32", atol=atol)


@dataclass(frozen=True)
class Case:
    length: int
    heads: int
    groups: int
    width: int
    causal: bool = False
    reach: int | None = None
    rows: int = 3

    @property
    def attention_mask(self) -> AttentionMask:
        return AttentionMask(self.causal, self.reach)


CASES = (
    Case(16, 2, 2, 32), Case(32, 2, 2, 64, reach=3, rows=8), Case(48, 4, 1, 64, reach=1),
    Case(64, 2, 2, 96, causal=True, reach=2), Case(80, 2, 1, 128, reach=7),
    Case(112, 3, 3, 32, reach=16), Case(128, 4, 2, 64, causal=True, reach=15),
    Case(144, 2, 2, 32, reach=31), Case(256, 2, 2, 128, causal=True, reach=33),
    Case(272, 2, 1, 96, causal=True, reach=64), Case(528, 2, 2, 32),
    Case(528, 2, 1, 64, reach=70),
)  # fmt: skip


@cache
def operands(case: Case) -> tuple[np.ndarray, ...]:
    """Scores of size four, so that a key too many or too few is seen wherever it lies."""
    shape = (case.rows, case.length)
    query = rounded(4 * drawn(*shape, case.heads, case.width))
    key = rounded(drawn(*shape, case.groups, case.width, seed=1))
    return query, key, rounded(drawn(*shape, case.groups, case.width, seed=2))


@cache
def natively(case: Case, way: str):
    """Attention and, where keys have as many heads, joint attention. `way` is for the cache."""

    @jax.jit
    def run(query, key, value, joint, segments):
        mixed = [native.attention(query, key, value, segments, case.causal, case.reach)]
        if joint is not None:
            mixed.append(native.joint_attention(joint, segments, case.causal, case.reach))
        return mixed

    def joined(*three):
        narrow = [x.astype(jnp.bfloat16) for x in three[:3]]
        joint = np.stack(narrow, axis=2) if case.heads == case.groups else None
        return run(*narrow, joint, three[3])

    return joined


def assert_attends(case: Case, way: str, segments: np.ndarray) -> None:
    padding = (segments == 0)[..., None, None]
    poisoned = [np.where(padding, np.float32(np.nan), x) for x in operands(case)]
    wanted = reference(*poisoned, segments, case.attention_mask)
    for mixed in natively(case, way)(*poisoned, segments):
        assert_mixed(mixed, wanted, segments)


def assert_mixed(mixed, wanted: np.ndarray, segments: np.ndarray) -> None:
    assert mixed.dtype == jnp.bfloat16
    got, real = np.asarray(mixed, np.float32), segments != 0
    np.testing.assert_array_equal(got[~real], 0.0)
    # weights and the result are rounded to bfloat16, values are of size four at most
    np.testing.assert_allclose(got[real], wanted[real], rtol=ROUNDED, atol=2 * ROUNDED)


def laid_out(rows: list[list[tuple[int, int]]], length: int) -> np.ndarray:
    """Segments by so much padding before each and their length; what does not fit is cut."""
    segments = np.zeros((len(rows), length), np.int32)
    for row, layout in zip(segments, rows, strict=True):
        at = 0
        for slot, (gap, size) in enumerate(layout, start=1):
            row[at + gap : at + gap + size] = slot
            at += gap + size
    return segments


@st.composite
def layouts(draw, case: Case) -> np.ndarray:
    size = st.one_of(st.just(1), st.integers(1, 40), st.integers(1, case.length))
    gap = st.sampled_from([0, 0, 0, 1, 2, 15, 33])
    row = st.lists(st.tuples(gap, size), max_size=8)
    return laid_out([draw(row) for _ in range(case.rows)], case.length)


@pytest.mark.parametrize("case", each(CASES, CASES[2], CASES[7]), ids=str)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_each_segment_attends_to_itself_wherever_it_lies(way, case, data):
    assert_attends(case, way, data.draw(layouts(case)))
    rest = [[(0, 5), (0, 7), (0, 3)], [(1, 9)]] * case.rows
    rows = [[(0, case.length)], [], [(0, 1)], [(case.length - 1, 1)], *rest][: case.rows]
    assert_attends(case, way, laid_out(rows, case.length))


@pytest.mark.parametrize("causal", each([False, True], True))
def test_every_reach(way, causal):
    case = Case(80, 1, 1, 32)
    segments = laid_out([[(0, 80)], [(3, 37), (0, 40)], [(0, 79)]], 80)

    @jax.jit
    def attends(*four):
        return [native.attention(*four, causal, reach) for reach in range(71)]

    narrow = [x.astype(jnp.bfloat16) for x in operands(case)]
    for reach, got in enumerate(attends(*narrow, segments)):
        wanted = reference(*operands(case), segments, AttentionMask(causal, reach))
        assert_mixed(got, wanted, segments)


PLACED_CASES = (
    Case(16, 2, 2, 32, rows=9),
    Case(80, 4, 4, 64, causal=True),
    Case(112, 4, 2, 32, reach=9),
    Case(272, 3, 1, 256),
)


def layout_of(case: Case) -> np.ndarray:
    rest = [(0, case.length // 3), (1, case.length // 2)]
    rows = [[(0, case.length)], rest, [(3, 10), (0, 1)]] * 3
    return laid_out(rows[: case.rows], case.length)


def with_nan(segments: np.ndarray, *operands: np.ndarray) -> list[np.ndarray]:
    """The operands of a case rounded, with NaN in the padding."""
    padding = (segments == 0)[..., None, None]
    return [np.where(padding, np.nan, x).astype(jnp.bfloat16) for x in operands]


@pytest.mark.parametrize("cap", each([None, 2.5], 2.5))
@pytest.mark.parametrize("has_bias", each([False, True], True))
@pytest.mark.parametrize("case", each(PLACED_CASES, PLACED_CASES[1]), ids=str)
def test_a_bias_by_distance_and_a_cap_change_scores(way, case, has_bias, cap):
    """A bias of size three, so that a head or a distance taken for another is seen."""
    segments, attention_mask = layout_of(case), AttentionMask(case.causal, case.reach, cap)
    drawn_bias = jnp.asarray(3 * drawn(case.heads, 2 * case.length - 1, seed=4))
    bias = drawn_bias if has_bias else None
    mask = case.causal, case.reach, cap
    poisoned = with_nan(segments, *operands(case))
    mixed = [jax.jit(lambda *x: native.attention(*x, *mask, bias))(*poisoned, segments)]
    if case.heads == case.groups:
        joint = np.stack(poisoned, axis=2)
        mixed.append(jax.jit(lambda *x: native.joint_attention(*x, *mask, bias))(joint, segments))
    wanted = reference(*operands(case), segments, attention_mask, bias)
    for one in mixed:
        assert_mixed(one, wanted, segments)


@pytest.mark.parametrize(
    "case", each([one for one in PLACED_CASES if one.heads == one.groups], PLACED_CASES[1]), ids=str
)
def test_heads_are_rotated_before_their_scores(way, case):
    segments, attention_mask = layout_of(case), case.attention_mask
    turns = drawn(*segments.shape, case.width // 2, seed=5)
    rotation = Rotation(jnp.cos(turns), jnp.sin(turns))
    query, key, value = operands(case)
    wanted = reference(
        *(rounded(np.asarray(rotation(x))) for x in (query, key)), value, segments, attention_mask
    )
    joint = np.stack(with_nan(segments, query, key, value), axis=2)
    mask, angles = (case.causal, case.reach), (rotation.cos, rotation.sin)
    call = jax.jit(lambda *x: native.joint_attention(*x, *mask, angles=angles))
    got, real = np.asarray(call(joint, segments), np.float32), segments != 0
    np.testing.assert_array_equal(got[~real], 0.0)
    # a rotated head may round to either side
    np.testing.assert_allclose(got[real], wanted[real], rtol=ROUNDED, atol=8 * ROUNDED)


@pytest.mark.parametrize("huge", [1e15, 1e30, 3e38])
@pytest.mark.parametrize(
    "case", each([Case(48, 2, 2, 32), Case(272, 4, 2, 64, reach=40)], Case(48, 2, 2, 32)), ids=str
)
def test_huge_neighbours_in_the_row_change_nothing(way, case, huge):
    """Scores of theirs overflow to infinity, and a weight of zero times what is finite is zero."""
    segments = laid_out([[(0, 20), (0, 15)], [(2, 7), (0, 30)], [(5, 40)]], case.length)
    clean = operands(case)
    first = (segments == 1)[..., None, None]
    poisoned = [np.where(first, x, np.copysign(np.float32(huge), x)) for x in clean]
    for one, other in zip(
        natively(case, way)(*clean, segments), natively(case, way)(*poisoned, segments), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(other)[segments == 1], one[segments == 1])


@pytest.mark.parametrize(
    ("length", "width", "dtype", "taken", "is_near"),
    [
        (32, 32, "bfloat16", True, True),
        (24, 32, "bfloat16", False, True),
        (32, 48, "bfloat16", False, True),
        (32, 16, "bfloat16", False, False),
        (32, 32, "float32", False, False),
    ],
)
def test_attention_is_native_only_where_they_take_it(
    native_kernels, length, width, dtype, taken, is_near
):
    segments = jnp.asarray(laid_out([[(0, 10), (0, 3)]], 32)[:, :length])
    joint = jnp.asarray(drawn(1, length, 3, 2, width), dtype)
    three = [joint[:, :, i] for i in range(3)]
    assert "jaxembed" not in str(jax.make_jaxpr(attend_joint)(joint, segments))
    with using(by_native):
        text = str(jax.make_jaxpr(lambda *x: attend_joint(*x))(joint, segments))
    assert ("jaxembed_joint_attention" in text) == taken
    text = str(jax.make_jaxpr(lambda *x: by_native(*x, EVERYTHING))(*three, segments))
    assert ("jaxembed_attention" in text) == is_near


@pytest.mark.parametrize(
    ("rows", "length", "dim", "heads"),
    each(
        [
            (1, 16, 384, 12),  # threads share the columns of `mlp`
            *[(3, 16, 64, 2), (9, 16, 96, 3), (1, 64, 96, 1), (5, 112, 64, 2), (2, 528, 384, 12)],
        ],
        (1, 16, 384, 12),
        (9, 16, 96, 3),
    ),
)
@pytest.mark.parametrize("end", each(["gelu", "quick_gelu", "gated_silu"], "gated_silu"))
@pytest.mark.parametrize("adapted", each(["", "qkv out up down", "down"], "qkv out up down"))
def test_half_a_layer_in_one_call_equals_its_parts(way, rows, length, dim, heads, end, adapted):
    """`linear` and `joint_attention`, of which the other tests say what they are."""
    width, shape = 4 * dim, (rows, length, dim)
    hidden = drawn(*shape, seed=9)
    layout = [[(0, length // 2), (1, length // 2 - 1)], [], [(0, length)], [(2, 3), (0, 1)]]
    segments = laid_out((layout * 3)[:rows], length)
    hidden[segments == 0] = np.nan

    def linear_of(k: int, n: int, seed: int):
        return panels(kernel_of(k, n)), drawn(n, seed=seed)

    def norm_of(seed: int):
        return 1 + drawn(dim, seed=seed) / 8, drawn(dim, seed=seed + 1)

    qkv = linear_of(dim, 3 * dim, 2)
    out = (*linear_of(dim, dim, 3), *norm_of(4))
    up = linear_of(dim, 2 * width if end.startswith("gated") else width, 6)
    down = (*linear_of(width, dim, 7), *norm_of(8))

    numbers = (np.arange(rows * length, dtype=np.int32) // 11 % 3).reshape(rows, length)
    wholes = {"qkv": qkv, "out": out, "up": up, "down": down}
    adapters: dict = {}
    for name in adapted.split():
        k, n = unpacked(wholes[name][0]).shape
        one = adapters_of(k, n, numbers, (8, 16))
        adapters[name] = one._replace(down=one.down / k, up=one.up / 4)
    of_mlp = {name: one for name, one in adapters.items() if name != "qkv"}

    places: dict = {}
    if end.startswith("gated"):
        turns = drawn(rows, length, dim // heads // 2, seed=10)
        places = {
            "distance_bias": jnp.asarray(drawn(heads, 2 * length - 1, seed=11)),
            "angles": (jnp.cos(turns), jnp.sin(turns)),
        }
        mask = (True, length // 2, 5.0)
    else:
        mask = (False, None, None)

    @jax.jit
    def in_one(hidden, segments, qkv, out, up, down):
        mixed = native.self_attention(
            hidden, *qkv, segments, heads, *mask, **places, adapters=adapters.get("qkv")
        )
        with native.skipping_padding(segments):
            return mixed, native.mlp(mixed, hidden, out, up, down, 1e-6, end, of_mlp)

    @jax.jit
    def in_parts(hidden, segments, qkv, out, up, down):
        joint = native.linear(hidden, *qkv, dtype="bfloat16", adapters=adapters.get("qkv"))
        joint = joint.reshape(rows, length, 3, heads, dim // heads)
        mixed = native.joint_attention(joint, segments, *mask, **places).reshape(shape)
        of_out, of_up, of_down = (adapters.get(name) for name in ("out", "up", "down"))
        norm = (hidden, *out[2:], 1e-6)
        hidden = native.linear(mixed, *out[:2], "norm", norm=norm, adapters=of_out)
        inner = native.linear(hidden, *up, end, dtype="bfloat16", adapters=of_up)
        norm = (hidden, *down[2:], 1e-6)
        return mixed, native.linear(inner, *down[:2], "norm", norm=norm, adapters=of_down)

    operands = (hidden, segments, qkv, out, up, down)
    real = segments != 0
    for got, wanted in zip(in_one(*operands), in_parts(*operands), strict=True):
        got, wanted = (np.asarray(y, np.float32) for y in (got, wanted))
        # another order of sums may round to another bfloat16 in between
        np.testing.assert_allclose(got[real], wanted[real], rtol=ROUNDED, atol=4 * ROUNDED)
        np.testing.assert_array_equal(got[~real], 0.0)


def test_a_layer_is_one_of_the_kernels_only_where_they_take_it():
    packed, plain = jnp.zeros((1, 1, 2, 16, 16, 2), jnp.bfloat16), jnp.zeros((32, 32))
    attention = native.supports_self_attention
    assert native.supports_mlp(packed, packed)
    assert not native.supports_mlp(packed, plain)
    assert attention(jnp.zeros((3, 16, 64)), 2, packed)
    assert attention(jnp.zeros((1, 8192, 64)), 2, packed)
    assert not attention(jnp.zeros((1, 8208, 64)), 2, packed)  # more than a core's cache holds
    assert not attention(jnp.zeros((3, 16, 64)), 2, plain)
    assert not attention(jnp.zeros((3, 24, 64)), 2, packed)
    assert not attention(jnp.zeros((3, 16, 64)), 4, packed)


def test_programs_that_run_at_once_give_the_same_bits(way):
    """What is shared out among threads, and what one thread does, in eight programs at a time."""
    case = Case(80, 4, 2, 32, rows=9)
    segments = laid_out([[(0, 33), (1, 40)], [(0, 80)], [(4, 9)]] * 3, case.length)

    @jax.jit
    def layer(x, residual, up, down, norm):
        inner = native.linear(x, up, None, "gelu", dtype="bfloat16")
        y = native.linear(inner, down, norm, "norm", norm=(residual, norm, norm, 1e-6))
        mixed = y.astype(jnp.bfloat16)
        square, wide = down[:, :2], jnp.zeros(1536, jnp.float32)
        behind = native.mlp(
            mixed, y, (square, norm, norm, norm), (up, wide), (down, norm, norm, norm), 1e-6
        )
        return y, behind

    up, down, norm = panels(kernel_of(64, 1536)), panels(kernel_of(1536, 64)), drawn(64)
    calls = [(natively(case, way), (*operands(case), segments))]
    for rows in (1, 32, 40, 129, 700):  # few rows are shared out by columns
        x = drawn(1, rows, 64)
        calls.append((layer, (x, x, up, down, norm)))
    wanted = [jax.tree.map(np.asarray, run(*given)) for run, given in calls]

    def keep_running(worker: int) -> None:
        for i in range(worker, worker + 10 * len(calls)):
            run, given = calls[i % len(calls)]
            jax.tree.map(np.testing.assert_array_equal, run(*given), wanted[i % len(calls)])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(keep_running, worker) for worker in range(8)]:
            done.result()


CPU_FLAGS = " ".join(AVX512_BF16.cpu_flags)


@pytest.fixture(name="fresh")
def _fresh(monkeypatch, tmp_path) -> Path:
    """A process that has loaded nothing, of a source checkout without built libraries, on a CPU
    with AVX512_BF16; and its cache directory."""
    cpu = tmp_path / "cpuinfo"
    cpu.write_text(f"model name\t: some\nflags\t\t: fpu {CPU_FLAGS}\n")
    monkeypatch.setattr(native.library, "CPU", cpu)
    monkeypatch.setattr(native.library, "_libraries", {})
    monkeypatch.setattr(native.compiler, "LIBRARIES", tmp_path / "libs")
    return tmp_path / "cache"


@pytest.fixture(name="with_amx")
def _with_amx(fresh):
    """The same where the CPU has AMX too."""
    native.library.CPU.write_text(f"flags\t\t: {CPU_FLAGS} amx_tile amx_bf16 amx_int8\n")


@pytest.fixture(name="compiler")
def _compiler(monkeypatch, tmp_path):
    """Let the compiler be a shell script, which finds where it shall write in `$out`, the digest of
    the sources as an option in `$digest`, and whether it is to use AMX in `$amx`."""
    path = tmp_path / "compiler"
    start = """#!/bin/sh
amx=no
for each; do
  case "$each" in -mamx-bf16) amx=yes ;; -DJAXEMBED_SOURCE=*) digest="$each" ;; esac
  [ "$before" = -o ] && out="$each"
  before="$each"
done
echo partly > "$out"
"""

    def write(script: str) -> None:
        path.write_text(f"{start}{script}\n")
        path.chmod(0o700)
        monkeypatch.setattr(native.compiler, "COMPILERS", (str(path),))

    return write


@pytest.fixture(name="instead")
def _instead(compiler, tmp_path):
    """Let the compiler make a library of another source, without AMX of `without_amx` if given."""
    usual = next(filter(None, map(shutil.which, native.compiler.COMPILERS)), None)
    if usual is None:
        pytest.skip("there is no C compiler")

    def write(source: str, without_amx: str | None = None) -> None:
        (tmp_path / "yes.c").write_text(source)
        (tmp_path / "no.c").write_text(without_amx or source)
        compiler(f'exec {usual} -shared -fPIC "$digest" "{tmp_path}/$amx.c" -o "$out"')

    return write


@pytest.fixture(name="no_calls")
def _no_calls(monkeypatch) -> None:
    """Let nothing be registered: other tests of this process have done so."""
    monkeypatch.setattr(native.library, "CALLS", ())


def assert_unavailable(cache_dir: Path, reason: str) -> None:
    with pytest.raises(native.NativeUnavailable, match=reason) as caught:
        native.load_library(cache_dir, "bfloat16")
    assert "\n" not in str(caught.value)


def used() -> str:
    return native.library._libraries["bfloat16"][1].name


GOOD = """
int jaxembed_check(void) { return 0; }
int jaxembed_prepare(void) { return 0; }
const int jaxembed_ffi_major = 0, jaxembed_ffi_minor = 0;
const char jaxembed_source[] = JAXEMBED_SOURCE;
"""


def test_nothing_is_kept_of_a_compiler_that_fails(fresh, compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(native.compiler, "COMPILE_S", 60.0)
    for script, reason in (
        (
            "echo note >&2; echo 'native.c:3:1: error: no such thing' >&2; echo end >&2; exit 3",
            r"compiler exited with 3: native\.c:3:1: error: no such thing$",
        ),
        ("exit 1", "compiler exited with 1: nothing$"),
        ("printf 'gr\\366sser' >&2; exit 1", "exited with 1: "),  # no UTF-8
        ("", "does not run on this machine: exit status 1"),
    ):
        compiler(script)
        assert_unavailable(fresh, reason)
        assert not list(fresh.iterdir())
    monkeypatch.setattr(native.compiler, "COMPILE_S", 0.2)
    compiler("exec tail -f /dev/null")
    assert_unavailable(fresh, "compiler took more than 0 s")
    (tmp_path / "compiler").write_text("#!/no/such/shell\n")
    assert_unavailable(fresh, "No such file")
    monkeypatch.setattr(native.compiler, "COMPILERS", ("no-such-cc",))
    assert_unavailable(fresh, "there is no C compiler: install gcc or clang")
    monkeypatch.setattr(native.compiler, "SOURCES", tmp_path)
    assert_unavailable(fresh, "cannot read .*native.c: No such file")


FAULTY = {
    "crashes": ("int jaxembed_check(void) { __builtin_trap(); }", "does not run .* status -"),
    "computes wrongly": ("int jaxembed_check(void) { return 4; }", "wrong numbers"),
    "may not use AMX": ("int jaxembed_check(void) { return 2; }", "not let this process use AMX"),
    "may not in this process": (
        GOOD.replace("prepare(void) { return 0", "prepare(void) { return 1"),
        "does not let this process use AMX",
    ),
    "has no memory": ("int jaxembed_check(void) { return 3; }", "no memory"),
    "is something else": ("int x;", "does not run on this machine: exit status 1"),
    "is newer than jaxlib": (
        GOOD.replace("ffi_minor = 0", "ffi_minor = 999"),
        r"built for XLA FFI 0\.999, but the installed jaxlib has \d+\.\d+: upgrade",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_library_that_fails_its_check_is_not_kept(fresh, instead, fault):
    source, reason = FAULTY[fault]
    instead(source)
    assert_unavailable(fresh, reason)
    may_serve_later = fault in ("may not in this process", "is newer than jaxlib")
    assert bool(list(fresh.iterdir())) == may_serve_later


def test_what_others_could_have_changed_is_refused(fresh, instead, tmp_path):
    instead(GOOD)
    before = os.umask(0)
    try:
        library = native.library._compiled(AVX512_BF16, fresh)
    finally:
        os.umask(before)
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    library.chmod(0o702)
    assert_unavailable(fresh, "mode 0702: others can change what would run here; remove it")
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    assert_unavailable(fresh, "is a link or not a regular file; remove it")
    fresh.chmod(0o770)
    assert_unavailable(fresh, "cache directory .* mode 0770, and others can write to it")


def test_a_library_that_xla_does_not_take_is_refused(fresh, instead, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("FFI handler registration failed: version")

    instead(GOOD + "void jaxembed_linear(void) {}")
    monkeypatch.setattr(native.library, "CALLS", ("linear",))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    assert_unavailable(fresh, "jaxlib refuses the native kernels: FFI handler registration")


@pytest.mark.usefixtures("no_calls")
def test_a_relative_cache_is_made_and_nothing_beside_it_runs(fresh, instead, monkeypatch, tmp_path):
    instead(GOOD)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for module in ("ctypes", "numpy", "jaxembed", "sitecustomize", "usercustomize"):
        Path(f"{module}.py").write_text(f"open({module!r}, 'w'); import os; os._exit(0)\n")
    monkeypatch.setenv("PYTHONPATH", ".")
    native.load_library(Path("cache"), "bfloat16")
    assert len(list((elsewhere / "cache").iterdir())) == 1
    assert [path.name for path in elsewhere.iterdir() if path.suffix != ".py"] == ["cache"]


@pytest.mark.usefixtures("with_amx", "no_calls")
@pytest.mark.parametrize("fault", ["may not use AMX", "crashes", "may not in this process"])
def test_amx_that_cannot_be_used_leaves_avx512_bf16(fresh, instead, fault):
    instead(FAULTY[fault][0], without_amx=GOOD)
    native.load_library(fresh, "bfloat16")
    assert used() == "avx512_bf16"
    assert native.source_digest("bfloat16") == native.compiler.digest(AVX512_BF16)


@pytest.mark.usefixtures("with_amx")
def test_a_reason_for_each_instruction_set_is_told(fresh, instead):
    instead(FAULTY["may not use AMX"][0], without_amx=FAULTY["computes wrongly"][0])
    assert_unavailable(fresh, "not let this process use AMX; .* wrong numbers")


def test_a_kept_library_that_cannot_be_loaded(fresh, instead):
    instead(GOOD)
    library = native.library._compiled(AVX512_BF16, fresh)
    library.write_text("junk")
    assert_unavailable(fresh, "does not run on this machine: exit status 1")
    assert not library.exists()  # the next start makes it anew


def test_a_cache_directory_that_cannot_be_made(fresh, instead, tmp_path):
    instead(GOOD)
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o600)
    assert_unavailable(tmp_path / "file", "file.* Not a directory")
    assert_unavailable(tmp_path / "file" / "below", "below.* Not a directory")
    assert_unavailable(Path("/proc/no-such-place"), "cannot compile in /proc/no-such-place: ")


def test_a_cpu_without_all_that_the_compiler_may_use(fresh):
    """As in a virtual machine that hides some of it."""
    needed = AVX512_BF16.cpu_flags
    for flags in ({"fpu", "avx512f"}, *(needed - {one} for one in ("avx512vl", "fma", "movbe"))):
        native.library.CPU.write_text(f"flags\t\t: {' '.join(flags)}\n")
        assert_unavailable(fresh, "no AVX512_BF16")
    native.library.CPU.unlink()
    assert_unavailable(fresh, "no AVX512_BF16, or the system does not say so")


@pytest.mark.parametrize(
    ("features", "builds"),
    [
        # the lines of a Neoverse V1, a Cortex-A72 and a machine that lists nothing
        (
            "fp asimd evtstrm aes crc32 atomics asimdrdm asimddp i8mm bf16",
            {"arm_bf16", "neon_float32"},
        ),
        ("fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid", {"neon_float32"}),
        ("", set()),
    ],
)
def test_an_arm_cpu_takes_the_kernels_that_it_has_the_features_for(fresh, features, builds):
    native.library.CPU.write_text(f"processor\t: 0\nFeatures\t: {features}\nCPU part\t: 0xd40\n")
    found = [one for dtype in native.UNIT for one in native.library._runnable(dtype)]
    assert {one.name for one in found} == builds
    assert {one.machine for one in found} <= {"aarch64"}


def test_an_arm_cpu_without_bfloat16_says_so(fresh, monkeypatch):
    native.library.CPU.write_text("Features\t: fp asimd\n")
    monkeypatch.setattr(native.library.platform, "machine", lambda: "aarch64")
    assert_unavailable(fresh, "this CPU has no BF16, or the system does not say so")


@pytest.mark.usefixtures("no_calls")
def test_what_is_kept_is_not_compiled_again(fresh, instead, monkeypatch):
    instead(GOOD)
    native.load_library(fresh, "bfloat16")
    (library,) = fresh.iterdir()
    monkeypatch.setattr(native.library, "_libraries", {})
    monkeypatch.setattr(native.compiler, "COMPILERS", ("no-such-cc",))
    native.load_library(fresh, "bfloat16")
    assert list(fresh.iterdir()) == [library]


@pytest.fixture(name="built_ahead")
def _built_ahead(fresh, instead) -> None:
    """Libraries in the package."""
    instead(GOOD)
    native.compiler.build_all()


@pytest.mark.usefixtures("built_ahead", "with_amx", "no_calls")
def test_a_library_of_the_package_needs_no_compiler_and_no_cache(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native.compiler, "COMPILERS", ("no-such-cc",))
    native.load_library(fresh, "bfloat16")
    assert used() == "amx"
    assert not fresh.exists()


@pytest.mark.parametrize("flags", ["flags\t\t: fpu\n", None])
def test_means_are_loaded_on_any_cpu(fresh, instead, monkeypatch, flags, tmp_path):
    monkeypatch.setattr(native.library, "_means", None)
    native.library.CPU.unlink() if flags is None else native.library.CPU.write_text(flags)
    instead(GOOD.replace("return 0", "return 4"))
    with pytest.raises(native.NativeUnavailable, match="wrong numbers"):
        native.load_means(fresh)
    instead(GOOD + "void jaxembed_means(void) {}")
    assert native.load_means(fresh) is native.load_means(fresh)
    (library,) = fresh.iterdir()
    assert library.name.startswith("native-means-")
    monkeypatch.setattr(native.library, "_means", None)
    monkeypatch.setattr(native.compiler, "SOURCES", tmp_path)
    with pytest.raises(native.NativeUnavailable, match=r"cannot read .*means\.c: No such file"):
        native.load_means(fresh)


@pytest.mark.usefixtures("built_ahead")
def test_a_library_of_other_sources_is_not_used(fresh, monkeypatch, tmp_path):
    """As in a checkout whose sources have changed since they were built."""
    (tmp_path / "native.c").write_text("changed")
    monkeypatch.setattr(native.compiler, "SOURCES", tmp_path)
    monkeypatch.setattr(native.compiler, "COMPILERS", ("no-such-cc",))
    assert_unavailable(fresh, "there is no C compiler")


@pytest.mark.usefixtures("built_ahead")
def test_nothing_is_left_of_a_build_that_fails(compiler):
    assert len(list(native.compiler.LIBRARIES.iterdir())) == len(native.compiler.builds())
    compiler("exit 1")
    with pytest.raises(native.NativeUnavailable, match="exited with 1"):
        native.compiler.build_all()
    assert not native.compiler.LIBRARIES.exists()


@pytest.mark.parametrize(
    "system",
    [("darwin", "x86_64", ""), ("linux", "aarch64", "musl"), ("linux", "riscv64", "glibc")],
)
def test_other_platforms_get_a_wheel_of_pure_python(fresh, monkeypatch, system):
    platform, machine, libc = system
    monkeypatch.setattr(native.compiler.sys, "platform", platform)
    monkeypatch.setattr(native.compiler.platform, "machine", lambda: machine)
    monkeypatch.setattr(native.compiler.platform, "libc_ver", lambda: (libc, ""))
    with pytest.raises(native.NativeUnavailable, match=f"Linux with glibc on x86_64 .* {machine}"):
        native.compiler.build_all()


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        (
            "x86_64",
            {
                "amx",
                "avx512_bf16",
                "avx512_vnni_float32",
                "avx512_float32",
                "avx_vnni_float32",
                "avx2_float32",
                "means",
            },
        ),
        ("aarch64", {"arm_bf16", "neon_float32", "means"}),
    ],
)
def test_a_wheel_holds_the_libraries_of_its_machine(fresh, instead, monkeypatch, machine, names):
    instead(GOOD)
    monkeypatch.setattr(native.compiler.platform, "machine", lambda: machine)
    assert native.compiler.build_all() == f"py3-none-manylinux_2_17_{machine}"
    assert {path.stem for path in native.compiler.LIBRARIES.iterdir()} == names


def test_the_newest_glibc_that_a_library_asks_for():
    assert native.compiler.newest_glibc(b"") == 17
    assert native.compiler.newest_glibc(b"\0GLIBC_2.34\0GLIBC_2.14\0GLIBC_PRIVATE\0") == 34


def test_one_library_serves_the_process_whatever_the_directory(fresh, monkeypatch, tmp_path):
    """Also where several models start at once."""
    together, loaded = threading.Barrier(4, timeout=60), []

    def opened(build: native.compiler.Build, cache_dir: Path) -> SimpleNamespace:
        loaded.append(cache_dir)
        return SimpleNamespace(jaxembed_prepare=lambda: 0)

    def load(number: int) -> None:
        together.wait()
        native.load_library(tmp_path / str(number), "bfloat16")

    builds = (AMX,)
    monkeypatch.setattr(native.library, "_runnable", lambda dtype: builds)
    monkeypatch.setattr(native.library, "_opened", opened)
    monkeypatch.setattr(native.library, "_register", lambda library, dtype: None)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(4)))
    assert len(loaded) == 1
