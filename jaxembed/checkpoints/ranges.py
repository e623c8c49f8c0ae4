"""Keeps the calibration ranges of a model's vectors in a file beside its checkpoint.

ranges.json   for each kind of vectors the lowest and the highest value of each dimension, and the
              content hash of the checkpoint that gave them
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
_BOUND = 1.01  # of the values of a vector of length one, with room for rounding

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
    content_hash: str  # of the checkpoint of the route
    texts: int  # number of texts whose vectors gave the ranges
    low: _Values  # of each dimension
    high: _Values

    @property
    def values(self) -> Float[np.ndarray, "2 dim"]:
        """The lowest and the highest value of each dimension, float32."""
        return np.array([self.low, self.high], np.float32)


class _File(msgspec.Struct):
    ranges: list[StoredRanges]


def load_ranges(checkpoint: Path) -> dict[VectorKind, StoredRanges]:
    """Read the ranges in the folder of a checkpoint, by kind of vectors; empty if there are none.

    Raises CheckpointError for a damaged file.
    """
    path = checkpoint / RANGES
    try:
        all_ranges = msgspec.json.decode(path.read_bytes(), type=_File).ranges
        for ranges in all_ranges:  # a range for each dimension
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
    """Raise ConfigError unless ranges can be written to the folder of a checkpoint."""
    if not os.access(checkpoint, os.W_OK):
        raise ConfigError(
            f"cannot write to {checkpoint}; run `jaxembed calibrate` where the directory of the "
            "model is writable"
        )


def save_ranges(checkpoint: Path, new: Sequence[StoredRanges]) -> Path:
    """Add ranges to the file in the folder of a checkpoint, and return its path. `new` replaces
    ranges of the same kinds. Older ranges of the same routes are removed if another content of the
    checkpoint (`content_hash`) gave them. The file is replaced atomically.

    Raises ConfigError if it cannot be written, and CheckpointError for a damaged file.
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
