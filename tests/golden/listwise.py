"""Saves random models with the files of jina-reranker-v3, and ranks documents by the formulas of
its modeling.py over transformers' Qwen3Model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden.families import FAMILIES, qwen_bytes, randomise
from safetensors.torch import save_file
from sources import change_json

LIMIT = 2560  # tokens of the tiny one, whose prompt has nearly a thousand
WIDTH = 512  # of the vectors
TOKENS = ("<|embed_token|>", "<|rerank_token|>")
SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how "
    "relevant they are to the query. If the query is a question, how relevant a passage is depends "
    "on how well it answers the question. If not, try to analyze the intent of the query and "
    "assess how well each passage satisfies the intent. If an instruction is provided, you should "
    "follow the instruction when determining the ranking."
)

Blocks = list[list[str]]


def prompt_of(query: str, documents: Sequence[str], instruction: str | None = None) -> str:
    passages = [
        f'<passage id="{number}">\n{document}{TOKENS[0]}\n</passage>'
        for number, document in enumerate(documents)
    ]
    return "\n".join(
        [
            f"<|im_start|>system\n{SYSTEM}<|im_end|>",
            "<|im_start|>user",
            f"I will provide you with {len(documents)} passages, each indicated by a numerical "
            "identifier. Rank the passages based on their relevance to query: " + query,
            *([f"<instruct>\n{instruction}\n</instruct>"] if instruction else []),
            *passages,
            f"<query>\n{query}{TOKENS[1]}\n</query><|im_end|>",
            "<|im_start|>assistant",
            "<think>\n\n</think>\n\n",
        ]
    )


class Reference(torch.nn.Module):
    """The published model; its tensors have the published names."""

    def __init__(self, config: Any, tokenizer: Any):
        super().__init__()
        self.tokenizer, width = tokenizer, config.hidden_size
        self.model = transformers.Qwen3Model(config)
        self.projector = torch.nn.Sequential(
            torch.nn.Linear(width, width // 2, bias=False),
            torch.nn.ReLU(),
            torch.nn.Linear(width // 2, WIDTH, bias=False),
        )

    def _shortened(self, text: str, longest: int) -> tuple[str, int]:
        ids = self.tokenizer(text, truncation=True, max_length=longest)["input_ids"]
        return (self.tokenizer.decode(ids) if len(ids) >= longest else text), len(ids)

    def blocks(self, query: str, documents: Sequence[str], longest: int) -> tuple[str, Blocks]:
        """The query and the documents of each block, cut."""
        query, length = self._shortened(query, 512)
        room = self.tokenizer.model_max_length - 2 * length
        blocks: Blocks = [[]]
        left = room
        for document in documents:
            if len(blocks[-1]) >= 125 or (blocks[-1] and left <= longest):
                blocks.append([])
                left = room
            text, length = self._shortened(document, longest)
            blocks[-1].append(text)
            left -= length
        return query, blocks

    def prompts(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str | None = None,
        longest: int = 2048,
    ) -> list[list[int]]:
        """The token ids of each block."""
        for name in reversed(TOKENS):
            query = query.replace(name, "")
            documents = [document.replace(name, "") for document in documents]
        query, blocks = self.blocks(query, documents, longest)
        texts = [prompt_of(query, block, instruction) for block in blocks]
        return [self.tokenizer(text)["input_ids"] for text in texts]

    @torch.no_grad()
    def rank(self, query: str, documents: Sequence[str], **options: Any) -> np.ndarray:
        """The scores of documents, float32. Options are those of `prompts`."""
        embed, rerank = self.tokenizer.convert_tokens_to_ids(list(TOKENS))
        queries, vectors, weights = [], [], []
        for prompt in self.prompts(query, documents, **options):
            ids = torch.tensor(prompt)
            states = self.projector(self.model(ids[None]).last_hidden_state[0])
            of_documents, of_query = states[ids == embed], states[ids == rerank]
            cosines = torch.cosine_similarity(of_documents, of_query)
            queries.append(of_query[0].numpy())
            vectors.append(of_documents.numpy())
            weights.append(((1 + cosines) / 2).max().item())
        mean, rows = np.average(queries, axis=0, weights=weights), np.concatenate(vectors)
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(mean)
        return (rows @ mean / lengths).astype(np.float32)


def save(folder: Path, tokenizer: Any = None, limit: int = LIMIT, **config: Any) -> Reference:
    """A random model with the published files; by default with the tokenizer of tiny ones."""
    tokenizer = tokenizer or qwen_bytes(folder, more=TOKENS)
    tokenizer.model_max_length = limit
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": limit}
    reference = Reference(
        transformers.Qwen3Config(**FAMILIES["qwen3"].config | sizes | config), tokenizer
    ).eval()
    randomise(reference)
    reference.model.config.save_pretrained(folder)
    save_file(reference.state_dict(), folder / "model.safetensors")
    change_json(
        folder / "config.json",
        architectures=["JinaForRanking"],
        auto_map={"AutoModel": "modeling.JinaForRanking"},
    )
    return reference
