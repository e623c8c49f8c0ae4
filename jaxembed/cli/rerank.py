"""`jaxembed rerank`: scores of files of queries and documents, as a folder of Parquet."""

from typing import Any

import click

from jaxembed.cli.help import Command
from jaxembed.cli.jobs import score_with
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    JOB_OPTIONS,
    MODEL_FLAG,
    MODEL_OPTIONS,
    OUTPUT_FLAG,
    RAW_SCORES_FLAG,
    TEXT_COLUMN_FLAG,
    TEXT_OPTIONS,
)


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
