"""Embeds files of texts into files of vectors, in bounded memory. Knows no model but an
Embedder."""

import io
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np
import orjson

from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError, InvalidInput
from jaxembed.files import replacing
from jaxembed.output_path import check_output

TEXTS_A_CALL = 1024  # texts encoded in one call
CHUNKS_AHEAD = 3  # one runs on the device, one is tokenized, one is ready


def read_text_file(path: str, field: str = "text") -> Iterator[str]:
    """The texts of a .txt file (a line each), a .jsonl file (a string or an object with `field`
    each) or standard input (`-`, lines), read lazily.

    A .txt file and standard input have one text a line. Each line of a .jsonl file is a string, or
    an object with the text in `field`. Raises ConfigError at once if the file cannot be opened, and
    during iteration ConfigError for invalid UTF-8 and InvalidInput for an empty or wrong line: no
    line is skipped, so that row n of the result is always of line n.
    """
    return _texts(_open(path), path, field)


def check_vectors_path(out: Path) -> None:
    """Raise ConfigError unless vectors can be written there."""
    check_output(out, "--output", WRITERS)


def embed_file(
    embedder: Embedder,
    texts: Iterator[str],
    out: Path,
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    **options,
) -> int:
    """Encode all texts and write their vectors in order. Returns the number of texts.

    The suffix of `out` chooses .npy (float32 `[texts, dim]`) or .jsonl (one array a line).
    `options` are the fields of EncodeOptions. `on_progress` is called with the number of texts of
    each chunk. On failure `out` is not changed. Raises ConfigError for a wrong path, and the errors
    of `texts` and of `Embedder.encode`.
    """
    check_vectors_path(out)
    with replacing(out) as partial, partial.open("w+b") as file:
        writer = WRITERS[out.suffix](file, options.get("dimensions") or embedder.spec.dim)
        for vectors in _encoded(embedder, texts, options):
            writer.write(vectors)
            on_progress(len(vectors))
        return writer.finish()


def _encoded(embedder: Embedder, texts: Iterator[str], options: dict) -> Iterator[np.ndarray]:
    """The vectors chunk by chunk; a few chunks are computed at a time."""
    at_work: deque[Future[np.ndarray]] = deque()
    with ThreadPoolExecutor(CHUNKS_AHEAD) as pool:
        try:
            while chunk := list(islice(texts, TEXTS_A_CALL)):
                at_work.append(pool.submit(embedder.encode, chunk, **options))
                if len(at_work) == CHUNKS_AHEAD:
                    yield at_work.popleft().result()
            while at_work:
                yield at_work.popleft().result()
        finally:
            for future in at_work:
                future.cancel()


@runtime_checkable
class Writer(Protocol):
    """A format of vector files."""

    def write(self, vectors: np.ndarray) -> None:
        """Append vectors, float32 `[rows, dim]`."""
        ...

    def finish(self) -> int:
        """Complete the file, and return the number of vectors in it."""
        ...


class NpyWriter:
    """Writes rows as they come: numpy's header leaves room for the number of rows to grow."""

    def __init__(self, file: BinaryIO, dim: int):
        self._file = file
        self._dim = dim
        self._rows = 0
        self._header()

    def write(self, vectors: np.ndarray) -> None:
        """Append vectors, float32 `[rows, dim]`."""
        self._file.write(np.ascontiguousarray(vectors, "<f4").data)
        self._rows += len(vectors)

    def finish(self) -> int:
        """Write the final header, and return the number of vectors."""
        self._file.seek(0)
        self._header()
        return self._rows

    def _header(self) -> None:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self._rows, self._dim)}
        np.lib.format.write_array_header_1_0(self._file, shape)


class JsonlWriter:
    """Writes each vector as one JSON array in a line."""

    def __init__(self, file: BinaryIO, dim: int):
        self._file = file
        self._rows = 0
        del dim  # only .npy needs it

    def write(self, vectors: np.ndarray) -> None:
        """Append vectors, float32 `[rows, dim]`."""
        for row in vectors:
            self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
            self._file.write(b"\n")
        self._rows += len(vectors)

    def finish(self) -> int:
        """Return the number of vectors."""
        return self._rows


WRITERS: dict[str, Callable[[BinaryIO, int], Writer]] = {".npy": NpyWriter, ".jsonl": JsonlWriter}


def _open(path: str) -> io.TextIOBase:
    if path == "-":
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="\n")
    if not path.endswith((".txt", ".jsonl")):
        raise ConfigError(f"{path}: wanted a .txt or .jsonl file, or - for standard input")
    try:
        return open(path, encoding="utf-8-sig", newline="\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _texts(lines: io.TextIOBase, path: str, field: str) -> Iterator[str]:
    """Yield the text of each line, and close the file at the end."""
    jsonl = path.endswith(".jsonl")
    with lines:
        try:
            for number, line in enumerate(lines, start=1):
                text = _from_json(line, field, path, number) if jsonl else line.rstrip("\r\n")
                if not text:
                    raise InvalidInput(f"{path} line {number} is empty: there is nothing to embed")
                yield text
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8: {error}") from error


def _from_json(line: str, field: str, path: str, number: int) -> str:
    """The text of a line of a .jsonl file. Raises InvalidInput if it has none."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"{path} line {number} is not JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidInput(
            f"{path} line {number}: wanted a string, or an object with a string `{field}` "
            "(--field names another)"
        )
    return text
