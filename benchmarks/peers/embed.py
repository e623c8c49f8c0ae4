"""One library that embeds, in a process of its own, driven over pipes by `bench_libraries`.

Runs in that library's environment, so it imports nothing of jaxembed but where it is what is
timed. The first line of standard input is a JSON object:

    {"library": "onnxruntime", "model": "/folder", "dtype": "int8", "threads": 2,
     "limit": 256, "texts": [...]}

Then each line is a batch size, and how many of the texts to embed with it. Answers are lines of
JSON: versions first, then seconds, and for an empty line the vectors of the last run, float32 in
base64.
"""

import base64
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from pipe import opened, versions


class Jaxembed:
    """The library, as README shows it."""

    PACKAGES = ("jaxembed", "jax", "jaxlib", "tokenizers")

    def __init__(self, model: str, dtype: str, threads: int, limit: int):
        import jax

        from jaxembed import Embedder, EngineConfig, memory

        memory.keep()  # as docs/library.md says: what the command line does
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        chosen: Any = {"default": {}, "int8": {"quantize": "int8"}}.get(dtype, {"dtype": dtype})
        config = EngineConfig(warmup="full", max_input_tokens=limit, **chosen)
        self._embedder = Embedder(model, config=config)
        self._embedder.model.main.engine.wait_timed()

    def embed(self, texts: list[str], batch: int) -> np.ndarray:
        """The engine makes its own batches."""
        return self._embedder.encode(texts)


class JaxembedStatic:
    """The library with static embeddings, which run without batches."""

    PACKAGES = ("jaxembed", "tokenizers", "numpy")

    def __init__(self, model: str, dtype: str, threads: int, limit: int):
        from jaxembed import Embedder

        self._embedder = Embedder(model)

    def embed(self, texts: list[str], batch: int) -> np.ndarray:
        """All texts in one call, or with a batch of 1 one by one."""
        encode = self._embedder.encode
        return np.stack([encode(text) for text in texts]) if batch == 1 else encode(texts)


class Model2Vec:
    """model2vec in its defaults."""

    PACKAGES = ("model2vec", "tokenizers", "numpy")

    def __init__(self, model: str, dtype: str, threads: int, limit: int):
        from model2vec import StaticModel

        self._model = StaticModel.from_pretrained(model)

    def embed(self, texts: list[str], batch: int) -> np.ndarray:
        """All texts in one call, or with a batch of 1 one by one."""
        encode = self._model.encode
        return np.stack([encode(text) for text in texts]) if batch == 1 else encode(texts)


class SentenceTransformers:
    """Sorts by length itself."""

    PACKAGES = ("sentence-transformers", "transformers", "torch", "tokenizers")

    def __init__(self, model: str, dtype: str, threads: int, limit: int):
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        kind = {"dtype": getattr(torch, dtype)}
        self._model = SentenceTransformer(model, device="cpu", model_kwargs=kind)
        self._model.max_seq_length = limit

    def embed(self, texts: list[str], batch: int) -> np.ndarray:
        return self._model.encode(texts, batch_size=batch, show_progress_bar=False)


class SentenceTransformersPool:
    """A process for each thread, each with a copy of the model and one thread."""

    PACKAGES = SentenceTransformers.PACKAGES

    def __init__(self, model: str, dtype: str, threads: int, limit: int):
        os.environ["OMP_NUM_THREADS"] = "1"  # which the processes read, before torch is imported
        self._model = SentenceTransformers(model, dtype, 1, limit)._model
        self._pool = self._model.start_multi_process_pool(["cpu"] * threads)

    def embed(self, texts: list[str], batch: int) -> np.ndarray:
        return self._model.encode(texts, batch_size=batch, pool=self._pool)


class OnnxRuntime:
    """Texts sorted by length, mean pooled and normalised here, in float32."""

    PACKAGES = ("onnxruntime", "tokenizers")

    def __init__(self, model: str, dtype: str, threads: int, limit: int):
        import onnxruntime
        import tokenizers

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        path = Path(model)
        self._session = onnxruntime.InferenceSession(str(path / f"{dtype}.onnx"), options)
        self._inputs = {one.name for one in self._session.get_inputs()}
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(limit)

    def embed(self, texts: list[str], batch: int) -> np.ndarray:
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
    "jaxembed-static": JaxembedStatic,
    "model2vec": Model2Vec,
    "sentence-transformers": SentenceTransformers,
    "sentence-transformers-pool": SentenceTransformersPool,
    "onnxruntime": OnnxRuntime,
}


def main() -> None:
    job, answer = opened()
    library = LIBRARIES[job["library"]](job["model"], job["dtype"], job["threads"], job["limit"])
    vectors = np.zeros((0, 0), np.float32)
    answer(versions(library.PACKAGES))
    for line in sys.stdin:
        if not line.strip():
            answer(base64.b64encode(vectors.astype("<f4").tobytes()).decode())
            continue
        batch, count = map(int, line.split())
        texts = job["texts"][:count]
        start = time.perf_counter()
        vectors = np.asarray(library.embed(texts, batch), np.float32)
        answer(time.perf_counter() - start)


if __name__ == "__main__":
    main()
