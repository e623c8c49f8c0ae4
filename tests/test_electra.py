"""ELECTRA: BERT with embeddings of another width.

Its numbers are compared with torch's by the goldens.
"""

import numpy as np
from test_families import PROJECTION, converted, golden


def test_the_projection_is_a_linear_layer_after_the_norm(tmp_path):
    arrays = golden("electra_mean")
    _, params = converted(arrays, tmp_path)
    kernel = params["tower.embeddings.projection.kernel"]
    np.testing.assert_array_equal(kernel, arrays[PROJECTION].T)
    assert params["tower.embeddings.norm.scale"].shape == (kernel.shape[0],) == (10,)


def test_the_heads_of_a_generator_are_left_out(tmp_path):
    arrays = golden("electra_odd_cls")
    wide = np.zeros((15, 15), np.float32)
    for name in ("generator_predictions.dense.weight", "generator_lm_head.weight"):
        arrays[f"tensors/model.safetensors:{name}"] = wide
    spec, params = converted(arrays, tmp_path)
    assert spec.task == "embed"
    assert not [name for name in params if "projection" in name]


def test_pairs_have_types_where_no_tokenizer_class_is_named(tmp_path):
    arrays = golden("electra_cross_encoder")
    arrays["source/tokenizer_config.json"] = np.array("{}")
    assert converted(arrays, tmp_path)[0].token_types
