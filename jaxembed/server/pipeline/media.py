"""Images in requests: where their bytes come from. Knows no route and does not look into them."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from jaxembed.data.inputs import Image, Input, Text
from jaxembed.engine.admission import Held
from jaxembed.errors import InvalidInput, MediaUrlError
from jaxembed.preprocessing.images.decode import MOST_PIXELS, ImageFacts, image_facts
from jaxembed.preprocessing.images.media import excerpt, is_data_uri, read_base64, read_data_uri
from jaxembed.server.service import current_service

MOST_IMAGE_BYTES = 20_000_000  # of one image
AT_A_TIME = 4  # images of one request
# Pixels of all images of a request together. Decoding a lossless WebP took 1.3 s of CPU time for 49
# million. A request of at most 20 images cannot have more.
MOST_PIXELS_A_REQUEST = 20 * MOST_PIXELS
DECODED_AT_ONCE = 16 * 1024  # characters of base64 that are decoded on the event loop: some 20 us
MEDIA_FLAG = "--allow-media-urls"


class ImageSource(msgspec.Struct, frozen=True):
    """An image as a client names it: a data URI or a URL; where clients send base64 as it is, that
    too."""

    text: str
    bare: bool = False


class TextOrImage(msgspec.Struct):
    """The base of objects that hold a text, or an image as a URL, a data URI or base64."""

    text: str | None = None
    image: str | None = None

    @property
    def source(self) -> str | ImageSource:
        """The text, or the image."""
        return self.text or "" if self.image is None else ImageSource(self.image, bare=True)


class TypedInput(msgspec.Struct, forbid_unknown_fields=True):
    """An input that says what it is: a text with a `value`, or an image with a `url`, which may be
    a data URI. Raises ValueError for one that has not what its type needs."""

    type: Literal["text", "image"]
    value: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        wanted, other = ("value", "url") if self.type == "text" else ("url", "value")
        if not getattr(self, wanted) or getattr(self, other) is not None:
            raise ValueError(f"an input of type `{self.type}` has `{wanted}` and no `{other}`")

    @property
    def source(self) -> str | ImageSource:
        """The text, or the image."""
        return ImageSource(self.url or "") if self.type == "image" else self.value or ""


class ImageUrl(msgspec.Struct):
    """The URL of an image, which may be a data URI. What detail is asked for changes nothing."""

    url: str
    detail: Any = None


class ContentItem(msgspec.Struct):
    """A part of an input or a message: a text, or an image by its URL or in base64. Raises
    ValueError for one that has not what its type needs."""

    type: Literal["text", "image_url", "image_base64", "input_image", "image"]
    text: str | None = None
    image_url: str | ImageUrl | None = None
    image_base64: str | None = None

    def __post_init__(self) -> None:
        needed = {"text": "text", "image_base64": "image_base64"}.get(self.type, "image_url")
        if self.type == "image" or not getattr(self, needed):
            raise ValueError(
                f"a part of the type `{self.type}` is not served, or lacks what it holds: wanted "
                "`text` with `text`, `image_url` with `image_url`, or `image_base64` with that"
            )

    @property
    def source(self) -> str | ImageSource:
        """The text, or the image."""
        if self.type == "text":
            return self.text or ""
        if self.type == "image_base64":
            return ImageSource(self.image_base64 or "", bare=True)
        url = self.image_url
        return ImageSource(url.url if isinstance(url, ImageUrl) else url or "")


class Content(msgspec.Struct):
    """The parts of one input."""

    content: list[ContentItem]


def only_part(parts: Sequence[ContentItem], place: str) -> str | ImageSource:
    """The text or image of an input that must be one part: a vector is of one or of the other.
    Several texts are lines of one. Raises InvalidInput."""
    sources = [part.source for part in parts]
    texts = [one for one in sources if isinstance(one, str)]
    if sources and len(texts) == len(sources):
        return "\n".join(texts)
    if len(sources) != 1:
        raise InvalidInput(
            f"`{place}` has {len(sources)} parts, and this server gives an image a vector of its "
            "own: send one image, or texts alone",
            field=place,
        )
    return sources[0]


async def read_images(items: Sequence[Input | ImageSource], held: Held) -> list[Input]:
    """The inputs with the bytes of their images, which count for the request. Raises InvalidInput
    for an image that cannot be had and for too many pixels, RequestTooLarge and Overloaded."""
    turns = asyncio.Semaphore(AT_A_TIME)

    async def read(index: int, item: Input | ImageSource) -> Input:
        if not isinstance(item, ImageSource):
            return item
        async with turns:
            try:
                return await _read(item, held)
            except InvalidInput as error:
                raise error.at(index) from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(k, item)) for k, item in enumerate(items)]
    except BaseExceptionGroup as errors:  # the first cancels the others
        raise errors.exceptions[0] from None
    inputs = [task.result() for task in tasks]
    images = [one.data for one in inputs if isinstance(one, Image) and isinstance(one.data, bytes)]
    if len(images) * MOST_PIXELS > MOST_PIXELS_A_REQUEST:
        total = await asyncio.to_thread(lambda: sum(map(_pixels, images)))
        if total > MOST_PIXELS_A_REQUEST:
            raise InvalidInput(
                f"the {len(images)} images have {total} pixels together, of at most "
                f"{MOST_PIXELS_A_REQUEST} in a request; send them in several"
            )
    return inputs


def _pixels(image: bytes) -> int:
    """The pixels of an image; none of a damaged one, which is refused in its turn."""
    try:
        facts = image_facts(image)
    except InvalidInput:
        return 0
    return facts.height * facts.width


async def _read(item: ImageSource, held: Held) -> Image:
    text = item.text
    if is_data_uri(text) or (item.bare and "://" not in text[:16]):
        held.charge(len(text) * 3 // 4)
        read = read_data_uri if is_data_uri(text) else read_base64
        if len(text) <= DECODED_AT_ONCE:
            return Image(read(text, MOST_IMAGE_BYTES))
        return Image(await asyncio.to_thread(read, text, MOST_IMAGE_BYTES))
    fetcher = current_service().fetcher
    if fetcher is None:
        raise MediaUrlError(
            excerpt(text), f"wanted a data URI; for URLs name their hosts by {MEDIA_FLAG} HOST"
        )
    held.charge(MOST_IMAGE_BYTES)  # before it is known how large it is
    try:
        data = await fetcher.fetch(text)
    except BaseException:
        held.charge(-MOST_IMAGE_BYTES)
        raise
    held.charge(len(data) - MOST_IMAGE_BYTES)
    return Image(data)


async def facts_of_images(images: Sequence[bytes]) -> list[ImageFacts]:
    """What the headers of images say, read in a thread: one may be long."""
    if not images:
        return []
    return await asyncio.to_thread(lambda: list(map(image_facts, images)))


def text_or_image(source: str | ImageSource) -> Text | ImageSource:
    """The source as an input."""
    return Text(source) if isinstance(source, str) else source
