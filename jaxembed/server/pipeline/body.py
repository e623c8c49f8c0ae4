"""Reads the JSON body of a request into a Struct, the values of the body into inputs, and the bytes
of images."""

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout, UnsupportedMediaType

from jaxembed.config import ServerConfig
from jaxembed.data.inputs import (
    ChunkedText,
    Content,
    Image,
    Input,
    Pair,
    Parts,
    Priority,
    Text,
    Tokens,
    parts_of,
)
from jaxembed.engine.admission import Reservation
from jaxembed.errors import (
    BatchTooLarge,
    EmptyInput,
    InvalidInput,
    MediaUrlError,
    RequestTooLarge,
    counted,
)
from jaxembed.preprocessing.images.decode import MAX_PIXELS, ImageFacts, image_facts
from jaxembed.preprocessing.images.media import excerpt, is_data_uri, read_base64, read_data_uri
from jaxembed.preprocessing.images.media_fetch import MediaFetcher
from jaxembed.preprocessing.images.media_urls import AllowedAddresses
from jaxembed.runtime.requests import INPUT_BYTES
from jaxembed.server.errors import BadField, BadJson
from jaxembed.server.http.encoding import JSON
from jaxembed.server.http.exchange import current_exchange
from jaxembed.server.http.time_limit import in_time
from jaxembed.server.meter import Meter, Method, RequestSize
from jaxembed.server.pipeline.decoding import TokenId, decode, mixed_items_error
from jaxembed.server.service import current_service

MAX_IMAGE_BYTES = 20_000_000  # maximum size of one image
CONCURRENT_IMAGES = 4  # images of one request that are read at the same time
# Maximum pixels of all images of a request together, which 20 images of the maximum size have.
# Decoding 49 million pixels of a lossless WebP took 1.3 s of CPU time.
MAX_PIXELS_A_REQUEST = 20 * MAX_PIXELS
DECODED_AT_ONCE = 16 * 1024  # characters of base64 decoded on the event loop, in about 20 us
MAX_CONTENT = 2048  # maximum parts of one input, each a text or an image
NO_PARTS = "an input needs at least one part, and `content` is empty"

# Fields that hold a list of values and not of inputs. Such a list may have MAX_VALUES items, which
# is more than there are valid values.
VALUE_LISTS = (
    "outputs",
    "output_dtype",
    "embedding_type",
    "encoding_type",
    "embedding_types",
    "weights",
)
MAX_VALUES = 32

PRIORITY = "x-priority"  # the header of clients that cannot change bodies

T = TypeVar("T")

BODY_S = 60.0  # seconds that a client may take to send a body
DISCARD_S = 4.0  # longest pause of the client in a refused body; less than a closing server waits


class ImageSource(msgspec.Struct, frozen=True):
    """An image as the client sends it: `text` is a data URI or a URL, or with `bare` maybe plain
    base64. `place` is the path of the image in its input."""

    text: str
    bare: bool = False
    place: str = ""


class PartsSource(msgspec.Struct, frozen=True):
    """An input of several parts, at least one of which is an image. `places` are the paths of the
    parts in the input."""

    parts: tuple[str | ImageSource, ...]
    places: tuple[str, ...]


Source = str | ImageSource | PartsSource
IMAGES = {ImageSource, PartsSource}  # the types of sources with images


class TextOrImage(msgspec.Struct):
    """The base of objects that hold a text, an image as a URL, a data URI or base64, or both.
    Raises ValueError for an object with neither, or with an empty one beside the other."""

    text: str | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        given = [item for item in (self.text, self.image) if item is not None]
        if not given or (len(given) > 1 and not all(given)):
            raise ValueError("Expected an object with `text`, `image` or both, and neither empty")

    @property
    def source(self) -> Source:
        """The text, the image, or the image and then the text."""
        if self.image is None:
            return self.text or ""
        image = ImageSource(self.image, bare=True)
        return image if self.text is None else PartsSource((image, self.text), (".image", ".text"))


class TypedInput(msgspec.Struct, forbid_unknown_fields=True):
    """An input that names its type: a text has a `value`, and an image has a `url`, which may be a
    data URI. Raises ValueError if the field for the type is missing, or the field for the other
    type is set."""

    type: Literal["text", "image"]
    value: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        wanted, other = ("value", "url") if self.type == "text" else ("url", "value")
        if not getattr(self, wanted) or getattr(self, other) is not None:
            raise ValueError(f"an input of type `{self.type}` needs `{wanted}`, without `{other}`")

    @property
    def source(self) -> str | ImageSource:
        """The text, or the image."""
        return ImageSource(self.url or "") if self.type == "image" else self.value or ""


class ImageUrl(msgspec.Struct):
    """The URL of an image, which may be a data URI. `detail` has no effect."""

    url: str
    detail: Any = None


class ContentItem(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A part of an input or a message: a text, or an image as a URL or in base64. `detail`, `uuid`
    and `cache_control` have no effect; other fields are refused, because they may hold what the
    client takes for a part. Raises ValueError if the field that its `type` needs is missing or
    empty, and for the type "image", which is not supported."""

    type: Literal["text", "image_url", "image_base64", "input_image", "image"]
    text: str | None = None
    image_url: str | ImageUrl | None = None
    image_base64: str | None = None
    detail: Any = None
    uuid: Any = None
    cache_control: Any = None

    def __post_init__(self) -> None:
        if self.type == "image":
            raise ValueError(
                "a part of type `image` is not supported; send the type `image_url` or "
                "`image_base64`"
            )
        needed = {"text": "text", "image_base64": "image_base64"}.get(self.type, "image_url")
        url = self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url
        given = {"text": self.text, "image_url": url, "image_base64": self.image_base64}
        if not given.pop(needed):
            raise ValueError(
                f"a part of type `{self.type}` needs `{needed}`, which cannot be empty"
            )
        if others := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"a part of type `{self.type}` has `{needed}` and `{others[0]}`; send two parts"
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


class PartsInput(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """An input that consists of texts and images. Texts without an image are joined by line breaks
    as soon as the input is decoded, because many small parts take much memory. Raises ValueError
    for no or too many parts."""

    content: list[ContentItem]

    def __post_init__(self) -> None:
        if not self.content:
            raise ValueError(NO_PARTS)
        check_parts(self.content)
        if all(part.type == "text" for part in self.content):
            text = "\n".join(part.text or "" for part in self.content)
            self.content = [ContentItem("text", text)]

    @property
    def source(self) -> Source:
        """The joined texts, the image, or all parts."""
        return joined_parts([part.source for part in self.content], ".content")


def check_parts(parts: object) -> None:
    """Raise ValueError for a list of too many parts."""
    if isinstance(parts, list) and len(parts) > MAX_CONTENT:
        raise ValueError(too_many_parts(len(parts)))


def joined_parts(parts: Sequence[str | ImageSource], place: str = "") -> Source:
    """Combine the parts of one input, at least one. Texts without an image are joined as lines.
    `place` is the path of the parts in the input."""
    if ImageSource not in map(type, parts):
        return "\n".join(cast(Sequence[str], parts))
    if len(parts) == 1:
        return msgspec.structs.replace(cast(ImageSource, parts[0]), place=f"{place}[0]")
    return PartsSource(tuple(parts), tuple(f"{place}[{k}]" for k in range(len(parts))))


async def read_images(
    items: Sequence[Input | ImageSource | PartsSource], reservation: Reservation
) -> list[Input]:
    """Return the inputs, with each ImageSource replaced by an Image that has the bytes of the file,
    and each PartsSource by Parts. Memory is reserved for the request before the bytes are read.

    Raises InvalidInput for an image that cannot be read and for too many pixels, BatchTooLarge for
    more images than a request may have inputs, RequestTooLarge and Overloaded.
    """
    parts = [item.parts if isinstance(item, PartsSource) else (item,) for item in items]
    check_batch(sum(isinstance(part, ImageSource) for some in parts for part in some))
    permits = asyncio.Semaphore(CONCURRENT_IMAGES)

    async def read(index: int, item: Input | ImageSource | PartsSource) -> Input:
        if isinstance(item, PartsSource):
            read = [await read_image(index, *numbered) for numbered in enumerate(item.parts)]
            return Parts(tuple(read))
        if not isinstance(item, ImageSource):
            return item
        return cast(Image, await read_image(index, None, item))

    async def read_image(index: int, part: int | None, item: str | ImageSource) -> str | Image:
        if isinstance(item, str):
            return item
        async with permits:
            try:
                return await _read(item, reservation)
            except InvalidInput as error:
                raise error.at(index, part=part) from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(k, item)) for k, item in enumerate(items)]
    except BaseExceptionGroup as errors:  # the first failure cancels the other tasks
        raise errors.exceptions[0] from None
    inputs = [task.result() for task in tasks]
    images = image_files(inputs)
    if len(images) * MAX_PIXELS > MAX_PIXELS_A_REQUEST:
        total = await asyncio.to_thread(lambda: sum(map(_pixels, images)))
        if total > MAX_PIXELS_A_REQUEST:
            raise InvalidInput(
                f"the images of the request, {len(images)} in number, have {total} pixels in "
                f"total; a request can have at most {MAX_PIXELS_A_REQUEST}, so send them in "
                "several requests"
            )
    return inputs


def image_files(inputs: Sequence[Input | Content]) -> list[bytes]:
    """Return the bytes of all images of inputs."""
    images = [part for item in inputs for part in parts_of(item) if isinstance(part, Image)]
    return [image.data for image in images if isinstance(image.data, bytes)]


def _pixels(image: bytes) -> int:
    """Return the number of pixels of an image file; 0 if the file is damaged, because then it is
    refused later."""
    try:
        facts = image_facts(image)
    except InvalidInput:
        return 0
    return facts.height * facts.width


async def _read(item: ImageSource, reservation: Reservation) -> Image:
    """Read an image from its data URI, base64 or URL. Raises InvalidInput if it cannot be read,
    RequestTooLarge and Overloaded."""
    text = item.text
    if is_data_uri(text) or (item.bare and "://" not in text[:16]):
        count = len(text) * 3 // 4  # 4 characters of base64 are 3 bytes
        await reservation.make_room(count)
        reservation.charge(count)
        read = read_data_uri if is_data_uri(text) else read_base64
        if len(text) <= DECODED_AT_ONCE:
            await asyncio.sleep(0)  # many images in a row must not block the event loop
            return Image(read(text, MAX_IMAGE_BYTES))
        return Image(await asyncio.to_thread(read, text, MAX_IMAGE_BYTES))
    fetcher = current_service().fetcher
    if fetcher is None or "://" not in text[:16]:
        raise MediaUrlError(
            excerpt(text),
            "expected a data URI such as data:image/png;base64,AAAA; to allow URLs of http or "
            "https, set --allow-media-urls HOST",
        )
    await reservation.make_room(MAX_IMAGE_BYTES)
    reservation.charge(MAX_IMAGE_BYTES)  # the maximum, until the size is known
    try:
        data = await fetcher.fetch(text)
    except BaseException:
        reservation.charge(-MAX_IMAGE_BYTES)
        raise
    reservation.charge(len(data) - MAX_IMAGE_BYTES)
    return Image(data)


def image_fetcher(config: ServerConfig) -> MediaFetcher | None:
    """Return what fetches images whose URLs a request names; None if no URL is allowed."""
    if not config.media_hosts:
        return None
    allowed = AllowedAddresses(config.media_networks)
    return MediaFetcher(config.media_hosts, max_bytes=MAX_IMAGE_BYTES, allowed_address=allowed)


async def facts_of_images(images: Sequence[bytes]) -> list[ImageFacts]:
    """Read the size and the format of each image, given as the bytes of a file. It runs in a
    thread, because the headers may be long. Raises InvalidImage."""
    return await asyncio.to_thread(lambda: list(map(image_facts, images))) if images else []


def as_input(source: Source) -> Text | ImageSource | PartsSource:
    """Return a text as an input, and other sources unchanged."""
    return Text(source) if isinstance(source, str) else source


def characters_of(source: Source) -> int:
    """Return the number of characters of the texts of an input."""
    parts = source.parts if isinstance(source, PartsSource) else (source,)
    return sum(len(part) for part in parts if isinstance(part, str))


# msgspec has no union of list[str] and list[int], so `read_inputs` refuses mixed lists.
InputUnion = str | list[str | TokenId | list[TokenId]]


class MediaObject(TextOrImage, forbid_unknown_fields=True):
    """A text, an image, or both as one input, as Jina's clients send it. The image is a URL, a data
    URI or base64. Raises ValueError if it has neither."""


TypedInputs = str | list[str | TokenId | list[TokenId] | TypedInput] | TypedInput
MixedInputs = str | list[str | TokenId | list[TokenId] | MediaObject]

# Clients of Cohere and vLLM send a number, which has no effect.
AnyPriority = Priority | int


class RequestInputs(RequestSize, frozen=True):
    """The inputs of one request, in order. The images of an ImageSource or a PartsSource are not
    read yet."""

    items: Sequence[Input | ImageSource | PartsSource]

    @property
    def has_images(self) -> bool:
        """Whether an input has an image."""
        return not IMAGES.isdisjoint(map(type, self.items))

    def place(self, index: int, part: int | None = None) -> str:
        """Return the path of an input, or of one of its parts, such as `inputs[3].content[1]`."""
        item, place = self.items[index], super().place(index)
        if isinstance(item, ImageSource):
            place += item.place
        elif isinstance(item, PartsSource) and part is not None:
            place += item.places[part]
        return place


class RequestTexts(RequestSize, frozen=True):
    """The texts and pairs of one request, in order."""

    items: list[Text | Pair]


class RequestChunks(RequestSize, frozen=True):
    """The texts of one request, in order. `chunk_place(text, chunk)` returns the path in the body
    of the chunk number `chunk` of the text number `text`."""

    items: list[ChunkedText]
    chunk_place: Callable[[int, int], str]


async def read_body_as(meter: Meter, kind: type[T]) -> T:
    """Read the body of the current request, and decode it as `kind`, a Struct. Raises the errors of
    `read_body` and `decode`."""
    data = await read_body(meter.service.config.payload_limit)
    with meter.time("decode"):
        return await decode(data, kind, check_count)


async def read_body(limit: int, *, may_be_undeclared: bool = False) -> bytes | bytearray:
    """Read the body of the current request, at most `limit` bytes.

    Raises UnsupportedMediaType if the declared type is not JSON, or no type is declared and
    `may_be_undeclared` is False; BadJson for a compressed body; RequestTimeout;
    RequestEntityTooLarge for a body over the limit; RequestTooLarge and Overloaded if there is no
    memory for the body.
    """
    exchange = current_exchange()
    headers = exchange.headers
    declared = headers.get("content-type", "")
    mimetype = declared if declared == JSON else declared.partition(";")[0].strip().lower()
    if mimetype or not may_be_undeclared:
        is_json_like = mimetype.startswith("application/") and mimetype.endswith("+json")
        if mimetype != JSON and not is_json_like:
            raise UnsupportedMediaType
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise BadJson(f"`Content-Encoding: {coding}` is not supported; send the body as it is")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise RequestEntityTooLarge
    try:
        return await in_time(exchange.body.read(limit), BODY_S)
    except TimeoutError as error:
        raise RequestTimeout from error


async def discard_body() -> None:
    """Discard the rest of the body of a refused request while the client sends it. If the server
    reset the connection instead, the client could not read the error."""
    with contextlib.suppress(TimeoutError):
        await in_time(current_exchange().body.discard(DISCARD_S), BODY_S)


def check_count(place: str, count: int) -> None:
    """Check that the list at the path `place` in the body may have `count` items. The path tells
    whether the items are parts of an input, values, inputs, or the texts of one input. Raises
    BadField, BatchTooLarge and RequestTooLarge."""
    if place.endswith(".content"):
        if count > MAX_CONTENT:
            raise BadField(f"{too_many_parts(count)} - at `$.{place}`", field=place)
    elif place.rsplit(".", 1)[-1] in VALUE_LISTS:
        check_value_list(place, count)
    elif not place.endswith("]"):  # a list of inputs
        check_batch(count)
    elif count > 2:
        raise BadField(
            f"Expected one text or a pair, got more than two texts - at `$.{place}`", field=place
        )


def read_inputs(
    raw: str
    | TypedInput
    | Sequence[str | int | Sequence[int] | MediaObject | TypedInput | ImageSource | PartsSource],
    field: str,
    *,
    are_images: bool = False,
) -> RequestInputs:
    """Convert the value of the body's `field` to inputs.

    The value is one text, one sequence of token ids (`[1, 2, 3]`), an object with a text or an
    image, or a list of such inputs. With `are_images` a text is the URL of an image, and token ids
    are refused. Raises EmptyInput, BadField if a list mixes token ids with other items,
    BatchTooLarge and RequestTooLarge.
    """
    method: Method = "batch"
    if isinstance(raw, str | TypedInput):
        method, raw = "single", [raw]
    elif not raw or isinstance(raw[0], int):
        if not raw:
            raise EmptyInput(field)
        # an `array` has only integers, so only a list must be checked
        for i, item in enumerate(() if isinstance(raw, array) else raw):
            if not isinstance(item, int):
                objects = dict.fromkeys((MediaObject, TypedInput), "object")
                got = {str: "str", **objects}.get(type(item), "array")
                raise mixed_items_error(field, i, "a token id like the items before it", got)
        ids = cast(Sequence[int], raw)
        if are_images:
            raise BadField(f"Expected an image, got token ids - at `$.{field}`", field=field)
        return RequestInputs("single", len(ids), field, [Tokens(ids)])
    else:
        check_batch(len(raw))
    items: list[Input | ImageSource | PartsSource] = []
    characters = 0
    for i, item in enumerate(raw):
        if isinstance(item, int):
            raise mixed_items_error(field, i, "a text or a list of token ids", "int")
        source: Any = item  # most items are texts
        if not isinstance(item, str) and isinstance(item, (MediaObject, TypedInput)):
            source = item.source
        if are_images and isinstance(source, str):
            source = ImageSource(source)
        elif are_images and not isinstance(source, ImageSource | PartsSource):
            place = f"{field}[{i}]"
            raise BadField(f"Expected an image, got token ids - at `$.{place}`", field=place)
        if not (source.text if isinstance(source, ImageSource) else source):
            raise EmptyInput(field, None if method == "single" else i)
        if isinstance(source, ImageSource | PartsSource):
            items.append(source)
            characters += characters_of(source)
            continue
        items.append(Text(source) if isinstance(source, str) else Tokens(source))
        characters += len(source)
    return RequestInputs(method, characters, field, items)


def read_texts_and_pairs(
    groups: Sequence[Sequence[str]], field: str, method: Method
) -> RequestTexts:
    """Convert groups of one or two texts, the value of the body's `field`, to texts and pairs. One
    text of a pair may be empty. With the method "single", the field holds only one group, so the
    path of the group is `field`. Raises EmptyInput, BadField for a group of more than two texts,
    BatchTooLarge and RequestTooLarge."""
    if not groups:
        raise EmptyInput(field)
    check_batch(len(groups))
    items: list[Text | Pair] = []
    for i, group in enumerate(groups):
        place = field if method == "single" else f"{field}[{i}]"
        if not any(group):
            raise EmptyInput(field, None if method == "single" else i)
        if len(group) > 2:
            raise BadField(
                f"Expected one text or a pair, got {counted(len(group), 'text')} - at `$.{place}`",
                field=place,
            )
        items.append(Text(*group) if len(group) == 1 else Pair(*group))
    characters = sum(len(text) for group in groups for text in group)
    return RequestTexts(method, characters, field, items)


def priority_of(asked: AnyPriority | None) -> Priority | None:
    """Return the priority of the current request; None if it has none. `asked` is the priority in
    the body. If that is None or a number, which has no effect, the header PRIORITY counts. Raises
    InvalidInput if the header has a value that is not a priority."""
    if asked is not None and not isinstance(asked, int):
        return asked
    exchange = current_exchange()
    if PRIORITY not in exchange.headers:
        return None
    name = PRIORITY.encode()
    values = [value.decode("latin-1") for key, value in exchange.scope["headers"] if key == name]
    header = ", ".join(values)  # how HTTP reads a header that is sent twice
    if header in get_args(Priority):
        return cast(Priority, header)
    raise InvalidInput(
        f"the header `{PRIORITY}` must be one of {', '.join(map(repr, get_args(Priority)))}, and "
        f"sent once. Given: {header!r}",
        field=PRIORITY,
    )


def check_batch(count: int) -> None:
    """Raise BatchTooLarge if a request may not have `count` inputs, and RequestTooLarge if so many
    inputs need more memory than the server may use for requests."""
    service = current_service()
    limit, max_bytes = service.config.max_client_batch_size, service.models.capacity.max_bytes
    if 0 < limit < count:
        raise BatchTooLarge(
            f"batch size {count} > maximum allowed batch size {limit}; "
            "send smaller batches or raise --max-client-batch-size"
        )
    if count * INPUT_BYTES > max_bytes:
        raise RequestTooLarge(
            f"{count} inputs need more than {max_bytes} bytes of memory; "
            "send smaller batches or raise --max-queue-bytes"
        )


def check_value_list(place: str, count: int) -> None:
    """Raise BadField if a list of values has more than MAX_VALUES items. `count` is the number of
    items that were read so far, and `place` the path of the list in the body."""
    if count > MAX_VALUES:
        raise BadField(
            f"Expected at most {MAX_VALUES} items, got {count} - at `$.{place}`", field=place
        )


def too_many_parts(count: int) -> str:
    """Return the error message for an input with `count` parts."""
    return f"Expected at most {MAX_CONTENT} parts in an input, got {count}"
