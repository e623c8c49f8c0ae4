"""Runs a model in the actors of Ray Data: Embed, Rerank and Classify for `map_batches`.

Ray makes an instance in each actor and passes it batches as Arrow tables.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingImports]

from jaxembed.bulk.computations import as_arrow, labels_as_arrow
from jaxembed.data.outputs import OutputName
from jaxembed.embedder import Embedder, output_options, rerank_options, score_options
from jaxembed.errors import InvalidInput
from jaxembed.runtime.options import Ranked

SHOWN = 60  # maximum characters of a text in an error message


class _Actor:
    """The base of the actors: an Embedder, the columns to read from a batch, and those to add."""

    def __init__(
        self,
        model: str | None,
        columns: Sequence[str],
        adds: Sequence[str],
        id_column: str | None,
        arguments: dict[str, Any],
        options: Collection[str],
    ):
        """Load the model. `columns` are the columns to read from a batch, and `adds` the columns to
        add. Those `arguments` whose names are in `options` go to the Embedder's method for each
        batch, and the others to Embedder(). Raises the errors of Embedder()."""
        self._columns, self._adds, self._id_column = columns, adds, id_column
        self._options = {name: arguments.pop(name) for name in options & arguments.keys()}
        self._embedder = Embedder(model, **arguments)

    def __del__(self) -> None:
        """Close the model. Ray deletes the instance when it stops the actor."""
        if hasattr(self, "_embedder"):  # missing if the model could not be loaded
            self._embedder.close()

    def _texts(self, batch: Any) -> list[list[str]]:
        """Return the texts of each column to read. Raises InvalidInput if the batch is not an Arrow
        table, already has a column that would be added, or lacks a column of non-empty strings."""
        if not isinstance(batch, pa.Table):
            raise InvalidInput(
                f"a batch must be a pyarrow.Table, not {type(batch).__name__}; add "
                "batch_format='pyarrow' to map_batches"
            )
        if existing := [name for name in self._adds if name in batch.column_names]:
            raise InvalidInput(
                f"the rows already have a column {existing[0]!r}, which would be added; rename it "
                "or drop it first",
                field=existing[0],
            )
        return [self._column(batch, name) for name in self._columns]

    def _column(self, batch: pa.Table, name: str) -> list[str]:
        """Return the texts of a column. Raises InvalidInput if the column is missing, or has a
        value that is not a string or is empty."""
        if name not in batch.column_names:
            raise InvalidInput(
                f"the rows have no column {name!r}, only {', '.join(batch.column_names)}; name the "
                "column of the texts in fn_constructor_kwargs",
                field=name,
            )
        column = batch[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        string_types = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(test(column.type) for test in (*string_types, pa.types.is_null)):
            raise InvalidInput(
                f"column {name!r} must have strings, and has the type {column.type}", field=name
            )
        texts = column.to_pylist()
        for bad, why in ((None, "is null"), ("", "is empty")):
            if bad in texts:
                raise self._refusal(batch, texts.index(bad), name, why)
        return texts

    def _refusal(self, batch: pa.Table, row: int, column: str, why: str) -> InvalidInput:
        """Return the error for the text of a row. The message names the row by its id, or if there
        is none by its number in the batch, says `why` the text is refused, and quotes the text."""
        text = batch[column][row].as_py()
        quote = "" if text is None else f" It begins {text[:SHOWN]!r}."
        if self._id_column in batch.column_names:
            named = f"the row whose {self._id_column} is {batch[self._id_column][row].as_py()!r}"
        else:
            named = f"row {row} of a batch of {batch.num_rows} (id_column names rows by their ids)"
        return InvalidInput(f"{named}, column {column!r}: {why}.{quote}", column, row)


class Embed(_Actor):
    """Adds the vectors of a column of texts to batches of Ray Data.

    `ds.map_batches(Embed, fn_constructor_kwargs={"model": ..., "column": "text"},
    batch_format="pyarrow", batch_size=4096, compute=ray.data.ActorPoolStrategy(size=n),
    num_gpus=1)`

    `outputs` are the columns to add: "dense" as fixed_size_list<float>[dim] (of halffloat, int8 or
    uint8 with an `output_dtype`), "sparse" as struct<indices: list<int32>, values: list<float>>,
    "multi_vector" as list<fixed_size_list<float>[width]>. Errors name a row by its `id_column`.
    `arguments` are arguments of Embedder() (config, cache_dir, adapters...) and options of
    `Embedder.encode_outputs` (prompt_name, role, dimensions, output_dtype...).

    For a batch it raises BackendError, and InvalidInput, whose message names the row and the
    column.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        column: str = "text",
        id_column: str | None = None,
        outputs: Collection[OutputName] = ("dense",),
        **arguments: Any,
    ):
        # `options` are the arguments for each batch; Embedder() takes the others
        self._outputs, options = tuple(outputs), output_options.names
        super().__init__(model, [column], self._outputs, id_column, arguments, options)

    async def __call__(self, batch: Any) -> pa.Table:
        """Return the batch with the outputs of its texts. Ray calls this for further batches of a
        block before earlier ones are done."""
        (texts,) = self._texts(batch)
        try:
            values = await self._embedder.encode_outputs_async(
                texts, self._outputs, **self._options
            )
        except InvalidInput as error:
            if error.index is None:
                raise
            raise self._refusal(batch, error.index, self._columns[0], str(error)) from error
        for name in self._outputs:
            batch = batch.append_column(name, as_arrow(values[name]))
        return batch


class Rerank(_Actor):
    """Adds a column `score` (float) to batches of Ray Data: the score that `Embedder.rerank` gives
    a row's document for its query.

    The constructor takes arguments of Embedder() and options of `Embedder.rerank`. It is used as
    Embed is, and raises the same errors. Rows of a batch with the same query are scored together,
    so sort the rows by query if many rows share one.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        query_column: str = "query",
        column: str = "text",
        id_column: str | None = None,
        **arguments: Any,
    ):
        options = rerank_options.names | {"raw_scores"}  # for each batch
        super().__init__(model, [query_column, column], ["score"], id_column, arguments, options)

    async def __call__(self, batch: Any) -> pa.Table:
        """Return the batch with the score of each row."""
        queries, documents = self._texts(batch)
        by_query: dict[str, list[int]] = {}
        for row, query in enumerate(queries):
            by_query.setdefault(query, []).append(row)
        ranked = await asyncio.gather(
            *(
                self._rank(batch, query, query_rows, documents)
                for query, query_rows in by_query.items()
            )
        )
        scores = np.empty(len(documents), np.float32)
        for query_rows, results in zip(by_query.values(), ranked, strict=True):
            for result in results:
                scores[query_rows[result.index]] = result.score
        return batch.append_column("score", pa.array(scores))

    async def _rank(
        self, batch: pa.Table, query: str, rows: list[int], documents: list[str]
    ) -> list[Ranked]:
        """Score the documents of these rows of the batch for the query. `index` of a result is an
        index into `rows`. Raises InvalidInput, whose message names the row, and BackendError."""
        try:
            chosen = [documents[row] for row in rows]
            return await self._embedder.rerank_async(query, chosen, **self._options)
        except InvalidInput as error:
            if error.index is None and error.field != "query":
                raise  # the error is about an option, not about a row
            of_query = error.index is None  # the message names the first row with this query
            row, column = rows[error.index or 0], self._columns[0 if of_query else 1]
            raise self._refusal(batch, row, column, str(error)) from error


class Classify(_Actor):
    """Adds a column `labels` to batches of Ray Data: the labels of a text with their scores, best
    first, as `Embedder.classify` gives them: list<struct<label: string, score: float>>.

    The constructor takes arguments of Embedder() and options of `Embedder.classify`. It is used as
    Embed is, and raises the same errors.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        column: str = "text",
        id_column: str | None = None,
        **arguments: Any,
    ):
        options = score_options.names | {"raw_scores"}  # for each batch
        super().__init__(model, [column], ["labels"], id_column, arguments, options)

    async def __call__(self, batch: Any) -> pa.Table:
        """Return the batch with the labels of its texts."""
        (texts,) = self._texts(batch)
        try:
            labels = await self._embedder.classify_async(texts, **self._options)
        except InvalidInput as error:
            if error.index is None:
                raise
            raise self._refusal(batch, error.index, self._columns[0], str(error)) from error
        return batch.append_column("labels", labels_as_arrow(labels))
