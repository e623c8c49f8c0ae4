"""What layers compute, in which precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxembed.models.layers import LayerNorm, Linear


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


@pytest.mark.parametrize("dim", [8, 384, 1000])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_layer_norm_of_rows_far_from_zero(dim, offset):
    x = np.random.default_rng(0).standard_normal((2, 3, dim), np.float32) + np.float32(offset)
    exact = x.astype(np.float64) - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-12)
    norm = jax.jit(lambda x: LayerNorm(dim, eps=1e-12)(x))(x)
    # the mean of values near 100 is known to 1e-5, a float32 sum's rounding
    np.testing.assert_allclose(norm, exact, atol=2e-6 if offset == 0 else 5e-5)
