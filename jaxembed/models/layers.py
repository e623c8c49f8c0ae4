"""Layers that towers share: operands in the parameters' dtype, everything between in float32.

Parameters are declared as zeros of the right shape, and only ever made abstractly: their values
come from a checkpoint.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The exact form, x * Phi(x), by erf."""
    return 0.5 * x * (1.0 + lax.erf(x * 0.7071067811865476))


ACTIVATIONS: dict[str, Callable] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


class Linear(nnx.Module):
    """x @ kernel + bias. The product is summed in float32 whatever the kernel's dtype."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True):
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(out_features, jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "rows length in"]) -> Float[Array, "rows length out"]:
        kernel = self.kernel[...]
        contract = (((2,), (0,)), ((), ()))
        y = lax.dot_general(
            x.astype(kernel.dtype), kernel, contract, preferred_element_type=jnp.float32
        )
        return y if self.bias is None else y + self.bias[...][None, None]


class Embedding(nnx.Module):
    """A table of vectors. An index past the end would be clamped in silence: check before."""

    def __init__(self, size: int, dim: int):
        self.embedding = nnx.Param(jnp.zeros((size, dim), jnp.float32))

    def __call__(self, index: Int[Array, "rows length"]) -> Float[Array, "rows length dim"]:
        return jnp.take(self.embedding[...], index, axis=0, mode="clip").astype(jnp.float32)


class LayerNorm(nnx.Module):
    """Mean zero, variance one over the last axis, then scale and shift."""

    def __init__(self, dim: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(dim, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(dim, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "rows length dim"]) -> Float[Array, "rows length dim"]:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        normal = centred * lax.rsqrt(variance + self.eps)
        return normal * self.scale[...][None, None] + self.bias[...][None, None]
