"""Keeps the calibration ranges of a model's vectors in a file beside its checkpoint.

The ranges are used to quantize vectors. The file, ranges.json, holds for each kind of vectors the
lowest and the highest value of each dimension, and the content hash of the checkpoint that computed
the vectors.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Float

from jaxembed.errors import CheckpointError, ConfigError, counted
from jaxembed.platform.files import replacing

RANGES = "ranges.json"
_BOUND = 1.01  # values of a vector of length one are at most 1, plus room for rounding

_Values = list[Annotated[float, msgspec.Meta(ge=-_BOUND, le=_BOUND)]]


class VectorKind(msgspec.Struct, frozen=True):
    """The vectors of a model that share ranges: those of one route, pooling and adapter, truncated
    to the same number of dimensions and normalised."""

    route: str
    pooling: tuple[str, ...]
    adapter: str | None
    dimensions: int


class StoredRanges(msgspec.Struct, frozen=True):
    """The stored calibration ranges of one kind of vectors of a checkpoint."""

    kind: VectorKind
    content_hash: str  # of the checkpoint (of the kind's route) that computed the vectors
    texts: int  # the number of texts whose vectors the ranges were computed from
    low: _Values  # the lowest value of each dimension
    high: _Values  # the highest value of each dimension

    @property
    def values(self) -> Float[np.ndarray, "2 dim"]:
        """The lowest values of all dimensions in the first row, and the highest in the second."""
        return np.array([self.low, self.high], np.float32)


class _File(msgspec.Struct):
    ranges: list[StoredRanges]


def load_ranges(checkpoint: Path) -> dict[VectorKind, StoredRanges]:
    """Read the ranges in the folder of a checkpoint. Returns them by kind of vectors, or an empty
    dict if there is no file of ranges. Raises CheckpointError if the file is damaged."""
    path = checkpoint / RANGES
    try:
        all_ranges = msgspec.json.decode(path.read_bytes(), type=_File).ranges
        for ranges in all_ranges:  # check that each dimension has a range
            low, high, dimensions = ranges.low, ranges.high, ranges.kind.dimensions
            if not dimensions == len(low) == len(high):
                raise ValueError(
                    f"{counted(len(low), 'lowest value')} and "
                    f"{counted(len(high), 'highest value')} for {counted(dimensions, 'dimension')}"
                )
            if any(lowest > highest for lowest, highest in zip(low, high, strict=True)):
                raise ValueError("a lowest value is larger than the highest")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(
            f"{path} is damaged ({error}); remove it and run `jaxembed calibrate` again"
        ) from error
    return {ranges.kind: ranges for ranges in all_ranges}


def check_writable(checkpoint: Path) -> None:
    """Raise ConfigError if the folder of a checkpoint, and so its ranges, cannot be written."""
    if not os.access(checkpoint, os.W_OK):
        raise ConfigError(
            f"cannot write to {checkpoint}; run `jaxembed calibrate` where the directory of the "
            "model is writable"
        )


def save_ranges(checkpoint: Path, new: Sequence[StoredRanges]) -> Path:
    """Add the ranges `new` to the file in the folder of a checkpoint. Returns the path of the file.

    Stored ranges of the same kinds of vectors are replaced. Stored ranges of the same routes are
    removed if their `content_hash` differs from that of `new`: they belong to an older checkpoint.
    The file is replaced atomically. Raises ConfigError if the file cannot be written, and
    CheckpointError if the stored file is damaged.
    """
    hashes = {ranges.kind.route: ranges.content_hash for ranges in new}
    merged = {
        kind: ranges
        for kind, ranges in load_ranges(checkpoint).items()
        if hashes.get(kind.route, ranges.content_hash) == ranges.content_hash
    } | {ranges.kind: ranges for ranges in new}
    path = checkpoint / RANGES
    try:
        with replacing(path) as partial:
            partial.write_bytes(msgspec.json.encode(_File(list(merged.values()))))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; run `jaxembed calibrate` where the directory "
            "of the model is writable"
        ) from error
    return path
