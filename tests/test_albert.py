"""ALBERT: BERT with few layers, each of which runs several times.

Its numbers are compared with torch's by the goldens.
"""

import numpy as np
import pytest
from test_adapter_conversion import write_adapter
from test_families import SECOND_GROUP, converted, golden

from jaxembed.errors import ConversionError
from jaxembed.models import parameter_shapes

QUERY = "encoder.albert_layer_groups.0.albert_layers.0.attention.query"


def test_a_layer_that_runs_twice_is_held_once(tmp_path):
    spec, held = converted(golden("albert_mean"), tmp_path)
    assert spec.config["layer_order"] == [0, 0]
    assert held.keys() == parameter_shapes(spec).keys()
    assert {name.split(".")[2] for name in held if name.startswith("tower.layers.")} == {"0"}


def test_an_adapter_of_a_layer_is_one_for_all_its_runs(tmp_path):
    adapter = write_adapter(tmp_path / "a", {QUERY: (16, 16)})
    spec, _ = converted(golden("albert_mean"), tmp_path, {"one": adapter})
    assert spec.adapters[0].ranks == {"tower.layers.0.attention.qkv": 3}


def test_an_adapter_of_one_run_of_a_layer_is_refused(tmp_path):
    adapter = write_adapter(tmp_path / "a", {f"{SECOND_GROUP}.attention.query": (16, 16)})
    with pytest.raises(ConversionError, match=r"unused: .*albert_layer_groups\.1\."):
        converted(golden("albert_mean"), tmp_path, {"one": adapter})


def test_pairs_have_types_where_tokenizer_config_asks_for_them(tmp_path):
    """transformers' AlbertTokenizer gives none by itself since version 5."""
    arrays = golden("albert_cross_encoder")
    names = '{"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}'
    arrays["source/tokenizer_config.json"] = np.array(names)
    assert converted(arrays, tmp_path)[0].token_types
