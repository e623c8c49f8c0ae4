"""Routed experts: the results of all experts for all tokens, of which each token takes its own."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxembed.models import native
from jaxembed.models.experts import Experts

DIM, WIDTH, EXPERTS = 32, 64, 8


def experts_of(active: int, router: np.ndarray) -> Experts:
    draw = np.random.default_rng(0)
    made = Experts(DIM, WIDTH, activation="gelu", experts=EXPERTS, active=active)
    made.router.kernel = nnx.Param(jnp.asarray(router))
    made.bias = nnx.Param(jnp.asarray(draw.standard_normal(DIM, np.float32)))
    for expert in made.experts:
        for layer in (expert.up, expert.down):
            shape = layer.kernel.shape
            weight = draw.standard_normal(shape, np.float32) * shape[0] ** -0.5
            layer.kernel = nnx.Param(jnp.asarray(weight))
    return made


def dense(experts: Experts, x: jax.Array) -> jax.Array:
    """The sum over all experts, in which those that a token does not use have the share zero."""
    shares = jax.nn.softmax(experts.router(x), axis=-1)
    order = jnp.argsort(-shares, axis=-1, stable=True)  # of equal shares the first is first
    used = (jnp.argsort(order, axis=-1) < experts.active)[..., None]
    results = jnp.stack([expert(x) for expert in experts.experts], axis=2)
    return (jnp.where(used, shares[..., None], 0) * results).sum(axis=2) + experts.bias[...][
        None, None
    ]


def ragged(experts: Experts, x: jax.Array) -> jax.Array:
    """By jax.lax.ragged_dot over the tokens, sorted by expert."""
    shares, chosen = jax.lax.top_k(jax.nn.softmax(experts.router(x), axis=-1), experts.active)
    chosen = chosen.reshape(-1)
    order, sizes = jnp.argsort(chosen, stable=True), jnp.bincount(chosen, length=EXPERTS)
    up, down = (
        jnp.stack([getattr(expert, name).kernel[...] for expert in experts.experts])
        for name in ("up", "down")
    )
    inputs = x.reshape(-1, DIM)[order // experts.active]
    wide = jax.nn.gelu(jax.lax.ragged_dot(inputs, up, sizes), approximate=False)
    results = jax.lax.ragged_dot(wide, down, sizes)[jnp.argsort(order)]
    return (results.reshape(*shares.shape, DIM) * shares[..., None]).sum(axis=2) + experts.bias[
        ...
    ][None, None]


ROUTERS = {
    "even": np.random.default_rng(1).standard_normal((DIM, EXPERTS), np.float32) * 0.3,
    # all tokens use the same experts, which need several blocks
    "one-sided": np.eye(DIM, EXPERTS, dtype=np.float32) * np.arange(EXPERTS, dtype=np.float32),
    "equal": np.zeros((DIM, EXPERTS), np.float32),
}


@pytest.mark.parametrize("reference", [dense, ragged])
@pytest.mark.parametrize(
    ("rows", "length", "active"), [(1, 1, 2), (1, 5, 1), (2, 48, 2), (3, 64, 3)]
)
@pytest.mark.parametrize("router", ROUTERS)
def test_each_token_takes_the_results_of_its_experts(router, rows, length, active, reference):
    experts = experts_of(active, ROUTERS[router])
    x = np.random.default_rng(2).standard_normal((rows, length, DIM), np.float32)
    x[..., :EXPERTS] = 1 + np.abs(x[..., :EXPERTS])
    got = experts(jnp.asarray(x), jnp.ones((rows, length), jnp.int32))
    np.testing.assert_allclose(got, reference(experts, jnp.asarray(x)), atol=2e-5)


@pytest.mark.parametrize("filler", [np.nan, 1e30])
def test_padding_changes_no_token(filler):
    experts = experts_of(2, ROUTERS["even"])
    x = np.random.default_rng(2).standard_normal((2, 48, DIM), np.float32)
    segments = np.ones((2, 48), np.int32)
    segments[0, 7:9] = segments[1, 20:] = 0
    wanted = dense(experts, jnp.asarray(x))
    x[segments == 0] = filler
    got = np.asarray(experts(jnp.asarray(x), jnp.asarray(segments)))
    np.testing.assert_allclose(got[segments == 1], wanted[segments == 1], atol=2e-5)


def test_experts_without_tokens_compute_nothing_and_native_kernels_skip_rows_of_others(monkeypatch):
    seen = []
    monkeypatch.setattr(native, "skipping_padding", lambda own: nullcontext(seen.append(own)))
    experts = experts_of(2, ROUTERS["one-sided"])
    x = jnp.ones((2, 48, DIM))
    with jax.disable_jit():
        experts(x, jnp.ones((2, 48), jnp.int32))
    assert sum(int(own.sum()) for own in seen) == 2 * 2 * 48
    assert len(seen) == 2 * 4  # the blocks of two experts, of 24 uses: the mean of all experts
