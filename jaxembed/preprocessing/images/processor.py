"""Turns images into encodings: their patches, decoded and resized in threads."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from jaxembed.data.inputs import Image, Input
from jaxembed.data.spec import ModelSpec
from jaxembed.data.work import Encoding, work_of
from jaxembed.errors import InvalidInput
from jaxembed.platform.extras import require
from jaxembed.preprocessing.images.decode import MOST_BYTES, decode_image, image_size, picture_of
from jaxembed.preprocessing.images.prepare import image_places, prepare_image, resized_size
from jaxembed.preprocessing.job_threads import JobThreads, go_on_among_large, is_for_small
from jaxembed.preprocessing.text import Rules, TextProcessor, Tokenized

PICTURE_BYTES = 4  # a pixel, of an image of Pillow
RESIZED_BYTES = 14  # a pixel: an image of Pillow, three copies of its colours, and some to spare
# A job whose images each take at most so many bytes while they are decoded and resized waits for
# no larger image. One of 1920 by 1080 pixels takes fewer.
SMALL_BYTES = 50_000_000
WORD = np.dtype("<i4")  # as PackedTokens has the bytes of a patch


class ImageProcessor:
    """Turns the images of a model into encodings. All threads share it.

    Jobs with an image that takes more than SMALL_BYTES have threads of their own, in which images
    take at most MOST_BYTES at any time, and others wait. A job of small images waits for none of
    them.
    """

    def __init__(self, spec: ModelSpec, workers: int):
        """`workers` is the number of threads for small images, and of those for others. Raises
        ConfigError without Pillow."""
        require("images", "a model that takes images")
        assert spec.image is not None
        self._rules = spec.image
        self.limit = spec.max_input_tokens
        self._workers = workers
        self._room = _Room(MOST_BYTES)
        self.executor = JobThreads(workers, "decode")

    def encode(self, inputs: Sequence[Input], rules: Rules) -> Tokenized:
        """Decode and resize images in the calling thread. Raises InvalidImage for the first at
        fault, and InvalidInput for an input that is none."""
        held = [0] * len(inputs)  # bytes; of an input at fault none: it is refused in its turn
        for number, item in enumerate(inputs):
            with suppress(InvalidInput):
                held[number] = self._bytes(item) if isinstance(item, Image) else 0
        if max(held, default=0) > SMALL_BYTES:
            go_on_among_large()
        encodings: list[Encoding] = []
        try:
            for item, size in zip(inputs, held, strict=True):
                if not isinstance(item, Image):
                    raise InvalidInput("the input is no image, and this is the tower of images")
                encodings.append(self._encode(item, size or self._bytes(item)))
        except InvalidInput as error:
            raise error.at(len(encodings)) from error
        return Tokenized(work_of(encodings), 0)

    def estimate(self, inputs: Sequence[Input], rules: Rules) -> tuple[int, int]:
        """The numbers of sequences and tokens of the inputs."""
        return len(inputs), len(inputs) * self.limit

    @property
    def job_bytes(self) -> int:
        """The memory that a thread for small images needs while it runs `encode`, and one for
        others: its share of that of all of them."""
        return SMALL_BYTES + MOST_BYTES // self._workers

    def _bytes(self, item: Image) -> int:
        """The memory that an image takes while it is decoded and resized. Raises InvalidImage."""
        if isinstance(item.data, bytes):
            height, width, decoding = image_size(item.data)
        else:
            height, width = item.data.shape[:2]
            decoding = PICTURE_BYTES * height * width
        high, wide = resized_size(height, width, self._rules)
        between = PICTURE_BYTES * height * wide  # Pillow resizes the width first
        return decoding + between + RESIZED_BYTES * high * wide

    def _encode(self, item: Image, held: int) -> Encoding:
        data = item.data
        with self._room.taken(0 if is_for_small() else held):
            image = decode_image(data) if isinstance(data, bytes) else picture_of(data)
            patches = prepare_image(image, self._rules)
        before, after = self._rules.before, self._rules.after
        own = [self._rules.token_id] * len(patches)
        ids = np.array([*before, *own, *after], np.int32)
        numbers = self._rules.place_numbers
        pixels = np.zeros((len(ids), numbers + patches.shape[1] // WORD.itemsize), np.int32)
        if numbers:
            pixels[:, :numbers] = image_places(image.height, image.width, self._rules)
        at = slice(len(before), len(before) + len(patches))
        pixels[at, numbers:] = np.ascontiguousarray(patches).view(WORD)
        return Encoding(ids, pixels=pixels)


Processor = TextProcessor | ImageProcessor
"""What makes encodings of the inputs of a route: of texts, or of images."""


class _Room:
    """So many bytes, of which threads take some and give them back."""

    def __init__(self, most: int):
        self._most = self._left = most
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Wait until so many are left, or all of them if there are fewer, and keep them in the
        context."""
        size = min(size, self._most)
        with self._freed:
            self._freed.wait_for(lambda: self._left >= size)
            self._left -= size
        try:
            yield
        finally:
            with self._freed:
                self._left += size
                self._freed.notify_all()
