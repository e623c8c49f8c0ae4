"""A Computation without a model; as a program it runs a job, for tests that kill it."""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import dataset

from jaxembed.bulk.computations import as_arrow
from jaxembed.bulk.row_source import RowInputs, RowSource, TextRows
from jaxembed.bulk.run import Rows, run_job
from jaxembed.errors import InputTooLong

WIDTH = 4
TEXTS = TextRows()


@dataclass
class DigestRows:
    """Four numbers from the digest of each row's texts. Texts that are `too long` are refused."""

    source: RowSource = TEXTS
    rows_per_call: int = 64
    version: int = 1
    wait_s: float = 0.0  # a call
    stops_at: int = -1  # the call at which it fails, as if the process were stopped there
    calls: int = 0
    rows: int = 0

    def describe(self) -> dict[str, Any]:
        return {"version": self.version}

    def fields(self) -> list[Any]:
        return [pa.field("dense", pa.list_(pa.float32(), WIDTH))]

    def compute(self, rows: Sequence[RowInputs]) -> list[Any]:
        time.sleep(self.wait_s)
        for index, row in enumerate(rows):
            if "too long" in row:
                raise InputTooLong(8, 9, index)
        return self.counted(vectors_of(rows))

    def counted(self, vectors: np.ndarray) -> list[Any]:
        """The result of a call."""
        if self.calls == self.stops_at:
            raise KeyboardInterrupt
        self.calls += 1
        self.rows += len(vectors)
        return [as_arrow(vectors)]


def vectors_of(rows: Sequence[RowInputs]) -> np.ndarray:
    return vectors_of_digests(map(TEXTS.digest, rows))


def vectors_of_digests(digests: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint32).reshape(-1, WIDTH).astype(np.float32)


def table(out: Path) -> pa.Table:
    """The rows that a job has written, in order."""
    return dataset.dataset(out, format="parquet").to_table().sort_by("row")


def main() -> None:
    out, inputs, part_rows, wait_s = sys.argv[1:]
    rows = Rows([inputs], id_column="id", keep=("n",), part_rows=int(part_rows))
    run_job(DigestRows(wait_s=float(wait_s)), rows, out)


if __name__ == "__main__":
    main()
