"""nomic-embed-text-v2-moe in torch, by its formulas: transformers' class for NomicBERT ignores the
fields of experts.

The tensors have the published names; PUBLISHED is what config.json says besides its sizes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, BertConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

THETA = 10_000.0
CODE = "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBert"

PUBLISHED: dict[str, Any] = {"model_type": "nomic_bert", "architectures": ["NomicBertModel"]}
PUBLISHED |= {"auto_map": {"AutoModel": f"{CODE}Model", "AutoModelForMaskedLM": f"{CODE}ForMLM"}}
PUBLISHED |= {"activation_function": "gelu", "rotary_emb_base": THETA, "rotary_emb_fraction": 1.0}
PUBLISHED |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True)
PUBLISHED |= {"num_shared_experts": 0, "expert_choice_router": False, "prenorm": False}
PUBLISHED |= {"moe_normalize_expert_weights": False, "moe_impl": "megablocks"}


class NomicMoeConfig(BertConfig):
    model_type = "nomic_moe_reference"
    num_experts: int = 8
    moe_top_k: int = 2
    moe_every_n_layers: int = 2


class Experts(nn.Module):
    """y = sum of p_e * gelu(x W1_e^T) W2_e over the largest p = softmax(x R^T), plus a bias."""

    def __init__(self, config: NomicMoeConfig):
        super().__init__()
        shape = (config.num_experts * config.intermediate_size, config.hidden_size)
        self.router = nn.ModuleDict({"layer": nn.Linear(shape[1], config.num_experts, bias=False)})
        self.experts = nn.Module()
        self.experts.mlp = nn.ParameterDict({name: torch.empty(shape) for name in ("w1", "w2")})
        self.experts.bias = nn.Parameter(torch.empty(shape[1]))
        self.count, self.active = config.num_experts, config.moe_top_k

    def forward(self, x: Tensor) -> Tensor:
        p, chosen = self.router["layer"](x).softmax(dim=-1).topk(self.active, dim=-1)
        w1, w2 = (self.experts.mlp[name].chunk(self.count) for name in ("w1", "w2"))
        every = torch.stack([nn.functional.gelu(x @ a.T) @ b for a, b in zip(w1, w2, strict=True)])
        own = every.permute(1, 2, 0, 3).gather(
            2, chosen[..., None].expand(*chosen.shape, x.size(-1))
        )
        return (p[..., None] * own).sum(dim=2) + self.experts.bias


class Layer(nn.Module):
    def __init__(self, config: NomicMoeConfig, number: int):
        super().__init__()
        width, wide = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        self.attn = nn.ModuleDict(
            {"Wqkv": nn.Linear(width, 3 * width), "out_proj": nn.Linear(width, width)}
        )
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=config.layer_norm_eps) for _ in range(2))
        self.has_experts = number % config.moe_every_n_layers == 1
        dense = {"fc1": nn.Linear(width, wide), "fc2": nn.Linear(wide, width)}
        self.mlp = Experts(config) if self.has_experts else nn.ModuleDict(dense)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.attn["Wqkv"](x).chunk(3, dim=-1)
        )
        scores = rotated(query) @ rotated(key).mT / (width // self.heads) ** 0.5
        scores = scores.masked_fill(mask[:, None, None] == 0, -torch.inf)
        mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(rows, length, width)
        h, mlp = self.norm1(x + self.attn["out_proj"](mixed)), self.mlp
        if self.has_experts:
            return self.norm2(h + mlp(h))
        return self.norm2(h + mlp["fc2"](nn.functional.gelu(mlp["fc1"](h))))


def rotated(x: Tensor) -> Tensor:
    """Heads `[rows, heads, length, width]`, whose dimensions k and k + width / 2 form a pair."""
    width = x.shape[-1]
    rates = THETA ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(x.shape[-2])[:, None] * rates
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class NomicMoeModel(PreTrainedModel):
    config_class = NomicMoeConfig

    def __init__(self, config: NomicMoeConfig):
        super().__init__(config)
        width = config.hidden_size
        tables: dict[str, nn.Module] = {
            "word_embeddings": nn.Embedding(config.vocab_size, width),
            "token_type_embeddings": nn.Embedding(config.type_vocab_size, width),
        }
        self.embeddings = nn.ModuleDict(tables)
        self.emb_ln = nn.LayerNorm(width, eps=config.layer_norm_eps)
        layers = nn.ModuleList([Layer(config, i) for i in range(config.num_hidden_layers)])
        self.encoder = nn.ModuleDict({"layers": layers})
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None, **_
    ) -> BaseModelOutput:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        tables = self.embeddings
        x = tables["word_embeddings"](input_ids) + tables["token_type_embeddings"](types)
        x = self.emb_ln(x)
        for layer in self.encoder["layers"]:
            x = layer(x, attention_mask)
        return BaseModelOutput(last_hidden_state=x)


AutoConfig.register(NomicMoeConfig.model_type, NomicMoeConfig)
AutoModel.register(NomicMoeConfig, NomicMoeModel)
