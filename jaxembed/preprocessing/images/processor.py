"""Turns images into encodings, in threads: decodes and resizes them, and makes their patches."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from jaxembed.data.inputs import Image, Input
from jaxembed.data.spec import ModelSpec
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.errors import InvalidInput
from jaxembed.platform.extras import require
from jaxembed.preprocessing.images.decode import MAX_BYTES, decode_image, image_size, to_pillow
from jaxembed.preprocessing.images.prepare import (
    image_positions,
    max_tokens,
    prepare_image,
    resized_size,
)
from jaxembed.preprocessing.job_threads import JobThreads, is_for_small, restart_if_small
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions, Tokenized

BYTES_A_PILLOW_PIXEL = 4  # bytes of memory for each pixel of a Pillow image
BYTES_A_RESIZED_PIXEL = (
    14  # for each pixel after resizing: a Pillow image, three copies and a reserve
)
# An image is small if it takes at most this much memory (bytes) while it is decoded and resized.
# Jobs of small images never wait for large ones. An image of 1920 by 1080 pixels is small.
SMALL_BYTES = 50_000_000
WORD = np.dtype("<i4")  # the bytes of patches are moved to the device four at a time, as int32


class ImageProcessor:
    """Turns the images of a model into encodings. All threads share it.

    A job with an image that takes more than SMALL_BYTES of memory runs in a thread for large
    images. These threads together take at most MAX_BYTES; an image for which no memory is left
    waits. Jobs of small images run in other threads, and do not wait.
    """

    def __init__(self, spec: ModelSpec, workers: int):
        """Start `workers` threads for small images, and as many for large images. Raises
        ConfigError if Pillow is not installed."""
        require("images", "a model that takes images")
        assert spec.image is not None
        self._rules = spec.image
        # a text may have more tokens than an image
        rules = spec.image
        self.limit = spec.max_input_tokens if rules.area is None else max_tokens(rules)
        self._workers = workers
        self._budget = _MemoryBudget(MAX_BYTES)
        self.executor = JobThreads(workers, "decode")

    def encode(self, inputs: Sequence[Input], tokenization: TokenizationOptions) -> Tokenized:
        """Decode and resize images in the calling thread. If this is a thread for small images and
        one of the images is large, the job is run again in a thread for large images.
        `tokenization` has no effect.

        Raises InvalidImage for the first invalid image, and InvalidInput for an input that is not
        an image.
        """
        memory_bytes = [0] * len(inputs)  # stays 0 for an invalid input
        for index, item in enumerate(inputs):
            with suppress(InvalidInput):
                memory_bytes[index] = self._bytes(item) if isinstance(item, Image) else 0
        if max(memory_bytes, default=0) > SMALL_BYTES:
            restart_if_small()  # leaves this method if this is a thread for small images
        encodings: list[Encoding] = []
        try:
            for item, size in zip(inputs, memory_bytes, strict=True):
                if not isinstance(item, Image):
                    raise InvalidInput(
                        "the input is not an image; this route of the model takes only images"
                    )
                # A size of 0 means that the image is invalid: `_bytes` raises its error again.
                encodings.append(self._encode(item, size or self._bytes(item)))
        except InvalidInput as error:
            raise error.at(len(encodings)) from error
        return Tokenized(work_from_encodings(encodings), truncated=0)

    def estimate(
        self, inputs: Sequence[Input], tokenization: TokenizationOptions
    ) -> tuple[int, int]:
        """Return the number of sequences of the inputs, and their maximum number of tokens."""
        return len(inputs), len(inputs) * self.limit

    @property
    def job_bytes(self) -> int:
        """The memory in bytes of a thread for small images and a thread for large images together.
        All threads for large images share MAX_BYTES."""
        return SMALL_BYTES + MAX_BYTES // self._workers

    def _bytes(self, item: Image) -> int:
        """Return the peak memory in bytes of decoding and resizing an image. Raises InvalidImage
        for a file that cannot be decoded."""
        if isinstance(item.data, bytes):
            height, width, decoding = image_size(item.data)
        else:
            height, width = item.data.shape[:2]
            decoding = BYTES_A_PILLOW_PIXEL * height * width
        new_height, new_width = resized_size(height, width, self._rules)
        half_resized = BYTES_A_PILLOW_PIXEL * height * new_width  # Pillow resizes the width first
        return decoding + half_resized + BYTES_A_RESIZED_PIXEL * new_height * new_width

    def _encode(self, item: Image, memory_bytes: int) -> Encoding:
        """Encode an image. Decoding and resizing take `memory_bytes` of memory. A thread for large
        images waits until so much of MAX_BYTES is free."""
        data = item.data
        with self._budget.taken(0 if is_for_small() else memory_bytes):
            image = decode_image(data) if isinstance(data, bytes) else to_pillow(data)
            patches = prepare_image(image, self._rules)
        before, place_numbers = self._rules.before, self._rules.place_numbers
        patch_ids = [self._rules.token_id] * len(patches)
        ids = np.array([*before, *patch_ids, *self._rules.after], np.int32)
        # Each row holds the numbers of a token's place, and then the bytes of its patches as int32.
        pixels = np.zeros((len(ids), place_numbers + patches.shape[1] // WORD.itemsize), np.int32)
        if place_numbers:
            pixels[:, :place_numbers] = image_positions(image.height, image.width, self._rules)
        patch_rows = slice(len(before), len(before) + len(patches))
        pixels[patch_rows, place_numbers:] = np.ascontiguousarray(patches).view(WORD)
        return Encoding(ids, pixels=pixels)


Processor = TextProcessor | ImageProcessor
"""The type of objects that turn the inputs of a route, texts or images, into encodings."""


class _MemoryBudget:
    """A number of bytes of memory that threads reserve parts of."""

    def __init__(self, max_bytes: int):
        self._max_bytes = self._free_bytes = max_bytes
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes during the block, or the whole budget if `size` is larger. Waits
        until so many bytes are free."""
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
