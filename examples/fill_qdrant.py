"""Fill Qdrant from the Parquet parts of `jaxembed embed`, and search it by all their vectors.

    pip install pyarrow qdrant-client
    python fill_qdrant.py vectors/ id "how do vaccines work"

`id` is the column that names a row, of integers or strings: run it again after the parts have
changed, and a row replaces the one of its name.
"""

import sys
from collections.abc import Iterator
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import pyarrow as pa
from pyarrow import dataset
from qdrant_client import QdrantClient, models

from jaxembed import Embedder

MODEL = "sentence-transformers/all-MiniLM-L6-v2"  # that of the parts
STORE = "qdrant"  # a folder of this process, or the URL of a server
COLLECTION = "texts"
BATCH_ROWS = 256  # 11 MB of JSON at 4,096 dimensions, and a server takes 32 in a request
CANDIDATES = 100  # of each ranking
RANK_CONSTANT = 60  # a text scores 1 / (60 + its rank), from 0, in each ranking
KINDS = ("dense", "sparse")  # of vectors
NOT_KEPT = ("row", "text_digest", "image_digest", "multi_vector", *KINDS)
DATATYPES = {pa.float32(): models.Datatype.FLOAT32, pa.float16(): models.Datatype.FLOAT16}


def main(parts: str, id_column: str, query: str) -> None:
    client = QdrantClient(STORE) if "://" in STORE else QdrantClient(path=STORE)
    rows, kinds = fill(client, parts, id_column)
    print(f"{rows} rows read, {client.count(COLLECTION).count} in the collection")
    with Embedder(MODEL) as embedder:
        vectors = embed(embedder, query, kinds)
    for score, payload in search(client, vectors, limit=10):
        print(f"{score:.4f}  {payload}")
    client.close()


def fill(client: QdrantClient, parts: str, id_column: str) -> tuple[int, list[str]]:
    """Put every row into the collection. Returns their number and the kinds of their vectors."""
    data = dataset.dataset(parts, format="parquet")  # also s3://; without files that begin with _
    names = data.schema.names
    kinds = [kind for kind in KINDS if kind in names]
    if not kinds or id_column not in names:
        sys.exit(f"{parts} needs a column of vectors and {id_column!r}, and has {names}")
    create(client, {kind: data.schema.field(kind).type for kind in kinds})
    kept = [name for name in names if name not in NOT_KEPT]
    columns, rows = list(dict.fromkeys([id_column, *kept, *kinds])), 0
    one_at_a_time = {"batch_readahead": 1, "fragment_readahead": 1}
    for batch in data.to_batches(columns=columns, batch_size=BATCH_ROWS, **one_at_a_time):
        client.upload_points(COLLECTION, points(batch, kinds, kept), BATCH_ROWS, wait=True)
        rows += len(batch)
    return rows, kinds


def create(client: QdrantClient, types: dict[str, pa.DataType]) -> None:
    """The collection for vectors of these types, unless it is there."""
    dense, sparse = {}, {}
    if column := types.get("dense"):
        if column.value_type not in DATATYPES:
            sys.exit(f"dense holds {column.value_type}: embed with --output-dtype float or float16")
        size, datatype = column.list_size, DATATYPES[column.value_type]
        dense["dense"] = models.VectorParams(
            size=size, distance=models.Distance.COSINE, datatype=datatype
        )
    if "sparse" in types:
        sparse["sparse"] = models.SparseVectorParams()
    if not client.collection_exists(COLLECTION):
        client.create_collection(COLLECTION, dense, sparse)


def points(
    batch: pa.RecordBatch, kinds: list[str], kept: list[str]
) -> Iterator[models.PointStruct]:
    """The rows as Qdrant takes them. The first column names them."""
    if nulls := [name for name in (batch.schema.names[0], *kinds) if batch[name].null_count]:
        sys.exit(f"there are rows without {nulls}")
    vectors = {}
    if "dense" in kinds:
        vectors["dense"] = batch["dense"].flatten().to_numpy().reshape(len(batch), -1).tolist()
    if "sparse" in kinds:
        vectors["sparse"] = [models.SparseVector(**row) for row in batch["sparse"].to_pylist()]
    payloads = batch.select(kept).to_pylist()
    for name, payload, *row in zip(batch[0].to_pylist(), payloads, *vectors.values(), strict=True):
        yield models.PointStruct(
            id=point_id(name), vector=dict(zip(kinds, row, strict=True)), payload=payload
        )


def point_id(name: int | str) -> int | str:
    """What Qdrant takes: integers from 0 as they are, for others a UUID that follows from them."""
    return name if isinstance(name, int) and name >= 0 else str(uuid5(NAMESPACE_OID, str(name)))


def embed(embedder: Embedder, query: str, kinds: list[str]) -> dict[str, Any]:
    found = embedder.encode_outputs([query], kinds, role="query")
    vectors = {}
    if "dense" in found:
        vectors["dense"] = found["dense"][0].tolist()
    if "sparse" in found:
        indices, values = found["sparse"].indices[0].tolist(), found["sparse"].values[0].tolist()
        vectors["sparse"] = models.SparseVector(indices=indices, values=values)
    return vectors


def search(client: QdrantClient, vectors: dict[str, Any], limit: int) -> list[tuple[float, dict]]:
    """The score and the payload of what ranks best by all vectors together."""
    rankings = [
        models.Prefetch(query=vector, using=kind, limit=CANDIDATES)
        for kind, vector in vectors.items()
    ]
    fusion = models.RrfQuery(rrf=models.Rrf(k=RANK_CONSTANT))  # reciprocal rank fusion
    found = client.query_points(COLLECTION, prefetch=rankings, query=fusion, limit=limit)
    return [(point.score, point.payload or {}) for point in found.points]


if __name__ == "__main__":
    main(*sys.argv[1:])
