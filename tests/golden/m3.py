"""Saves a random model with BGE-M3's files, and gives its three outputs of a text."""

from pathlib import Path

import numpy as np
import torch
import transformers
from golden.families import FAMILIES, save_tower

LIMIT = 24  # tokens of a text


def save(folder: Path) -> None:
    """A narrow XLM-R with BGE-M3's files, as torch.save writes them."""
    family = FAMILIES["xlm_roberta"]
    save_tower(family, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = LIMIT
    tokenizer.save_pretrained(folder)
    width = transformers.AutoConfig.from_pretrained(folder).hidden_size
    torch.manual_seed(0)
    for name, outputs in (("sparse_linear.pt", 1), ("colbert_linear.pt", width)):
        torch.save(torch.nn.Linear(width, outputs).state_dict(), folder / name)


class Reference:
    """The model in torch, one text at a time, by the formulas of M3 in FlagEmbedding."""

    def __init__(self, folder: Path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.tower = transformers.AutoModel.from_pretrained(folder).eval()
        self.sparse = torch.load(folder / "sparse_linear.pt")
        self.vectors = torch.load(folder / "colbert_linear.pt")
        names = ("cls_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        self.unused = {getattr(self.tokenizer, name) for name in names}

    @torch.no_grad()
    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        batch = self.tokenizer(text, truncation=True, max_length=LIMIT, return_tensors="pt")
        (hidden,) = self.tower(**batch).last_hidden_state
        linear = torch.nn.functional.linear
        weights = torch.relu(linear(hidden, self.sparse["weight"], self.sparse["bias"]))[:, 0]
        terms = np.zeros(self.tower.config.vocab_size, np.float32)
        for number, weight in zip(batch["input_ids"][0].tolist(), weights.tolist(), strict=True):
            if number not in self.unused:
                terms[number] = max(terms[number], weight)
        vectors = linear(hidden[1:], self.vectors["weight"], self.vectors["bias"])
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return hidden[0].numpy(), terms, vectors.numpy()
