"""`jaxembed verify`: compares a model with a reference implementation."""

from typing import Any

import click

from jaxembed.cli.loading import compile_bar, configure_jax, engine_config, model_source
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    EXIT_AGREES,
    EXIT_DISAGREES,
    MODEL_OPTIONS,
    TEXT_COLUMN_FLAG,
    Command,
)


@click.command("verify", cls=Command, example="jaxembed verify BAAI/bge-small-en-v1.5")
@click.argument("model", required=False)
@click.option(
    "--against",
    type=click.Choice(["sentence-transformers"]),
    default="sentence-transformers",
    show_default=True,
    help="Reference implementation to compare with; it must be installed.",
)
@click.option(
    "--texts",
    help="Further texts to compare: a .txt file with one text per line, a .jsonl file, or - for "
    "standard input (default: a built-in list alone).",
)
@TEXT_COLUMN_FLAG
@MODEL_OPTIONS
@ENGINE_OPTIONS
def verify_command(
    model: str | None, against: str, texts: str | None, text_column: str, **flags: Any
) -> None:
    """Compare a model's vectors or scores with those of a reference implementation.

    MODEL is a directory or a hub id (default: all-MiniLM-L6-v2). The token ids and the vectors or
    logits of a fixed list of texts are compared, with each prompt of the checkpoint, in float32 and
    in the data type that would be served. Inputs are truncated at 2048 tokens unless
    --max-input-length says otherwise. The last lines are a row for the table of verified models.

    The exit status is 0 if all differences are within the bounds, 1 if not, and 2 if the model
    could not be compared.
    """
    for flag in ("pooling", "dense_path", "cutoff_layer", "adapter"):
        if flags[flag]:
            name = "--" + flag.replace("_", "-")
            raise click.UsageError(
                f"{name} cannot be compared: {against} computes what the checkpoint says"
            )
    from jaxembed.bulk.sources import read_texts
    from jaxembed.tools.verify.report import HEADER, markdown_row, report_lines
    from jaxembed.tools.verify.verification import verify_model

    extra_texts = list(read_texts([texts], text_column)) if texts is not None else []
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    verification = verify_model(
        model_source(model, flags),
        extra_texts,
        config=engine_config(flags),
        on_progress=compile_bar(),
    )
    click.echo("\n".join(report_lines(verification)))
    click.echo(f"\n{HEADER}\n{markdown_row(verification)}")
    click.get_current_context().exit(EXIT_AGREES if verification.agrees else EXIT_DISAGREES)
