"""Weights in int8: their scales, and products with quantized inputs in each instruction set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_builds import AVX2, AVX512_BF16, X86, calling
from representatives import each

from jaxembed.models import native
from jaxembed.models.layers import Embedding, Linear
from jaxembed.models.quantized import QuantizedWeight, dequantized, groups_of, quantized

ROWS = (1, 16, 40, 129)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.fixture(
    name="dtype", scope="module", params=each(X86, AVX512_BF16, AVX2), ids=lambda of: of.name
)
def _dtype(request, native_kernels, tmp_path_factory):
    """The dtype of the kernels of a build, which are used."""
    with calling(request.param, tmp_path_factory.mktemp("native")):
        yield request.param.dtype


def product(x: np.ndarray, kernel: np.ndarray, groups: int, dtype: str) -> np.ndarray:
    weight = jax.tree.map(jnp.asarray, native.packed_quantized(kernel, groups, dtype))
    return np.asarray(jax.jit(lambda x, weight: native.linear(x, weight, None))(x[None], weight)[0])


@pytest.mark.parametrize("rows", each(ROWS, 40))
def test_sums_are_exact(dtype, rows):
    """Whole numbers with scales of one, at the ends of u8 and s8: sums of two products exceed
    s16."""
    k, n, groups = 384, 96, 3
    rng = np.random.default_rng(0)
    x = rng.choice([0, 1, 128, 254, 255], (rows, k)).astype(np.float32)
    x[:, ::128], x[:, 1::128] = 255, 0
    kernel = rng.choice([-127, -126, 0, 126, 127], (k, n)).astype(np.float32)
    kernel[::128] = 127
    kernel[:, 0], kernel[:, 1] = 127, -127
    np.testing.assert_array_equal(product(x, kernel, groups, dtype), x @ kernel)


def test_rows_without_a_range(dtype):
    """Constants, zeros and tiny numbers; NaN and infinity make NaN, and only in their row."""
    x = np.zeros((6, 128), np.float32)
    x[1], x[2], x[3] = 3.0, -0.5, 1e-38
    x[4, 70], x[5, 3] = np.nan, np.inf
    kernel = drawn(128, 64)
    y = product(x, kernel, 2, dtype)
    np.testing.assert_allclose(y[:4], x[:4] @ dequantized(*quantized(kernel, 2)), atol=1e-3)
    np.testing.assert_array_equal(y[0], 0.0)
    assert np.isnan(y[4:]).all()


def test_values_are_at_most_half_a_step_off():
    weight = drawn(192, 32)
    weight[:64, 3], weight[64:128, 4] = 0.0, 1e-44
    values, scales = quantized(weight, 3)
    assert (values.dtype, scales.shape) == (np.int8, (3, 32))
    assert values.min() == -127 or values.max() == 127
    assert scales[0, 3] == scales[1, 4] == 1.0
    off = np.abs(dequantized(values, scales) - weight).reshape(3, 64, 32)
    assert (off <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(bad):
    weight = drawn(64, 32)
    weight[3, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantized(weight)


@pytest.mark.parametrize(
    ("inputs", "size", "groups"),
    [(384, 128, 3), (384, 64, 6), (1024, 192, 8), (2624, 128, 41), (312, 128, 1), (32, 64, 1)],
)
def test_groups_are_whole_and_equal(inputs, size, groups):
    assert groups_of(inputs, size, native.QUANTIZED_STEP) == groups


def test_layers_take_quantized_weights_in_xla():
    kernel, table, x = drawn(128, 48), drawn(20, 16), jnp.asarray(drawn(1, 5, 128))
    linear, embedding = Linear(128, 48, bias=False), Embedding(20, 16)
    of_kernel, of_table = quantized(kernel, 2), [part.T for part in quantized(table.T)]
    linear.kernel = type(linear.kernel)(QuantizedWeight(*map(jnp.asarray, of_kernel), "float32"))
    embedding.embedding = type(embedding.embedding)(
        QuantizedWeight(*map(jnp.asarray, of_table), "float32")
    )
    np.testing.assert_allclose(linear(x)[0], x[0] @ dequantized(*of_kernel), atol=1e-4)
    heads = linear.heads(x, [2, 1], 16)
    np.testing.assert_allclose(np.concatenate(heads, 2).reshape(5, 48), linear(x)[0], atol=1e-6)
    rows = embedding(jnp.array([[3, 19]]))[0]
    np.testing.assert_allclose(rows, table[[3, 19]], atol=np.abs(table).max() / 200)
    assert (linear.shape, embedding.shape) == ((128, 48), (20, 16))
