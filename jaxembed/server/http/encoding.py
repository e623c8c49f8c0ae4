"""Encodes vectors as response bodies, one slice at a time.

orjson and base64 hold the GIL, so a thread would not help. Instead, other tasks of the event loop
run between slices. A large response is encoded while its client reads it, so that it is never in
memory as a whole.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

import numpy as np
import orjson
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from jaxembed.memory import MIB
from jaxembed.runtime.postprocess import to_bytes
from jaxembed.server.http.exchange import Response, current_exchange

JSON = "application/json"
OCTETS = "application/octet-stream"
SLICE_FLOATS = 32 * 1024  # floats of one slice; orjson encodes them in about 0.7 ms
MAX_JOINED = MIB  # a response of so many bytes is streamed, without a Content-Length
OBJECT_WIDTH = 8  # an object of two fields takes as long to encode as so many floats


async def json_items(
    count: int, width: int, items: Callable[[int, int], object]
) -> AsyncIterator[bytes]:
    """Yield the inside of a JSON list of `count` items in slices.

    An item takes as long to encode as `width` floats, which decides the number of items in a slice.
    `items(start, stop)` returns the items of a slice as a list or an array. orjson writes floats in
    their shortest form, and NaN as null.
    """
    step = max(1, SLICE_FLOATS // max(1, width))
    for start in range(0, count, step):
        if start:
            await asyncio.sleep(0)
            yield b","
        part = items(start, min(start + step, count))
        yield orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def object_width(texts: Sequence[str]) -> int:
    """Return the argument `width` of `json_items` for small objects that each hold one of `texts`.
    Encoding 8 characters takes as long as encoding one float, 2.5 ns."""
    return OBJECT_WIDTH + sum(map(len, texts)) // max(1, 8 * len(texts))


async def json_list(items: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield `[<items>]` in slices."""
    yield b"["
    async for part in items:
        yield part
    yield b"]"


def json_matrix(rows: np.ndarray) -> AsyncIterator[bytes]:
    """Return a C-contiguous matrix as JSON, `[[...], ...]`, in slices."""
    return json_list(json_items(len(rows), rows.shape[1], lambda start, stop: rows[start:stop]))


async def json_matrices(matrices: Iterable[np.ndarray]) -> AsyncIterator[bytes]:
    """Yield a list of matrices, one per input, as JSON, `[[[...], ...], ...]`, in slices."""
    separator = b"["
    for rows in matrices:
        yield separator
        async for part in json_matrix(rows):
            yield part
        await asyncio.sleep(0)
        separator = b","
    yield b"]"


async def json_answer(
    lists: Mapping[str, AsyncIterator[bytes]], rest: dict, *, first: bytes = b"{"
) -> AsyncIterator[bytes]:
    """Yield the JSON object `{"<name>": [<items>], ..., <rest>}` in slices. `lists` has by name the
    items of each list in slices, and `rest` at least one further field. `first` begins the object,
    and may contain fields."""
    yield first
    async for part in json_lists(lists):
        yield part
    yield b"," + orjson.dumps(rest)[1:]


async def json_list_response(
    count: int, width: int, items: Callable[[int, int], list], rest: dict
) -> Response:
    """Return the response `{"object": "list", "data": [<items>], <rest>}`. `data` has `count`
    items, each as long to encode as `width` floats; `items(start, stop)` returns some of them.
    `rest` has at least one further field."""
    if count * width <= SLICE_FLOATS:  # small enough to encode at once
        whole = {"object": "list", "data": items(0, count), **rest}
        body = orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, content_type=JSON)
    lists = {"data": json_items(count, width, items)}
    return await json_stream(json_answer(lists, rest, first=b'{"object":"list",'))


async def json_lists(lists: Mapping[str, AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    """Yield `"<name>":[<items>],...`, the inside of a JSON object, in slices."""
    separator = b'"'
    for name, items in lists.items():
        yield separator + name.encode() + b'":['
        async for part in items:
            yield part
        yield b"]"
        separator = b',"'


def wants_octets() -> bool:
    """Return whether the client's `Accept` header prefers raw bytes to JSON."""
    accepted = current_exchange().headers.get("accept", "")
    if OCTETS not in accepted:
        return False  # nearly all requests: the header needs no parsing
    return parse_accept_header(accepted, MIMEAccept).best_match([JSON, OCTETS]) == OCTETS


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status, content_type=JSON)


async def json_stream(parts: AsyncIterator[bytes]) -> Response:
    """Return a JSON response whose body consists of the parts. A body of less than MAX_JOINED bytes
    is joined. A longer body is streamed: after MAX_JOINED bytes, each part is made when the client
    reads it."""
    joined, size = [], 0
    async for part in parts:
        joined.append(part)
        size += len(part)
        if size >= MAX_JOINED:
            return Response(_rest(b"".join(joined), parts), content_type=JSON)
    return json_response(b"".join(joined))


async def _rest(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in parts:
        yield part


async def octet_response(vectors: np.ndarray, shape: str | None = None) -> Response:
    """Return a response with the little-endian bytes of the vectors, row by row. A header has the
    shape of the array, or the text `shape` if it is given."""
    response = Response(to_bytes(vectors), content_type=OCTETS)
    response.headers["x-embedding-shape"] = shape or ",".join(map(str, vectors.shape))
    return response
