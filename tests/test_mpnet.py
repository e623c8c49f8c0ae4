"""MPNet: RoBERTa's positions, and biases of scores by distance.

Its numbers are compared with torch's by the goldens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from test_golden import FILES, read, write_source

from converters import convert, mpnet
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models import position_limit
from jaxembed.spec import DenseLayer, ModelSpec

# all-mpnet-base-v2 as published, with smaller sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["MPNetForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 16,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 26,
    "model_type": "mpnet",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
    "transformers_version": "4.8.2",
    "vocab_size": 11,
}
RESAVED = PUBLISHED | {"dtype": "float32", "tie_word_embeddings": True}

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 16,
    "max_positions": 26,
    "type_vocab_size": 0,
    "norm_eps": 1e-5,
    "activation": "gelu",
    "pad_id": 1,
    "bias_reach": 128,
}
TABLE = "tensors/model.safetensors:mpnet.encoder.relative_attention_bias.weight"


def converted(arrays: dict[str, np.ndarray], folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    source = write_source(arrays, folder / "source")
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


@pytest.fixture(name="scorer")
def _scorer() -> dict[str, np.ndarray]:
    return read(next(file for file in FILES if file.stem == "mpnet_cross_encoder"))


@pytest.mark.parametrize("hf", [PUBLISHED, RESAVED], ids=["transformers 4", "transformers 5"])
def test_both_spellings_of_a_config_are_read(hf):
    assert mpnet.config(hf) == CONFIG


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"layer_norm_eps": 1e-3}, {"norm_eps": 1e-3}),
        ({"pad_token_id": 3}, {}),  # transformers counts from 1 whatever it says
        ({"type_vocab_size": 2}, {}),
    ],
    ids=str,
)
def test_odd_configs_are_read(said, read):
    assert mpnet.config(PUBLISHED | said) == CONFIG | read


def test_what_a_config_leaves_out_has_the_default_of_transformers():
    least = {key: PUBLISHED[key] for key in mpnet.bert.REQUIRED}
    assert mpnet.config(least) == CONFIG | {"norm_eps": 1e-12}


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"relative_attention_num_buckets": 64}, UnsupportedModel, "num_buckets 64 .* known: 32"),
        ({"hidden_act": "mish"}, UnsupportedModel, "hidden_act 'mish'"),
        ({"num_attention_heads": 3}, CheckpointError, "not a multiple of num_attention_heads 3"),
        ({"max_position_embeddings": 2}, CheckpointError, "is 2, wanted at least 3"),
        ({"vocab_size": None}, CheckpointError, "lacks vocab_size"),
        ({"architectures": ["MPNetForQuestionAnswering"]}, UnsupportedModel, "QuestionAnswering"),
        ({"auto_map": {"AutoModel": "modeling.MPNetModel"}}, UnsupportedModel, "its own code"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


def test_all_layers_share_one_table_of_biases_by_distance(scorer, tmp_path):
    spec, params = converted(scorer, tmp_path)
    biases, buckets = params["tower.distance.bias"], scorer[TABLE]
    assert biases.shape == (2, 257)
    assert [name for name in params if "distance" in name] == ["tower.distance.bias"]
    for distance, bucket in ((-128, 15), (-1, 1), (0, 0), (1, 17), (8, 24), (128, 31)):
        np.testing.assert_array_equal(biases[:, 128 + distance], buckets[bucket])
    assert position_limit(spec) == 32  # two fewer than the table of positions has


def test_a_table_of_another_shape_is_refused(scorer, tmp_path):
    scorer[TABLE] = scorer[TABLE][:16]
    with pytest.raises(ConversionError, match=r"wanted shape \(32, 2\), got \(16, 2\)"):
        converted(scorer, tmp_path)


def test_a_reranker_is_two_layers_on_the_first_token(scorer, tmp_path):
    spec, _ = converted(scorer, tmp_path)
    assert (spec.task, spec.head.pooling, spec.token_types) == ("rerank", ("cls",), False)
    assert spec.head.modules == (
        DenseLayer(in_features=16, out_features=16, activation="tanh"),
        DenseLayer(in_features=16, out_features=1, activation="identity"),
    )
