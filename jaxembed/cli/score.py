"""`jaxembed rerank`, `jaxembed classify` and `jaxembed token-classify`: write scores, labels or
entities for files of texts, as Parquet."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

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
from jaxembed.data.inputs import AggregationStrategy
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

    def make(embedder: "Embedder") -> Any:
        from jaxembed.bulk.computations import ScoreRows
        from jaxembed.bulk.row_source import TextRows

        if embedder.spec.task == "embed":
            logger.info(
                "%s is an embedding model: scores are similarities of its embeddings; "
                "--model names a reranker",
                embedder.name,
            )
        return ScoreRows(embedder, TextRows((query_column, text_column)), raw_scores)

    score_with(model, "rerank", flags, make, inputs, output)


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

    def make(embedder: "Embedder") -> Any:
        from jaxembed.bulk.computations import ClassifyRows
        from jaxembed.bulk.row_source import TextRows

        columns = (text_column,) if second_column is None else (text_column, second_column)
        return ClassifyRows(embedder, TextRows(columns), raw_scores)

    score_with(model, "classify", flags, make, inputs, output)


@click.command(
    "token-classify",
    cls=Command,
    example="jaxembed token-classify news.jsonl --output names --model ./my-token-classifier",
)
@click.argument("inputs", nargs=-1, required=True)
@OUTPUT_FLAG
@MODEL_FLAG
@TEXT_COLUMN_FLAG
@click.option(
    "--aggregation-strategy",
    type=click.Choice(get_args(AggregationStrategy)),
    default="none",
    show_default=True,
    help="How tokens become entities, as in transformers.",
)
@JOB_OPTIONS
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def token_classify_command(
    inputs: tuple[str, ...],
    output: str,
    model: str | None,
    text_column: str,
    aggregation_strategy: AggregationStrategy,
    **flags: Any,
) -> None:
    """Find the entities in the text of each row, such as names.

    INPUTS are the same files of texts as for `jaxembed embed`. The output is a folder of Parquet
    files with the column `entities`: each entity with its label, its score and its place in the
    text. It can be continued: run the same command again after an interruption.
    """

    def make(embedder: "Embedder") -> Any:
        from jaxembed.bulk.computations import EntityRows
        from jaxembed.bulk.row_source import TextRows

        return EntityRows(embedder, TextRows((text_column,)), aggregation_strategy)

    score_with(model, "token_classify", flags, make, inputs, output)


def score_with(
    model: str | None,
    task: Task,
    flags: dict[str, Any],
    make: Callable[["Embedder"], Any],
    inputs: tuple[str, ...],
    output: str,
) -> None:
    """Load a model that can do the task, and write the result of each row as Parquet.

    `make` returns the Computation of the results. Raises ConfigError and WrongTask before weights
    are downloaded, and the errors of `run_folder_job`.
    """
    job_options = folder_options(flags)
    check_folder_job(inputs, output)
    run_folder_job(partial(load_for_task, model, task, flags), make, inputs, output, job_options)
