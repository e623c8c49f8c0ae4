"""Models with code of their own, of which only the name is read: jina-embeddings-v5-text,
voyage-4-nano and pplx-embed-v1. tests/parity/test_own_code.py compares their vectors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sources import (
    NORMALIZE,
    POOLING,
    TRANSFORMER,
    change_json,
    converted,
    write_json,
    write_modules,
)
from test_adapter_conversion import write_adapter
from test_adapters import merged
from test_families import golden
from test_golden import write_source

from converters import folders_read
from jaxembed.data.spec import DenseLayer, NormalizeLayer, Pooled, TanhLayer
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.quantise import quantise

TASKS = ("text-matching", "retrieval")
PROMPTS = {"query": "Query: ", "document": "Document: "}
JINA: dict[str, Any] = {
    "architectures": ["JinaEmbeddingsV5Model"],
    "model_type": "jina_embeddings_v5",
    "auto_map": {"AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"},
    "task_names": list(TASKS),
}
VOYAGE = {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}
GATE = "layers.1.mlp.gate_proj"


def write_tower(folder: Path, family: str = "qwen3", **config: Any) -> Path:
    """A golden's tower with bare names, and without its sentence-transformers files."""
    names = {"qwen3": "qwen3_lasttoken", "eurobert": "eurobert_mean"}
    write_source(golden(names[family]), folder)
    for name in ("modules.json", "config_sentence_transformers.json"):
        (folder / name).unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    change_json(folder / "config.json", **config)
    return folder


def write_jina(folder: Path, family: str = "qwen3", **config: Any) -> Path:
    """As published: adapters in a folder, and a module that pools by itself."""
    write_tower(folder, family, **JINA | config)
    write_modules(folder, ("custom_st.Transformer", ""))
    prompts = {"prompts": PROMPTS, "default_prompt_name": "document"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    shape = load_file(folder / "model.safetensors")[f"{GATE}.weight"].shape
    for seed, task in enumerate(TASKS):
        write_adapter(folder / "adapters" / task, {GATE: shape}, seed, r=3, lora_alpha=3)
    return folder


@pytest.mark.parametrize(
    ("family", "config", "causal"),
    [("qwen3", {}, True), ("eurobert", {"is_decoder": False}, False)],
    ids=["small", "nano"],
)
def test_jina_v5_has_an_adapter_for_each_task_and_retrieval_by_default(
    family, config, causal, tmp_path
):
    spec, parameters = converted(write_jina(tmp_path / "jina", family, **config))
    assert spec.adapter_names == ("retrieval", "text-matching")
    assert spec.default_adapter == "retrieval"
    assert spec.config["causal"] is causal
    assert spec.heads == {"dense": Pooled(("lasttoken",), (NormalizeLayer(),))}
    assert (spec.prompts, spec.default_prompt_name) == (PROMPTS, "document")
    plain = merged(parameters, spec, 0)
    factors = load_file(
        tmp_path / "jina" / "adapters" / "text-matching" / "adapter_model.safetensors"
    )
    up, down = (factors[f"base_model.model.{GATE}.lora_{name}.weight"] for name in "BA")
    name = "tower.layers.1.mlp.gate_up.kernel"
    change = merged(parameters, spec, 2)[name] - plain[name]
    np.testing.assert_allclose(change[:, : len(up)], (up @ down).T, rtol=1e-4, atol=1e-5)


def test_a_download_of_jina_v5_begins_with_its_adapters(tmp_path):
    assert folders_read(write_jina(tmp_path)) == ["adapters/retrieval", "adapters/text-matching"]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"task_names": None}, UnsupportedModel, "task_names is missing; wanted"),
        ({"task_names": ["clustering"]}, UnsupportedModel, "clustering; wanted .*retrieval"),
        ({"task_names": ["retrieval", "code"]}, CheckpointError, "adapters/code has no adapter"),
        ({"task_names": ["retrieval", "../x"]}, CheckpointError, r"has the name '\.\./x'"),
        ({"auto_map": {"AutoModel": "modeling_other.Model"}}, UnsupportedModel, "'custom_st"),
    ],
    ids=["none", "no-retrieval", "no-folder", "outside", "other-code"],
)
def test_a_jina_v5_whose_tasks_are_not_there_is_refused(config, error, message, tmp_path):
    with pytest.raises(error, match=message):
        converted(write_jina(tmp_path / "jina", **config))


def test_an_adapter_with_the_name_of_a_task_is_refused(tmp_path):
    source = write_jina(tmp_path / "jina")
    with pytest.raises(CheckpointError, match="has an adapter retrieval already"):
        converted(source, adapters={"retrieval": source / "adapters" / "retrieval"})


def write_voyage(folder: Path, *later: tuple[str, str], **pooling: Any) -> np.ndarray:
    """As published; the weight of its linear layer is returned."""
    write_tower(folder, architectures=["Qwen3ForCausalLM"], auto_map=VOYAGE, num_labels=20)
    tensors = load_file(folder / "model.safetensors")
    width = len(tensors["norm.weight"])
    linear = np.random.default_rng(1).standard_normal((20, width), np.float32)
    save_file({**tensors, "linear.weight": linear}, folder / "model.safetensors")
    write_modules(folder, (TRANSFORMER, ""), (POOLING, "1_Pooling"), *later)
    said = {"word_embedding_dimension": 20, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / "config.json", said | pooling)
    return linear


def test_voyage_is_bidirectional_and_its_linear_layer_follows_the_mean(tmp_path):
    linear = write_voyage(tmp_path / "voyage", (NORMALIZE, "2_Normalize"))
    spec, parameters = converted(tmp_path / "voyage")
    layer = DenseLayer(linear.shape[1], 20, bias=False, activation="identity")
    assert spec.heads == {"dense": Pooled(("mean",), (layer, NormalizeLayer()))}
    assert spec.config["causal"] is False
    assert spec.dim == 20
    np.testing.assert_array_equal(parameters["heads.dense.modules.0.kernel"], linear.T)


def test_voyage_with_another_pooling_is_refused(tmp_path):
    write_voyage(tmp_path / "voyage", pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    with pytest.raises(UnsupportedModel, match=r"with mean pooling .*; the pooling is lasttoken"):
        converted(tmp_path / "voyage")


def test_pplx_ends_with_tanh_which_int8_rounds(tmp_path):
    source = write_tower(
        tmp_path / "pplx",
        architectures=["PPLXQwen3Model"],
        model_type="bidirectional_pplx_qwen3",
        auto_map={"AutoModel": "modeling.PPLXQwen3Model"},
    )
    quantizer = ("st_quantize.FlexibleQuantizer", "2_Quantizer")
    write_modules(source, (TRANSFORMER, ""), (POOLING, "1_Pooling"), quantizer)
    write_json(source / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    spec, _ = converted(source)
    assert spec.heads == {"dense": Pooled(("mean",), (TanhLayer(),))}
    assert spec.config["causal"] is False
    # the rule of its st_quantize.py
    values = np.tanh(np.random.default_rng(0).standard_normal((1, 10_000), np.float32))
    values[0, :3] = -1, 0, 1
    ranges = np.repeat(np.float32(spec.dense.range)[:, None], values.shape[1], axis=1)
    got = quantise(values, "int8", ranges)
    wanted = np.clip(np.round(127 * values.astype(np.float64)), -128, 127)
    assert got[0, :3].tolist() == [-127, 0, 127]
    assert np.abs(got - wanted).max() <= 1  # float32 rounds some values at the edge of two levels
    assert (got != wanted).mean() < 1e-3


def test_the_quantizer_of_other_code_is_refused(tmp_path):
    source = write_tower(tmp_path / "other")
    quantizer = ("st_quantize.FlexibleQuantizer", "2_Quantizer")
    write_modules(source, (TRANSFORMER, ""), (POOLING, "1_Pooling"), quantizer)
    with pytest.raises(UnsupportedModel, match=r"module 'st_quantize\.FlexibleQuantizer'"):
        converted(source)
