"""Turns images into encodings, in threads: decodes and resizes them, and makes their patches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxembed.data.inputs import Content, Image, Input, Text, parts_of
from jaxembed.data.spec import ModelSpec
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.errors import InvalidInput, WrongParts, counted
from jaxembed.platform.extras import require
from jaxembed.preprocessing.images.decode import MAX_BYTES, decode_image, image_size, to_pillow
from jaxembed.preprocessing.images.parts import WORD, PartsTokenizer, Segment, words_of
from jaxembed.preprocessing.images.prepare import (
    first_size,
    image_ids,
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


class Facts(NamedTuple):
    """What an image takes: bytes of memory at most while it is decoded and resized, and tokens."""

    memory_bytes: int
    tokens: int


class ImageProcessor:
    """Turns the images of a model, and inputs of texts and images, into encodings. All threads
    share it.

    A job with an image that takes more than SMALL_BYTES of memory runs in a thread for large
    images. These threads together take at most MAX_BYTES; an image for which no memory is left
    waits. Jobs of small images run in other threads, and do not wait.
    """

    def __init__(self, spec: ModelSpec, workers: int, texts: TextProcessor | None = None):
        """Start `workers` threads for small images, and as many for large images. `texts` tokenizes
        the texts beside images, if the model takes such inputs. Raises ConfigError if Pillow is not
        installed."""
        require("images", "a model that takes images")
        assert spec.image is not None
        self._rules = rules = spec.image
        # the maximum tokens of an image; a text may have more
        self.limit = spec.max_input_tokens if rules.area is None else max_tokens(rules)
        self._texts, self._parts = texts, None
        if spec.takes_parts and texts is not None:
            self._parts = PartsTokenizer(texts, rules)
            self.limit += self._parts.template_length
        self._workers = workers
        self._budget = _MemoryBudget(MAX_BYTES)
        self.executor = JobThreads(workers, "decode")

    def encode(self, inputs: Sequence[Input], tokenization: TokenizationOptions) -> Tokenized:
        """Decode and resize images, and tokenize the texts beside them, in the calling thread. If
        this is a thread for small images and one of the images is large, the job is run again in a
        thread for large images. `tokenization` has no effect on an image without a template.

        Raises InvalidImage for the first invalid image, and InvalidInput for an input without an
        image or one that the model does not take.
        """
        if self._parts is None:
            return self._encoded(inputs, _only_image)
        return self._encoded(inputs, partial(self._parts.encode, tokenization=tokenization))

    def tokenize_query(self, query: Content, tokenization: TokenizationOptions) -> list[Segment]:
        """Encode a query once, for use in several calls of `encode_pairs_of_query`. Raises
        InvalidInput, with the field `query`, or TokenizerError."""
        try:
            return self._pairs.query(self._with_images(query, self._facts(query)), tokenization)
        except InvalidInput as error:
            raise error.at(None, field=error.field or "query") from error

    def encode_pairs_of_query(
        self,
        query: Sequence[Segment],
        documents: Sequence[Content],
        tokenization: TokenizationOptions,
    ) -> Tokenized:
        """Encode a pair of the query and each document. `query` is a result of `tokenize_query`.
        Raises the errors of `encode`."""
        pair = partial(self._pairs.pair, query, tokenization=tokenization)
        return self._encoded(documents, pair)

    def estimate(
        self, inputs: Sequence[Input], tokenization: TokenizationOptions
    ) -> tuple[int, int]:
        """Return the number of sequences of the inputs, and an estimate of their tokens: the
        maximum for each image, and for texts that of TextProcessor."""
        if self._parts is None:
            return len(inputs), len(inputs) * self.limit
        assert self._texts is not None
        tokens = 0
        for item in inputs:
            parts = parts_of(item)
            texts = Text("".join(part for part in parts if isinstance(part, str)))
            images = sum(isinstance(part, Image) for part in parts)
            _, count = self._texts.estimate([texts], tokenization)
            tokens += min(count + images * self.limit, self._parts.limit)
        return len(inputs), tokens

    @property
    def job_bytes(self) -> int:
        """The memory in bytes of a thread for small images and a thread for large images together.
        All threads for large images share MAX_BYTES."""
        return SMALL_BYTES + MAX_BYTES // self._workers

    @property
    def _pairs(self) -> PartsTokenizer:
        assert self._parts is not None
        return self._parts

    def _encoded(
        self,
        items: Sequence[Input | Content],
        join: Callable[[list[str | Encoding]], tuple[Encoding, bool]],
    ) -> Tokenized:
        """Encode the images of each item, and make a sequence of it by `join`, which also returns
        whether texts were truncated."""
        facts = [self._facts(item) for item in items]
        encodings, truncated = [], 0
        try:
            for item, found in zip(items, facts, strict=True):
                encoding, is_cut = join(self._with_images(item, found))
                encodings.append(encoding)
                truncated += is_cut
        except InvalidInput as error:
            raise error.at(len(encodings)) from error
        return Tokenized(work_from_encodings(encodings), truncated)

    def _facts(self, item: Input | Content) -> list[Facts | None] | InvalidInput:
        """Return what each image among the parts of an item takes, and None for a text; or the
        error of the first invalid part. Leaves the job if this is a thread for small images and an
        image is large."""
        facts: list[Facts | None] = []
        try:
            for part in parts_of(item):
                facts.append(self._facts_of_image(part) if isinstance(part, Image) else None)
        except InvalidInput as error:
            is_one = len(parts_of(item)) == 1
            return error.at(None, part=None if is_one else len(facts))
        if max((one.memory_bytes for one in facts if one), default=0) > SMALL_BYTES:
            restart_if_small()
        return facts

    def _facts_of_image(self, item: Image) -> Facts:
        """Return what an image takes. Raises InvalidImage for a file that cannot be decoded."""
        if isinstance(item.data, bytes):
            height, width, decoding = image_size(item.data)
        else:
            height, width = item.data.shape[:2]
            decoding = BYTES_A_PILLOW_PIXEL * height * width
        new_height, new_width = resized_size(height, width, self._rules)
        half_resized = BYTES_A_PILLOW_PIXEL * height * new_width  # Pillow resizes the width first
        if self._rules.first_area is not None:  # then also the image between
            first_height, first_width = first_size(height, width, self._rules)
            half_resized += BYTES_A_PILLOW_PIXEL * (height + first_height) * first_width
        taken = decoding + half_resized + BYTES_A_RESIZED_PIXEL * new_height * new_width
        around = len(self._rules.before) + len(self._rules.after)
        return Facts(taken, new_height * new_width // self._rules.token_side**2 + around)

    def _with_images(
        self, item: Input | Content, facts: list[Facts | None] | InvalidInput
    ) -> list[str | Encoding]:
        """Return the parts of an item with encoded images. `facts` are those of `_facts`. Raises
        their error, and WrongParts for images of too many tokens, before any is decoded."""
        if isinstance(facts, InvalidInput):
            raise facts
        tokens = sum(one.tokens for one in facts if one)
        if self._parts is not None and tokens + self._parts.template_length > self._parts.limit:
            raise WrongParts(
                f"the images of the input have {counted(tokens, 'token')}, and the limit of an "
                f"input is {self._parts.limit} with those of the template; send fewer or smaller "
                "images"
            )
        parts: list[str | Encoding] = []
        for number, (part, one) in enumerate(zip(parts_of(item), facts, strict=True)):
            try:
                if isinstance(part, str) or one is None:
                    parts.append(str(part))
                else:
                    parts.append(self._encode(part, one.memory_bytes))
            except InvalidInput as error:
                raise error.at(None, part=None if len(facts) == 1 else number) from error
        return parts

    def _encode(self, item: Image, memory_bytes: int) -> Encoding:
        """Encode an image. Decoding and resizing take `memory_bytes` of memory. A thread for large
        images waits until so much of MAX_BYTES is free."""
        data = item.data
        with self._budget.taken(0 if is_for_small() else memory_bytes):
            image = decode_image(data) if isinstance(data, bytes) else to_pillow(data)
            patches = prepare_image(image, self._rules)
        place_numbers = self._rules.place_numbers
        ids = np.array(image_ids(image.height, image.width, self._rules), np.int32)
        # Each row holds the numbers of a token's place, and then the bytes of its patches as int32.
        pixels = np.zeros((len(ids), words_of(self._rules)), np.int32)
        if place_numbers:
            pixels[:, :place_numbers] = image_positions(image.height, image.width, self._rules)
        is_patch = ids == self._rules.token_id
        pixels[is_patch, place_numbers:] = np.ascontiguousarray(patches).view(WORD)
        spans = None
        if self._rules.pools_image:
            spans = ((len(self._rules.before) - 1, len(ids) - len(self._rules.after) + 1),)
        return Encoding(ids, spans=spans, pixels=pixels)


def _only_image(parts: list[str | Encoding]) -> tuple[Encoding, bool]:
    """Return the only part of an input, which must be an image. Raises InvalidInput."""
    (part,) = parts or [""]
    if isinstance(part, str):
        raise InvalidInput("the input is not an image; this route of the model takes only images")
    return part, False


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
