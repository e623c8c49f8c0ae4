"""Models in Ray's actors: on batches alone, then on a cluster of real processes."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sources
from conftest import save_tiny

from jaxembed import Embedder, EngineConfig
from jaxembed.errors import InvalidInput
from jaxembed.spec import DenseLayer
from jaxembed.work import Ragged

ray = pytest.importorskip("ray", reason="make ray installs it")
pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402
import ray_actors  # noqa: E402
from ray.data import ActorPoolStrategy, DataContext  # noqa: E402
from ray.exceptions import RayTaskError  # noqa: E402

from jaxembed.columns import output_column  # noqa: E402
from jaxembed.integrations.ray import Classify, Embed, Rerank  # noqa: E402

ROOT = Path(__file__).parent.parent
MIB = 1024 * 1024
ROWS = 1200
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "runs",
    "red",
    "blue",
    "sky",
    "train",
    "tiny",
]

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray and what it brings


def text_of(row: int) -> str:
    """Words of some length, which differ from those of other rows."""
    rng = np.random.default_rng(row)
    return " ".join(rng.choice(WORDS, 1 + row % 11)) + f" {row}"


@pytest.fixture(name="arguments")
def _arguments(tiny_checkpoint, grid_file, tmp_path) -> dict[str, Any]:
    """Those of an Embedder on one device and three buckets."""
    config = EngineConfig(dtype="float32", devices=1, buckets=grid_file, max_batch_tokens=128)
    return {"model": str(tiny_checkpoint), "cache_dir": tmp_path / "cache", "config": config}


def run(actor: Any, batch: Any) -> Any:
    return asyncio.run(actor(batch))


def rows_of(table: Any) -> dict[int, str]:
    return dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)  # float32, in other batches


def matrix(column: Any) -> np.ndarray:
    """The vectors of a column `[rows, width]`."""
    combined = column.combine_chunks()
    return combined.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)


# Batches


def test_vectors_are_a_column_of_lists_of_one_size_beside_the_others(arguments, embedder):
    texts = [text_of(row) for row in range(20)]
    batch = pa.table({"text": texts, "n": pa.array([None, *range(19)], pa.int16())})
    table = run(Embed(**arguments), batch)
    assert table.drop_columns(["dense"]) == batch
    assert table.schema.field("dense").type == pa.list_(pa.float32(), 32)
    close(matrix(table["dense"]), embedder.encode(texts))


@pytest.mark.parametrize(
    ("dtype", "item", "width"),
    [("float16", pa.float16(), 32), ("binary", pa.int8(), 4), ("ubinary", pa.uint8(), 4)],
)
def test_vectors_have_the_dtype_asked_for(dtype, item, width, arguments, embedder):
    table = run(Embed(**arguments, output_dtype=dtype), pa.table({"text": ["a cat", "a dog"]}))
    assert table.schema.field("dense").type == pa.list_(item, width)
    wanted = embedder.encode(["a cat", "a dog"], output_dtype=dtype)
    np.testing.assert_allclose(matrix(table["dense"]), wanted, atol=1e-3)


def test_options_of_encode_are_those_of_the_model(arguments, embedder):
    options = {"role": "query", "dimensions": 8}
    table = run(Embed(**arguments, column="q", **options), pa.table({"q": ["a cat"]}))
    close(matrix(table["dense"]), embedder.encode_query(["a cat"], dimensions=8))


def test_weights_of_terms_are_a_column_of_indices_and_values(tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text('{"buckets": [[2, 24]]}')
    config = EngineConfig(dtype="float32", devices=1, buckets=grid, max_batch_tokens=48)
    of_model = {"model": str(sources.write_splade(tmp_path / "splade")), "config": config}
    of_model["cache_dir"] = tmp_path / "cache"
    texts = ["hello world", "a", "unhappy world a"]
    table = run(Embed(**of_model, outputs=["sparse"]), pa.table({"text": texts}))
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
    column = output_column("multi_vector", Ragged(np.concatenate(arrays), np.array([0, 2, 2, 5])))
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
def test_a_bad_row_is_refused_by_its_name(rows, given, message, arguments):
    embed = Embed(**arguments, **given)
    with pytest.raises(InvalidInput, match=message):
        run(embed, pa.table(rows))


def test_batches_of_numpy_are_refused_with_what_helps(arguments):
    with pytest.raises(InvalidInput, match="add batch_format='pyarrow' to map_batches"):
        run(Embed(**arguments), {"text": np.array(["a"])})


def test_a_batch_without_rows_gets_the_columns(arguments):
    table = run(Embed(**arguments), pa.table({"text": pa.array([], pa.string())}))
    assert table.schema.field("dense").type == pa.list_(pa.float32(), 32)


def test_an_unknown_argument_is_refused(arguments):
    with pytest.raises(TypeError, match="colunm"):
        Embed(**arguments, colunm="text")


def test_rows_are_scored_with_their_own_queries(arguments, tmp_path):
    head = (DenseLayer(32, 1, activation="identity"),)
    labels = {"labels": ("LABEL_0",), "score_function": "sigmoid"}
    path = save_tiny(tmp_path / "model", pooling=("cls",), modules=head, prompts={}, **labels)
    of_model = arguments | {"model": str(path)}
    queries = ["the cat", "a dog", "the cat", "sky"]
    documents = ["a mat", "red", "the train", "blue"]
    rerank = Rerank(**of_model, query_column="q", column="d")
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


def test_texts_get_every_label_best_first(arguments, tmp_path):
    head = (DenseLayer(32, 3, activation="identity"),)
    labels = {"labels": ("bad", "fair", "good"), "score_function": "softmax"}
    path = save_tiny(tmp_path / "model", pooling=("cls",), modules=head, prompts={}, **labels)
    of_model = arguments | {"model": str(path)}
    texts = ["the cat", "red sky"]
    table = run(Classify(**of_model), pa.table({"text": texts}))
    label = pa.struct({"label": pa.string(), "score": pa.float32()})
    assert table.schema.field("labels").type == pa.list_(label)
    with Embedder(**of_model) as embedder:
        wanted = embedder.classify(texts)
    for found, row in zip(table["labels"].to_pylist(), wanted, strict=True):
        assert [one["label"] for one in found] == [one.label for one in row]
        close([one["score"] for one in found], [one.score for one in row])


# A cluster


@pytest.fixture(name="cluster", scope="module")
def _cluster() -> Iterator[None]:
    """A cluster of this machine with two CPUs, whose processes end with it."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the paths of sockets must be short
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * MIB,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        yield
        ray.shutdown()
    shutil.rmtree(folder)


@pytest.fixture(name="documents")
def _documents(tmp_path) -> Path:
    """A folder of four Parquet files with ids and texts."""
    folder = tmp_path / "documents"
    folder.mkdir()
    each = ROWS // 4
    for part in range(4):
        rows = range(part * each, (part + 1) * each)
        table = pa.table({"id": list(rows), "text": [text_of(row) for row in rows]})
        pq.write_table(table, folder / f"{part}.parquet")
    return folder


def embedded(documents: Path, actor: type, arguments: dict[str, Any], size: int = 50) -> Any:
    """The rows of the files with their vectors, by two actors."""
    rows = ray.data.read_parquet(str(documents), override_num_blocks=4)
    return rows.map_batches(
        actor,
        fn_constructor_kwargs=arguments,
        batch_format="pyarrow",
        batch_size=size,
        compute=ActorPoolStrategy(size=2),
        num_cpus=0.5,
    )


def check_rows(folder: Path, encode: Callable[[list[str]], np.ndarray]) -> Any:
    """Check that the files have each row once with its vector, and return them in order."""
    table = pq.read_table(folder).sort_by("id")
    assert rows_of(table) == {row: text_of(row) for row in range(ROWS)}
    assert table.num_rows == ROWS
    assert table.schema.field("dense").type == pa.list_(pa.float32(), 32)
    close(matrix(table["dense"]), encode(table["text"].to_pylist()))
    return table


def test_parquet_is_embedded_by_two_actors_that_close_their_models(
    cluster, documents, arguments, embedder, tmp_path
):
    notes = tmp_path / "notes"
    notes.mkdir()
    rows = embedded(documents, ray_actors.Counting, arguments | {"folder": str(notes)})
    rows.write_parquet(str(tmp_path / "vectors"))
    table = check_rows(tmp_path / "vectors", embedder.encode)
    assert max(table["most"].to_pylist()) >= 2  # one is tokenized while one runs
    made = {path.name.split("-")[1] for path in notes.glob("made-*")}
    assert len(made) == 2
    while {path.name.split("-")[1] for path in notes.glob("closed-*")} != made:
        pass


def test_the_rows_of_a_killed_actor_are_written_once(
    cluster, documents, arguments, embedder, tmp_path
):
    notes = tmp_path / "notes"
    notes.mkdir()
    rows = embedded(documents, ray_actors.Dying, arguments | {"folder": str(notes)})
    rows.write_parquet(str(tmp_path / "vectors"))
    check_rows(tmp_path / "vectors", embedder.encode)
    (killed,) = [path.name.split("-")[1] for path in notes.glob("killed-*")]
    started = {path.name.split("-")[1] for path in notes.glob("started-*")}
    assert killed in started
    assert len(started) == 3  # and one took its place


def test_a_job_fails_with_the_name_of_a_bad_row(cluster, documents, arguments, tmp_path):
    pq.write_table(pa.table({"id": [ROWS], "text": [""]}), documents / "bad.parquet")
    rows = embedded(documents, Embed, arguments | {"id_column": "id"})
    with pytest.raises(RayTaskError, match=f"the row whose id is {ROWS}, column 'text': is empty"):
        rows.write_parquet(str(tmp_path / "vectors"))


# The examples


@pytest.fixture(name="example")
def _example(arguments, monkeypatch) -> Iterator[Any]:
    from examples import ray_parquet  # which imports Ray

    of_args = ray_parquet.model_of
    monkeypatch.setattr(ray_parquet, "model_of", lambda args: of_args(args) | arguments)
    yield ray_parquet
    DataContext.get_current().checkpoint_config = None


def test_the_example_goes_on_after_a_failure_and_writes_no_row_twice(
    cluster, example, documents, embedder, tmp_path
):
    folders = [str(documents), str(tmp_path / "vectors"), str(tmp_path / "checkpoint")]
    flags = ["--cpus", "0", "--batch-size", "50", "--blocks", "4"]
    pq.write_table(pa.table({"id": [ROWS], "text": [""]}), documents / "bad.parquet")
    with pytest.raises(RayTaskError, match="is empty"):
        example.main([*folders, *flags])
    (documents / "bad.parquet").unlink()
    for _ in range(2):  # the second has nothing to do
        example.main([*folders, *flags])
    check_rows(tmp_path / "vectors", embedder.encode_document)


def test_the_example_of_ray_serve_answers_as_the_server_does(
    cluster, tiny_checkpoint, embedder, tmp_path, monkeypatch
):
    serve = pytest.importorskip("ray.serve")
    from examples import ray_serve  # which imports Ray

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(ray_serve.build({"model": str(tiny_checkpoint)}))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            body = {"input": ["a cat", "the dog"]}
            found = client.post("/v1/embeddings", json=body).raise_for_status().json()["data"]
            close([one["embedding"] for one in found], embedder.encode(body["input"]))
            assert client.post("/embed", json={"inputs": "a cat"}).status_code == 200
            refused = client.post("/v1/embeddings", json={"input": []})
            assert refused.status_code == 400
            assert client.get("/livez").status_code == 200
    finally:
        serve.shutdown()
