"""`jaxembed info`: what a model is, without loading it."""

import os
from typing import Any

import click

from jaxembed.cli.logs import configure_logging
from jaxembed.cli.options import MODEL_OPTIONS, SPLADE_FLAG
from jaxembed.cli.settings import model_source


@click.command("info")
@click.argument("model", required=False)
@click.option(
    "--verify", is_flag=True, help="Compare the files of a converted model with their digests."
)
@MODEL_OPTIONS
@SPLADE_FLAG
def info_command(model: str | None, verify: bool, **flags: Any) -> None:
    """Say what MODEL is: task, outputs, limits, pooling, prompts, size. Converts nothing."""
    configure_logging()
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing here is worth starting another device for
    import msgspec

    from jaxembed import hub
    from jaxembed.summary import summary_of_routes

    source = model_source(flags)
    if verify:  # before reading the manifest, which may be damaged
        click.echo(f"{hub.verify_files(model, **source)} files verified", err=True)
    facts = summary_of_routes(hub.describe_model(model, **source))
    click.echo(msgspec.json.format(msgspec.json.encode(facts)).decode())
