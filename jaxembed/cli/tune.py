"""`jaxembed tune`: finds the grid of buckets that fits given traffic."""

from pathlib import Path
from typing import Any

import click

from jaxembed.cli.loading import configure_jax, engine_config, model_source, step_lines, text_config
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    MODEL_FLAG,
    MODEL_OPTIONS,
    TEXT_COLUMN_FLAG,
    TEXT_OPTIONS,
    Command,
    FiniteRange,
)


@click.command("tune", cls=Command, example="jaxembed tune http://127.0.0.1:8080 -o buckets.json")
@click.argument("traffic")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("buckets.json"),
    show_default=True,
    help="File to write the grid to, for `jaxembed serve --buckets`.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="A .png or .svg file to draw the lengths and the buckets into (default: none). It needs "
    "matplotlib.",
)
@MODEL_FLAG
@TEXT_COLUMN_FLAG
@click.option(
    "--served-model-name",
    help="Model whose lengths to read from a server with several models (default: the only one).",
)
@click.option(
    "--seconds",
    type=FiniteRange(1),
    default=120.0,
    show_default=True,
    help="Approximate duration of the search, in seconds. The comparison of both grids on the "
    "device takes additional time.",
)
@click.option(
    "--max-buckets",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Maximum number of buckets in the new grid.",
)
@click.option(
    "--compile-seconds",
    type=FiniteRange(0, min_open=True),
    help="Maximum seconds to compile all buckets of the new grid one after the other without a "
    "cache (default: no limit).",
)
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def tune_command(
    traffic: str,
    output: Path,
    picture: Path | None,
    model: str | None,
    text_column: str,
    served_model_name: str | None,
    seconds: float,
    max_buckets: int,
    compile_seconds: float | None,
    **flags: Any,
) -> None:
    """Find the batch shapes (buckets) that serve given traffic at the lowest cost on this device.

    TRAFFIC is a .txt or .jsonl file of texts, - for standard input, a .json file of lengths in
    tokens ([9, 12] or {"9": 120}), or the URL of a jaxembed server, whose metrics contain the
    lengths of its inputs.

    The new grid is compared with the current one, which is that of --buckets or the built-in one,
    and the better one is written. The device must be idle meanwhile.
    """
    from jaxembed.bulk.sources import read_texts
    from jaxembed.platform.files import check_output
    from jaxembed.tools.tune import lengths, report
    from jaxembed.tools.tune.cost import load_measured
    from jaxembed.tools.tune.tuning import Budget, tune

    # report files that cannot be read or written before the slow load
    check_output(output, "--output", [".json"])
    if picture is not None:
        report.check_picture(picture)
    texts = length_counts = None
    if traffic.startswith(("http://", "https://")):
        length_counts = lengths.of_server(traffic, served_model_name)
    elif traffic.endswith(".json"):
        length_counts = lengths.of_file(Path(traffic))
    else:
        texts = read_texts([traffic], text_column)
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    import jax

    jax.config.update("jax_enable_compilation_cache", False)  # compile times are also measured
    loaded = load_measured(
        model_source(model, flags), config=engine_config(flags), text=text_config(flags)
    )
    if texts is not None:
        length_counts = lengths.of_texts(texts, loaded.count_tokens, traffic)
    assert length_counts is not None
    budget = Budget(seconds, max_buckets, compile_seconds)
    tuning = tune(loaded, length_counts, budget, step_lines())
    tuning.write(output)
    click.echo(report.table(tuning))
    if picture is not None:
        report.draw(tuning, picture)
    loaded.close()
    outcome = "is better" if tuning.is_better else "is not better, so the current one was kept"
    click.echo(f"\nThe new grid {outcome}. To use it: jaxembed serve --buckets {output}")
