"""ELECTRA: BERT with embeddings of another width.

Its numbers are compared with torch's by the goldens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from test_golden import FILES, read, write_source

from converters import convert, electra
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.spec import DenseLayer, ModelSpec

# electra-small-discriminator as published, with smaller sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["ElectraForPreTraining"],
    "attention_probs_dropout_prob": 0.1,
    "embedding_size": 6,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 16,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 24,
    "model_type": "electra",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "position_embedding_type": "absolute",
    "summary_activation": "gelu",
    "summary_last_dropout": 0.1,
    "summary_type": "first",
    "summary_use_proj": True,
    "type_vocab_size": 2,
    "vocab_size": 11,
}
RESAVED = {key: value for key, value in PUBLISHED.items() if key != "position_embedding_type"} | {
    "add_cross_attention": False,
    "dtype": "float32",
    "is_decoder": False,
    "tie_word_embeddings": True,
}

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 16,
    "max_positions": 24,
    "type_vocab_size": 2,
    "norm_eps": 1e-12,
    "activation": "gelu",
    "embedding_size": 6,
}
PROJECTION = "tensors/model.safetensors:electra.embeddings_project.weight"


def golden(name: str) -> dict[str, np.ndarray]:
    return read(next(file for file in FILES if file.stem == name))


def converted(arrays: dict[str, np.ndarray], folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    source = write_source(arrays, folder / "source")
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


@pytest.mark.parametrize("hf", [PUBLISHED, RESAVED], ids=["transformers 4", "transformers 5"])
def test_both_spellings_of_a_config_are_read(hf):
    assert electra.config(hf) == CONFIG


def test_what_a_config_leaves_out_has_the_default_of_transformers():
    least = {key: PUBLISHED[key] for key in electra.bert.REQUIRED}
    assert electra.config(least) == CONFIG | {"embedding_size": 128}


def test_embeddings_of_the_hidden_size_are_not_projected():
    assert electra.config(PUBLISHED | {"embedding_size": 8})["embedding_size"] is None


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"summary_type": "mean"}, UnsupportedModel, "summary_type 'mean' .* known: first"),
        ({"summary_use_proj": False}, UnsupportedModel, "summary_use_proj False"),
        ({"summary_activation": "tanh"}, UnsupportedModel, "summary_activation 'tanh'"),
        ({"position_embedding_type": "relative_key"}, UnsupportedModel, "'relative_key'"),
        ({"hidden_act": "mish"}, UnsupportedModel, "hidden_act 'mish'"),
        ({"is_decoder": True}, UnsupportedModel, "is_decoder=True"),
        ({"num_attention_heads": 3}, CheckpointError, "not a multiple of num_attention_heads 3"),
        ({"embedding_size": None}, CheckpointError, "lacks embedding_size"),
        ({"architectures": ["ElectraForQuestionAnswering"]}, UnsupportedModel, "QuestionAnswering"),
        ({"auto_map": {"AutoModel": "modeling.Electra"}}, UnsupportedModel, "its own code"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


def test_the_projection_is_a_linear_layer_after_the_norm(tmp_path):
    arrays = golden("electra_mean")
    _, params = converted(arrays, tmp_path)
    kernel = params["tower.embeddings.projection.kernel"]
    np.testing.assert_array_equal(kernel, arrays[PROJECTION].T)
    assert params["tower.embeddings.norm.scale"].shape == (kernel.shape[0],) == (10,)


def test_a_projection_of_another_width_is_refused(tmp_path):
    arrays = golden("electra_mean")
    arrays[PROJECTION] = arrays[PROJECTION][:, :9]
    with pytest.raises(ConversionError, match=r"wanted shape \(16, 10\), got \(16, 9\)"):
        converted(arrays, tmp_path)


def test_a_missing_projection_is_refused(tmp_path):
    arrays = golden("electra_mean")
    del arrays[PROJECTION]
    with pytest.raises(ConversionError, match=r"missing: embeddings_project\.weight"):
        converted(arrays, tmp_path)


def test_the_heads_of_a_generator_are_left_out(tmp_path):
    arrays = golden("electra_odd_cls")
    wide = np.zeros((15, 15), np.float32)
    for name in ("generator_predictions.dense.weight", "generator_lm_head.weight"):
        arrays[f"tensors/model.safetensors:{name}"] = wide
    spec, params = converted(arrays, tmp_path)
    assert spec.task == "embed"
    assert not [name for name in params if "projection" in name]


@pytest.mark.parametrize("named", [True, False])
def test_pairs_have_types_whether_a_tokenizer_class_is_named(named, tmp_path):
    arrays = golden("electra_cross_encoder")
    if not named:
        arrays["source/tokenizer_config.json"] = np.array("{}")
    spec, _ = converted(arrays, tmp_path)
    assert spec.token_types


def test_a_reranker_is_two_layers_on_the_first_token_with_gelu_between(tmp_path):
    spec, _ = converted(golden("electra_cross_encoder"), tmp_path)
    assert (spec.task, spec.head.pooling) == ("rerank", ("cls",))
    assert spec.head.modules == (
        DenseLayer(in_features=16, out_features=16, activation="gelu"),
        DenseLayer(in_features=16, out_features=1, activation="identity"),
    )
