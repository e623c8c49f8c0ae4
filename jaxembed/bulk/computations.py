"""The computations of a bulk job. Each computes a result for every row, as Arrow columns: vectors
and other representations, a score, labels, or entities."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from msgspec import structs

from jaxembed.bulk.row_source import (
    MULTI_VECTOR_ROWS_A_CALL,
    ROWS_A_CALL,
    RowInputs,
    RowSource,
    TextRows,
    given,
)
from jaxembed.bulk.sources import arrow
from jaxembed.data.inputs import AggregationStrategy
from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Ragged, SparseRows
from jaxembed.embedder import Embedder
from jaxembed.runtime.entities import Entity
from jaxembed.runtime.options import EncodeOptions, Label, ScoreOptions


@runtime_checkable
class Computation(Protocol):
    """What a job computes for each row."""

    @property
    @abstractmethod
    def source(self) -> RowSource:
        """The kind of rows, and how they are read."""

    @property
    @abstractmethod
    def rows_per_call(self) -> int:
        """The number of rows to give to one call of `compute`."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return everything that the result depends on besides the rows, as data for JSON."""

    @abstractmethod
    def fields(self) -> list[Any]:
        """Return the Arrow fields of the result: its column names and types."""

    @abstractmethod
    def compute(self, rows: Sequence[RowInputs]) -> list[Any]:
        """Return an Arrow array for each field, with one element for each row.

        Raises InvalidInput, with the `index` of the row if one row cannot be computed, and
        BackendError.
        """


@dataclass(frozen=True)
class EmbedRows:
    """Computes dense vectors and other representations of texts or images."""

    embedder: Embedder
    source: RowSource
    outputs: tuple[OutputName, ...]
    options: dict[str, Any]  # keyword arguments of `Embedder.encode_outputs`

    @property
    def rows_per_call(self) -> int:
        return self.source.rows_per_call(self.outputs)

    def describe(self) -> dict[str, Any]:
        """Return everything that the vectors depend on besides the rows, as data for JSON."""
        options = EncodeOptions(**self.options)
        ranges = self.embedder.model.tasks.ranges(options, options.output_dtype)
        return {
            "task": "embed",
            "outputs": list(self.outputs),
            "options": given(structs.asdict(options), {"outputs"}),
            "ranges": None if ranges is None else hashlib.sha256(ranges.tobytes()).hexdigest(),
            **self.source.describe(self.embedder),
        }

    def fields(self) -> list[Any]:
        arrays = zip(self.outputs, self.compute([]), strict=True)
        return [arrow().field(name, array.type) for name, array in arrays]

    def compute(self, rows: Sequence[RowInputs]) -> list[Any]:
        results = self.source.embed(self.embedder, rows, self.outputs, self.options)
        return [as_arrow(results[name]) for name in self.outputs]


@dataclass(frozen=True)
class _Scores:
    """The fields and methods that ScoreRows and ClassifyRows share."""

    embedder: Embedder
    source: TextRows
    raw_scores: bool
    rows_per_call: int = ROWS_A_CALL
    task: ClassVar[str]

    def describe(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "raw_scores": self.raw_scores,
            "options": given(structs.asdict(ScoreOptions())),
            **self.source.describe(self.embedder),
        }


class ScoreRows(_Scores):
    """Computes the score of a query and a text, with a reranker."""

    task = "rerank"

    def fields(self) -> list[Any]:
        return [arrow().field("score", arrow().float32())]

    def compute(self, rows: Sequence[RowInputs]) -> list[Any]:
        pairs = [(query, text) for query, text in rows]
        return [arrow().array(self.embedder.score(pairs, raw_scores=self.raw_scores))]


class ClassifyRows(_Scores):
    """Computes all labels of a text or a pair of texts, each with its score, best first."""

    task = "classify"

    def fields(self) -> list[Any]:
        return [arrow().field("labels", labels_as_arrow([]).type)]

    def compute(self, rows: Sequence[RowInputs]) -> list[Any]:
        inputs = [row[0] if len(row) == 1 else (row[0], row[1]) for row in rows]
        return [labels_as_arrow(self.embedder.classify(inputs, raw_scores=self.raw_scores))]


@dataclass(frozen=True)
class EntityRows:
    """Computes the entities in a text, in their order, with a token classifier."""

    embedder: Embedder
    source: TextRows
    strategy: AggregationStrategy
    rows_per_call: int = MULTI_VECTOR_ROWS_A_CALL

    def describe(self) -> dict[str, Any]:
        return {
            "task": "token_classify",
            "aggregation_strategy": self.strategy,
            "options": given(structs.asdict(ScoreOptions())),
            **self.source.describe(self.embedder),
        }

    def fields(self) -> list[Any]:
        return [arrow().field("entities", entities_as_arrow([]).type)]

    def compute(self, rows: Sequence[RowInputs]) -> list[Any]:
        texts = [text for (text,) in rows]
        return [entities_as_arrow(self.embedder.token_classify(texts, self.strategy))]


def as_arrow(values: Any) -> Any:
    """Convert an output of several texts to an Arrow array with one element for each text.

    Vectors `[n, width]` become fixed-size lists, SparseRows become structs of `indices` and
    `values`, and a Ragged becomes lists of vectors.
    """
    pa = arrow()
    if isinstance(values, SparseRows):
        weights, indices, offsets = values.csr
        starts = pa.array(offsets.astype(np.int32))
        lists = [
            pa.ListArray.from_arrays(starts, pa.array(column)) for column in (indices, weights)
        ]
        return pa.StructArray.from_arrays(lists, ["indices", "values"])
    if isinstance(values, Ragged):
        starts = pa.array(values.offsets.astype(np.int32))
        return pa.ListArray.from_arrays(starts, as_arrow(values.values))
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def labels_as_arrow(rows: Sequence[Sequence[Label]]) -> Any:
    """Convert the labels of several texts to an Arrow array with one element for each text: a list
    of structs of `label` and `score`, in the given order."""
    pa = arrow()
    return _as_structs(rows, [("label", pa.string()), ("score", pa.float32())])


def entities_as_arrow(rows: Sequence[Sequence[Entity]]) -> Any:
    """Convert the entities of several texts to an Arrow array with one element for each text: a
    list of structs with the fields of Entity. `index` is null for an entity of several tokens."""
    pa = arrow()
    names = [("label", pa.string()), ("score", pa.float32()), ("word", pa.string())]
    places = [(name, pa.int32()) for name in ("start", "end", "index")]
    return _as_structs(rows, [*names, *places])


def _as_structs(rows: Sequence[Sequence[Any]], fields: list[tuple[str, Any]]) -> Any:
    """Convert lists of dataclasses to an Arrow array of lists of structs."""
    pa = arrow()
    listed = [[asdict(item) for item in items] for items in rows]
    return pa.array(listed, pa.list_(pa.struct(fields)))
