"""Which images `jaxembed embed` is asked to embed, if any."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from jaxembed.errors import ConfigError

if TYPE_CHECKING:
    from jaxembed.bulk.image_rows import ImageRows

OF_TEXTS = ("prompt_name", "role", "default_prompt", "default_prompt_name")  # flags


def images_of(
    inputs: Sequence[str], image_column: str | None, pdf_dpi: int, pdf_timeout_s: float
) -> "ImageRows | None":
    """Which images are the rows of the inputs, None if these are texts.

    Raises ConfigError for an input that is missing, for inputs of texts and of images, for flags
    that do not fit each other or the inputs, and for an extra that is not installed.
    """
    from jaxembed.bulk.image_rows import ImageRows
    from jaxembed.bulk.sources import IMAGE_FILES, ROW_FILES, input_files, is_of_images

    column = _column_flag(image_column)
    if column is None:
        files = [one.name for one in input_files(inputs, (*ROW_FILES, *IMAGE_FILES))]
        images = [name for name in files if is_of_images(name)]
        if images and len(images) < len(files):
            rows = next(name for name in files if not is_of_images(name))
            raise ConfigError(
                f"the inputs have images, such as {images[0]}, and files of rows, such as {rows}; "
                "name one kind by a pattern such as 'photos/*.jpg', or say with --text-column or "
                "--image-column which column of the rows to embed"
            )
        if images:
            return ImageRows(pdf_dpi=pdf_dpi, pdf_timeout_s=pdf_timeout_s)
    else:
        if named := next(filter(is_of_images, inputs), None):
            raise ConfigError(f"{named}: image and PDF files have no columns; leave {column} out")
        input_files(inputs)
    for name in ("pdf_dpi", "pdf_timeout"):
        if _is_given(name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is for PDF files, and the inputs are files of rows")
    if image_column is None:
        return None
    images = ImageRows(image_column)
    images.files(inputs)
    return images


def refuse_flags_of_texts(flags: dict[str, Any]) -> None:
    """Raise ConfigError for a flag that is for texts alone."""
    for name in OF_TEXTS:
        if flags[name] is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for texts, and the inputs are images; leave it out"
            )


def with_columns_of_files(inputs: Sequence[str], chosen: dict[str, Any]) -> dict[str, Any]:
    """The options of a folder of vectors of image files: they keep what such files have instead of
    columns. Raises ConfigError if columns are asked for."""
    from jaxembed.bulk.image_rows import ImageRows, columns_of_files

    for name in ("id_column", "keep"):
        if chosen[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for files of rows. Image and PDF files have the "
                "columns `path` and `page`, which are kept; leave it out"
            )
    path, *others = columns_of_files(ImageRows().files(inputs))
    return chosen | {"id_column": path, "keep": tuple(others)}


def _column_flag(image_column: str | None) -> str | None:
    """The flag that names a column to embed, if one is given. Raises ConfigError for both."""
    if not _is_given("text_column"):
        return None if image_column is None else "--image-column"
    if image_column is not None:
        raise ConfigError(
            "--text-column and --image-column: a row is a text or an image. For both, run the "
            "command twice, into two folders with the same --id-column"
        )
    return "--text-column"


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT
