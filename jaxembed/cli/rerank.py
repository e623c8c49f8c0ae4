"""`jaxembed rerank`: scores of files of queries and documents, as a folder of Parquet."""

from typing import TYPE_CHECKING, Any

import click

from jaxembed.cli.jobs import score_with
from jaxembed.cli.logs import configure_logging
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

if TYPE_CHECKING:
    from jaxembed.embedder import Embedder


@click.command("rerank")
@click.argument("inputs", nargs=-1, required=True)
@OUTPUT_FLAG
@MODEL_FLAG
@click.option(
    "--query-column", default="query", show_default=True, help="Has the query of each row."
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
    """Score each row's document for its query by a reranker.

    INPUTS are files as of `jaxembed embed`, and OUTPUT is a folder of Parquet as there, with the
    column `score`.
    """
    configure_logging()

    def make(embedder: "Embedder") -> Any:
        from jaxembed.bulk.computations import ScoreRows

        return ScoreRows(embedder, query_column, text_column, raw_scores, {})

    score_with(model, "rerank", flags, make, inputs, output)
