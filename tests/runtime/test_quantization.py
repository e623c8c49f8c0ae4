"""--quantize: what devices hold, how far vectors turn, and what is refused."""

import logging

import jax
import numpy as np
import pytest
from conftest import TOWERS, WIDER_TOWERS, open_tiny, save_tiny, tiny_spec

from jaxembed.config import EngineConfig
from jaxembed.data.work import SparseRows
from jaxembed.engine.placement import (
    Form,
    described_parameters,
    form_of,
    place_parameters,
    placed_bytes,
)
from jaxembed.errors import CheckpointError, ConfigError
from jaxembed.models import program
from jaxembed.models.quantized import QuantizedWeight
from jaxembed.runtime import quantization
from jaxembed.runtime.quantization import LEAST, Similarity
from jaxembed.runtime.routes import plan_engine

TEXTS = ["a dog", "a cat sat on the mat", "hello world " * 5]
BUCKETS = ((2, 16), (2, 64))
TOWER = WIDER_TOWERS["bert"]
TOWER = TOWER | {"config": TOWER["config"] | {"intermediate_size": 128}}


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", **TOWER)


def opened(checkpoint, folder, method, **fields):
    return open_tiny(checkpoint, folder, *BUCKETS, quantize=method, **fields)


def held(embedder) -> list:
    return embedder.model.main.engine.workers[0].runner._parameters


@pytest.mark.parametrize("method", LEAST)
def test_vectors_hardly_turn_and_info_says_how_far(method, checkpoint, tmp_path, request):
    if method == "int8":
        request.getfixturevalue("native_kernels")
        request.getfixturevalue("engines_try_native")
    plain = open_tiny(checkpoint, tmp_path, *BUCKETS)
    embedder = opened(checkpoint, tmp_path, method)
    try:
        cosines = (embedder.encode(TEXTS) * plain.encode(TEXTS)).sum(axis=1)
        assert cosines.min() > 0.995
        info = embedder.model.describe()["quantize"]
        assert info["method"] == method
        assert LEAST[method][1] < info["worst"] <= info["mean"] < 1.0
        assert plain.model.describe()["quantize"] is None
        shapes = {name: leaf.shape for name, leaf in program(embedder.spec).shapes.items()}
        taken = sum(leaf.nbytes for leaf in jax.tree.leaves(held(embedder)))
        assert taken == placed_bytes(shapes, "float32", method)
        assert taken < 0.6 * placed_bytes(shapes, "float32")
    finally:
        plain.close()
        embedder.close()


def test_the_result_is_kept_and_the_next_start_measures_nothing(checkpoint, tmp_path, monkeypatch):
    first = opened(checkpoint, tmp_path, "int8-weights")
    monkeypatch.setattr(quantization, "_vectors", None)
    second = opened(checkpoint, tmp_path, "int8-weights")
    assert first.model.describe()["quantize"] == second.model.describe()["quantize"]
    first.close()
    second.close()


def test_vectors_that_turn_too_far_are_refused_unless_asked_for(
    checkpoint, tmp_path, monkeypatch, caplog
):
    monkeypatch.setitem(LEAST, "int8-weights", (0.9995, 1.0))
    with pytest.raises(ConfigError) as caught:
        opened(checkpoint, tmp_path, "int8-weights")
    assert "--quantize int8-weights: the cosine similarity to the vectors of" in str(caught.value)
    assert "at least 0.9995 and 1.0 are asked for" in str(caught.value)
    assert "--quantize-anyway" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        opened(checkpoint, tmp_path, "int8-weights", quantize_anyway=True).close()
    assert "are asked for" in caplog.text


def test_similarity_is_that_of_what_is_served():
    quantization.check(Similarity(0.9996, 0.9981), "int8-weights", False, "m")
    for bad in (Similarity(0.9994, 0.9981), Similarity(0.9996, 0.9979), Similarity(np.nan, np.nan)):
        with pytest.raises(ConfigError, match="leave it out, or set --quantize-anyway"):
            quantization.check(bad, "int8-weights", False, "m")
    with pytest.raises(ConfigError, match="use --quantize int8-weights"):
        quantization.check(Similarity(0.9, 0.9), "int8", False, "m")


def test_int8_without_native_kernels_says_what_to_use(checkpoint, tmp_path):
    with pytest.raises(
        ConfigError, match=r"needs the native kernels .*--kernels xla.*int8-weights"
    ):
        opened(checkpoint, tmp_path, "int8", kernels="xla")


def test_int8_that_no_layer_can_use_says_so(tmp_path, native_kernels, engines_try_native):
    sizes = TOWERS["bert"]["config"] | {"intermediate_size": 96}
    narrow = save_tiny(tmp_path / "model", config=sizes)
    with pytest.raises(ConfigError, match=r"no layer of this model has a multiple of 64 inputs"):
        opened(narrow, tmp_path, "int8")


def form(name: str, shape: tuple[int, ...], method: str) -> Form:
    return form_of(name, shape, "bfloat16", method, native_layout=method == "int8")


@pytest.mark.parametrize(
    ("method", "of_layers"), [("int8", "QUANTIZED_PANELS"), ("int8-weights", "QUANTIZED")]
)
def test_heads_adapters_and_encoders_of_images_stay_as_they_are(method, of_layers):
    assert form("tower.layers.0.mlp.up.kernel", (64, 128), method) == Form[of_layers]
    assert form("tower.embeddings.word.embedding", (100, 64), method) == Form.QUANTIZED_TABLE
    for name in (
        "heads.sparse.terms.kernel",
        "tower.image.layers.0.mlp.up.kernel",
        "tower.layers.0.mlp.up.adapter.down.kernel",
    ):
        assert form(name, (64, 128), method) in (Form.PLAIN, Form.PANELS)
    assert form("tower.layers.0.mlp.up.kernel", (96, 128), "int8") == Form.PANELS


def test_weights_whose_inputs_are_not_divided_have_the_groups_of_one_device():
    spec = tiny_spec(**TOWERS["qwen3"])
    one, two = program(spec, quantize="int8-weights"), program(spec, 2, "int8-weights")
    (alone,), (divided,) = (
        [
            described
            for name, described in zip(
                made.shapes, described_parameters(made, "float32"), strict=True
            )
            if name == "tower.layers.0.attention.qkv.kernel"
        ]
        for made in (one, two)
    )
    assert alone.scales.shape[0] == divided.scales.shape[0]


@pytest.mark.parametrize(
    ("primary", "computed", "wanted"),
    [
        ("dense", np.arange(12).reshape(2, 2, 3), [[6, 7, 8]]),
        ("multi_vector", np.arange(12).reshape(2, 2, 3), [[6, 7, 8], [9, 10, 11]]),
        ("tokens", np.arange(12.0).reshape(2, 2, 3), [[7.5, 8.5, 9.5]]),
        (
            "sparse",
            SparseRows(4, [np.array([2])] * 4, [np.array([k + 0.5]) for k in range(4)]),
            [[0, 0, 2.5, 0]],
        ),
    ],
)
def test_what_is_compared_is_what_is_served(primary, computed, wanted):
    rows = quantization._of_row(computed, primary, row=1, slots=2, tokens=2)
    np.testing.assert_array_equal(rows, wanted)


def test_encoders_of_images_are_refused_by_name(tmp_path):
    spec = tiny_spec(config={})  # without a vocabulary
    with pytest.raises(ConfigError, match=r"--quantize int8-weights: .* image encoder"):
        plan_engine(spec, EngineConfig(quantize="int8-weights"), tmp_path)


@pytest.mark.parametrize("degree", [2, 4])
def test_devices_that_hold_a_model_together_have_shares_of_quantized_weights(degree, tmp_path):
    checkpoint = save_tiny(tmp_path / "model", **TOWERS["qwen3"])
    one = opened(checkpoint, tmp_path, "int8-weights")
    options = {"devices": degree, "tensor_parallel": degree}
    together = opened(checkpoint, tmp_path, "int8-weights", **options)
    np.testing.assert_allclose(one.encode(TEXTS), together.encode(TEXTS), atol=0.02)
    divided = [leaf for leaf in held(together) if isinstance(leaf, QuantizedWeight)]
    assert any(
        leaf.values.addressable_shards[0].data.size < leaf.values.size
        and leaf.scales.addressable_shards[0].data.size < leaf.scales.size
        for leaf in divided
    )
    one.close()
    together.close()


def test_a_weight_that_is_not_finite_names_itself(tmp_path):
    spec = tiny_spec(**TOWER)
    made = program(spec, quantize="int8-weights")
    weight = np.zeros(made.shapes["tower.layers.0.mlp.up.kernel"].shape, np.float32)
    weight[3, 2] = np.inf
    named = [("tower.layers.0.mlp.up.kernel", weight)]
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.up\.kernel: a weight is not finite"
    ):
        place_parameters(made, named, [jax.local_devices()[:1]], "float32")


def test_the_texts_are_as_many_as_the_documents_say():
    texts = quantization.TEXTS.read_text("utf-8").splitlines()
    assert len(texts) == len(set(texts)) == 64
