"""Reads rows of images: image files, pages of PDF files, and columns of files of rows, in bounded
memory. Knows nothing of models."""

import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxembed.bulk.ahead import ahead
from jaxembed.bulk.sources import (
    IMAGE_FILES,
    ROW_FILES,
    START,
    BadRow,
    Block,
    Columns,
    InputFile,
    Place,
    arrow,
    as_list,
    check_columns,
    column_types,
    input_files,
    is_pdf,
    is_text,
    opened,
    read_rows,
)
from jaxembed.errors import CheckpointError, ConfigError, EmptyInput, InvalidImage, StoreUnreachable
from jaxembed.platform import object_store
from jaxembed.platform.extras import require
from jaxembed.preprocessing.images.media import excerpt, is_data_uri, read_data_uri
from jaxembed.preprocessing.images.pdf import PDF_DPI, PDF_TIMEOUT_S, PdfFile

PATH_COLUMN, PAGE_COLUMN = "path", "page"  # the columns of image files; images have no page
IMAGES_A_BLOCK = 16  # of a column of images
FILES_AHEAD = 8  # read while those before are computed, for stores take long to answer
MOST_FILE_BYTES = 200 * 10**6  # of an image's file

RowImage = bytes | np.ndarray  # an image's file, or the colours of a page


@dataclass(frozen=True)
class ImageRows:
    """Which images are the rows of a job."""

    column: str | None = None  # of files of rows; None: the inputs are image and PDF files
    pdf_dpi: int = PDF_DPI
    pdf_timeout_s: float = PDF_TIMEOUT_S  # for each page, and for opening a PDF file

    def files(self, names: Sequence[str]) -> list[InputFile]:
        """The files that these names stand for. Raises ConfigError as `input_files`, and without
        the extra `images`."""
        require("images", "images in a column" if self.column else "image files")
        return input_files(names, IMAGE_FILES if self.column is None else ROW_FILES)

    def check(self, files: Sequence[InputFile]) -> None:
        """Raise ConfigError if a file lacks the column of images, or has one of another kind."""
        if self.column is not None:
            wanted = "images: binary, structs of bytes and path, or strings with paths or data URIs"
            check_columns(files, [self.column], fits=_is_of_images, wanted=wanted)

    def types(self, files: Sequence[InputFile], columns: Columns) -> dict[str, Any]:
        """The Arrow types of columns to keep. Raises ConfigError as `column_types`."""
        if self.column is not None:
            return column_types(files, columns)
        types = {PATH_COLUMN: arrow().string(), PAGE_COLUMN: arrow().int32()}
        return {name: types[name] for name in columns}

    def read(
        self, files: Sequence[InputFile], columns: Columns, start: Place = START
    ) -> Iterator[tuple[Place, Block]]:
        """The rows from `start` on, in order, each a block of its own with its image.

        Raises ConfigError if a file cannot be read.
        """
        if self.column is None:
            return _read_files(files, self, start)
        return _read_column(files, columns, self.column, start)


def columns_of_files(files: Sequence[InputFile]) -> list[str]:
    """The columns that image files have: PATH_COLUMN, and with PDF files PAGE_COLUMN."""
    return [PATH_COLUMN, PAGE_COLUMN] if any(is_pdf(file.name) for file in files) else [PATH_COLUMN]


def _is_of_images(kind: Any) -> bool:
    """Whether values of an Arrow type may be images."""
    types = arrow().types
    if types.is_struct(kind):
        return {"bytes", "path"}.intersection(field.name for field in kind) != set()
    return is_text(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _read_files(
    files: Sequence[InputFile], images: ImageRows, start: Place
) -> Iterator[tuple[Place, Block]]:
    left = files[start.file :]
    read = partial(_image_in, _WholeFiles())
    for number, image in enumerate(ahead(read, left, FILES_AHEAD), start.file):
        skip = start.row if number == start.file else 0
        file = files[number]
        rows = _pages(file, images, skip) if image is None else _one(image, skip)
        for row, (page, found, share) in enumerate(rows, skip):
            columns = {PATH_COLUMN: [file.name], PAGE_COLUMN: [page]}
            yield Place(number, row), _block(columns, found, share)


def _one(
    image: RowImage | BadRow, skip: int
) -> Iterator[tuple[int | None, RowImage | BadRow, float]]:
    """The one row of a file without pages."""
    if not skip:
        yield None, image, 1.0


def _image_in(files: "_WholeFiles", file: InputFile) -> RowImage | BadRow | None:
    """The bytes of an image's file, or what is wrong with it. None for a PDF file, which is read
    when its turn comes."""
    if is_pdf(file.name):
        return None
    try:
        return files.read(file.name, MOST_FILE_BYTES)
    except BadRow as problem:
        return problem


def _pages(
    file: InputFile, images: ImageRows, skip: int
) -> Iterator[tuple[int | None, RowImage | BadRow, float]]:
    """The pages of a PDF file, each with its number from 1 and the share of the file up to it. A
    file that cannot be opened is one row, without a number."""
    try:
        pdf = _opened_pdf(file.name, images.pdf_timeout_s)
    except InvalidImage as error:
        yield from _one(BadRow(f"cannot be read: {error}"), skip)
        return
    try:
        for page in range(skip, pdf.pages):
            try:
                image: RowImage | BadRow = pdf.render(page, images.pdf_dpi)
            except InvalidImage as error:
                image = BadRow(f"is wrong: {error}")
            yield page + 1, image, (page + 1) / pdf.pages
    finally:
        pdf.close()


def _opened_pdf(name: str, timeout_s: float) -> PdfFile:
    """A PDF file here or in a store. Raises as `PdfFile`, and as `opened` for one that cannot be
    read."""
    try:
        with opened(name) as file:
            return PdfFile(file, timeout_s)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error


def _read_column(
    files: Sequence[InputFile], columns: Columns, column: str, start: Place
) -> Iterator[tuple[Place, Block]]:
    whole = _WholeFiles()
    for place, block in read_rows(files, columns, start, IMAGES_A_BLOCK):
        for index, value in enumerate(as_list(block.columns[column])):
            row = block.sliced(index, index + 1)
            image: RowImage | BadRow
            try:
                image = (
                    BadRow(row.bad[0])
                    if row.bad
                    else _image_of(value, column, files[place.file].name, whole)
                )
            except BadRow as problem:
                image = problem
            yield Place(place.file, place.row + index), _block(row.columns, image, row.share)


def _block(columns: dict[str, Any], image: RowImage | BadRow, share: float) -> Block:
    """The block of one row."""
    if isinstance(image, BadRow):
        return Block(columns, 1, {0: str(image)}, share)
    return Block(columns, 1, {}, share, image)


def _image_of(value: Any, column: str, file: str, whole: "_WholeFiles") -> bytes:
    """The bytes of the image that a value of a column stands for: bytes themselves, a dict of
    `bytes` and `path`, a path or a data URI. Raises BadRow."""
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if value is None:
        raise BadRow(f"has no `{column}` (--image-column names the column)")
    if not isinstance(value, bytes | str):
        raise BadRow(f"has `{column}` of type {type(value).__name__}; wanted bytes or a string")
    if not value:
        raise BadRow(f"has an empty `{column}`: there is nothing to embed")
    if isinstance(value, bytes):
        return value
    if is_data_uri(value):
        try:
            return read_data_uri(value, MOST_FILE_BYTES)
        except (InvalidImage, EmptyInput) as error:
            raise BadRow(f"is wrong: {error}") from None
    return whole.read(_beside(value, file), MOST_FILE_BYTES, f"has {excerpt(value)}, which ")


def _beside(path: str, file: str) -> str:
    """Where the file is that `file` names by `path`. Raises BadRow for what is not read."""
    if object_store.is_url(path, of_data=True):
        return path
    if "://" in path:
        raise BadRow(
            f"has {excerpt(path)}, and no such URL is fetched; wanted a path, a data URI or a URL "
            "of s3://, gs:// or hf://"
        )
    if not object_store.is_url(file, of_data=True):
        return str(Path(file).parent / path)
    scheme, _, place = file.partition("://")
    if path.startswith("/"):
        raise BadRow(f"has {excerpt(path)}, a path of a machine, in a file of {scheme}://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(posixpath.dirname(place), path))}"


class _WholeFiles:
    """Reads whole files, with one connection to each store. Threads may share it."""

    def __init__(self) -> None:
        self._stores: dict[str, Any] = {}

    def read(self, name: str, most_bytes: int, before: str = "") -> bytes:
        """A file here or in a store.

        Raises BadRow, whose message begins with `before`, for one that is not there or too large;
        ConfigError and the errors of stores for one that cannot be read.
        """
        is_url = object_store.is_url(name, of_data=True)
        if before and not is_url and not os.path.isfile(name):  # Path's raises for long names
            raise BadRow(f"{before}is no file: {excerpt(name)}")
        context = object_store.open_object(name, self._store(name)) if is_url else opened(name)
        try:
            with context as file:
                data = file.read(most_bytes + 1)
        except StoreUnreachable:
            raise
        except CheckpointError as error:
            if not before:
                raise
            raise BadRow(f"{before}is not there or not to be read: {error}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
        if len(data) > most_bytes:
            raise BadRow(f"{before}has more than {most_bytes} bytes, the most that is read")
        return data

    def _store(self, url: str) -> Any:
        scheme = url.partition("://")[0]
        if scheme not in self._stores:
            self._stores[scheme] = object_store.store_of(url)
        return self._stores[scheme]
