"""Turns vectors into response bodies, a slice at a time. Knows no route and no model.

orjson and base64 hold the GIL, so a thread would not help: the event loop is given a turn between
slices instead.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import orjson
from quart import Response, request

from jaxembed.postprocess import to_bytes

OCTETS = "application/octet-stream"
SLICE_FLOATS = 32 * 1024  # about 0.7 ms of orjson
OBJECT_WIDTH = 8  # floats that take as long as an object of two fields


async def json_items(count: int, width: int, items: Callable[[int, int], object]) -> bytes:
    """The inside of a JSON list of `count` items of about `width` floats each.

    `items(start, stop)` gives some of them, as a list or an array; orjson writes float32 in its
    shortest form and NaN as null.
    """
    step = max(1, SLICE_FLOATS // max(1, width))
    parts = []
    for start in range(0, count, step):
        if start:
            await asyncio.sleep(0)
        part = orjson.dumps(
            items(start, min(start + step, count)), option=orjson.OPT_SERIALIZE_NUMPY
        )
        parts.append(part[1:-1])
    return b",".join(parts)


def object_width(texts: Sequence[str]) -> int:
    """The width of small objects that hold one of `texts` each: 8 characters take as long as a
    float, 2.5 ns."""
    return OBJECT_WIDTH + sum(map(len, texts)) // max(1, 8 * len(texts))


async def json_matrix(rows: np.ndarray) -> bytes:
    """`[[...], ...]` of a C-contiguous float32 matrix."""
    inside = await json_items(len(rows), rows.shape[1], lambda start, stop: rows[start:stop])
    return b"[" + inside + b"]"


async def json_matrices(matrices: Sequence[np.ndarray]) -> bytes:
    """`[[[...], ...], ...]`, one matrix per input."""
    parts = []
    for rows in matrices:
        parts.append(await json_matrix(np.ascontiguousarray(rows, dtype=np.float32)))
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def json_answer(name: str, items: bytes, rest: dict) -> bytes:
    """`{"<name>": [<items>], ...}`, the rest of the fields after the items."""
    return b'{"' + name.encode() + b'":[' + items + b"]," + orjson.dumps(rest)[1:]


def wants_octets() -> bool:
    """Whether the client would rather have raw float32 than JSON."""
    if OCTETS not in request.headers.get("accept", ""):
        return False  # nearly all requests: spares them the parsing
    return request.accept_mimetypes.best_match(["application/json", OCTETS]) == OCTETS


def json_response(body: bytes) -> Response:
    return Response(body, content_type="application/json")


def octet_response(vectors: np.ndarray) -> Response:
    """Raw little-endian float32, row after row, with the shape in a header."""
    response = Response(to_bytes(vectors), content_type=OCTETS)
    response.headers["x-embedding-shape"] = ",".join(str(size) for size in vectors.shape)
    return response
