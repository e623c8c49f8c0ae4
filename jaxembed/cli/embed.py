"""`jaxembed embed`: embeds the texts or images of files, and writes the vectors to a folder of
Parquet files or to one file."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from click.core import ParameterSource

from jaxembed.cli.loading import (
    check_folder_job,
    folder_options,
    load_for_outputs,
    run_folder_job,
    warn_of_truncation,
)
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    JOB_OPTIONS,
    MODEL_FLAG,
    MODEL_OPTIONS,
    TEXT_COLUMN_FLAG,
    TEXT_OPTIONS,
    Command,
)
from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.errors import ConfigError, counted
from jaxembed.quantise import EmbeddingDtype

if TYPE_CHECKING:
    from jaxembed.bulk.row_source import RowSource
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
    help="Column that contains images or their paths, to embed instead of texts, or with those of "
    "--text-column into one vector.",
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
@click.option(
    "--pdf-text",
    is_flag=True,
    help="Embed each page of a PDF file together with its text, into one vector.",
)
@JOB_OPTIONS
@click.option(
    "--prompt-name",
    help="Name of the model's prompt to put in front of every text (default: the checkpoint's "
    "default prompt).",
)
@click.option(
    "--instruction",
    help="Instruction in words for every text, in the model's own form (default: none).",
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
    pdf_text: bool,
    prompt_name: str | None,
    instruction: str | None,
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
    outputs = tuple(dict.fromkeys(outputs))
    if role is not None and outputs == ("dense",):
        raise ConfigError(
            "--role is for outputs other than dense; choose a prompt with --prompt-name instead"
        )
    pdf_options = {"pdf_dpi": pdf_dpi, "pdf_timeout_s": pdf_timeout, "pdf_text": pdf_text}
    source = _row_source(inputs, text_column, image_column, pdf_options)
    text_options = {"prompt_name": prompt_name, "instruction": instruction, "role": role}
    options = {
        "prompt_name": prompt_name,
        "instruction": instruction,
        "adapter": adapter_name,
        "dimensions": dimensions,
        "output_dtype": output_dtype,
        **({} if role is None else {"role": role}),
    }
    load = partial(load_for_outputs, model, text_options, flags, source, outputs)
    job_options = folder_options(flags)
    if output.endswith((".npy", ".jsonl")):
        lines = source.texts(inputs, output)
        for name in job_options:
            if _is_given(name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for a folder of Parquet files, and --output "
                    f"{output} is one file; name a folder"
                )
        _write_file(load, lines, Path(output), outputs, options)
    else:
        check_folder_job(inputs, output, files=".npy, .jsonl or ")
        job_options["id_column"], job_options["keep"] = source.kept_columns(
            inputs, job_options["id_column"], job_options["keep"]
        )

        def make(embedder: "Embedder") -> Any:
            from jaxembed.bulk.computations import EmbedRows

            return EmbedRows(embedder, source, outputs, options)

        run_folder_job(load, make, inputs, output, job_options)


def _row_source(
    inputs: Sequence[str],
    text_column: str,
    image_column: str | None,
    pdf_options: dict[str, Any],
) -> "RowSource":
    """Return what reads the rows of the inputs: texts, columns of images and texts, or image files.
    `pdf_options` are fields of ImageFiles.

    Raises ConfigError if an input is missing, the inputs are both texts and images, flags do not
    fit each other or the inputs, or an extra is not installed.
    """
    from jaxembed.bulk.image_rows import ImageColumn, ImageFiles
    from jaxembed.bulk.row_source import TextRows
    from jaxembed.bulk.sources import IMAGE_FILES, ROW_FILES, input_files, is_of_images

    column_flag = None if image_column is None else "--image-column"
    if _is_given("text_column"):
        column_flag = "--text-column"
    if column_flag is None:
        files = [file.name for file in input_files(inputs, (*ROW_FILES, *IMAGE_FILES))]
        images = [name for name in files if is_of_images(name)]
        if images and len(images) < len(files):
            other = next(name for name in files if not is_of_images(name))
            raise ConfigError(
                f"the inputs are images, such as {images[0]}, and files of rows, such as {other}; "
                "choose one kind with a pattern such as 'photos/*.jpg', or name the column of the "
                "rows to embed with --text-column or --image-column"
            )
        if images:
            return ImageFiles(**pdf_options)
    else:
        if image_file := next(filter(is_of_images, inputs), None):
            raise ConfigError(
                f"{image_file}: image and PDF files have no columns; leave {column_flag} out"
            )
        input_files(inputs)  # raises for a missing input
    for name in ("pdf_dpi", "pdf_timeout", "pdf_text"):
        if _is_given(name):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} is for PDF files, and the inputs are files of rows; leave it out"
            )
    if image_column is None:
        return TextRows((text_column,))
    texts = (text_column,) if _is_given("text_column") else ()
    source = ImageColumn((image_column, *texts))
    source.files(inputs)  # raises if the extra `images` is not installed
    return source


def _is_given(name: str) -> bool:
    """Return whether the user has set an option of the current command."""
    context = click.get_current_context()
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _write_file(
    load: Callable[[], "Embedder"],
    lines: Iterator[str],
    output: Path,
    outputs: tuple[OutputName, ...],
    options: dict[str, Any],
) -> None:
    """Load a model by calling `load`, and write the vectors of the texts `lines` to a file.
    `options` are further arguments of `embed_file`. Raises ConfigError, and the errors of `load`
    and `embed_file`."""
    from tqdm import tqdm

    from jaxembed.bulk.vectors import check_vectors_path, embed_file

    check_vectors_path(output, outputs)  # before a long load
    embedder = load()
    started_at = time.monotonic()
    with tqdm(unit=" texts", desc="embed", disable=None) as bar:
        count = embed_file(
            embedder, lines, output, outputs=outputs, on_progress=bar.update, **options
        )
    seconds = time.monotonic() - started_at
    embedder.close()
    logger.info(
        "wrote the vectors of %s to %s in %.1f s (%.0f per second)",
        counted(count, "text"),
        output,
        seconds,
        count / seconds,
    )
    warn_of_truncation(embedder)
