"""One library that embeds texts, in a process of its own: see `pipe` for how it is driven.

    {"library": "onnxruntime", "model": "/folder", "dtype": "int8", "threads": 2,
     "limit": 256, "texts": [...]}

A call is `["embed", batch, count]`: a batch size, and how many of the texts to embed with it.
"""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from pipe import embedder, serve, session


class Library(ABC):
    """A library with the texts of its job."""

    def __init__(self, job: dict[str, Any]):
        self._texts = job["texts"]

    def embed(self, batch: int, count: int) -> np.ndarray:
        """The vectors of the first `count` texts."""
        return self.vectors(self._texts[:count], batch)

    @abstractmethod
    def vectors(self, texts: list[str], batch: int) -> np.ndarray:
        """The vectors of texts."""


class Jaxembed(Library):
    """The library, as README shows it; the engine makes its own batches."""

    PACKAGES = ("jaxembed", "jax", "jaxlib", "tokenizers")

    def __init__(self, job: dict[str, Any]):
        super().__init__(job)
        chosen: Any = {"default": {}, "int8": {"quantize": "int8"}}
        options = chosen.get(job["dtype"], {"dtype": job["dtype"]})
        self._embedder = embedder(job["model"], max_input_tokens=job["limit"], **options)

    def vectors(self, texts: list[str], batch: int) -> np.ndarray:
        return self._embedder.encode(texts)


class Static(Library):
    """Static embeddings of jaxembed: all texts in one call, or with a batch of 1 one by one."""

    PACKAGES = ("jaxembed", "tokenizers", "numpy")

    def __init__(self, job: dict[str, Any]):
        super().__init__(job)
        self._encode = self.loaded(job["model"]).encode

    def loaded(self, model: str) -> Any:
        from jaxembed import Embedder

        return Embedder(model)

    def vectors(self, texts: list[str], batch: int) -> np.ndarray:
        encode = self._encode
        return np.stack([encode(text) for text in texts]) if batch == 1 else encode(texts)


class Model2Vec(Static):
    """model2vec in its defaults."""

    PACKAGES = ("model2vec", "tokenizers", "numpy")

    def loaded(self, model: str) -> Any:
        from model2vec import StaticModel

        return StaticModel.from_pretrained(model)


class SentenceTransformers(Library):
    """Sorts by length itself."""

    PACKAGES = ("sentence-transformers", "transformers", "torch", "tokenizers")

    def __init__(self, job: dict[str, Any]):
        import torch
        from sentence_transformers import SentenceTransformer

        super().__init__(job)
        torch.set_num_threads(job["threads"])
        kind = {"dtype": getattr(torch, job["dtype"])}
        self._model = SentenceTransformer(job["model"], device="cpu", model_kwargs=kind)
        self._model.max_seq_length = job["limit"]

    def vectors(self, texts: list[str], batch: int) -> np.ndarray:
        return self._model.encode(texts, batch_size=batch, show_progress_bar=False)


class SentenceTransformersPool(SentenceTransformers):
    """A process for each thread, each with a copy of the model and one thread."""

    def __init__(self, job: dict[str, Any]):
        os.environ["OMP_NUM_THREADS"] = "1"  # which the processes read, before torch is imported
        super().__init__(job | {"threads": 1})
        self._pool = self._model.start_multi_process_pool(["cpu"] * job["threads"])

    def vectors(self, texts: list[str], batch: int) -> np.ndarray:
        return self._model.encode(texts, batch_size=batch, pool=self._pool)


class OnnxRuntime(Library):
    """Texts sorted by length, mean pooled and normalised here, in float32."""

    PACKAGES = ("onnxruntime", "tokenizers")

    def __init__(self, job: dict[str, Any]):
        import tokenizers

        super().__init__(job)
        path = Path(job["model"])
        self._session = session(str(path / f"{job['dtype']}.onnx"), job["threads"])
        self._inputs = {one.name for one in self._session.get_inputs()}
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(job["limit"])

    def vectors(self, texts: list[str], batch: int) -> np.ndarray:
        encodings = self._tokenizer.encode_batch(texts)
        order = sorted(range(len(texts)), key=lambda k: -len(encodings[k].ids))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            pooled = self._pooled([encodings[k].ids for k in rows])
            for k, vector in zip(rows, pooled, strict=True):
                vectors[k] = vector
        return np.stack(vectors)

    def _pooled(self, rows: list[list[int]]) -> np.ndarray:
        longest = max(map(len, rows))
        ids = np.array([row + [0] * (longest - len(row)) for row in rows], np.int64)
        mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows], np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = self._session.run(None, {k: v for k, v in feeds.items() if k in self._inputs})[0]
        weights = mask.astype(np.float32)
        total = np.einsum("bsd,bs->bd", hidden, weights) / weights.sum(1, keepdims=True)
        return total / np.linalg.norm(total, axis=1, keepdims=True)


LIBRARIES = {
    "jaxembed": Jaxembed,
    "jaxembed-static": Static,
    "model2vec": Model2Vec,
    "sentence-transformers": SentenceTransformers,
    "sentence-transformers-pool": SentenceTransformersPool,
    "onnxruntime": OnnxRuntime,
}

if __name__ == "__main__":
    serve(LIBRARIES)
