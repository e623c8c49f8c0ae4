"""Reads columns of rows from files, in bounded memory: .txt, .jsonl, .csv, .tsv, Parquet and Arrow,
local or in object stores.

Only Parquet, Arrow and the types of columns need pyarrow, an extra.
"""

import csv
import glob
import gzip
import io
import json
import re
import stat
import sys
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from jaxembed.errors import ConfigError, InvalidInput, counted
from jaxembed.memory import MIB
from jaxembed.platform import object_store
from jaxembed.platform.extras import require

ROWS_A_BLOCK = 1024
BLOCK_BYTES = 8 * MIB  # a block of lines ends once it has more bytes
LINE_BYTES = 28_000_000  # maximum of a line or a row of CSV: 20 MB as base64 fit
AT_ONCE = MIB  # bytes; of a longer line of JSON only the wanted columns are decoded
BEYOND_INT64 = 2**63  # orjson may read larger integers as floats
ROWS_LOOKED_AT = 1000  # rows of a .jsonl file that are read to find the types of its columns
LARGE_VALUES_BUFFER = 2**20  # bytes of a column of Parquet that are read at a time
LINES = (".txt", ".jsonl", ".ndjson", ".csv", ".tsv")
BINARY = (".parquet", ".arrow", ".feather")
COMPRESSED = ".gz"  # after a suffix of LINES
ROW_FILES = (*LINES, *(f"{suffix}{COMPRESSED}" for suffix in LINES), *BINARY)  # suffixes
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PDF = ".pdf"
IMAGE_FILES = (*IMAGES, PDF)
EXTRAS = dict.fromkeys(BINARY, "parquet") | dict.fromkeys(IMAGES, "images") | {PDF: "pdf"}
STANDARD_INPUT = "-"
WILD = frozenset("*?[")
COLUMNS_NAMED = 10  # columns that a message lists


class InputFile(msgspec.Struct, frozen=True):
    """An input file as it was found. If its size or version changes, its content has changed."""

    name: str  # a path or a URL
    size: int  # bytes
    version: str  # its modification time in ns, or the store's ETag or the like


class Place(NamedTuple):
    """The place of a row: the index of its file, and its index among the rows of that file."""

    file: int
    row: int


START = Place(0, 0)


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one file."""

    columns: dict[str, Any]  # a list or an Arrow array for each column; None: no value
    count: int  # number of rows
    bad: dict[int, str]  # by index in the block: the problem of a row whose values mean nothing
    share: float  # share of the file that is read at the end of this block, 0 to 1
    image: bytes | np.ndarray | None = None  # if the block is an image: a file's content or pixels

    def sliced(self, start: int, stop: int | None = None) -> "Block":
        """Return a block of the rows from `start` to before `stop`, or to the end."""
        stop = self.count if stop is None else stop
        columns = {name: values[start:stop] for name, values in self.columns.items()}
        bad = {index - start: why for index, why in self.bad.items() if start <= index < stop}
        return Block(columns, stop - start, bad, self.share, self.image)


class BadRow(Exception):
    """A row cannot be read; the message says why."""


Columns = Sequence[str]
ByteStream = Any  # a binary file of any library
# (file, name, columns, skip, rows_a_block) -> blocks of the rows of a file from row `skip` on
Reader = Callable[[ByteStream, str, Columns, int, int], Iterator[Block]]


def input_files(names: Sequence[str], suffixes: Sequence[str] = ROW_FILES) -> list[InputFile]:
    """Return the files that these paths, folders, patterns and URLs name, in the order of `names`.

    The files of a folder or a pattern are sorted by name; only files with one of the `suffixes` are
    returned, except those whose name begins with `.` or, unless they are images, with `_`. Raises
    ConfigError if a name matches no file, a file is of an unknown kind, or the extra that reads it
    is missing; and CheckpointError if an object store fails.
    """
    files = [file for name in names for file in _files(name, suffixes)]
    for file in files:
        suffix = _suffix(file.name, suffixes)
        if suffix in EXTRAS:
            require(EXTRAS[suffix], file.name)  # raises if it is not installed
    return files


def read_rows(
    files: Sequence[InputFile],
    columns: Columns,
    start: Place = START,
    rows_a_block: int = ROWS_A_BLOCK,
) -> Iterator[tuple[Place, Block]]:
    """Yield the rows from `start` on, in order, as blocks with the place of their first row. A
    block has at most `rows_a_block` rows.

    Raises ConfigError if a file cannot be read or lacks a column, and CheckpointError or
    StoreUnreachable if an object store fails.
    """
    for file_index in range(start.file, len(files)):
        skip = start.row if file_index == start.file else 0
        name = files[file_index].name
        with opened(name) as file:
            row = skip
            for block in READERS[_suffix(name)](file, name, columns, skip, rows_a_block):
                yield Place(file_index, row), block
                row += block.count


def read_texts(names: Sequence[str], column: str = "text") -> Iterator[str]:
    """Return an iterator over the texts in a column of these files, in order.

    The call raises the errors of `input_files`. The iterator raises those of `read_rows`, and
    InvalidInput for a row without a text. No row is left out, so that the n-th result always
    belongs to the n-th row.
    """
    return _texts(input_files(names), column)


def _texts(files: Sequence[InputFile], column: str) -> Iterator[str]:
    for place, block in read_rows(files, [column]):
        for index, text in enumerate(as_list(block.columns[column])):
            problem = block.bad.get(index) or problem_of(text, column)
            if problem:
                raise InvalidInput(f"{row_name(files, place, index)} {problem}")
            yield text


def problem_of(text: Any, column: str) -> str | None:
    """Return the problem of a value that should be a text, which messages put after the name of its
    row; or None."""
    if text is None:
        return f"has no value for `{column}` (options such as --text-column name the columns)"
    if not isinstance(text, str):
        return f"has `{column}` of type {type(text).__name__}; wanted a string"
    return None if text else "is empty: there is nothing to embed"


def row_name(files: Sequence[InputFile], place: Place, index: int) -> str:
    """Return how messages call row `index` of a block that starts at `place`: `a.csv row 3`."""
    name = files[place.file].name
    if is_of_images(name):
        return f"{name} page {place.row + index + 1}" if is_pdf(name) else name
    what = "line" if _suffix(name) in (".txt", ".jsonl", ".ndjson") else "row"
    return f"{name} {what} {place.row + index + 1}"


def is_of_images(name: str) -> bool:
    """Whether a file is an image or a PDF file, by its name."""
    return name.lower().endswith(IMAGE_FILES)


def is_pdf(name: str) -> bool:
    """Whether a file is a PDF file, by its name."""
    return name.lower().endswith(PDF)


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is of strings."""
    return str(kind) in ("string", "large_string")


def column_types(files: Sequence[InputFile], columns: Columns) -> dict[str, Any]:
    """Return the Arrow type of each column, which is the same in all files.

    Columns of .csv are strings. If the first file is .jsonl, the types are those that Arrow infers
    from its first ROWS_LOOKED_AT rows. A later .jsonl file is not read here; its rows with other
    types become bad rows. Raises ConfigError if a file lacks a column, or has it with another type.
    """
    common: dict[str, Any] = {}
    first = ""
    for file in files if columns else ():
        if common and _suffix(file.name) in (".jsonl", ".ndjson"):
            continue  # its rows are checked when they are read
        with opened(file.name) as stream:
            types = _types(stream, file.name, columns)
        for name, kind in types.items():
            if common and common[name] != kind:
                raise ConfigError(
                    f"{file.name}: column `{name}` is {kind}, and {common[name]} in {first}; "
                    "a column must have the same type in all files"
                )
        common, first = common or types, first or file.name
    return common


def check_columns(
    files: Sequence[InputFile],
    columns: Columns,
    *,
    fits: Callable[[Any], bool] = is_text,
    wanted: str = "strings",
) -> None:
    """Raise ConfigError if a file lacks a column, or has one whose Arrow type does not fit. The
    message asks for `wanted`. Files of .jsonl are not checked."""
    for file in files:
        if _suffix(file.name) in (".jsonl", ".ndjson"):
            continue  # each row may have other types
        with opened(file.name) as stream:
            for name, kind in _types(stream, file.name, columns).items():
                if not fits(kind):
                    raise ConfigError(
                        f"{file.name}: column `{name}` is {kind}; wanted a column of {wanted}"
                    )


def as_list(values: Any) -> list:
    """Return the values of a column of a Block as Python objects."""
    return values if isinstance(values, list) else values.to_pylist()


def arrow() -> Any:
    """Import and return pyarrow. Raises ConfigError if it is not installed."""
    require("parquet", "Parquet and Arrow files")
    import pyarrow

    return pyarrow


def parquet() -> Any:
    """Import and return pyarrow.parquet. Raises ConfigError if it is not installed."""
    arrow()
    import pyarrow.parquet

    return pyarrow.parquet


@contextmanager
def opened(name: str) -> Iterator[ByteStream]:
    """Open a file for reading, as a context: a local one, an object of a store, or standard input.

    Raises ConfigError if a local file cannot be opened, and CheckpointError or StoreUnreachable if
    an object cannot be opened or read.
    """
    if name == STANDARD_INPUT:
        yield sys.stdin.buffer
    elif object_store.is_url(name, of_data=True):
        with object_store.open_object(name) as file:
            yield file
    else:
        with _open(name) as file:
            yield file


def _open(name: str) -> ByteStream:
    try:
        return open(name, "rb")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error


def _files(name: str, suffixes: Sequence[str]) -> list[InputFile]:
    """Return the files of one path, folder, pattern or URL. Raises ConfigError if there are none or
    one is of an unknown kind, and CheckpointError if an object store fails."""
    if name == STANDARD_INPUT:
        return [InputFile(name, size=0, version="")]
    path = Path(name).expanduser()
    if object_store.is_url(name, of_data=True):
        objects = [InputFile(*found) for found in object_store.find_objects(name)]
        files = [file for file in objects if file.name.rstrip("/") == name.rstrip("/")]
        if not files:  # no object has this URL: it is a folder or a pattern
            base = re.split(r"[*?[]", name)[0].rpartition("/")[0]
            files = [file for file in objects if _is_data(file.name.removeprefix(base), suffixes)]
            files.sort(key=lambda file: file.name)
    elif path.is_dir():
        data = [
            file
            for file in path.rglob("*")
            if not file.is_dir() and _is_data(str(file.relative_to(path)), suffixes)
        ]
        files = [_local(file, suffixes) for file in sorted(data)]
    elif not path.exists() and name.endswith("/"):
        raise ConfigError(f"cannot read {name}: there is no such folder")
    elif not path.exists() and WILD.intersection(name):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        data = [file for file in matches if not file.is_dir() and _is_data(file.name, suffixes)]
        files = [_local(file, suffixes) for file in sorted(data)]
    else:
        files = [_local(path, suffixes)]
    if not files:
        raise ConfigError(
            f"{name}: there are no input files; expected names that end in {_endings(suffixes)}"
        )
    return files


def _is_data(relative: str, suffixes: Sequence[str]) -> bool:
    """Whether a file of a folder is an input, by its path relative to the folder."""
    signs = "." if is_of_images(relative) else ("_", ".")  # cameras begin names with `_`
    hidden = any(part.startswith(signs) for part in Path(relative).parts if part != "/")
    return not hidden and relative.lower().endswith(tuple(suffixes))


def _local(path: Path, suffixes: Sequence[str]) -> InputFile:
    """Describe a local file. Raises ConfigError if it is of an unknown kind or cannot be read."""
    _suffix(str(path), suffixes)  # raises for an unknown kind, even without a file
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
        raise ConfigError(
            f"{path} is not a regular file; to read what a program writes, give - as the input"
        )
    return InputFile(str(path), status.st_size, str(status.st_mtime_ns))


def _suffix(name: str, suffixes: Sequence[str] = ROW_FILES) -> str:
    """Return the suffix of a file without .gz. Raises ConfigError if no suffix matches its name."""
    if name == STANDARD_INPUT:
        return ".txt"  # standard input is lines of text
    suffix = next((end for end in suffixes if name.lower().endswith(end)), None)
    if suffix is None:
        raise ConfigError(
            f"{name}: expected a file that ends in {_endings(suffixes)}, or - for lines of text on "
            "standard input"
        )
    return suffix.removesuffix(COMPRESSED)


def _endings(suffixes: Sequence[str]) -> str:
    """Return the suffixes as a list for messages, in which compression is named once."""
    bare = [suffix for suffix in suffixes if not suffix.endswith(COMPRESSED)]
    lines = f"{', '.join(LINES)} (also with {COMPRESSED})" if LINES[0] in bare else ""
    others = [suffix for suffix in bare if suffix not in LINES]
    return ", ".join(filter(None, [lines, *others]))


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn the errors that libraries raise for a broken file into ConfigError."""
    try:
        yield
    except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"cannot read {name}: {reason}") from error


def _lines(file: ByteStream, name: str) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed and without a byte order mark. A line longer than
    LINE_BYTES is truncated to LINE_BYTES + 1 bytes, so that `_check_length` still refuses it."""
    with _reading(name), ExitStack() as stack:
        lines = file
        if name.lower().endswith(COMPRESSED):
            lines = stack.enter_context(gzip.open(file))
        elif not isinstance(file, io.BufferedIOBase):  # readline of object stores has no limit
            lines = io.BufferedReader(file)
            stack.callback(lines.detach)  # otherwise the reader closes the file
        first = True
        while line := lines.readline(LINE_BYTES + 1):
            rest = line  # the rest of a longer line is skipped
            while len(rest) > LINE_BYTES and not rest.endswith(b"\n"):
                rest = lines.readline(LINE_BYTES + 1)
            yield line.removeprefix(b"\xef\xbb\xbf") if first else line
            first = False


def _check_length(size: int) -> None:
    if size > LINE_BYTES:
        raise BadRow(f"has over {LINE_BYTES} bytes, which is the limit; split it")


def _next_rows(rows: Iterator[Any], count: int) -> list[Any]:
    """Return the next `count` rows, or fewer once they exceed BLOCK_BYTES. A row is a line, or a
    list of the fields of CSV."""
    taken, size = [], 0
    for row in rows:
        taken.append(row)
        size += len(row) if isinstance(row, bytes) else sum(map(len, row))
        if len(taken) == count or size > BLOCK_BYTES:
            break
    return taken


def _blocks(
    rows: Iterator[Any],
    parse: Callable[[Any], Sequence[Any]],
    columns: Columns,
    file: ByteStream,
    rows_a_block: int,
) -> Iterator[Block]:
    """Yield blocks of at most `rows_a_block` rows. `parse` returns the values of the columns in a
    row, or raises BadRow for a bad row. `rows` reads from `file`, whose position tells the share
    that is read."""
    size = 0
    if file.seekable():
        position = file.tell()
        size = file.seek(0, io.SEEK_END)
        file.seek(position)
    while unparsed := _next_rows(rows, rows_a_block):
        values: list[Sequence[Any]] = []
        bad: dict[int, str] = {}
        for index, row in enumerate(unparsed):
            try:
                values.append(parse(row))
            except BadRow as problem:
                bad[index] = str(problem)
                values.append((None,) * len(columns))
        by_column = [list(column) for column in zip(*values, strict=True)]
        share = min(file.tell() / size, 1.0) if size else 0.0
        yield Block(dict(zip(columns, by_column, strict=True)), len(unparsed), bad, share)


def _read_txt(
    file: ByteStream, name: str, columns: Columns, skip: int, rows_a_block: int
) -> Iterator[Block]:
    """Yield lines from line `skip` on as texts, which are the one column whatever its name. Raises
    ConfigError if there are more `columns`."""
    if len(columns) > 1:
        raise ConfigError(f"{name}: lines of text have no column `{columns[1]}`")

    def parse(line: bytes) -> tuple[str]:
        _check_length(len(line))
        try:
            return (line.rstrip(b"\r\n").decode(),)
        except UnicodeDecodeError as error:
            raise BadRow(f"is not UTF-8: {error.reason} at byte {error.start + 1}") from None

    return _blocks(islice(_lines(file, name), skip, None), parse, columns, file, rows_a_block)


def _read_jsonl(
    file: ByteStream, name: str, columns: Columns, skip: int, rows_a_block: int
) -> Iterator[Block]:
    """Yield the rows of JSON lines from line `skip` on. A line is an object, or a string, which is
    the value of the first column."""

    def parse(line: bytes) -> Sequence[Any]:
        _check_length(len(line))
        if len(line) > AT_ONCE:
            line = _shortened(line, columns)
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            problem = "not UTF-8" if "utf-8" in str(error).lower() else f"not JSON: {error}"
            raise BadRow(f"is {problem}") from None
        if isinstance(value, dict):
            values = [value.get(column) for column in columns]
            if any(isinstance(item, float) and abs(item) >= BEYOND_INT64 for item in values):
                exact = json.loads(line)  # orjson reads large integers as floats
                values = [exact.get(column) for column in columns]
            return values
        if isinstance(value, str):
            return [value, *[None] * (len(columns) - 1)]
        raise BadRow(f"is neither a string nor an object with a string `{columns[0]}`")

    return _blocks(islice(_lines(file, name), skip, None), parse, columns, file, rows_a_block)


def _shortened(line: bytes, columns: Columns) -> bytes:
    """Return a long line of JSON with only these columns of its object. A string stays as it is.

    Raises BadRow for a line that is neither an object nor a string, and for a long column that is
    not a string: decoded lists and objects may take thirty times the memory of their JSON.
    """
    if line.lstrip().startswith(b'"'):
        return line
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRow("is a long line, and not a valid JSON object") from None
    kept = {column: fields[column] for column in columns if column in fields}
    for column, value in kept.items():
        size = len(value)
        if size > AT_ONCE and memoryview(value)[:1] != b'"':
            raise BadRow(f"has `{column}` of {size} bytes of JSON; only a string may be that long")
    return msgspec.json.encode(kept)


def _read_csv(
    file: ByteStream, name: str, columns: Columns, skip: int, rows_a_block: int
) -> Iterator[Block]:
    """Yield the rows of CSV from row `skip` on. The first line names the columns and is not counted
    as a row."""
    rows = _csv_rows(file, name)
    header = next(rows, [])
    indices = _column_indices(columns, header, name)

    def parse(row: list[str]) -> Sequence[str]:
        if len(row) != len(header):
            raise BadRow(f"has {counted(len(row), 'field')}, and the header has {len(header)}")
        values = [row[index] for index in indices]
        try:  # bytes that are not UTF-8 are surrogates here, which cannot be encoded
            "".join(values).encode()
        except UnicodeEncodeError:
            raise BadRow("is not UTF-8") from None
        return values

    return _blocks(islice(rows, skip, None), parse, columns, file, rows_a_block)


def _csv_rows(file: ByteStream, name: str) -> Iterator[list[str]]:
    """Yield the rows of CSV, the header first. Raises ConfigError for a row over LINE_BYTES."""
    csv.field_size_limit(LINE_BYTES)  # the default of the module is 128 kB
    rows = 0  # read so far, with the header and empty lines
    size = 0  # bytes of the lines since the last row

    def lines() -> Iterator[str]:
        nonlocal size
        for line in _lines(file, name):
            size += len(line)
            if size > LINE_BYTES:  # such as after a quote that is never closed
                raise ValueError(f"row {rows + 1} has over {LINE_BYTES} bytes, which is the limit")
            yield line.decode(errors="surrogateescape")

    delimiter = "\t" if _suffix(name) == ".tsv" else ","
    with _reading(name):
        for row in csv.reader(lines(), delimiter=delimiter):
            size = 0
            rows += 1
            if row:  # not an empty line
                yield row


def _column_indices(columns: Columns, header: Sequence[str], name: str) -> list[int]:
    """Return the index of each column in the header. Raises ConfigError for a column that the
    header lacks or has several times."""
    for column in columns:
        if column not in header:
            shown = ", ".join(header[:COLUMNS_NAMED]) + ", ..." * (len(header) > COLUMNS_NAMED)
            raise ConfigError(f"{name} has no column `{column}`. It has: {shown or 'none'}")
        if list(header).count(column) > 1:
            raise ConfigError(f"{name} has several columns `{column}`; rename all but one")
    return [header.index(column) for column in columns]


def _read_parquet(
    file: ByteStream, name: str, columns: Columns, skip: int, rows_a_block: int
) -> Iterator[Block]:
    """Yield the rows of Parquet from row `skip` on, without reading earlier row groups."""
    pq = parquet()
    are_large = rows_a_block < ROWS_A_BLOCK  # small blocks are for large values
    with _reading(name):
        # without these options it takes 700 MB to read a file of 600 MB in large values, not 16 MB
        options = {"buffer_size": LARGE_VALUES_BUFFER, "pre_buffer": False} if are_large else {}
        source = pq.ParquetFile(file, **options)
    _column_indices(columns, source.schema_arrow.names, name)  # raises unless each is there once
    metadata, num_groups = source.metadata, source.metadata.num_row_groups
    sizes = (metadata.row_group(group).num_rows for group in range(num_groups))
    starts = [0, *accumulate(sizes)]  # the first row of each group, and the number of all rows
    first = bisect_right(starts, skip) - 1  # the group that has row `skip`
    batches = source.iter_batches(
        rows_a_block,
        row_groups=list(range(first, num_groups)),
        columns=list(columns),
        use_threads=not are_large,  # threads read ahead
    )
    return _arrow_blocks(batches, name, columns, skip, rows_a_block, starts[first], starts[-1])


def _arrow_blocks(
    batches: Iterator[Any],
    name: str,
    columns: Columns,
    skip: int,
    rows_a_block: int,
    next_row: int,
    total_rows: int,
) -> Iterator[Block]:
    """Yield blocks of the rows of Arrow's `batches` from row `skip` of the file on. The first batch
    starts with row `next_row`. The file has `total_rows` rows; 0 means that this is not known."""
    with _reading(name):
        for batch in batches:
            for start in range(0, batch.num_rows, rows_a_block):
                part = batch.slice(start, rows_a_block)
                # `next_row` is the first row of this slice, and then of the next one
                drop, next_row = max(skip - next_row, 0), next_row + part.num_rows
                if drop >= part.num_rows:
                    continue
                part = part.slice(drop)
                values = {}
                for column in columns:
                    array = part.column(column)
                    kind = _plain_type(array.type)
                    values[column] = array if kind == array.type else array.cast(kind)
                yield Block(values, part.num_rows, {}, next_row / total_rows if total_rows else 0.0)


def _plain_type(kind: Any) -> Any:
    """Return the type without dictionary encoding, because each file has its own dictionary. A view
    becomes a large string or binary, because Arrow cannot `take` rows of views."""
    pa = arrow()
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    views = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
    return views.get(str(kind), kind)


def _read_arrow(
    file: ByteStream, name: str, columns: Columns, skip: int, rows_a_block: int
) -> Iterator[Block]:
    """Yield the rows of an Arrow file or stream from row `skip` on. Raises ConfigError if a column
    is missing."""
    source = _arrow_file(file, name)
    _column_indices(columns, source.schema.names, name)  # raises unless each is there once
    has_index = hasattr(source, "num_record_batches")  # Arrow's file format, not its stream format
    batches = map(source.get_batch, range(source.num_record_batches)) if has_index else iter(source)
    return _arrow_blocks(batches, name, columns, skip, rows_a_block, next_row=0, total_rows=0)


def _arrow_file(file: ByteStream, name: str) -> Any:
    """Open an Arrow file, or an Arrow stream, whose name also ends in .arrow."""
    pa = arrow()
    with _reading(name):
        try:
            return pa.ipc.open_file(file)
        except pa.ArrowInvalid:
            file.seek(0)
            return pa.ipc.open_stream(file)


READERS: dict[str, Reader] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}


def _types(file: ByteStream, name: str, columns: Columns) -> dict[str, Any]:
    """Return the Arrow types of the columns of a file. Raises ConfigError if it lacks a column."""
    pa, suffix = arrow(), _suffix(name)
    if suffix in BINARY:
        with _reading(name):
            schema = (
                parquet().read_schema(file)
                if suffix == ".parquet"
                else _arrow_file(file, name).schema
            )
        _column_indices(columns, schema.names, name)  # raises unless each is there once
        return {column: _plain_type(schema.field(column).type) for column in columns}
    if suffix not in (".jsonl", ".ndjson"):
        # called for its errors: it checks the columns, and reads no row (skip 0, blocks of 1 row)
        READERS[suffix](file, name, columns, 0, 1)
        return dict.fromkeys(columns, pa.string())
    values: dict[str, list] = {column: [] for column in columns}  # the values of the first rows
    for block in _read_jsonl(file, name, columns, skip=0, rows_a_block=ROWS_A_BLOCK):
        for column in columns:
            values[column] += block.columns[column]
        if len(values[columns[0]]) >= ROWS_LOOKED_AT:
            break
    types = {column: _common_type(rows[:ROWS_LOOKED_AT]) for column, rows in values.items()}
    is_null = pa.types.is_null  # a column without any value: it gets strings
    return {column: pa.string() if is_null(kind) else kind for column, kind in types.items()}


def _common_type(values: list) -> Any:
    """Return the Arrow type of the values. If their types differ, return the Arrow type of the most
    common Python type that Arrow can convert, or strings if there is none."""
    pa = arrow()
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        kinds = Counter(type(value) for value in values if value is not None)
    for kind, _ in kinds.most_common():
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            return pa.array([value for value in values if type(value) is kind]).type
    return pa.string()
