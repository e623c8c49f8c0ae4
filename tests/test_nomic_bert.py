"""NomicBERT: the configs of its own code and of transformers, and what each of them refuses.

Its numbers are compared with torch's by the goldens.
"""

import json

import numpy as np
from test_families import NOMIC, TENSORS, converted, golden


def test_the_config_of_its_own_code_gives_the_same_model(tmp_path):
    arrays = golden("nomic_bert_mean")
    resaved, wanted = converted(arrays, tmp_path / "resaved")
    sizes = {
        "vocab_size": resaved.config["vocab_size"],
        "pad_vocab_size_multiple": 1,
        "n_positions": 32,
        "max_trained_positions": 32,
    }
    arrays["source/config.json"] = np.array(json.dumps(NOMIC | sizes))
    spec, params = converted(arrays, tmp_path / "published")
    assert spec.config == resaved.config
    for name, array in wanted.items():
        np.testing.assert_array_equal(params[name], array)
    # the gate is fc12
    gate, up = (arrays[f"{TENSORS}encoder.layers.1.mlp.fc1{n}.weight"].T for n in (2, 1))
    kernel = params["tower.layers.1.mlp.gate_up.kernel"]
    np.testing.assert_array_equal(kernel, np.concatenate([gate, up], axis=1))
