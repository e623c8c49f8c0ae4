"""Models with routes against sentence-transformers' Router, which it saves with random weights."""

from pathlib import Path

import pytest
from golden import make
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from jaxembed import Embedder
from jaxembed.errors import UnknownRoute
from parity import sentences
from parity.reference import TOLERANCE, assert_within, relative

TEXTS = [*make.TEXTS, *sentences.VARIED[::5]]
WIDTH = 24
DENSE = make.Dense(WIDTH, "Identity")
SMALL = make.Case("cls", (DENSE,), {"num_hidden_layers": 1}, max_seq_length=12)
LARGE = make.Case("mean", (DENSE, make.NORMALIZE), family="modernbert")
STATIC = make.Static((DENSE,))
PROMPTS = {"query": "what is ", "document": "", "other": "the "}


def save(folder: Path, queries: make.Case | make.Static, **options) -> SentenceTransformer:
    """A Router of these queries, and of LARGE for documents, with modules after it."""
    parts = {}
    for route, case in (("query", queries), ("document", LARGE)):
        saver = make.save_static if isinstance(case, make.Static) else make.save
        saver(case, folder.parent / route)
        parts[f"{route}_modules"] = list(make.load(folder.parent / route).children())
    router = modules.Router.for_query_document(**parts, **options)
    shared = [modules.Dense(WIDTH, 16), modules.Normalize()]
    make.randomise(shared[0])
    model = SentenceTransformer(modules=[router, *shared], prompts=PROMPTS, device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)
    return make.load(folder)


def assert_agrees(embedder: Embedder, reference: SentenceTransformer, note) -> None:
    apart = 0.0
    for method in ("encode_query", "encode_document"):
        for options in ({}, {"prompt_name": "other"}, {"prompt": "how "}):
            got = getattr(embedder, method)(TEXTS, **options)
            wanted = getattr(reference, method)(TEXTS, show_progress_bar=False, **options)
            assert got.shape == wanted.shape
            apart = max(apart, relative(got, wanted))
    assert_within(apart, note, "vectors")


@pytest.mark.parametrize("queries", [SMALL, STATIC], ids=["tower", "static"])
@pytest.mark.parametrize("default", ["query", "document"])
def test_every_route_agrees(queries, default, tmp_path, make_embedder, note):
    reference = save(tmp_path / "router", queries, default_route=default)
    embedder = make_embedder(tmp_path / "router", [(4, 32)])
    assert_agrees(embedder, reference, note)
    for options in ({}, {"prompt_name": "other"}):
        wanted = reference.encode(TEXTS, show_progress_bar=False, **options)
        assert relative(embedder.encode(TEXTS, **options), wanted) < TOLERANCE


def test_what_one_refuses_the_other_refuses_too(tmp_path, make_embedder, note):
    reference = save(tmp_path / "router", SMALL, default_route=None, allow_empty_key=False)
    embedder = make_embedder(tmp_path / "router", [(4, 32)])
    assert_agrees(embedder, reference, note)
    with pytest.raises(ValueError, match="Could not determine route"):
        reference.encode(TEXTS)
    with pytest.raises(UnknownRoute):
        embedder.encode(TEXTS)
