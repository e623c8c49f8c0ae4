"""`jaxembed classify`: labels of files of texts, as a folder of Parquet."""

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
