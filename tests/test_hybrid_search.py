"""The example of hybrid search, the page that shows it, and the benchmark that scores it."""

import gzip
import json
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import sources
from sparse_matrix import as_dense
from test_m3 import TEXTS, _embedder, _files  # noqa: F401, fixtures
from test_server_openai import ask

from benchmarks import eval_hybrid
from jaxembed import EngineConfig

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "hybrid-search.md"
DOCUMENTS = dict(zip("abcd", TEXTS, strict=True))
QUERY = "hello a"


@pytest.fixture(name="example")
def _example():
    pytest.importorskip("qdrant_client")
    from examples import hybrid_search  # which imports it

    return hybrid_search


@pytest.fixture(name="client")
def _client(example):
    client = example.QdrantClient(":memory:")
    yield client
    client.close()


@pytest.fixture(name="few")
def _few(tmp_path):
    """EngineConfig with one bucket."""
    grid = tmp_path / "grid.json"
    grid.write_text('{"buckets": [[2, 24]]}')
    return partial(EngineConfig, buckets=grid, max_batch_tokens=48)


@pytest.fixture(name="models")
def _models(tmp_path):
    """The folders of a dense and of a sparse model."""
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    sources.write_bert(dense)
    sources.write_splade(sparse)
    return str(dense), str(sparse)


def best(scores: np.ndarray) -> list[str]:
    return [list(DOCUMENTS)[k] for k in np.argsort(-scores, kind="stable")]


def test_the_page_has_functions_of_the_program():
    program = (ROOT / "examples" / "hybrid_search.py").read_text()
    shown = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert shown.count("\ndef ") == 2
    assert shown in program


@pytest.mark.parametrize("role", ["document", "query"])
def test_the_program_of_the_page_gets_the_same_over_http(role, embedder, monkeypatch):
    def post(url, json, timeout):
        response, body = ask(json, path=httpx.URL(url).path, embedder=embedder.model)
        request = httpx.Request("POST", url)
        return httpx.Response(response.status_code, json=body, request=request)

    monkeypatch.setattr(httpx, "post", post)
    over_http = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    program: dict[str, Any] = {"Any": Any, "Sequence": list, "DENSE": embedder.name}
    program |= {"SPARSE": embedder.name, "models": SimpleNamespace(SparseVector=SimpleNamespace)}
    exec(over_http, program)
    program["AT_ONCE"] = 3
    found = program["embed"](program["URL"], TEXTS, role)
    wanted = embedder.encode_outputs(TEXTS, ("dense", "sparse"), role=role)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # float32, in other batches
    close([one["dense"] for one in found], wanted["dense"])
    for one, indices, values in zip(
        found, wanted["sparse"].indices, wanted["sparse"].values, strict=True
    ):
        assert one["sparse"].indices == indices.tolist()
        close(one["sparse"].values, values)


def test_each_ranking_is_by_its_own_products_and_fusion_adds_their_ranks(example, client, embedder):
    embedders = [(embedder, ["dense", "sparse"])]
    example.index(client, embedders, DOCUMENTS)
    (vectors,) = example.embed(embedders, [QUERY], "query")
    of = embedder.encode_outputs([*TEXTS, QUERY], ("dense", "sparse"))
    matrices = {"dense": of["dense"], "sparse": as_dense(of["sparse"])}
    scores = dict.fromkeys(DOCUMENTS, 0.0)
    for kind, matrix in matrices.items():
        wanted = best(matrix[:-1] @ matrix[-1])
        if kind == "sparse":  # "b" shares no term with the query
            wanted.remove("b")
        found = example.search(client, {kind: vectors[kind]}, limit=4)
        assert [name for _, name, _ in found] == wanted
        for rank, name in enumerate(wanted):
            scores[name] += 1 / (example.RANK_CONSTANT + rank)
    fused = example.search(client, vectors, limit=4)
    assert [text for _, _, text in fused] == [DOCUMENTS[name] for _, name, _ in fused]
    assert {name: pytest.approx(score) for score, name, _ in fused} == scores
    assert [score for score, _, _ in fused] == sorted(scores.values(), reverse=True)


def test_one_model_with_both_outputs_is_as_two_models(example, embedder):
    both = example.embed([(embedder, ["dense", "sparse"])], TEXTS, "document")
    one_each = [(embedder, ["dense"]), (embedder, ["sparse"])]
    alone = example.embed(one_each, TEXTS, "document")
    # a program of both outputs is another program: its last bits may differ
    for row, wanted in zip(alone, both, strict=True):
        assert row["dense"] == pytest.approx(wanted["dense"], abs=1e-5)
        assert row["sparse"].indices == wanted["sparse"].indices
        assert row["sparse"].values == pytest.approx(wanted["sparse"].values, rel=1e-5)


def test_the_program_prints_the_texts_that_rank_best(
    example, models, few, tmp_path, monkeypatch, capsys
):
    lines = [json.dumps({"_id": name, "text": text}) for name, text in DOCUMENTS.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    tiny = partial(example.Embedder, cache_dir=tmp_path / "cache", config=few())
    monkeypatch.setattr(example, "Embedder", tiny)
    files = [str(tmp_path / "corpus.jsonl"), QUERY]
    example.main([*files, "--dense", models[0], "--sparse", models[1]])
    shown = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert {name: text for _, name, text in shown} == DOCUMENTS
    scores = [float(score) for score, _, _ in shown]
    assert scores == sorted(scores, reverse=True)
    example.main([*files, "--dense", models[0], "--sparse", models[1], "--limit", "1"])
    assert capsys.readouterr().out.splitlines() == [f"{scores[0]:.4f}  {'  '.join(shown[0][1:])}"]


def test_a_model_that_is_named_twice_is_loaded_once(example, monkeypatch):
    loaded = []

    def load(name: str) -> ExitStack:
        loaded.append(name)
        return ExitStack()

    monkeypatch.setattr(example, "Embedder", load)
    with ExitStack() as stack:
        ((_, outputs),) = example.load(stack, "both", "both")
        assert (loaded, outputs) == (["both"], ["dense", "sparse"])


def test_eval_hybrid_scores_each_ranking_and_both(
    example, models, few, tmp_path, monkeypatch, capsys
):
    data = tmp_path / "data" / eval_hybrid.FOLDER
    (data / "qrels").mkdir(parents=True)
    with gzip.open(data / "corpus.jsonl.gz", "wt") as file:
        for name, text in DOCUMENTS.items():
            file.write(json.dumps({"_id": name, "title": "", "text": text}) + "\n")
    lines = [json.dumps({"_id": name, "text": text}) for name, text in DOCUMENTS.items()]
    (data / "queries.test.jsonl").write_text("\n".join([*lines, '{"_id": "e", "text": "un"}']))
    rows = [f"{name}\t{name}\t1" for name in DOCUMENTS]
    (data / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]))
    monkeypatch.setattr(eval_hybrid, "EngineConfig", few)
    arguments = ["--dense", models[0], "--sparse", models[1], "--data", str(tmp_path / "data")]
    eval_hybrid.main([*arguments, "--cache-dir", str(tmp_path / "cache")])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["documents"] == facts["queries"] == len(DOCUMENTS)
    scores = {one["ranking"]: one["ndcg_at_10"] for one in facts["results"]}
    assert list(scores) == ["dense", "sparse", "fused"]
    assert scores["dense"] == 1  # each text is nearest to itself
    assert all(0 < score <= 1 for score in scores.values())
