"""Reads a JSON body into a Struct, and its inputs into `Input`s. Knows no route and no dialect."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast, get_args, get_type_hints

import msgspec
from quart import request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout, UnsupportedMediaType

from jaxembed.errors import BatchTooLarge, EmptyInput, InvalidInput
from jaxembed.inputs import Input, Pair, Priority, Text, Tokens
from jaxembed.server.connection import BoundedBody
from jaxembed.server.errors import BadField, BadJson
from jaxembed.server.meter import Method, RequestSize, current_meter
from jaxembed.server.service import current_service

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

# msgspec refuses list[str] | list[int] in one union: `read_inputs` checks what this lets through.
InputUnion = str | list[str | TokenId | list[TokenId]]

# Clients of Cohere and vLLM send a number, which changes nothing.
AnyPriority = Priority | int

PRIORITY = "x-priority"  # the header of clients that cannot change bodies

T = TypeVar("T")

BODY_S = 60.0  # to send a body in
DISCARD_S = 10.0


@dataclass(frozen=True)
class RequestInputs(RequestSize):
    """The inputs of one request, in order."""

    items: list[Input]


@dataclass(frozen=True)
class RequestTexts(RequestSize):
    """The texts and pairs of one request, in order."""

    items: list[Text | Pair]


async def read_body_as(kind: type[T]) -> T:
    """The body of the current request as `kind`."""
    data = await read_data()
    with current_meter().time("decode"):
        return decode(data, kind)


async def read_data() -> bytearray:
    """The body of the current request, which says that it is JSON."""
    mimetype = request.mimetype
    suffixed = mimetype.startswith("application/") and mimetype.endswith("+json")
    if mimetype != "application/json" and not suffixed:
        raise UnsupportedMediaType
    if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise BadJson(f"`Content-Encoding: {coding}` is not supported; send the body as it is")
    return await read_body()


async def read_body() -> bytearray:
    """The bytes of the body, if they are no more than the limit and arrive in time."""
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
    """Let a refused client finish sending: one whose connection is reset never reads why."""
    body = cast(BoundedBody, request.body)
    body.discard()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            await body.end()


def decode(data: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """JSON as `kind`; a bad field answers with its path, such as `$.dimensions`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        path = re.search(r"at `\$\.?([^`]*)`$", str(error))
        field = path.group(1) if path else None
        raise BadField(f"{error}{_allowed(kind, field, str(error))}", field=field) from error
    except UnicodeDecodeError as error:
        raise BadJson("the body is not valid UTF-8") from error
    except RecursionError as error:
        raise BadJson("the body nests too deeply") from error
    except msgspec.DecodeError as error:
        # msgspec says so of half a surrogate pair, too
        cut = "truncated" in str(error)
        raise BadJson(
            "it ends too early, or holds a lone surrogate" if cut else str(error)
        ) from error


def _allowed(kind: type, field: str | None, message: str) -> str:
    """The names a field takes, where it takes only some: msgspec says that this one is not among
    them, or that it is no text."""
    if field is None or not message.startswith(("Invalid enum value", "Expected")):
        return ""
    hints = get_args(get_type_hints(kind).get(field))
    values = [value for hint in hints for value in (get_args(hint) or [hint])]
    names = ", ".join(repr(value) for value in values if isinstance(value, str))
    return f"; wanted one of {names}" if names else ""


def read_inputs(raw: str | Sequence[str | int | list[int]], field: str) -> RequestInputs:
    """One text, one sequence of token ids, or a list in which each item is either.

    `[1, 2, 3]` is one sequence. `field` is the name the client gave the value.
    """
    if isinstance(raw, str):
        return RequestInputs("single", len(raw), field, [_text(raw, field)])
    if not raw or isinstance(raw[0], int):
        ids = _sequence(raw, field)
        return RequestInputs("single", len(ids), field, [Tokens(ids)])
    check_batch(len(raw))
    items: list[Input] = []
    characters = 0
    for i, item in enumerate(raw):
        if isinstance(item, int):
            raise mixed(field, i, "a text or a list of token ids", item)
        one = _text(item, field, i) if isinstance(item, str) else _ids(item, field, i)
        items.append(one)
        characters += len(item)
    return RequestInputs("batch", characters, field, items)


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
    """What the body asks for or, where it does not, the header. Raises InvalidInput."""
    if asked is not None and not isinstance(asked, int):
        return asked
    headers = request.headers.getlist(PRIORITY)
    if not headers:
        return None
    header = ", ".join(headers)  # what one that is sent twice means in HTTP
    for priority in get_args(Priority):
        if header == priority:
            return priority
    wanted = ", ".join(map(repr, get_args(Priority)))
    raise InvalidInput(
        f"the header `{PRIORITY}` must be one of {wanted}, once. Given: {header!r}", field=PRIORITY
    )


def check_batch(count: int) -> None:
    """Raises BatchTooLarge when a request carries more inputs than one request may."""
    limit = current_service().config.max_client_batch_size
    if 0 < limit < count:
        raise BatchTooLarge(
            f"batch size {count} > maximum allowed batch size {limit}; "
            "send smaller batches or raise --max-client-batch-size"
        )


def _text(text: str, field: str, index: int | None = None) -> Text:
    if not text:
        raise EmptyInput(field, index)
    return Text(text)


def _ids(ids: list[int], field: str, index: int) -> Tokens:
    if not ids:
        raise EmptyInput(field, index)
    return Tokens(ids)


def _sequence(raw: Sequence[str | int | list[int]], field: str) -> list[int]:
    if not raw:
        raise EmptyInput(field)
    ids = []
    for i, item in enumerate(raw):
        if not isinstance(item, int):
            raise mixed(field, i, "a token id, as the items before it", item)
        ids.append(item)
    return ids


def mixed(field: str, i: int, wanted: str, item: str | int | list) -> BadField:
    """An item of another kind than those before it."""
    kind = {str: "str", int: "int"}.get(type(item), "array")
    return BadField(f"Expected {wanted}, got `{kind}` - at `$.{field}[{i}]`", field=f"{field}[{i}]")
