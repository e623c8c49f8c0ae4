"""Saves a random model with BGE-M3's files, and gives its three outputs of a text."""

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from golden.families import FAMILIES, randomise, save_tower
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

LIMIT = 24  # tokens of a text


def save(folder: Path) -> None:
    """A narrow XLM-R with BGE-M3's files: sentence-transformers', and those of torch.save."""
    with tempfile.TemporaryDirectory() as plain:
        save_tower(FAMILIES["xlm_roberta"], Path(plain))
        transformer = modules.Transformer(plain, max_seq_length=LIMIT)
    width = transformer.get_embedding_dimension()
    layers = [transformer, modules.Pooling(width, "cls"), modules.Normalize()]
    model = SentenceTransformer(modules=layers, device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)
    for name, outputs in (("sparse_linear.pt", 1), ("colbert_linear.pt", width)):
        layer = torch.nn.Linear(width, outputs)
        randomise(layer)
        torch.save(layer.state_dict(), folder / name)


class Reference:
    """The model in torch, one text at a time, by the formulas of M3 in FlagEmbedding."""

    def __init__(self, folder: Path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.backbone = transformers.AutoModel.from_pretrained(folder).eval()
        self.sparse = torch.load(folder / "sparse_linear.pt")
        self.vectors = torch.load(folder / "colbert_linear.pt")
        names = ("cls_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        self.unused = {getattr(self.tokenizer, name) for name in names}

    @torch.no_grad()
    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[width], [terms] and [tokens - 1, width]: dense, sparse and several vectors."""
        batch = self.tokenizer(text, truncation=True, max_length=LIMIT, return_tensors="pt")
        (hidden,) = self.backbone(**batch).last_hidden_state
        linear = torch.nn.functional.linear
        weights = torch.relu(linear(hidden, self.sparse["weight"], self.sparse["bias"]))[:, 0]
        terms = np.zeros(self.backbone.config.vocab_size, np.float32)
        for number, weight in zip(batch["input_ids"][0].tolist(), weights.tolist(), strict=True):
            if number not in self.unused:
                terms[number] = max(terms[number], weight)
        vectors = linear(hidden[1:], self.vectors["weight"], self.vectors["bias"])
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return torch.nn.functional.normalize(hidden[0], dim=-1).numpy(), terms, vectors.numpy()
