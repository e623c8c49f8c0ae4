"""JinaBERT v2 and its code variant in torch, by their formulas: transformers has no class for them.

The tensors have the published names; PUBLISHED is what their config.json says besides its sizes.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.modeling_utils import PreTrainedModel


def published(place: str) -> dict[str, Any]:
    code = f"jinaai/{place}--"
    names = {"AutoConfig": f"{code}configuration_bert.JinaBertConfig"}
    for kind in ("Model", "ForMaskedLM", "ForSequenceClassification"):
        names[f"AutoModel{kind.removeprefix('Model')}"] = f"{code}modeling_bert.JinaBert{kind}"
    said = {"model_type": "bert", "auto_map": names, "position_embedding_type": "alibi"}
    said |= {"feed_forward_type": "geglu", "emb_pooler": "mean", "attn_implementation": "torch"}
    return said


PUBLISHED = published("jina-bert-implementation")
PUBLISHED_CODE = published("jina-bert-v2-qk-post-norm")


class JinaBertConfig(BertConfig):
    """`qk_post_norm` is no published field: it tells the code variant from the other."""

    model_type = "jina_bert_reference"
    qk_post_norm: bool = False


def slopes(heads: int) -> list[float]:
    """Press et al. 2021, arXiv:2108.12409, as in their code."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**head for head in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return slopes(lower) + slopes(2 * lower)[0::2][: heads - lower]


class Layer(nn.Module):
    def __init__(self, config: JinaBertConfig):
        super().__init__()
        width, wide = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        norm = partial(nn.LayerNorm, width, eps=config.layer_norm_eps)
        names = ("query", "key", "value")
        products: dict[str, nn.Module] = {name: nn.Linear(width, width) for name in names}
        after = nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": norm()})
        self.is_code = config.qk_post_norm
        if self.is_code:
            products |= {"layer_norm_q": norm(), "layer_norm_k": norm()}
            self.layer_norm_1, self.layer_norm_2 = norm(), norm()
            mlp = {"up_gated_layer": nn.Linear(width, 2 * wide, bias=False)}
            mlp |= {"down_layer": nn.Linear(wide, width)}
        else:
            mlp = {"gated_layers": nn.Linear(width, 2 * wide, bias=False)}
            mlp |= {"wo": nn.Linear(wide, width), "layernorm": norm()}
        self.mlp = nn.ModuleDict(mlp)
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(products), "output": after})

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mlp, after = self.mlp, self.attention["output"]
        attended = after["LayerNorm"](x + after["dense"](self.mixed(x, mask)))
        if self.is_code:
            h = self.layer_norm_1(x + attended)
            up, gate = mlp["up_gated_layer"](h).chunk(2, dim=-1)
            return self.layer_norm_2(h + mlp["down_layer"](up * nn.functional.gelu(gate)))
        gate, up = mlp["gated_layers"](attended).chunk(2, dim=-1)
        return mlp["layernorm"](attended + mlp["wo"](nn.functional.gelu(gate) * up))

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        """One head after another, for the memory of long texts."""
        products = self.attention["self"]
        query, key, value = (products[name](x) for name in ("query", "key", "value"))
        if self.is_code:
            query, key = products["layer_norm_q"](query), products["layer_norm_k"](key)
        width = query.shape[-1] // self.heads
        places = torch.arange(x.shape[1], dtype=torch.float32)
        distance = (places[:, None] - places[None]).abs()
        mixed = []
        for head, slope in enumerate(slopes(self.heads)):
            q, k, v = (y[..., head * width : (head + 1) * width] for y in (query, key, value))
            scores = q @ k.mT / math.sqrt(width) - slope * distance
            mixed.append(scores.masked_fill(mask[:, None] == 0, -math.inf).softmax(dim=-1) @ v)
        return torch.cat(mixed, dim=-1)


class JinaBertModel(PreTrainedModel):
    config_class = JinaBertConfig

    def __init__(self, config: JinaBertConfig):
        super().__init__(config)
        width = config.hidden_size
        tables: dict[str, nn.Module] = {
            "word_embeddings": nn.Embedding(config.vocab_size, width),
            "token_type_embeddings": nn.Embedding(config.type_vocab_size, width),
        }
        norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.embeddings = nn.ModuleDict(tables | {"LayerNorm": norm})
        layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.encoder = nn.ModuleDict({"layer": layers})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)})
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None, **_
    ) -> BaseModelOutputWithPooling:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        tables = self.embeddings
        x = tables["word_embeddings"](input_ids) + tables["token_type_embeddings"](types)
        x = tables["LayerNorm"](x)
        for layer in self.encoder["layer"]:
            x = layer(x, attention_mask)
        pooled = torch.tanh(self.pooler["dense"](x[:, 0]))
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)


class JinaBertForSequenceClassification(PreTrainedModel):
    config_class = JinaBertConfig
    base_model_prefix = "bert"

    def __init__(self, config: JinaBertConfig):
        super().__init__(config)
        self.bert = JinaBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Any) -> SequenceClassifierOutput:
        pooled = self.bert(input_ids, **inputs).pooler_output
        return SequenceClassifierOutput(logits=self.classifier(pooled))


AutoConfig.register(JinaBertConfig.model_type, JinaBertConfig)
AutoModel.register(JinaBertConfig, JinaBertModel)
AutoModelForSequenceClassification.register(JinaBertConfig, JinaBertForSequenceClassification)
