"""`jaxembed rerank` and `jaxembed classify`: write scores or labels for files of texts, as
Parquet."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from jaxembed.cli.loading import check_folder_job, folder_options, load_for_task, run_folder_job
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    JOB_OPTIONS,
    MODEL_FLAG,
    MODEL_OPTIONS,
    OUTPUT_FLAG,
    RAW_SCORES_FLAG,
    TEXT_COLUMN_FLAG,
    TEXT_OPTIONS,
    Command,
)
from jaxembed.data.spec import Task

if TYPE_CHECKING:
    from jaxembed.embedder import Embedder

logger = logging.getLogger("jaxembed")


@click.command(
    "rerank",
    cls=Command,
    example="jaxembed rerank pairs.jsonl --output scores --model BAAI/bge-reranker-base",
)
@click.argument("inputs", nargs=-1, required=True)
@OUTPUT_FLAG
@MODEL_FLAG
@click.option(
    "--query-column",
    default="query",
    show_default=True,
    help="Column that contains the queries.",
)
@TEXT_COLUMN_FLAG
@RAW_SCORES_FLAG
@JOB_OPTIONS
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def rerank_command(
    inputs: tuple[str, ...],
    output: str,
    model: str | None,
    query_column: str,
    text_column: str,
    raw_scores: bool,
    **flags: Any,
) -> None:
    """Score how well the document of each row answers the query of that row, by a reranker or by
    the similarity of an embedding model's vectors.

    INPUTS are the same files of texts as for `jaxembed embed`. The output is a folder of Parquet
    files with the column `score`. It can be continued: run the same command again after an
    interruption.
    """

    score_with(model, "rerank", flags, (query_column, text_column), raw_scores, inputs, output)


@click.command(
    "classify",
    cls=Command,
    example="jaxembed classify reviews.csv --output labels --model ./my-classifier",
)
@click.argument("inputs", nargs=-1, required=True)
@OUTPUT_FLAG
@MODEL_FLAG
@TEXT_COLUMN_FLAG
@click.option(
    "--second-column",
    help="Column that contains the second text of each pair (default: texts are classified alone).",
)
@RAW_SCORES_FLAG
@JOB_OPTIONS
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def classify_command(
    inputs: tuple[str, ...],
    output: str,
    model: str | None,
    text_column: str,
    second_column: str | None,
    raw_scores: bool,
    **flags: Any,
) -> None:
    """Classify the text, or the pair of texts, of each row.

    INPUTS are the same files of texts as for `jaxembed embed`. The output is a folder of Parquet
    files with the column `labels`: each label with its score, best first. It can be continued: run
    the same command again after an interruption.
    """
    columns = (text_column,) if second_column is None else (text_column, second_column)
    score_with(model, "classify", flags, columns, raw_scores, inputs, output)


def score_with(
    model: str | None,
    task: Task,
    flags: dict[str, Any],
    columns: tuple[str, ...],
    raw_scores: bool,
    inputs: tuple[str, ...],
    output: str,
) -> None:
    """Load a model that can do the task, and write the score or labels of each row as Parquet.

    `columns` are the columns of the query and the document, or of the one or two texts to classify.
    Raises ConfigError and WrongTask before weights are downloaded, and the errors of
    `run_folder_job`.
    """
    job_options = folder_options(flags)
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

    run_folder_job(partial(load_for_task, model, task, flags), make, inputs, output, job_options)
