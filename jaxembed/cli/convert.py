"""`jaxembed convert`: converts a Hugging Face model to a checkpoint."""

import os
from typing import Any

import click

from jaxembed.cli.loading import model_source
from jaxembed.cli.options import MODEL_OPTIONS, SPLADE_FLAG, Command


@click.command(
    "convert", cls=Command, example="jaxembed convert BAAI/bge-small-en-v1.5 ./bge-small"
)
@click.argument("model")
@click.argument("out")
@MODEL_OPTIONS
@SPLADE_FLAG
def convert_command(model: str, out: str, **flags: Any) -> None:
    """Convert a Hugging Face model to a checkpoint that can be served without the hub.

    MODEL is a directory or a hub id. OUT is the new directory, or an s3:// or gs:// URL.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # saving starts JAX, which must not take an accelerator
    from jaxembed.checkpoints import hub

    spec = hub.convert_model(model_source(model, flags), out)
    gives = f"{spec.dim} dimensions" if spec.task == "embed" else f"labels {', '.join(spec.labels)}"
    click.echo(f"{out}: {spec.architecture}, {spec.task}, {gives}, {spec.max_input_tokens} tokens")
