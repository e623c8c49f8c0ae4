"""The examples run, at a tiny size, and their arithmetic is right."""

import json
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from test_embedder import save_scorer

from examples import retrieve_and_rerank as example
from jaxembed import Embedder, EngineConfig

DOCUMENTS = {
    "1": "the cat sat on the mat",
    "2": "a dog runs",
    "3": "blue sky",
    "4": "the red train",
    "5": "a tiny cat runs where the dog sat",
}
QUERIES = {"a": "where is the cat", "b": "what runs", "c": "how blue"}
QRELS = {"a": {"1": 1, "5": 1}, "b": {"2": 1}}


@pytest.fixture(name="tiny_embedder")
def _tiny_embedder(grid_file, tmp_path, monkeypatch):
    """The class as the example uses it, on one device and three buckets."""
    config = EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)
    tiny = partial(Embedder, cache_dir=tmp_path / "cache", config=config)
    monkeypatch.setattr(example, "Embedder", tiny)
    return tiny


@pytest.fixture(name="reranker_checkpoint")
def _reranker_checkpoint(tmp_path):
    return save_scorer(tmp_path / "reranker", prompts={}, default_prompt_name=None)


def test_the_program_shows_both_rankings_and_scores_them(
    tiny_embedder, tiny_checkpoint, reranker_checkpoint, tmp_path, capsys
):
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        lines = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    rows = [(query, document, 1) for query, judged in QRELS.items() for document in judged]
    table = "\n".join("\t".join(map(str, row)) for row in [("query", "document", "score"), *rows])
    (tmp_path / "qrels.tsv").write_text(table + "\n")
    models = ["--embedder", str(tiny_checkpoint), "--reranker", str(reranker_checkpoint)]
    files = [str(tmp_path / "corpus.jsonl"), str(tmp_path / "queries.jsonl")]
    example.main([*files, "--qrels", str(tmp_path / "qrels.tsv"), *models, "--top-k", "4"])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line in QUERIES.values()] == [
        QUERIES[query] for query in QRELS
    ]
    assert out.count("  retrieved:\n") == out.count("  reranked:\n") == 2
    scores = [float(line.split()[1]) for line in out.splitlines()[-2:]]
    assert all(0 < score <= 1 for score in scores)


def test_pictures_are_ranked_by_the_products_of_the_vectors(clip, tmp_path, monkeypatch, capsys):
    """The weights are random, so that it says nothing about what is seen in the pictures."""
    from PIL import Image

    from examples import search_pictures

    monkeypatch.setattr(search_pictures, "Embedder", lambda model: nullcontext(clip))
    sheet, queries = tmp_path / "found.png", ["w1 w2", "w3"]
    search_pictures.main([*queries, "--top-k", "3", "--sheet", str(sheet)])
    pictures = search_pictures.draw_pictures()
    asked = clip.encode(queries, normalize=True)
    alone = [clip.encode(images=[one], normalize=True)[0] for one in pictures.values()]
    wanted = []
    for query, products in zip(queries, asked @ np.array(alone).T, strict=True):
        best = sorted(zip(products, pictures, strict=True), reverse=True)[:3]
        wanted += ["", query, *(f"  {product:7.4f}  {name}" for product, name in best)]
    assert capsys.readouterr().out.splitlines() == wanted
    with Image.open(sheet) as found:
        assert found.width == 180 + 3 * 112
        assert len(found.getcolors(1 << 20)) > 4
