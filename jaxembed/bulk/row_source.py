"""RowSource: what the rows of a job hold, texts or images, and how they are read and embedded.
RowStream: the rows of some files, as many at a time as asked for."""

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
MULTI_VECTOR_ROWS_A_CALL = 256  # each has a vector a token
DIGEST_BYTES = 16
IMAGE_BYTES_AT_A_TIME = 64 * 2**20

RowInputs = tuple[Any, ...]  # what is computed of one row: its texts, or its image


class RowSource(ABC):
    """Rows of one kind: where they are read, what tells them apart, and how a model embeds them."""

    columns: tuple[str, ...]  # of the input, with what is computed; none if that is whole files
    digest_column: ClassVar[str]  # of the result
    unused_flags: ClassVar[tuple[str, ...]] = ()  # of `jaxembed embed`, that mean nothing here

    def files(self, names: Sequence[str]) -> list[InputFile]:
        """The files that these names stand for. Raises ConfigError as `input_files`."""
        return input_files(names)

    @abstractmethod
    def texts(self, names: Sequence[str], output: str) -> Iterator[str]:
        """The texts of these files for the file `output`, which holds vectors alone. Raises as
        `read_texts`, and ConfigError for rows that are no texts."""

    def kept_columns(
        self, names: Sequence[str], id_column: str | None, keep: tuple[str, ...]
    ) -> tuple[str | None, tuple[str, ...]]:
        """The column of ids and the others that are kept in the result, if a user asks for these.
        Raises ConfigError if such rows have no columns to choose from."""
        return id_column, keep

    @abstractmethod
    def types(self, files: Sequence[InputFile], kept: Sequence[str]) -> dict[str, Any]:
        """The Arrow types of columns to keep. Raises ConfigError if a file lacks one of them or of
        `columns`, or has one of another type."""

    def settings(self, files: Sequence[InputFile]) -> dict[str, Any]:
        """Fields of a BulkJob that only rows of this kind have."""
        return {}

    @abstractmethod
    def read(
        self, files: Sequence[InputFile], columns: Sequence[str], start: Place = START
    ) -> Iterator[tuple[Place, Block]]:
        """The rows from `start` on, in order, each block with the place of its first row. Raises
        ConfigError if a file cannot be read."""

    @abstractmethod
    def inputs(self, block: Block) -> list[RowInputs]:
        """What is computed of each row of a block."""

    def problem(self, row: RowInputs) -> str | None:
        """What is wrong with a row that could be read, None if nothing is."""
        return None

    @abstractmethod
    def digest(self, row: RowInputs) -> bytes:
        """BLAKE2b of what is computed of a row, DIGEST_BYTES long."""

    @abstractmethod
    def rows_a_call(self, outputs: Collection[OutputName]) -> int:
        """How many rows are embedded together."""

    @abstractmethod
    def describe(self, embedder: "Embedder") -> dict[str, Any]:
        """What tells results of a model for such rows apart from those of another model, of other
        settings or of rows of another kind, as JSON."""

    @abstractmethod
    def embed(
        self,
        embedder: "Embedder",
        rows: Sequence[RowInputs],
        outputs: Sequence[OutputName],
        options: dict[str, Any],
    ) -> dict[OutputName, Any]:
        """The outputs of all rows, as `Embedder.encode_outputs` gives them."""

    @abstractmethod
    def spec(self, routes: "Routes", name: str) -> "ModelSpec":
        """The spec of what embeds such rows in a model called `name`. Raises WrongTask if nothing
        does."""

    def named_routes(self, routes: "Routes") -> list[str]:
        """The routes one of which a prompt must name; none where rows have a route without."""
        return []


@dataclass(frozen=True)
class TextRows(RowSource):
    """Rows of one text or several, each in a column of its own."""

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

    def rows_a_call(self, outputs: Collection[OutputName]) -> int:
        return MULTI_VECTOR_ROWS_A_CALL if "multi_vector" in outputs else ROWS_A_CALL

    def describe(self, embedder: "Embedder") -> dict[str, Any]:
        spec, routes = embedder.spec, embedder.model.text_routes.items()
        model = {
            "content": {name: one.spec.content_hash for name, one in routes},
            "adapters": msgspec.to_builtins(spec.adapters),
            "dtype": embedder.dtype,
            "pooling": list(spec.pooling),
            "max_input_tokens": embedder.max_input_tokens,
            "prompts": dict(spec.prompts),
            "text": given(asdict(embedder.model.text), {"workers"}),
        }
        return {"model": model}

    def embed(
        self,
        embedder: "Embedder",
        rows: Sequence[RowInputs],
        outputs: Sequence[OutputName],
        options: dict[str, Any],
    ) -> dict[OutputName, Any]:
        return embedder.encode_outputs([text for (text,) in rows], outputs, **options)

    def spec(self, routes: "Routes", name: str) -> "ModelSpec":
        return routes.main

    def named_routes(self, routes: "Routes") -> list[str]:
        return list(routes.specs) if routes.default is None else []


def given(options: dict[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Options as JSON, without those named and those that have no value."""
    return {
        name: value for name, value in options.items() if name not in without and value is not None
    }


class RowStream:
    """The rows of some files from a place on, as many at a time as asked for. One block is read
    ahead, so that `ended` is true with the last row."""

    def __init__(
        self, source: RowSource, files: Sequence[InputFile], columns: Sequence[str], at: Place
    ):
        self.at = at  # the place of the next row
        self.share = 0.0  # of the input that was read
        self._blocks = source.read(files, columns, at)
        self._next = next(self._blocks, None)
        sizes = np.array([one.size for one in files], float)
        self._each = sizes / max(sizes.sum(), 1.0)  # share of each file in the input
        self._before = np.cumsum(self._each) - self._each

    @property
    def ended(self) -> bool:
        """Whether no row is left."""
        return self._next is None

    def take(self, count: int) -> list[tuple[Place, Block]]:
        """The next rows, so many or what is left; fewer where their images take more than
        IMAGE_BYTES_AT_A_TIME."""
        taken, image_bytes = [], 0
        while count and image_bytes < IMAGE_BYTES_AT_A_TIME and self._next is not None:
            place, block = self._next
            if block.count > count:
                self._next = Place(place.file, place.row + count), block.sliced(count)
                block = block.sliced(0, count)
            else:
                self._next = next(self._blocks, None)
            taken.append((place, block))
            count -= block.count
            if (image := block.image) is not None:
                image_bytes += len(image) if isinstance(image, bytes) else image.nbytes
            self.at = Place(place.file, place.row + block.count)
            self.share = self._before[place.file] + block.share * self._each[place.file]
        return taken
