"""Jina's XLM-RoBERTa with flash attention: both spellings, the adapters of jina-embeddings-v3, and
jina-reranker-v2."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from sources import (
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    ROBERTA_CONFIG,
    Tensors,
    converted,
    write_bert,
)
from test_adapters import merged

from converters import convert
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
RANK = 3
QUERY = "Represent the query for retrieving evidence documents: "
CODE = "jinaai/xlm-roberta-flash-implementation--"
JINA_V3: dict[str, Any] = ROBERTA_CONFIG | {
    "architectures": ["XLMRobertaModel"],
    "auto_map": {
        "AutoConfig": f"{CODE}configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": f"{CODE}modeling_lora.XLMRobertaLoRA",
        "AutoModelForMaskedLM": f"{CODE}modeling_xlm_roberta.XLMRobertaForMaskedLM",
    },
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "lora_adaptations": TASKS,
    "lora_rank": RANK,
    "lora_alpha": 1,
    "task_instructions": dict.fromkeys(TASKS, "") | {"retrieval.query": QUERY},
}


def flash_tensors() -> Tensors:
    """Every tensor of the tower, as published, without adapters."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(sources.WORDS), HIDDEN),
        "embeddings.token_type_embeddings.weight": (1, HIDDEN),
    }
    linears = {"pooler.dense": (HIDDEN, HIDDEN)}
    norms = ["emb_ln"]
    for i in range(LAYERS):
        layer = f"encoder.layers.{i}"
        linears |= {
            f"{layer}.mixer.Wqkv": (3 * HIDDEN, HIDDEN),
            f"{layer}.mixer.out_proj": (HIDDEN, HIDDEN),
            f"{layer}.mlp.fc1": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.fc2": (HIDDEN, INTERMEDIATE),
        }
        norms += [f"{layer}.norm1", f"{layer}.norm2"]
    return sources.drawn(shapes | sources.with_biases(linears, norms, HIDDEN), seed=0)


def with_adapters(tensors: Tensors) -> tuple[Tensors, list[Tensors]]:
    """The tensors as jina-embeddings-v3 has them, and those of each task with its adapter merged,
    by the formulas of its modeling_lora.py."""
    draw, published = np.random.default_rng(1), {}
    tasks = [dict(tensors) for _ in TASKS]
    for name, array in tensors.items():
        if array.ndim < 2:
            published[f"roberta.{name}"] = array
            continue
        outputs, inputs = array.shape
        table = "embeddings" in name
        first = (len(TASKS), outputs, RANK) if table else (len(TASKS), RANK, inputs)
        second = (len(TASKS), RANK, inputs) if table else (len(TASKS), outputs, RANK)
        a, b = (0.3 * draw.standard_normal(shape, np.float32) for shape in (first, second))
        prefix = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        published |= {f"{prefix}.original": array, f"{prefix}.0.lora_A": a, f"{prefix}.0.lora_B": b}
        for number, task in enumerate(tasks):
            product = a[number] @ b[number] if table else b[number] @ a[number]
            task[name] = array + product / RANK
    return published, tasks


def write_jina(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    """As published: with code of its own that modules.json names too."""
    write_bert(folder, tensors=tensors, **JINA_V3 | changes)
    later = (sources.POOLING, "1_Pooling"), (sources.NORMALIZE, "2_Normalize")
    sources.write_modules(folder, ("custom_st.Transformer", ""), *later)
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    sources.write_json(folder / "1_Pooling" / "config.json", pooling)
    return folder


def test_each_task_is_the_model_with_its_adapter_merged(tmp_path):
    published, tasks = with_adapters(flash_tensors())
    spec, parameters = converted(write_jina(tmp_path / "jina", published), tmp_path / "out")
    assert spec.adapter_names == tuple(TASKS)
    assert spec.heads["dense"].normalize
    assert spec.prompts == dict.fromkeys(TASKS, "") | {"retrieval.query": QUERY}
    assert spec.default_prompt_name is None
    wanted = [flash_tensors(), *tasks]
    for number, tensors in enumerate(wanted):
        plain_config: dict[str, Any] = JINA_V3 | {"lora_adaptations": None}
        source = write_bert(tmp_path / f"merged-{number}", tensors=tensors, **plain_config)
        _, plain = converted(source, tmp_path / f"plain-{number}")
        got = merged(parameters, spec, number)
        assert got.keys() == plain.keys()
        for name, array in plain.items():  # float32 sums of three products
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_route_with_adapters_of_its_own_is_refused(tmp_path):
    published, _ = with_adapters(flash_tensors())
    source = sources.write_router(tmp_path / "router")
    write_bert(source / "query_0_Transformer", tensors=published, **JINA_V3)
    with pytest.raises(UnsupportedModel, match="its route query has adapters"):
        converted(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"position_embedding_type": "alibi"}, UnsupportedModel, "known: rotary, absolute"),
        ({"lora_rank": None}, CheckpointError, "without a lora_rank over 0"),
        ({"lora_rank": 2}, ConversionError, "two stacks of factors of rank 2, for 5 adapters"),
        (
            {"lora_adaptations": TASKS[:3]},
            ConversionError,
            "two stacks of factors of rank 3, for 3 adapters",
        ),
        ({"lora_adaptations": None}, ConversionError, "unused: .*lora_A"),
    ],
)
def test_what_is_not_run_is_named(changes, error, message, tmp_path):
    published, _ = with_adapters(flash_tensors())
    source = write_jina(tmp_path / "jina", published, **changes)
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out")


def test_a_weight_without_its_adapters_is_missed(tmp_path):
    published, _ = with_adapters(flash_tensors())
    stem = "roberta.encoder.layers.1.mlp.fc2.parametrizations.weight"
    published = {n: array for n, array in published.items() if not n.startswith(f"{stem}.0")}
    source = write_jina(tmp_path / "jina", published)
    with pytest.raises(ConversionError, match=r"wanted rank 3 for tower.layers.1.mlp.down, got 0"):
        convert(source, tmp_path / "out")


def test_a_module_of_other_code_is_refused(tmp_path):
    published, _ = with_adapters(flash_tensors())
    source = write_jina(tmp_path / "jina", published)
    codes = JINA_V3["auto_map"] | {"AutoModel": "somebody/else--modeling.Model"}
    sources.change_json(source / "config.json", auto_map=codes)
    with pytest.raises(UnsupportedModel, match=r"custom_st.Transformer' is not supported"):
        convert(source, tmp_path / "out")


def test_jina_reranker_v2_has_robertas_positions_and_head(tmp_path):
    tensors = flash_tensors()
    tensors["embeddings.position_embeddings.weight"] = np.ones((POSITIONS, HIDDEN), np.float32)
    tensors = {f"roberta.{name}": array for name, array in tensors.items()}
    head = {"classifier.dense": (HIDDEN, HIDDEN), "classifier.out_proj": (HIDDEN, 1)}
    tensors |= sources.head_tensors(head)
    code, scorer = "jinaai/jina-reranker-v2-base-multilingual--", "ForSequenceClassification"
    config = {
        "architectures": [f"XLMRoberta{scorer}"],
        "auto_map": {
            "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}modeling_xlm_roberta.XLMRobertaModel",
            f"AutoModel{scorer}": f"{code}modeling_xlm_roberta.XLMRoberta{scorer}",
        },
        "position_embedding_type": "absolute",
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
    }
    source = write_bert(tmp_path / "source", tensors=tensors, **ROBERTA_CONFIG | config)
    spec, parameters = converted(source, tmp_path / "out")
    assert spec.task == "rerank"
    assert spec.config["pad_id"] == 1
    assert spec.config.get("rope_theta") is None
    assert parameters["tower.embeddings.position.embedding"].shape == (POSITIONS, HIDDEN)
