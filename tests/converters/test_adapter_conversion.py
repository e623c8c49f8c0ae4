"""Adapters as PEFT saves them: what the conversion makes of them, and what it refuses.

tests/parity/test_adapters.py compares with PEFT itself.
"""

import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from safetensors.numpy import load_file, save_file
from sources import HIDDEN, write_json
from test_adapters import merged
from test_golden import FILES, read, write_source

from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource, adapter_folders
from jaxembed.data.spec import ModelSpec
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"}
QUERY = "encoder.layer.0.attention.self.query"
# Goldens beside whose weights adapters are put; `make test` takes those that differ most.
QUICK = ("bert_mean", "albert_odd_cls", "jina_bert_code_odd_mean", "qwen3_lasttoken", "t5_odd_mean")
FAMILIES = ["gte_cls", "gemma2_lasttoken"]
FAMILIES += [f"{name}_mean" for name in ("xlm_roberta", "distilbert", "electra", "albert")]
FAMILIES += [f"{name}_mean" for name in ("modernbert", "mpnet", "nomic_bert", "gte_odd")]
FAMILIES += [f"{name}_mean" for name in ("jina_bert", "gemma3", "llama_odd", "eurobert", "t5")]


def write_adapter(
    folder: Path, weights: dict[str, tuple[int, ...]], seed: int = 0, **config: Any
) -> Path:
    """An adapter of rank 3 for layers of these names, whose weights have these shapes."""
    draw = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, (first, second) in weights.items():
        table = name.endswith(("embeddings", "embed_tokens"))
        outputs, inputs = (second, first) if table else (first, second)
        down, up = ("embedding_A", "embedding_B") if table else ("A.weight", "B.weight")
        prefix = f"base_model.model.{name}.lora_"
        tensors[prefix + down] = draw.standard_normal((3, inputs), np.float32)
        tensors[prefix + up] = draw.standard_normal((outputs, 3), np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_json(folder / "adapter_config.json", CONFIG | config)
    return folder


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory) -> Path:
    """A tiny BERT. Shared: do not change it."""
    return sources.write_bert(tmp_path_factory.mktemp("source"))


@pytest.fixture(name="adapter")
def _adapter(tmp_path) -> Path:
    return write_adapter(tmp_path / "a", {QUERY: (HIDDEN, HIDDEN)})


@pytest.fixture(name="refused")
def _refused(source, tmp_path):
    """Assert that an adapter of `source` is refused, and that nothing is left."""

    def refused(adapter: Path, error: type[Exception], message: str) -> None:
        # what does not fit is named by its tensor
        named = message if error is ConversionError else f"adapter one: .*{message}"
        with pytest.raises(error, match=named):
            converted(source, tmp_path / "out", one=adapter)
        assert not (tmp_path / "out").exists()

    return refused


def model_source(source: Path, folder: Path, **adapters: Path) -> ModelSource:
    return ModelSource(str(source), cache_dir=folder / "cache", adapters=adapters)


def converted(source: Path, out: Path, **adapters: Path) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    return sources.converted(source, out, adapters=adapters)


# Weights that get no adapter in the tests: those that none is possible for, and all values.
LEFT_OUT = ("*norm*", "*position*", "*relative*", "pooler.*", "*head*", "shared.*")
LEFT_OUT += ("*value*", "*v_proj*", "*v_lin*")


def is_adapted(name: str, array: np.ndarray) -> bool:
    left_out = any(fnmatchcase(name.lower(), pattern) for pattern in LEFT_OUT)
    return name.endswith(".weight") and array.ndim == 2 and not left_out


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(one, marks=pytest.mark.numerics) for one in FAMILIES)]
)
def test_adapters_beside_a_weight_are_those_merged_into_it(name, tmp_path):
    (file,) = (file for file in FILES if file.stem == name)
    source = write_source(read(file), tmp_path / "source")
    weights = source / "model.safetensors"
    base = load_file(weights)
    adapted = {key: array for key, array in base.items() if is_adapted(key, array)}
    shapes = {key.removesuffix(".weight"): array.shape for key, array in adapted.items()}
    folders = {
        "first": write_adapter(tmp_path / "a", shapes),
        "second": write_adapter(tmp_path / "b", dict(list(shapes.items())[::2]), seed=1),
    }
    spec, parameters = converted(source, tmp_path / "adapted", **folders)
    assert spec.adapter_names == ("first", "second")
    for number, folder in enumerate(folders.values(), start=1):
        factors = load_file(folder / "adapter_model.safetensors")
        tensors = dict(base)
        for stem in shapes:
            prefix = f"base_model.model.{stem}.lora_"
            if f"{prefix}A.weight" in factors:
                product = factors[f"{prefix}B.weight"] @ factors[f"{prefix}A.weight"]
            elif f"{prefix}embedding_A" in factors:
                product = (factors[f"{prefix}embedding_B"] @ factors[f"{prefix}embedding_A"]).T
            else:
                continue
            tensors[f"{stem}.weight"] = base[f"{stem}.weight"] + 2 * product  # lora_alpha / r
        save_file(tensors, weights)
        _, wanted = converted(source, tmp_path / f"merged-{number}")
        got = merged(parameters, spec, number)
        assert got.keys() == wanted.keys()
        for key, array in wanted.items():  # float32 sums of three products
            np.testing.assert_allclose(got[key], array, rtol=1e-5, atol=1e-5, err_msg=key)
        save_file(base, weights)


def test_a_model_without_adapters_converts_as_before(source, adapter, tmp_path):
    plain, parameters = converted(source, tmp_path / "plain")
    assert plain.adapters == ()
    spec, adapted = converted(source, tmp_path / "adapted", one=adapter)
    assert spec.content_hash != plain.content_hash
    for name, array in parameters.items():
        np.testing.assert_array_equal(adapted[name], array)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 6 / 3**0.5),
        ({"alpha_pattern": {"query": 12}}, 4.0),
        ({"alpha_pattern": {"layer.1.attention.self.query": 12}}, 2.0),
    ],
)
def test_the_scale_is_that_of_peft(config, scale, source, tmp_path):
    adapter = write_adapter(tmp_path / "a", {QUERY: (HIDDEN, HIDDEN)}, **config)
    _, parameters = converted(source, tmp_path / "out", one=adapter)
    up = load_file(adapter / "adapter_model.safetensors")[f"base_model.model.{QUERY}.lora_B.weight"]
    got = parameters["tower.layers.0.attention.qkv.adapter.up.kernel"]
    np.testing.assert_allclose(got[:3, :HIDDEN], scale * up.T, rtol=1e-6)
    assert not got[3:].any()
    assert not got[:, HIDDEN:].any()


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"peft_type": "IA3"}, UnsupportedModel, "peft_type 'IA3' is not supported; known: LORA"),
        ({"bias": "lora_only"}, UnsupportedModel, "bias 'lora_only' is not supported"),
        ({"use_dora": True}, UnsupportedModel, "use_dora of True is not supported"),
        ({"modules_to_save": ["classifier"]}, UnsupportedModel, "modules_to_save of"),
        ({"init_lora_weights": "pissa"}, UnsupportedModel, "'pissa' changes the weights"),
        ({"trainable_token_indices": [1]}, UnsupportedModel, "trainable_token_indices of"),
        ({"fan_in_fan_out": True}, UnsupportedModel, "fan_in_fan_out of True"),
        ({"something_new": {"a": 1}}, UnsupportedModel, "something_new of"),
        ({"lora_alpha": "x"}, CheckpointError, 'lora_alpha is "x", wanted a finite number'),
        ({"lora_alpha": None}, CheckpointError, "lora_alpha is null, wanted a finite number"),
        ({"lora_alpha": np.nan}, CheckpointError, "lora_alpha is NaN, wanted a finite number"),
        ({"lora_alpha": 1e300}, CheckpointError, r"lora_alpha is 1e\+300, wanted a finite number"),
        ({"lora_alpha": 10**400}, CheckpointError, "lora_alpha is 1000.*, wanted a finite number"),
        ({"lora_alpha": 1e9}, CheckpointError, r"lora_B\.weight has values .* its scale of"),
        ({"alpha_pattern": [1]}, CheckpointError, r"is \[1\], wanted an object of numbers"),
        ({"alpha_pattern": {"query": "x"}}, CheckpointError, "object of numbers by pattern"),
        ({"alpha_pattern": {"query": np.nan}}, CheckpointError, "object of numbers by pattern"),
        ({"alpha_pattern": {"(": 1}}, CheckpointError, "pattern.* is not a regular expression"),
        ({"use_rslora": "false"}, CheckpointError, 'use_rslora is "false", wanted true or false'),
        ({"peft_type": ["LORA"]}, CheckpointError, r'peft_type is \["LORA"\], wanted a string'),
    ],
    ids=str,
)
def test_what_a_config_asks_for_and_is_not_run_is_named(config, error, message, refused, tmp_path):
    adapter = write_adapter(tmp_path / "a", {QUERY: (HIDDEN, HIDDEN)}, **config)
    refused(adapter, error, message)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({QUERY: (HIDDEN, HIDDEN + 1)}, rf"wanted shape \(3, {HIDDEN}\)"),
        ({"encoder.layer.7.output.dense": (HIDDEN, HIDDEN)}, "unused: .*layer.7"),
        ({"embeddings.LayerNorm": (HIDDEN, HIDDEN)}, "LayerNorm.weight cannot take an adapter"),
    ],
)
def test_an_adapter_of_another_model_is_refused(weights, message, refused, tmp_path):
    refused(write_adapter(tmp_path / "a", weights), ConversionError, message)


def test_the_layers_of_an_adapter_must_be_joined_as_those_of_its_base(tmp_path):
    (file,) = (file for file in FILES if file.stem == "gte_cls")
    source = write_source(read(file), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (packed,) = (name for name in tensors if name.endswith("layer.0.attention.qkv_proj.weight"))
    width = tensors[packed].shape[1]
    single = packed.replace("qkv_proj.weight", "q_proj")
    adapter = write_adapter(tmp_path / "a", {single: (width, width)})
    with pytest.raises(ConversionError, match=r"wanted rank 3 for tower.layers.0.attention.qkv"):
        converted(source, tmp_path / "out", one=adapter)


def test_a_model_with_routes_takes_no_adapter(adapter, tmp_path):
    source = sources.write_router(tmp_path / "router")
    with pytest.raises(UnsupportedModel, match=r"adapter one: .* has the routes query, document"):
        converted(source, tmp_path / "out", one=adapter)
    with pytest.raises(UnsupportedModel, match="leave --adapter out"):
        hub.resolve(model_source(source, tmp_path, one=adapter))


def test_static_embeddings_take_no_adapter(adapter, tmp_path):
    table = np.zeros((len(sources.WORDS), HIDDEN), np.float32)
    source = sources.write_static(tmp_path / "source", {"embedding.weight": table})
    with pytest.raises(UnsupportedModel, match=r"adapter one: .* holds static embeddings"):
        converted(source, tmp_path / "out", one=adapter)


def test_a_weight_that_was_saved_with_an_adapter_must_be_the_base_models(source, tmp_path):
    table = load_file(source / "model.safetensors")["embeddings.word_embeddings.weight"]
    adapter = write_adapter(tmp_path / "a", {"embeddings.word_embeddings": table.shape})
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    name = "base_model.model.embeddings.word_embeddings.base_layer.weight"
    save_file(factors | {name: table}, file)
    converted(source, tmp_path / "out", one=adapter)
    save_file(factors | {name: table + 1}, file)
    with pytest.raises(ConversionError, match="differs from the model's own"):
        converted(source, tmp_path / "other", one=adapter)


def test_an_adapter_of_the_pooler_is_left_out_where_the_pooler_is(source, tmp_path):
    weights = {QUERY: (HIDDEN, HIDDEN), "pooler.dense": (HIDDEN, HIDDEN)}
    spec, _ = converted(source, tmp_path / "out", one=write_adapter(tmp_path / "a", weights))
    assert list(spec.adapters[0].ranks) == ["tower.layers.0.attention.qkv"]
    only = write_adapter(tmp_path / "b", {"pooler.dense": (HIDDEN, HIDDEN)})
    with pytest.raises(CheckpointError, match="changes no layer"):
        converted(source, tmp_path / "none", one=only)


def test_a_folder_of_sentence_transformers_is_an_adapter_if_it_pools_alike(adapter, tmp_path):
    source = sources.write_sentence_bert(tmp_path / "source")
    shutil.copy(source / "modules.json", adapter)
    pooling = adapter / "1_Pooling" / "config.json"
    write_json(pooling, {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True})
    converted(source, tmp_path / "out", one=adapter)
    write_json(pooling, {"word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": True})
    with pytest.raises(UnsupportedModel, match=r"adapter one: the pooling or modules in its"):
        converted(source, tmp_path / "other", one=adapter)


def test_a_folder_without_an_adapter_is_refused(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter one: .* has no adapter_config.json"):
        converted(source, tmp_path / "out", one=tmp_path)
    write_json(tmp_path / "adapter_config.json", CONFIG)
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors"):
        converted(source, tmp_path / "out", one=tmp_path)


def test_the_cache_has_an_entry_for_each_set_of_adapters(adapter, tmp_path, conversions):
    source = sources.write_sentence_bert(tmp_path / "source")
    plain = hub.resolve(model_source(source, tmp_path))
    with_adapter = model_source(source, tmp_path, one=adapter)
    adapted = hub.resolve(with_adapter)
    assert hub.resolve(with_adapter) == adapted != plain
    assert len(conversions) == 2
    described = hub.describe_model(model_source(source, tmp_path / "other", one=adapter))
    assert described.main.adapters == checkpoint.load_spec(adapted).adapters
    write_adapter(adapter, {QUERY: (HIDDEN, HIDDEN)}, seed=5, lora_alpha=12)
    hub.resolve(with_adapter)
    assert len(conversions) == 3
    with pytest.raises(CheckpointError, match="converted already; give --adapter when converting"):
        hub.resolve(model_source(plain, tmp_path, one=adapter))


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(text, adapter, refused):
    (adapter / "adapter_config.json").write_text(text)
    refused(adapter, CheckpointError, r"adapter_config\.json is damaged")


DOWN, UP = (f"base_model.model.{QUERY}.lora_{factor}.weight" for factor in "AB")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e5])
@pytest.mark.parametrize("factor", [DOWN, UP])
def test_values_that_would_reach_other_sequences_are_refused(factor, value, adapter, refused):
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[factor][0, 0] = value
    save_file(tensors, adapter / "adapter_model.safetensors")
    refused(adapter, CheckpointError, f"{factor.removeprefix('base_model.model.')} has values up")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda one: one | {UP.replace("weight", "bias"): one[UP][0]}, "bias has no partner"),
        # rank 0
        (
            lambda one: {DOWN: one[DOWN][:0].copy(), UP: one[UP][:, :0].copy()},
            "is not part of a low-rank adapter",
        ),
        # as PEFT names them in memory
        (
            lambda one: {key.replace(".weight", ".default.weight"): one[key] for key in one},
            r"default\.weight has a name .* save_pretrained",
        ),
    ],
)
def test_tensors_that_are_no_adapter_are_refused(changed, message, adapter, refused):
    file = adapter / "adapter_model.safetensors"
    save_file(changed(load_file(file)), file)
    refused(adapter, ConversionError, message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"": "folder"}, "the name ''; expected letters"),
        ({"a:b": "folder"}, "the name 'a:b'; expected letters"),
        ({"a\n": "folder"}, "expected letters"),
        ({1: "folder"}, "the name 1; expected letters"),
        ({"a": ""}, "adapter a has the folder ''; expected a path"),
        ({"a": None}, "adapter a has the folder None; expected a path"),
        (["folder"], "expected a mapping of names to folders"),
    ],
    ids=str,
)
def test_adapters_without_names_or_folders_are_refused(given, message):
    with pytest.raises(CheckpointError, match=message):
        adapter_folders(given)
