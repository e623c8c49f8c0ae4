"""ModernBERT: what its configs say, what a layer sees, and what that costs.

Its numbers are compared with torch's by the goldens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_spec
from sources import WORDS, change_json, wordpiece, write_json, write_weights
from test_families import MODERNBERT, MODERNBERT_FIELDS, SCORES, without

from converters import convert, modernbert
from jaxembed.errors import ConversionError
from jaxembed.models import ModelSpec, parameter_shapes, position_limit, program, random_parameters
from jaxembed.spec import DenseLayer, LayerNormLayer


def model(**changes) -> ModelSpec:
    """A ModernBERT with mean pooling; `changes` are of its config."""
    config = MODERNBERT_FIELDS | changes
    return tiny_spec(architecture="modernbert", config=config, hidden_size=8, modules=())


def tensors(**changes) -> dict[str, np.ndarray]:
    """What transformers saves for `model(**changes)` as a sequence classifier of three labels."""
    shapes = {name: leaf.shape for name, leaf in parameter_shapes(model(**changes)).items()}
    sources = {
        rule.sources.replace("{i}", str(i)): shapes[target][::-1]
        for rule in modernbert.RULES
        for i in range(5 if "{i}" in rule.target else 1)
        if (target := rule.target.replace("{i}", str(i))) in shapes
    }
    sources = {f"model.{name}": shape for name, shape in sources.items()}
    table = "model.embeddings.tok_embeddings.weight"
    sources |= {table: sources[table][::-1], "head.dense.weight": (8, 8), "head.norm.weight": (8,)}
    sources |= {"classifier.weight": (3, 8), "classifier.bias": (3,)}
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape, np.float32) for name, shape in sources.items()}


@pytest.fixture(name="source")
def _source(tmp_path):
    folder = tmp_path / "source"
    labels = {"0": "good", "1": "bad", "2": "ugly"}
    write_json(folder / "config.json", MODERNBERT | SCORES | {"id2label": labels})
    wordpiece().save(str(folder / "tokenizer.json"))
    write_weights(folder, tensors())
    return folder


def test_a_classifier_is_a_pooling_and_three_modules(source, tmp_path):
    spec = convert(source, tmp_path / "out")
    assert spec.task == "classify"
    assert spec.labels == ("good", "bad", "ugly")
    assert spec.head.pooling == ("mean",)
    assert spec.head.modules == (
        DenseLayer(in_features=8, out_features=8, bias=False, activation="gelu"),
        LayerNormLayer(features=8, eps=1e-5, bias=False),
        DenseLayer(in_features=8, out_features=3, bias=True, activation="identity"),
    )
    assert (spec.dim, spec.hidden_size, spec.max_input_tokens) == (3, 8, 24)


def test_a_classifier_that_says_nothing_pools_the_first_token(source, tmp_path):
    absent = ("classifier_pooling", "classifier_activation", "classifier_bias")
    write_json(source / "config.json", without(MODERNBERT, *absent) | SCORES)
    weights = tensors() | {
        "classifier.weight": np.zeros((2, 8), np.float32),
        "classifier.bias": np.zeros(2, np.float32),
    }
    write_weights(source, weights)
    spec = convert(source, tmp_path / "out")
    assert spec.head.pooling == ("cls",)
    assert spec.labels == ("LABEL_0", "LABEL_1")  # two, where num_labels is absent too
    assert spec.head.modules[0] == DenseLayer(8, 8, bias=False, activation="gelu")


def test_the_head_of_a_masked_language_model_is_left_out(source, tmp_path):
    change_json(source / "config.json", architectures=["ModernBertForMaskedLM"])
    weights = {name: x for name, x in tensors().items() if not name.startswith("classifier")}
    write_weights(source, weights | {"decoder.bias": np.zeros(len(WORDS), np.float32)})
    spec = convert(source, tmp_path / "out")
    assert (spec.task, spec.head.pooling, spec.head.modules) == ("embed", ("mean",), ())


@pytest.mark.parametrize("name", ["attn.Wqkv.bias", "attn_norm.weight", "mlp.Wi.bias"])
def test_a_tensor_that_the_config_does_not_speak_of_is_refused(name, source, tmp_path):
    extra = f"model.layers.0.{name}"  # the first layer has no attn_norm
    write_weights(source, tensors() | {extra: np.zeros(8, np.float32)})
    with pytest.raises(ConversionError, match=f"unused: {extra}"):
        convert(source, tmp_path / "out")


def test_a_missing_norm_is_named(source, tmp_path):
    write_weights(source, {k: x for k, x in tensors().items() if "layers.3.attn_norm" not in k})
    with pytest.raises(ConversionError, match=r"missing: layers\.3\.attn_norm\.weight"):
        convert(source, tmp_path / "out")


def test_every_flag_adds_its_biases():
    names = set(parameter_shapes(model()))
    assert "tower.layers.0.attention_norm.scale" not in names
    norms = {name.removesuffix(".scale") for name in names if name.endswith(".scale")}
    linears = {name.removesuffix(".kernel") for name in names if name.endswith(".kernel")}
    assert len(norms) == 1 + 4 + 5 + 1  # of the embeddings, before attention, before mlp, last
    biased = {
        "attention_bias": {name for name in linears if ".attention." in name},
        "mlp_bias": {name for name in linears if ".mlp." in name},
        "norm_bias": norms,
    }
    for flag, layers in biased.items():
        added = set(parameter_shapes(model(**{flag: True}))) - names
        assert added == {f"{layer}.bias" for layer in layers}


def test_the_limit_is_what_it_was_trained_on():
    assert position_limit(model()) == 24


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
    """The jaxpr of a row of that length."""
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
            total += (
                2 * equation.outvars[0].aval.size * int(np.prod([shape[i] for i in contracted]))
            )
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
    scores_of_a_row = 2 * 8192**2 * MODERNBERT_FIELDS["hidden_size"]
    assert products(traced(whole, 8192)) > 2 * 2 * scores_of_a_row  # and the same for the values
    assert long < products(traced(whole, 8192)) / 20
    assert products(traced(whole, 8192)) > 3.5 * products(traced(whole, 4096))


def test_scores_of_a_whole_row_never_stand_in_memory():
    text = str(traced(model(max_positions=8192, local_reach=64), 8192))
    assert "8192,8192" not in text


def test_angles_are_computed_once_for_each_kind_of_layer():
    names = [equation.primitive.name for equation in traced(model(), 24).eqns]
    assert (names.count("cos"), names.count("sin")) == (2, 2)
