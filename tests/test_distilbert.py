"""DistilBERT: BERT without types, under names of its own.

Its numbers are compared with torch's by the goldens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources

from converters import convert, distilbert
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.spec import DenseLayer, ModelSpec

# As published, by transformers 4.
PUBLISHED: dict[str, Any] = {
    "activation": "gelu",
    "architectures": ["DistilBertForMaskedLM"],
    "attention_dropout": 0.1,
    "dim": sources.HIDDEN,
    "dropout": 0.1,
    "hidden_dim": sources.INTERMEDIATE,
    "initializer_range": 0.02,
    "max_position_embeddings": sources.POSITIONS,
    "model_type": "distilbert",
    "n_heads": 2,
    "n_layers": sources.LAYERS,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "vocab_size": len(sources.WORDS),
}
RESAVED = {key: value for key, value in PUBLISHED.items() if key != "tie_weights_"} | {
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": None,
    "tie_word_embeddings": True,
}

CONFIG = {
    "vocab_size": len(sources.WORDS),
    "hidden_size": sources.HIDDEN,
    "num_layers": sources.LAYERS,
    "num_heads": 2,
    "intermediate_size": sources.INTERMEDIATE,
    "max_positions": sources.POSITIONS,
    "type_vocab_size": 0,
    "norm_eps": 1e-12,
    "activation": "gelu",
}

# BERT's names and DistilBERT's, the longer of two first
NAMES = {
    "encoder.": "transformer.",
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
TYPES = "embeddings.token_type_embeddings.weight"
HEAD = {"pre_classifier": (sources.HIDDEN, sources.HIDDEN), "classifier": (sources.HIDDEN, 3)}


def tensors() -> sources.Tensors:
    """Those of `sources.bert_tensors()`, but for the types."""
    renamed = {}
    for name, array in sources.bert_tensors().items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        renamed[f"distilbert.{name}"] = array
    renamed.pop(f"distilbert.{TYPES}")
    return renamed


def converted(
    folder: Path, weights: sources.Tensors, **config: Any
) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    source = folder / "source"
    sources.write_json(source / "config.json", PUBLISHED | config)
    sources.wordpiece().save(str(source / "tokenizer.json"))
    sources.write_weights(source, weights)
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


@pytest.mark.parametrize("hf", [PUBLISHED, RESAVED], ids=["transformers 4", "transformers 5"])
def test_both_spellings_of_a_config_are_read(hf):
    assert distilbert.config(hf) == CONFIG


def test_what_a_config_leaves_out_has_the_default_of_transformers():
    assert distilbert.config({key: PUBLISHED[key] for key in distilbert.REQUIRED}) == CONFIG


@pytest.mark.parametrize(
    "said",
    [
        {"layer_norm_eps": 1e-5},
        {"hidden_act": "silu"},
        {"type_vocab_size": 2},
        {"pruned_heads": {}},
    ],
    ids=str,
)
def test_what_transformers_does_not_read_changes_nothing(said):
    assert distilbert.config(PUBLISHED | said) == CONFIG


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"activation": "mish"}, UnsupportedModel, "activation 'mish'"),
        ({"pruned_heads": {"0": [1]}}, UnsupportedModel, "pruned_heads="),
        ({"n_heads": 3}, CheckpointError, "dim 8 is not a multiple of n_heads 3"),
        ({"dim": None, "n_layers": None}, CheckpointError, "lacks dim, n_layers"),
        (
            {"architectures": ["DistilBertForQuestionAnswering"]},
            UnsupportedModel,
            "DistilBertForQuestionAnswering",
        ),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(said, error, message, tmp_path):
    sources.write_json(tmp_path / "source" / "config.json", PUBLISHED | said)
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("sinusoidal", [False, True])
def test_the_parameters_are_those_of_a_bert_but_for_the_types(sinusoidal, tmp_path):
    """The table of positions comes from the file, whatever it was made of."""
    spec, params = converted(tmp_path, tensors(), sinusoidal_pos_embds=sinusoidal)
    bert = sources.write_bert(tmp_path / "bert-source", tensors=sources.bert_tensors())
    wanted = checkpoint.load_params(
        tmp_path / "bert", convert(bert, tmp_path / "bert", progress=lambda steps: steps)
    )
    wanted.pop("tower.embeddings.type.embedding")
    assert params.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(params[name], array)
    assert (spec.architecture, spec.max_input_tokens) == ("bert", sources.POSITIONS)


def test_prefixes_and_what_was_only_trained_with_are_dropped(tmp_path):
    plain = {name.removeprefix("distilbert."): array for name, array in tensors().items()}
    plain |= {"embeddings.position_ids": np.arange(sources.POSITIONS)[None]}
    plain |= sources.head_tensors({"vocab_transform": (8, 8), "vocab_projector": (8, 11)} | HEAD)
    plain |= {"vocab_layer_norm.weight": np.ones(8, np.float32)}
    spec, _ = converted(tmp_path, plain)
    assert (spec.task, spec.head.pooling, spec.head.modules) == ("embed", ("mean",), ())


def test_a_table_of_types_is_refused(tmp_path):
    table = np.zeros((2, sources.HIDDEN), np.float32)
    with pytest.raises(ConversionError, match=f"unused: distilbert.{TYPES}"):
        converted(tmp_path, tensors() | {f"distilbert.{TYPES}": table})


def test_a_classifier_is_two_layers_on_the_first_token_with_relu_between(tmp_path):
    spec, params = converted(
        tmp_path,
        tensors() | sources.head_tensors(HEAD),
        architectures=["DistilBertForSequenceClassification"],
        id2label={"0": "good", "1": "bad", "2": "ugly"},
    )
    assert (spec.task, spec.labels, spec.head.pooling) == (
        "classify",
        ("good", "bad", "ugly"),
        ("cls",),
    )
    assert spec.head.modules == (
        DenseLayer(in_features=8, out_features=8, activation="relu"),
        DenseLayer(in_features=8, out_features=3, activation="identity"),
    )
    kernel = sources.head_tensors(HEAD)["pre_classifier.weight"].T
    np.testing.assert_array_equal(params["heads.logits.modules.0.kernel"], kernel)
