"""Models in Ray's actors, on batches alone; a cluster runs them in test_ray_cluster.py."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sources
from ray_rows import close, matrix, text_of
from test_embedder import save_scorer

from jaxembed import EngineConfig
from jaxembed.errors import InvalidInput

pa = pytest.importorskip("pyarrow")

from jaxembed.integrations.ray import Classify, Embed, Rerank  # noqa: E402

NO_PROMPTS: dict[str, Any] = {"prompts": {}, "default_prompt_name": None}


@pytest.fixture(name="arguments", scope="module")
def _arguments(tiny_checkpoint, grid_file, tmp_path_factory) -> dict[str, Any]:
    """Those of an Embedder on one device and three buckets."""
    config = EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)
    cache = tmp_path_factory.mktemp("cache")
    return {"model": str(tiny_checkpoint), "cache_dir": cache, "config": config}


@pytest.fixture(name="embed", scope="module")
def _embed(arguments) -> Iterator[Embed]:
    embed = Embed(**arguments)
    yield embed
    embed._embedder.close()


@pytest.fixture(name="opened")
def _opened(closed) -> Callable[..., Any]:
    """Makes actors, and closes their models after the test."""

    def made(kind: type, **arguments: Any) -> Any:
        actor = kind(**arguments)
        closed.callback(actor._embedder.close)
        return actor

    return made


def run(actor: Any, batch: Any) -> Any:
    return asyncio.run(actor(batch))


# Batches


@pytest.mark.parametrize("rows", [20, 0])
def test_vectors_are_a_column_of_lists_of_one_size_beside_the_others(rows, embed, embedder):
    texts = pa.array([text_of(row) for row in range(rows)], pa.string())
    batch = pa.table({"text": texts, "n": pa.array([None, *range(19)][:rows], pa.int16())})
    table = run(embed, batch)
    assert table.drop_columns(["dense"]) == batch
    assert table.schema.field("dense").type == pa.list_(pa.float32(), 32)
    if rows:
        close(matrix(table["dense"]), embedder.encode(texts.to_pylist()))


def test_options_of_encode_are_those_of_the_model(opened, arguments, embedder):
    options = {"dimensions": 16, "output_dtype": "ubinary"}
    actor = opened(Embed, **arguments, column="q", role="query", **options)
    table = run(actor, pa.table({"q": ["a cat"]}))
    assert table.schema.field("dense").type == pa.list_(pa.uint8(), 2)
    wanted = embedder.encode_query(["a cat"], **options)
    np.testing.assert_array_equal(matrix(table["dense"]), wanted)


def test_weights_of_terms_are_a_column_of_indices_and_values(opened, tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text('{"buckets": [[2, 24]]}')
    config = EngineConfig(dtype="float32", devices=1, buckets=grid, max_batch_tokens=48)
    of_model = {"model": str(sources.write_splade(tmp_path / "splade")), "config": config}
    of_model["cache_dir"] = tmp_path / "cache"
    texts = ["hello world", "a", "unhappy world a"]
    actor = opened(Embed, **of_model, outputs=["sparse"])
    table = run(actor, pa.table({"text": texts}))
    assert table.schema.field("sparse").type == pa.struct(
        {"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())}
    )
    wanted = actor._embedder.encode_sparse(texts)
    for row, terms in enumerate(table["sparse"].to_pylist()):
        assert terms["indices"] == wanted.indices[row].tolist()
        close(terms["values"], wanted.values[row])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pa.table({"text": ["a", None]}), "row 1 of a batch of 2.*column 'text': is null"),
        (pa.table({"text": ["a", ""]}), "row 1 of a batch of 2.*column 'text': is empty"),
        (pa.table({"text": [1, 2]}), "column 'text' must have strings, and has the type int64"),
        (pa.table({"body": ["a"]}), "no column 'text', only body"),
        (pa.table({"text": ["a"], "dense": [1]}), "already have a column 'dense'"),
        ({"text": np.array(["a"])}, "add batch_format='pyarrow' to map_batches"),
    ],
)
def test_a_bad_batch_is_refused_by_its_row_or_column(embed, batch, message):
    with pytest.raises(InvalidInput, match=message):
        run(embed, batch)


def test_a_row_that_the_model_refuses_is_named_by_its_id(opened, arguments):
    embed = opened(Embed, **arguments, truncate=False, id_column="id")
    named = "row whose id is 'z', column 'text': the input has.*begins 'cat cat"
    with pytest.raises(InvalidInput, match=named):
        run(embed, pa.table({"text": ["a", "b", "cat " * 100], "id": ["x", "y", "z"]}))


def test_an_unknown_argument_is_refused(opened, arguments):
    with pytest.raises(TypeError, match="colunm"):
        opened(Embed, **arguments, colunm="text")


def test_rows_are_scored_with_their_own_queries(opened, arguments, tmp_path):
    path = save_scorer(tmp_path / "model", **NO_PROMPTS)
    queries = ["the cat", "a dog", "the cat", "sky"]
    documents = ["a mat", "red", "the train", "blue"]
    of_model = arguments | {"model": str(path), "query_column": "q", "column": "d"}
    rerank = opened(Rerank, **of_model)
    table = run(rerank, pa.table({"q": queries, "d": documents}))
    assert table.schema.field("score").type == pa.float32()
    wanted = [
        rerank._embedder.rerank(query, [document])[0].score
        for query, document in zip(queries, documents, strict=True)
    ]
    close(table["score"].to_numpy(), wanted)
    with pytest.raises(InvalidInput, match=r"row 1 of a batch of 2.*column 'q': is empty"):
        run(rerank, pa.table({"q": ["a", ""], "d": ["b", "c"]}))


def test_texts_get_every_label_best_first(opened, arguments, tmp_path):
    path = save_scorer(tmp_path / "model", labels=("bad", "fair", "good"), **NO_PROMPTS)
    texts = ["the cat", "red sky"]
    classify = opened(Classify, **arguments | {"model": str(path)})
    table = run(classify, pa.table({"text": texts}))
    label = pa.struct({"label": pa.string(), "score": pa.float32()})
    assert table.schema.field("labels").type == pa.list_(label)
    wanted = classify._embedder.classify(texts)
    for found, row in zip(table["labels"].to_pylist(), wanted, strict=True):
        assert [one["label"] for one in found] == [one.label for one in row]
        close([one["score"] for one in found], [one.score for one in row])
