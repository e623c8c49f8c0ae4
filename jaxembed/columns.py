"""Makes Arrow columns of what a model gives, as Parquet holds them. Needs pyarrow, an extra."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingImports]

from jaxembed.errors import InvalidInput
from jaxembed.options import Label
from jaxembed.outputs import OutputName
from jaxembed.work import Ragged, SparseRows

MOST_ITEMS = 2**31 - 1  # of a list column, whose offsets are int32


def output_column(name: OutputName, value: Any) -> pa.Array:
    """The column of an output of n texts: of "dense" fixed_size_list<item>[dim], of "sparse"
    struct<indices: list<int32>, values: list<float>>, of "multi_vector"
    list<fixed_size_list<item>[width]>. The items have the dtype of the arrays.

    Raises InvalidInput for more items than the offsets of a list can count.
    """
    if isinstance(value, SparseRows):
        return _sparse(value)
    if isinstance(value, Ragged):
        return _lists(name, value.offsets, vectors(value.values))
    return vectors(value)


def vectors(matrix: np.ndarray) -> pa.Array:
    """The rows of a matrix `[n, width]` as fixed_size_list<item>[width], without a copy where it is
    C-contiguous."""
    items = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(items, matrix.shape[1])


def label_column(rows: Sequence[Sequence[Label]]) -> pa.Array:
    """list<struct<label: string, score: float>>: the labels of each row in their order."""
    labels = [one for row in rows for one in row]
    names = pa.array([one.label for one in labels], pa.string())
    scores = pa.array(np.array([one.score for one in labels], np.float32))
    both = pa.StructArray.from_arrays([names, scores], ["label", "score"])
    return _lists("labels", np.cumsum([0, *map(len, rows)]), both)


def _sparse(rows: SparseRows) -> pa.Array:
    values, indices, offsets = rows.csr
    parts = [_lists("sparse", offsets, pa.array(part)) for part in (indices, values)]
    return pa.StructArray.from_arrays(parts, ["indices", "values"])


def _lists(name: str, offsets: np.ndarray, items: pa.Array) -> pa.Array:
    if offsets[-1] > MOST_ITEMS:
        raise InvalidInput(
            f"the column {name} of {len(offsets) - 1} texts has {offsets[-1]} items, more than the "
            f"{MOST_ITEMS} of a list column; pass fewer texts at once",
            field=name,
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), items)
