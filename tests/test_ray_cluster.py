"""Models in the actors of a Ray cluster of real processes, which starts before JAX does: no process
may be forked beside JAX's threads."""

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
from fakes import until
from ray_rows import close, matrix, text_of

ray = pytest.importorskip("ray", reason="make ray installs it")
pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402
import ray_actors  # noqa: E402
from ray.data import ActorPoolStrategy, DataContext  # noqa: E402
from ray.exceptions import RayTaskError  # noqa: E402
from test_ray import _arguments  # noqa: E402, F401, a fixture

from jaxembed.integrations.ray import Embed  # noqa: E402

ROOT = Path(__file__).parent.parent
MIB = 1024 * 1024
ROWS = 1200
START_S = 120  # of actors

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray and what it brings


@pytest.fixture(name="cluster", scope="session", autouse=True)
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
    table = pa.table({"id": range(ROWS), "text": [text_of(row) for row in range(ROWS)]})
    for part in range(4):
        pq.write_table(table.slice(part * ROWS // 4, ROWS // 4), folder / f"{part}.parquet")
    return folder


def embedded(documents: Path, actor: type, arguments: dict[str, Any]) -> Any:
    """The rows of the files with their vectors, by two actors that are both there first."""
    DataContext.get_current().wait_for_min_actors_s = START_S
    rows = ray.data.read_parquet(str(documents), override_num_blocks=4)
    return rows.map_batches(
        actor,
        fn_constructor_kwargs=arguments,
        batch_format="pyarrow",
        batch_size=50,
        compute=ActorPoolStrategy(size=2),
        num_cpus=0.5,
    )


def check_rows(folder: Path, encode: Callable[[list[str]], np.ndarray]) -> None:
    """Check that the files have each row once with its vector."""
    table = pq.read_table(folder).sort_by("id")
    assert table["id"].to_pylist() == list(range(ROWS))
    assert table["text"].to_pylist() == [text_of(row) for row in range(ROWS)]
    assert table.schema.field("dense").type == pa.list_(pa.float32(), 32)
    close(matrix(table["dense"]), encode(table["text"].to_pylist()))


def notes_of(actor: type, documents, arguments, embedder, tmp_path) -> Callable[[str], set[str]]:
    """Embed the files by actors that leave notes. Gives what finds the processes of one kind."""
    notes = tmp_path / "notes"
    notes.mkdir()
    rows = embedded(documents, actor, arguments | {"folder": str(notes)})
    rows.write_parquet(str(tmp_path / "vectors"))
    check_rows(tmp_path / "vectors", embedder.encode)
    return lambda kind: {path.name.split("-")[1] for path in notes.glob(f"{kind}-*")}


def test_parquet_is_embedded_by_two_actors_that_close_their_models(
    documents, arguments, embedder, tmp_path
):
    processes = notes_of(ray_actors.Closing, documents, arguments, embedder, tmp_path)
    made = processes("made")
    assert len(made) == 2
    until(lambda: processes("closed") == made)


def test_the_rows_of_a_killed_actor_are_written_once(documents, arguments, embedder, tmp_path):
    processes = notes_of(ray_actors.Dying, documents, arguments, embedder, tmp_path)
    (killed,) = processes("killed")
    assert {killed} < processes("started")


def test_a_job_fails_with_the_name_of_a_bad_row(documents, arguments, tmp_path):
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
    example, documents, embedder, tmp_path
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


def test_the_example_divides_one_file_among_the_actors(
    example, documents, embedder, tmp_path, monkeypatch
):
    whole = pa.concat_tables([pq.read_table(path) for path in sorted(documents.iterdir())])
    pq.write_table(whole, tmp_path / "all.parquet")
    blocks, mapped = [], ray.data.Dataset.map_batches

    def map_batches(self, *arguments, **options):
        blocks.append(self.materialize().num_blocks())
        return mapped(self, *arguments, **options)

    monkeypatch.setattr(ray.data.Dataset, "map_batches", map_batches)
    names = ("all.parquet", "vectors", "checkpoint")
    folders = [str(tmp_path / name) for name in names]
    example.main([*folders, "--cpus", "0", "--batch-size", "50", "--blocks", "4"])
    assert blocks == [4]
    check_rows(tmp_path / "vectors", embedder.encode_document)


def test_the_example_of_ray_serve_answers_as_the_server_does(tiny_checkpoint, embedder):
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
            vectors = [one["embedding"] for one in found]  # in bfloat16, where the machine has it
            np.testing.assert_allclose(vectors, embedder.encode(body["input"]), atol=5e-3)
            assert client.post("/embed", json={"inputs": "a cat"}).status_code == 200
            refused = client.post("/v1/embeddings", json={"input": []})
            assert refused.status_code == 400
            assert client.get("/livez").status_code == 200
    finally:
        serve.shutdown()
