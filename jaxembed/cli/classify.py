"""`jaxembed classify`: labels of files of texts, as a folder of Parquet."""

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


@click.command("classify")
@click.argument("inputs", nargs=-1, required=True)
@OUTPUT_FLAG
@MODEL_FLAG
@TEXT_COLUMN_FLAG
@click.option("--second-column", help="Has the second text of each row, to classify pairs.")
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
    """Classify each row's text, or pair of texts.

    INPUTS are files as of `jaxembed embed`, and OUTPUT is a folder of Parquet as there, with the
    column `labels`: each label and its score, best first.
    """
    configure_logging()
    columns = (text_column,) if second_column is None else (text_column, second_column)

    def make(embedder: "Embedder") -> Any:
        from jaxembed.bulk.computations import ClassifyRows

        return ClassifyRows(embedder, columns, raw_scores, {})

    score_with(model, "classify", flags, make, inputs, output)
