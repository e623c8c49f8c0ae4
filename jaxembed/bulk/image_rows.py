"""Reads rows of one image each, maybe with a text, in bounded memory: image files, pages of PDF
files, and columns of row files (.jsonl, .csv, Parquet and others)."""

import os
import posixpath
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jaxembed.bulk.ahead import ahead
from jaxembed.bulk.row_source import DIGEST_BYTES, RowInputs, RowSource, settings_of_texts
from jaxembed.bulk.sources import (
    IMAGE_FILES,
    START,
    BadRow,
    Block,
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
    problem_of,
    read_rows,
)
from jaxembed.data.inputs import Parts
from jaxembed.data.outputs import OutputName
from jaxembed.errors import (
    CheckpointError,
    ConfigError,
    EmptyInput,
    InvalidImage,
    StoreUnreachable,
    WrongTask,
)
from jaxembed.platform import object_store
from jaxembed.platform.extras import require
from jaxembed.preprocessing.images.decode import image_facts
from jaxembed.preprocessing.images.media import excerpt, is_data_uri, read_data_uri
from jaxembed.preprocessing.images.pdf import PDF_DPI, PDF_TIMEOUT_S, PdfFile

if TYPE_CHECKING:
    from jaxembed.data.spec import ModelSpec, Routes
    from jaxembed.embedder import Embedder

PATH_COLUMN, PAGE_COLUMN = "path", "page"  # columns of results; image files have no page
TEXT_COLUMN = "text"  # the text of a page, which results do not have
IMAGES_A_CALL = 128  # maximum number of images; RowStream also limits their bytes
IMAGES_A_BLOCK = 16  # rows that are read at a time from a column of images
FILES_AHEAD = 8  # files to read in advance, because stores answer slowly
MAX_FILE_BYTES = 200 * 10**6  # the limit of an image file

RowImage = bytes | np.ndarray  # the content of an image file, or the pixels of a page


@dataclass(frozen=True)
class _Images(RowSource):
    """Rows of one image each, maybe with a text, which are one input. ImageColumn and ImageFiles
    add how they are read."""

    digest_column = "image_digest"

    @property
    @abstractmethod
    def text_column(self) -> str | None:
        """The column of blocks with the text of each row; None: rows are images alone."""

    def texts(self, names: Sequence[str], output: str) -> Iterator[str]:
        """Raise ConfigError, because vectors of images are only written as Parquet."""
        raise ConfigError(
            f"--output {output}: vectors of images are written as Parquet files, each vector with "
            "its path or the value of --id-column; name a folder"
        )

    def inputs(self, block: Block) -> list[RowInputs]:
        if self.text_column is None:
            return [(block.image,)]
        return [(block.image, *as_list(block.columns[self.text_column]))]

    def digest(self, row: RowInputs) -> bytes:
        """Return the digest of an image, of its file or of the shape and pixels of a page; and of
        its text, if it has one."""
        image, *texts = row
        state = blake2b(digest_size=DIGEST_BYTES)
        for text in filter(None, texts):
            encoded = text.encode(errors="surrogatepass")
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        if isinstance(image, np.ndarray):  # pixels of a page; otherwise the bytes of a file
            state.update(repr(image.shape).encode())
            image = np.ascontiguousarray(image).data
        state.update(image)
        return state.digest()

    def rows_per_call(self, outputs: Collection[OutputName]) -> int:
        return IMAGES_A_CALL

    def describe(self, embedder: "Embedder") -> dict[str, Any]:
        """Return what the results depend on: the weights of all engines, and the dtype; in a chat
        template also the settings of texts."""
        engines = embedder.model.engines.items()
        model = {
            "content": {name: engine.spec.content_hash for name, engine in engines},
            "adapters": msgspec.to_builtins(embedder.spec.adapters),
            "dtype": embedder.dtype,
        }
        if embedder.spec.chat is not None:
            model |= settings_of_texts(embedder)
        return {"of": "images", "model": model}

    def embed(
        self,
        embedder: "Embedder",
        rows: Sequence[RowInputs],
        outputs: Sequence[OutputName],
        options: dict[str, Any],
    ) -> dict[OutputName, Any]:
        """Return the outputs of all images by name. The first bytes of all files are checked before
        any file is decoded. Raises InvalidImage, with the row's `index`, for a file that is no
        image."""
        inputs = []
        for index, (image, *texts) in enumerate(rows):
            try:
                if isinstance(image, bytes):
                    image_facts(image)
            except InvalidImage as error:
                raise error.at(index) from error
            parts = (image, *filter(None, texts))
            inputs.append(Parts(parts) if len(parts) > 1 else image)
        return embedder.encode_outputs(inputs, outputs, **options)

    def unused_flags(self, spec: "ModelSpec") -> tuple[str, ...]:
        """Return the flags for prompts, unless images stand in a chat template; and --role."""
        prompts = "prompt_name", "instruction", "default_prompt", "default_prompt_name"
        return ("role", *prompts) if spec.chat is None else ("role",)

    def spec(self, routes: "Routes", name: str) -> "ModelSpec":
        """Return the spec of the route for images. Raises WrongTask if the model has none, or takes
        no text beside an image although rows have texts."""
        if routes.image is None:
            raise WrongTask(
                f"{name} takes only texts, and the inputs are images; choose a model of both with "
                "--model, such as openai/clip-vit-base-patch32"
            )
        if self.text_column is not None and not routes.image.takes_parts:
            raise WrongTask(
                f"{name} takes a text or an image as an input, and the rows have both; choose "
                "another --model, such as Qwen/Qwen3-VL-Embedding-2B, or embed one of them"
            )
        return routes.image


@dataclass(frozen=True)
class ImageColumn(_Images):
    """Rows of row files with images in the first of the columns, and texts in the second one if
    there are two."""

    columns: tuple[str, ...]

    @property
    def text_column(self) -> str | None:
        return self.columns[1] if len(self.columns) > 1 else None

    def problem(self, row: RowInputs) -> str | None:
        if len(row) == 1:
            return None
        is_empty = f"has an empty `{self.columns[1]}` beside its image"
        return is_empty if row[1] == "" else problem_of(row[1], self.columns[1])

    def files(self, names: Sequence[str]) -> list[InputFile]:
        """Return the row files. Raises ConfigError if the extra `images` is not installed, and the
        errors of `input_files`."""
        require("images", "images in a column")
        return input_files(names)

    def types(self, files: Sequence[InputFile], kept: Sequence[str]) -> dict[str, Any]:
        types = column_types(files, kept)
        wanted = "images: binary, structs of bytes and path, or strings with paths or data URIs"
        check_columns(files, self.columns[:1], fits=_is_of_images, wanted=wanted)
        check_columns(files, self.columns[1:])
        return types

    def read(
        self, files: Sequence[InputFile], columns: Sequence[str], start: Place = START
    ) -> Iterator[tuple[Place, Block]]:
        """Yield one block for each row, with the place of the row. Rows without a readable image
        are bad. Raises ConfigError for a file that cannot be read, and the errors of object
        stores."""
        column = self.columns[0]
        stores: dict[str, Any] = {}  # connections by URL scheme
        for place, block in read_rows(files, columns, start, rows_a_block=IMAGES_A_BLOCK):
            for index, value in enumerate(as_list(block.columns[column])):
                row = block.sliced(index, index + 1)
                try:
                    if row.bad:
                        raise BadRow(row.bad[0])  # the problem of its only row
                    image: RowImage | BadRow = _image_of(
                        value, column, files[place.file].name, stores
                    )
                except BadRow as problem:
                    image = problem
                yield Place(place.file, place.row + index), _block(row.columns, image, row.share)


@dataclass(frozen=True)
class ImageFiles(_Images):
    """Rows that are image files, or pages of PDF files."""

    columns: tuple[str, ...] = field(default=(), init=False)
    pdf_dpi: int = PDF_DPI
    pdf_text: bool = False  # whether a page of a PDF file has its text beside its image
    pdf_timeout_s: float = PDF_TIMEOUT_S  # seconds for each page, and for opening a PDF file

    @property
    def text_column(self) -> str | None:
        return TEXT_COLUMN if self.pdf_text else None

    def files(self, names: Sequence[str]) -> list[InputFile]:
        """Return the image and PDF files. Raises ConfigError if the extra `images` is not
        installed, and the errors of `input_files`."""
        require("images", "image files")
        return input_files(names, IMAGE_FILES)

    def kept_columns(
        self, names: Sequence[str], id_column: str | None, keep: tuple[str, ...]
    ) -> tuple[str | None, tuple[str, ...]]:
        """Return the columns that are always kept: PATH_COLUMN and, with PDF files, PAGE_COLUMN.
        Raises ConfigError if a user asks for columns."""
        if id_column or keep:
            raise ConfigError(
                f"--{'id-column' if id_column else 'keep'} is for files of rows. Image and PDF "
                "files have the columns `path` and `page`, which are kept; leave it out"
            )
        has_pages = any(is_pdf(file.name) for file in self.files(names))
        return PATH_COLUMN, (PAGE_COLUMN,) if has_pages else ()

    def types(self, files: Sequence[InputFile], kept: Sequence[str]) -> dict[str, Any]:
        types = {PATH_COLUMN: arrow().string(), PAGE_COLUMN: arrow().int32()}
        return {name: types[name] for name in kept}

    def settings(self, files: Sequence[InputFile]) -> dict[str, Any]:
        if not any(is_pdf(file.name) for file in files):
            return {}
        return {"pdf_dpi": self.pdf_dpi} | ({"pdf_text": True} if self.pdf_text else {})

    def read(
        self, files: Sequence[InputFile], columns: Sequence[str], start: Place = START
    ) -> Iterator[tuple[Place, Block]]:
        """Yield one block for each image file or page, with its place. Unreadable images are bad
        rows. Raises ConfigError for a file that cannot be read, and the errors of object stores."""
        stores: dict[str, Any] = {}  # connections by URL scheme

        def image_in(file: InputFile) -> RowImage | BadRow | None:
            """Return the content of an image file, or a BadRow with its problem; None for a PDF."""
            try:
                return None if is_pdf(file.name) else _read_whole(file.name, stores)
            except BadRow as problem:
                return problem

        for file_index, image in enumerate(
            ahead(image_in, files[start.file :], FILES_AHEAD), start.file
        ):
            file, skip = files[file_index], start.row if file_index == start.file else 0
            # an image file is one row, without a page number; `skip` may leave out this row
            rows = self._pages(file, skip) if image is None else [(None, image, "", 1.0)][skip:]
            for row, (page, row_image, text, share) in enumerate(rows, skip):
                values = {PATH_COLUMN: [file.name], PAGE_COLUMN: [page], TEXT_COLUMN: [text]}
                yield Place(file_index, row), _block(values, row_image, share)

    def _pages(
        self, file: InputFile, skip: int
    ) -> Iterator[tuple[int | None, RowImage | BadRow, str, float]]:
        """Yield four values for each page of a PDF file after the first `skip` pages: the number
        of the page from 1, its image or a BadRow, its text if `pdf_text`, and the share of the file
        up to its end. A file that is no PDF gives one BadRow with the number None. Raises
        ConfigError if the file cannot be read."""
        try:
            with opened(file.name) as stream:
                pdf = PdfFile(stream, self.pdf_timeout_s)
        except InvalidImage as error:
            if not skip:
                yield None, BadRow(f"cannot be read: {error}"), "", 1.0
            return
        except OSError as error:
            raise ConfigError(f"cannot read {file.name}: {error.strerror or error}") from error
        try:
            for page in range(skip, pdf.pages):
                text = ""
                try:
                    image: RowImage | BadRow = pdf.render(page, self.pdf_dpi)
                    text = pdf.text(page) if self.pdf_text else ""
                except InvalidImage as error:
                    image = BadRow(f"cannot be rendered: {error}")
                yield page + 1, image, text, (page + 1) / pdf.pages
        finally:
            pdf.close()


def _is_of_images(kind: Any) -> bool:
    """Whether a column of this Arrow type may hold images."""
    types = arrow().types
    if types.is_struct(kind):
        return {"bytes", "path"}.intersection(field.name for field in kind) != set()
    return is_text(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _block(columns: dict[str, Any], image: RowImage | BadRow, share: float) -> Block:
    """Return a block of one row, which is bad if its image is a BadRow."""
    if isinstance(image, BadRow):
        return Block(columns, 1, {0: str(image)}, share)
    return Block(columns, 1, {}, share, image)


def _image_of(value: Any, column: str, file: str, stores: dict[str, Any]) -> bytes:
    """Return the content of the image file that a value of a column stands for.

    The value is bytes, a dict of `bytes` and `path`, a path relative to the folder of `file`, a URL
    or a data URI. `stores` keeps the connections of `_read_whole`. Raises BadRow for a value that
    is no image, and the errors of `_read_whole`.
    """
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
            return read_data_uri(value, MAX_FILE_BYTES)
        except (InvalidImage, EmptyInput) as error:
            raise BadRow(f"cannot be read: {error}") from None
    path = value
    if not object_store.is_url(path, of_data=True):  # a path, relative to the folder of `file`
        if "://" in path:
            raise BadRow(
                f"has {excerpt(path)}, a URL that cannot be fetched; expected a path, a data URI "
                "or a URL of s3://, gs:// or hf://"
            )
        scheme, _, place = file.partition("://")
        if not object_store.is_url(file, of_data=True):
            path = str(Path(file).parent / path)
        elif path.startswith("/"):
            raise BadRow(f"has {excerpt(path)}, a local path, in a file of {scheme}://")
        else:
            joined = posixpath.join(posixpath.dirname(place), path)
            path = f"{scheme}://{posixpath.normpath(joined)}"
    return _read_whole(path, stores, f"has {excerpt(value)}, which ")


def _read_whole(name: str, stores: dict[str, Any], prefix: str = "") -> bytes:
    """Read a whole file, local or in an object store.

    `stores` keeps the connections by URL scheme; threads may share it. Raises BadRow for a file
    that is too large. With a `prefix`, which begins the message, BadRow is also raised for a
    missing file and instead of CheckpointError. Raises ConfigError and the errors of object stores
    for other files that cannot be read.
    """
    is_url = object_store.is_url(name, of_data=True)
    if prefix and not is_url and not os.path.isfile(name):  # Path.is_file raises for long names
        raise BadRow(f"{prefix}is not a file: {excerpt(name)}")
    context = opened(name)
    if is_url:
        scheme = name.partition("://")[0]
        if scheme not in stores:
            stores[scheme] = object_store.store_of(name)
        context = object_store.open_object(name, stores[scheme])
    try:
        with context as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except CheckpointError as error:
        if not prefix or isinstance(error, StoreUnreachable):  # the row is not at fault
            raise
        raise BadRow(f"{prefix}is missing or cannot be read: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise BadRow(f"{prefix}has more than {MAX_FILE_BYTES} bytes, which is the limit")
    return data
