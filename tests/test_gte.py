"""GTE: the configs of Alibaba's and Snowflake's code and of transformers, and their refusals.

Its numbers are compared with torch's by the goldens.
"""

import json

import numpy as np
import pytest
from test_families import GTE, converted, golden

from converters import gte


def test_ntk_scales_texts_of_every_length_as_in_the_published_code():
    heads = {"hidden_size": 768, "num_attention_heads": 12}
    fields = gte.config(GTE | heads)
    assert fields["rope_theta"] == 160000.0
    assert fields["rope_scaling"]["factor"] == pytest.approx(1.06714, abs=1e-5)
    ntk = {"rope_type": "ntk", "type": "ntk", "factor": 8.0, "rope_theta": 20000}
    resaved = GTE | heads | {"rope_scaling": None, "rope_theta": None}
    assert gte.config(resaved | {"rope_parameters": ntk}) == fields


def arrays_named(arrays: dict[str, np.ndarray], end: str) -> np.ndarray:
    return next(array for name, array in arrays.items() if name.endswith(end))


def published_names(arrays: dict[str, np.ndarray], packed: bool) -> dict[str, np.ndarray]:
    """As Alibaba names them, with the head of the sparse weights."""
    named = {}
    for key, array in arrays.items():
        name = key.replace("safetensors:", "safetensors:new.")
        if ".qkv_proj." in name and not packed:
            parts = np.split(array, 3)
            named |= {
                name.replace("qkv_proj", f"{x}_proj"): y for x, y in zip("qkv", parts, strict=True)
            }
        else:
            named[name] = array
    head = "tensors/model.safetensors:classifier"
    return named | {
        f"{head}.weight": np.ones((1, 16), np.float32),
        f"{head}.bias": np.ones(1, np.float32),
    }


@pytest.mark.parametrize("packed", [True, False])
def test_the_published_spelling_gives_the_same_model(packed, tmp_path):
    arrays = golden("gte_cls")
    _, wanted = converted(arrays, tmp_path / "native")
    names = published_names(arrays, packed)
    rows = arrays_named(arrays, "word_embeddings.weight").shape[0]
    config = GTE | {"pack_qkv": packed, "vocab_size": rows}
    names["source/config.json"] = np.array(json.dumps(config))
    spec, params = converted(names, tmp_path / "own")
    assert (spec.task, spec.head.pooling, spec.token_types) == ("embed", ("cls",), False)
    sparse = "heads.token_weights.modules.0"
    assert params.keys() - wanted.keys() == {f"{sparse}.kernel", f"{sparse}.bias"}
    assert spec.representations == ("dense", "sparse")
    for name, array in wanted.items():
        np.testing.assert_array_equal(params[name], array)
    # the second half is the gate
    up, gate = np.split(arrays_named(arrays, "layer.1.mlp.up_gate_proj.weight").T, 2, axis=1)
    kernel = params["tower.layers.1.mlp.gate_up.kernel"]
    np.testing.assert_array_equal(kernel, np.concatenate([gate, up], axis=1))
