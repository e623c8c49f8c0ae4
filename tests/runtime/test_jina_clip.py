"""jina-clip-v1 and v2: what their files say, and what of them is refused."""

import numpy as np
import pytest
from dual_sources import picture
from jina_clip_sources import (
    IMAGE,
    LIMIT,
    LORA,
    PROMPT,
    TASK,
    TEXT,
    VERSIONS,
    jina_clip_config,
    jina_clip_tensors,
    write_jina_clip,
)
from sources import change_json, write_modules, write_weights
from test_field_types import assert_described_or_refused

from converters import convert, outline_routes
from jaxembed import Embedder, EngineConfig
from jaxembed.checkpoints.checkpoint import load_routes, verify, verify_values
from jaxembed.data.spec import IMAGE_ROUTE, TEXT_ROUTE
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

FILES = ("config.json", "preprocessor_config.json", "tokenizer_config.json")


def changed(half: str, field: str, value, version: str = "v2"):
    config = jina_clip_config(version)
    return config | {half: config[half] | {field: value}}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_checkpoint_says(tmp_path, version):
    folder = write_jina_clip(tmp_path / "source", jina_clip_config(version))
    convert(folder, tmp_path / "out")
    routes = load_routes(tmp_path / "out")
    text, image = routes.specs[TEXT_ROUTE], routes.specs[IMAGE_ROUTE]
    assert (text.architecture, image.architecture) == ("bert", "clip")
    assert (text.max_input_tokens, image.max_input_tokens) == (LIMIT, 17)
    assert text.dim == image.dim == 32
    assert (text.pooling, image.pooling) == (("mean",), ("cls",))
    assert text.heads["dense"].normalize
    assert image.heads["dense"].normalize
    assert text.config["alibi"] == (version == "v1")
    assert text.adapters == ()
    assert text.prompts == ({TASK: PROMPT} if version == "v2" else {})
    assert image.config["rotary_span"] == (4 if version == "v1" else 3)
    assert image.image.grid == (4, 4)
    assert image.image.rounds_crop
    verify(tmp_path / "out")
    verify_values(tmp_path / "out")


@pytest.mark.parametrize("version", VERSIONS)
def test_inputs_of_both_kinds_in_one_batch_equal_each_alone(tmp_path, version):
    folder = write_jina_clip(tmp_path / "source", jina_clip_config(version))
    inputs = ["w1 w2", picture(1), "w3", picture(2, 50, 70)]
    config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=256)
    with Embedder(str(folder), cache_dir=tmp_path / "cache", config=config) as embedder:
        together = embedder.encode(inputs)
        alone = np.stack([embedder.encode([one])[0] for one in inputs])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    assert np.abs(together[1] - together[3]).max() > 1e-3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (jina_clip_config("v2") | {"add_projections": True}, "add_projections True"),
        (jina_clip_config("v2") | {"truncate_dim": 16}, "truncate_dim 16"),
        (jina_clip_config("v2") | {"architectures": ["JinaCLIPTextModel"]}, "JinaCLIPTextModel"),
        (changed("text_config", "hf_model_name_or_path", "owner/name"), "owner/name"),
        (changed("text_config", "pooler_type", "cls_pooler"), "pooler_type 'cls_pooler'"),
        (changed("text_config", "proj_type", "linear"), "proj_type 'linear'"),
        (changed("text_config", "embed_dim", 16), "embed_dim is 16, wanted 32"),
        (changed("text_config", "default_lora_task", "other"), "default_lora_task 'other'"),
        (changed("text_config", "default_lora_task", None), "default_lora_task None"),
        (changed("text_config", "default_lora_task", TASK, "v1"), f"default_lora_task '{TASK}'"),
        (changed("text_config", "default_instruction_task", TASK), "default_instruction_task"),
        (changed("vision_config", "naive_swiglu", False), "naive_swiglu False"),
        (changed("vision_config", "subln", None), "subln None"),
        (changed("vision_config", "post_norm", True), "post_norm True"),
        (changed("vision_config", "rope_embeddings", False), "rope_embeddings False"),
        (changed("vision_config", "qkv_bias", False), "qkv_bias False"),
        (changed("vision_config", "ls_init_value", 0.1), "ls_init_value 0.1"),
        (changed("vision_config", "head_width", 2), "head_width is 2"),
        (changed("vision_config", "embed_dim", 16), "embed_dim 16, wanted the width, 32"),
        (changed("vision_config", "image_size", 64), "64, 64"),
        (changed("vision_config", "intp_freq", False), "pt_hw_seq_len is 3, wanted 4"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, config, message):
    folder = write_jina_clip(tmp_path, jina_clip_config("v2"))
    change_json(folder / "config.json", **config)
    with pytest.raises(CheckpointError, match=message):
        outline_routes(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resize_mode", "longest"),
        ("interpolation", "nearest"),
        ("image_processor_type", "CLIPImageProcessor"),
        ("mean", [0.5]),
        ("size", [36, 36]),
    ],
)
def test_preparation_that_is_not_done_is_refused(tmp_path, field, value):
    folder = write_jina_clip(tmp_path, jina_clip_config("v2"))
    change_json(folder / "preprocessor_config.json", **{field: value})
    with pytest.raises(CheckpointError, match=field):
        outline_routes(folder)


def test_an_adapter_of_ones_own_is_refused(tmp_path):
    folder = write_jina_clip(tmp_path, jina_clip_config("v2"))
    with pytest.raises(UnsupportedModel, match="--adapter"):
        outline_routes(folder, adapters={"a": tmp_path})


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (f"{TEXT}roberta.encoder.layers.1.mlp.fc2{LORA}", "fc2.* has no factors"),
        (f"{TEXT}roberta.encoder.layers.0.mixer.Wqkv{LORA}A", "Wqkv: expected two stacks"),
        (f"{IMAGE}blocks.0.attn.v_bias", "missing: vision_model.blocks.0.attn.v_bias"),
    ],
)
def test_a_tensor_that_is_missing_is_named(tmp_path, left_out, message):
    config = jina_clip_config("v2")
    folder = write_jina_clip(tmp_path / "source", config)
    tensors = jina_clip_tensors(config)
    kept = {name: one for name, one in tensors.items() if not name.startswith(left_out)}
    write_weights(folder, kept)
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out")


def test_angles_among_the_weights_are_not_needed(tmp_path):
    config = jina_clip_config("v1")
    folder = write_jina_clip(tmp_path / "source", config)
    angles = np.zeros((16, 16), np.float32)
    names = f"{IMAGE}rope.freqs_cos", f"{IMAGE}blocks.0.attn.rope.freqs_sin"
    write_weights(folder, jina_clip_tensors(config) | dict.fromkeys(names, angles))
    convert(folder, tmp_path / "out")


def test_modules_json_says_whether_vectors_are_normalised(tmp_path):
    folder = write_jina_clip(tmp_path, jina_clip_config("v2"))
    write_modules(folder, ("custom_st.Transformer", ""))
    spec = outline_routes(folder)[0][TEXT_ROUTE].spec
    assert not spec.heads["dense"].normalize
    normalize = "sentence_transformers.models.Normalize", "1_Normalize"
    write_modules(folder, ("custom_st.Transformer", ""), normalize)
    assert outline_routes(folder)[0][IMAGE_ROUTE].spec.heads["dense"].normalize


@pytest.mark.parametrize("version", VERSIONS)
def test_a_config_is_described_or_refused_whatever_it_holds(tmp_path, version):
    folder = write_jina_clip(tmp_path, jina_clip_config(version))
    assert_described_or_refused(folder, FILES, outline_routes)
