"""Runs a job: reads rows, computes them, and writes them into parts, all three at the same time.

A part is written whole or not at all, and its rows depend on nothing but its number and the job: a
job that is killed and run again gives the rows of an undisturbed one. Vectors of a model may differ
from these by a rounding, where a text was in another batch.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxembed.bulk import job as jobs
from jaxembed.bulk.ahead import ahead
from jaxembed.bulk.computations import Computation, RowInputs
from jaxembed.bulk.destination import Destination, destination
from jaxembed.bulk.image_rows import ImageRows
from jaxembed.bulk.parts import (
    MOST_OF_A_REASON,
    MOST_SKIPPED_NAMED,
    PART,
    Footer,
    PartWriter,
    Skipped,
    finished_parts,
    read_footer,
)
from jaxembed.bulk.reuse import (
    DIGEST_BYTES,
    IMAGE_DIGEST,
    TEXT_DIGEST,
    Earlier,
    image_digest,
    text_digest,
)
from jaxembed.bulk.sources import (
    STANDARD_INPUT,
    START,
    Block,
    InputFile,
    Place,
    arrow,
    as_list,
    check_columns,
    column_types,
    input_files,
    is_pdf,
    problem_of,
    read_rows,
    row_name,
)
from jaxembed.bulk.stream import RowStream
from jaxembed.errors import ConfigError, InputTooLong, InvalidInput
from jaxembed.platform import object_store

logger = logging.getLogger(__name__)

JOB_MANIFEST = "_manifest.json"
SKIPPED = "_skipped.jsonl"
PART_ROWS = 65_536
ROW = "row"  # the column with the number of the row in the input

OnError = Literal["fail", "skip"]


@dataclass(frozen=True)
class Rows:
    """Which rows a job reads, and what of them goes along into the result."""

    inputs: Sequence[str]  # paths, folders, patterns and URLs
    id_column: str | None = None
    keep: tuple[str, ...] = ()
    part_rows: int = PART_ROWS
    on_error: OnError = "fail"
    images: ImageRows | None = None  # None: the computation is of texts

    def files(self) -> list[InputFile]:
        """The files of the inputs. Raises ConfigError as `input_files`."""
        return input_files(self.inputs) if self.images is None else self.images.files(self.inputs)


class JobProgress(NamedTuple):
    """How far a job is."""

    rows: int  # of the input, those of earlier runs included
    share: float  # of the input


@dataclass
class Summary:
    """What a run did."""

    rows: int = 0  # in all parts
    skipped: int = 0
    parts: int = 0
    parts_found: int = 0  # that an earlier run had finished
    reused: int = 0  # rows whose results were taken from elsewhere
    computed: int = 0


class _Chunk(NamedTuple):
    """Rows to compute together, of one part."""

    part: int
    numbers: list[int]  # of the rows in the input
    places: list[tuple[Place, int]]  # for messages: the block's place, the row's index there
    inputs: list[RowInputs]  # what is computed of each row
    kept: list[Any]  # an Arrow array for each column that is kept
    skipped: list[Skipped]
    end: Place  # where the rows after these begin
    closes: bool  # the part
    progress: JobProgress


class _Computed(NamedTuple):
    """A chunk and its results."""

    chunk: _Chunk
    batch: Any  # a RecordBatch
    skipped: list[Skipped]  # rows that could not be computed
    reused: int  # rows


def run_job(
    computation: Computation,
    rows: Rows,
    out: str,
    *,
    reuse: str | None = None,
    on_progress: Callable[[JobProgress], object] = lambda progress: None,
) -> Summary:
    """Compute all rows, and write them as Parquet into the folder or URL `out`.

    Run again after a failure it goes on with the first part that is not there. `reuse` is the
    folder of an earlier job, whose results of equal texts are taken. Raises ConfigError for inputs,
    options or folders that are wrong, InvalidInput for a row that cannot be computed, unless such
    rows are to be skipped, and the errors of the computation.
    """
    _check_places(rows, out, reuse)
    files = rows.files()
    folder = destination(out)
    job, types = _job_of(rows, files, computation)
    digest = TEXT_DIGEST if rows.images is None else IMAGE_DIGEST
    schema = _schema(types, computation, digest)
    jobs.refuse_others(folder)
    with folder.locked():
        jobs.begin(job, folder)
        earlier = None
        if reuse is not None:
            earlier = Earlier(
                destination(reuse, make=False), job.of_texts, computation.fields(), digest
            )
        running = _Run(job, computation, folder, schema, earlier, rows)
        try:
            running.run(on_progress)
        except InvalidInput:
            jobs.withdraw(folder)
            raise
        except OSError as error:
            raise ConfigError(
                f"cannot write {folder}: {error}; finished parts stay: run the same command again"
            ) from error
        if rows.files() != files:
            raise ConfigError(
                f"the input changed while it was read: {folder} is of no one state of it; choose "
                "another folder"
            )
        running.complete()
    return running.summary


def _job_of(
    rows: Rows, files: list[InputFile], computation: Computation
) -> tuple[jobs.BulkJob, dict[str, Any]]:
    """The job, and the types of the columns that it keeps. Raises ConfigError for columns that are
    not there."""
    images = rows.images
    first = [] if rows.id_column is None else [rows.id_column]
    kept = list(dict.fromkeys([*first, *rows.keep]))
    if images is None:
        types = column_types(files, kept)
        check_columns(files, computation.columns)
    else:
        types = images.types(files, kept)
        images.check(files)
    with_pdf = images is not None and any(is_pdf(file.name) for file in files)
    job = jobs.BulkJob(
        inputs=files,
        part_rows=rows.part_rows,
        columns={name: str(kind) for name, kind in types.items()},
        id_column=rows.id_column,
        computation=computation.describe(),
        text_columns=list(computation.columns),
        pdf_dpi=images.pdf_dpi if images is not None and with_pdf else msgspec.UNSET,
    )
    return job, types


def _check_places(rows: Rows, out: str, reuse: str | None) -> None:
    """Raise ConfigError for inputs that cannot be read again, and for a folder that is one of them
    or that of `reuse`."""
    if STANDARD_INPUT in rows.inputs:
        raise ConfigError("standard input cannot be read again by a job that goes on; name a file")
    for name in rows.inputs:
        if _is_inside(out, name):
            raise ConfigError(f"--output {out} is inside the input {name}; choose another folder")
    if reuse is not None and _is_inside(out, reuse) and _is_inside(reuse, out):
        raise ConfigError(f"--output {out} is the folder of --reuse, too; choose another one")


def _is_inside(out: str, name: str) -> bool:
    """Whether a folder is an input or inside it, both here or both in an object store."""
    urls = [object_store.is_url(one, of_data=True) for one in (out, name)]
    if any(urls):
        return all(urls) and f"{out}/".startswith(f"{name.rstrip('/')}/")
    return Path(out).resolve().is_relative_to(Path(name).resolve())


class _Run:
    def __init__(
        self,
        job: jobs.BulkJob,
        computation: Computation,
        folder: Destination,
        schema: Any,
        earlier: Earlier | None,
        rows: Rows,
    ):
        self._job = job
        self._on_error = rows.on_error
        self._of_images = rows.images is not None
        self._read = read_rows if rows.images is None else rows.images.read
        self._digest, self._of_texts = job.digest, job.of_texts
        self._computation = computation
        self._folder = folder
        self._schema = schema
        self._types = {name: schema.field(name).type for name in job.columns}
        self._results = schema.names[1 + len(job.columns) :]  # the digest among them
        self._earlier = earlier
        self._finished = set(finished_parts(folder))
        self._footers: dict[int, Footer] = {}
        self.summary = Summary(parts_found=len(self._finished))
        if self._finished:
            logger.info("%d parts are there: going on after them", len(self._finished))

    def run(self, on_progress: Callable[[JobProgress], object]) -> None:
        """Write all parts that are not there."""
        part: _OpenPart | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="finish-part") as finishing:
            last: Future | None = None
            try:
                for chunk, batch, skipped, reused in ahead(self._compute, self._chunks()):
                    part = part or _OpenPart(self._folder, chunk.part, self._schema, self._results)
                    part.add(batch, [*chunk.skipped, *skipped])
                    self.summary.reused += reused
                    self.summary.computed += batch.num_rows - reused
                    if chunk.closes:
                        if last is not None:
                            last.result()
                        footer = self._footer(part, chunk)
                        part, last = None, finishing.submit(part.finish, footer)
                    on_progress(chunk.progress)
                if last is not None:
                    last.result()
            finally:
                if part is not None:
                    part.abandon()

    def complete(self) -> None:
        """Say that all parts are there: what they hold, and what was left out."""
        summary, footers = self.summary, [self._footers[part] for part in sorted(self._footers)]
        summary.parts = len(footers)
        summary.rows = sum(one.rows for one in footers)
        summary.skipped = sum(one.skipped for one in footers)
        named = [msgspec.json.encode(row) for one in footers for row in one.skipped_rows]
        if named:
            with self._folder.writing(SKIPPED) as path:
                path.write_bytes(b"\n".join([*named, b""]))
        manifest = {
            "job": self._digest,
            "rows": summary.rows,
            "skipped": summary.skipped,
            "parts": [{"name": PART.format(one.part), "rows": one.rows} for one in footers],
        }
        with self._folder.writing(JOB_MANIFEST) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))

    def _footer(self, part: "_OpenPart", chunk: _Chunk) -> Footer:
        footer = Footer(
            self._digest,
            self._of_texts,
            chunk.part,
            part.rows,
            chunk.end,
            part.skipped,
            part.named,
        )
        self._footers[chunk.part] = footer
        return footer

    def _chunks(self) -> Iterator[_Chunk]:
        """The rows of all parts that are not there, in order."""
        part, at, stream = 0, START, None
        while True:
            if part in self._finished:
                at, stream = self._end_of(part), None
                part += 1
                continue
            if stream is None:
                columns = dict.fromkeys((*self._computation.columns, *self._types))
                stream = RowStream(self._read, self._job.inputs, list(columns), at)
            yield from self._chunks_of(part, stream)
            if stream.ended and not stream.waiting:
                return
            part += 1

    def _chunks_of(self, part: int, stream: RowStream) -> Iterator[_Chunk]:
        done, most = 0, self._job.part_rows
        while done < most:
            blocks = stream.take(min(self._computation.rows_a_call, most - done))
            count = sum(block.count for _, block in blocks)
            if not count and not done:
                return
            first = part * most + done
            done += count
            closes = done == most or stream.ended
            progress = JobProgress(part * most + done, stream.share)
            yield self._chunk(part, first, blocks, stream.at, closes, progress)
            if closes:
                return

    def _end_of(self, part: int) -> Place:
        """Where the rows after a finished part begin. Raises ConfigError if it is of another
        job."""
        footer = read_footer(self._folder, part)
        if footer.job != self._digest or footer.part != part:
            raise ConfigError(f"{self._folder}: {PART.format(part)} is of another job; remove it")
        self._footers[part] = footer
        return footer.end

    def _chunk(
        self,
        part: int,
        first: int,
        blocks: list[tuple[Place, Block]],
        end: Place,
        closes: bool,
        progress: JobProgress,
    ) -> _Chunk:
        """A chunk of these blocks, without the rows that are bad. Raises InvalidInput for one that
        is to fail."""
        numbers, places, inputs, skipped = [], [], [], []
        kept: dict[str, list[Any]] = {name: [] for name in self._types}
        for place, block in blocks:
            arrays, bad = self._converted(block)
            bad |= block.bad
            for index, row in enumerate(self._inputs_of(block)):
                problem = bad.get(index) or self._problem(row)
                if problem:
                    bad[index] = problem
                    skipped.append(self._skip(first + index, place, index, problem))
                else:
                    numbers.append(first + index)
                    places.append((place, index))
                    inputs.append(row)
            good = np.ones(block.count, bool)
            good[list(bad)] = False
            for name, array in arrays.items():
                kept[name].append(array if not bad else array.filter(arrow().array(good)))
            first += block.count
        joined = [_joined(some, self._types[name]) for name, some in kept.items()]
        return _Chunk(part, numbers, places, inputs, joined, skipped, end, closes, progress)

    def _inputs_of(self, block: Block) -> list[RowInputs]:
        """The texts of each row of a block, or the image of its one row."""
        if self._of_images:
            return [(block.image,)]
        columns = [as_list(block.columns[name]) for name in self._computation.columns]
        return list(zip(*columns, strict=True))

    def _problem(self, row: RowInputs) -> str | None:
        """What is wrong with the texts of a row, None if nothing is. Images are bad already."""
        if self._of_images:
            return None
        found = map(problem_of, row, self._computation.columns)
        return next(filter(None, found), None)

    def _converted(self, block: Block) -> tuple[dict[str, Any], dict[int, str]]:
        """The columns to keep as Arrow arrays of their types, and the rows where one cannot be."""
        arrays, bad = {}, {}
        for name, kind in self._types.items():
            values = block.columns[name]
            arrays[name], wrong = _of_type(values, kind, name)
            bad |= wrong
            if name == self._job.id_column and arrays[name].null_count:
                nulls = np.flatnonzero(np.asarray(arrays[name].is_null()))
                bad = {int(index): f"has no `{name}`" for index in nulls} | bad
        return arrays, bad

    def _skip(self, row: int, place: Place, index: int, problem: str) -> Skipped:
        where = row_name(self._job.inputs, place, index)
        if self._on_error == "fail":
            raise InvalidInput(f"{where} {problem} (--on-error skip leaves such rows out)")
        return Skipped(row, where, problem)

    def _compute(self, chunk: _Chunk) -> "_Computed":
        """The rows of a chunk with their results, as a RecordBatch, and those left out now."""
        pa = arrow()
        digests = [self._digest_of(row) for row in chunk.inputs]
        found = np.full(len(digests), -1, np.int64)
        if self._earlier is not None and digests:
            found = self._earlier.find(digests)
        new = np.flatnonzero(found < 0)
        arrays, skipped, computed = self._computed(chunk, new)
        old = np.flatnonzero(found >= 0)
        if len(old):
            assert self._earlier is not None
            arrays = [
                pa.concat_arrays(pair)
                for pair in zip(arrays, self._earlier.take(found[old]), strict=True)
            ]
        rows = np.concatenate([computed, old])
        order = np.argsort(rows)
        left = pa.array(rows[order])
        stored = pa.array(digests, pa.binary(DIGEST_BYTES))
        columns = [pa.array(chunk.numbers, pa.int64()), *chunk.kept, stored]
        taken = [column.take(left) for column in columns]
        results = arrays if not len(old) else [array.take(pa.array(order)) for array in arrays]
        batch = pa.RecordBatch.from_arrays([*taken, *results], schema=self._schema)
        return _Computed(chunk, batch, skipped, len(old))

    def _digest_of(self, row: RowInputs) -> bytes:
        return image_digest(*row) if self._of_images else text_digest(row)

    def _computed(
        self, chunk: _Chunk, indices: np.ndarray
    ) -> tuple[list[Any], list[Skipped], np.ndarray]:
        """The results of some rows of a chunk, the rows that were skipped, and the indices of the
        others."""
        skipped: list[Skipped] = []
        while True:
            try:
                arrays = self._computation.compute([chunk.inputs[k] for k in indices.tolist()])
                return arrays, skipped, indices
            except InvalidInput as error:
                if error.index is None:
                    raise
                wrong = int(indices[error.index])
                place, index = chunk.places[wrong]
                skipped.append(self._skip(chunk.numbers[wrong], place, index, _reason(error)))
                indices = np.delete(indices, error.index)


def _reason(error: InvalidInput) -> str:
    """Why a row cannot be computed, with the flag of the commands that helps."""
    if not isinstance(error, InputTooLong):
        return f"is wrong: {error}"
    return f"has {error.got} tokens, the limit is {error.limit}; --auto-truncate true cuts it"


class _OpenPart:
    """A part that is being written."""

    def __init__(self, folder: Destination, part: int, schema: Any, results: Sequence[str]):
        self._stack = ExitStack()
        path = self._stack.enter_context(folder.writing(PART.format(part)))
        self._writer = PartWriter(path, schema, results)
        self.skipped = 0
        self.named: list[Skipped] = []
        self._reasons: Counter[str] = Counter()

    @property
    def rows(self) -> int:
        return self._writer.rows

    def add(self, batch: Any, skipped: Sequence[Skipped]) -> None:
        """Append rows, and note those that were left out."""
        self._writer.write(batch)
        self.skipped += len(skipped)
        for one in skipped:
            few = self._reasons[one.reason] < MOST_OF_A_REASON
            if few and len(self.named) < MOST_SKIPPED_NAMED:
                self._reasons[one.reason] += 1
                self.named.append(one)

    def finish(self, footer: Footer) -> None:
        """Complete the file and give it its name."""
        with self._stack:
            self._writer.finish(footer)

    def abandon(self) -> None:
        """Leave nothing of it."""
        with suppress(_Abandoned, OSError), self._stack:
            self._writer.abandon()
            raise _Abandoned


class _Abandoned(Exception):
    """So that an unfinished file does not take its name."""


def _schema(types: dict[str, Any], computation: Computation, digest: str) -> Any:
    """The schema of the parts. Raises ConfigError for a column to keep that a result is called."""
    pa = arrow()
    results = computation.fields()
    taken = {ROW, digest, *(one.name for one in results)}
    for name in types:
        if name in taken:
            raise ConfigError(
                f"column `{name}` cannot be kept: the result has a column of that name; rename it"
            )
    kept = [pa.field(name, kind) for name, kind in types.items()]
    digests = pa.field(digest, pa.binary(DIGEST_BYTES))
    return pa.schema([pa.field(ROW, pa.int64()), *kept, digests, *results])


def _of_type(values: Any, kind: Any, name: str) -> tuple[Any, dict[int, str]]:
    """Values as an Arrow array of a type, null where they are of another, and where that is."""
    pa = arrow()
    if not isinstance(values, list):
        return values, {}
    whole = _as_is(values, kind)
    if whole is not None:
        return whole, {}
    bad: dict[int, str] = {}
    for index, value in enumerate(values):
        if _as_is([value], kind) is None:
            bad[index] = f"has {value!r:.60} as `{name}`, and the column is of {kind}"
    good = [None if index in bad else value for index, value in enumerate(values)]
    return pa.array(good, kind), bad


def _as_is(values: list, kind: Any) -> Any:
    """Values as an Arrow array of a type, None if it cannot hold them as they are: Arrow would cut
    decimals off, and leave out fields that a struct does not have."""
    pa = arrow()
    try:
        array = pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    return array if all(map(_is_same, values, array.to_pylist())) else None


def _is_same(given: Any, kept: Any) -> bool:
    """Whether two values are equal, but for fields that are null."""
    if isinstance(given, dict) and isinstance(kept, dict):
        names = given.keys() | kept.keys()
        return all(_is_same(given.get(name), kept.get(name)) for name in names)
    if isinstance(given, list) and isinstance(kept, list):
        return len(given) == len(kept) and all(map(_is_same, given, kept))
    return given == kept and isinstance(given, bool) == isinstance(kept, bool)


def _joined(arrays: Sequence[Any], kind: Any) -> Any:
    pa = arrow()
    return pa.concat_arrays(arrays) if arrays else pa.array([], kind)
