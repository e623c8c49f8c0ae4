"""Models in Ray's actors, on batches alone; a cluster runs them in test_ray_cluster.py."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sources
from conftest import save_tiny
from ray_rows import close, matrix, text_of

from jaxembed import Embedder, EngineConfig
from jaxembed.errors import InvalidInput
from jaxembed.spec import DenseLayer
from jaxembed.work import Ragged

pa = pytest.importorskip("pyarrow")

from jaxembed.bulk.computations import as_arrow  # noqa: E402
from jaxembed.integrations.ray import Classify, Embed, Rerank  # noqa: E402


@pytest.fixture(name="arguments")
def _arguments(tiny_checkpoint, grid_file, tmp_path) -> dict[str, Any]:
    """Those of an Embedder on one device and three buckets."""
    config = EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)
    return {"model": str(tiny_checkpoint), "cache_dir": tmp_path / "cache", "config": config}


@pytest.fixture(name="opened")
def _opened() -> Iterator[Callable[..., Any]]:
    """Makes actors, and closes their models after the test."""
    actors = []

    def made(kind: type, **arguments: Any) -> Any:
        actors.append(kind(**arguments))
        return actors[-1]

    yield made
    for actor in actors:
        actor._model.embedder.close()


def run(actor: Any, batch: Any) -> Any:
    return asyncio.run(actor(batch))


# Batches


def test_vectors_are_a_column_of_lists_of_one_size_beside_the_others(opened, arguments, embedder):
    texts = [text_of(row) for row in range(20)]
    batch = pa.table({"text": texts, "n": pa.array([None, *range(19)], pa.int16())})
    table = run(opened(Embed, **arguments), batch)
    assert table.drop_columns(["dense"]) == batch
    assert table.schema.field("dense").type == pa.list_(pa.float32(), 32)
    close(matrix(table["dense"]), embedder.encode(texts))


@pytest.mark.parametrize(
    ("dtype", "item", "width"),
    [("float16", pa.float16(), 32), ("binary", pa.int8(), 4), ("ubinary", pa.uint8(), 4)],
)
def test_vectors_have_the_dtype_asked_for(opened, dtype, item, width, arguments, embedder):
    table = run(
        opened(Embed, **arguments, output_dtype=dtype), pa.table({"text": ["a cat", "a dog"]})
    )
    assert table.schema.field("dense").type == pa.list_(item, width)
    wanted = embedder.encode(["a cat", "a dog"], output_dtype=dtype)
    np.testing.assert_allclose(matrix(table["dense"]), wanted, atol=1e-3)


def test_options_of_encode_are_those_of_the_model(opened, arguments, embedder):
    options = {"role": "query", "dimensions": 8}
    table = run(opened(Embed, **arguments, column="q", **options), pa.table({"q": ["a cat"]}))
    close(matrix(table["dense"]), embedder.encode_query(["a cat"], dimensions=8))


def test_weights_of_terms_are_a_column_of_indices_and_values(opened, tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text('{"buckets": [[2, 24]]}')
    config = EngineConfig(dtype="float32", devices=1, buckets=grid, max_batch_tokens=48)
    of_model = {"model": str(sources.write_splade(tmp_path / "splade")), "config": config}
    of_model["cache_dir"] = tmp_path / "cache"
    texts = ["hello world", "a", "unhappy world a"]
    table = run(opened(Embed, **of_model, outputs=["sparse"]), pa.table({"text": texts}))
    assert table.schema.field("sparse").type == pa.struct(
        {"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())}
    )
    with Embedder(**of_model) as embedder:
        wanted = embedder.encode_sparse(texts)
    for row, terms in enumerate(table["sparse"].to_pylist()):
        assert terms["indices"] == wanted.indices[row].tolist()
        close(terms["values"], wanted.values[row])


def test_several_vectors_of_a_text_are_a_list_of_lists_of_one_size():
    arrays = [np.full((rows, 4), rows, np.float32) for rows in (2, 0, 3)]
    column = as_arrow(Ragged(np.concatenate(arrays), np.array([0, 2, 2, 5])))
    assert column.type == pa.list_(pa.list_(pa.float32(), 4))
    assert column.to_pylist() == [array.tolist() for array in arrays]


LONG = "cat " * 100


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        ({"text": ["a", None]}, {}, "row 1 of a batch of 2.*column 'text': is null"),
        ({"text": ["a", ""]}, {}, "row 1 of a batch of 2.*column 'text': is empty"),
        ({"text": [1, 2]}, {}, "column 'text' must be of strings, and is of int64"),
        ({"body": ["a"]}, {}, "no column 'text', only body"),
        ({"text": ["a"], "dense": [1]}, {}, "already have a column 'dense'"),
        (
            {"text": ["a", "b", LONG], "id": ["x", "y", "z"]},
            {"truncate": False, "id_column": "id"},
            "row whose id is 'z', column 'text': the input has.*begins 'cat cat",
        ),
    ],
)
def test_a_bad_row_is_refused_by_its_name(opened, rows, given, message, arguments):
    embed = opened(Embed, **arguments, **given)
    with pytest.raises(InvalidInput, match=message):
        run(embed, pa.table(rows))


def test_batches_of_numpy_are_refused_with_what_helps(opened, arguments):
    with pytest.raises(InvalidInput, match="add batch_format='pyarrow' to map_batches"):
        run(opened(Embed, **arguments), {"text": np.array(["a"])})


def test_a_batch_without_rows_gets_the_columns(opened, arguments):
    table = run(opened(Embed, **arguments), pa.table({"text": pa.array([], pa.string())}))
    assert table.schema.field("dense").type == pa.list_(pa.float32(), 32)


def test_an_unknown_argument_is_refused(opened, arguments):
    with pytest.raises(TypeError, match="colunm"):
        opened(Embed, **arguments, colunm="text")


def test_rows_are_scored_with_their_own_queries(opened, arguments, tmp_path):
    head = (DenseLayer(32, 1, activation="identity"),)
    labels = {"labels": ("LABEL_0",), "score_function": "sigmoid"}
    path = save_tiny(tmp_path / "model", pooling=("cls",), modules=head, prompts={}, **labels)
    of_model = arguments | {"model": str(path)}
    queries = ["the cat", "a dog", "the cat", "sky"]
    documents = ["a mat", "red", "the train", "blue"]
    rerank = opened(Rerank, **of_model, query_column="q", column="d")
    table = run(rerank, pa.table({"q": queries, "d": documents}))
    assert table.schema.field("score").type == pa.float32()
    with Embedder(**of_model) as embedder:
        wanted = [
            embedder.rerank(query, [document])[0].score
            for query, document in zip(queries, documents, strict=True)
        ]
    close(table["score"].to_numpy(), wanted)
    with pytest.raises(InvalidInput, match=r"row 1 of a batch of 2.*column 'q': is empty"):
        run(rerank, pa.table({"q": ["a", ""], "d": ["b", "c"]}))


def test_texts_get_every_label_best_first(opened, arguments, tmp_path):
    head = (DenseLayer(32, 3, activation="identity"),)
    labels = {"labels": ("bad", "fair", "good"), "score_function": "softmax"}
    path = save_tiny(tmp_path / "model", pooling=("cls",), modules=head, prompts={}, **labels)
    of_model = arguments | {"model": str(path)}
    texts = ["the cat", "red sky"]
    table = run(opened(Classify, **of_model), pa.table({"text": texts}))
    label = pa.struct({"label": pa.string(), "score": pa.float32()})
    assert table.schema.field("labels").type == pa.list_(label)
    with Embedder(**of_model) as embedder:
        wanted = embedder.classify(texts)
    for found, row in zip(table["labels"].to_pylist(), wanted, strict=True):
        assert [one["label"] for one in found] == [one.label for one in row]
        close([one["score"] for one in found], [one.score for one in row])
