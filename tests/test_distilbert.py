"""DistilBERT: BERT without types, under names of its own.

Its numbers are compared with torch's by the goldens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from test_families import DISTILBERT

from converters import convert
from jaxembed import checkpoint
from jaxembed.errors import ConversionError
from jaxembed.spec import ModelSpec

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
    sources.write_json(source / "config.json", DISTILBERT | config)
    sources.wordpiece().save(str(source / "tokenizer.json"))
    sources.write_weights(source, weights)
    spec = convert(source, folder / "out", progress=lambda steps: steps)
    return spec, checkpoint.load_params(folder / "out", spec)


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
