"""What a job leaves in its folder: what it does, and the parts of its result.

It goes on only as what it was begun as. A part is a Parquet file of a fixed number of input rows,
whose footer says whose it is and where the next one begins. A later job may find results there.
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
MOST_DIFFERENCES = 10  # in a message
OPTIONS = {  # what sets a value of a job, by the beginning of its path; the first that fits counts
    "inputs": "INPUTS",
    "part_rows": "--part-rows",
    "columns": "--keep or --id-column",
    "id_column": "--id-column",
    "text_columns": "--text-column, --query-column, --second-column or --image-column",
    "pdf_dpi": "--pdf-dpi",
    "computation.task": "the command",
    "computation.of": "--image-column or INPUTS",
    "computation.outputs": "--outputs",
    "computation.raw_scores": "--raw-scores",
    "computation.ranges": "the calibration of the model",
    "computation.options.adapter": "--adapter-name",
    "computation.options.dimensions": "--dimensions",
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
FOOTER = b"jaxembed"  # the key in the metadata of a file
ROW_GROUP_BYTES = 32 * 2**20  # about, before compression
MOST_SKIPPED_NAMED = 1000  # of a part
MOST_OF_A_REASON = 100  # of these with the same reason: one bad file must not hide the others
GROUPS_KEPT = 4  # row groups in memory


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
        with suppress(OSError), self._stack:
            self._writer.close()
            # an OSError, which is suppressed; so the unfinished file does not take its name
            raise InterruptedError

    def _flush(self) -> None:
        if self._waiting:
            table = arrow().Table.from_batches(self._waiting, self._schema)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._waiting = []


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


class BulkJob(msgspec.Struct, frozen=True):
    """Everything that the rows of the parts depend on."""

    inputs: list[InputFile]
    part_rows: int
    columns: dict[str, str]  # those kept, each with its Arrow type
    id_column: str | None
    computation: dict[str, Any]  # as a Computation describes itself
    text_columns: list[str]  # or the column of images
    format: int = FORMAT
    pdf_dpi: int | msgspec.UnsetType = msgspec.UNSET  # of image files with PDF files among them

    @property
    def digest(self) -> str:
        """SHA-256 of the job, by which its parts are known."""
        return _digest(self)

    @property
    def of_texts(self) -> str:
        """SHA-256 of what the result of a text depends on, whichever job it is of."""
        return _digest(self.computation)


def refuse_others(folder: Destination) -> None:
    """Raise ConfigError if a folder has files, and none of a job."""
    names = folder.names()
    if names and JOB not in names:
        raise ConfigError(
            f"--output {folder}: this folder has files and no {JOB}: it is of no job to go on "
            f"with. Choose a new one. Found: {', '.join(names[:3])}"
        )


def begin(job: BulkJob, folder: Destination) -> None:
    """Write the job into its folder, unless it is there.

    Raises ConfigError if another job was begun there, even if no part of it is finished. The
    message names the options that differ, each with both values.
    """
    if JOB in folder.names():
        differences = list(_differences(_builtins(read_job(folder)), _builtins(job)))
        if not differences:
            return
        more = len(differences) - MOST_DIFFERENCES
        lines = differences[:MOST_DIFFERENCES] + [f"and {more} more"] * (more > 0)
        anew = (
            ""
            if finished_parts(folder)
            else (f", or remove {JOB} to begin anew: no part of that job is finished")
        )
        raise ConfigError(
            f"--output {folder}: a job was begun there with another input or other options. "
            f"Go on with those, or choose another folder{anew}:\n  " + "\n  ".join(lines)
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
    """Remove the job from its folder if no part of it is finished, so that a corrected command may
    begin there. Stores may forbid it; then the job stays."""
    if not finished_parts(folder):
        with suppress(JaxembedError, OSError):
            folder.remove(JOB)


def read_job(folder: Destination) -> BulkJob:
    """The job of a folder. Raises ConfigError if there is none that can be read."""
    try:
        with folder.opened(JOB) as file:
            return msgspec.json.decode(file.read(), type=BulkJob)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder}: {JOB} is not that of a job: {error}") from error


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def _builtins(job: BulkJob) -> dict[str, Any]:
    described = msgspec.json.decode(msgspec.json.encode(job))
    return described | {"inputs": {one["name"]: one for one in described["inputs"]}}


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """A line for each value that differs, by its path and the option that sets it."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            place = f"{path}.{name}" if path else str(name)
            if name not in before:
                yield f"{_named(place)}: not there before, now {shown(now[name])}"
            elif name not in now:
                yield f"{_named(place)}: {shown(before[name])} before, not there now"
            else:
                yield from _differences(before[name], now[name], place)
    elif before != now:
        yield f"{_named(path)}: {shown(before)} before, now {shown(now)}"


def _named(path: str) -> str:
    """The option that sets the value at a path of a job, and the path; the path alone for a value
    that no option sets."""
    for beginning, option in OPTIONS.items():
        if path == beginning or path.startswith(f"{beginning}."):
            return f"{option} ({path})"
    return path


class Earlier:
    """The results of an earlier job, by the digests of their texts or images.

    One takes 40 bytes of memory. Rows are read a row group at a time, so that texts in about the
    order they had before are found fastest.
    """

    def __init__(self, folder: Destination, of_texts: str, fields: Sequence[Any], digest: str):
        """`digest` is the column of digests. Raises ConfigError if the folder has no job, or its
        results depend on something else."""
        self._folder = folder
        self._names = [field.name for field in fields]
        if read_job(folder).of_texts != of_texts:
            raise ConfigError(
                f"--reuse {folder}: its results are of another model or of other options; its "
                "_job.json has them under `computation`"
            )
        digests, groups, rows = [], [], []  # digests are uint64 [n, 2]
        self._groups: list[tuple[int, int]] = []  # part, row group
        for part in finished_parts(folder):
            with reading_part(folder, part) as (source, _):
                for group in range(source.metadata.num_row_groups):
                    column = source.read_row_group(group, [digest]).column(digest).combine_chunks()
                    first, count = column.offset * DIGEST_BYTES, len(column) * DIGEST_BYTES
                    flat = np.frombuffer(column.buffers()[1], np.uint8)[first : first + count]
                    found = flat.copy().view(np.uint64).reshape(-1, 2)
                    digests.append(found)
                    groups.append(np.full(len(found), len(self._groups), np.int32))
                    rows.append(np.arange(len(found), dtype=np.int32))
                    self._groups.append((part, group))
        every = np.concatenate([np.zeros((0, 2), np.uint64), *digests])
        order = np.lexsort((every[:, 1], every[:, 0]))
        self._digests = every[order]
        self._group_of = np.concatenate([np.zeros(0, np.int32), *groups])[order]
        self._row_of = np.concatenate([np.zeros(0, np.int32), *rows])[order]
        self._read = lru_cache(GROUPS_KEPT)(self._read_group)

    def find(self, digests: Sequence[bytes]) -> np.ndarray:
        """The number of each digest here, int64, -1 where there is none."""
        asked = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        found = np.full(len(asked), -1, np.int64)
        at = np.searchsorted(self._digests[:, 0], asked[:, 0])
        for index, (place, digest) in enumerate(zip(at.tolist(), asked, strict=True)):
            while place < len(self._digests) and self._digests[place, 0] == digest[0]:
                if self._digests[place, 1] == digest[1]:
                    found[index] = place
                    break
                place += 1
        return found

    def take(self, numbers: np.ndarray) -> list[Any]:
        """The results of these numbers, an Arrow array for each field."""
        pa = arrow()
        groups = self._group_of[numbers]
        tables, order = [], []
        for group in np.unique(groups).tolist():
            chosen = np.flatnonzero(groups == group)
            tables.append(self._read(group).take(pa.array(self._row_of[numbers[chosen]])))
            order.append(chosen)
        table = pa.concat_tables(tables).take(pa.array(np.argsort(np.concatenate(order))))
        return [table.column(name).combine_chunks() for name in self._names]

    def _read_group(self, group: int) -> Any:
        part, number = self._groups[group]
        with reading_part(self._folder, part) as (source, _):
            return source.read_row_group(number, self._names)
