"""Fill LanceDB from the Parquet parts of `jaxembed embed`, and search it by meaning and by words.

    pip install pyarrow lancedb
    python fill_lancedb.py vectors/ text "how do vaccines work"

`text` is the kept column whose words are indexed: LanceDB has no sparse vectors, so it fuses the
dense ranking with one of full-text search. Run it again after the parts have changed: the table is
written anew, and who reads it sees the old one until then.
"""

import sys

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import FTS, HnswSq
from lancedb.rerankers import RRFReranker
from pyarrow import dataset

from jaxembed import Embedder

MODEL = "sentence-transformers/all-MiniLM-L6-v2"  # that of the parts
STORE = "lancedb"  # a folder, or s3://bucket/folder
TABLE = "texts"
BATCH_ROWS = 4096
INDEXED_ROWS = 100_000  # fewer are searched exactly, one by one
REFINED = 10  # times as many of the index are ranked by their exact vectors
NOT_KEPT = ("row", "text_digest", "image_digest", "sparse", "multi_vector")


def main(parts: str, text_column: str, query: str) -> None:
    table = fill(lancedb.connect(STORE), parts, text_column)
    print(f"{table.count_rows()} rows in the table")
    with Embedder(MODEL) as embedder:
        vector = embedder.encode_query(query)
    for row in search(table, vector, query, text_column, limit=10):
        print(f"{row.pop('_relevance_score'):.4f}  {row}")


def fill(db: lancedb.DBConnection, parts: str, text_column: str) -> lancedb.table.Table:
    """The table of all rows, with an index of the words, and of many rows one of the vectors."""
    data = dataset.dataset(parts, format="parquet")  # also s3://; without files that begin with _
    names = data.schema.names
    if "dense" not in names or text_column not in names:
        sys.exit(f"{parts} needs the columns dense and {text_column!r}, and has {names}")
    holds = data.schema.field("dense").type.value_type
    if holds not in (pa.float32(), pa.float16()):
        sys.exit(f"dense holds {holds}: embed with --output-dtype float or float16")
    scanner = data.scanner(
        columns=[name for name in names if name not in NOT_KEPT],
        batch_size=BATCH_ROWS,
        batch_readahead=1,  # one at a time, so that memory stays as it is
        fragment_readahead=1,
    )
    table = db.create_table(TABLE, scanner.to_reader(), mode="overwrite")
    table.create_index(text_column, config=FTS())
    if table.count_rows() >= INDEXED_ROWS:
        table.create_index("dense", config=HnswSq(distance_type="cosine"))
    return table


def search(
    table: lancedb.table.Table, vector: np.ndarray, query: str, text_column: str, limit: int
) -> list[dict]:
    """What ranks best by meaning and by words together: the kept columns and the score."""
    found = table.search(query_type="hybrid", vector_column_name="dense", fts_columns=text_column)
    found = found.vector(vector).text(query).distance_type("cosine").refine_factor(REFINED)
    found = found.rerank(RRFReranker())  # reciprocal rank fusion
    kept = [name for name in table.schema.names if name != "dense"]
    return found.select(kept).limit(limit).to_list()


if __name__ == "__main__":
    main(*sys.argv[1:])
