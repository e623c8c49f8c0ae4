"""Folders that hold only an adapter of PEFT, which is merged into the model that they name.

test_adapter_conversion.py has what is refused in any adapter, and tests/parity/test_adapters.py
compares with PEFT itself.
"""

import json
from pathlib import Path

import colqwen_sources
import idefics3_sources
import ml_dtypes
import numpy as np
import page_sources
import pytest
import sources
from safetensors.numpy import load_file, save_file
from sources import HIDDEN, Tensors, change_json, write_json
from test_adapter_conversion import QUERY, write_adapter
from test_golden import FILES, read, write_source

from converters import outline
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def resolved(source: Path, folder: Path) -> tuple[Path, Tensors]:
    """The checkpoint that serves `source`, and its parameters."""
    path = hub.resolve(ModelSource(str(source), cache_dir=folder / "cache", offline=True))
    return path, checkpoint.load_params(path, checkpoint.load_spec(path))


def merge(tensors: Tensors, adapter: Path, names: dict[str, str], scale: float) -> Tensors:
    """The tensors of a base with an adapter merged; `names` has the layers by those in the file."""
    merged, factors = dict(tensors), load_file(adapter / WEIGHTS)
    for given, own in names.items():
        stem, weight = f"{PREFIX}{given}.lora_", merged[f"{own}.weight"]
        table = f"{stem}embedding_A" in factors
        down, up = ("embedding_A", "embedding_B") if table else ("A.weight", "B.weight")
        product = scale * (factors[stem + up] @ factors[stem + down])
        product = (product.T if table else product).astype(np.float32)
        merged[f"{own}.weight"] = (weight.astype(np.float32) + product).astype(weight.dtype)
    return merged


def assert_merged(base: Path, adapter: Path, names: dict[str, str], scale: float = 2.0) -> None:
    """Assert that the adapter's folder gives the parameters of its base with the adapter merged."""
    _, got = resolved(adapter, base.parent)
    tensors = load_file(base / "model.safetensors")
    save_file(merge(tensors, adapter, names, scale), base / "model.safetensors")
    _, wanted = resolved(base, base.parent)
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_allclose(
            got[name].astype(np.float32), array.astype(np.float32), rtol=1e-2, atol=1e-5
        )


@pytest.fixture(name="base")
def _base(tmp_path) -> Path:
    return sources.write_sentence_bert(tmp_path / "base")


@pytest.fixture(name="adapter")
def _adapter(base, tmp_path) -> Path:
    return write_adapter(
        tmp_path / "adapter", {QUERY: (HIDDEN, HIDDEN)}, base_model_name_or_path=str(base)
    )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("config", "scale"), [({}, 2.0), ({"use_rslora": True}, 6 / 3**0.5)], ids=["plain", "rslora"]
)
@pytest.mark.parametrize("name", ["bert_mean", "qwen3_lasttoken", "mistral_lasttoken"])
def test_an_adapter_becomes_part_of_the_weights_of_its_base(name, config, scale, dtype, tmp_path):
    (file,) = (file for file in FILES if file.stem == name)
    base = write_source(read(file), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    save_file({key: x.astype(dtype) for key, x in tensors.items()}, base / "model.safetensors")
    shapes = {
        key.removesuffix(".weight"): x.shape
        for key, x in tensors.items()
        if x.ndim == 2 and "position" not in key and "token_type" not in key
    }
    base_name = {"base_model_name_or_path": str(base)}
    adapter = write_adapter(tmp_path / "adapter", shapes, **base_name, **config)
    assert_merged(base, adapter, {key: key for key in shapes}, scale)


def test_whole_tensors_of_an_adapter_take_the_place_of_the_bases(base, adapter, tmp_path):
    own = {f"{QUERY}.bias": np.full(HIDDEN, 3, np.float32)}
    own["embeddings.LayerNorm.weight"] = np.full(HIDDEN, 5, np.float64).astype(np.float16)
    factors = load_file(adapter / WEIGHTS)
    save_file(factors | {PREFIX + name: x for name, x in own.items()}, adapter / WEIGHTS)
    change_json(adapter / "adapter_config.json", modules_to_save=["query", "LayerNorm"])
    _, got = resolved(adapter, tmp_path)
    assert (got["tower.layers.0.attention.qkv.bias"][:HIDDEN] == 3).all()
    assert (got["tower.embeddings.norm.scale"] == np.float32(5)).all()
    assert got["tower.embeddings.norm.scale"].dtype == np.float32


def of_engine(folder: Path, name: str, **renamed: str) -> Path:
    """A base as colpali-engine saves it, from a model as transformers saves it."""
    config = json.loads((folder / "config.json").read_text())
    own = {"architectures": [name], "embedding_dim": config["embedding_dim"]}
    write_json(folder / "config.json", config["vlm_config"] | own)
    tensors = {}
    for old, array in load_file(folder / "model.safetensors").items():
        key = old.removeprefix("vlm.")
        for part, new in {"embedding_proj_layer": "custom_text_proj", **renamed}.items():
            key = key.replace(part, new) if key.startswith(part) else key
        tensors[key] = array
    save_file(tensors, folder / "model.safetensors")
    return folder


LINEAR = "layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("family", "prefix", "in_file"),
    [
        ("ColQwen2", "model.", "model."),
        ("ColQwen2_5", "model.", "language_model."),  # a file and its base differ by age
        ("ColQwen2_5", "language_model.", "model."),
        ("ColPali", "model.language_model.model.", "model.language_model.model."),
        ("ColPali", "model.model.language_model.", "model.language_model.model."),
    ],
)
def test_a_model_of_pages_may_be_an_adapter_of_colpali_engine(family, prefix, in_file, tmp_path):
    if family == "ColPali":
        base, width = page_sources.write_pages(tmp_path / "base"), page_sources.WIDTH
        text = "language_model.model."
        renamed = {"vision_tower": "model.vision_tower", "multi_modal": "model.multi_modal"}
    else:
        kind = "qwen2_5_vl" if family == "ColQwen2_5" else "qwen2_vl"
        base, width, text = (
            colqwen_sources.write_colqwen(tmp_path / "base", kind),
            64,
            "language_model.",
        )
        renamed = {}
    of_engine(base, family, **renamed, **{text: prefix})
    rows = load_file(base / "model.safetensors")["custom_text_proj.weight"].shape
    names = {f"{in_file}{LINEAR}": f"{prefix}{LINEAR}", "custom_text_proj": "custom_text_proj"}
    shapes = {f"{in_file}{LINEAR}": (width, width), "custom_text_proj": rows}
    adapter = write_adapter(
        tmp_path / "adapter", shapes, base_model_name_or_path=str(base), target_modules="(.*).x"
    )
    spec = hub.describe_model(ModelSource(str(adapter), cache_dir=tmp_path / "cache")).main
    assert (spec.architecture, spec.prompts) == ("pages", {"query": ""})
    assert_merged(base, adapter, names)


@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json"])
def test_the_processor_of_an_adapter_names_the_class_of_a_plain_base(file, tmp_path):
    base = colqwen_sources.write_biqwen(
        tmp_path / "base", name="Qwen2_5_VLForConditionalGeneration"
    )
    shapes = {f"language_model.{LINEAR}": (64, 64)}
    named = {"base_model_name_or_path": str(base)}
    adapter = write_adapter(tmp_path / "adapter", shapes, **named)
    source = ModelSource(str(adapter), cache_dir=tmp_path / "cache")
    with pytest.raises(UnsupportedModel, match="'Qwen2_5_VLForConditionalGeneration'"):
        hub.describe_model(source)
    images = colqwen_sources.IMAGES | {"max_pixels": 784 * 20}
    write_json(adapter / "preprocessor_config.json", images)
    write_json(adapter / file, {**images, "processor_class": "BiQwen2_5_Processor"})
    spec = hub.describe_model(source).main
    assert (spec.architecture, spec.primary, spec.image.area[1]) == ("pages", "dense", 784 * 20)
    _, got = resolved(adapter, tmp_path)
    kernel = "tower.layers.0.attention.qkv.kernel"
    of_base = load_file(base / "model.safetensors")
    wanted = merge(of_base, adapter, {f"language_model.{LINEAR}": f"language_model.{LINEAR}"}, 2.0)
    np.testing.assert_allclose(
        got[kernel][:, :64], wanted[f"language_model.{LINEAR}.weight"].T, atol=1e-5
    )


def test_colsmol_may_be_an_adapter_of_colpali_engine(tmp_path):
    base = idefics3_sources.write_tiled(tmp_path / "base", "colsmol")
    layer, width = f"model.text_model.{LINEAR}", idefics3_sources.WIDTH
    adapter = write_adapter(
        tmp_path / "adapter", {layer: (width, width)}, base_model_name_or_path=str(base)
    )
    assert_merged(base, adapter, {layer: layer})


def test_the_class_that_a_nested_config_names_does_not_count(tmp_path):
    folder = colqwen_sources.write_colqwen(tmp_path, architectures=["ColQwen2"])
    assert outline(folder).spec.prompts == {"query": "Query: "}


def test_files_of_the_adapter_come_before_those_of_its_base(base, adapter, tmp_path):
    """As a folder that sentence-transformers saved: here it pools otherwise."""
    write_json(adapter / "modules.json", json.loads((base / "modules.json").read_text()))
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": True}
    write_json(adapter / "1_Pooling" / "config.json", pooling)
    path, _ = resolved(adapter, tmp_path)
    assert checkpoint.load_spec(path).head.pooling == ("cls",)
    path, _ = resolved(base, tmp_path)
    assert checkpoint.load_spec(path).head.pooling == ("mean",)


def test_a_change_of_the_base_gives_another_entry_of_the_cache(base, adapter, tmp_path):
    first, _ = resolved(adapter, tmp_path)
    assert resolved(adapter, tmp_path)[0] == first
    sources.write_weights(base, sources.bert_tensors(seed=5))
    assert resolved(adapter, tmp_path)[0] != first


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"peft_type": "IA3"}, UnsupportedModel, "peft_type 'IA3' is not supported; known: LORA"),
        ({"use_dora": True}, UnsupportedModel, "use_dora of True is not supported"),
        ({"bias": "all"}, UnsupportedModel, "bias 'all' is not supported"),
        ({"base_model_name_or_path": None}, CheckpointError, "base_model_name_or_path is None"),
        (
            {"base_model_name_or_path": "/none"},
            CheckpointError,
            "/none does not exist.* to its path",
        ),
        (
            {"base_model_name_or_path": "a/b"},
            CheckpointError,
            "a/b is not downloaded yet.* its path",
        ),
        (
            {"base_model_name_or_path": "a/b", "revision": "v2"},
            CheckpointError,
            "a/b at v2 is not downloaded yet",
        ),
    ],
    ids=str,
)
def test_what_is_not_merged_is_named_before_weights_are_read(
    config, error, message, base, adapter, tmp_path
):
    change_json(adapter / "adapter_config.json", **config)
    (base / "model.safetensors").unlink()
    with pytest.raises(error, match=message):
        hub.describe_model(ModelSource(str(adapter), cache_dir=tmp_path / "cache", offline=True))


def test_an_adapter_of_an_adapter_or_of_a_model_with_routes_is_refused(base, adapter, tmp_path):
    second = write_adapter(
        tmp_path / "second", {QUERY: (HIDDEN, HIDDEN)}, base_model_name_or_path=str(adapter)
    )
    with pytest.raises(UnsupportedModel, match=r"base model of .*second, is an adapter itself"):
        resolved(second, tmp_path)
    router = sources.write_router(tmp_path / "router")
    change_json(adapter / "adapter_config.json", base_model_name_or_path=str(router))
    with pytest.raises(UnsupportedModel, match="has several routes; an adapter can be"):
        resolved(adapter, tmp_path)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({QUERY: (HIDDEN, HIDDEN + 1)}, rf"wanted shape \(3, {HIDDEN}\)"),
        ({"model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN)}, "unused: .*q_proj.lora_A"),
        ({"embeddings.LayerNorm": (HIDDEN, HIDDEN)}, "LayerNorm.weight cannot take an adapter"),
    ],
)
def test_tensors_that_do_not_fit_the_base_are_named(weights, message, base, tmp_path):
    named = {"base_model_name_or_path": str(base)}
    adapter = write_adapter(tmp_path / "adapter", {QUERY: (HIDDEN, HIDDEN)} | weights, **named)
    with pytest.raises(ConversionError, match=message):
        resolved(adapter, tmp_path)


def test_a_whole_tensor_that_the_base_lacks_or_of_another_shape_is_named(adapter, tmp_path):
    factors = load_file(adapter / WEIGHTS)
    for name, message in (
        ("score.weight", "unused: base_model.model.score.weight"),
        ("embeddings.LayerNorm.weight", rf"wanted shape \({HIDDEN},\), got \(2, {HIDDEN}\)"),
    ):
        whole = {PREFIX + name: np.zeros((2, HIDDEN), np.float32)}
        save_file(factors | whole, adapter / WEIGHTS)
        with pytest.raises(ConversionError, match=message):
            resolved(adapter, tmp_path)
