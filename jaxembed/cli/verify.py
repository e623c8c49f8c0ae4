"""`jaxembed verify`: a model compared with a reference implementation."""

from typing import Any

import click

from jaxembed.cli.jax_setup import configure_jax
from jaxembed.cli.logs import configure_logging
from jaxembed.cli.options import ENGINE_OPTIONS, MODEL_OPTIONS, TEXT_COLUMN_FLAG
from jaxembed.cli.progress import compile_bar
from jaxembed.cli.settings import engine_config, model_source
from jaxembed.cli.status import EXIT_AGREES, EXIT_DISAGREES


@click.command("verify")
@click.argument("model", required=False)
@click.option(
    "--against",
    type=click.Choice(["sentence-transformers"]),
    default="sentence-transformers",
    show_default=True,
    help="The reference; it must be installed.",
)
@click.option("--texts", help="Compare these too: a .txt file (a line each), .jsonl, or - (lines).")
@TEXT_COLUMN_FLAG
@MODEL_OPTIONS
@ENGINE_OPTIONS
def verify_command(
    model: str | None, against: str, texts: str | None, text_column: str, **flags: Any
) -> None:
    """Compare MODEL with a reference, in float32 and in the dtype that would be served.

    Token ids and vectors, or logits, of a fixed list of texts, with each prompt of the checkpoint.
    Of a long-context model inputs are cut at 2048 tokens unless --max-input-length says otherwise.
    Ends with a row for the table of verified models. Exit status: 0 if all is within the bounds,
    1 if not, 2 if it could not be compared.
    """
    for flag in ("pooling", "dense_path", "adapter"):
        if flags[flag]:
            name = "--" + flag.replace("_", "-")
            raise click.UsageError(f"{name}: {against} computes what the checkpoint says")
    configure_logging()
    from jaxembed.bulk.sources import read_texts
    from jaxembed.verify.report import HEADER, markdown_row, report_lines
    from jaxembed.verify.verification import verify_model

    extra_texts = list(read_texts([texts], text_column)) if texts is not None else []
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    verification = verify_model(
        model,
        extra_texts,
        source=model_source(flags),
        config=engine_config(flags),
        on_progress=compile_bar(),
    )
    click.echo("\n".join(report_lines(verification)))
    click.echo(f"\n{HEADER}\n{markdown_row(verification)}")
    click.get_current_context().exit(EXIT_AGREES if verification.agrees else EXIT_DISAGREES)
