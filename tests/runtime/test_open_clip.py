"""Folders of OpenCLIP: their vectors, and what of them is refused."""

import numpy as np
import pytest
from dual_sources import (
    POSITIONS,
    SIDE,
    dual_tensors,
    expected_image,
    expected_text,
    open_clip_config,
    picture,
    words,
    write_open_clip,
)
from sources import change_json, write_json
from test_field_types import assert_described_or_refused

from converters import outline_routes, weight_files
from jaxembed import Embedder, EngineConfig
from jaxembed.data.spec import IMAGE_ROUTE, TEXT_ROUTE
from jaxembed.errors import CheckpointError

CONFIG = "open_clip_config.json"
TOWERS = {key: open_clip_config()["model_cfg"][key] for key in ("text_cfg", "vision_cfg")}
EOS = {"text_cfg": TOWERS["text_cfg"] | {"pool_type": "eos", "hf_tokenizer_name": "owner/name"}}


@pytest.mark.parametrize(
    ("kind", "prefix", "model"),
    [("clip", "", {}), ("metaclip_2", "text.", {"custom_text": True, **EOS})],
    ids=["argmax", "eos"],
)
def test_vectors_are_those_of_the_formulas(tmp_path, kind, prefix, model):
    folder = write_open_clip(tmp_path / "model", kind, prefix, **model)
    tensors, images = dual_tensors(kind), [picture(seed) for seed in range(3)]
    texts = ["w1 w2 w3", "w5", " ".join(f"w{number}" for number in range(20))]
    config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=256)
    with Embedder(str(folder), cache_dir=tmp_path / "cache", config=config) as ours:
        wanted = [expected_image(kind, tensors, image) for image in images]
        np.testing.assert_allclose(ours.encode(images=images), wanted, atol=2e-6)
        ids = [words(kind).encode(text).ids for text in texts]
        ids = [[*one[: POSITIONS - 1], one[-1]] if len(one) > POSITIONS else one for one in ids]
        wanted = [expected_text(kind, tensors, one) for one in ids]
        np.testing.assert_allclose(ours.encode(texts), wanted, atol=2e-6)


def test_the_files_of_transformers_come_first(tmp_path):
    folder = write_open_clip(tmp_path)
    assert weight_files(folder)[0] == "open_clip_model*.safetensors"
    write_json(folder / "config.json", {"architecture": "vit_base_patch32_clip_224"})  # of timm
    assert weight_files(folder)[0] == "open_clip_model*.safetensors"
    write_json(folder / "config.json", {"model_type": "clip"})
    assert weight_files(folder)[0] == "model*.safetensors"


def test_how_images_and_texts_are_prepared(tmp_path):
    folder = write_open_clip(tmp_path)
    # OpenCLIP does not read the limit
    write_json(folder / "tokenizer_config.json", {"model_max_length": 5})
    routes = outline_routes(folder)[0]
    rules, text = routes[IMAGE_ROUTE].spec.image, routes[TEXT_ROUTE]
    assert rules is not None
    assert (rules.resample, rules.shortest, rules.crop) == ("bicubic", SIDE, (SIDE, SIDE))
    assert rules.rounds_crop
    assert text.spec.max_input_tokens == POSITIONS
    assert b"Lowercase" in text.tokenizer
    folder = write_open_clip(tmp_path / "eos", "metaclip_2", **EOS)
    cfg = {"mean": 0.5, "std": [0.5] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    change_json(folder / CONFIG, preprocess_cfg=cfg)
    routes = outline_routes(folder)[0]
    rules = routes[IMAGE_ROUTE].spec.image
    assert rules is not None
    assert (rules.resample, rules.size, rules.mean) == ("bilinear", (SIDE, SIDE), (0.5,) * 3)
    assert b"Lowercase" not in routes[TEXT_ROUTE].tokenizer


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("vision_cfg", "timm_model_name", "vit_base_patch16_siglip_224"),
        ("vision_cfg", "attentional_pool", True),
        ("vision_cfg", "ls_init_value", 0.1),
        ("vision_cfg", "pool_type", "avg"),
        ("vision_cfg", "layers", [3, 4, 6, 3]),
        ("vision_cfg", "head_width", 7),
        ("vision_cfg", "new_field", 1),
        ("text_cfg", "hf_model_name", "roberta-base"),
        ("text_cfg", "embed_cls", True),
        ("text_cfg", "no_causal_mask", True),
        ("text_cfg", "pool_type", "last"),
        ("text_cfg", "proj_bias", True),
        ("text_cfg", "qk_norm", True),
        ("text_cfg", "norm_kwargs", {"eps": 1e-6}),
        ("text_cfg", "tokenizer_kwargs", {"clean": "canonicalize"}),
        ("text_cfg", "tokenizer_kwargs", {"strip_sep_token": True}),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, key, field, value):
    folder = write_open_clip(tmp_path, **{key: TOWERS[key] | {field: value}})
    name = next(iter(value)) if field == "tokenizer_kwargs" else field
    with pytest.raises(CheckpointError, match=name):
        outline_routes(folder)


def test_other_models_and_preparations_are_refused_by_name(tmp_path):
    folder = write_open_clip(tmp_path, multimodal_cfg={})
    with pytest.raises(CheckpointError, match="multimodal_cfg"):
        outline_routes(folder)
    write_open_clip(tmp_path)
    change_json(folder / CONFIG, preprocess_cfg={"resize_mode": "longest"})
    with pytest.raises(CheckpointError, match="resize_mode 'longest'"):
        outline_routes(folder)


def test_a_config_is_described_or_refused_whatever_it_holds(tmp_path):
    folder = write_open_clip(tmp_path)
    change_json(folder / CONFIG, preprocess_cfg={"mean": 0.5, "interpolation": "bicubic"})
    assert_described_or_refused(folder, (CONFIG,), outline_routes)
