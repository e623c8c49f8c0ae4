"""Turns images into encodings, in threads: decodes and resizes them, and makes their patches."""

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

PICTURE_BYTES = 4  # of memory for each pixel of a Pillow image
RESIZED_BYTES = 14  # for each pixel after resizing: a Pillow image, three copies and a reserve
# The most memory that a small image takes while it is decoded and resized. Jobs of small images
# never wait for large ones. An image of 1920 by 1080 pixels is small.
SMALL_BYTES = 50_000_000
WORD = np.dtype("<i4")  # PackedTokens holds the bytes of a patch in such words


class ImageProcessor:
    """Turns the images of a model into encodings. All threads share it.

    A job with an image that takes more than SMALL_BYTES runs in a thread for large images. Together
    these threads take at most MAX_BYTES at any time: further images wait. Jobs of small images have
    other threads, and do not wait.
    """

    def __init__(self, spec: ModelSpec, workers: int):
        """`workers` is the number of threads for small images, and also of those for large ones.
        Raises ConfigError without Pillow."""
        require("images", "a model that takes images")
        assert spec.image is not None
        self._rules = spec.image
        self.limit = spec.max_input_tokens
        self._workers = workers
        self._budget = _MemoryBudget(MOST_BYTES)
        self.executor = JobThreads(workers, "decode")

    def encode(self, inputs: Sequence[Input], rules: Rules) -> Tokenized:
        """Decode and resize images in the calling thread, or start the job anew in a thread for
        large images if it has one. The options have no effect on images.

        Raises InvalidImage for the first image at fault, and InvalidInput for any other kind of
        input.
        """
        memory_bytes = [0] * len(inputs)  # 0 for an input at fault, which is refused below
        for index, item in enumerate(inputs):
            with suppress(InvalidInput):
                memory_bytes[index] = self._bytes(item) if isinstance(item, Image) else 0
        if max(memory_bytes, default=0) > SMALL_BYTES:
            go_on_among_large()
        encodings: list[Encoding] = []
        try:
            for item, size in zip(inputs, memory_bytes, strict=True):
                if not isinstance(item, Image):
                    raise InvalidInput("the input is no image, and this is the tower of images")
                encodings.append(self._encode(item, size or self._bytes(item)))
        except InvalidInput as error:
            raise error.at(len(encodings)) from error
        return Tokenized(work_of(encodings), 0)

    def estimate(self, inputs: Sequence[Input], rules: Rules) -> tuple[int, int]:
        """Return the number of sequences of the inputs, and the most tokens that they may have."""
        return len(inputs), len(inputs) * self.limit

    @property
    def job_bytes(self) -> int:
        """The memory in bytes of two threads that run `encode`: one for small images, and one for
        large images with its share of MAX_BYTES."""
        return SMALL_BYTES + MOST_BYTES // self._workers

    def _bytes(self, item: Image) -> int:
        """Return the peak memory in bytes of decoding and resizing an image. Raises InvalidImage
        for a file that cannot be decoded."""
        if isinstance(item.data, bytes):
            height, width, decoding = image_size(item.data)
        else:
            height, width = item.data.shape[:2]
            decoding = PICTURE_BYTES * height * width
        high, wide = resized_size(height, width, self._rules)
        between = PICTURE_BYTES * height * wide  # Pillow resizes the width first
        return decoding + between + RESIZED_BYTES * high * wide

    def _encode(self, item: Image, memory_bytes: int) -> Encoding:
        """Encode an image whose decoding takes `memory_bytes`. A large image waits for that
        memory."""
        data = item.data
        with self._budget.taken(0 if is_for_small() else memory_bytes):
            image = decode_image(data) if isinstance(data, bytes) else picture_of(data)
            patches = prepare_image(image, self._rules)
        before, after = self._rules.before, self._rules.after
        patch_ids = [self._rules.token_id] * len(patches)
        ids = np.array([*before, *patch_ids, *after], np.int32)
        place_numbers = self._rules.place_numbers
        # for each token the numbers of its place, and then the bytes of its patches
        pixels = np.zeros((len(ids), place_numbers + patches.shape[1] // WORD.itemsize), np.int32)
        if place_numbers:
            pixels[:, :place_numbers] = image_places(image.height, image.width, self._rules)
        patch_rows = slice(len(before), len(before) + len(patches))
        pixels[patch_rows, place_numbers:] = np.ascontiguousarray(patches).view(WORD)
        return Encoding(ids, pixels=pixels)


Processor = TextProcessor | ImageProcessor
"""Turns the inputs of a route, texts or images, into encodings."""


class _MemoryBudget:
    """A memory budget in bytes, of which threads reserve parts."""

    def __init__(self, max_bytes: int):
        self._max_bytes = self._free_bytes = max_bytes
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes within the context, or the whole budget if it is smaller. Waits
        until they are free."""
        size = min(size, self._max_bytes)
        with self._freed:
            self._freed.wait_for(lambda: self._free_bytes >= size)
            self._free_bytes -= size
        try:
            yield
        finally:
            with self._freed:
                self._free_bytes += size
                self._freed.notify_all()
