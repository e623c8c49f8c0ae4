"""Models that compare texts token by token against sentence-transformers' MultiVectorEncoder."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from golden import make
from golden.colbert import STANFORD_MARKERS, Saved, save

from jaxembed import Embedder
from jaxembed.data.inputs import Text
from jaxembed.data.spec import PerToken
from jaxembed.data.work import Encoding
from jaxembed.preprocessing.prompts import Role
from jaxembed.runtime.options import EncodeOptions
from parity import sentences
from parity.reference import relative

TOLERANCE = 1e-5  # of vectors: float32, sums in another order
HIDDEN_TOLERANCE = 1e-4  # of hidden states, which no norm of vectors evens out
BUCKETS = [(4, 32), (1, 64)]
ROLES: tuple[Role, ...] = ("query", "document")
TEXTS = [
    *make.TEXTS,
    "the cat, the dog. what? is: it!",
    "[MASK] the [Q] cat",
    *sentences.VARIED[::7],
]

JINA = {"family": "jina_v3", "config": {"max_position_embeddings": 64}}
MODERN = {"family": "modernbert", "config": {"local_attention": 32}}
NATIVE = Saved("sentence_transformers")
PYLATE = Saved("pylate")
STANFORD = Saved("stanford", markers=STANFORD_MARKERS)
XLM_ROBERTA_MARKERS = ("[QueryMarker]", "[DocumentMarker]")
MODELS = {
    "stanford": STANFORD,
    "stanford, attended": STANFORD.but(attend=True, skipped=None),
    "stanford, xlm-roberta": STANFORD.but(family="xlm_roberta", markers=XLM_ROBERTA_MARKERS),
    "pylate": PYLATE,
    "pylate, attended": PYLATE.but(attend=True, skipped=None),
    "pylate, without expansion": PYLATE.but(length=None, query_length=11, skipped="the.,"),
    "pylate, no markers": PYLATE.but(markers=("", "")),
    "pylate, prompts": PYLATE.but(prompts={"query": "how is "}),
    "pylate, several layers": PYLATE.but(
        dense=(
            {"out_features": 16, "use_residual": True, "activation_function": torch.nn.GELU()},
            {"use_residual": True, "bias": True},
        )
    ),
    "pylate, modernbert": PYLATE.but(**MODERN),
    "pylate, modernbert, attended": PYLATE.but(**MODERN, attend=True),
    "pylate, jina": PYLATE.but(**JINA, attend=True, length=24),
    "pylate, jina, hidden": PYLATE.but(**JINA, length=24),
    "sentence-transformers": NATIVE,
    "sentence-transformers, min": NATIVE.but(strategy="min", query_length=18, document_length=None),
    "sentence-transformers, min, no limit": NATIVE.but(strategy="min", attend=True),
    "sentence-transformers, no expansion": NATIVE.but(length=None, document_length=None),
    "sentence-transformers, prompts": NATIVE.but(markers=("what is ", "the "), skipped="."),
    "sentence-transformers, modernbert": NATIVE.but(**MODERN),
}


def computed(
    embedder: Embedder, texts: Sequence[str], role: Role
) -> tuple[list[Encoding], dict[str, Any]]:
    """The encodings of some texts of a role, and what the engine makes of them."""
    tasks, inputs = embedder.model.tasks, [Text(text) for text in texts]
    options = tasks.for_role(role, EncodeOptions())
    request = tasks.compute(inputs, ["multi_vector", "tokens"], options)
    prepared = request.prepare(embedder.model.main.processor, None, inputs)
    return prepared.work.encodings, embedder.model.run(request)


def kept(embedder: Embedder, encoding: Encoding, rows: np.ndarray, role: str) -> np.ndarray:
    """The rows that are answered, of length one."""
    head = embedder.spec.head
    assert isinstance(head, PerToken)
    if role == "document":
        rows = rows[~np.isin(encoding.ids, head.skipped_ids)]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("name", MODELS)
def test_texts_have_the_vectors_of_sentence_transformers(name, tmp_path, make_embedder, note):
    """Its ids, hidden states and vectors, of all texts in one batch and of each alone."""
    reference = save(MODELS[name], tmp_path / "model")
    embedder = make_embedder(tmp_path / "model", BUCKETS)
    for role in ROLES:
        apart, hidden_apart = distances(reference, embedder, role)
        note(f"{role}: vectors within {apart:.1e}, hidden states {hidden_apart:.1e}")
        assert apart < TOLERANCE
        assert hidden_apart < HIDDEN_TOLERANCE


def distances(reference: Any, embedder: Embedder, role: Role) -> tuple[float, float]:
    """The largest relative distances of vectors and of hidden states."""
    encode = {"query": reference.encode_query, "document": reference.encode_document}[role]
    wanted = encode(TEXTS, show_progress_bar=False, convert_to_numpy=True, batch_size=4)
    encodings, found = computed(embedder, TEXTS, role)
    apart = hidden_apart = 0.0
    for number, text in enumerate(TEXTS):
        features = reference.preprocess([text], prompt=reference.prompts.get(role), task=role)
        assert encodings[number].ids.tolist() == features["input_ids"][0].tolist()
        with torch.inference_mode():
            hidden = reference[0](features)["token_embeddings"][0].numpy()
        hidden_apart = max(hidden_apart, relative(found["tokens"][number], hidden))
        vectors = kept(embedder, encodings[number], found["multi_vector"][number], role)
        assert vectors.shape == wanted[number].shape
        apart = max(apart, relative(vectors, wanted[number]))
        _, alone = computed(embedder, [text], role)
        again = kept(embedder, encodings[number], alone["multi_vector"][0], role)
        assert relative(again, vectors) < TOLERANCE
    return apart, hidden_apart
