"""Embeds texts in bounded memory, into one file of vectors (.npy or .jsonl), or to measure the
calibration ranges of a model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from jaxembed.bulk.ahead import ahead, in_chunks
from jaxembed.bulk.row_source import ROWS_A_CALL
from jaxembed.checkpoints.ranges import StoredRanges
from jaxembed.data.outputs import OutputName
from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError
from jaxembed.platform.files import check_output, replacing
from jaxembed.runtime.options import EncodeOptions
from jaxembed.runtime.requests import shape_vectors
from jaxembed.runtime.tasks import check_dimensions

DENSE: tuple[OutputName, ...] = ("dense",)
FEWEST_TEXTS = 2  # minimum number of texts to measure ranges, as in sentence-transformers
ENOUGH_TEXTS = 100  # with fewer, ranges may not fit other texts; sentence-transformers warns below


def check_vectors_path(out: Path, outputs: Sequence[OutputName] = DENSE) -> None:
    """Raise ConfigError unless the folder of `out` exists, and its suffix is that of a format for
    these outputs."""
    check_output(out, "--output", [".npy", ".jsonl"])  # raises for another folder or suffix
    if out.suffix == ".npy" and tuple(outputs) != DENSE:
        raise ConfigError(
            f"--output {out}: a .npy file holds only dense vectors, and --outputs has "
            f"{', '.join(outputs)}; write a .jsonl file"
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
    """Encode all texts, write their vectors in order to `out`, and return the number of texts.

    The suffix of `out` chooses the format. .npy holds dense vectors `[texts, dim]` of the
    `output_dtype`. .jsonl has one line for each text: an array with the dense vector or, for other
    `outputs`, an object with each output by its name, where a sparse one has `indices` and
    `values`. `options` are fields of EncodeOptions. `on_progress` is called after each chunk with
    its number of texts. On failure `out` does not change. Raises ConfigError for a wrong path, and
    the errors of `texts` and of `Embedder.encode`.
    """
    check_vectors_path(out, outputs)
    encode = partial(_rows, embedder, outputs, options)
    is_npy = out.suffix == ".npy"
    with replacing(out) as unfinished, unfinished.open("w+b") as file:
        empty, count = encode([]), 0  # `empty` has the dtype and width of the vectors
        if is_npy:
            _write_header(file, empty, count=0)  # replaced at the end
        for rows in ahead(encode, in_chunks(texts, ROWS_A_CALL)):
            if is_npy:
                file.write(np.ascontiguousarray(rows, empty.dtype.newbyteorder("<")).data)
            else:
                lines = (orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in rows)
                file.writelines(line + b"\n" for line in lines)
            count += len(rows)
            on_progress(len(rows))
        if is_npy:
            _write_header(file, empty, count)
    return count


def _rows(
    embedder: Embedder, outputs: Sequence[OutputName], options: dict, texts: list[str]
) -> Any:
    """Return the dense vectors of the texts, `[texts, dim]`; for other outputs a list with one dict
    for each text, of its outputs by name."""
    if tuple(outputs) == DENSE:
        return embedder.encode(texts, **options)
    results = embedder.encode_outputs(texts, outputs, **options)
    if "sparse" in results:
        rows = results["sparse"]
        pairs = zip(rows.indices, rows.values, strict=True)
        results["sparse"] = [{"indices": indices, "values": values} for indices, values in pairs]
    columns = [list(results[name]) for name in outputs]
    return [dict(zip(outputs, row, strict=True)) for row in zip(*columns, strict=True)]


def _write_header(file: BinaryIO, empty: np.ndarray, count: int) -> None:
    """Write the header of a .npy file at its start, for `count` vectors with the dtype and width of
    `empty`, `[0, width]`. Its length does not depend on the count: numpy pads it."""
    shape = (count, empty.shape[1])
    header = {"descr": empty.dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, header)


def measure_ranges(
    embedder: Embedder,
    texts: Iterator[str],
    dimensions: Sequence[int] = (),
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    **options,
) -> list[StoredRanges]:
    """Measure the lowest and the highest value of each dimension over the vectors of these texts.

    The result has a StoredRanges for whole vectors, and one for each of the `dimensions`, to which
    vectors are truncated. Then vectors are normalized. `options` are prompt_name and adapter of
    EncodeOptions. `on_progress` is called after each chunk with its number of texts. Raises
    ConfigError for fewer than FEWEST_TEXTS texts or texts that are all alike, InvalidInput for
    wrong dimensions, and the errors of `texts` and of `Embedder.encode`.
    """
    variants = [EncodeOptions(**options, dimensions=width) for width in (None, *dimensions)]
    for variant in variants:
        check_dimensions(embedder.spec.dim, variant.dimensions)
    # each kind of vectors has its own ranges; if `dimensions` has the whole width, kinds are equal
    kinds = list(dict.fromkeys(embedder.model.tasks.kind(variant) for variant in variants))
    low = [np.full(kind.dimensions, np.inf, np.float32) for kind in kinds]
    high = [np.full(kind.dimensions, -np.inf, np.float32) for kind in kinds]
    count = 0
    encode = partial(embedder.encode, **options, normalize=False)
    for vectors in ahead(encode, in_chunks(texts, ROWS_A_CALL)):
        for kind, lowest, highest in zip(kinds, low, high, strict=True):
            shaped = shape_vectors(vectors, dimensions=kind.dimensions, normalize=True)
            np.minimum(lowest, shaped.min(axis=0), out=lowest)
            np.maximum(highest, shaped.max(axis=0), out=highest)
        count += len(vectors)
        on_progress(len(vectors))
    if count < FEWEST_TEXTS:
        raise ConfigError(
            f"ranges need at least {FEWEST_TEXTS} texts, better {ENOUGH_TEXTS}; got {count}"
        )
    if any(np.allclose(*ends, rtol=0, atol=1e-5) for ends in zip(low, high, strict=True)):
        raise ConfigError("all texts have the same vector; ranges need texts that differ")
    content_hash = embedder.model.routes[kinds[0].route].spec.content_hash
    return [
        StoredRanges(kind, content_hash, count, lowest.tolist(), highest.tolist())
        for kind, lowest, highest in zip(kinds, low, high, strict=True)
    ]
