"""Runs a job: reads rows, computes results and writes them into parts, all at the same time.

A part is an output file. It is written completely or not at all, and its rows depend only on the
job and the number of the part. So a job that is killed and run again gives the same rows as a job
without interruption. Only vectors may differ, by a rounding, where a text was in another batch.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxembed.bulk import job as jobs
from jaxembed.bulk.ahead import ahead
from jaxembed.bulk.computations import Computation
from jaxembed.bulk.destination import Destination, destination
from jaxembed.bulk.job import (
    PART,
    EarlierResults,
    Footer,
    PartWriter,
    Skipped,
    finished_parts,
    read_footer,
)
from jaxembed.bulk.row_source import DIGEST_BYTES, RowInputs, RowStream
from jaxembed.bulk.sources import STANDARD_INPUT, START, Block, Place, arrow, row_name
from jaxembed.errors import ConfigError, InputTooLong, InvalidInput, counted
from jaxembed.platform import object_store

logger = logging.getLogger(__name__)

JOB_MANIFEST = "_manifest.json"
SKIPPED = "_skipped.jsonl"
PART_ROWS = 65_536
ROW = "row"  # the result column with the number of each row in the input

OnError = Literal["fail", "skip"]


@dataclass(frozen=True)
class Rows:
    """Which rows a job reads, and which of their columns go into the result."""

    inputs: Sequence[str]  # paths, folders, patterns and URLs
    id_column: str | None = None
    keep: tuple[str, ...] = ()  # other input columns that the result has
    part_rows: int = PART_ROWS  # input rows of a part
    on_error: OnError = "fail"  # what happens at a bad row


class JobProgress(NamedTuple):
    """The progress of a job."""

    rows: int  # input rows that are done, in this run or an earlier one
    share: float  # share of the input that is done, 0 to 1


@dataclass
class Summary:
    """The counts of what a run did."""

    rows: int = 0  # result rows in all parts
    skipped: int = 0  # input rows without a result
    parts: int = 0
    parts_from_before: int = 0  # parts that an earlier run had finished
    reused: int = 0  # rows of this run whose results come from an earlier job
    computed: int = 0  # rows of this run that were computed


class _Chunk(NamedTuple):
    """Rows of one part that are computed together. Bad rows are only in `skipped`."""

    part: int  # the number of the part
    numbers: list[int]  # the number of each row in the input
    places: list[tuple[Place, int]]  # for messages: a row's block, and its index in the block
    inputs: list[RowInputs]  # one for each row
    kept: list[Any]  # an Arrow array for each kept column
    skipped: list[Skipped]
    end: Place  # the place of the next row
    closes: bool  # whether it is the last chunk of the part
    progress: JobProgress


def run_job(
    computation: Computation,
    rows: Rows,
    out: str,
    *,
    reuse: str | None = None,
    on_progress: Callable[[JobProgress], object] = lambda progress: None,
) -> Summary:
    """Compute all rows and write the results as Parquet parts into the folder or URL `out`.

    A job that failed resumes with the first missing part. `reuse` is the folder of an earlier job,
    whose results of equal texts or images are reused. Raises ConfigError for wrong inputs, options
    or folders, InvalidInput for a row that cannot be computed unless `rows.on_error` is "skip", and
    the errors of the computation and of object stores.
    """
    if STANDARD_INPUT in rows.inputs:
        raise ConfigError(
            "a job cannot read standard input, because it reads its input again if it is "
            "interrupted and continued; name a file"
        )
    for name in rows.inputs:
        if _is_inside(out, name):
            raise ConfigError(f"--output {out} is inside the input {name}; choose another folder")
    if reuse is not None and _is_inside(out, reuse) and _is_inside(reuse, out):
        raise ConfigError(f"--output {out} is also the folder of --reuse; choose another one")
    source = computation.source
    files = source.files(rows.inputs)
    folder = destination(out)
    ids = [] if rows.id_column is None else [rows.id_column]
    types = source.types(files, list(dict.fromkeys([*ids, *rows.keep])))
    job = jobs.BulkJob(
        inputs=files,
        part_rows=rows.part_rows,
        columns={name: str(kind) for name, kind in types.items()},
        id_column=rows.id_column,
        computation=computation.describe(),
        text_columns=list(source.columns),
        **source.settings(files),
    )
    schema = _schema(types, computation)
    jobs.refuse_others(folder)
    with folder.locked():
        jobs.begin(job, folder)
        old = None if reuse is None else destination(reuse, make=False)
        earlier = old and EarlierResults(
            old, job.of_texts, computation.fields(), source.digest_column
        )
        running = _Run(job, computation, types, folder, schema, earlier, rows.on_error)
        try:
            running.run(on_progress)
        except InvalidInput:
            jobs.withdraw(folder)  # so that a corrected command can begin here
            raise
        except OSError as error:
            raise ConfigError(
                f"cannot write {folder}: {error}; finished parts are kept: run the same command "
                "again"
            ) from error
        if source.files(rows.inputs) != files:
            raise ConfigError(
                f"the input changed while it was read, so that {folder} mixes two versions of it; "
                "choose another folder"
            )
        running.complete()
    return running.summary


def _is_inside(out: str, name: str) -> bool:
    """Return whether the folder `out` is `name` or lies inside it. A local path and a URL never lie
    inside each other."""
    urls = [object_store.is_url(place, of_data=True) for place in (out, name)]
    if any(urls):
        return all(urls) and f"{out}/".startswith(f"{name.rstrip('/')}/")
    return Path(out).resolve().is_relative_to(Path(name).resolve())


@dataclass
class _Run:
    """One run of a job, which writes its missing parts."""

    job: jobs.BulkJob
    computation: Computation
    types: dict[str, Any]  # the Arrow type of each kept column
    folder: Destination
    schema: Any
    earlier: EarlierResults | None
    on_error: OnError
    footers: dict[int, Footer] = field(default_factory=dict)  # by number of the part

    def __post_init__(self) -> None:
        self._digest, self._of_texts = self.job.digest, self.job.of_texts
        self._finished = set(finished_parts(self.folder))
        self.summary = Summary(parts_from_before=len(self._finished))
        if self._finished:
            logger.info("continuing after %s", counted(len(self._finished), "finished part"))

    def run(self, on_progress: Callable[[JobProgress], object]) -> None:
        """Write all missing parts. A thread finishes each part while the next one is computed."""
        outputs = self.schema.names[1 + len(self.types) :]  # after the row number and kept columns
        writer: PartWriter | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="finish-part") as finishing:
            finish: Future | None = None  # finishes the previous part
            try:
                for chunk, batch, skipped, reused in ahead(self._compute, self._chunks()):
                    writer = writer or PartWriter(self.folder, chunk.part, self.schema, outputs)
                    writer.write(batch, [*chunk.skipped, *skipped])
                    self.summary.reused += reused
                    self.summary.computed += batch.num_rows - reused
                    if chunk.closes:
                        if finish is not None:
                            finish.result()  # waits, and raises the errors of `writer.finish`
                        footer = writer.footer(self._digest, self._of_texts, chunk.end)
                        self.footers[chunk.part] = footer
                        writer, finish = None, finishing.submit(writer.finish, footer)
                    on_progress(chunk.progress)
                if finish is not None:
                    finish.result()
            finally:
                if writer is not None:
                    writer.abandon()

    def complete(self) -> None:
        """Write the manifest, and the list of skipped rows if there are any; fill in the
        summary."""
        summary, footers = self.summary, [self.footers[part] for part in sorted(self.footers)]
        summary.parts = len(footers)
        summary.rows = sum(footer.rows for footer in footers)
        summary.skipped = sum(footer.skipped for footer in footers)
        lines = [msgspec.json.encode(row) for footer in footers for row in footer.skipped_rows]
        if lines:
            with self.folder.writing(SKIPPED) as path:
                path.write_bytes(b"\n".join([*lines, b""]))
        manifest = {
            "job": self._digest,
            "rows": summary.rows,
            "skipped": summary.skipped,
            "parts": [{"name": PART.format(f.part), "rows": f.rows} for f in footers],
        }
        with self.folder.writing(JOB_MANIFEST) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))

    def _chunks(self) -> Iterator[_Chunk]:
        """Yield the rows of all missing parts in order, as chunks. Keep the footers of finished
        parts in `footers`. Raises ConfigError if a part belongs to another job or the input cannot
        be read, and InvalidInput for a bad row if `on_error` is "fail"."""
        source, part_rows = self.computation.source, self.job.part_rows
        columns = list(dict.fromkeys((*source.columns, *self.types)))
        part, place, stream = 0, START, None  # `place` is where the part begins
        while stream is None or not stream.ended:
            if part in self._finished:
                footer = read_footer(self.folder, part)
                if footer.job != self._digest or footer.part != part:
                    raise ConfigError(
                        f"{self.folder}: {PART.format(part)} belongs to another job; remove it"
                    )
                self.footers[part] = footer
                place, stream = footer.end, None
            else:
                stream = stream or RowStream(source, self.job.inputs, columns, place)
                done, closes = 0, False  # input rows in chunks so far; whether the part is complete
                while not closes:
                    blocks = stream.take(min(self.computation.rows_per_call, part_rows - done))
                    if not blocks and not done:
                        return  # no row follows the previous part
                    first_row = part * part_rows + done
                    done += sum(block.count for _, block in blocks)
                    closes = done == part_rows or stream.ended
                    progress = JobProgress(part * part_rows + done, stream.share)
                    yield self._chunk(part, first_row, blocks, stream.at, closes, progress)
            part += 1

    def _chunk(
        self,
        part: int,
        first_row: int,
        blocks: list[tuple[Place, Block]],
        end: Place,
        closes: bool,
        progress: JobProgress,
    ) -> _Chunk:
        """Return a chunk of the rows of these blocks. Bad rows are only in its field `skipped`.
        `part`, `end`, `closes` and `progress` become fields of the chunk. `first_row` is the number
        in the input of the first row of the blocks. Raises InvalidInput for a bad row if `on_error`
        is "fail"."""
        pa, source = arrow(), self.computation.source
        numbers, places, inputs, skipped = [], [], [], []
        kept: dict[str, list[Any]] = {name: [] for name in self.types}
        for place, block in blocks:
            arrays, bad = {}, {}  # `bad`: the problem of each bad row, by its index in the block
            for name, kind in self.types.items():
                arrays[name], misfits = _of_type(block.columns[name], kind, name)
                bad |= misfits
                if name == self.job.id_column and arrays[name].null_count:
                    nulls = np.flatnonzero(np.asarray(arrays[name].is_null()))
                    # a value of a wrong type is null here as well, and keeps its own problem
                    bad = {int(index): f"has no `{name}`" for index in nulls} | bad
            bad |= block.bad  # rows that could not be read
            for index, row in enumerate(source.inputs(block)):
                problem = bad.get(index) or source.problem(row)
                if problem:
                    bad[index] = problem
                    skipped.append(self._skip(first_row + index, place, index, problem))
                else:
                    numbers.append(first_row + index)
                    places.append((place, index))
                    inputs.append(row)
            good = np.ones(block.count, bool)
            good[list(bad)] = False
            for name, array in arrays.items():
                kept[name].append(array if not bad else array.filter(pa.array(good)))
            first_row += block.count
        joined = [
            pa.concat_arrays(arrays) if arrays else pa.array([], self.types[name])
            for name, arrays in kept.items()
        ]
        return _Chunk(part, numbers, places, inputs, joined, skipped, end, closes, progress)

    def _skip(self, row: int, place: Place, index: int, problem: str) -> Skipped:
        """Return a skipped row, or raise InvalidInput if `on_error` is "fail"."""
        where = row_name(self.job.inputs, place, index)
        if self.on_error == "fail":
            raise InvalidInput(f"{where} {problem} (--on-error skip leaves such rows out)")
        return Skipped(row, where, problem)

    def _compute(self, chunk: _Chunk) -> tuple[_Chunk, Any, list[Skipped], int]:
        """Compute the results of a chunk, or take them from the earlier job.

        Returns the chunk, its rows with their results as a RecordBatch, the rows that could not be
        computed, and the number of rows whose results are from the earlier job.
        """
        pa = arrow()
        digests = [self.computation.source.digest(row) for row in chunk.inputs]
        # the number of each row's earlier result; -1: there is none
        numbers = np.full(len(digests), -1, np.int64)
        if self.earlier is not None and digests:
            numbers = self.earlier.find(digests)
        # indices of the chunk's rows without an earlier result, and with one
        new, old = np.flatnonzero(numbers < 0), np.flatnonzero(numbers >= 0)
        skipped: list[Skipped] = []
        results = None
        while results is None:  # tries again without the row that could not be computed
            try:
                results = self.computation.compute([chunk.inputs[k] for k in new.tolist()])
            except InvalidInput as error:
                if error.index is None:
                    raise
                problem = f"cannot be computed: {error}"
                if isinstance(error, InputTooLong):  # name the flag of the commands
                    problem = (
                        f"has {error.got} tokens, the limit is {error.limit}; --auto-truncate true "
                        "truncates it"
                    )
                wrong = int(new[error.index])
                skipped.append(self._skip(chunk.numbers[wrong], *chunk.places[wrong], problem))
                new = np.delete(new, error.index)
        rows_of_results = np.concatenate([new, old])  # without rows that could not be computed
        if self.earlier is not None and len(old):
            order = pa.array(np.argsort(rows_of_results))
            pairs = zip(results, self.earlier.take(numbers[old]), strict=True)
            results = [pa.concat_arrays(pair).take(order) for pair in pairs]
        rows_with_results = pa.array(np.sort(rows_of_results))
        stored_digests = pa.array(digests, pa.binary(DIGEST_BYTES))
        columns = [pa.array(chunk.numbers, pa.int64()), *chunk.kept, stored_digests]
        taken = [column.take(rows_with_results) for column in columns]
        batch = pa.RecordBatch.from_arrays([*taken, *results], schema=self.schema)
        return chunk, batch, skipped, len(old)


def _schema(types: dict[str, Any], computation: Computation) -> Any:
    """Return the Arrow schema of the parts; `types` are those of the kept columns. Raises
    ConfigError if a kept column has the name of another column."""
    pa = arrow()
    kept = [pa.field(name, kind) for name, kind in types.items()]
    digests = pa.field(computation.source.digest_column, pa.binary(DIGEST_BYTES))
    results = [digests, *computation.fields()]
    for name in types:
        if name in {ROW, *(field.name for field in results)}:
            raise ConfigError(
                f"column `{name}` cannot be kept: the result has a column of that name; rename it"
            )
    return pa.schema([pa.field(ROW, pa.int64()), *kept, *results])


def _of_type(values: Any, kind: Any, name: str) -> tuple[Any, dict[int, str]]:
    """Convert the values of a kept column `name` to an Arrow array of the type `kind`; an array
    stays as it is. Return the array, and the problem of each value that does not fit, by index;
    such a value is null in the array."""
    pa = arrow()
    if not isinstance(values, list):
        return values, {}
    whole = _as_is(values, kind)
    if whole is not None:
        return whole, {}
    bad = {
        index: f"has {value!r:.60} as `{name}`, and the column has the type {kind}"
        for index, value in enumerate(values)
        if _as_is([value], kind) is None
    }
    good = [None if index in bad else value for index, value in enumerate(values)]
    return pa.array(good, kind), bad


def _as_is(values: list, kind: Any) -> Any:
    """Convert values to an Arrow array of the type `kind`. Return None if Arrow cannot convert them
    or would change a value: Arrow truncates decimals, and drops fields that a struct type lacks."""
    pa = arrow()
    try:
        array = pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    return array if all(map(_is_same, values, array.to_pylist())) else None


def _is_same(original: Any, converted: Any) -> bool:
    """Whether a value is the same after its conversion. A missing field equals a null one."""
    if isinstance(original, dict) and isinstance(converted, dict):
        names = original.keys() | converted.keys()
        return all(_is_same(original.get(name), converted.get(name)) for name in names)
    if isinstance(original, list) and isinstance(converted, list):
        return len(original) == len(converted) and all(map(_is_same, original, converted))
    return original == converted and isinstance(original, bool) == isinstance(converted, bool)
