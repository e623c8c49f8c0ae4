"""Stands in for sentence-transformers: its calls, computed by jaxembed in float32.

It errs as the environment says, which reaches a process of its own: FAKE_NOISE adds noise to the
results of texts (of a pair the second) that hold the word, FAKE_EXTRA_TOKEN an id to theirs,
FAKE_SCALE scales all vectors, FAKE_LIMIT is its own limit, FAKE_FAILURE is raised.
"""

import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from jaxembed import Embedder, EngineConfig
from jaxembed.data.inputs import Pair, Text
from jaxembed.preprocessing.text import TokenizationOptions

__version__ = "6.2.0"


def _holds(variable: str, one: str | tuple[str, str]) -> bool:
    word = os.environ.get(variable)
    return word is not None and word in (one if isinstance(one, str) else one[1])


@cache
def _embedder(folder: str, limit: int | None = None) -> Embedder:
    with tempfile.TemporaryDirectory() as temporary:
        grid = Path(temporary) / "buckets.json"
        grid.write_text('{"buckets": [[4, 64]]}')  # one program to compile
        config = EngineConfig(
            dtype="float32", devices=1, buckets=grid, max_batch_tokens=256, max_input_tokens=limit
        )
        embedder = Embedder(folder, cache_dir=Path(temporary), config=config)
        embedder.model.main.engine.wait_timed(
            60.0
        )  # which it notes in the folder that is removed now
        return embedder


class _Model:
    def __init__(self, folder: str, *, device: str, local_files_only: bool, model_kwargs: dict):
        assert (device, local_files_only, model_kwargs) == ("cpu", True, {"dtype": "float32"})
        if "FAKE_FAILURE" in os.environ:
            raise RuntimeError(os.environ["FAKE_FAILURE"])
        self._folder = folder
        self.embedder = _embedder(folder, int(os.environ.get("FAKE_LIMIT", "0")) or None)
        self.prompts = self.embedder.spec.prompts
        self.default_prompt_name = self.embedder.spec.default_prompt_name

    @property
    def max_seq_length(self) -> int:
        return self.embedder.max_input_tokens

    @max_seq_length.setter
    def max_seq_length(self, limit: int) -> None:
        self.embedder = _embedder(self._folder, limit)

    def eval(self):
        return self

    def float(self):
        return self

    def requires_grad_(self, wanted: bool):
        assert not wanted
        return self

    def preprocess(self, inputs: list, *, prompt: str | None, processing_kwargs=None) -> dict:
        (one,) = inputs
        assert processing_kwargs is None or isinstance(one, tuple)  # it cuts a second text
        given = Text(one) if isinstance(one, str) else Pair(*one)
        tokenization = TokenizationOptions(prompt or "", truncate=True, side="right")
        (encoding,) = self.embedder.model.main.processor.encode(
            [given], tokenization
        ).work.encodings
        ids = encoding.ids.tolist()
        ids = [*ids, 1] if _holds("FAKE_EXTRA_TOKEN", one) else ids
        return {"input_ids": np.array([ids]), "one": one}

    def noise(self, one: str | tuple[str, str], width: int) -> np.ndarray:
        draw = np.random.default_rng(0).standard_normal(width).astype(np.float32)
        return draw * np.float32(_holds("FAKE_NOISE", one))


class SentenceTransformer(_Model):
    def encode(self, texts: list[str], *, prompt_name: str | None, show_progress_bar: bool):
        assert not show_progress_bar
        (text,) = texts
        vector = self.embedder.encode(text, prompt_name=prompt_name)
        scale = float(os.environ.get("FAKE_SCALE", "1"))
        return (vector + self.noise(text, len(vector)))[None] * np.float32(scale)


class CrossEncoder(_Model):
    def __call__(self, features: dict) -> dict:
        one = features["one"]
        (labels,) = self.embedder.classify([one], raw_scores=True)
        scores = {label.label: label.score for label in labels}
        logits = np.array([scores[label] for label in self.embedder.spec.labels], np.float32)
        return {"scores": (logits + self.noise(one, len(logits)))[None]}
