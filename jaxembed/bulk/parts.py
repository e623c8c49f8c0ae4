"""Parts of a result: Parquet files of a fixed number of input rows, whose footers say whose they
are and where the next one begins."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec

from jaxembed.bulk.destination import Destination
from jaxembed.bulk.sources import Place, arrow, parquet
from jaxembed.errors import ConfigError

PART = "part-{:05d}.parquet"
PART_NAME = re.compile(r"part-(\d{5,})\.parquet")
FOOTER = b"jaxembed"  # the key in the metadata of a file
ROW_GROUP_BYTES = 32 * 2**20  # about, before compression
MOST_SKIPPED_NAMED = 1000  # of a part
MOST_OF_A_REASON = 100  # of these with the same reason: one bad file must not hide the others


class Skipped(msgspec.Struct, frozen=True):
    """A row that was left out."""

    row: int
    where: str  # the file and the line
    reason: str


class Footer(msgspec.Struct, frozen=True):
    """What the footer of a part says."""

    job: str  # its digest
    of_texts: str  # what the result of a text depends on
    part: int
    rows: int  # in this file
    end: Place  # where the rows of the next part begin
    skipped: int
    skipped_rows: list[Skipped] = []  # at most MOST_SKIPPED_NAMED, MOST_OF_A_REASON of a reason


class PartWriter:
    """Writes one part, in groups of about ROW_GROUP_BYTES, and notes the rows that are left out."""

    def __init__(self, folder: Destination, part: int, schema: Any, outputs: Sequence[str]):
        """Columns of `outputs` are not compressed: numbers hardly shrink."""
        leaves = [leaf for field in schema for leaf in _leaves(field.type, field.name)]
        texts = [leaf for leaf in leaves if leaf.split(".")[0] not in outputs]
        self._stack = ExitStack()
        self._writer = parquet().ParquetWriter(
            self._stack.enter_context(folder.writing(PART.format(part))),
            schema,
            compression={leaf: "zstd" if leaf in texts else "none" for leaf in leaves},
            use_dictionary=texts,
            write_statistics=texts,
        )
        self._part, self._schema = part, schema
        self._waiting: list[Any] = []
        self._rows = self._skipped = 0
        self._named: list[Skipped] = []
        self._reasons: Counter[str] = Counter()

    def write(self, rows: Any, skipped: Sequence[Skipped]) -> None:
        """Append a RecordBatch, and note rows that were left out."""
        self._waiting.append(rows)
        self._rows += rows.num_rows
        if sum(one.nbytes for one in self._waiting) >= ROW_GROUP_BYTES:
            self._flush()
        self._skipped += len(skipped)
        for one in skipped:
            few = self._reasons[one.reason] < MOST_OF_A_REASON
            if few and len(self._named) < MOST_SKIPPED_NAMED:
                self._reasons[one.reason] += 1
                self._named.append(one)

    def footer(self, job: str, of_texts: str, end: Place) -> Footer:
        """The footer of the part, once all its rows are written."""
        return Footer(job, of_texts, self._part, self._rows, end, self._skipped, self._named)

    def finish(self, footer: Footer) -> None:
        """Write the rest and the footer, and give the file its name."""
        with self._stack:
            self._flush()
            encoded = msgspec.json.encode(footer)
            self._writer.add_key_value_metadata({FOOTER.decode(): encoded.decode()})
            self._writer.close()

    def abandon(self) -> None:
        """Leave nothing of it."""
        with suppress(_Abandoned, OSError), self._stack:
            self._writer.close()
            raise _Abandoned

    def _flush(self) -> None:
        if self._waiting:
            table = arrow().Table.from_batches(self._waiting, self._schema)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._waiting = []


class _Abandoned(Exception):
    """So that an unfinished file does not take its name."""


def _leaves(kind: Any, path: str) -> Iterator[str]:
    """The columns that Parquet makes of a type, by their paths in a file."""
    types = arrow().types
    if types.is_struct(kind):
        for field in kind:
            yield from _leaves(field.type, f"{path}.{field.name}")
    elif types.is_map(kind):
        yield from _leaves(kind.key_type, f"{path}.key_value.key")
        yield from _leaves(kind.item_type, f"{path}.key_value.value")
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        yield from _leaves(kind.value_type, f"{path}.list.element")
    else:
        yield path


def finished_parts(folder: Destination) -> list[int]:
    """The numbers of the parts in a folder."""
    matches = [PART_NAME.fullmatch(name) for name in folder.names()]
    return sorted(int(match[1]) for match in matches if match)


@contextmanager
def reading_part(folder: Destination, part: int) -> Iterator[tuple[Any, Footer]]:
    """A part as a ParquetFile, and its footer. Raises ConfigError if it is no part."""
    name = PART.format(part)
    with folder.opened(name) as file:
        try:
            source = parquet().ParquetFile(file)
            footer = msgspec.json.decode(source.metadata.metadata[FOOTER], type=Footer)
        except (arrow().ArrowInvalid, KeyError, TypeError, msgspec.DecodeError, OSError) as error:
            raise ConfigError(
                f"{folder}: {name} is no part of a job: {error}; remove it and run again"
            ) from error
        yield source, footer


def read_footer(folder: Destination, part: int) -> Footer:
    """The footer of a part. Raises ConfigError if it is no part."""
    with reading_part(folder, part) as (_, footer):
        return footer
