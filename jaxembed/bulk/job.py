"""The files in the folder of a job: its description, and the parts of its result.

A job resumes only with the inputs and options of its description. A part is a Parquet file of a
fixed number of input rows; its footer names the job and the place where the next part begins. A
later job can reuse the results.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from jaxembed.bulk.destination import Destination
from jaxembed.bulk.row_source import DIGEST_BYTES
from jaxembed.bulk.sources import InputFile, Place, arrow, parquet
from jaxembed.errors import ConfigError, JaxembedError
from jaxembed.platform.files import shown

JOB = "_job.json"
FORMAT = 1
MAX_DIFFERENCES = 10  # differences that a message lists
OPTIONS = {  # by prefix of a field's path: the option that sets the field; the first match wins
    "inputs": "INPUTS",
    "part_rows": "--part-rows",
    "columns": "--keep or --id-column",
    "id_column": "--id-column",
    "text_columns": "--text-column, --query-column, --second-column or --image-column",
    "pdf_dpi": "--pdf-dpi",
    "pdf_text": "--pdf-text",
    "computation.task": "the command",
    "computation.of": "--image-column or INPUTS",
    "computation.outputs": "--outputs",
    "computation.raw_scores": "--raw-scores",
    "computation.aggregation_strategy": "--aggregation-strategy",
    "computation.ranges": "the calibration of the model",
    "computation.options.adapter": "--adapter-name",
    "computation.options.dimensions": "--dimensions",
    "computation.options.instruction": "--instruction",
    "computation.options.output_dtype": "--output-dtype",
    "computation.options.prompt_name": "--prompt-name",
    "computation.options.role": "--role",
    "computation.model.adapters": "--adapter",
    "computation.model.dtype": "--dtype",
    "computation.model.max_input_tokens": "--max-input-length",
    "computation.model.pooling": "--pooling",
    "computation.model.text.auto_truncate": "--auto-truncate",
    "computation.model.text.default_prompt_name": "--default-prompt-name",
    "computation.model.text.default_prompt": "--default-prompt",
    "computation.model": "--model or --revision",
    "format": "the version of jaxembed",
}

PART = "part-{:05d}.parquet"
PART_NAME = re.compile(r"part-(\d{5,})\.parquet")
FOOTER = b"jaxembed"  # the key of the footer in the metadata of a Parquet file
ROW_GROUP_BYTES = 32 * 2**20  # approximately, before compression
MAX_SKIPPED_NAMED = 1000  # skipped rows that a footer lists
MAX_OF_A_REASON = 100  # listed rows with the same reason: one bad file must not hide other reasons
GROUPS_KEPT = 4  # row groups of an earlier job that stay in memory


class Skipped(msgspec.Struct, frozen=True):
    """An input row without a result."""

    row: int  # its number in the input
    where: str  # the file and the line
    reason: str


class Footer(msgspec.Struct, frozen=True):
    """The content of the footer of a part."""

    job: str  # BulkJob.digest
    of_texts: str  # BulkJob.of_texts
    part: int
    rows: int  # result rows in this file
    end: Place  # where the rows of the next part begin
    skipped: int  # input rows without a result
    skipped_rows: list[Skipped] = []  # the first skipped rows, at most MAX_SKIPPED_NAMED


class PartWriter:
    """Writes one part, in row groups of about ROW_GROUP_BYTES, and lists the skipped rows."""

    def __init__(self, folder: Destination, part: int, schema: Any, outputs: Sequence[str]):
        """Begin the file of the part with the number `part`. `schema` is its Arrow schema.
        `outputs` are names of result columns; they are not compressed, because numbers hardly
        shrink."""
        leaves = [leaf for field in schema for leaf in _leaves(field.type, field.name)]
        compressed = [leaf for leaf in leaves if leaf.split(".")[0] not in outputs]
        self._stack = ExitStack()
        self._writer = parquet().ParquetWriter(
            self._stack.enter_context(folder.writing(PART.format(part))),
            schema,
            compression={leaf: "zstd" if leaf in compressed else "none" for leaf in leaves},
            use_dictionary=compressed,
            write_statistics=compressed,
        )
        self._part, self._schema = part, schema
        self._waiting: list[Any] = []
        self._rows = self._skipped = 0
        self._listed: list[Skipped] = []
        self._reasons: Counter[str] = Counter()

    def write(self, rows: Any, skipped: Sequence[Skipped]) -> None:
        """Append a RecordBatch of results. Count the skipped rows, and list the first ones."""
        self._waiting.append(rows)
        self._rows += rows.num_rows
        if sum(batch.nbytes for batch in self._waiting) >= ROW_GROUP_BYTES:
            self._flush()
        self._skipped += len(skipped)
        for row in skipped:
            is_rare = self._reasons[row.reason] < MAX_OF_A_REASON
            if is_rare and len(self._listed) < MAX_SKIPPED_NAMED:
                self._reasons[row.reason] += 1
                self._listed.append(row)

    def footer(self, job: str, of_texts: str, end: Place) -> Footer:
        """Return the footer of the part. Call it after the last `write`. `end` is the place of the
        first row of the next part."""
        return Footer(job, of_texts, self._part, self._rows, end, self._skipped, self._listed)

    def finish(self, footer: Footer) -> None:
        """Write the remaining rows and the footer, and give the file its final name."""
        with self._stack:
            self._flush()
            encoded = msgspec.json.encode(footer)
            self._writer.add_key_value_metadata({FOOTER.decode(): encoded.decode()})
            self._writer.close()

    def abandon(self) -> None:
        """Discard the unfinished file."""
        with suppress(OSError), self._stack:
            self._writer.close()
            # this OSError makes the folder discard the file, and is suppressed here
            raise InterruptedError

    def _flush(self) -> None:
        if self._waiting:
            table = arrow().Table.from_batches(self._waiting, self._schema)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._waiting = []


def _leaves(kind: Any, path: str) -> Iterator[str]:
    """Yield the paths of the leaf columns that Parquet stores for a column of the Arrow type
    `kind`. `path` is the name of the column."""
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
    """Return the sorted numbers of the finished parts in a folder."""
    matches = [PART_NAME.fullmatch(name) for name in folder.names()]
    return sorted(int(match[1]) for match in matches if match)


@contextmanager
def reading_part(folder: Destination, part: int) -> Iterator[tuple[Any, Footer]]:
    """Open the part with this number as a context, which gives its ParquetFile and its footer.
    Raises ConfigError if the file is not a part of a job."""
    name = PART.format(part)
    with folder.opened(name) as file:
        try:
            source = parquet().ParquetFile(file)
            footer = msgspec.json.decode(source.metadata.metadata[FOOTER], type=Footer)
        except (arrow().ArrowInvalid, KeyError, TypeError, msgspec.DecodeError, OSError) as error:
            raise ConfigError(
                f"{folder}: {name} is not a part of a job: {error}; remove it and run again"
            ) from error
        yield source, footer


def read_footer(folder: Destination, part: int) -> Footer:
    """Return the footer of a part. Raises ConfigError if the file is not a part of a job."""
    with reading_part(folder, part) as (_, footer):
        return footer


class BulkJob(msgspec.Struct, frozen=True):
    """The description of a job: everything that the rows of its parts depend on."""

    inputs: list[InputFile]
    part_rows: int
    columns: dict[str, str]  # the kept columns, each with its Arrow type
    id_column: str | None
    computation: dict[str, Any]  # from Computation.describe
    text_columns: list[str]  # the columns whose texts or images are computed
    format: int = FORMAT
    pdf_dpi: int | msgspec.UnsetType = msgspec.UNSET  # set if PDF files are among the inputs
    pdf_text: bool | msgspec.UnsetType = msgspec.UNSET  # set if their texts are computed too

    @property
    def digest(self) -> str:
        """The SHA-256 of the job, which the footers of its parts have."""
        return _digest(self)

    @property
    def of_texts(self) -> str:
        """The SHA-256 of the computation. Jobs with the same hash compute equal rows equally."""
        return _digest(self.computation)


def refuse_others(folder: Destination) -> None:
    """Raise ConfigError if a folder has files but no job."""
    names = folder.names()
    if names and JOB not in names:
        raise ConfigError(
            f"--output {folder}: this folder has files but no {JOB}, so it does not belong to a "
            f"job that can be continued. Choose a new folder. Found: {', '.join(names[:3])}"
        )


def begin(job: BulkJob, folder: Destination) -> None:
    """Write the description of the job into its folder, unless the folder has the same description.

    Raises ConfigError if another job was begun there, even if none of its parts is finished; the
    message names the options that differ, each with both values. Also raises ConfigError if the
    name of an input is not UTF-8.
    """
    if JOB in folder.names():
        differences = list(_differences(_builtins(read_job(folder)), _builtins(job)))
        if not differences:
            return
        more = len(differences) - MAX_DIFFERENCES
        lines = differences[:MAX_DIFFERENCES] + [f"and {more} more"] * (more > 0)
        again = f", or remove {JOB} to start again: no part of that job is finished"
        raise ConfigError(
            f"--output {folder}: a job with other inputs or options was started there. Continue "
            f"with those, or choose another folder{'' if finished_parts(folder) else again}:\n  "
            + "\n  ".join(lines)
        )
    try:
        content = msgspec.json.format(msgspec.json.encode(job, order="sorted"), indent=1)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the name of an input is not UTF-8: {error.object!r}; rename it"
        ) from error
    with folder.writing(JOB) as path:
        path.write_bytes(content)


def withdraw(folder: Destination) -> None:
    """Remove the description of the job if no part is finished, so that a corrected command can
    begin in the folder. Errors are ignored, because stores may forbid removal."""
    if not finished_parts(folder):
        with suppress(JaxembedError, OSError):
            folder.remove(JOB)


def read_job(folder: Destination) -> BulkJob:
    """Read the description of the job in a folder. Raises ConfigError if it is missing or damaged,
    and the errors of a store."""
    try:
        with folder.opened(JOB) as file:
            return msgspec.json.decode(file.read(), type=BulkJob)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder}: {JOB} does not describe a job: {error}") from error


def _digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def _builtins(job: BulkJob) -> dict[str, Any]:
    """Return the job as data for JSON, in which `inputs` is a dict by name."""
    described = msgspec.json.decode(msgspec.json.encode(job))
    return described | {"inputs": {file["name"]: file for file in described["inputs"]}}


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each value that differs: the option that sets it, its path, both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            inner_path = f"{path}.{name}" if path else str(name)
            if name not in before:
                yield f"{_with_option(inner_path)}: missing before, now {shown(now[name])}"
            elif name not in now:
                yield f"{_with_option(inner_path)}: {shown(before[name])} before, missing now"
            else:
                yield from _differences(before[name], now[name], inner_path)
    elif before != now:
        yield f"{_with_option(path)}: {shown(before)} before, now {shown(now)}"


def _with_option(path: str) -> str:
    """Return the name of a value for messages: the option that sets it and its path, or the path
    alone if no option sets it."""
    for prefix, option in OPTIONS.items():
        if path == prefix or path.startswith(f"{prefix}."):
            return f"{option} ({path})"
    return path


class EarlierResults:
    """The results of an earlier job, which are found by the digests of their texts or images.

    The index takes about 40 bytes of memory for each result. Results are read one row group at a
    time, which is fastest if rows come in about the same order as in the earlier job.
    """

    def __init__(self, folder: Destination, of_texts: str, fields: Sequence[Any], digest: str):
        """Read all digests, which are in the column `digest`. `fields` are the Arrow fields of the
        results. Raises ConfigError unless the folder has a job with this `BulkJob.of_texts`."""
        self._folder = folder
        self._names = [field.name for field in fields]
        if read_job(folder).of_texts != of_texts:
            raise ConfigError(
                f"--reuse {folder}: its results come from another model or other options; its "
                f"{JOB} has them under `computation`"
            )
        digests: list[np.ndarray] = []  # the digests of each row group, as uint64 [n, 2]
        self._groups: list[tuple[int, int]] = []  # part, row group
        for part in finished_parts(folder):
            with reading_part(folder, part) as (source, _):
                for group in range(source.metadata.num_row_groups):
                    column = source.read_row_group(group, [digest]).column(digest).combine_chunks()
                    # the column may be a slice of its buffer: find its bytes
                    first, size = column.offset * DIGEST_BYTES, len(column) * DIGEST_BYTES
                    flat = np.frombuffer(column.buffers()[1], np.uint8)[first : first + size]
                    digests.append(flat.copy().view(np.uint64).reshape(-1, 2))
                    self._groups.append((part, group))
        unsorted = np.concatenate([np.zeros((0, 2), np.uint64), *digests])
        # sorted by the first half of a digest, then by the second, for `find`
        order = np.lexsort((unsorted[:, 1], unsorted[:, 0]))
        self._digests = unsorted[order]
        # for each digest: the index of its group in _groups, and the index of its row in the group
        sizes = np.array([len(in_group) for in_group in digests], np.int64)
        self._group_of = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[order]
        rows = [np.arange(size, dtype=np.int32) for size in (0, *sizes)]
        self._row_of = np.concatenate(rows)[order]
        self._read = lru_cache(GROUPS_KEPT)(self._read_group)

    def find(self, digests: Sequence[bytes]) -> np.ndarray:
        """Return the number of the result of each digest, which `take` accepts, as int64. It is -1
        if there is no result."""
        wanted = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        numbers = np.full(len(wanted), -1, np.int64)
        first_matches = np.searchsorted(self._digests[:, 0], wanted[:, 0])
        # compare all digests with the same first half
        for index, (number, digest) in enumerate(zip(first_matches.tolist(), wanted, strict=True)):
            while number < len(self._digests) and self._digests[number, 0] == digest[0]:
                if self._digests[number, 1] == digest[1]:
                    numbers[index] = number
                    break
                number += 1
        return numbers

    def take(self, numbers: np.ndarray) -> list[Any]:
        """Return the results with these numbers, in the order of the numbers, as an Arrow array for
        each field."""
        pa = arrow()
        groups = self._group_of[numbers]
        tables, positions = [], []  # by row group: results, and their positions in `numbers`
        for group in np.unique(groups).tolist():
            in_group = np.flatnonzero(groups == group)
            tables.append(self._read(group).take(pa.array(self._row_of[numbers[in_group]])))
            positions.append(in_group)
        table = pa.concat_tables(tables).take(pa.array(np.argsort(np.concatenate(positions))))
        return [table.column(name).combine_chunks() for name in self._names]

    def _read_group(self, group: int) -> Any:
        """Read the results of a row group as an Arrow table."""
        part, number = self._groups[group]
        with reading_part(self._folder, part) as (source, _):
            return source.read_row_group(number, self._names)
