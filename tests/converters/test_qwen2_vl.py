"""jina-reranker-m0: what its files may hold, and what is refused. tests/parity/test_jina_m0.py
compares its scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sources import NORMALIZE, POOLING, TRANSFORMER, change_json, converted, write_modules
from test_families import golden
from test_golden import write_source

from converters import outline
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

WEIGHTS = "model.safetensors"
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"


def write(folder: Path, **config: Any) -> Path:
    write_source(golden("qwen2_vl_reranker"), folder)
    change_json(folder / "config.json", **config)
    return folder


def test_the_last_bias_includes_that_of_the_sigmoid(tmp_path):
    source = write(tmp_path / "source")
    spec, parameters = converted(source)
    (bias,) = load_file(source / WEIGHTS)["score.2.bias"]
    assert parameters["heads.logits.modules.1.bias"] == pytest.approx([bias - 2.65])
    assert (spec.task, spec.score_function) == ("rerank", "sigmoid")


def test_the_files_of_transformers_5_convert_alike(tmp_path):
    source = write(tmp_path / "source")
    wanted = converted(source, tmp_path / "first")
    config = json.loads((source / "config.json").read_text())
    top = {key: config.pop(key) for key in ("architectures", "auto_map", "vision_config")}
    config["model_type"] = "qwen2_vl_text"
    nested = top | {"model_type": "qwen2_vl", "text_config": config}
    nested |= {key: config[key] for key in config if key.endswith("_token_id")}
    (source / "config.json").write_text(json.dumps(nested))
    tensors = {}
    for name, array in load_file(source / WEIGHTS).items():
        name = name.replace("model.", "model.language_model.").replace("visual.", "model.visual.")
        tensors[name] = array
    save_file(tensors, source / WEIGHTS)
    found = converted(source, tmp_path / "second")
    assert found[0].config == wanted[0].config
    assert found[1].keys() == wanted[1].keys()
    for name, array in found[1].items():
        np.testing.assert_array_equal(array, wanted[1][name])


def test_limits_are_those_of_the_authors_code(tmp_path):
    source = write(tmp_path / "source", max_position_embeddings=32768)
    change_json(source / "tokenizer_config.json", model_max_length=32768)
    change_json(source / "preprocessor_config.json", size={}, min_pixels=4096, max_pixels=2**20)
    spec = outline(source).spec
    assert spec.max_input_tokens == 10_240
    assert spec.image.area == (4 * 64, 768 * 64)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"architectures": ["Qwen2VLForConditionalGeneration"]},
            UnsupportedModel,
            "Qwen2VLForConditionalGeneration does not say how the model embeds",
        ),
        ({"architectures": None}, UnsupportedModel, r'such as "architectures": \["JinaVLFor'),
        ({"auto_map": {"AutoModel": "other.Model"}}, UnsupportedModel, "its own code"),
        (
            {"text_config": {"model_type": "qwen2"}},
            UnsupportedModel,
            "text_config of model_type 'qwen2' is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            UnsupportedModel,
            "rope_type 'linear' with mrope_section",
        ),
        ({"vision_config": {"model_type": "siglip"}}, UnsupportedModel, "model_type 'siglip'"),
        ({"vision_config": None}, CheckpointError, "image encoder outputs 3584 numbers"),
        ({"vocab_size": 100}, CheckpointError, "wanted ids of the vocabulary, which has 100"),
    ],
    ids=["generator", "no-class", "code", "text", "rope", "vision", "no-vision", "vocabulary"],
)
def test_other_models_are_refused(tmp_path, config, error, message):
    with pytest.raises(error, match=message):
        outline(write(tmp_path / "source", **config))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (((POOLING, "1_Pooling"), (NORMALIZE, "2_Normalize")), "names a Pooling"),
        (((LOGIT_SCORE, "1_LogitScore"),), "1_LogitScore scores by the logits of tokens"),
    ],
    ids=["pooling", "logits"],
)
def test_other_heads_are_refused(tmp_path, modules, message):
    source = write(tmp_path / "source")
    write_modules(source, (TRANSFORMER, ""), *modules)
    with pytest.raises(UnsupportedModel, match=message):
        outline(source)


@pytest.mark.parametrize("name", ["score.2.bias", "visual.merger.ln_q.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    source = write(tmp_path / "source")
    tensors = load_file(source / WEIGHTS)
    del tensors[name]
    save_file(tensors, source / WEIGHTS)
    with pytest.raises(ConversionError, match=f"missing: .*{name}"):
        converted(source)
