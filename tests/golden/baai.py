"""Saves random rerankers with the files of BAAI's bge-reranker-v2-gemma, -minicpm-layerwise and
-gemma2-lightweight, and gives the logits of pairs by the formulas of FlagEmbedding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden.families import FAMILIES, MISTRAL_SPECIAL, mistral_pieces, randomise, word_pieces
from safetensors.numpy import load_file, save_file
from sources import change_json

START = 1  # the first layer with a head
LONG = {"max_position_embeddings": 256}  # the prompts are longer than the tiny models are

PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the "
    "query by providing a prediction of either 'Yes' or 'No'."
)
LIGHT_PROMPT = "Predict whether passage B contains an answer to query A."

Judge = Callable[[str, str], float]
States = Callable[[list[int], int], torch.Tensor]  # ids, layers -> the last token's normed state


def ids_of(tokenizer: Any, query: str, document: str, prompt: str, limit: int) -> list[int]:
    """The ids of a pair: every line is tokenized by itself, and the passage is cut to fit."""
    ids = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (f"A: {query}", "\n", f"B: {document}", prompt)
    ]
    first, line, second, last = ids
    room = limit - 1 - len(first) - 2 * len(line) - len(last)
    return [tokenizer.bos_token_id, *first, *line, *second[:room], *line, *last]


def save_gemma(folder: Path, **config: Any) -> Judge:
    """A Gemma that answers with Yes."""
    family = FAMILIES["gemma"]
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**family.config | LONG | config))
    randomise(model)
    model.tie_weights()
    model.eval().save_pretrained(folder)
    tokenizer = family.tokenizer(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("# bge-reranker-v2-gemma")
    yes, limit = tokenizer.convert_tokens_to_ids("Yes"), model.config.max_position_embeddings

    @torch.no_grad()
    def judge(query: str, document: str) -> float:
        ids = ids_of(tokenizer, query, document, PROMPT, limit)
        return float(model(torch.tensor([ids])).logits[0, -1, yes])

    return judge


def _save_layerwise(
    folder: Path,
    family: str,
    changes: dict[str, Any],
    prompt: str,
    states: Callable[[Any, list[int], int], torch.Tensor],
    cap: float | None,
    layer: int | None,
    **own: Any,
) -> Judge:
    """A backbone with a head after each layer from START on; the judge asks that after `layer`."""
    of = FAMILIES[family]
    kind = getattr(transformers, of.backbone)
    backbone = kind(kind.config_class(**of.config | LONG | changes))
    randomise(backbone)
    backbone.eval().save_pretrained(folder)
    tokenizer = (mistral_pieces if family == "llama" else of.tokenizer)(folder)
    tokenizer.save_pretrained(folder)
    layers, width = backbone.config.num_hidden_layers, backbone.config.hidden_size
    draw = np.random.default_rng(0)
    heads = draw.standard_normal((layers + 1 - START, 1, width), np.float32) / width**0.5
    tensors = load_file(folder / "model.safetensors")
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    named |= {f"lm_head.{n}.linear_head.weight": head for n, head in enumerate(heads)}
    save_file(named, folder / "model.safetensors")
    change_json(folder / "config.json", start_layer=START, **own)
    limit = backbone.config.max_position_embeddings
    chosen = layers if layer is None else layer

    @torch.no_grad()
    def judge(query: str, document: str) -> float:
        ids = ids_of(tokenizer, query, document, prompt, limit)
        logit = states(backbone, ids, chosen) @ torch.from_numpy(heads[chosen - START, 0])
        return float(logit if cap is None else cap * torch.tanh(logit / cap))

    return judge


SCALE_EMB, SCALE_DEPTH = 1.7, 1.4
MINICPM = {
    "vocab_size": len(word_pieces(MISTRAL_SPECIAL)[0]),
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def _minicpm_states(backbone: Any, ids: list[int], layer: int) -> torch.Tensor:
    """Llama's layers, the outputs of attention and MLP multiplied before they are added."""
    scale = SCALE_DEPTH / backbone.config.num_hidden_layers**0.5
    hidden = backbone.embed_tokens(torch.tensor([ids])) * SCALE_EMB
    positions = torch.arange(len(ids))[None]
    rotation = backbone.rotary_emb(hidden, positions)
    mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf).triu(1)
    for one in backbone.layers[:layer]:
        attended = one.self_attn(
            one.input_layernorm(hidden), position_embeddings=rotation, attention_mask=mask
        )
        hidden = hidden + attended[0] * scale
        hidden = hidden + one.mlp(one.post_attention_layernorm(hidden)) * scale
    return backbone.norm(hidden)[0, -1]


def save_minicpm(folder: Path, layer: int | None = None, **config: Any) -> Judge:
    code = "modeling_minicpm_reranker.LayerWiseMiniCPM"
    return _save_layerwise(
        folder,
        "llama",
        MINICPM | config,
        PROMPT,
        _minicpm_states,
        None,
        layer,
        architectures=["LayerWiseMiniCPMForCausalLM"],
        auto_map={"AutoModel": f"{code}Model", "AutoModelForCausalLM": f"{code}ForCausalLM"},
        model_type="minicpm",
        scale_emb=SCALE_EMB,
        scale_depth=SCALE_DEPTH,
        dim_model_base=4,
        head_multi=True,
        head_type="simple",
    )


def _gemma2_states(backbone: Any, ids: list[int], layer: int) -> torch.Tensor:
    """The states before a layer, which transformers gives, and the norm. After the last layer they
    are normed already."""
    result = backbone(torch.tensor([ids]), output_hidden_states=True)
    if layer == backbone.config.num_hidden_layers:
        return result.last_hidden_state[0, -1]
    return backbone.norm(result.hidden_states[layer])[0, -1]


def save_lightweight(folder: Path, layer: int | None = None, **config: Any) -> Judge:
    cap, code = 1.5, "BAAI/bge-reranker-v2.5-gemma2-lightweight--gemma_model.CostWiseGemma"
    return _save_layerwise(
        folder,
        "gemma2",
        config,
        LIGHT_PROMPT,
        _gemma2_states,
        cap,
        layer,
        architectures=["CostWiseGemmaForCausalLM"],
        auto_map={"AutoModel": f"{code}Model", "AutoModelForCausalLM": f"{code}ForCausalLM"},
        model_type="cost_wise_gemma",
        layer_wise=True,
        layer_sep=1,
        final_logit_softcapping=cap,
    )
