"""Turns images into encodings: their patches, decoded and resized in threads."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from jaxembed.errors import InvalidInput
from jaxembed.images.decode import MOST_PIXELS, decode_image, image_size, require_pillow
from jaxembed.images.prepare import image_places, prepare_image, resized_size
from jaxembed.inputs import Image, Input
from jaxembed.processors.text import Rules, TextProcessor, Tokenized
from jaxembed.spec import ModelSpec
from jaxembed.work import Encoding, work_of

# Bytes that a pixel takes while it is decoded: its three colours, with transparency before and
# after it is put on white, and a copy of its colours.
DECODING_BYTES = 14
WORD = np.dtype("<i4")  # as PackedTokens has the bytes of a patch


class ImageProcessor:
    """Turns the images of a model into encodings. All threads share it.

    Together they decode at most MOST_PIXELS at any time; others wait.
    """

    def __init__(self, spec: ModelSpec, workers: int):
        """`workers` is the number of threads of `executor`. Raises ConfigError without Pillow."""
        require_pillow()
        assert spec.image is not None
        self._rules = spec.image
        self.limit = spec.max_input_tokens
        self._workers = workers
        self._room = _Room(MOST_PIXELS)
        self.executor: Executor = ThreadPoolExecutor(workers, thread_name_prefix="decode")

    def encode(self, inputs: Sequence[Input], rules: Rules) -> Tokenized:
        """Decode and resize images in the calling thread. Raises InvalidImage for the first at
        fault, and InvalidInput for an input that is none."""
        encodings: list[Encoding] = []
        try:
            for item in inputs:
                if not isinstance(item, Image):
                    raise InvalidInput("the input is no image, and this is the tower of images")
                encodings.append(self._encode(item))
        except InvalidInput as error:
            error.index = len(encodings)
            raise
        return Tokenized(work_of(encodings), 0)

    def estimate(self, inputs: Sequence[Input], rules: Rules) -> tuple[int, int]:
        """The numbers of sequences and tokens of the inputs."""
        return len(inputs), len(inputs) * self.limit

    @property
    def job_bytes(self) -> int:
        """The memory that a thread needs while it runs `encode`, in bytes: its share of that of
        all."""
        return DECODING_BYTES * MOST_PIXELS // self._workers

    def _encode(self, item: Image) -> Encoding:
        data = item.data
        height, width = image_size(data) if isinstance(data, bytes) else data.shape[:2]
        resized = resized_size(height, width, self._rules)
        with self._room.taken(height * width + resized[0] * resized[1]):
            colours = decode_image(data) if isinstance(data, bytes) else data
            patches = prepare_image(colours, self._rules)
        before, after = self._rules.before, self._rules.after
        own = [self._rules.token_id] * len(patches)
        ids = np.array([*before, *own, *after], np.int32)
        numbers = self._rules.place_numbers
        pixels = np.zeros((len(ids), numbers + patches.shape[1] // WORD.itemsize), np.int32)
        if numbers:
            pixels[:, :numbers] = image_places(colours, self._rules)
        at = slice(len(before), len(before) + len(patches))
        pixels[at, numbers:] = np.ascontiguousarray(patches).view(WORD)
        return Encoding(ids, pixels=pixels)


Processor = TextProcessor | ImageProcessor
"""What makes encodings of the inputs of a route: of texts, or of images."""


class _Room:
    """So many pixels, of which threads take some and give them back."""

    def __init__(self, most: int):
        self._most = self._left = most
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Wait until so many are left, or all of them if there are fewer, and keep them in the
        context."""
        pixels = min(pixels, self._most)
        with self._freed:
            self._freed.wait_for(lambda: self._left >= pixels)
            self._left -= pixels
        try:
            yield
        finally:
            with self._freed:
                self._left += pixels
                self._freed.notify_all()
