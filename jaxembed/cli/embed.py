"""`jaxembed embed`: a file of vectors from a file of texts."""

import logging
import time
from pathlib import Path
from typing import Any, Literal, get_args

import click

from jaxembed.cli.loading import load_embedder, refuse_without_outputs
from jaxembed.cli.logs import configure_logging
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    FIELD_FLAG,
    MODEL_FLAG,
    MODEL_OPTIONS,
    TEXT_OPTIONS,
)
from jaxembed.errors import ConfigError
from jaxembed.outputs import REPRESENTATIONS, OutputName
from jaxembed.quantise import EmbeddingDtype

logger = logging.getLogger("jaxembed")


@click.command("embed")
@click.argument("texts")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), required=True, help=".npy or .jsonl."
)
@MODEL_FLAG
@FIELD_FLAG
@click.option("--prompt-name", help="Prompt of the model to put before every text.")
@click.option("--adapter-name", help="The adapter of the model to embed with.")
@click.option("--dimensions", type=click.IntRange(1), help="Cut the vectors to this many.")
@click.option(
    "--output-dtype",
    type=click.Choice(get_args(EmbeddingDtype)),
    default="float",
    show_default=True,
    help="int8 and uint8 need ranges: see `jaxembed calibrate`.",
)
@click.option(
    "--outputs",
    type=click.Choice(REPRESENTATIONS),
    multiple=True,
    default=("dense",),
    show_default=True,
    help="What the model gives for a text; repeat it for several, which need .jsonl.",
)
@click.option(
    "--role", type=click.Choice(("query", "document")), help="What the texts are, to the model."
)
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def embed_command(
    texts: str,
    output: Path,
    model: str | None,
    field: str,
    prompt_name: str | None,
    adapter_name: str | None,
    dimensions: int | None,
    output_dtype: EmbeddingDtype,
    outputs: tuple[OutputName, ...],
    role: Literal["query", "document"] | None,
    **flags: Any,
) -> None:
    """Embed a file of texts into a file of vectors, or of other outputs of the model.

    TEXTS is a .txt file with one text a line, a .jsonl file with a string or an object a line, or
    - for standard input with one text a line.
    """
    configure_logging()
    from tqdm import tqdm

    from jaxembed.bulk import check_vectors_path, embed_file, read_text_file

    lines = read_text_file(texts, field)  # a missing file is reported before a long load
    outputs = tuple(dict.fromkeys(outputs))
    check_vectors_path(output, outputs)
    if role is not None and outputs == ("dense",):
        raise ConfigError("--role is for other outputs than dense; name a prompt by --prompt-name")
    refuse_without_outputs(model, prompt_name, flags, outputs)
    embedder = load_embedder(model, flags)
    started_at = time.monotonic()
    with tqdm(unit=" texts", desc="embed", disable=None) as bar:
        count = embed_file(
            embedder,
            lines,
            output,
            outputs=outputs,
            on_progress=bar.update,
            prompt_name=prompt_name,
            adapter=adapter_name,
            dimensions=dimensions,
            output_dtype=output_dtype,
            **({} if role is None else {"role": role}),
        )
    seconds = time.monotonic() - started_at
    embedder.close()
    logger.info("%d texts to %s in %.1f s, %.0f a second", count, output, seconds, count / seconds)
