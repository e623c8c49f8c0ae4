"""Takes the rows of files as many at a time as asked for, across the blocks that readers give."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxembed.bulk.sources import Block, InputFile, Place, read_rows


@dataclass
class RowStream:
    """The rows of some files from a place on, as many at a time as asked for."""

    files: Sequence[InputFile]
    columns: list[str]
    at: Place  # of the next row
    ended: bool = False
    share: float = 0.0  # of the input that was read
    waiting: list[tuple[Place, Block]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._blocks = read_rows(self.files, self.columns, self.at)
        sizes = np.array([one.size for one in self.files], float)
        total = max(sizes.sum(), 1.0)
        self._before = (np.cumsum(sizes) - sizes) / total
        self._each = sizes / total

    def take(self, count: int) -> list[tuple[Place, Block]]:
        """The next rows, so many or what is left. One block is read ahead, so that `ended` is true
        with the last row."""
        taken: list[tuple[Place, Block]] = []
        while count and self._fill():
            place, block = self.waiting.pop(0)
            if block.count > count:
                self.waiting.insert(
                    0, (Place(place.file, place.row + count), _sliced(block, count))
                )
                block = _sliced(block, 0, count)
            taken.append((place, block))
            count -= block.count
            self.at = Place(place.file, place.row + block.count)
            self.share = self._before[place.file] + block.share * self._each[place.file]
        self._fill()
        return taken

    def _fill(self) -> bool:
        """Have a block wait, unless there is none."""
        if not self.waiting and not self.ended:
            block = next(self._blocks, None)
            self.ended = block is None
            self.waiting = [] if block is None else [block]
        return bool(self.waiting)


def _sliced(block: Block, start: int, stop: int | None = None) -> Block:
    stop = block.count if stop is None else stop
    columns = {name: values[start:stop] for name, values in block.columns.items()}
    bad = {index - start: why for index, why in block.bad.items() if start <= index < stop}
    return Block(columns, stop - start, bad, block.share)
