"""What is computed of each row of a file, of its texts or its image: vectors and other
representations, a score, or labels; as columns of Arrow."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from jaxembed.bulk.image_rows import RowImage
from jaxembed.bulk.sources import arrow
from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Ragged, SparseRows
from jaxembed.embedder import Embedder
from jaxembed.errors import InvalidImage
from jaxembed.preprocessing.images.decode import image_facts
from jaxembed.runtime.options import EncodeOptions, Label, ScoreOptions

ROWS_A_CALL = 1024
MULTI_VECTOR_ROWS_A_CALL = 256  # each has a vector a token
IMAGES_A_CALL = 128  # and no more than so many bytes: see `RowStream`

RowTexts = tuple[str, ...]  # of one row
RowInputs = tuple[Any, ...]  # RowTexts, or one RowImage


@runtime_checkable
class Computation(Protocol):
    """What a job computes of the texts of a row, or of its image."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the input that hold the texts or the image."""
        ...

    @property
    def rows_a_call(self) -> int:
        """How many rows are computed together."""
        ...

    def describe(self) -> dict[str, Any]:
        """All that the result depends on beside the texts or the image, as JSON."""
        ...

    def fields(self) -> list[Any]:
        """The Arrow fields of the result."""
        ...

    def compute(self, rows: Sequence[RowInputs]) -> list[Any]:
        """An Arrow array for each of the fields, an element for each row. Raises the errors of
        InvalidInput, by `index` where one row is wrong, and of BackendError."""
        ...


@dataclass(frozen=True)
class EmbedRows:
    """Dense vectors and other representations of a text."""

    embedder: Embedder
    column: str
    outputs: tuple[OutputName, ...]
    options: dict[str, Any]  # of `Embedder.encode_outputs`

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def rows_a_call(self) -> int:
        return MULTI_VECTOR_ROWS_A_CALL if "multi_vector" in self.outputs else ROWS_A_CALL

    def describe(self) -> dict[str, Any]:
        options = EncodeOptions(**self.options)
        ranges = self.embedder.model.tasks.ranges(options, options.output_dtype)
        return {
            "task": "embed",
            "outputs": list(self.outputs),
            "options": _json(asdict(options), {"outputs"}),
            "ranges": None if ranges is None else hashlib.sha256(ranges.tobytes()).hexdigest(),
            "model": model_facts(self.embedder),
        }

    def fields(self) -> list[Any]:
        return [arrow().field(name, array.type) for name, array in self._named([])]

    def compute(self, rows: Sequence[RowTexts]) -> list[Any]:
        return [array for _, array in self._named([text for (text,) in rows])]

    def _named(self, texts: list[str]) -> list[tuple[OutputName, Any]]:
        found = self.embedder.encode_outputs(texts, self.outputs, **self.options)
        return [(name, as_arrow(found[name])) for name in self.outputs]


@dataclass(frozen=True)
class EmbedImages:
    """Dense vectors and other representations of an image."""

    embedder: Embedder
    column: str | None  # None: the rows are image files
    outputs: tuple[OutputName, ...]
    options: dict[str, Any]  # of `Embedder.encode_outputs`
    rows_a_call: int = IMAGES_A_CALL

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    def describe(self) -> dict[str, Any]:
        options = EncodeOptions(**self.options)
        ranges = self.embedder.model.tasks.ranges(options, options.output_dtype)
        return {
            "task": "embed",
            "of": "images",
            "outputs": list(self.outputs),
            "options": _json(asdict(options), {"outputs"}),
            "ranges": None if ranges is None else hashlib.sha256(ranges.tobytes()).hexdigest(),
            "model": _facts_of_images(self.embedder),
        }

    def fields(self) -> list[Any]:
        return [arrow().field(name, array.type) for name, array in self._named([])]

    def compute(self, rows: Sequence[tuple[RowImage]]) -> list[Any]:
        images = [image for (image,) in rows]
        for index, image in enumerate(images):
            _check_header(image, index)  # before any is decoded: all are again without this one
        return [array for _, array in self._named(images)]

    def _named(self, images: list[RowImage]) -> list[tuple[OutputName, Any]]:
        found = self.embedder.encode_outputs([], self.outputs, images=images, **self.options)
        return [(name, as_arrow(found[name])) for name in self.outputs]


@dataclass(frozen=True)
class ScoreRows:
    """The score of a query and a text, as a reranker gives it."""

    embedder: Embedder
    query_column: str
    column: str
    raw_scores: bool
    options: dict[str, Any]  # the fields of ScoreOptions
    rows_a_call: int = ROWS_A_CALL

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.query_column, self.column)

    def describe(self) -> dict[str, Any]:
        return {
            "task": "rerank",
            "raw_scores": self.raw_scores,
            "options": _json(asdict(ScoreOptions(**self.options))),
            "model": model_facts(self.embedder),
        }

    def fields(self) -> list[Any]:
        pa = arrow()
        return [pa.field("score", pa.float32())]

    def compute(self, rows: Sequence[RowTexts]) -> list[Any]:
        pairs = [(query, text) for query, text in rows]
        scores = self.embedder.score(pairs, raw_scores=self.raw_scores, **self.options)
        return [arrow().array(scores)]


@dataclass(frozen=True)
class ClassifyRows:
    """Every label of a text, or of a pair of texts, with its score, best first."""

    embedder: Embedder
    columns: tuple[str, ...]
    raw_scores: bool
    options: dict[str, Any]  # the fields of ScoreOptions
    rows_a_call: int = ROWS_A_CALL

    def describe(self) -> dict[str, Any]:
        return {
            "task": "classify",
            "raw_scores": self.raw_scores,
            "options": _json(asdict(ScoreOptions(**self.options))),
            "model": model_facts(self.embedder),
        }

    def fields(self) -> list[Any]:
        return [arrow().field("labels", labels_as_arrow([]).type)]

    def compute(self, rows: Sequence[RowTexts]) -> list[Any]:
        inputs = [row[0] if len(row) == 1 else (row[0], row[1]) for row in rows]
        labels = self.embedder.classify(inputs, raw_scores=self.raw_scores, **self.options)
        return [labels_as_arrow(labels)]


def model_facts(embedder: Embedder) -> dict[str, Any]:
    """What tells the results of a model apart from those of another, or of other settings."""
    spec, routes = embedder.spec, embedder.model.text_routes.items()
    return {
        "content": {name: one.spec.content_hash for name, one in routes},
        "adapters": msgspec.to_builtins(spec.adapters),
        "dtype": embedder.dtype,
        "pooling": list(spec.pooling),
        "max_input_tokens": embedder.max_input_tokens,
        "prompts": dict(spec.prompts),
        "text": _json(asdict(embedder.model.text), {"workers"}),
    }


def _facts_of_images(embedder: Embedder) -> dict[str, Any]:
    """What tells the results of a model's images apart from those of another."""
    engines = embedder.model.engines.items()
    return {
        "content": {name: one.spec.content_hash for name, one in engines},
        "adapters": msgspec.to_builtins(embedder.spec.adapters),
        "dtype": embedder.dtype,
    }


def _check_header(image: RowImage, index: int) -> None:
    """Raise InvalidImage, by its index, for a file that does not begin as an image does."""
    try:
        if isinstance(image, bytes):
            image_facts(image)
    except InvalidImage as error:
        raise error.at(index) from error


def as_arrow(values: Any) -> Any:
    """An output of several texts as an Arrow array, an element a text: vectors `[n, width]` as
    fixed-size lists, SparseRows as structs of `indices` and `values`, a Ragged as lists of
    vectors."""
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
    """The labels of several texts in their order, as an Arrow array of lists of structs of `label`
    and `score`, an element a text."""
    pa = arrow()
    kind = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32())]))
    return pa.array([[asdict(one) for one in some] for some in rows], kind)


def _json(options: dict[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Options as JSON, without those named and those that have nothing."""
    return {
        name: value for name, value in options.items() if name not in without and value is not None
    }
