"""Embeds texts in bounded memory: into one file of vectors, .npy or .jsonl, or for the ranges of a
model's vectors."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from jaxembed.bulk.ahead import ahead, divided
from jaxembed.bulk.row_source import ROWS_A_CALL
from jaxembed.checkpoints.ranges import KeptRanges
from jaxembed.data.outputs import OutputName
from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError
from jaxembed.platform.files import check_output, replacing
from jaxembed.runtime.options import EncodeOptions
from jaxembed.runtime.requests import shape_vectors
from jaxembed.runtime.tasks import check_dimensions

DENSE: tuple[OutputName, ...] = ("dense",)
FEWEST_TEXTS = 2  # that have a range; as in sentence-transformers
ENOUGH_TEXTS = 100  # for ranges that other texts keep to; fewer warn in sentence-transformers too


def check_vectors_path(out: Path, outputs: Sequence[OutputName] = DENSE) -> None:
    """Raise ConfigError unless these outputs can be written there."""
    check_output(out, "--output", [".npy", ".jsonl"])
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
    is_npy = out.suffix == ".npy"
    with replacing(out) as unfinished, unfinished.open("w+b") as file:
        none, count = encode([]), 0
        if is_npy:
            _write_header(file, none, 0)
        for rows in ahead(encode, divided(texts, ROWS_A_CALL)):
            if is_npy:
                file.write(np.ascontiguousarray(rows, none.dtype.newbyteorder("<")).data)
            else:
                lines = (orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in rows)
                file.writelines(line + b"\n" for line in lines)
            count += len(rows)
            on_progress(len(rows))
        if is_npy:
            _write_header(file, none, count)
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


def _write_header(file: BinaryIO, none: np.ndarray, count: int) -> None:
    """Begin a .npy file with the header for so many vectors like those of `none`, `[0, width]`:
    numpy's leaves room for the number of rows to grow."""
    shape = (count, none.shape[1])
    header = {"descr": none.dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, header)


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
    kinds = list(dict.fromkeys(embedder.model.tasks.kind(one) for one in asked))
    low = [np.full(kind.dimensions, np.inf, np.float32) for kind in kinds]
    high = [np.full(kind.dimensions, -np.inf, np.float32) for kind in kinds]
    count = 0
    encode = partial(embedder.encode, **options, normalize=False)
    for vectors in ahead(encode, divided(texts, ROWS_A_CALL)):
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
    content_hash = embedder.model.routes[kinds[0].route].spec.content_hash
    return [
        KeptRanges(kind, content_hash, count, lowest.tolist(), highest.tolist())
        for kind, lowest, highest in zip(kinds, low, high, strict=True)
    ]
