"""Turns vectors into response bodies, a slice at a time. Knows no route and no model.

orjson and base64 hold the GIL, so a thread would not help; instead other tasks of the event loop
run between slices. A large answer is made slice by slice, as fast as its client reads, and is never
in memory as a whole.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

import numpy as np
import orjson
from quart import Response, request

from jaxembed.memory import MIB
from jaxembed.runtime.postprocess import to_bytes

JSON = "application/json"
OCTETS = "application/octet-stream"
SLICE_FLOATS = 32 * 1024  # about 0.7 ms of orjson
MOST_JOINED = MIB  # bytes of an answer that is sent as a whole, with its length
OBJECT_WIDTH = 8  # floats that take as long as an object of two fields


async def json_items(
    count: int, width: int, items: Callable[[int, int], object]
) -> AsyncIterator[bytes]:
    """The inside of a JSON list of `count` items of about `width` floats each, in slices.

    `items(start, stop)` gives some of them, as a list or an array; orjson writes floats in their
    shortest form and NaN as null.
    """
    step = max(1, SLICE_FLOATS // max(1, width))
    for start in range(0, count, step):
        if start:
            await asyncio.sleep(0)
            yield b","
        part = orjson.dumps(
            items(start, min(start + step, count)), option=orjson.OPT_SERIALIZE_NUMPY
        )
        yield part[1:-1]


def object_width(texts: Sequence[str]) -> int:
    """The width of small objects that hold one of `texts` each. Encoding 8 characters takes as long
    as a float, 2.5 ns."""
    return OBJECT_WIDTH + sum(map(len, texts)) // max(1, 8 * len(texts))


async def json_list(items: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """`[<items>]`, in slices."""
    yield b"["
    async for part in items:
        yield part
    yield b"]"


def json_matrix(rows: np.ndarray) -> AsyncIterator[bytes]:
    """`[[...], ...]` of a C-contiguous matrix, in slices."""
    return json_list(json_items(len(rows), rows.shape[1], lambda start, stop: rows[start:stop]))


async def json_matrices(matrices: Iterable[np.ndarray]) -> AsyncIterator[bytes]:
    """`[[[...], ...], ...]`, one matrix per input, in slices."""
    before = b"["
    for rows in matrices:
        yield before
        async for part in json_matrix(rows):
            yield part
        await asyncio.sleep(0)
        before = b","
    yield b"]"


async def json_answer(
    lists: Mapping[str, AsyncIterator[bytes]], rest: dict, *, first: bytes = b"{"
) -> AsyncIterator[bytes]:
    """`{"<name>": [<items>], ...}`, the rest of the fields after the lists, in slices."""
    yield first
    async for part in json_lists(lists):
        yield part
    yield b"," + orjson.dumps(rest)[1:]


async def json_list_response(
    count: int, width: int, items: Callable[[int, int], list], rest: dict
) -> Response:
    """`{"object": "list", "data": [<items>], ...}` with the rest of the fields, as a response; the
    arguments are those of `json_items`."""
    if count * width <= SLICE_FLOATS:
        whole = {"object": "list", "data": items(0, count), **rest}
        body = orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, content_type=JSON)
    data = {"data": json_items(count, width, items)}
    return await json_stream(json_answer(data, rest, first=b'{"object":"list",'))


async def json_lists(lists: Mapping[str, AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    """`"<name>": [<items>], ...`, the inside of a JSON object, in slices."""
    before = b'"'
    for name, items in lists.items():
        yield before + name.encode() + b'":['
        async for part in items:
            yield part
        yield b"]"
        before = b',"'


def wants_octets() -> bool:
    """Whether the client prefers raw bytes to JSON."""
    if OCTETS not in request.headers.get("accept", ""):
        return False  # nearly all requests, which need no parsing
    return request.accept_mimetypes.best_match([JSON, OCTETS]) == OCTETS


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status, content_type=JSON)


async def json_stream(parts: AsyncIterator[bytes]) -> Response:
    """A response of the parts: as one body if they are small, else made as the client reads."""
    first, size = [], 0
    async for part in parts:
        first.append(part)
        size += len(part)
        if size >= MOST_JOINED:
            return Response(_rest(b"".join(first), parts), content_type=JSON)
    return json_response(b"".join(first))


async def _rest(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in parts:
        yield part


async def octet_response(vectors: np.ndarray) -> Response:
    """The little-endian bytes of the vectors, row after row, with the shape in a header."""
    response = Response(to_bytes(vectors), content_type=OCTETS)
    response.headers["x-embedding-shape"] = ",".join(str(size) for size in vectors.shape)
    return response
