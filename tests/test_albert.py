"""ALBERT: BERT with few layers, each of which runs several times.

Its numbers are compared with torch's by the goldens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from test_adapter_conversion import write_adapter
from test_golden import FILES, read, write_source

from converters import albert, convert
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models import parameter_shapes
from jaxembed.spec import DenseLayer, ModelSpec

# paraphrase-albert-small-v2 as published, with smaller sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["AlbertModel"],
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 2,
    "classifier_dropout_prob": 0.1,
    "down_scale_factor": 1,
    "embedding_size": 6,
    "eos_token_id": 3,
    "gap_size": 0,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0,
    "hidden_size": 8,
    "initializer_range": 0.02,
    "inner_group_num": 1,
    "intermediate_size": 16,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 24,
    "model_type": "albert",
    "net_structure_type": 0,
    "num_attention_heads": 2,
    "num_hidden_groups": 1,
    "num_hidden_layers": 6,
    "num_memory_blocks": 0,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 11,
}
RESAVED = {key: value for key, value in PUBLISHED.items() if key != "position_embedding_type"} | {
    "dtype": "float32",
    "tie_word_embeddings": True,
}

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 16,
    "max_positions": 24,
    "type_vocab_size": 2,
    "norm_eps": 1e-12,
    "activation": "gelu_tanh",
    "embedding_size": 6,
    "layer_order": [0, 0, 0, 0, 0, 0],
}
LAYER = "encoder.albert_layer_groups.0.albert_layers.0"


def golden(name: str) -> dict[str, np.ndarray]:
    return read(next(file for file in FILES if file.stem == name))


def converted(arrays: dict[str, np.ndarray], folder: Path, **adapters: Path) -> ModelSpec:
    source = write_source(arrays, folder / "source")
    return convert(source, folder / "out", adapters=adapters, progress=lambda steps: steps)


@pytest.mark.parametrize("hf", [PUBLISHED, RESAVED], ids=["transformers 4", "transformers 5"])
def test_both_spellings_of_a_config_are_read(hf):
    assert albert.config(hf) == CONFIG


def test_what_a_config_leaves_out_has_the_default_of_transformers():
    least = {key: PUBLISHED[key] for key in albert.bert.REQUIRED}
    assert albert.config(least) == CONFIG | {"embedding_size": 128}


@pytest.mark.parametrize(
    ("layers", "groups", "inner", "order"),
    # as the loop of transformers' AlbertTransformer runs them
    [
        (3, 1, 2, [0, 1, 0, 1, 0, 1]),
        (4, 2, 1, [0, 0, 1, 1]),
        (3, 2, 2, [0, 1, 0, 1, 2, 3]),
        (2, 2, 1, [0, 1]),
    ],
)
def test_groups_of_layers_run_one_after_another(layers, groups, inner, order):
    fields = albert.config(
        PUBLISHED
        | {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    )
    assert (fields["num_layers"], fields["layer_order"]) == (groups * inner, order)


def test_embeddings_of_the_hidden_size_are_projected_too():
    assert albert.config(PUBLISHED | {"embedding_size": 8})["embedding_size"] == 8


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (
            {"num_hidden_groups": 7},
            CheckpointError,
            "num_hidden_groups is 7; wanted 1 to 6 groups",
        ),
        ({"num_hidden_groups": 0}, CheckpointError, "num_hidden_groups is 0"),
        ({"inner_group_num": 0}, CheckpointError, "inner_group_num is 0, wanted a whole"),
        ({"inner_group_num": None}, CheckpointError, "lacks inner_group_num"),
        ({"position_embedding_type": "relative_key"}, UnsupportedModel, "'relative_key'"),
        ({"hidden_act": "mish"}, UnsupportedModel, "hidden_act 'mish'"),
        ({"num_attention_heads": 3}, CheckpointError, "not a multiple of num_attention_heads 3"),
        ({"embedding_size": None}, CheckpointError, "lacks embedding_size"),
        ({"architectures": ["AlbertForQuestionAnswering"]}, UnsupportedModel, "QuestionAnswering"),
        ({"auto_map": {"AutoModel": "modeling.Albert"}}, UnsupportedModel, "its own code"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


def test_a_layer_that_runs_twice_is_held_once(tmp_path):
    spec = converted(golden("albert_mean"), tmp_path)
    assert spec.config["layer_order"] == [0, 0]
    held = checkpoint.load_params(tmp_path / "out", spec)
    assert held.keys() == parameter_shapes(spec).keys()
    assert {name.split(".")[2] for name in held if name.startswith("tower.layers.")} == {"0"}


def test_layers_that_no_group_has_are_refused(tmp_path):
    arrays = golden("albert_mean")
    extra = (
        "tensors/model.safetensors:albert.encoder.albert_layer_groups.1.albert_layers.0.ffn.bias"
    )
    arrays[extra] = np.zeros(32, np.float32)
    with pytest.raises(ConversionError, match=r"unused: .*albert_layer_groups\.1\."):
        converted(arrays, tmp_path)


def test_an_adapter_of_a_layer_is_one_for_all_its_runs(tmp_path):
    adapter = write_adapter(tmp_path / "a", {f"{LAYER}.attention.query": (16, 16)})
    spec = converted(golden("albert_mean"), tmp_path, one=adapter)
    assert spec.adapters[0].ranks == {"tower.layers.0.attention.qkv": 3}


def test_an_adapter_of_one_run_of_a_layer_is_refused(tmp_path):
    of_second = "encoder.albert_layer_groups.1.albert_layers.0.attention.query"
    adapter = write_adapter(tmp_path / "a", {of_second: (16, 16)})
    with pytest.raises(ConversionError, match=r"unused: .*albert_layer_groups\.1\."):
        converted(golden("albert_mean"), tmp_path, one=adapter)


def test_a_reranker_is_the_pooler_on_the_first_token_and_a_layer(tmp_path):
    spec = converted(golden("albert_cross_encoder"), tmp_path)
    assert (spec.task, spec.head.pooling) == ("rerank", ("cls",))
    assert spec.head.modules == (
        DenseLayer(in_features=16, out_features=16, activation="tanh"),
        DenseLayer(in_features=16, out_features=1, activation="identity"),
    )


@pytest.mark.parametrize("named", [True, False])
def test_pairs_have_types_where_tokenizer_config_asks_for_them(named, tmp_path):
    """transformers' AlbertTokenizer gives none by itself since version 5."""
    arrays = golden("albert_cross_encoder")
    if named:
        names = '{"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}'
        arrays["source/tokenizer_config.json"] = np.array(names)
    assert converted(arrays, tmp_path).token_types == named
