"""Finds results of texts in what an earlier job wrote."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from jaxembed.bulk.destination import Destination
from jaxembed.bulk.job import read_job
from jaxembed.bulk.parts import finished_parts, reading_part
from jaxembed.bulk.row_source import DIGEST_BYTES
from jaxembed.bulk.sources import arrow
from jaxembed.errors import ConfigError

GROUPS_KEPT = 4  # row groups in memory


class Earlier:
    """The results of an earlier job, by the digests of their texts or images.

    One takes 40 bytes of memory. Rows are read a row group at a time, so that texts in about the
    order they had before are found fastest.
    """

    def __init__(self, folder: Destination, of_texts: str, fields: Sequence[Any], digest: str):
        """`digest` is the column of digests. Raises ConfigError if the folder has no job, or its
        results depend on something else."""
        self._folder = folder
        self._names = [field.name for field in fields]
        if read_job(folder).of_texts != of_texts:
            raise ConfigError(
                f"--reuse {folder}: its results are of another model or of other options; its "
                "_job.json has them under `computation`"
            )
        digests, groups, rows = [], [], []  # digests are uint64 [n, 2]
        self._groups: list[tuple[int, int]] = []  # part, row group
        for part in finished_parts(folder):
            with reading_part(folder, part) as (source, _):
                for group in range(source.metadata.num_row_groups):
                    column = source.read_row_group(group, [digest]).column(digest).combine_chunks()
                    first, count = column.offset * DIGEST_BYTES, len(column) * DIGEST_BYTES
                    flat = np.frombuffer(column.buffers()[1], np.uint8)[first : first + count]
                    found = flat.copy().view(np.uint64).reshape(-1, 2)
                    digests.append(found)
                    groups.append(np.full(len(found), len(self._groups), np.int32))
                    rows.append(np.arange(len(found), dtype=np.int32))
                    self._groups.append((part, group))
        every = np.concatenate([np.zeros((0, 2), np.uint64), *digests])
        order = np.lexsort((every[:, 1], every[:, 0]))
        self._digests = every[order]
        self._group_of = np.concatenate([np.zeros(0, np.int32), *groups])[order]
        self._row_of = np.concatenate([np.zeros(0, np.int32), *rows])[order]
        self._read = lru_cache(GROUPS_KEPT)(self._read_group)

    def find(self, digests: Sequence[bytes]) -> np.ndarray:
        """The number of each digest here, int64, -1 where there is none."""
        asked = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        found = np.full(len(asked), -1, np.int64)
        at = np.searchsorted(self._digests[:, 0], asked[:, 0])
        for index, (place, digest) in enumerate(zip(at.tolist(), asked, strict=True)):
            while place < len(self._digests) and self._digests[place, 0] == digest[0]:
                if self._digests[place, 1] == digest[1]:
                    found[index] = place
                    break
                place += 1
        return found

    def take(self, numbers: np.ndarray) -> list[Any]:
        """The results of these numbers, an Arrow array for each field."""
        pa = arrow()
        groups = self._group_of[numbers]
        tables, order = [], []
        for group in np.unique(groups).tolist():
            chosen = np.flatnonzero(groups == group)
            tables.append(self._read(group).take(pa.array(self._row_of[numbers[chosen]])))
            order.append(chosen)
        back = np.argsort(np.concatenate(order))
        table = pa.concat_tables(tables).take(pa.array(back))
        return [table.column(name).combine_chunks() for name in self._names]

    def _read_group(self, group: int) -> Any:
        part, number = self._groups[group]
        with reading_part(self._folder, part) as (source, _):
            return source.read_row_group(number, self._names)
