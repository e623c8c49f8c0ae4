"""`jaxembed embed`: vectors of files of texts or images, as a file or a folder of Parquet."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from click.core import ParameterSource

from jaxembed.cli.help import Command
from jaxembed.cli.image_inputs import images_of, refuse_flags_of_texts, with_columns_of_files
from jaxembed.cli.jobs import check_folder_job, folder_options, refuse_other_suffix, run_folder
from jaxembed.cli.loading import load_embedder, refuse_without_outputs
from jaxembed.cli.logs import configure_logging
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    JOB_OPTIONS,
    MODEL_FLAG,
    MODEL_OPTIONS,
    TEXT_COLUMN_FLAG,
    TEXT_OPTIONS,
)
from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.errors import ConfigError
from jaxembed.quantise import EmbeddingDtype

if TYPE_CHECKING:
    from jaxembed.bulk.image_rows import ImageRows
    from jaxembed.embedder import Embedder

logger = logging.getLogger("jaxembed")


@click.command(
    "embed",
    cls=Command,
    example="jaxembed embed articles/ --output vectors --id-column id --keep title",
)
@click.argument("inputs", nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    required=True,
    help="Folder of Parquet files to write, or one .npy or .jsonl file.",
)
@MODEL_FLAG
@TEXT_COLUMN_FLAG
@click.option(
    "--image-column",
    help="Column that contains images or their paths, to embed instead of texts.",
)
@click.option(
    "--pdf-dpi",
    type=click.IntRange(1),
    default=150,
    show_default=True,
    help="Resolution at which pages of PDF files are rendered, in pixels per inch.",
)
@click.option(
    "--pdf-timeout",
    type=click.FloatRange(0, 86_400, min_open=True),
    default=30.0,
    show_default=True,
    help="Maximum seconds to open a PDF file, and to render each of its pages.",
)
@JOB_OPTIONS
@click.option(
    "--prompt-name",
    help="Name of the model's prompt to put in front of every text (default: the checkpoint's "
    "default prompt).",
)
@click.option("--adapter-name", help="Name of the adapter to embed with (default: none).")
@click.option(
    "--dimensions",
    type=click.IntRange(1),
    help="Number of dimensions to truncate the vectors to (default: all).",
)
@click.option(
    "--output-dtype",
    type=click.Choice(get_args(EmbeddingDtype)),
    default="float",
    show_default=True,
    help="Data type of the vectors in the output; int8 and uint8 need calibration ranges, which "
    "`jaxembed calibrate` measures.",
)
@click.option(
    "--outputs",
    type=click.Choice(REPRESENTATIONS),
    multiple=True,
    default=("dense",),
    show_default=True,
    help="Output of the model to write. Repeat for several, which need a folder or a .jsonl file.",
)
@click.option(
    "--role",
    type=click.Choice(("query", "document")),
    help="Whether the texts are queries or documents, for models that treat them differently "
    "(default: neither).",
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
    """Embed the texts or images of files into vectors.

    INPUTS are files, folders and patterns, local or at s3://, gs:// or hf://. Files of texts are
    .txt (one text per line), .jsonl, .csv, .tsv, .parquet and .arrow; - is standard input with one
    text per line. Images are .jpg, .png, .webp, .gif, .bmp and .tiff. Each page of a .pdf is an
    image.

    The output is a folder of Parquet files, local or at s3:// or gs://, or one .npy or .jsonl file.
    A folder can be continued: run the same command again after an interruption.
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
        check_folder_job(inputs, output)
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
