"""What layers compute, in which precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxembed.models import native
from jaxembed.models.layers import ACTIVATIONS, LayerNorm, Linear

NUMERICS = pytest.mark.numerics


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("float32", lax.Precision.HIGHEST), ("bfloat16", None)]
)
def test_a_float32_kernel_means_float32_in_a_bfloat16_program(dtype, wanted):
    """Else its product is TF32 on GPU: the modules after pooling keep float32 kernels."""
    layer = nnx.eval_shape(lambda: Linear(8, 4))
    graph, state = nnx.split(layer)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    state.kernel.set_value(jnp.zeros((8, 4), dtype))
    jaxpr = jax.make_jaxpr(lambda x: nnx.merge(graph, state)(x))(jnp.zeros((1, 2, 8)))
    (product,) = [e for e in jaxpr.eqns if e.primitive is lax.dot_general_p]
    assert product.params["precision"] == (wanted and (wanted, wanted))
    assert product.params["preferred_element_type"] == jnp.float32


@pytest.mark.parametrize("dim", [384, *(pytest.param(d, marks=NUMERICS) for d in (8, 1000))])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_layer_norm_of_rows_far_from_zero(dim, offset):
    x = np.random.default_rng(0).standard_normal((2, 3, dim), np.float32) + np.float32(offset)
    exact = x.astype(np.float64) - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-12)
    norm = jax.jit(lambda x: LayerNorm(dim, eps=1e-12)(x))(x)
    # the mean of values near 100 is known to 1e-5, a float32 sum's rounding
    np.testing.assert_allclose(norm, exact, atol=2e-6 if offset == 0 else 5e-5)


def linear_of(kernel, bias=None) -> Linear:
    layer = Linear(64, 96, bias=bias is not None)
    layer.kernel = nnx.Param(kernel)
    if bias is not None:
        layer.bias = nnx.Param(bias)
    return layer


@pytest.fixture(name="operands", scope="module")
def _operands() -> tuple[jax.Array, ...]:
    """x, a kernel, what it is in panels, a bias and a residual."""
    draw = np.random.default_rng(0)
    kernel = jnp.asarray(draw.standard_normal((64, 96), np.float32) / 8, jnp.bfloat16)
    x, bias, residual = (
        jnp.asarray(draw.standard_normal(shape, np.float32))
        for shape in ((2, 5, 64), (96,), (2, 5, 96))
    )
    return x, kernel, jnp.asarray(native.packed(np.asarray(kernel))), bias, residual


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("has_bias", [True, pytest.param(False, marks=NUMERICS)])
def test_a_kernel_in_panels_gives_what_it_gives_as_it_was(operands, has_bias):
    x, kernel, panels, bias, _ = operands
    bias = bias if has_bias else None
    wanted, got = (jax.jit(linear_of(k, bias).__call__)(x) for k in (kernel, panels))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)  # sums of 64 terms


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(
    "activation", ["gelu", *(pytest.param(a, marks=NUMERICS) for a in ACTIVATIONS if a != "gelu")]
)
def test_what_is_rounded_is_the_same_for_every_activation(operands, activation):
    x, kernel, panels, bias, _ = operands
    wanted, got = (
        jax.jit(lambda x, k=k: linear_of(k, bias).rounded(x, activation))(x)
        for k in (kernel, panels)
    )
    assert got.dtype == wanted.dtype == jnp.bfloat16
    wanted, got = (np.asarray(y, np.float32) for y in (wanted, got))
    np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=1e-5)  # one step of bfloat16


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(  # of both the norm and the product
    "has_bias", [True, pytest.param(False, marks=NUMERICS)]
)
def test_the_norm_of_a_sum_takes_the_product_along(operands, has_bias):
    x, kernel, panels, bias, residual = operands
    norm = LayerNorm(96, eps=1e-5, bias=has_bias)

    def of_sum(k):
        return lambda x: norm.of_sum(residual, linear_of(k, bias if has_bias else None), x)

    wanted, got = (jax.jit(of_sum(k))(x) for k in (kernel, panels))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5)
