"""What towers do that the goldens do not show: positions, windows, costs, float16 out of range."""

import math
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOWERS, WIDER_TOWERS, WORDS, open_tiny, tiny_spec, word_tokenizer
from fakes import count_of
from flax import nnx
from jax import lax
from representatives import each

from benchmarks.parameters import random_parameters
from jaxembed.checkpoints import checkpoint
from jaxembed.engine.autotune.kernels import calls
from jaxembed.models import ModelSpec, deberta, program
from jaxembed.models.attention import AttentionMask, ByKernel, by_xla, using
from jaxembed.models.bert import alibi, alibi_slopes, positions_after_pad
from jaxembed.models.deberta import Convolution, DebertaConfig, DistanceBuckets, attend_disentangled
from jaxembed.models.layers import LayerNorm, Linear
from jaxembed.models.tokens import PackedTokens


@pytest.mark.parametrize("pad", [0, 1, 5])
def test_positions_are_those_of_transformers_wherever_a_segment_lies(pad):
    draw = np.random.default_rng(pad)
    lengths = [[3, 9, 1, 7], [20], [1, 1, 2, 12], []]
    ids, positions, segments, wanted = np.zeros((4, len(lengths), 24), np.int32)
    for row, sequences in enumerate(lengths):
        at = 0
        for number, length in enumerate(sequences):
            here = row, slice(at, at + length)
            ids[here] = draw.integers(0, 7, length)  # one in seven is the pad
            positions[here], segments[here] = np.arange(length), number + 1
            real = (ids[here] != pad).astype(int)  # as create_position_ids_from_input_ids
            wanted[here] = np.cumsum(real) * real + pad
            at += length + number % 2
    planes = (jnp.array(plane) for plane in (ids, positions, segments, segments, segments))
    got = np.array(positions_after_pad(PackedTokens(*planes), pad))
    np.testing.assert_array_equal(got[segments > 0], wanted[segments > 0])


def test_slopes_are_those_of_alibi():
    for exponents in (
        [-8],
        [-4, -8],
        [-4, -8, -2],
        [-1, -2, -3, -4, -5, -6, -7, -8],
        [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5],
        [-0.5 * n for n in range(1, 17)],
    ):
        np.testing.assert_allclose(np.log2(alibi_slopes(len(exponents))), exponents, rtol=1e-12)


def test_the_bias_is_a_number_for_each_distance_and_the_same_on_both_sides():
    bias = np.asarray(alibi(12, 8192))
    assert bias.shape == (12, 2 * 8192 - 1)
    np.testing.assert_array_equal(bias, bias[:, ::-1])
    np.testing.assert_allclose(bias[8, :2], [-8191 * 2**-0.5, -8190 * 2**-0.5], rtol=1e-6)


def test_every_layer_caps_its_scores():
    """So attention is the native kernels' or XLA's: those of accelerators take no cap."""
    seen = calls(program(tiny_spec(**WIDER_TOWERS["gemma2"])), "bfloat16")
    sights = Counter({call.attention_mask: count for call, count in seen.items()})
    assert sights == {
        AttentionMask(causal=True, reach=3, cap=0.5): 1,
        AttentionMask(causal=True, cap=0.5): 1,
    }


def test_a_float16_activation_out_of_range_does_not_change_the_vector(tmp_path):
    """In T5 the operand of wo may exceed float16; what is not finite is computed in float32."""
    spec = tiny_spec(**TOWERS["t5"])
    parameters = random_parameters(spec)
    parameters["tower.layers.0.mlp.up.kernel"] *= 6e4
    halves = {name: array.astype(np.float16) for name, array in parameters.items()}
    assert all(np.isfinite(array).all() for array in halves.values())
    exact = {name: array.astype(np.float32) for name, array in halves.items()}
    source = tmp_path / "checkpoint"
    checkpoint.save(source, spec, exact, word_tokenizer().to_str().encode())
    vectors = {}
    texts = ["the cat sat on the mat", "a dog"]
    for dtype in ("float16", "float32"):
        with open_tiny(source, tmp_path, (2, 64), dtype=dtype) as embedder:
            vectors[dtype] = embedder.encode(texts)
            rescued = count_of(embedder.model.telemetry.not_finite)
        assert rescued == (len(texts) if dtype == "float16" else 0)
    np.testing.assert_allclose(vectors["float16"], vectors["float32"], rtol=0, atol=1e-5)


def model(**changes) -> ModelSpec:
    """A ModernBERT whose local layers see four tokens; `changes` are of its config."""
    config = TOWERS["modernbert"]["config"] | {"local_reach": 4} | changes
    return tiny_spec(architecture="modernbert", config=config)


def planes(length: int, **changed: int) -> np.ndarray:
    """One row of one sequence; `changed` are tokens by place, as t3=5."""
    ids = np.arange(length) % len(WORDS)
    for place, token in changed.items():
        ids[int(place[1:])] = token
    ones = np.ones(length)
    stacked = np.stack([ids, np.arange(length), ones, np.zeros(length), ones])
    return stacked[:, None].astype(np.int32)


def hidden_states(spec: ModelSpec, tokens: np.ndarray) -> np.ndarray:
    made = program(spec)
    forward = jax.jit(made.forward, static_argnums=(2, 3))
    parameters = made.order(random_parameters(spec))
    return np.asarray(forward(parameters, tokens, 1, ("tokens",))["tokens"])[0]


@pytest.mark.parametrize("length", [24, 200])  # scores of a row at once, and block by block
def test_a_local_layer_sees_its_reach_and_a_global_one_everything(length):
    near, far = model(num_layers=1, global_layers=[]), model(num_layers=1, global_layers=[0])
    for spec, seen_by in ((near, range(8, 17)), (far, range(length))):
        before = hidden_states(spec, planes(length))
        after = hidden_states(spec, planes(length, t12=7))
        moved = np.flatnonzero(np.abs(after - before).max(axis=1) > 1e-6)
        assert moved.tolist() == list(seen_by)


def test_global_and_local_layers_turn_by_their_own_angles():
    tokens = planes(24)
    for name, layers in (("global_theta", [0]), ("local_theta", [])):
        one = {"num_layers": 1, "global_layers": layers}
        other = "local_theta" if name == "global_theta" else "global_theta"
        before = hidden_states(model(**one), tokens)
        assert np.abs(hidden_states(model(**one, **{name: 50.0}), tokens) - before).max() > 1e-4
        np.testing.assert_array_equal(hidden_states(model(**one, **{other: 50.0}), tokens), before)


def traced(spec: ModelSpec, length: int) -> Any:
    made = program(spec)
    tokens = jax.ShapeDtypeStruct((5, 1, length), jnp.int32)
    forward = jax.make_jaxpr(partial(made.forward, slots=1, outputs=("dense", "tokens")))
    return forward(list(made.shapes.values()), tokens).jaxpr


def inner(equation) -> list[Any]:
    values = [v if isinstance(v, tuple | list) else (v,) for v in equation.params.values()]
    return [getattr(x, "jaxpr", x) for value in values for x in value if hasattr(x, "eqns")]


def products(jaxpr) -> int:
    """Floating point operations of its matrix products: a loop's body counts as often as it runs,
    of branches (one for each platform) the dearest."""
    total = 0
    for equation in jaxpr.eqns:
        name, bodies = equation.primitive.name, [products(body) for body in inner(equation)]
        assert name != "while", "which may run any number of times"
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        elif name == "cond":
            total += max(bodies)
        else:
            total += equation.params.get("length", 1) * sum(bodies)
    return total


def test_the_cost_of_local_attention_grows_with_the_length_and_not_its_square():
    """The widths are tiny, so that nearly all of the cost is attention's."""
    layers = {"num_layers": 2, "max_positions": 8192, "local_reach": 64}
    local, whole = model(**layers, global_layers=[]), model(**layers, global_layers=[0, 1])
    short, long = (products(traced(local, length)) for length in (4096, 8192))
    assert long == 2 * short
    scores_of_a_row = 2 * 8192**2 * TOWERS["modernbert"]["config"]["hidden_size"]
    assert products(traced(whole, 8192)) > 2 * 2 * scores_of_a_row  # and the same for the values
    assert long < products(traced(whole, 8192)) / 20
    assert products(traced(whole, 8192)) > 3.5 * products(traced(whole, 4096))


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_sees_those_after_it_only_where_the_model_is_bidirectional(causal):
    config = TOWERS["qwen3"]["config"] | {"causal": causal, "num_layers": 1}
    spec = tiny_spec(architecture="qwen3", config=config)
    first, second = (hidden_states(spec, planes(4, t3=last)) for last in (8, 9))
    assert np.array_equal(first[:3], second[:3]) == causal
    assert not np.allclose(first[3], second[3])


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


@pytest.mark.parametrize("dim", each([8, 384, 1000], 384))
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_layer_norm_of_rows_far_from_zero(dim, offset):
    x = np.random.default_rng(0).standard_normal((2, 3, dim), np.float32) + np.float32(offset)
    exact = x.astype(np.float64) - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-12)
    norm = jax.jit(lambda x: LayerNorm(dim, eps=1e-12)(x))(x)
    # the mean of values near 100 is known to 1e-5, a float32 sum's rounding
    np.testing.assert_allclose(norm, exact, atol=2e-6 if offset == 0 else 5e-5)


def test_a_convolution_sees_nothing_beyond_its_segment():
    fields = TOWERS["deberta"]["config"] | {"conv_width": 3, "hidden_size": 8}
    layer = Convolution(DebertaConfig(**fields))
    layer.linear.kernel[...] = jnp.tile(jnp.eye(8), (3, 1))  # the sum of the three tokens
    layer.activation = lambda x: x
    setattr(layer, "norm", lambda x: x)  # noqa: B010
    embedded = jnp.broadcast_to(jnp.array([1.0, 2, 4, 8, jnp.nan])[None, :, None], (1, 5, 8))
    segments = jnp.array([[1, 1, 2, 2, 0]])
    got = jax.jit(lambda *given: layer(*given))(embedded, jnp.zeros((1, 5, 8)), segments)
    np.testing.assert_array_equal(got[0, :4, 0], [3, 3, 12, 12])


def test_places_of_published_models():
    """Of 256 buckets up to a distance of 512. The negative side has one place more, for what lies
    beyond."""
    distances = np.array([0, 5, 128, 130, 200, 300, 511, 512, 9999])
    places = np.array([0, 5, 128, 130, 169, 207, 255, 255, 255])
    published = DistanceBuckets(256, 512, 511)
    np.testing.assert_array_equal(published.places(distances), 256 + places)
    wanted = np.where(distances < 512, 256 - places, 0)
    np.testing.assert_array_equal(published.places(-distances), wanted)


def test_without_buckets_each_distance_has_a_place_up_to_the_last():
    got = DistanceBuckets(0, 4, 9).places(np.arange(-6, 7))
    np.testing.assert_array_equal(got, [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7])


def by_definition(query, key, value, relative_key, relative_query, segments, distances):
    """The formula of the paper, with a gather of each score, in float64."""
    length, width = query.shape[1], query.shape[3]
    place = np.arange(length)
    places = distances.places(place[:, None] - place[None])
    terms = [np.einsum("bshk,bthk->bhst", query, key)]
    if relative_key is not None:
        terms.append(np.einsum("bshk,sthk->bhst", query, relative_key[places]))
    if relative_query is not None:
        terms.append(np.einsum("bthk,sthk->bhst", key, relative_query[places]))
    seen = (segments[:, :, None] == segments[:, None])[:, None]
    scores = np.where(seen, sum(terms) / np.sqrt(width * len(terms)), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhst,bthk->bshk", weights, value)


# tiles of 8: one, several that all see all, windows, and rows that are not whole tiles
TILINGS = [(7, 7), (8, 8), (24, 24), (61, 61), (61, 9)]
TERMS = ["both", "keys", "queries", "none"]
QUICK = {("both", 61, 61), ("both", 61, 9), ("keys", 24, 24), ("queries", 61, 9), ("none", 7, 7)}


@pytest.mark.parametrize(
    ("terms", "length", "longest"),
    each(((terms, *tiling) for terms in TERMS for tiling in TILINGS), *QUICK),
)
def test_scores_are_those_of_the_definition_in_every_tiling(terms, length, longest, monkeypatch):
    monkeypatch.setattr(deberta, "SCORES_TILE", 8)
    draw = np.random.default_rng(length)
    query, key, value = draw.standard_normal((3, 2, length, 3, 4))
    by_key, by_query = draw.standard_normal((2, 16, 3, 4))
    tables = (
        by_key if terms in ("both", "keys") else None,
        by_query if terms in ("both", "queries") else None,
    )
    segments = np.arange(length)[None] // np.array([[longest], [max(longest - 2, 1)]]) + 1
    distances = DistanceBuckets(8, 20, longest - 1)
    wanted = by_definition(query, key, value, *tables, segments, distances)
    given = (query, key, value, *tables)
    given = [None if x is None else x.astype(np.float32) for x in given]
    got = jax.jit(lambda *x: attend_disentangled(*x, distances))(*given, segments)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("adapts", [False, True])
def test_heads_from_products_of_their_own_are_those_of_one_product(adapts):
    layer = Linear(8, 4 * 6, bias=True)
    rng = np.random.default_rng(3)
    layer.kernel[...] = jnp.asarray(rng.normal(size=(8, 24)), jnp.float32)
    layer.bias[...] = jnp.asarray(rng.normal(size=24), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 5, 8)), jnp.float32)
    if adapts:  # one that adds the first column
        layer.adapter = lambda x: jnp.broadcast_to(x[:, :, :1], (2, 5, 24))
    joint = layer(x).reshape(2, 5, 4, 6)
    with using(ByKernel(by_xla, 1, separate=True)):
        parts = layer.heads(x, [2, 1, 1], 6)
    assert [part.shape[2] for part in parts] == [2, 1, 1]
    np.testing.assert_allclose(jnp.concatenate(parts, axis=2), joint, rtol=1e-6, atol=1e-6)
