"""Runs a job as the flags of a command ask, with a progress bar."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxembed.cli.loading import load_for_task
from jaxembed.data.spec import Task
from jaxembed.errors import ConfigError
from jaxembed.platform.signals import set_resume_hint

if TYPE_CHECKING:
    from jaxembed.embedder import Embedder

logger = logging.getLogger("jaxembed")

FOLDER_FLAGS = ("id_column", "keep", "part_rows", "on_error", "reuse")  # JOB_OPTIONS


def folder_options(flags: dict[str, Any]) -> dict[str, Any]:
    """Take what JOB_OPTIONS gave out of the flags of a command."""
    return {name: flags.pop(name) for name in FOLDER_FLAGS}


def check_folder_job(inputs: Sequence[str], output: str) -> None:
    """Raise ConfigError, before a model is loaded, for an input that is missing and for an extra
    that reads an input or writes the folder and is not installed."""
    from jaxembed.bulk.sources import IMAGE_FILES, ROW_FILES, input_files
    from jaxembed.platform import object_store
    from jaxembed.platform.extras import require

    require("parquet", f"--output {output}, a folder of Parquet")
    object_store.require_extra(output)
    input_files(inputs, (*ROW_FILES, *IMAGE_FILES))


def refuse_other_suffix(output: str, files: str) -> None:
    """Raise ConfigError for a folder of Parquet whose name ends like that of a file."""
    name = output.rstrip("/").rpartition("/")[2]
    if "." in name.strip("."):
        raise ConfigError(
            f"--output {output}: wanted {files}a folder, whose name has no dot, for Parquet"
        )


def score_with(
    model: str | None,
    task: Task,
    flags: dict[str, Any],
    columns: tuple[str, ...],
    raw_scores: bool,
    inputs: tuple[str, ...],
    output: str,
) -> None:
    """Load a model that can do the task, and write its score or labels of each row as Parquet.

    Raises ConfigError and WrongTask before weights are downloaded, and as `run_folder`.
    """
    refuse_other_suffix(output, "")
    chosen = folder_options(flags)
    check_folder_job(inputs, output)

    def make(embedder: "Embedder") -> Any:
        from jaxembed.bulk.computations import ClassifyRows, ScoreRows
        from jaxembed.bulk.row_source import TextRows

        if task == "rerank" and embedder.spec.task == "embed":
            logger.info(
                "%s is an embedding model: scores are similarities of its embeddings; "
                "--model names a reranker",
                embedder.name,
            )
        kind = ScoreRows if task == "rerank" else ClassifyRows
        return kind(embedder, TextRows(columns), raw_scores)

    run_folder(partial(load_for_task, model, task, flags), make, inputs, output, chosen)


def run_folder(
    load: Callable[[], "Embedder"],
    make: Callable[["Embedder"], Any],
    inputs: tuple[str, ...],
    output: str,
    chosen: dict[str, Any],
) -> None:
    """Run a job with a progress bar, and say what it did. `make` gives its Computation. Raises as
    `load` and `run_job`."""
    from tqdm import tqdm

    from jaxembed.bulk.run import JobProgress, Rows, run_job

    reuse = chosen.pop("reuse")
    rows = Rows(inputs, **chosen)
    embedder = load()
    try:
        computation = make(embedder)
        telemetry = embedder.model.telemetry
        started_at = time.monotonic()
        with tqdm(unit=" rows", desc=computation.describe()["task"], disable=None) as bar:

            def show(progress: JobProgress) -> None:
                if progress.share:
                    bar.total = round(progress.rows / progress.share)
                batches, fills = telemetry.batch_fill.totals()
                bar.set_postfix_str(f"fill {fills / max(batches, 1):.2f}", refresh=False)
                if not bar.n:  # what earlier runs have done says nothing of the rate
                    bar.initial = bar.n = max(progress.rows - computation.rows_a_call, 0)
                bar.update(progress.rows - bar.n)

            set_resume_hint(f"run the same command to go on after the finished parts in {output}")
            summary = run_job(computation, rows, output, reuse=reuse, on_progress=show)
        seconds = time.monotonic() - started_at
    finally:
        embedder.close()
    found = f", {summary.parts_found} of them there before" if summary.parts_found else ""
    reused = f", {summary.reused} taken from {reuse}" if summary.reused else ""
    skipped = f", {summary.skipped} rows left out: see _skipped.jsonl" if summary.skipped else ""
    logger.info(
        "%d rows in %d parts in %s%s; %d computed in %.1f s, %.0f a second%s%s",
        summary.rows,
        summary.parts,
        output,
        found,
        summary.computed,
        seconds,
        summary.computed / seconds,
        reused,
        skipped,
    )
