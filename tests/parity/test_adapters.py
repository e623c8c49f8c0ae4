"""Adapters against PEFT, and the tasks of jina-embeddings-v3 against transformers' own class."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from golden import make
from golden.families import FAMILIES
from safetensors.numpy import load_file, save_file
from test_jina import JINA_V3, TASKS, with_adapters

from jaxembed import Embedder
from parity.reference import assert_within, relative

TEXTS = ["the dog sat on a mat", "red", "how is the train", "the dog sat on a mat where what"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear", "r": 8, "lora_alpha": 16},
    "stable": {"target_modules": "all-linear", "r": 4, "lora_alpha": 2, "use_rslora": True},
}


def hidden_states(embedder: Embedder, backbone, adapter: str | None) -> float:
    """The largest difference to the tower, relative, over all texts."""
    got = embedder.compute(TEXTS, ["tokens"], adapter=adapter, prompt="")["tokens"]
    tokenizer = embedder.model.main.processor._tokenizer
    ids = [tokenizer.encode([text], fast=False)[0].ids for text in TEXTS]
    pairs = zip(got, ids, strict=True)
    return max(relative(one, make.hidden_states(backbone, np.array(row))) for one, row in pairs)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    "family", ["bert", "xlm_roberta", "modernbert", "distilbert", "albert", "qwen3", "t5"]
)
def test_hidden_states_are_those_of_peft(family, make_embedder, tmp_path, note):
    peft = pytest.importorskip("peft")
    make.save_tower(FAMILIES[family], tmp_path / "base")
    kind = getattr(transformers, FAMILIES[family].backbone)
    folders, backbones = {}, {}
    for name, config in ADAPTERS.items():
        backbone = peft.get_peft_model(
            kind.from_pretrained(tmp_path / "base", dtype=torch.float32),
            peft.LoraConfig(**config),
        )
        torch.manual_seed(1)
        for parameter_name, parameter in backbone.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.2)
        backbone.save_pretrained(tmp_path / name)
        folders[name], backbones[name] = tmp_path / name, backbone.eval()
    embedder = make_embedder(tmp_path / "base", [(4, 64)], adapters=folders)
    base = kind.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    backbones |= {None: base}
    apart = [hidden_states(embedder, backbone, name) for name, backbone in backbones.items()]
    merged = make_embedder(folders["stable"], [(4, 64)])  # with the base that PEFT names in it
    apart.append(hidden_states(merged, backbones["stable"], None))
    assert_within(max(apart), note)


def write_published(native: Path, out: Path) -> list[dict[str, np.ndarray]]:
    """The model as published, with adapters; gives the tensors of each task with its merged."""
    tensors = load_file(native / "model.safetensors")
    published, tasks = with_adapters(tensors)
    out.mkdir()
    for file in native.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((native / "config.json").read_text())
    sizes = {key: config[key] for key in config if key not in ("rope_parameters", "model_type")}
    named = {"architectures": ["XLMRobertaModel"]}
    (out / "config.json").write_text(json.dumps(JINA_V3 | sizes | named))
    save_file(published, out / "model.safetensors")
    return tasks


def test_each_task_is_transformers_with_the_adapter_merged(make_embedder, tmp_path, note):
    native = tmp_path / "native"
    make.save_tower(FAMILIES["jina_v3"], native)
    plain = load_file(native / "model.safetensors")
    tasks = write_published(native, tmp_path / "published")
    embedder = make_embedder(tmp_path / "published", [(4, 64)])
    apart = []
    for name, tensors in zip([None, *TASKS], [plain, *tasks], strict=True):
        save_file(tensors, native / "model.safetensors", {"format": "pt"})
        backbone = transformers.JinaEmbeddingsV3Model.from_pretrained(native, dtype=torch.float32)
        apart.append(hidden_states(embedder, backbone.eval(), name))
    assert_within(max(apart), note)
