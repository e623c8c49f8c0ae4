"""JinaBERT v2, its code variant and jina-reranker-v1: their configs, tensors and refusals.

Their numbers are compared with torch's by the goldens.
"""

import numpy as np
import pytest
import sources
from test_families import JINA, JINA_BERT, converted, golden, jina_auto_map

from converters import jina_bert
from jaxembed.errors import ConversionError
from jaxembed.models.relative import alibi, alibi_slopes


@pytest.mark.parametrize(
    ("said", "family"),
    [
        ({}, True),
        ({"auto_map": None, "architectures": None}, True),
        ({"position_embedding_type": "absolute"}, True),  # which is refused then
        ({"position_embedding_type": None, "architectures": None}, True),
        ({"auto_map": None, "architectures": None, "position_embedding_type": None}, False),
        (sources.BERT_CONFIG | {"auto_map": None}, False),
    ],
    ids=str,
)
def test_the_code_or_the_kind_of_positions_tells_it_from_bert(said, family):
    assert jina_bert.is_jina_bert(JINA_BERT | said) is family


@pytest.mark.parametrize(
    ("name", "first", "gate_is_first"),
    [
        ("jina_bert_mean", "gated_layers", True),
        ("jina_bert_code_odd_mean", "up_gated_layer", False),
    ],
)
def test_each_variant_has_its_own_half_for_the_gate(name, first, gate_is_first, tmp_path):
    arrays = golden(name)
    _, params = converted(arrays, tmp_path)
    tensor = next(x for key, x in arrays.items() if key.endswith(f"layer.1.mlp.{first}.weight"))
    halves = np.split(tensor.T, 2, axis=1)
    wanted = np.concatenate(halves if gate_is_first else halves[::-1], axis=1)
    np.testing.assert_array_equal(params["tower.layers.1.mlp.gate_up.kernel"], wanted)


def test_positions_have_no_table_and_the_limit_of_the_config(tmp_path):
    spec, params = converted(golden("jina_bert_cross_encoder"), tmp_path, model_max_length=None)
    assert "tower.embeddings.position.embedding" not in params
    assert spec.config["max_positions"] == 29
    assert spec.max_input_tokens == 24  # of its tokenizer


@pytest.mark.parametrize(
    ("name", "more_norms"), [("jina_bert_mean", False), ("jina_bert_code_odd_mean", True)]
)
def test_the_tensors_tell_the_variant_of_a_model_that_was_saved_with_its_code(
    name, more_norms, tmp_path
):
    arrays = golden(name)
    _, wanted = converted(arrays, tmp_path / "published")
    said = {"auto_map": jina_auto_map(""), "_name_or_path": None}
    spec, params = converted(arrays, tmp_path / "saved again", **said)
    assert (spec.config["qk_norm"], spec.config["residual_norm"]) == (more_norms, more_norms)
    for name, array in wanted.items():
        np.testing.assert_array_equal(params[name], array)


def test_tensors_of_the_variant_that_a_config_does_not_name_are_refused(tmp_path):
    with pytest.raises(ConversionError, match=r"missing: encoder\.layer\.0\.mlp\.gated_layers"):
        converted(golden("jina_bert_code_odd_mean"), tmp_path, auto_map=jina_auto_map(JINA))


def test_a_folder_without_modules_has_the_mean_and_prefixed_names(tmp_path):
    arrays = golden("jina_bert_mean")
    _, wanted = converted(arrays, tmp_path / "bare")
    plain = {
        key.replace("safetensors:", "safetensors:bert."): array
        for key, array in arrays.items()
        if "Pooling" not in key and not key.endswith("modules.json")
    }
    spec, params = converted(plain, tmp_path / "prefixed", architectures=["JinaBertForMaskedLM"])
    assert (spec.task, spec.head.pooling, spec.head.modules) == ("embed", ("mean",), ())
    assert params.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(params[name], array)


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
