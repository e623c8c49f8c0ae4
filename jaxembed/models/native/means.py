"""Means of table rows in C, which other threads do not wait for: no interpreter lock is held."""

import ctypes

import numpy as np


class NativeMeans:
    """Calls `jaxembed_means` of means.c. Threads may share it."""

    def __init__(self, library: ctypes.CDLL):
        """Raises AttributeError if the library is another one."""
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._means = library.jaxembed_means
        self._means.restype = None
        self._means.argtypes = (pointer, size, size, pointer, pointer, size, size, pointer)

    def __call__(
        self, table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, block: int
    ) -> np.ndarray:
        """What `numpy_means` of models/static.py gives, bit for bit. Raises ValueError for a slot
        beyond the ids."""
        if len(bounds) and not 0 <= bounds.min() <= bounds.max() <= len(ids):
            raise ValueError(f"a slot lies beyond the {len(ids)} ids: a bug in jaxembed")
        table = np.ascontiguousarray(table, np.float32)
        ids, bounds = np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(bounds, np.int64)
        means = np.empty((len(bounds), table.shape[1]), np.float32)
        self._means(
            table.ctypes.data,
            *table.shape,
            ids.ctypes.data,
            bounds.ctypes.data,
            len(bounds),
            block,
            means.ctypes.data,
        )
        return means
