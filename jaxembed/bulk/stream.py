"""Takes the rows of files as many at a time as asked for, across the blocks that readers give."""

from collections.abc import Sequence

import numpy as np

from jaxembed.bulk.row_source import RowSource
from jaxembed.bulk.sources import Block, InputFile, Place

IMAGE_BYTES_AT_A_TIME = 64 * 2**20


class RowStream:
    """The rows of some files from a place on, as many at a time as asked for. One block is read
    ahead, so that `ended` is true with the last row."""

    def __init__(
        self, source: RowSource, files: Sequence[InputFile], columns: Sequence[str], at: Place
    ):
        self.at = at  # the place of the next row
        self.share = 0.0  # of the input that was read
        self._blocks = source.read(files, columns, at)
        self._next = next(self._blocks, None)
        sizes = np.array([one.size for one in files], float)
        self._each = sizes / max(sizes.sum(), 1.0)  # share of each file in the input
        self._before = np.cumsum(self._each) - self._each

    @property
    def ended(self) -> bool:
        """Whether no row is left."""
        return self._next is None

    def take(self, count: int) -> list[tuple[Place, Block]]:
        """The next rows, so many or what is left; fewer where their images take more than
        IMAGE_BYTES_AT_A_TIME."""
        taken, image_bytes = [], 0
        while count and image_bytes < IMAGE_BYTES_AT_A_TIME and self._next is not None:
            place, block = self._next
            if block.count > count:
                self._next = Place(place.file, place.row + count), block.sliced(count)
                block = block.sliced(0, count)
            else:
                self._next = next(self._blocks, None)
            taken.append((place, block))
            count -= block.count
            if (image := block.image) is not None:
                image_bytes += len(image) if isinstance(image, bytes) else image.nbytes
            self.at = Place(place.file, place.row + block.count)
            self.share = self._before[place.file] + block.share * self._each[place.file]
        return taken
