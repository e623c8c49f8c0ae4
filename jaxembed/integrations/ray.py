"""Runs a model in the actors of Ray Data: Embed, Rerank and Classify for `map_batches`.

Knows Arrow, and not Ray, which makes one of these in each actor and gives it batches.
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

SHOWN = 60  # characters of a text in an error


class _Actor:
    """An Embedder, the columns of texts that it is given and those that it adds."""

    def __init__(
        self,
        model: str | None,
        columns: Sequence[str],
        adds: Sequence[str],
        id_column: str | None,
        arguments: dict[str, Any],
        options: Collection[str],
    ):
        """Of the `arguments` those named by `options` are of each call, the others of Embedder."""
        self._columns, self._adds, self._id_column = columns, adds, id_column
        self._options = {name: arguments.pop(name) for name in options & arguments.keys()}
        self._embedder = Embedder(model, **arguments)

    def __del__(self) -> None:
        """Ray deletes what its actor holds when it stops the actor."""
        if hasattr(self, "_embedder"):  # or the model could not be loaded
            self._embedder.close()

    def _texts(self, batch: Any) -> list[list[str]]:
        """The texts of each column. Raises InvalidInput for a batch or a row that cannot be run."""
        if not isinstance(batch, pa.Table):
            raise InvalidInput(
                f"batches must be of pyarrow.Table, and are of {type(batch).__name__}: add "
                "batch_format='pyarrow' to map_batches"
            )
        if taken := [name for name in self._adds if name in batch.column_names]:
            raise InvalidInput(
                f"the rows already have a column {taken[0]!r}, which is one of those to add; "
                "rename it or drop it before",
                field=taken[0],
            )
        return [self._column(batch, name) for name in self._columns]

    def _column(self, batch: pa.Table, name: str) -> list[str]:
        if name not in batch.column_names:
            raise InvalidInput(
                f"the rows have no column {name!r}, only {', '.join(batch.column_names)}; name the "
                "one with the texts in fn_constructor_kwargs",
                field=name,
            )
        column = batch[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(test(column.type) for test in (*is_text, pa.types.is_null)):
            raise InvalidInput(
                f"column {name!r} must be of strings, and is of {column.type}", field=name
            )
        texts = column.to_pylist()
        for missing, why in ((None, "is null"), ("", "is empty")):
            if missing in texts:
                raise self._refusal(batch, texts.index(missing), name, why)
        return texts

    def _refusal(self, batch: pa.Table, row: int, column: str, why: str) -> InvalidInput:
        """The error of a row: its id, if there is a column of ids, and the text it has."""
        text = batch[column][row].as_py()
        shown = "" if text is None else f" It begins {text[:SHOWN]!r}."
        if self._id_column in batch.column_names:
            named = f"the row whose {self._id_column} is {batch[self._id_column][row].as_py()!r}"
        else:
            named = f"row {row} of a batch of {batch.num_rows} (id_column= names rows by their ids)"
        return InvalidInput(f"{named}, column {column!r}: {why}.{shown}", column, row)


class Embed(_Actor):
    """Adds the vectors of a column of texts to batches of Ray Data.

    `ds.map_batches(Embed, fn_constructor_kwargs={"model": ..., "column": "text"},
    batch_format="pyarrow", batch_size=4096, compute=ray.data.ActorPoolStrategy(size=n),
    num_gpus=1)`

    `outputs` are the columns added: "dense" fixed_size_list<float>[dim] (of halffloat, int8 or
    uint8 with an `output_dtype`), "sparse" struct<indices: list<int32>, values: list<float>> and
    "multi_vector" list<fixed_size_list<float>[width]>. `id_column` names the rows in errors.
    `arguments` are those of Embedder (config, cache_dir, adapters...) and the options of
    `Embedder.encode_outputs` (prompt_name, role, dimensions, output_dtype...).

    A call raises InvalidInput, which names the row and the column, and BackendError.
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
        self._outputs, names = tuple(outputs), output_options.names
        super().__init__(model, [column], self._outputs, id_column, arguments, names)

    async def __call__(self, batch: Any) -> pa.Table:
        """The batch with the outputs of its texts. Ray calls it for the next batches of a block
        while this one runs."""
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
    """Adds the `score` (float) of a column of documents for a column of queries to batches of Ray
    Data, as `Embedder.rerank` gives it.

    The options of `Embedder.rerank` are its options; otherwise as Embed. Rows of a batch
    with the same query are scored together, so sort by query where there are many.
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
        names = rerank_options.names | {"raw_scores"}
        super().__init__(model, [query_column, column], ["score"], id_column, arguments, names)

    async def __call__(self, batch: Any) -> pa.Table:
        """The batch with the score of each row."""
        queries, documents = self._texts(batch)
        rows: dict[str, list[int]] = {}
        for row, query in enumerate(queries):
            rows.setdefault(query, []).append(row)
        ranked = await asyncio.gather(
            *(self._rank(batch, query, chosen, documents) for query, chosen in rows.items())
        )
        scores = np.empty(len(documents), np.float32)
        for chosen, found in zip(rows.values(), ranked, strict=True):
            for one in found:
                scores[chosen[one.index]] = one.score
        return batch.append_column("score", pa.array(scores))

    async def _rank(
        self, batch: pa.Table, query: str, rows: list[int], documents: list[str]
    ) -> list[Ranked]:
        try:
            chosen = [documents[row] for row in rows]
            return await self._embedder.rerank_async(query, chosen, **self._options)
        except InvalidInput as error:
            if error.index is None and error.field != "query":
                raise
            of_query = error.index is None
            row, column = rows[error.index or 0], self._columns[0 if of_query else 1]
            raise self._refusal(batch, row, column, str(error)) from error


class Classify(_Actor):
    """Adds the `labels` of a column of texts to batches of Ray Data: list<struct<label: string,
    score: float>>, best first, as `Embedder.classify` gives them.

    The options of `Embedder.classify` are its options; otherwise as Embed.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        column: str = "text",
        id_column: str | None = None,
        **arguments: Any,
    ):
        names = score_options.names | {"raw_scores"}
        super().__init__(model, [column], ["labels"], id_column, arguments, names)

    async def __call__(self, batch: Any) -> pa.Table:
        """The batch with the labels of its texts."""
        (texts,) = self._texts(batch)
        try:
            labels = await self._embedder.classify_async(texts, **self._options)
        except InvalidInput as error:
            if error.index is None:
                raise
            raise self._refusal(batch, error.index, self._columns[0], str(error)) from error
        return batch.append_column("labels", labels_as_arrow(labels))
