"""Embeds files of texts into files of vectors, or measures the ranges of these, in bounded memory.

Knows no model but an Embedder.
"""

import io
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
import orjson

from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError, InvalidInput
from jaxembed.files import replacing
from jaxembed.options import EncodeOptions
from jaxembed.output_path import check_output
from jaxembed.outputs import OutputName
from jaxembed.postprocess import shape_vectors
from jaxembed.ranges import KeptRanges
from jaxembed.tasks import check_dimensions

DENSE: tuple[OutputName, ...] = ("dense",)
TEXTS_A_CALL = 1024  # texts encoded in one call
FEWEST_TEXTS = 2  # that have a range; as in sentence-transformers
ENOUGH_TEXTS = 100  # for ranges that other texts keep to; fewer warn in sentence-transformers too
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


def check_vectors_path(out: Path, outputs: Sequence[OutputName] = DENSE) -> None:
    """Raise ConfigError unless these outputs can be written there."""
    check_output(out, "--output", WRITERS)
    if out.suffix == ".npy" and tuple(outputs) != DENSE:
        raise ConfigError(
            f"--output {out}: .npy holds dense vectors alone, and --outputs has "
            f"{', '.join(outputs)}; write .jsonl"
        )


def embed_file(
    embedder: Embedder,
    texts: Iterator[str],
    out: Path,
    *,
    outputs: Sequence[OutputName] = DENSE,
    on_progress: Callable[[int], object] = lambda count: None,
    **options,
) -> int:
    """Encode all texts and write their vectors in order. Returns the number of texts.

    The suffix of `out` chooses .npy (`[texts, dim]`, of the `output_dtype`) or .jsonl (one array a
    line). With other `outputs` than the dense vector a line of .jsonl is an object with each by its
    name, a sparse one as `indices` and `values`; .npy has no place for them.
    `options` are the fields of EncodeOptions. `on_progress` is called with the number of texts of
    each chunk. On failure `out` is not changed. Raises ConfigError for a wrong path, and the errors
    of `texts` and of `Embedder.encode`.
    """
    check_vectors_path(out, outputs)
    encode = partial(_rows, embedder, outputs, options)
    with replacing(out) as unfinished, unfinished.open("w+b") as file:
        writer = WRITERS[out.suffix](file, encode([]))
        for rows in _encoded(encode, texts):
            writer.write(rows)
            on_progress(len(rows))
        return writer.finish()


def measure_ranges(
    embedder: Embedder,
    texts: Iterator[str],
    dimensions: Sequence[int] = (),
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    **options,
) -> list[KeptRanges]:
    """The ranges of the vectors of these texts: of whole ones, and of those cut to each of the
    `dimensions`; all are normalised after that.

    `options` are prompt_name and adapter, as of EncodeOptions. Raises ConfigError for fewer than
    two texts, and the errors of `texts` and of `Embedder.encode`.
    """
    asked = [EncodeOptions(**options, dimensions=width) for width in (None, *dimensions)]
    for one in asked:
        check_dimensions(embedder.spec.dim, one.dimensions)
    kinds = list(dict.fromkeys(embedder.tasks.kind(one) for one in asked))
    low = [np.full(kind.dimensions, np.inf, np.float32) for kind in kinds]
    high = [np.full(kind.dimensions, -np.inf, np.float32) for kind in kinds]
    count = 0
    encode = partial(embedder.encode, **options, normalize=False)
    for vectors in _encoded(encode, texts):
        for kind, lowest, highest in zip(kinds, low, high, strict=True):
            shaped = shape_vectors(vectors, dimensions=kind.dimensions, normalize=True)
            np.minimum(lowest, shaped.min(axis=0), out=lowest)
            np.maximum(highest, shaped.max(axis=0), out=highest)
        count += len(vectors)
        on_progress(len(vectors))
    if count < FEWEST_TEXTS:
        raise ConfigError(
            f"ranges need {FEWEST_TEXTS} texts, better {ENOUGH_TEXTS}. Given: {count}"
        )
    content_hash = embedder.routes[kinds[0].route].spec.content_hash
    return [
        KeptRanges(kind, content_hash, count, lowest.tolist(), highest.tolist())
        for kind, lowest, highest in zip(kinds, low, high, strict=True)
    ]


def _rows(
    embedder: Embedder, outputs: Sequence[OutputName], options: dict, texts: list[str]
) -> Any:
    """The dense vectors of some texts `[texts, dim]`, or an object for JSON of each text's
    outputs."""
    if tuple(outputs) == DENSE:
        return embedder.encode(texts, **options)
    found = embedder.encode_outputs(texts, outputs, **options)
    if "sparse" in found:
        rows = found["sparse"]
        pairs = zip(rows.indices, rows.values, strict=True)
        found["sparse"] = [{"indices": indices, "values": values} for indices, values in pairs]
    columns = [list(found[name]) for name in outputs]
    return [dict(zip(outputs, row, strict=True)) for row in zip(*columns, strict=True)]


def _encoded(encode: Callable[[list[str]], Any], texts: Iterator[str]) -> Iterator[Any]:
    """What `encode` gives chunk by chunk; a few chunks are computed at a time."""
    at_work: deque[Future] = deque()
    with ThreadPoolExecutor(CHUNKS_AHEAD) as pool:
        try:
            while chunk := list(islice(texts, TEXTS_A_CALL)):
                at_work.append(pool.submit(encode, chunk))
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

    def write(self, rows: Any) -> None:
        """Append the rows of some texts."""
        ...

    def finish(self) -> int:
        """Complete the file, and return the number of vectors in it."""
        ...


class NpyWriter:
    """Writes rows as they come: numpy's header leaves room for the number of rows to grow."""

    def __init__(self, file: BinaryIO, none: np.ndarray):
        """`none` is an array `[0, width]` of the dtype of the vectors."""
        self._file = file
        self._dtype = none.dtype.newbyteorder("<")
        self._width = none.shape[1]
        self._rows = 0
        self._header()

    def write(self, rows: np.ndarray) -> None:
        """Append vectors `[rows, width]`."""
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._rows += len(rows)

    def finish(self) -> int:
        """Write the final header, and return the number of vectors."""
        self._file.seek(0)
        self._header()
        return self._rows

    def _header(self) -> None:
        shape = (self._rows, self._width)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)


class JsonlWriter:
    """Writes each vector as one JSON array in a line, each object as one in a line."""

    def __init__(self, file: BinaryIO, none: Any):
        self._file = file
        self._rows = 0
        del none  # only .npy needs it

    def write(self, rows: np.ndarray | list[dict]) -> None:
        """Append vectors `[rows, width]`, or objects."""
        for row in rows:
            self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
            self._file.write(b"\n")
        self._rows += len(rows)

    def finish(self) -> int:
        """Return the number of vectors."""
        return self._rows


WRITERS: dict[str, Callable[[BinaryIO, Any], Writer]] = {
    ".npy": NpyWriter,
    ".jsonl": JsonlWriter,
}


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
