"""Models as data: the names and shapes of their parameters, and one pure function."""

import math
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from conftest import WORDS, tiny_spec

from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import (
    ARCHITECTURES,
    parameter_shapes,
    position_limit,
    program,
    random_parameters,
    tower_class,
)
from jaxembed.models.layers import ACTIVATIONS
from jaxembed.models.pooling import POOLINGS
from jaxembed.models.tokens import PackedTokens
from jaxembed.outputs import OUTPUTS, OutputName
from jaxembed.spec import DenseLayer, ModelSpec, NormalizeLayer, Pooled

BGE_LARGE = {
    "vocab_size": 30522,
    "hidden_size": 1024,
    "num_layers": 24,
    "num_heads": 16,
    "intermediate_size": 4096,
    "max_positions": 512,
    "type_vocab_size": 2,
    "norm_eps": 1e-12,
    "activation": "gelu",
}


SLOTS = 4


def shallow(*given, **changes) -> ModelSpec:
    """`tiny_spec` with one layer."""
    return tiny_spec(*given, config=tiny_spec().config | {"num_layers": 1}, **changes)


def planes_of(ids: list[int], length: int = 16) -> np.ndarray:
    """One sequence in one row."""
    planes = np.zeros((PackedTokens.PLANES, 1, length), np.int32)
    planes[0, 0, : len(ids)] = ids
    planes[1, 0, : len(ids)] = np.arange(len(ids))
    planes[2, 0, : len(ids)] = 1
    planes[4, 0, SLOTS] = len(ids)  # its first slot begins at 0
    return planes


def forward(spec: ModelSpec, parameters=None):
    """dense [dim] and tokens [length, width] of one sequence."""
    model = program(spec)
    leaves = model.order(parameters or random_parameters(spec))
    planes, outputs = planes_of([2, 7, 8, 9, 3]), ("dense", "tokens")
    output = jax.jit(model.forward, static_argnums=(2, 3))(leaves, planes, SLOTS, outputs)
    return np.asarray(output["dense"])[0, 0], np.asarray(output["tokens"])[0]


def test_parameters_have_dotted_names_and_float32_shapes():
    shapes = parameter_shapes(tiny_spec())
    assert shapes["tower.embeddings.word.embedding"].shape == (5 + len(WORDS) + 26, 32)
    assert shapes["tower.embeddings.position.embedding"].shape == (64, 32)
    assert shapes["tower.layers.1.attention.qkv.kernel"].shape == (32, 96)
    assert shapes["tower.layers.0.mlp.down.kernel"].shape == (64, 32)
    assert shapes["tower.layers.0.mlp_norm.scale"].shape == (32,)
    assert len(shapes) == 3 + 2 + 2 * 12
    assert {shape.dtype for shape in shapes.values()} == {jnp.dtype("float32")}


def test_a_dense_module_has_parameters_and_a_normalize_none():
    spec = tiny_spec(modules=(NormalizeLayer(), DenseLayer(32, 8), DenseLayer(8, 4, bias=False)))
    shapes = {k: v.shape for k, v in parameter_shapes(spec).items() if k.startswith("heads")}
    assert shapes == {
        "heads.dense.modules.1.kernel": (32, 8),
        "heads.dense.modules.1.bias": (8,),
        "heads.dense.modules.2.kernel": (8, 4),
    }


def test_a_full_size_model_is_checked_without_making_its_weights():
    spec = tiny_spec(config=BGE_LARGE, hidden_size=1024, pooling=("cls",), max_input_tokens=512)
    model = program(spec)
    assert sum(np.prod(shape.shape) for shape in model.shapes.values()) == 334_092_288
    planes = jax.ShapeDtypeStruct((PackedTokens.PLANES, 4, 512), jnp.int32)
    run = partial(model.forward, slots=128, outputs=("dense", "tokens"))
    output = jax.eval_shape(run, [*model.shapes.values()], planes)
    assert (output["dense"].shape, output["dense"].dtype) == ((4, 128, 1024), jnp.float32)
    assert (output["tokens"].shape, output["tokens"].dtype) == ((4, 512, 1024), jnp.float32)


def test_every_architecture_of_the_registry_loads():
    for architecture in ARCHITECTURES:
        tower = tower_class(architecture)
        assert callable(tower.position_limit)
        assert tower.Config.__dataclass_params__.frozen


def test_an_unknown_architecture_is_refused_with_those_there_are():
    with pytest.raises(UnsupportedModel, match=r"'mamba' is not supported; known: .*bert"):
        program(tiny_spec(architecture="mamba"))


def test_a_switch_of_a_later_version_is_refused_by_its_name():
    spec = tiny_spec(written_by="jaxembed 9.9")
    later = msgspec.structs.replace(spec, config=spec.config | {"new_switch": True})
    for use in (program, position_limit):
        with pytest.raises(CheckpointError, match=r"jaxembed 9\.9.*new_switch.*upgrade"):
            use(later)


def test_the_position_limit_is_the_length_of_the_table():
    assert position_limit(tiny_spec()) == 64


def test_parameters_that_do_not_fit_are_all_listed_at_once():
    model = program(tiny_spec())
    parameters = random_parameters(tiny_spec())
    del parameters["tower.layers.0.mlp.up.bias"]
    del parameters["tower.embeddings.norm.scale"]
    parameters["pooler.kernel"] = np.zeros(3, np.float32)
    parameters["tower.layers.1.attention.out.kernel"] = np.zeros((32, 31), np.float32)
    with pytest.raises(CheckpointError) as raised:
        model.order(parameters)
    for line in (
        "missing: tower.layers.0.mlp.up.bias",
        "missing: tower.embeddings.norm.scale",
        "unknown: pooler.kernel",
        "tower.layers.1.attention.out.kernel: wanted shape (32, 32), got (32, 31)",
    ):
        assert line in str(raised.value)


def test_the_order_of_the_parameters_is_their_own_not_the_given_one():
    model, parameters = program(tiny_spec()), random_parameters(tiny_spec())
    backwards = dict(reversed(parameters.items()))
    for one, other in zip(model.order(parameters), model.order(backwards), strict=True):
        assert one is other


def test_normalize_before_dense_is_not_dense_before_normalize():
    dense = DenseLayer(32, 8, activation="identity")
    parameters = random_parameters(shallow(modules=(dense,)))
    kernel, bias = (parameters[f"heads.dense.modules.0.{name}"] for name in ("kernel", "bias"))

    def unit(x):
        return x / np.linalg.norm(x)

    # both Normalize modules run on the device here: only a last one is the host's
    last = (DenseLayer(8, 8, bias=False, activation="identity"),)
    same = {"heads.dense.modules.2.kernel": np.eye(8, dtype=np.float32)}
    first = {"heads.dense.modules.1.kernel": kernel, "heads.dense.modules.1.bias": bias}
    tower = {name: leaf for name, leaf in parameters.items() if not name.startswith("heads")}
    before, tokens = forward(
        shallow(modules=(NormalizeLayer(), dense, *last)), tower | first | same
    )
    pooled = tokens[:5].mean(axis=0)
    after, _ = forward(shallow(modules=(dense, NormalizeLayer(), *last)), parameters | same)
    np.testing.assert_allclose(before, unit(pooled) @ kernel + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after, unit(pooled @ kernel + bias), rtol=1e-4, atol=1e-5)
    assert np.abs(before - after).max() > 1e-2


def test_a_last_normalize_is_left_to_the_host():
    spec = shallow(modules=(DenseLayer(32, 8), NormalizeLayer()))
    assert spec.head.normalize
    dense, _ = forward(spec)
    assert abs(np.linalg.norm(dense) - 1) > 1e-2


def test_a_model_pools_its_own_hidden_states_and_concatenates_poolings_in_order():
    names = tuple(reversed(POOLINGS))
    spec = shallow(pooling=names, modules=())
    dense, tokens = forward(spec)
    assert spec.dim == len(dense)
    parts = dict(zip(names, np.split(dense, len(names)), strict=True))
    tokens = tokens[:5]
    np.testing.assert_array_equal(parts["cls"], tokens[0])
    np.testing.assert_array_equal(parts["lasttoken"], tokens[4])
    np.testing.assert_array_equal(parts["max"], tokens.max(axis=0))
    np.testing.assert_allclose(parts["mean"], tokens.mean(axis=0), rtol=1e-5, atol=1e-6)


NUMPY_ACTIVATIONS = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.array([math.erf(v / np.sqrt(2)) for v in x])),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def test_an_activation_is_what_its_name_says():
    x = np.linspace(-6, 6, 49)
    assert ACTIVATIONS.keys() == NUMPY_ACTIVATIONS.keys()
    for name, wanted in NUMPY_ACTIVATIONS.items():
        got = ACTIVATIONS[name](jnp.asarray(x, jnp.float32))
        np.testing.assert_allclose(np.asarray(got), wanted(x), atol=1e-6, err_msg=name)


def test_random_parameters_are_the_same_for_the_same_seed():
    one, two, other = (random_parameters(tiny_spec(), seed) for seed in (1, 1, 2))
    name = "tower.layers.0.mlp.up.kernel"
    np.testing.assert_array_equal(one[name], two[name])
    assert not np.array_equal(one[name], other[name])


def test_token_types_and_positions_change_the_result():
    spec = shallow()
    model = program(spec)
    leaves = [jnp.asarray(leaf) for leaf in model.order(random_parameters(spec))]
    run = jax.jit(partial(model.forward, slots=4, outputs=("dense",)))
    plain = np.asarray(run(leaves, planes_of([2, 7, 8, 3]))["dense"])[0, 0]
    for plane in (1, 3):
        changed = planes_of([2, 7, 8, 3])
        changed[plane, 0, 2] = 1 - changed[plane, 0, 2] if plane == 3 else 9
        assert np.abs(np.asarray(run(leaves, changed)["dense"])[0, 0] - plain).max() > 1e-3


def test_every_output_has_a_form():
    assert set(OUTPUTS) == set(get_args(OutputName))


CLASSIFIER_LAYERS = (DenseLayer(32, 32), DenseLayer(32, 3, activation="identity"))


@pytest.fixture(name="classifier", scope="module")
def _classifier() -> ModelSpec:
    return shallow(("mean",), CLASSIFIER_LAYERS, labels=("bad", "fair", "good"))


def test_a_classifier_has_a_head_for_its_logits_and_one_for_the_vector_under_them(classifier):
    assert classifier.heads == {
        "logits": Pooled(("mean",), CLASSIFIER_LAYERS),
        "dense": Pooled(("mean",)),
    }
    assert (classifier.primary, classifier.task) == ("logits", "classify")
    assert classifier.widths == {"logits": 3, "dense": 32, "tokens": 32}
    names = [name for name in parameter_shapes(classifier) if name.startswith("heads.")]
    assert sorted(names) == [
        f"heads.logits.modules.{n}.{name}" for n in (0, 1) for name in ("bias", "kernel")
    ]


def test_the_task_follows_from_the_heads_and_the_labels(classifier):
    assert (tiny_spec().primary, tiny_spec().task) == ("dense", "embed")
    assert msgspec.structs.replace(classifier, labels=("yes",)).task == "rerank"


def test_logits_and_the_pooled_vector_come_from_one_pass(classifier):
    model, parameters = program(classifier), random_parameters(classifier)
    leaves, planes = model.order(parameters), planes_of([2, 7, 8, 9, 3])

    def run(*outputs: OutputName) -> dict[str, np.ndarray]:
        computed = jax.jit(partial(model.forward, slots=4, outputs=outputs))(leaves, planes)
        return {name: np.asarray(array) for name, array in computed.items()}

    everything = run("tokens", "dense", "logits")
    assert everything["logits"].shape == (1, 4, 3)
    mean = everything["tokens"][0, :5].mean(axis=0)
    np.testing.assert_allclose(everything["dense"][0, 0], mean, rtol=1e-5, atol=1e-6)
    layers = [
        [parameters[f"heads.logits.modules.{n}.{name}"] for name in ("kernel", "bias")]
        for n in (0, 1)
    ]
    (first, shift), (second, last_shift) = layers
    wanted = np.tanh(mean @ first + shift) @ second + last_shift
    np.testing.assert_allclose(everything["logits"][0, 0], wanted, rtol=1e-5, atol=1e-5)
    for name in ("logits", "dense"):
        alone = run(name)
        assert list(alone) == [name]
        np.testing.assert_allclose(alone[name], everything[name], rtol=1e-6, atol=1e-6)


def test_a_program_computes_only_what_it_is_asked_for(classifier):
    model = program(classifier)
    planes = jax.ShapeDtypeStruct((PackedTokens.PLANES, 1, 16), jnp.int32)

    def lowered(*outputs: OutputName):
        run = jax.jit(partial(model.forward, slots=4, outputs=outputs))
        return run.lower([*model.shapes.values()], planes)

    (entry,) = (
        line for line in lowered("logits").compile().as_text().splitlines() if "ENTRY" in line
    )
    assert entry.rpartition("->")[2].strip().startswith("f32[1,4,3]")  # and no tuple
    assert "tanh" not in lowered("dense").as_text()  # of the layers before the logits
    # a set's order differs between processes, and the key of a kept program would too
    assert lowered("dense", "logits").as_text() == lowered("logits", "dense").as_text()
