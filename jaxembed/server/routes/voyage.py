"""POST /v1/contextualizedembeddings and POST /v1/multimodalembeddings, as Voyage's API defines
them.

The first route answers with a vector for each chunk of each document, computed in the context of
the whole document (late chunking). An input of the second route has parts, each a text or an image.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import numpy as np
import orjson
from quart import Blueprint

from jaxembed.data.inputs import ChunkedText, ChunkSize
from jaxembed.data.spec import IMAGE_ROUTE
from jaxembed.errors import EmptyInput, InvalidInput, counted
from jaxembed.preprocessing.prompts import role_of
from jaxembed.preprocessing.windows import NO_CHUNKS, join_texts
from jaxembed.runtime.options import Embeddings, EncodeOptions, RequestedOptions
from jaxembed.runtime.tasks import Intent
from jaxembed.server.http.encoding import (
    json_answer,
    json_items,
    json_list_response,
    json_stream,
)
from jaxembed.server.http.exchange import Response
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import Usage, accept, embed_inputs, usage_of
from jaxembed.server.pipeline.body import (
    AnyPriority,
    PartsInput,
    RequestChunks,
    check_batch,
    facts_of_images,
    priority_of,
    read_body_as,
    read_inputs,
)
from jaxembed.server.pipeline.fields import (
    DENSE,
    DIMENSIONS,
    ENCODERS,
    TRUNCATE,
    WINDOWS,
    Format,
    FormattedRequest,
    VectorsRequest,
    merged_values,
    prompt_options,
    purposes_of,
    requested_dtype,
    with_choices,
)

blueprint: Any = Blueprint("voyage", __name__)

DEFAULT_CHUNK = 512  # tokens, the default of Voyage's service


class ContextualizedRequest(FormattedRequest, kw_only=True):
    """A request for the vectors of the chunks of documents. It has Voyage's fields, and `truncate`,
    `prompt_name`, `normalize`, `dimensions` and `priority` as at /v1/embeddings.

    An item of `inputs` is a document, given as the list of its chunks. With `enable_auto_chunking`
    a document is one string, alone or in a list, and is divided into chunks of `chunk_size` tokens;
    neighbouring chunks share `chunk_overlap` tokens. With an `input_type` of query, a document may
    be one string, which is one chunk.
    """

    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    inputs: list[str | list[str]]
    input_type: str | None = None
    output_dimension: int | None = None
    dimensions: int | None = None
    enable_auto_chunking: bool | None = None
    chunk_size: int | None = None
    chunk_overlap: int | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    normalize: bool | None = None
    priority: AnyPriority | None = None


class MultimodalObject(msgspec.Struct):
    """The vector of an input: a list of numbers, or base64 of their little-endian bytes."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class ContextualizedEmbedding(MultimodalObject, omit_defaults=True):
    """The vector of a chunk: a list of numbers, or base64 of their little-endian bytes. `text` is
    the text of the chunk, if the server divided the document."""

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


class MultimodalRequest(VectorsRequest, kw_only=True):
    """A request for the vectors of texts and images. It has Voyage's fields, and `prompt_name`,
    `normalize` and `priority` as at /v1/embeddings. An input consists of texts and images in order;
    neighbouring texts are joined by line breaks."""

    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    inputs: list[PartsInput]
    input_type: str | None = None
    truncation: bool | None = None
    output_dimension: int | None = None
    output_encoding: Literal["base64"] | None = None
    encoding_format: Format | None = None  # what Voyage's own clients send
    normalize: bool | None = None
    priority: AnyPriority | None = None


class MultimodalUsage(msgspec.Struct):
    """The number of text tokens that the model ran, and the number of pixels of the images before
    resizing."""

    text_tokens: int
    image_pixels: int
    video_pixels: int
    total_tokens: int


class MultimodalResponse(msgspec.Struct):
    """The embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[MultimodalObject]
    model: str
    usage: MultimodalUsage


@blueprint.post("/v1/contextualizedembeddings")
async def contextualized_embeddings() -> Response:
    """Answer with a vector for each chunk."""
    with current_meter() as meter:
        body = await read_body_as(meter, ContextualizedRequest)
        await meter.find(body.model, "embed", DENSE)
        documents = _read_documents(body)
        truncate, dimensions = merged_values(body, TRUNCATE, DIMENSIONS)
        options = EncodeOptions(
            **prompt_options(body),
            truncate=truncate,
            dimensions=dimensions,
            normalize=body.normalize is not False,
            priority=priority_of(body.priority),
            bare_ids=meter.service.config.accept_bare_token_ids,
        )
        requested = RequestedOptions(
            options,
            purposes_of(body),
            outputs=(),
            dtype=requested_dtype(body),
            dimensions_field="dimensions" if body.dimensions else "output_dimension",
        )
        intent = accept(meter, documents, requested)
        answer = await embed_inputs(meter, documents, intent)
        return await meter.answer(
            answer, _respond_with_chunks(meter, body, documents.items, intent, answer)
        )


@blueprint.post("/v1/multimodalembeddings")
async def embed_multimodal() -> Response:
    """Answer with one vector per input."""
    with current_meter() as meter:
        body = await read_body_as(meter, MultimodalRequest)
        dtype = requested_dtype(body)
        await meter.find(body.model, "embed", DENSE)
        inputs = read_inputs([item.source for item in body.inputs], "inputs")
        options = EncodeOptions(  # dense is the only output
            **prompt_options(body),
            truncate=body.truncation,
            dimensions=body.output_dimension or None,
            normalize=body.normalize is not False,
            priority=priority_of(body.priority),
            bare_ids=meter.service.config.accept_bare_token_ids,
        )
        requested = RequestedOptions(
            options, purposes_of(body), dtype=dtype, dimensions_field="output_dimension"
        )
        intent = accept(meter, inputs, requested)
        answer = await embed_inputs(meter, inputs, intent)
        return await meter.answer(answer, _respond_by_input(meter, body, intent, answer))


def _read_documents(body: ContextualizedRequest) -> RequestChunks:
    """Read the documents of a body. Raises EmptyInput, BatchTooLarge, RequestTooLarge, and
    InvalidInput if a document does not have the form that `enable_auto_chunking` or `input_type`
    requires."""
    if not body.inputs:
        raise EmptyInput("inputs")
    check_batch(sum(1 if isinstance(document, str) else len(document) for document in body.inputs))
    documents = [_chunks(body, index) for index in range(len(body.inputs))]
    is_nested = [isinstance(document, list) for document in body.inputs]
    if body.enable_auto_chunking:
        tokens = DEFAULT_CHUNK if body.chunk_size is None else body.chunk_size
        size = ChunkSize(tokens, body.chunk_overlap or 0)
        items = [ChunkedText(chunks[0], size) for chunks in documents]
    else:
        for field in ("chunk_size", "chunk_overlap"):
            if getattr(body, field):
                raise InvalidInput(
                    f"`{field}` requires `enable_auto_chunking` of true", field=field
                )
        items = [join_texts(chunks) for chunks in documents]
    return RequestChunks(
        method="batch",
        characters=sum(len(chunk) for chunks in documents for chunk in chunks),
        field="inputs",
        items=items,
        chunk_place=lambda text, chunk: f"inputs[{text}]" + f"[{chunk}]" * is_nested[text],
    )


def _chunks(body: ContextualizedRequest, index: int) -> list[str]:
    """Return the chunks of the document number `index` of the body; a document that is a string is
    one chunk. Raises InvalidInput and EmptyInput."""
    document, place = body.inputs[index], f"inputs[{index}]"
    is_query = body.input_type is not None and role_of(body.input_type) == "query"
    if isinstance(document, str) and not (body.enable_auto_chunking or is_query):
        raise InvalidInput(
            f"`{place}` must be a list of the chunks of a document; a document can be a string "
            "only with `enable_auto_chunking` of true or `input_type` of query",
            field=place,
        )
    chunks = [document] if isinstance(document, str) else document
    if not chunks or chunks == [""]:
        raise EmptyInput("inputs", index)
    if "" in chunks:
        raise EmptyInput(place, chunks.index(""))
    if body.enable_auto_chunking and len(chunks) > 1:
        raise InvalidInput(
            f"`{place}` has {counted(len(chunks), 'chunk')}; with `enable_auto_chunking` a "
            "document must be one string",
            field=place,
        )
    return chunks


async def _respond_with_chunks(
    meter: Meter,
    body: ContextualizedRequest,
    texts: list[ChunkedText],
    intent: Intent,
    answer: Embeddings,
) -> Response:
    """Encode the answer as ContextualizedResponse. `texts` are the documents. If the request has
    `enable_auto_chunking`, the response has the text of each chunk."""
    chunked = answer.chunked or NO_CHUNKS
    encoder, has_texts = ENCODERS[body.encoding_format], bool(body.enable_auto_chunking)

    async def documents() -> AsyncIterator[bytes]:
        counts = chunked.counts
        firsts = np.cumsum(counts) - counts  # index of the first chunk of each document
        for k, (count, first) in enumerate(zip(counts.tolist(), firsts.tolist(), strict=True)):

            def items(
                start: int, stop: int, text: str = texts[k].text, first: int = first
            ) -> list[dict]:
                objects = []
                for i in range(start, stop):
                    item = {"object": "embedding", "embedding": encoder(answer.dense[first + i])}
                    if has_texts:
                        item["text"] = text[slice(*chunked.bounds[first + i])]
                    objects.append(item | {"index": i})
                return objects

            yield b"," * bool(k) + b'{"object":"list","data":['
            async for part in json_items(count, answer.dense.shape[1], items):
                yield part
            yield b'],"index":' + orjson.dumps(k) + b"}"
            await asyncio.sleep(0)

    rest = {"model": meter.served_name, "usage": usage_of(answer)}
    response = await json_stream(
        json_answer({"data": documents()}, rest, first=b'{"object":"list",')
    )
    response.headers[WINDOWS] = str(int(chunked.windows.sum()))
    return with_choices(response, intent)


async def _respond_by_input(
    meter: Meter, body: MultimodalRequest, intent: Intent, answer: Embeddings
) -> Response:
    """Encode the answer as MultimodalResponse."""
    encoder, dense = ENCODERS[body.output_encoding or body.encoding_format], answer.dense

    def items(start: int, stop: int) -> list[dict]:
        return [
            {"object": "embedding", "embedding": encoder(dense[i]), "index": i}
            for i in range(start, stop)
        ]

    total, headers = answer.total_tokens, await facts_of_images(meter.images)
    route = meter.loaded.routes.get(IMAGE_ROUTE)
    # with an encoder of its own, an image counts as the maximum number of tokens of its route
    has_encoder = route is not None and not route.spec.takes_texts
    image_tokens = len(headers) * route.spec.max_input_tokens if route and has_encoder else 0
    usage = {
        "text_tokens": total - image_tokens,
        "image_pixels": sum(header.width * header.height for header in headers),
        "video_pixels": 0,
        "total_tokens": total,
    }
    rest = {"model": meter.served_name, "usage": usage}
    response = await json_list_response(len(dense), dense.shape[1], items, rest)
    return with_choices(response, intent)
