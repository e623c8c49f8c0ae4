"""BAAI's rerankers with a head for each of several layers, of which one is converted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sources import change_json, converted
from test_families import golden
from test_golden import write_source
from test_server_openai import ask

from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

NAMES = ["minicpm_layerwise", "gemma2_lightweight"]


def write(folder: Path, name: str, **config: Any) -> Path:
    """A golden of two layers, with a head after each of them."""
    write_source(golden(name), folder)
    change_json(folder / "config.json", **config)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_layers_above_the_cutoff_and_their_heads_are_left_out(name, tmp_path):
    source = write(tmp_path / "source", name)
    whole, parameters = converted(source, tmp_path / "whole")
    spec, cut = converted(source, tmp_path / "cut", cutoff_layer=1)
    assert (whole.config["num_layers"], spec.config["num_layers"]) == (2, 1)
    assert cut.keys() == {key for key in parameters if "tower.layers.1." not in key}
    kernel = "heads.logits.modules.0.kernel"
    for key in cut:  # each layer has a head of its own
        assert np.array_equal(cut[key], parameters[key]) == (key != kernel), key


@pytest.mark.parametrize(
    ("name", "config", "layer", "message"),
    [
        ("minicpm_layerwise", {}, 3, "cutoff layer 3 is not supported; known: 1, 2"),
        ("minicpm_layerwise", {"start_layer": 2}, 1, "cutoff layer 1 is not supported; known: 2"),
        ("minicpm_layerwise", {"head_type": "raw"}, None, "head_type 'raw' is not supported"),
        ("minicpm_layerwise", {"head_multi": False}, None, "head_multi False is not supported"),
        ("gemma2_lightweight", {"layer_wise": False}, None, "layer_wise False is not supported"),
        ("gemma2_lightweight", {"layer_sep": 3}, None, "cutoff layer 2 is not supported; known: 1"),
    ],
    ids=["over", "under", "raw", "one-head", "vocabulary", "between"],
)
def test_a_layer_without_a_head_is_refused(name, config, layer, message, tmp_path):
    with pytest.raises(UnsupportedModel, match=message):
        converted(write(tmp_path / "source", name, **config), cutoff_layer=layer)


def test_heads_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ConversionError, match=r"missing: lm_head\.2\.linear_head\.weight"):
        converted(write(tmp_path / "source", "minicpm_layerwise", start_layer=0))


@pytest.mark.parametrize("name", ["bert_mean", "static_bert"])
def test_models_with_one_head_take_no_cutoff_layer(name, tmp_path):
    with pytest.raises(UnsupportedModel, match=r"--cutoff-layer 1: .* (only a head|no layers)"):
        converted(write_source(golden(name), tmp_path / "source"), cutoff_layer=1)


def test_the_template_needs_the_token_that_begins_texts(tmp_path):
    source = write(tmp_path / "source", "minicpm_layerwise")
    change_json(source / "tokenizer_config.json", bos_token=None)
    with pytest.raises(CheckpointError, match="has no bos_token"):
        converted(source)


@pytest.mark.parametrize("field", ["cutoff_layers", "compress_layers"])
def test_a_request_cannot_choose_the_layer(field):
    response, body = ask({"query": "a", "documents": ["b"], field: [28]}, path="/v1/rerank")
    assert response.status_code == 400
    assert body["error"]["param"] == field
