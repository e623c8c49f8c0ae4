"""Reads a JSON body into a Struct, and its inputs into `Input`s. Knows no route and no dialect."""

import asyncio
import contextlib
from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast, get_args

import msgspec
from quart import request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout, UnsupportedMediaType

from jaxembed.data.inputs import Input, Pair, Priority, Text, Tokens
from jaxembed.errors import BatchTooLarge, EmptyInput, InvalidInput, RequestTooLarge
from jaxembed.runtime.requests import INPUT_BYTES
from jaxembed.server.errors import BadField, BadJson
from jaxembed.server.http.bounded_body import BoundedBody
from jaxembed.server.http.encoding import JSON
from jaxembed.server.meter import Method, RequestSize, current_meter
from jaxembed.server.pipeline import decoding
from jaxembed.server.pipeline.decoding import TokenId, mixed
from jaxembed.server.pipeline.media import ImageSource, TypedInput, text_or_image
from jaxembed.server.service import current_service

# msgspec refuses list[str] | list[int] in one union: `read_inputs` checks what this lets through.
InputUnion = str | list[str | TokenId | list[TokenId]]


class MediaObject(msgspec.Struct, forbid_unknown_fields=True):
    """A text or an image as Jina's clients may send it: the image as a URL, a data URI or base64.
    Raises ValueError for one that holds both or none."""

    text: str | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.image is None):
            raise ValueError("Expected an object with `text` or `image`")

    @property
    def source(self) -> str | ImageSource:
        """The text, or the image."""
        return ImageSource(self.image, bare=True) if self.image is not None else self.text or ""


TypedInputs = str | list[str | TokenId | list[TokenId] | TypedInput] | TypedInput
MixedInputs = str | list[str | TokenId | list[TokenId] | MediaObject]

# Clients of Cohere and vLLM send a number, which changes nothing.
AnyPriority = Priority | int

MOST_CONTENT = 2048  # of an input that comes in parts

# Lists that are no inputs, and how many items they may have: more than there are values.
LISTS = ("outputs", "output_dtype", "embedding_type", "encoding_type", "embedding_types", "weights")
MOST_LISTED = 32

PRIORITY = "x-priority"  # the header of clients that cannot change bodies

T = TypeVar("T")

BODY_S = 60.0  # that a client has to send a body
DISCARD_S = 4.0  # without a byte of a refused body; less than a closing server gives requests


@dataclass(frozen=True)
class RequestInputs(RequestSize):
    """The inputs of one request, in order. The bytes of images may still have to be read."""

    items: Sequence[Input | ImageSource]


@dataclass(frozen=True)
class RequestTexts(RequestSize):
    """The texts and pairs of one request, in order."""

    items: list[Text | Pair]


async def read_body_as(kind: type[T]) -> T:
    """The body of the current request as `kind`."""
    data = await read_data()
    with current_meter().time("decode"):
        return await decode_body(data, kind)


async def read_data() -> bytearray:
    """The bytes of a body that the request declares as JSON. Raises UnsupportedMediaType and
    BadJson."""
    mimetype = request.mimetype
    suffixed = mimetype.startswith("application/") and mimetype.endswith("+json")
    if mimetype != JSON and not suffixed:
        raise UnsupportedMediaType
    if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise BadJson(f"`Content-Encoding: {coding}` is not supported; send the body as it is")
    return await read_body()


async def read_body() -> bytearray:
    """The bytes of the body. Raises RequestEntityTooLarge and RequestTimeout."""
    limit = current_service().config.payload_limit
    if (request.content_length or 0) > limit:
        raise RequestEntityTooLarge
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.body:
                if len(body) + len(part) > limit:
                    raise RequestEntityTooLarge
                body += part
    except TimeoutError as error:
        raise RequestTimeout from error
    return body


async def discard_body() -> None:
    """Let a refused client finish sending: if its connection were reset it would not read why."""
    body = cast(BoundedBody, request.body)
    body.discard()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_S):
            await body.end(DISCARD_S)


def decode_body(
    data: bytes | bytearray | msgspec.Raw, kind: type[T], at_once: int = decoding.AT_ONCE
) -> Awaitable[T]:
    """The JSON as `kind`. Raises BadJson, BadField, and BatchTooLarge for too many inputs."""
    return decoding.decode(data, kind, _check_count, at_once)


def _check_count(place: str, count: int) -> None:
    """Raise InvalidInput if a list with at least `count` items is too long."""
    if place.endswith("].content"):
        if count > MOST_CONTENT:
            raise BadField(f"{too_many_parts(count)} - at `$.{place}`", field=place)
    elif place.rsplit(".", 1)[-1] in LISTS:
        check_listed(place, count)
    elif not place.endswith("]"):
        check_batch(count)
    elif count > 2:
        raise BadField(
            f"Expected one text or a pair, got more than two texts - at `$.{place}`", field=place
        )


def read_inputs(
    raw: str | TypedInput | Sequence[str | int | Sequence[int] | MediaObject | TypedInput],
    field: str,
    *,
    are_images: bool = False,
) -> RequestInputs:
    """One text, one sequence of token ids, or a list in which each item is either, or an object
    that holds a text or an image. With `are_images` texts are URLs of images.

    `[1, 2, 3]` is one sequence. `field` is the name the client gave the value.
    """
    if isinstance(raw, str | TypedInput):
        only, characters = _sourced(raw, field, None, are_images)
        return RequestInputs("single", characters, field, [only])
    if not raw or isinstance(raw[0], int):
        ids = _sequence(raw, field)
        return RequestInputs("single", len(ids), field, [Tokens(ids)])
    check_batch(len(raw))
    items: list[Input | ImageSource] = []
    characters = 0
    for i, item in enumerate(raw):
        if isinstance(item, int):
            raise mixed(field, i, "a text or a list of token ids", "int")
        if isinstance(item, str | MediaObject | TypedInput):
            one, count = _sourced(item, field, i, are_images)
        else:
            one, count = _ids(item, field, i), len(item)
        items.append(one)
        characters += count
    return RequestInputs("batch", characters, field, items)


def read_sources(sources: Sequence[str | ImageSource], field: str) -> RequestInputs:
    """Texts and images, of which none may be empty. Raises EmptyInput and BatchTooLarge."""
    if not sources:
        raise EmptyInput(field)
    check_batch(len(sources))
    items: list[Input | ImageSource] = []
    for i, source in enumerate(sources):
        if not (source if isinstance(source, str) else source.text):
            raise EmptyInput(field, i)
        items.append(text_or_image(source))
    characters = sum(len(one) for one in sources if isinstance(one, str))
    return RequestInputs("batch", characters, field, items)


def read_documents(query: str, documents: Sequence[str | ImageSource], field: str) -> RequestInputs:
    """Texts and images to rank; the query counts once for each of them, as in TEI."""
    check_batch(len(documents))
    characters = len(query) * len(documents)
    characters += sum(len(one) for one in documents if isinstance(one, str))
    return RequestInputs("batch", characters, field, list(map(text_or_image, documents)))


def read_texts_and_pairs(
    groups: Sequence[Sequence[str]], field: str, method: Method
) -> RequestTexts:
    """Each group is one text, or a pair of texts of which one may be empty."""
    check_batch(len(groups))
    items: list[Text | Pair] = []
    for i, group in enumerate(groups):
        place = field if method == "single" else f"{field}[{i}]"
        if not any(group):
            raise EmptyInput(field, None if method == "single" else i)
        if len(group) > 2:
            raise BadField(
                f"Expected one text or a pair, got {len(group)} texts - at `$.{place}`", field=place
            )
        items.append(Text(*group) if len(group) == 1 else Pair(*group))
    characters = sum(len(text) for group in groups for text in group)
    return RequestTexts(method, characters, field, items)


def priority_of(asked: AnyPriority | None) -> Priority | None:
    """The priority in the body, else that in the header, else None. Raises InvalidInput."""
    if asked is not None and not isinstance(asked, int):
        return asked
    headers = request.headers.getlist(PRIORITY)
    if not headers:
        return None
    header = ", ".join(headers)  # how HTTP reads a header that is sent twice
    for priority in get_args(Priority):
        if header == priority:
            return priority
    wanted = ", ".join(map(repr, get_args(Priority)))
    raise InvalidInput(
        f"the header `{PRIORITY}` must be one of {wanted}, once. Given: {header!r}", field=PRIORITY
    )


def check_batch(count: int) -> None:
    """Raise BatchTooLarge if `count` inputs are more than one request may have, and RequestTooLarge
    if they could never be admitted."""
    service = current_service()
    limit, max_bytes = service.config.max_client_batch_size, service.models.capacity.max_bytes
    if 0 < limit < count:
        raise BatchTooLarge(
            f"batch size {count} > maximum allowed batch size {limit}; "
            "send smaller batches or raise --max-client-batch-size"
        )
    if count * INPUT_BYTES > max_bytes:
        raise RequestTooLarge(
            f"{count} inputs take over {max_bytes} bytes of memory; "
            "send smaller batches or raise --max-queue-bytes"
        )


def check_listed(place: str, count: int) -> None:
    """Raise BadField if a list that is no input has at least `count` items, and these are too
    many."""
    if count > MOST_LISTED:
        raise BadField(
            f"Expected at most {MOST_LISTED} items, got {count} - at `$.{place}`",
            field=place,
        )


def too_many_parts(count: int) -> str:
    """The message about an input with so many parts."""
    return f"Expected at most {MOST_CONTENT} parts of an input, got {count}"


def _sourced(
    item: str | MediaObject | TypedInput, field: str, index: int | None, are_images: bool
) -> tuple[Text | ImageSource, int]:
    """A text or an image, and the number of characters of the text."""
    source = item if isinstance(item, str) else item.source
    if isinstance(source, str) and are_images:
        source = ImageSource(source)
    text = source if isinstance(source, str) else source.text
    if not text:
        raise EmptyInput(field, index)
    return (Text(text), len(text)) if isinstance(source, str) else (source, 0)


def _ids(ids: Sequence[int], field: str, index: int) -> Tokens:
    if not ids:
        raise EmptyInput(field, index)
    return Tokens(ids)


def _sequence(
    raw: Sequence[str | int | Sequence[int] | MediaObject | TypedInput], field: str
) -> Sequence[int]:
    if isinstance(raw, array):
        return raw
    if not raw:
        raise EmptyInput(field)
    ids = []
    for i, item in enumerate(raw):
        if not isinstance(item, int):
            objects = dict.fromkeys((MediaObject, TypedInput), "object")
            got = {str: "str", **objects}.get(type(item), "array")
            raise mixed(field, i, "a token id, as the items before it", got)
        ids.append(item)
    return ids
