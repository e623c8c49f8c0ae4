"""The routes whose body decides what is done: /rerank, which TEI and Jina both have, and those of
hosting platforms, which know no tasks: /, /invocations (SageMaker), /vertex.

A body with a `query` is handled as by /rerank. Any other is handled as by /embed or /predict,
whichever the model that it names can do; without a name by /embed if an embedding model is served.
If no model gives a dense output, /embed_sparse or /embed_multi stands in for /embed.
"""

import asyncio
from typing import Any

import msgspec
from quart import Blueprint, Response, g

from jaxembed.data.outputs import OutputName
from jaxembed.server.auth.permissions import check_name
from jaxembed.server.errors import BadField
from jaxembed.server.http.encoding import json_response, wants_octets
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.body import (
    TypedInput,
    check_batch,
    check_count,
    read_body,
    read_body_as,
)
from jaxembed.server.pipeline.decoding import AT_ONCE, decode
from jaxembed.server.registry.pool import ModelPool
from jaxembed.server.routes.rerank import DocumentsRequest, answer_jina
from jaxembed.server.routes.tei import (
    EmbedMultiRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    RerankRequest,
    answer_embed,
    answer_multi,
    answer_predict,
    answer_rerank,
    answer_sparse,
)

blueprint = Blueprint("hosted", __name__)

INSTANCES_AT_ONCE = 64  # of a /vertex request: starting one takes the event loop 0.3 ms

AnyEmbedRequest = EmbedRequest | EmbedSparseRequest | EmbedMultiRequest
AnyRequest = AnyEmbedRequest | RerankRequest | DocumentsRequest | PredictRequest

EMBEDS: dict[OutputName, type[AnyEmbedRequest]] = {  # the body for a model of each primary output
    "dense": EmbedRequest,
    "sparse": EmbedSparseRequest,
    "multi_vector": EmbedMultiRequest,
}


class Asked(msgspec.Struct):
    """The fields of a body that tell for which route it is; `texts` are TEI's, `documents`
    Jina's."""

    model: str | None = None
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class VertexRequest(msgspec.Struct):
    """Vertex AI's envelope; each instance is a body as the other routes take it."""

    instances: list[msgspec.Raw]  # decoded one by one, each by itself


class VertexResponse(msgspec.Struct):
    """For each instance the answer to it."""

    predictions: list[Any]


@blueprint.post("/rerank")
async def rerank_texts() -> Response:
    """The texts in order of their scores; a body with `documents` is answered as /v1/rerank."""
    with current_meter() as meter:
        data = await read_body(meter.service.config.payload_limit)
        with meter.time("decode"):
            body = await _decode_rerank(data, await decode(data, Asked, check_count))
        return await answer_any(meter, body, octets=False)


@blueprint.post("/")
async def root() -> Response:
    """The answer of the route that the body is for."""
    with current_meter() as meter:
        data = await read_body(meter.service.config.payload_limit)
        with meter.time("decode"):
            body = await decode_any(data, meter.service.pool)
        return await answer_any(meter, body, octets=wants_octets())


@blueprint.post("/invocations")
async def invocations() -> Response:
    """The answer of the route that the body is for, to SageMaker."""
    return await root()


@blueprint.post("/vertex")
async def vertex() -> Response:
    """The answers to all instances, which run at the same time; or the first one's failure. Raises
    BatchTooLarge if they are, or have, more than one request may have inputs."""
    with current_meter() as whole:
        instances = (await read_body_as(whole, VertexRequest)).instances
    check_batch(len(instances))
    requests: list[AnyRequest] = []
    count = 0
    for instance in instances:
        # all instances together decode as much at once as one body
        requests.append(await decode_any(instance, whole.service.pool, AT_ONCE // len(instances)))
        count += _count(requests[-1])
        check_batch(count)
    meters = [Meter(whole.service, whole.held) for _ in requests]
    gate = asyncio.Semaphore(INSTANCES_AT_ONCE)

    async def answer(meter: Meter, body: AnyRequest) -> bytes:
        """The answer to one instance, counted as a request of its own."""
        async with gate:
            await asyncio.sleep(0)  # let other requests run
            with meter:
                response = await answer_any(meter, body, octets=False)
                return await response.get_data(as_text=False)

    results = await asyncio.gather(*map(answer, meters, requests), return_exceptions=True)
    parts = []
    for meter, result in zip(meters, results, strict=True):
        if isinstance(result, BaseException):
            g.meter = meter  # the failure is counted for the model of the part that failed
            raise result
        parts.append(result)
    return json_response(b'{"predictions":[' + b",".join(parts) + b"]}")


async def decode_any(
    data: bytes | bytearray | msgspec.Raw, pool: ModelPool, at_once: int = AT_ONCE
) -> AnyRequest:
    """The body, as a request of the route that it is for. Raises BadField, BadJson and Forbidden,
    and what `ModelPool.specs_of` does."""
    asked = await decode(data, Asked, check_count, at_once)
    if asked.query is not msgspec.UNSET:
        return await _decode_rerank(data, asked, at_once)
    specs = await pool.specs_of(asked.model, check_name(asked.model))
    primaries: set[OutputName] = {spec.primary for spec in specs if spec.task == "embed"}
    if not primaries:
        return await decode(data, PredictRequest, check_count, at_once)
    kind = EmbedRequest if len(primaries) > 1 else EMBEDS[primaries.pop()]
    return await decode(data, kind, check_count, at_once)


async def _decode_rerank(
    data: bytes | bytearray | msgspec.Raw, asked: Asked, at_once: int = AT_ONCE
) -> RerankRequest | DocumentsRequest:
    """A body for /rerank in TEI's form or in Jina's. Raises BadField for neither."""
    if asked.texts is not msgspec.UNSET:
        return await decode(data, RerankRequest, check_count, at_once)
    if asked.documents is not msgspec.UNSET:
        return await decode(data, DocumentsRequest, check_count, at_once)
    raise BadField(
        "Object missing required field `texts` (or `documents`, in Jina's form)", field="texts"
    )


async def answer_any(meter: Meter, body: AnyRequest, *, octets: bool) -> Response:
    """The answer of the route that the body is for; `octets` gives vectors as raw bytes."""
    match body:
        case EmbedRequest():
            return await answer_embed(meter, body, octets=octets)
        case EmbedSparseRequest():
            return await answer_sparse(meter, body)
        case EmbedMultiRequest():
            return await answer_multi(meter, body, octets=octets)
        case RerankRequest():
            return await answer_rerank(meter, body)
        case DocumentsRequest():
            return await answer_jina(meter, body)
        case PredictRequest():
            return await answer_predict(meter, body)


def _count(body: AnyRequest) -> int:
    """The number of inputs of a body; a text, a pair or a list of token ids is one."""
    match body:
        case (
            RerankRequest(texts=inputs)
            | DocumentsRequest(documents=inputs)
            | PredictRequest(inputs=[[*_], *_] as inputs)
            | EmbedRequest(inputs=[[*_] | str() | TypedInput(), *_] as inputs)
            | EmbedSparseRequest(inputs=[[*_] | str(), *_] as inputs)
            | EmbedMultiRequest(inputs=[[*_] | str() | TypedInput(), *_] as inputs)
        ):
            return len(inputs)
    return 1
