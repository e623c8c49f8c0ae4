"""Files of texts in, files of vectors out, in bounded memory. Knows no model but an Embedder."""

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

TEXTS_A_CALL = 1024  # texts encoded in one call
CHUNKS_AHEAD = 3  # one on the device, one being tokenized, one ready


def read_text_file(path: str, field: str = "text") -> Iterator[str]:
    """The texts of a .txt file (a line each), a .jsonl file (a string or an object with `field`
    each) or standard input (`-`, lines), read as they are asked for.

    Raises ConfigError at once for a file that cannot be read, InvalidInput later for an empty or
    wrong line: every text has a row, and every row its text.
    """
    return _texts(_open(path), path, field)


def check_vectors_path(out: Path) -> None:
    """Raises ConfigError unless vectors can be written there."""
    if out.suffix not in WRITERS:
        raise ConfigError(f"--output {out}: wanted a name that ends in {' or '.join(WRITERS)}")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--output {out}: there is no directory {out.absolute().parent}")


def embed_file(
    embedder: Embedder,
    texts: Iterator[str],
    out: Path,
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    **options,
) -> int:
    """Encode every text and write .npy (float32 [n, dim]) or .jsonl (one array a line), in order.

    `options` are EncodeOptions'. Returns the number of texts. On failure `out` is not touched.
    """
    check_vectors_path(out)
    with replacing(out) as partial, partial.open("w+b") as file:
        writer = WRITERS[out.suffix](file, options.get("dimensions") or embedder.spec.dim)
        for vectors in _encoded(embedder, texts, options):
            writer.write(vectors)
            on_progress(len(vectors))
        return writer.finish()


def _encoded(embedder: Embedder, texts: Iterator[str], options: dict) -> Iterator[np.ndarray]:
    """The vectors chunk by chunk, a few chunks at work at a time."""
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
    def write(self, vectors: np.ndarray) -> None: ...

    def finish(self) -> int: ...


class NpyWriter:
    """Rows as they come: numpy's header leaves room for the number of rows to grow."""

    def __init__(self, file: BinaryIO, dim: int):
        self._file = file
        self._dim = dim
        self._rows = 0
        self._header()

    def write(self, vectors: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(vectors, "<f4").data)
        self._rows += len(vectors)

    def finish(self) -> int:
        self._file.seek(0)
        self._header()
        return self._rows

    def _header(self) -> None:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self._rows, self._dim)}
        np.lib.format.write_array_header_1_0(self._file, shape)


class JsonlWriter:
    """One JSON array a line."""

    def __init__(self, file: BinaryIO, dim: int):
        self._file = file
        self._rows = 0
        del dim  # a line says itself how long it is

    def write(self, vectors: np.ndarray) -> None:
        for row in vectors:
            self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
            self._file.write(b"\n")
        self._rows += len(vectors)

    def finish(self) -> int:
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
