"""Saves random models with the files of jina-embeddings-v5-text, voyage-4-nano and pplx-embed-v1,
whose own code is a known backbone, and gives their vectors of a text by that code's formulas."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden.families import FAMILIES, save_tower
from safetensors.numpy import load_file, save_file
from sources import NORMALIZE, POOLING, TRANSFORMER, change_json, write_json, write_modules
from torch.nn.functional import normalize

TASKS = ("retrieval", "text-matching")
JINA_PROMPTS = {"query": "Query: ", "document": "Document: "}
VOYAGE_PROMPTS = {
    "query": "Represent the query for retrieving supporting documents: ",
    "document": "Represent the document for retrieval: ",
}
VOYAGE_WIDTH = 20  # of its vectors
RANK, ALPHA = 4, 6
LIMIT = 24  # tokens of a text

States = Callable[[str], torch.Tensor]  # text -> [tokens, width]
Answer = Callable[[str, dict[str, Any]], dict[str, np.ndarray]]


def states_of(backbone: Any, folder: Path) -> States:
    """The last hidden states of a text."""
    tokenizer, backbone = transformers.AutoTokenizer.from_pretrained(folder), backbone.eval()

    @torch.no_grad()
    def states(text: str) -> torch.Tensor:
        batch = tokenizer(text, truncation=True, max_length=LIMIT, return_tensors="pt")
        return backbone(**batch).last_hidden_state[0]

    return states


def _save_backbone(folder: Path, family: str, config: dict[str, Any]) -> Any:
    save_tower(FAMILIES[family], folder, **config)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LIMIT})
    kind = getattr(transformers, FAMILIES[family].backbone)
    return kind.from_pretrained(folder, dtype=torch.float32)


def write_prompts(folder: Path, prompts: dict[str, str], default: str | None = None) -> None:
    said = {"prompts": prompts, "default_prompt_name": default}
    write_json(folder / "config_sentence_transformers.json", said)


def write_pooling(folder: Path, mode: str, width: int, *later: tuple[str, str]) -> None:
    write_modules(folder, (TRANSFORMER, ""), (POOLING, "1_Pooling"), *later)
    pooling = {"word_embedding_dimension": width, f"pooling_mode_{mode}": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)


def save_jina(folder: Path, family: str, **config: Any) -> Answer:
    """With an adapter of all linear layers for each task, and one pooled token."""
    backbone = _save_backbone(folder, family, config)
    tasks = {}
    for seed, task in enumerate(TASKS):
        draw, merged, tensors = np.random.default_rng(seed), copy.deepcopy(backbone), {}
        for name, module in merged.named_modules():
            if isinstance(module, torch.nn.Linear):
                outputs, inputs = module.weight.shape
                down = draw.standard_normal((RANK, inputs), np.float32) / inputs**0.5
                up = draw.standard_normal((outputs, RANK), np.float32) / (2 * RANK)
                module.weight.data += ALPHA / RANK * torch.from_numpy(up @ down)
                prefix = f"base_model.model.{name}.lora_"
                tensors |= {f"{prefix}A.weight": down, f"{prefix}B.weight": up}
        adapter = folder / "adapters" / task
        write_json(
            adapter / "adapter_config.json",
            {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"},
        )
        save_file(tensors, adapter / "adapter_model.safetensors")
        tasks[task] = states_of(merged, folder)
    change_json(
        folder / "config.json",
        architectures=["JinaEmbeddingsV5Model"],
        model_type="jina_embeddings_v5",
        auto_map={"AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"},
        task_names=list(TASKS),
        **({"is_decoder": False} if family == "eurobert" else {}),
    )
    write_modules(folder, ("custom_st.Transformer", ""))
    write_prompts(folder, JINA_PROMPTS, "document")

    def answer(text: str, options: dict[str, Any]) -> dict[str, np.ndarray]:
        prompt = JINA_PROMPTS[options.get("prompt_name", "document")]
        states = tasks[options.get("adapter", "retrieval")](prompt + text)
        return {"dense": normalize(states[-1], dim=0).numpy()}

    return answer


def _save_bidirectional(folder: Path, config: dict[str, Any], **own: Any) -> States:
    backbone = _save_backbone(folder, "qwen3", config | {"is_causal": False})
    said = json.loads((folder / "config.json").read_text())
    said |= {"use_bidirectional_attention": True, **own}
    write_json(folder / "config.json", {key: said[key] for key in said if key != "is_causal"})
    return states_of(backbone, folder)


def save_voyage(folder: Path, **config: Any) -> Answer:
    """With a linear layer that every token goes through before the mean."""
    code = {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}
    states = _save_bidirectional(
        folder,
        config,
        architectures=["Qwen3ForCausalLM"],
        auto_map=code,
        num_labels=VOYAGE_WIDTH,
    )
    tensors = load_file(folder / "model.safetensors")
    width = len(tensors["norm.weight"])
    draw = np.random.default_rng(0)
    linear = draw.standard_normal((VOYAGE_WIDTH, width), np.float32) / width**0.5
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named | {"linear.weight": linear}, folder / "model.safetensors")
    write_pooling(folder, "mean_tokens", VOYAGE_WIDTH, (NORMALIZE, "2_Normalize"))
    write_prompts(folder, VOYAGE_PROMPTS)

    def answer(text: str, options: dict[str, Any]) -> dict[str, np.ndarray]:
        prompt = VOYAGE_PROMPTS.get(options.get("prompt_name", ""), "")
        projected = states(prompt + text) @ torch.from_numpy(linear).T
        return {"dense": normalize(projected.mean(dim=0), dim=0).numpy()}

    return answer


def save_pplx(folder: Path, **config: Any) -> Answer:
    """With a quantizer, of which tanh is served as float32."""
    states = _save_bidirectional(
        folder,
        config,
        architectures=["PPLXQwen3Model"],
        model_type="bidirectional_pplx_qwen3",
        auto_map={"AutoModel": "modeling.PPLXQwen3Model"},
    )
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    write_pooling(folder, "mean_tokens", width, ("st_quantize.FlexibleQuantizer", "2_Quantizer"))
    return lambda text, options: {"dense": torch.tanh(states(text).mean(dim=0)).numpy()}
