"""Reads arrays that Orbax wrote, one at a time, so that the host need not hold all of them.

Orbax restores a whole tree at once, and a process that does so again and again keeps growing.
"""

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

MEMBERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # the file that says what an array is -> driver


class StoredArray:
    """An array on disk."""

    def __init__(self, store: Any):
        self._store = store
        self.shape: tuple[int, ...] = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype

    def read(self) -> np.ndarray:
        """The values. Raises ValueError if they are damaged or missing."""
        return self._store.read().result()


def stored_arrays(folder: Path) -> dict[str, StoredArray]:
    """The arrays of a tree without branches that Orbax saved, by name; no value is read yet.

    Raises ValueError if the folder holds none, or one of them cannot be read.
    """
    import tensorstore  # here, because `jaxembed --help` need not wait for it

    base = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}
    keys = tensorstore.KvStore.open(base).result().list().result()
    members = [PurePosixPath(key.decode()) for key in keys]
    specs = {
        str(member.parent): {
            "driver": MEMBERS[member.name],
            "kvstore": base | {"path": f"{member.parent}/"},
        }
        for member in members
        if member.name in MEMBERS
    }
    if not specs:
        raise ValueError(f"{folder.name} holds no Orbax checkpoint")
    opening = {name: tensorstore.open(spec, read=True) for name, spec in specs.items()}
    return {name: StoredArray(one.result()) for name, one in sorted(opening.items())}
