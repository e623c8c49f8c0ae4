"""RowSource reads and embeds the rows of a job, which are texts or images. RowStream reads the rows
of several files, a given number at a time."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from jaxembed.bulk.sources import (
    START,
    Block,
    InputFile,
    Place,
    as_list,
    check_columns,
    column_types,
    input_files,
    problem_of,
    read_rows,
    read_texts,
)
from jaxembed.data.outputs import OutputName

if TYPE_CHECKING:
    from jaxembed.data.spec import ModelSpec, Routes
    from jaxembed.embedder import Embedder

ROWS_A_CALL = 1024
MULTI_VECTOR_ROWS_A_CALL = 256  # fewer, because a row has a vector for every token
DIGEST_BYTES = 16
IMAGE_BYTES_AT_A_TIME = 64 * 2**20

RowInputs = tuple[Any, ...]  # the inputs of one row: its texts, or its image and maybe a text


class RowSource(ABC):
    """One kind of rows: how they are read, how they are identified, and how a model embeds them."""

    columns: tuple[str, ...]  # input columns that are embedded; none if rows are whole files
    digest_column: ClassVar[str]  # name of the column of digests in the result

    def files(self, names: Sequence[str]) -> list[InputFile]:
        """Return the files that these paths, folders, patterns and URLs name. Raises ConfigError if
        a name matches no file of a known kind, and CheckpointError if an object store fails."""
        return input_files(names)

    @abstractmethod
    def texts(self, names: Sequence[str], output: str) -> Iterator[str]:
        """Return an iterator over the texts of these files, for a command that writes all vectors
        into one file, `output`. Raises ConfigError if the rows are images, and the errors of
        `read_texts`."""

    def kept_columns(
        self, names: Sequence[str], id_column: str | None, keep: tuple[str, ...]
    ) -> tuple[str | None, tuple[str, ...]]:
        """Return the id column and the other input columns to keep in the result, given those that
        the user asks for. Raises ConfigError if such rows have no columns to choose from."""
        return id_column, keep

    @abstractmethod
    def types(self, files: Sequence[InputFile], kept: Sequence[str]) -> dict[str, Any]:
        """Return the Arrow types of the `kept` columns. Raises ConfigError if a file lacks a column
        of `kept` or `self.columns`, or has it with a wrong type."""

    def settings(self, files: Sequence[InputFile]) -> dict[str, Any]:
        """Return the fields of BulkJob that only rows of this kind have."""
        return {}

    @abstractmethod
    def read(
        self, files: Sequence[InputFile], columns: Sequence[str], start: Place = START
    ) -> Iterator[tuple[Place, Block]]:
        """Yield the rows from `start` on, in order, as blocks with the place of their first row.
        Raises ConfigError, CheckpointError or StoreUnreachable if a file cannot be read."""

    @abstractmethod
    def inputs(self, block: Block) -> list[RowInputs]:
        """Return the inputs of each row of a block."""

    def problem(self, row: RowInputs) -> str | None:
        """Return why a row that could be read cannot be embedded, or None if it can."""
        return None

    @abstractmethod
    def digest(self, row: RowInputs) -> bytes:
        """Return the BLAKE2b digest of the inputs of a row, DIGEST_BYTES long."""

    @abstractmethod
    def rows_per_call(self, outputs: Collection[OutputName]) -> int:
        """Return how many rows to give to one call of `embed`."""

    @abstractmethod
    def describe(self, embedder: "Embedder") -> dict[str, Any]:
        """Return what the results of such rows depend on, as data for JSON: the model, its settings
        and the kind of rows."""

    @abstractmethod
    def embed(
        self,
        embedder: "Embedder",
        rows: Sequence[RowInputs],
        outputs: Sequence[OutputName],
        options: dict[str, Any],
    ) -> dict[OutputName, Any]:
        """Return the `outputs` of all rows by name. `options` are other arguments of
        `Embedder.encode_outputs`, whose errors this raises."""

    @abstractmethod
    def spec(self, routes: "Routes", name: str) -> "ModelSpec":
        """Return the spec of the route that embeds such rows. Raises WrongTask if there is none;
        the message calls the model `name`."""

    def named_routes(self, routes: "Routes") -> list[str]:
        """Return the routes if a prompt must name one of them, or an empty list if it need not."""
        return []

    def unused_flags(self, spec: "ModelSpec") -> tuple[str, ...]:
        """Return the flags of `jaxembed embed` that such rows do not take with a model, so that
        using one is an error."""
        return ()


@dataclass(frozen=True)
class TextRows(RowSource):
    """Rows of one or several texts, each in its own column."""

    columns: tuple[str, ...] = ("text",)
    digest_column = "text_digest"

    def texts(self, names: Sequence[str], output: str) -> Iterator[str]:
        (column,) = self.columns
        return read_texts(names, column)

    def types(self, files: Sequence[InputFile], kept: Sequence[str]) -> dict[str, Any]:
        types = column_types(files, kept)
        check_columns(files, self.columns)
        return types

    def read(
        self, files: Sequence[InputFile], columns: Sequence[str], start: Place = START
    ) -> Iterator[tuple[Place, Block]]:
        return read_rows(files, columns, start)

    def inputs(self, block: Block) -> list[RowInputs]:
        columns = [as_list(block.columns[name]) for name in self.columns]
        return list(zip(*columns, strict=True))

    def problem(self, row: RowInputs) -> str | None:
        return next(filter(None, map(problem_of, row, self.columns)), None)

    def digest(self, row: RowInputs) -> bytes:
        state = blake2b(digest_size=DIGEST_BYTES)
        for text in row:
            encoded = text.encode(errors="surrogatepass")
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        return state.digest()

    def rows_per_call(self, outputs: Collection[OutputName]) -> int:
        return MULTI_VECTOR_ROWS_A_CALL if "multi_vector" in outputs else ROWS_A_CALL

    def describe(self, embedder: "Embedder") -> dict[str, Any]:
        """Return what the results of texts depend on: weights, dtype and settings of the text."""
        spec, routes = embedder.spec, embedder.model.text_routes.items()
        model = {
            "content": {name: route.spec.content_hash for name, route in routes},
            "adapters": msgspec.to_builtins(spec.adapters),
            "dtype": embedder.dtype,
            "pooling": list(spec.pooling),
        }
        return {"model": model | settings_of_texts(embedder)}

    def embed(
        self,
        embedder: "Embedder",
        rows: Sequence[RowInputs],
        outputs: Sequence[OutputName],
        options: dict[str, Any],
    ) -> dict[OutputName, Any]:
        """Return the `outputs` of rows of one text each, by name."""
        return embedder.encode_outputs([text for (text,) in rows], outputs, **options)

    def spec(self, routes: "Routes", name: str) -> "ModelSpec":
        return routes.main

    def named_routes(self, routes: "Routes") -> list[str]:
        return list(routes.specs) if routes.default is None else []


def settings_of_texts(embedder: "Embedder") -> dict[str, Any]:
    """Return the settings of a model on which its results of texts depend, as data for JSON."""
    return {
        "max_input_tokens": embedder.max_input_tokens,
        "prompts": dict(embedder.spec.prompts),
        "text": given(asdict(embedder.model.text), {"workers"}),  # workers change no result
    }


def given(options: dict[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return the options without those named in `without` and those that are None."""
    return {
        name: value for name, value in options.items() if name not in without and value is not None
    }


class RowStream:
    """Reads the rows of files from a place on, a given number at a time. It reads one block ahead,
    so that `ended` is true as soon as the last row is taken."""

    def __init__(
        self, source: RowSource, files: Sequence[InputFile], columns: Sequence[str], at: Place
    ):
        """Begin at the place `at`. `columns` are the columns to read."""
        self.at = at  # the place of the next row
        self.share = 0.0  # share of the input that has been read, 0 to 1
        self._blocks = source.read(files, columns, at)
        self._next_block = next(self._blocks, None)
        sizes = np.array([file.size for file in files], float)
        self._shares = sizes / max(sizes.sum(), 1.0)  # each file's share of the input's bytes
        self._shares_before = np.cumsum(self._shares) - self._shares

    @property
    def ended(self) -> bool:
        """Whether no row is left."""
        return self._next_block is None

    def take(self, count: int) -> list[tuple[Place, Block]]:
        """Return the next `count` rows, as blocks with the places of their first rows. Return fewer
        rows at the end, or once the images of the rows take IMAGE_BYTES_AT_A_TIME."""
        taken, image_bytes = [], 0
        while count and image_bytes < IMAGE_BYTES_AT_A_TIME and self._next_block is not None:
            place, block = self._next_block
            if block.count > count:
                self._next_block = Place(place.file, place.row + count), block.sliced(count)
                block = block.sliced(0, count)
            else:
                self._next_block = next(self._blocks, None)
            taken.append((place, block))
            count -= block.count
            if (image := block.image) is not None:
                image_bytes += len(image) if isinstance(image, bytes) else image.nbytes
            self.at = Place(place.file, place.row + block.count)
            self.share = self._shares_before[place.file] + block.share * self._shares[place.file]
        return taken
