"""Models as data: the names and shapes of their parameters, and one pure function."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from conftest import tiny_spec

from benchmarks.parameters import random_parameters
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import DenseLayer, ModelSpec
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import position_limit, program
from jaxembed.models.layers import ACTIVATIONS
from jaxembed.models.tokens import PackedTokens

SLOTS = 4


def shallow(*given, **changes) -> ModelSpec:
    return tiny_spec(*given, config=tiny_spec().config | {"num_layers": 1}, **changes)


def planes_of(ids: list[int], length: int = 16) -> np.ndarray:
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


def test_an_unknown_architecture_is_refused_with_those_there_are():
    with pytest.raises(UnsupportedModel, match=r"'mamba' is not supported; known: .*bert"):
        program(tiny_spec(architecture="mamba"))


def test_a_switch_of_a_later_version_is_refused_by_its_name():
    spec = tiny_spec(written_by="jaxembed 9.9")
    later = msgspec.structs.replace(spec, config=spec.config | {"new_switch": True})
    for use in (program, position_limit):
        with pytest.raises(CheckpointError, match=r"jaxembed 9\.9.*new_switch.*upgrade"):
            use(later)


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
        "tower.layers.1.attention.out.kernel: expected shape (32, 32), got (32, 31)",
    ):
        assert line in str(raised.value)


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


CLASSIFIER_LAYERS = (DenseLayer(32, 32), DenseLayer(32, 3, activation="identity"))


@pytest.fixture(name="classifier", scope="module")
def _classifier() -> ModelSpec:
    return shallow(("mean",), CLASSIFIER_LAYERS, labels=("bad", "fair", "good"))


def test_a_program_computes_only_what_it_is_asked_for(classifier):
    model = program(classifier)
    planes = jax.ShapeDtypeStruct((PackedTokens.PLANES, 1, 16), jnp.int32)

    def lowered(*outputs: OutputName):
        run = jax.jit(partial(model.forward, slots=4, outputs=outputs))
        return run.lower([*model.shapes.values()], planes)

    (entry,) = (one for one in lowered("logits").compile().as_text().splitlines() if "ENTRY" in one)
    assert entry.rpartition("->")[2].strip().startswith("f32[1,4,3]")  # and no tuple
    assert "tanh" not in lowered("dense").as_text()  # of the layers before the logits
    # a set's order differs between processes, and the key of a kept program would too
    assert lowered("dense", "logits").as_text() == lowered("logits", "dense").as_text()


@pytest.mark.parametrize(("platform", "barriers"), [("cuda", 4), ("cpu", 0), ("tpu", 0)])
def test_a_gpu_stores_what_a_layer_reads_twice(platform, barriers):
    """The sum of embeddings, in each layer the norm of attention, and what the next layer gets."""
    spec = tiny_spec()
    model = program(spec)
    leaves, planes = model.order(random_parameters(spec)), planes_of([2, 7, 3])
    traced = jax.jit(model.forward, static_argnums=(2, 3)).trace(leaves, planes, SLOTS, ("dense",))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert spec.config["num_layers"] == 2
    assert text.count("optimization_barrier") == barriers
