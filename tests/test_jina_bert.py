"""JinaBERT v2, its code variant and jina-reranker-v1: their configs, tensors and refusals.

Their numbers are compared with torch's by the goldens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from test_golden import FILES, read, write_source

from converters import convert, jina_bert
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models.relative import alibi, alibi_slopes
from jaxembed.spec import DenseLayer, ModelSpec

IMPL, CODE = "jinaai/jina-bert-implementation--", "jinaai/jina-bert-v2-qk-post-norm--"


def auto_map(place: str) -> dict[str, str]:
    model = f"{place}modeling_bert.JinaBert"
    return {
        "AutoConfig": f"{place}configuration_bert.JinaBertConfig",
        "AutoModel": f"{model}Model",
        "AutoModelForMaskedLM": f"{model}ForMaskedLM",
        "AutoModelForSequenceClassification": f"{model}ForSequenceClassification",
    }


# jina-embeddings-v2-base-en as published, with smaller sizes.
PUBLISHED: dict[str, Any] = {
    "_name_or_path": "jinaai/jina-bert-implementation",
    "architectures": ["JinaBertForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "attn_implementation": "torch",
    "auto_map": auto_map(IMPL),
    "classifier_dropout": None,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "model_max_length": 8192,
    "model_type": "bert",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 64,
}
PUBLISHED_CODE = PUBLISHED | {
    "_name_or_path": "jinaai/jina-bert-v2-qk-post-norm",
    "auto_map": auto_map(CODE),
}

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 32,
    "max_positions": 8192,
    "type_vocab_size": 2,
    "norm_eps": 1e-12,
    "activation": "gelu",
    "alibi": True,
    "qk_norm": False,
    "residual_norm": False,
    "gated": True,
    "up_bias": False,
}
MORE_NORMS = {"qk_norm": True, "residual_norm": True}


def test_published_configs_are_read():
    assert jina_bert.config(PUBLISHED) == CONFIG
    assert jina_bert.config(PUBLISHED_CODE) == CONFIG | MORE_NORMS


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"auto_map": auto_map(""), "_name_or_path": "./tuned"}, {}),
        ({"auto_map": None, "architectures": ["JinaBertModel"]}, {}),
        ({"auto_map": None, "_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"}, MORE_NORMS),
        ({"hidden_act": "relu"}, {}),  # the gate has an activation of its own
        ({"emb_pooler": None, "layer_norm_eps": 1e-5}, {"norm_eps": 1e-5}),
    ],
    ids=str,
)
def test_odd_configs_are_read(said, read):
    assert jina_bert.config(PUBLISHED | said) == CONFIG | read


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
    assert jina_bert.is_jina_bert(PUBLISHED | said) is family


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (
            {"position_embedding_type": "absolute"},
            UnsupportedModel,
            "position_embedding_type 'absolute' is not supported; known: alibi",
        ),
        ({"feed_forward_type": "reglu"}, UnsupportedModel, "'reglu' .* known: geglu"),
        ({"feed_forward_type": "original"}, UnsupportedModel, "feed_forward_type 'original'"),
        ({"emb_pooler": "cls"}, UnsupportedModel, "emb_pooler 'cls' is not supported; known: mean"),
        ({"is_decoder": True}, UnsupportedModel, "is_decoder=True"),
        ({"num_attention_heads": 3}, CheckpointError, "not a multiple of num_attention_heads 3"),
        ({"vocab_size": None}, CheckpointError, "lacks vocab_size"),
        (
            {"architectures": ["JinaBertForTokenClassification"]},
            UnsupportedModel,
            "known: JinaBert",
        ),
        (
            {"auto_map": {"AutoModel": "other/fork--modeling_bert.JinaBertModel"}},
            UnsupportedModel,
            "brings its own code .*other/fork",
        ),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("key", ["position_embedding_type", "feed_forward_type"])
def test_a_missing_switch_has_the_default_of_the_published_code(key, tmp_path):
    said = {name: value for name, value in PUBLISHED.items() if name != key}
    with pytest.raises(UnsupportedModel, match=key):
        jina_bert.config(said)


def golden(name: str) -> dict[str, np.ndarray]:
    return read(next(file for file in FILES if file.stem == name))


def converted(
    arrays: dict[str, np.ndarray], folder: Path, **config: Any
) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """`config` are fields to change in config.json."""
    source = write_source(arrays, folder / "source")
    sources.change_json(source / "config.json", **config)
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


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
    said = {"auto_map": auto_map(""), "_name_or_path": None}
    spec, params = converted(arrays, tmp_path / "saved again", **said)
    assert (spec.config["qk_norm"], spec.config["residual_norm"]) == (more_norms, more_norms)
    for name, array in wanted.items():
        np.testing.assert_array_equal(params[name], array)


def test_tensors_of_the_variant_that_a_config_does_not_name_are_refused(tmp_path):
    with pytest.raises(ConversionError, match=r"missing: encoder\.layer\.0\.mlp\.gated_layers"):
        converted(golden("jina_bert_code_odd_mean"), tmp_path, auto_map=auto_map(IMPL))


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


def test_a_reranker_is_the_pooler_and_a_layer(tmp_path):
    spec, _ = converted(golden("jina_bert_cross_encoder"), tmp_path)
    assert (spec.task, spec.head.pooling, spec.labels) == ("rerank", ("cls",), ("LABEL_0",))
    assert spec.head.modules == (
        DenseLayer(in_features=15, out_features=15, activation="tanh"),
        DenseLayer(in_features=15, out_features=1, activation="identity"),
    )


def test_a_missing_tensor_is_named_as_its_variant_names_it(tmp_path):
    for name, missing in (
        ("jina_bert_mean", r"mlp\.wo\.weight"),
        ("jina_bert_code_odd_mean", r"mlp\.down_layer\.weight"),
    ):
        arrays = {
            key: x for key, x in golden(name).items() if f"1.{missing}".replace("\\", "") not in key
        }
        with pytest.raises(ConversionError, match=rf"missing: encoder\.layer\.1\.{missing}"):
            converted(arrays, tmp_path / name)


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (3, [-4, -8, -2]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
        (16, [-0.5 * n for n in range(1, 17)]),
    ],
)
def test_slopes_are_those_of_alibi(heads, exponents):
    np.testing.assert_allclose(np.log2(alibi_slopes(heads)), exponents, rtol=1e-12)


def test_the_bias_is_a_number_for_each_distance_and_the_same_on_both_sides():
    bias = np.asarray(alibi(12, 8192))
    assert bias.shape == (12, 2 * 8192 - 1)
    np.testing.assert_array_equal(bias, bias[:, ::-1])
    np.testing.assert_allclose(bias[8, :2], [-8191 * 2**-0.5, -8190 * 2**-0.5], rtol=1e-6)
