"""Fill PostgreSQL with pgvector from the Parquet parts of `jaxembed embed`, and search it by all
their vectors.

    pip install pgvector 'psycopg[binary]' pyarrow
    PGHOST=localhost PGUSER=postgres python fill_pgvector.py vectors/ id "how do vaccines work"

`id` is the column that names a row, of integers or strings: run it again after the parts have
changed, and a row replaces the one of its name.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
from pgvector import HalfVector, SparseVector, Vector
from pgvector.psycopg import register_vector
from psycopg.types.json import Jsonb
from pyarrow import dataset

from jaxembed import Embedder

MODEL = "sentence-transformers/all-MiniLM-L6-v2"  # that of the parts
BATCH_ROWS = 4096  # of a transaction
TERMS = 1_000_000  # more than any vocabulary has
INDEXED_SIZE = 2000  # the longest vector that pgvector indexes; longer ones are searched one by one
CANDIDATES = 100  # of each ranking
RANK_CONSTANT = 60  # a text scores 1 / (60 + its rank), from 0, in each ranking
NOT_KEPT = ("row", "text_digest", "image_digest", "dense", "sparse", "multi_vector")
DENSE_TYPES = {pa.float32(): ("vector", Vector), pa.float16(): ("halfvec", HalfVector)}
RANKINGS = {  # by cosine; by the product of the weights, of rows that share a term with the query
    "dense": "SELECT id, dense <=> %(dense)s AS distance FROM texts",
    "sparse": "SELECT id, sparse <#> %(sparse)s AS distance FROM texts"
    " WHERE sparse <#> %(sparse)s < 0",
}


def main(parts: str, id_column: str, query: str) -> None:
    with psycopg.connect(autocommit=True) as db, Embedder(MODEL) as embedder:
        kinds = fill(db, parts, id_column)
        for score, kept in search(db, embed(embedder, query, kinds), limit=10):
            print(f"{score:.4f}  {kept}")


def fill(db: psycopg.Connection, parts: str, id_column: str) -> list[str]:
    """Put every row into the table `texts`. Returns the kinds of their vectors."""
    data = dataset.dataset(parts, format="parquet")  # also s3://; without files that begin with _
    types = types_of(data.schema, id_column)
    kinds = [kind for kind in RANKINGS if kind in types]
    db.execute("CREATE EXTENSION IF NOT EXISTS vector")
    register_vector(db)
    columns = ", ".join(f"{name} {kind}" for name, kind in types.items())
    db.execute(f"CREATE TABLE IF NOT EXISTS texts ({columns}, PRIMARY KEY (id))")
    db.execute("CREATE TEMPORARY TABLE IF NOT EXISTS staged (LIKE texts) ON COMMIT DELETE ROWS")
    changes = ", ".join(f"{name} = excluded.{name}" for name in ("kept", *kinds))
    kept = [name for name in data.schema.names if name not in NOT_KEPT]
    read = list(dict.fromkeys([id_column, *kept, *kinds]))
    one_at_a_time = {"batch_readahead": 1, "fragment_readahead": 1}  # so that memory stays flat
    for batch in data.to_batches(columns=read, batch_size=BATCH_ROWS, **one_at_a_time):
        with db.transaction():
            with db.cursor().copy("COPY staged FROM STDIN WITH (FORMAT BINARY)") as copy:
                copy.set_types([kind.split("(")[0] for kind in types.values()])
                for row in rows(batch, kept, kinds):
                    copy.write_row(row)
            db.execute(f"INSERT INTO texts TABLE staged ON CONFLICT (id) DO UPDATE SET {changes}")
    if "dense" in kinds and data.schema.field("dense").type.list_size <= INDEXED_SIZE:
        operators = types["dense"].split("(")[0] + "_cosine_ops"
        db.execute(
            f"CREATE INDEX IF NOT EXISTS texts_dense ON texts USING hnsw (dense {operators})"
        )
    return kinds


def types_of(schema: pa.Schema, id_column: str) -> dict[str, str]:
    """The columns of the table for parts of this schema."""
    names = schema.names
    if id_column not in names or not {"dense", "sparse"} & {*names}:
        sys.exit(f"there must be a column of vectors and {id_column!r}, and there are {names}")
    integers = pa.types.is_integer(schema.field(id_column).type)
    types = {"id": "bigint" if integers else "text", "kept": "jsonb"}
    if "dense" in names:
        dense = schema.field("dense").type
        if dense.value_type not in DENSE_TYPES:
            sys.exit(f"dense holds {dense.value_type}: embed with --output-dtype float or float16")
        name, _ = DENSE_TYPES[dense.value_type]
        types["dense"] = f"{name}({dense.list_size})"
    if "sparse" in names:
        types["sparse"] = f"sparsevec({TERMS})"
    return types


def rows(batch: pa.RecordBatch, kept: list[str], kinds: list[str]) -> Iterator[list[Any]]:
    """The rows of a batch, whose first column names them, as PostgreSQL takes them."""
    if lacking := [name for name in (batch.schema.names[0], *kinds) if batch[name].null_count]:
        sys.exit(f"there are rows without {lacking}")
    vectors = {}
    if "dense" in kinds:
        values = batch["dense"].flatten()
        _, holder = DENSE_TYPES[values.type]
        vectors["dense"] = map(holder, values.to_numpy().reshape(len(batch), -1))
    if "sparse" in kinds:
        vectors["sparse"] = [sparse(**row) for row in batch["sparse"].to_pylist()]
    payloads = [as_json(row) for row in batch.select(kept).to_pylist()]
    return zip(batch[0].to_pylist(), payloads, *vectors.values(), strict=True)


as_json = partial(Jsonb, dumps=partial(json.dumps, default=str))  # dates as text


def sparse(indices: list[int], values: list[float]) -> SparseVector:
    return SparseVector(dict(zip(indices, values, strict=True)), TERMS)


def embed(embedder: Embedder, query: str, kinds: list[str]) -> dict[str, Any]:
    found = embedder.encode_outputs([query], kinds, role="query")
    vectors = {}
    if "dense" in found:
        vectors["dense"] = Vector(found["dense"][0])
    if "sparse" in found:
        terms, weights = found["sparse"].indices[0], found["sparse"].values[0]
        vectors["sparse"] = sparse(terms.tolist(), weights.tolist())
    return vectors


def search(db: psycopg.Connection, vectors: dict[str, Any], limit: int) -> list[tuple[float, dict]]:
    """The score and the kept columns of what ranks best by all vectors together."""
    db.execute(f"SET hnsw.ef_search = {CANDIDATES}")  # an index gives no more than so many
    ranked = " UNION ALL ".join(
        f"SELECT id, row_number() OVER (ORDER BY distance) - 1 AS rank"
        f" FROM ({RANKINGS[kind]} ORDER BY distance LIMIT {CANDIDATES}) AS {kind}"
        for kind in vectors
    )
    fused = (  # reciprocal rank fusion
        f"SELECT sum(1.0 / ({RANK_CONSTANT} + rank)) AS score, kept"
        f" FROM ({ranked}) AS ranked JOIN texts USING (id)"
        f" GROUP BY texts.id ORDER BY score DESC, texts.id LIMIT {limit}"
    )
    return [(float(score), kept) for score, kept in db.execute(fused, vectors)]


if __name__ == "__main__":
    main(*sys.argv[1:])
