"""Embeds texts into one file of vectors, .npy or .jsonl, in bounded memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from jaxembed.bulk.ahead import ahead, divided
from jaxembed.bulk.row_source import ROWS_A_CALL
from jaxembed.data.outputs import OutputName
from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError
from jaxembed.platform.files import check_output, replacing

DENSE: tuple[OutputName, ...] = ("dense",)


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
        writer, count = WRITERS[out.suffix](file, encode([])), 0
        for rows in ahead(encode, divided(texts, ROWS_A_CALL)):
            writer.write(rows)
            count += len(rows)
            on_progress(len(rows))
        writer.finish(count)
    return count


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


class NpyWriter:
    """Writes rows as they come: numpy's header leaves room for the number of rows to grow."""

    def __init__(self, file: BinaryIO, none: np.ndarray):
        """`none` is an array `[0, width]` of the dtype of the vectors."""
        self._file = file
        self._dtype = none.dtype.newbyteorder("<")
        self._width = none.shape[1]
        self.finish(0)

    def write(self, rows: np.ndarray) -> None:
        """Append vectors `[rows, width]`."""
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)

    def finish(self, count: int) -> None:
        """Write the header of a file of so many vectors."""
        shape = (count, self._width)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, header)


class JsonlWriter:
    """Writes each vector as one JSON array in a line, each object as one in a line."""

    def __init__(self, file: BinaryIO, none: Any):
        """`none` is for .npy alone."""
        self._file = file

    def write(self, rows: np.ndarray | list[dict]) -> None:
        """Append vectors `[rows, width]`, or objects."""
        for row in rows:
            self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def finish(self, count: int) -> None:
        """Nothing is left to write."""


WRITERS: dict[str, type[NpyWriter | JsonlWriter]] = {
    ".npy": NpyWriter,
    ".jsonl": JsonlWriter,
}
