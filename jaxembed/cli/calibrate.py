"""`jaxembed calibrate`: measures the calibration ranges of a model from files of texts."""

import logging
from typing import Any

import click

from jaxembed.cli.loading import load_for_outputs
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    MODEL_OPTIONS,
    TEXT_COLUMN_FLAG,
    TEXT_OPTIONS,
    Command,
)
from jaxembed.errors import counted

logger = logging.getLogger("jaxembed")


@click.command(
    "calibrate",
    cls=Command,
    example="jaxembed calibrate sentence-transformers/all-MiniLM-L6-v2 texts.txt",
)
@click.argument("model")
@click.argument("texts", nargs=-1, required=True)
@TEXT_COLUMN_FLAG
@click.option(
    "--dimensions",
    type=click.IntRange(1),
    multiple=True,
    help="Number of dimensions of truncated vectors to measure as well. Repeat for several.",
)
@click.option(
    "--prompt-name",
    help="Name of the model's prompt to put in front of every text; it also selects the route "
    "(default: the checkpoint's default prompt).",
)
@click.option("--adapter-name", help="Name of the adapter to embed with (default: none).")
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def calibrate_command(
    model: str,
    texts: tuple[str, ...],
    text_column: str,
    dimensions: tuple[int, ...],
    prompt_name: str | None,
    adapter_name: str | None,
    **flags: Any,
) -> None:
    """Measure the calibration ranges that int8 and uint8 vectors need.

    TEXTS are the same files of texts as for `jaxembed embed`. Give at least a hundred texts that
    resemble those to be embedded. The ranges are stored beside the converted MODEL, and a server
    reads them when it starts.
    """
    from tqdm import tqdm

    from jaxembed.bulk.row_source import TextRows
    from jaxembed.bulk.sources import read_texts
    from jaxembed.bulk.vectors import ENOUGH_TEXTS, measure_ranges
    from jaxembed.checkpoints.ranges import check_writable, save_ranges

    lines = read_texts(texts, text_column)  # raises for a missing file before the model is loaded
    rows = TextRows((text_column,))
    embedder = load_for_outputs(model, {"prompt_name": prompt_name}, flags, rows)
    check_writable(embedder.model.path)  # raises before ranges are measured in vain
    with tqdm(unit=" texts", desc="calibrate", disable=None) as bar:
        ranges = measure_ranges(
            embedder,
            lines,
            dimensions,
            on_progress=bar.update,
            prompt_name=prompt_name,
            adapter=adapter_name,
        )
    embedder.close()
    if (count := ranges[0].texts) < ENOUGH_TEXTS:
        logger.warning(
            "the ranges of %d texts are narrow, so that values of other texts are clipped; give %d "
            "texts or more",
            count,
            ENOUGH_TEXTS,
        )
    path = save_ranges(embedder.model.path, ranges)
    widths = ", ".join(str(item.kind.dimensions) for item in ranges)
    click.echo(f"{path}: ranges of {counted(count, 'text')}, for vectors of {widths} dimensions")
