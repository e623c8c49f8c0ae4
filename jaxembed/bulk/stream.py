"""Takes the rows of files as many at a time as asked for, across the blocks that readers give."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxembed.bulk.sources import Block, InputFile, Place

IMAGE_BYTES_AT_A_TIME = 64 * 2**20

# The blocks of some files from a place on, each with the place of its first row.
ReadBlocks = Callable[[Sequence[InputFile], Sequence[str], Place], Iterator[tuple[Place, Block]]]


@dataclass
class RowStream:
    """The rows of some files from a place on, as many at a time as asked for."""

    read: ReadBlocks
    files: Sequence[InputFile]
    columns: list[str]
    at: Place  # of the next row
    ended: bool = False
    share: float = 0.0  # of the input that was read
    waiting: list[tuple[Place, Block]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._blocks = self.read(self.files, self.columns, self.at)
        sizes = np.array([one.size for one in self.files], float)
        total = max(sizes.sum(), 1.0)
        self._before = (np.cumsum(sizes) - sizes) / total
        self._each = sizes / total

    def take(self, count: int) -> list[tuple[Place, Block]]:
        """The next rows, so many or what is left; fewer where their images take more than
        IMAGE_BYTES_AT_A_TIME. One block is read ahead, so that `ended` is true with the last
        row."""
        taken, image_bytes = [], 0
        while count and image_bytes < IMAGE_BYTES_AT_A_TIME and self._fill():
            place, block = self.waiting.pop(0)
            if block.count > count:
                self.waiting.insert(0, (Place(place.file, place.row + count), block.sliced(count)))
                block = block.sliced(0, count)
            taken.append((place, block))
            count -= block.count
            if (image := block.image) is not None:
                image_bytes += len(image) if isinstance(image, bytes) else image.nbytes
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
