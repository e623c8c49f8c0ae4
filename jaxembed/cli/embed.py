"""`jaxembed embed`: vectors of files of texts or images, as a file or a folder of Parquet."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from click.core import ParameterSource

from jaxembed.cli.image_inputs import images_of, refuse_flags_of_texts, with_columns_of_files
from jaxembed.cli.jobs import folder_options, refuse_other_suffix, run_folder
from jaxembed.cli.loading import load_embedder, refuse_without_outputs
from jaxembed.cli.logs import configure_logging
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    JOB_OPTIONS,
    MODEL_FLAG,
    MODEL_OPTIONS,
    OUTPUT_FLAG,
    TEXT_COLUMN_FLAG,
    TEXT_OPTIONS,
)
from jaxembed.errors import ConfigError
from jaxembed.outputs import REPRESENTATIONS, OutputName
from jaxembed.quantise import EmbeddingDtype

if TYPE_CHECKING:
    from jaxembed.bulk.image_rows import ImageRows
    from jaxembed.embedder import Embedder

logger = logging.getLogger("jaxembed")


@click.command("embed")
@click.argument("inputs", nargs=-1, required=True)
@OUTPUT_FLAG
@MODEL_FLAG
@TEXT_COLUMN_FLAG
@click.option("--image-column", help="Has images or their paths, to embed instead of texts.")
@click.option(
    "--pdf-dpi",
    type=click.IntRange(1),
    default=150,
    show_default=True,
    help="Pixels an inch at which the pages of PDF files are rendered.",
)
@click.option(
    "--pdf-timeout",
    type=click.FloatRange(0, 86_400, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that rendering a page of a PDF file may take, and opening the file.",
)
@JOB_OPTIONS
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
    help="What the model gives for a text; repeat it for several, which .npy has no place for.",
)
@click.option(
    "--role", type=click.Choice(("query", "document")), help="What the texts are, to the model."
)
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def embed_command(
    inputs: tuple[str, ...],
    output: str,
    model: str | None,
    text_column: str,
    image_column: str | None,
    pdf_dpi: int,
    pdf_timeout: float,
    prompt_name: str | None,
    adapter_name: str | None,
    dimensions: int | None,
    output_dtype: EmbeddingDtype,
    outputs: tuple[OutputName, ...],
    role: Literal["query", "document"] | None,
    **flags: Any,
) -> None:
    """Embed files of texts or images into vectors, or other outputs of the model.

    INPUTS are files, folders and patterns, here or at s3://, gs:// and hf://: .txt (a text a line),
    .jsonl, .csv, .tsv, .parquet and .arrow, or - for standard input with a text a line. Or images
    (.jpg, .png, .webp, .gif, .bmp, .tiff) and .pdf, of which each page is a row.

    OUTPUT is a folder of Parquet, here or at s3:// or gs://, in parts of equal numbers of rows: run
    the same command again after it was stopped, and it goes on. Or a .npy or .jsonl file.
    """
    configure_logging()
    outputs = tuple(dict.fromkeys(outputs))
    if role is not None and outputs == ("dense",):
        raise ConfigError("--role is for other outputs than dense; name a prompt by --prompt-name")
    images = images_of(inputs, image_column, pdf_dpi, pdf_timeout)
    if images is not None:
        refuse_flags_of_texts({"prompt_name": prompt_name, "role": role, **flags})
    options = {
        "prompt_name": prompt_name,
        "adapter": adapter_name,
        "dimensions": dimensions,
        "output_dtype": output_dtype,
        **({} if role is None else {"role": role}),
    }
    chosen = folder_options(flags)
    if output.endswith((".npy", ".jsonl")):
        _refuse_images(output, images)
        _refuse_folder_options(output, chosen)
        write = partial(_write_file, inputs, text_column, Path(output), outputs, options)
    else:
        refuse_other_suffix(output, ".npy, .jsonl or ")
        if images is not None and images.column is None:
            chosen = with_columns_of_files(inputs, chosen)
        chosen["images"] = images
        write = partial(_write_folder, inputs, text_column, output, outputs, options, chosen)
    write(lambda: _load(model, prompt_name, flags, outputs, images))


def _load(
    model: str | None,
    prompt_name: str | None,
    flags: dict[str, Any],
    outputs: tuple[OutputName, ...],
    images: "ImageRows | None",
) -> "Embedder":
    refuse_without_outputs(model, prompt_name, flags, outputs, of_images=images is not None)
    return load_embedder(model, flags)


def _refuse_images(output: str, images: "ImageRows | None") -> None:
    """Raise ConfigError for images, whose names a single file has no place for."""
    if images is not None:
        raise ConfigError(
            f"--output {output}: vectors of images are written as Parquet, each with its path or "
            "what --id-column keeps; name a folder"
        )


def _refuse_folder_options(output: str, chosen: dict[str, Any]) -> None:
    """Raise ConfigError for options that only a folder has a place for."""
    given = click.get_current_context().get_parameter_source
    for name in chosen:
        if given(name) is not ParameterSource.DEFAULT:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} is for a folder of Parquet, and --output {output} is one file; name a "
                "folder"
            )


def _write_file(
    inputs: tuple[str, ...],
    text_column: str,
    output: Path,
    outputs: tuple[OutputName, ...],
    options: dict[str, Any],
    load: Callable[[], "Embedder"],
) -> None:
    from tqdm import tqdm

    from jaxembed.bulk.sources import read_texts
    from jaxembed.bulk.vector_file import check_vectors_path, embed_file

    lines = read_texts(inputs, text_column)  # a missing file is reported before a long load
    check_vectors_path(output, outputs)
    embedder = load()
    started_at = time.monotonic()
    with tqdm(unit=" texts", desc="embed", disable=None) as bar:
        count = embed_file(
            embedder, lines, output, outputs=outputs, on_progress=bar.update, **options
        )
    seconds = time.monotonic() - started_at
    embedder.close()
    logger.info("%d texts to %s in %.1f s, %.0f a second", count, output, seconds, count / seconds)


def _write_folder(
    inputs: tuple[str, ...],
    text_column: str,
    output: str,
    outputs: tuple[OutputName, ...],
    options: dict[str, Any],
    chosen: dict[str, Any],
    load: Callable[[], "Embedder"],
) -> None:
    from jaxembed.bulk.computations import EmbedImages, EmbedRows

    images = chosen["images"]
    embedder = load()
    try:
        if images is None:
            computation = EmbedRows(embedder, text_column, outputs, options)
        else:
            computation = EmbedImages(embedder, images.column, outputs, options)
        run_folder(computation, inputs, output, chosen)
    finally:
        embedder.close()
