"""Keeps the ranges of a model's vectors in a file beside its checkpoint. Computes no vectors.

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

from jaxembed.errors import CheckpointError, ConfigError
from jaxembed.platform.files import replacing

RANGES = "ranges.json"
_BOUND = 1.01  # of a vector of length one, with room for its rounding

_Values = list[Annotated[float, msgspec.Meta(ge=-_BOUND, le=_BOUND)]]


class VectorKind(msgspec.Struct, frozen=True):
    """Which vectors of a model share ranges: those of one route, pooling and adapter, cut to as
    many dimensions and normalised."""

    route: str
    pooling: tuple[str, ...]
    adapter: str | None
    dimensions: int


class KeptRanges(msgspec.Struct, frozen=True):
    """The ranges of one kind of vectors of a checkpoint, as they are kept."""

    kind: VectorKind
    content_hash: str  # of the checkpoint of the route
    texts: int  # whose vectors they are
    low: _Values
    high: _Values

    @property
    def values(self) -> Float[np.ndarray, "2 dim"]:
        """The lowest and the highest value of each dimension, float32."""
        return np.array([self.low, self.high], np.float32)


class _File(msgspec.Struct):
    ranges: list[KeptRanges]


def load_ranges(checkpoint: Path) -> dict[VectorKind, KeptRanges]:
    """Read the ranges that are kept in the folder of a checkpoint; empty if there are none.

    Raises CheckpointError for a damaged file.
    """
    path = checkpoint / RANGES
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_File).ranges
        for one in kept:  # a range for each dimension
            low, high, dimensions = one.low, one.high, one.kind.dimensions
            if not dimensions == len(low) == len(high):
                raise ValueError(f"{len(low)} and {len(high)} values for {dimensions} dimensions")
            if any(least > most for least, most in zip(low, high, strict=True)):
                raise ValueError("a lowest value is over the highest")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(
            f"{path} is damaged ({error}); remove it and run `jaxembed calibrate` again"
        ) from error
    return {one.kind: one for one in kept}


def check_writable(checkpoint: Path) -> None:
    """Raise ConfigError unless ranges can be kept in the folder of a checkpoint."""
    if not os.access(checkpoint, os.W_OK):
        raise ConfigError(f"cannot write in {checkpoint}; calibrate where the model can be written")


def save_ranges(checkpoint: Path, new: Sequence[KeptRanges]) -> Path:
    """Add ranges to those that are kept, replace those of the same kinds, and drop those of earlier
    content of the same routes. Returns the path of the file, which is replaced atomically.

    Raises ConfigError if it cannot be written, and CheckpointError for a damaged file.
    """
    hashes = {one.kind.route: one.content_hash for one in new}
    kept = {
        kind: one
        for kind, one in load_ranges(checkpoint).items()
        if hashes.get(kind.route, one.content_hash) == one.content_hash
    } | {one.kind: one for one in new}
    path = checkpoint / RANGES
    try:
        with replacing(path) as partial:
            partial.write_bytes(msgspec.json.encode(_File(list(kept.values()))))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; calibrate where the model can be written"
        ) from error
    return path
