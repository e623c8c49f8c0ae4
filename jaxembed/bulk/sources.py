"""Reads rows of columns from files: .txt, .jsonl, .csv, .tsv, Parquet and Arrow, here or in object
stores, in bounded memory. Knows nothing of models.

Only Parquet, Arrow and typed columns need pyarrow, an extra.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from jaxembed.errors import ConfigError, InvalidInput
from jaxembed.memory import MIB
from jaxembed.platform import object_store
from jaxembed.platform.extras import require

ROWS_A_BLOCK = 1024
BLOCK_BYTES = 8 * MIB  # of lines: a block that has more ends
LINE_BYTES = 28_000_000  # of a line, or a row of CSV: an image of 20 MB as base64 fits
AT_ONCE = MIB  # a longer line of JSON is not decoded whole
BEYOND_INT64 = 2**63  # from which on orjson reads integers as floats
ROWS_LOOKED_AT = 1000  # of .jsonl, for the types of its columns
LARGE_VALUES_BUFFER = 2**20  # bytes of a column of Parquet that are read at a time
LINES = (".txt", ".jsonl", ".ndjson", ".csv", ".tsv")
BINARY = (".parquet", ".arrow", ".feather")
COMPRESSED = ".gz"  # after a suffix of LINES
ROW_FILES = (*LINES, *(f"{suffix}{COMPRESSED}" for suffix in LINES), *BINARY)  # suffixes
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PDF = ".pdf"
IMAGE_FILES = (*IMAGES, PDF)  # whose rows are images and pages
EXTRAS = dict.fromkeys(BINARY, "parquet") | dict.fromkeys(IMAGES, "images") | {PDF: "pdf"}
STANDARD_INPUT = "-"
WILD = frozenset("*?[")
COLUMNS_NAMED = 10  # names in a message


class InputFile(msgspec.Struct, frozen=True):
    """A file of rows as it was found. Another size or version means another content."""

    name: str  # a path or a URL
    size: int  # bytes
    version: str  # the time of its last change in ns, or what its store calls the content


class Place(NamedTuple):
    """Where the next row is: the number of its file, and how many rows of that come before."""

    file: int
    row: int


START = Place(0, 0)


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one file."""

    columns: dict[
        str, Any
    ]  # of each column a list, or an Arrow array; None where there is no value
    count: int
    bad: dict[int, str]  # what is wrong with a row, by its index here; its values mean nothing
    share: float  # of the file that was read with this block
    image: bytes | np.ndarray | None = None  # of one row: its file, or the colours of a page

    def sliced(self, start: int, stop: int | None = None) -> "Block":
        """The rows from `start` to before `stop`, or to the end."""
        stop = self.count if stop is None else stop
        columns = {name: values[start:stop] for name, values in self.columns.items()}
        bad = {index - start: why for index, why in self.bad.items() if start <= index < stop}
        return Block(columns, stop - start, bad, self.share, self.image)


class BadRow(Exception):
    """A row cannot be read; the message says why."""


Columns = Sequence[str]
ByteStream = Any  # a binary file, of whichever library
# The rows of a file from number `skip` on, so many a block: (file, name, columns, skip, many).
Reader = Callable[[ByteStream, str, Columns, int, int], Iterator[Block]]


def input_files(names: Sequence[str], suffixes: Sequence[str] = ROW_FILES) -> list[InputFile]:
    """The files that these paths, folders, patterns and URLs name, in this order; those of one
    folder or pattern by name. Of these only files of the `suffixes` are taken. Left out are names
    that begin with `.`, and but for images those that begin with `_`.

    Raises ConfigError if a name is of no file, a file is of no kind that can be read, or the extra
    that reads it is not installed.
    """
    found = [file for name in names for file in _files(name, suffixes)]
    for file in found:
        suffix = _suffix(file.name, suffixes)
        if suffix in EXTRAS:
            require(EXTRAS[suffix], file.name)
    return found


def read_rows(
    files: Sequence[InputFile],
    columns: Columns,
    start: Place = START,
    rows_a_block: int = ROWS_A_BLOCK,
) -> Iterator[tuple[Place, Block]]:
    """The rows from `start` on, in order, each block with the place of its first row.

    Raises ConfigError if a file cannot be read, or has no such column.
    """
    for number in range(start.file, len(files)):
        skip = start.row if number == start.file else 0
        name = files[number].name
        with opened(name) as file:
            row = skip
            for block in READERS[_suffix(name)](file, name, columns, skip, rows_a_block):
                yield Place(number, row), block
                row += block.count


def read_texts(names: Sequence[str], column: str = "text") -> Iterator[str]:
    """The texts of these files, one after the other, read lazily.

    Raises ConfigError at once if a file is not there or of no kind that can be read. During
    iteration it raises InvalidInput for an empty or wrong row: none is left out, so that row n of a
    result is always of row n here.
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
    """What is wrong with a text, None if nothing is."""
    if text is None:
        return f"has no `{column}`, or null (options such as --text-column name columns)"
    if not isinstance(text, str):
        return f"has `{column}` of type {type(text).__name__}; wanted a string"
    return None if text else "is empty: there is nothing to embed"


def row_name(files: Sequence[InputFile], place: Place, index: int) -> str:
    """What messages call the row `index` of a block that starts at `place`."""
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
    """The Arrow type of each column, the same in all files.

    Columns of .csv are strings. Those of .jsonl are what Arrow makes of the first ROWS_LOOKED_AT
    rows, where no file before has types; rows with others are bad. Raises ConfigError if a file
    lacks a column, or has it with another type.
    """
    found: dict[str, Any] = {}
    first = ""
    for file in files if columns else ():
        if found and _suffix(file.name) in (".jsonl", ".ndjson"):
            continue  # its rows are held against the types one by one
        with opened(file.name) as stream:
            types = _types(stream, file.name, columns)
        for name, kind in types.items():
            if found and found[name] != kind:
                raise ConfigError(
                    f"{file.name}: column `{name}` is {kind}, and {found[name]} in {first}; "
                    "a column has one type in all files"
                )
        found, first = found or types, first or file.name
    return found


def check_columns(
    files: Sequence[InputFile],
    columns: Columns,
    *,
    fits: Callable[[Any], bool] = is_text,
    wanted: str = "strings",
) -> None:
    """Raise ConfigError if a file lacks a column, or has one whose Arrow type does not fit."""
    for file in files:
        if _suffix(file.name) in (".jsonl", ".ndjson"):
            continue  # each row is as it is
        with opened(file.name) as stream:
            for name, kind in _types(stream, file.name, columns).items():
                if not fits(kind):
                    raise ConfigError(
                        f"{file.name}: column `{name}` is {kind}; wanted a column of {wanted}"
                    )


def as_list(values: Any) -> list:
    """The values of a column of a Block as Python objects."""
    return values if isinstance(values, list) else values.to_pylist()


def arrow() -> Any:
    """pyarrow. Raises ConfigError if it is not installed."""
    require("parquet", "Parquet and Arrow files")
    import pyarrow

    return pyarrow


def parquet() -> Any:
    """pyarrow.parquet. Raises ConfigError if it is not installed."""
    arrow()
    import pyarrow.parquet

    return pyarrow.parquet


@contextmanager
def opened(name: str) -> Iterator[ByteStream]:
    """A file here, in an object store or standard input, to read from its start.

    Raises ConfigError if it cannot be opened or read.
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
    """The files of rows that one name stands for. Raises ConfigError if there are none."""
    if name == STANDARD_INPUT:
        return [InputFile(name, 0, "")]
    path = Path(name).expanduser()
    if object_store.is_url(name, of_data=True):
        found = [InputFile(*one) for one in object_store.find_objects(name)]
        files = [one for one in found if one.name.rstrip("/") == name.rstrip("/")]
        if not files:  # those below the URL
            base = re.split(r"[*?[]", name)[0].rpartition("/")[0]
            files = [one for one in found if _is_data(one.name.removeprefix(base), suffixes)]
            files.sort(key=lambda one: one.name)
    elif path.is_dir():
        inside = [one for one in path.rglob("*") if not one.is_dir()]
        data = [one for one in inside if _is_data(str(one.relative_to(path)), suffixes)]
        files = [_local(one, suffixes) for one in sorted(data)]
    elif not path.exists() and WILD.intersection(name):
        matches = [Path(one) for one in glob.glob(str(path), recursive=True)]
        data = [one for one in matches if not one.is_dir() and _is_data(one.name, suffixes)]
        files = [_local(one, suffixes) for one in sorted(data)]
    else:
        files = [_local(path, suffixes)]
    if not files:
        raise ConfigError(f"{name}: there is no file of rows; they end in {_endings(suffixes)}")
    return files


def _is_data(relative: str, suffixes: Sequence[str]) -> bool:
    """Whether a file of a folder is taken for rows, by its path below that."""
    signs = "." if is_of_images(relative) else ("_", ".")  # cameras begin names with `_`
    hidden = any(part.startswith(signs) for part in Path(relative).parts if part != "/")
    return not hidden and relative.lower().endswith(tuple(suffixes))


def _local(path: Path, suffixes: Sequence[str]) -> InputFile:
    _suffix(str(path), suffixes)  # first, for it is known without the file
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
        raise ConfigError(f"{path} is no regular file; what a program writes is read as -")
    return InputFile(str(path), status.st_size, str(status.st_mtime_ns))


def _suffix(name: str, suffixes: Sequence[str] = ROW_FILES) -> str:
    """What a file is, by its name, without compression. Raises ConfigError for others."""
    if name == STANDARD_INPUT:
        return ".txt"
    suffix = next((one for one in suffixes if name.lower().endswith(one)), None)
    if suffix is None:
        raise ConfigError(
            f"{name}: wanted a file that ends in {_endings(suffixes)}, or - for lines"
        )
    return suffix.removesuffix(COMPRESSED)


def _endings(suffixes: Sequence[str]) -> str:
    bare = [one for one in suffixes if not one.endswith(COMPRESSED)]
    lines = f"{', '.join(LINES)} (also with {COMPRESSED})" if LINES[0] in bare else ""
    others = [one for one in bare if one not in LINES]
    return ", ".join(filter(None, [lines, *others]))


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raise what a library says of a broken file as ConfigError."""
    try:
        yield
    except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"cannot read {name}: {reason}") from error


def _lines(file: ByteStream, name: str) -> Iterator[bytes]:
    """The lines of a file, without a byte order mark. Of a line that is longer than LINE_BYTES only
    so many bytes and one more are given."""
    with _reading(name), ExitStack() as stack:
        lines = file
        if name.lower().endswith(COMPRESSED):
            lines = stack.enter_context(gzip.open(file))
        elif not isinstance(file, io.BufferedIOBase):  # those of object stores read whole lines
            lines = io.BufferedReader(file)
            stack.callback(lines.detach)  # or it closes the file
        first = True
        while line := lines.readline(LINE_BYTES + 1):
            rest = line
            while len(rest) > LINE_BYTES and not rest.endswith(b"\n"):
                rest = lines.readline(LINE_BYTES + 1)
            yield line.removeprefix(b"\xef\xbb\xbf") if first else line
            first = False


def _check_length(size: int) -> None:
    if size > LINE_BYTES:
        raise BadRow(f"has over {LINE_BYTES} bytes, which is the limit; divide it")


def _some(rows: Iterator[Any], many: int) -> list[Any]:
    """The next `many` rows, or fewer if they are long. A row is a line, or a list of fields."""
    some, size = [], 0
    for row in rows:
        some.append(row)
        size += len(row) if isinstance(row, bytes) else sum(map(len, row))
        if len(some) == many or size > BLOCK_BYTES:
            break
    return some


def _blocks(
    rows: Iterator[Any],
    parse: Callable[[Any], Sequence[Any]],
    columns: Columns,
    file: ByteStream,
    many: int,
) -> Iterator[Block]:
    """Blocks of rows, each parsed to the values of the columns. A BadRow that `parse` raises is
    noted."""
    size = 0
    if file.seekable():
        at = file.tell()
        size = file.seek(0, io.SEEK_END)
        file.seek(at)
    while some := _some(rows, many):
        values: list[Sequence[Any]] = []
        bad: dict[int, str] = {}
        for index, row in enumerate(some):
            try:
                values.append(parse(row))
            except BadRow as problem:
                bad[index] = str(problem)
                values.append((None,) * len(columns))
        by_column = [list(column) for column in zip(*values, strict=True)]
        share = min(file.tell() / size, 1.0) if size else 0.0
        yield Block(dict(zip(columns, by_column, strict=True)), len(some), bad, share)


def _read_txt(
    file: ByteStream, name: str, columns: Columns, skip: int, many: int
) -> Iterator[Block]:
    """Each line is a text; it has one column, whatever that is called."""
    if len(columns) > 1:
        raise ConfigError(f"{name}: lines of text have no column `{columns[1]}`")

    def parse(line: bytes) -> tuple[str]:
        _check_length(len(line))
        try:
            return (line.rstrip(b"\r\n").decode(),)
        except UnicodeDecodeError as error:
            raise BadRow(f"is not UTF-8: {error.reason} at byte {error.start + 1}") from None

    return _blocks(islice(_lines(file, name), skip, None), parse, columns, file, many)


def _read_jsonl(
    file: ByteStream, name: str, columns: Columns, skip: int, many: int
) -> Iterator[Block]:
    """Each line is an object with the columns, or a string, which is the first of them."""

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
            if any(isinstance(one, float) and abs(one) >= BEYOND_INT64 for one in values):
                exact = json.loads(line)  # which reads integers of any size as such
                values = [exact.get(column) for column in columns]
            return values
        if isinstance(value, str):
            return [value, *[None] * (len(columns) - 1)]
        raise BadRow(f"is no string, and no object with a string `{columns[0]}`")

    return _blocks(islice(_lines(file, name), skip, None), parse, columns, file, many)


def _shortened(line: bytes, columns: Columns) -> bytes:
    """A long line of JSON with these columns of its object alone, or as it is if it is a string.

    Lists and objects may take thirty times their JSON, so a column is a string or short.
    """
    if line.lstrip().startswith(b'"'):
        return line
    try:
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRow("is a long line that is no JSON object, or not valid JSON") from None
    kept = {column: found[column] for column in columns if column in found}
    for column, value in kept.items():
        size = len(value)
        if size > AT_ONCE and memoryview(value)[:1] != b'"':
            raise BadRow(f"has `{column}` of {size} bytes of JSON; only a string may be so long")
    return msgspec.json.encode(kept)


def _read_csv(
    file: ByteStream, name: str, columns: Columns, skip: int, many: int
) -> Iterator[Block]:
    """The first row names the columns; empty lines are no rows."""
    rows = _csv_rows(file, name)
    header = next(rows, [])
    places = _places_of(columns, header, name)

    def parse(row: list[str]) -> Sequence[str]:
        if len(row) != len(header):
            raise BadRow(f"has {len(row)} fields, and the header has {len(header)}")
        values = [row[place] for place in places]
        if not "".join(values).isprintable():  # which what is not UTF-8 is not, and line breaks
            try:
                "".join(values).encode()
            except UnicodeEncodeError:
                raise BadRow("is not UTF-8") from None
        return values

    return _blocks(islice(rows, skip, None), parse, columns, file, many)


def _csv_rows(file: ByteStream, name: str) -> Iterator[list[str]]:
    csv.field_size_limit(LINE_BYTES)  # else texts of over 128 kB are errors
    rows = 0
    size = 0  # bytes of the lines since the last row

    def lines() -> Iterator[str]:
        nonlocal size
        for line in _lines(file, name):
            size += len(line)
            if size > LINE_BYTES:  # such as after a quote that nothing ends
                raise ValueError(f"row {rows + 1} has over {LINE_BYTES} bytes, which is the limit")
            yield line.decode(errors="surrogateescape")

    delimiter = "\t" if _suffix(name) == ".tsv" else ","
    with _reading(name):
        for row in csv.reader(lines(), delimiter=delimiter):
            size = 0
            rows += 1
            if row:
                yield row


def _places_of(columns: Columns, header: Sequence[str], name: str) -> list[int]:
    """Where columns are. Raises ConfigError if one is not there, or not once."""
    for column in columns:
        if column not in header:
            shown = ", ".join(header[:COLUMNS_NAMED]) + ", ..." * (len(header) > COLUMNS_NAMED)
            raise ConfigError(f"{name} has no column `{column}`. It has: {shown or 'none'}")
        if list(header).count(column) > 1:
            raise ConfigError(f"{name} has several columns `{column}`; rename all but one")
    return [header.index(column) for column in columns]


def _read_parquet(
    file: ByteStream, name: str, columns: Columns, skip: int, many: int
) -> Iterator[Block]:
    pq = parquet()
    are_large = many < ROWS_A_BLOCK  # so few rows a block are asked for where values are large
    with _reading(name):
        # else whole columns are read: 700 MB of a file of 600, of which 16 MB are asked for
        how = {"buffer_size": LARGE_VALUES_BUFFER, "pre_buffer": False} if are_large else {}
        source = pq.ParquetFile(file, **how)
    _places_of(columns, source.schema_arrow.names, name)
    total, before, groups = source.metadata.num_rows, 0, []
    for group in range(source.metadata.num_row_groups):
        count = source.metadata.row_group(group).num_rows
        if not groups and before + count <= skip:
            before += count  # without reading it
        else:
            groups.append(group)
    batches = source.iter_batches(
        many,
        row_groups=groups,
        columns=list(columns),
        use_threads=not are_large,  # which read ahead
    )
    return _arrow_blocks(batches, name, columns, skip, many, before, total)


def _arrow_blocks(
    batches: Iterator[Any],
    name: str,
    columns: Columns,
    skip: int,
    many: int,
    before: int,
    total: int,
) -> Iterator[Block]:
    """Blocks of Arrow's batches, the first of which starts with row `before`, from row `skip` on;
    `total` is the number of rows of the file, 0 if it is not known."""
    with _reading(name):
        for batch in batches:
            for start in range(0, batch.num_rows, many):
                part = batch.slice(start, many)
                drop, before = max(skip - before, 0), before + part.num_rows
                if drop >= part.num_rows:
                    continue
                part = part.slice(drop)
                values = {}
                for column in columns:
                    found = part.column(column)
                    kind = _plain_type(found.type)
                    values[column] = found if kind == found.type else found.cast(kind)
                yield Block(values, part.num_rows, {}, before / total if total else 0.0)


def _plain_type(kind: Any) -> Any:
    """A type without a dictionary of its values, which each file would have another of, and no
    view, of which rows cannot be taken."""
    pa = arrow()
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    views = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
    return views.get(str(kind), kind)


def _read_arrow(
    file: ByteStream, name: str, columns: Columns, skip: int, many: int
) -> Iterator[Block]:
    source = _arrow_file(file, name)
    _places_of(columns, source.schema.names, name)
    is_file = hasattr(source, "num_record_batches")  # and no stream
    batches = map(source.get_batch, range(source.num_record_batches)) if is_file else iter(source)
    return _arrow_blocks(batches, name, columns, skip, many, 0, 0)


def _arrow_file(file: ByteStream, name: str) -> Any:
    """The reader of an Arrow file, or of a stream, which also ends in .arrow."""
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
    """The Arrow types of columns of one file."""
    pa, suffix = arrow(), _suffix(name)
    if suffix in BINARY:
        with _reading(name):
            schema = parquet().read_schema(file) if suffix == ".parquet" else None
        schema = schema or _arrow_file(file, name).schema
        _places_of(columns, schema.names, name)
        return {column: _plain_type(schema.field(column).type) for column in columns}
    if suffix not in (".jsonl", ".ndjson"):
        READERS[suffix](file, name, columns, 0, 1)  # which looks at its header
        return dict.fromkeys(columns, pa.string())
    values: dict[str, list] = {column: [] for column in columns}  # of the first rows
    for block in _read_jsonl(file, name, columns, 0, ROWS_A_BLOCK):
        for column in columns:
            values[column] += block.columns[column]
        if len(values[columns[0]]) >= ROWS_LOOKED_AT:
            break
    types = {column: _common_type(some[:ROWS_LOOKED_AT]) for column, some in values.items()}
    is_null = pa.types.is_null  # a column without a value is of strings
    return {column: pa.string() if is_null(kind) else kind for column, kind in types.items()}


def _common_type(values: list) -> Any:
    """The Arrow type of values, or of those of the most common kind."""
    pa = arrow()
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        kinds = Counter(type(value) for value in values if value is not None)
    for kind, _ in kinds.most_common():
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            return pa.array([value for value in values if type(value) is kind]).type
    return pa.string()
