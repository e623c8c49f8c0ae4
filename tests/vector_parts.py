"""Parquet parts as `jaxembed embed` writes them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

SPARSE = pa.struct({"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())})


def dense_column(vectors: np.ndarray) -> pa.Array:
    """Vectors `[rows, dim]` of any type that numpy has, as a fixed-size list."""
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


def sparse_column(rows: Any) -> pa.Array:
    """SparseRows as a struct of lists."""
    pairs = zip(rows.indices, rows.values, strict=True)
    return pa.array([{"indices": i.tolist(), "values": v.tolist()} for i, v in pairs], SPARSE)


def write_parts(
    folder: Path,
    texts: Sequence[str],
    columns: Mapping[str, Any],
    outputs: Mapping[str, pa.Array],
    part_rows: int,
) -> Path:
    """A folder of parts: of each row its number, the id and the kept columns, the digest of its
    text, and its outputs."""
    folder.mkdir(exist_ok=True)
    digests = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
    fields = {"row": pa.array(range(len(texts)), pa.int64()), **columns}
    fields["text_digest"] = pa.array(digests, pa.binary(16))
    table = pa.table({**fields, **outputs})
    (folder / "_job.json").write_text(json.dumps({"part_rows": part_rows}))
    for number, start in enumerate(range(0, len(texts), part_rows)):
        part = table.slice(start, part_rows)
        parquet.write_table(part, folder / f"part-{number:05}.parquet")
    (folder / "_manifest.json").write_text(json.dumps({"rows": len(texts)}))
    return folder
