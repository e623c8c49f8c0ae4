"""POST /v1/contextualizedembeddings in the words of Voyage: a vector of each chunk of some
documents, which knows the whole of its document (late chunking). Knows JSON and no tokens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import msgspec
import numpy as np
import orjson
from quart import Blueprint, Response

from jaxembed.data.inputs import ChunkedText, ChunkSize
from jaxembed.errors import EmptyInput, InvalidInput
from jaxembed.preprocessing.late import NO_CHUNKS, join_texts
from jaxembed.preprocessing.prompts import role_of
from jaxembed.runtime.options import Asked, Embeddings, EncodeOptions
from jaxembed.server.http.encoding import json_answer, json_items, json_stream
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import accept, embed_chunks, encode_answer
from jaxembed.server.pipeline.body import (
    AnyPriority,
    check_batch,
    priority_of,
    read_body_as,
)
from jaxembed.server.pipeline.late import WINDOWS, RequestChunks
from jaxembed.server.pipeline.representations import DENSE
from jaxembed.server.pipeline.unsupported import agreed
from jaxembed.server.pipeline.vectors import (
    FormattedRequest,
    asked_dtype,
    purposes_of,
    with_choices,
)
from jaxembed.server.routes.common.usage import Usage, usage_of
from jaxembed.server.routes.openai import vector_encoder
from jaxembed.server.service import current_service

blueprint = Blueprint("contextualized", __name__)

DEFAULT_CHUNK = 512  # tokens, as Voyage's service has it


class ContextualizedRequest(FormattedRequest, kw_only=True):
    """Voyage's fields, and `truncate`, `prompt_name`, `normalize`, `dimensions` and `priority` as
    at /v1/embeddings.

    Each of the `inputs` is a document: the list of its chunks. With `enable_auto_chunking` it is
    one string, alone or in a list, that is divided into chunks of `chunk_size` tokens, of which
    each shares `chunk_overlap` with the one before. With an `input_type` of query it may be one
    string too.
    """

    inputs: list[str | list[str]]
    model: str | None = None
    input_type: str | None = None
    output_dimension: int | None = None
    dimensions: int | None = None
    enable_auto_chunking: bool | None = None
    chunk_size: int | None = None
    chunk_overlap: int | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    priority: AnyPriority | None = None


class ContextualizedEmbedding(msgspec.Struct, omit_defaults=True):
    """The vector of a chunk: a list of numbers, or base64 of their little-endian bytes; and its
    text where the server chose it."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET


class ContextualizedDocument(msgspec.Struct):
    """The chunks of a document, in order."""

    object: Literal["list"]
    data: list[ContextualizedEmbedding]
    index: int


class ContextualizedResponse(msgspec.Struct):
    """The documents, in order."""

    object: Literal["list"]
    data: list[ContextualizedDocument]
    model: str
    usage: Usage


@blueprint.post("/v1/contextualizedembeddings")
async def contextualized_embeddings() -> Response:
    """Answer with a vector of each chunk."""
    with current_meter() as meter:
        body = await read_body_as(ContextualizedRequest)
        await meter.find(body.model, "embed", DENSE)
        texts = _read(body)
        intent = accept(meter, texts, _asked(body))
        answer = await embed_chunks(meter, texts, intent)

        async def encode() -> Response:
            shown = texts.items if body.enable_auto_chunking else None
            response = await _respond(meter, body, answer, shown)
            return with_choices(response, intent)

        return await encode_answer(meter, answer, encode)


def _asked(body: ContextualizedRequest) -> Asked:
    """What a body asks for."""
    options = EncodeOptions(
        prompt_name=body.prompt_name,
        truncate=agreed(body, "truncate", "truncation"),
        dimensions=agreed(body, "dimensions", "output_dimension", unset=(None, 0)),
        normalize=body.normalize is not False,
        priority=priority_of(body.priority),
        bare_ids=current_service().config.accept_bare_token_ids,
    )
    return Asked(
        options,
        purposes_of(body),
        outputs=(),
        dtype=asked_dtype(body),
        dimensions_field="dimensions" if body.dimensions else "output_dimension",
    )


def _read(body: ContextualizedRequest) -> RequestChunks:
    """The documents of a body. Raises InvalidInput for those of another form than the other fields
    say, EmptyInput and BatchTooLarge."""
    if not body.inputs:
        raise EmptyInput("inputs")
    check_batch(sum(1 if isinstance(one, str) else len(one) for one in body.inputs))
    documents = [_chunks(body, index) for index in range(len(body.inputs))]
    is_nested = [isinstance(one, list) for one in body.inputs]
    size = _size(body)
    items = [
        join_texts(chunks) if size is None else ChunkedText(chunks[0], size) for chunks in documents
    ]
    return RequestChunks(
        "batch",
        sum(len(chunk) for chunks in documents for chunk in chunks),
        "inputs",
        items,
        lambda text, chunk: f"inputs[{text}]" + f"[{chunk}]" * is_nested[text],
    )


def _chunks(body: ContextualizedRequest, index: int) -> list[str]:
    """The strings of a document."""
    given, place = body.inputs[index], f"inputs[{index}]"
    is_query = body.input_type is not None and role_of(body.input_type) == "query"
    if isinstance(given, str) and not (body.enable_auto_chunking or is_query):
        raise InvalidInput(
            f"`{place}` must be the list of the chunks of a document: a document is a string only "
            "with `enable_auto_chunking` of true or `input_type` of query",
            field=place,
        )
    chunks = [given] if isinstance(given, str) else given
    if not chunks or chunks == [""]:
        raise EmptyInput("inputs", index)
    if "" in chunks:
        raise EmptyInput(place, chunks.index(""))
    if body.enable_auto_chunking and len(chunks) > 1:
        raise InvalidInput(
            f"`{place}` holds {len(chunks)} chunks; with `enable_auto_chunking` a document is one "
            "string",
            field=place,
        )
    return chunks


def _size(body: ContextualizedRequest) -> ChunkSize | None:
    """The size of the chunks that documents are divided into; None if they come in chunks."""
    if body.enable_auto_chunking:
        size = DEFAULT_CHUNK if body.chunk_size is None else body.chunk_size
        return ChunkSize(size, body.chunk_overlap or 0)
    for field in ("chunk_size", "chunk_overlap"):
        if getattr(body, field):
            raise InvalidInput(f"`{field}` goes with `enable_auto_chunking` of true", field=field)
    return None


async def _respond(
    meter: Meter,
    body: ContextualizedRequest,
    answer: Embeddings,
    texts: list[ChunkedText] | None,
) -> Response:
    """The response in the form of ContextualizedResponse. With `texts` each chunk has its part of
    them."""
    chunked = answer.chunked or NO_CHUNKS
    vector = vector_encoder(body.encoding_format)

    def chunk_of(document: int, chunk: int, first: int) -> dict:
        one = {"object": "embedding", "embedding": vector(answer.dense[first + chunk])}
        if texts is not None:
            start, end = chunked.bounds[first + chunk].tolist()
            one["text"] = texts[document].text[start:end]
        return one | {"index": chunk}

    async def documents() -> AsyncIterator[bytes]:
        ends = np.cumsum(chunked.counts)
        for k, (count, end) in enumerate(zip(chunked.counts.tolist(), ends.tolist(), strict=True)):
            first = end - count

            def items(start: int, stop: int, k: int = k, first: int = first) -> list[dict]:
                return [chunk_of(k, chunk, first) for chunk in range(start, stop)]

            yield b"," * bool(k) + b'{"object":"list","data":['
            async for part in json_items(count, answer.dense.shape[1], items):
                yield part
            yield b'],"index":' + orjson.dumps(k) + b"}"
            await asyncio.sleep(0)

    rest = {"model": meter.served_name, "usage": usage_of(answer)}
    response = await json_stream(
        json_answer({"data": documents()}, rest, first=b'{"object":"list",')
    )
    response.headers.add(WINDOWS, str(int(chunked.windows.sum())))
    return response
