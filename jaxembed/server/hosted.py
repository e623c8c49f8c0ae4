"""The routes whose body says what it asks for: /rerank, which TEI and Jina both have, and those of
hosting platforms, which know no tasks: /, /invocations (SageMaker), /vertex.

A body with a `query` is one for /rerank. Any other is one for /embed or /predict, as the model can
that it names; if it names none, for /embed where an embedding model is served.
"""

import asyncio
from typing import Any

import msgspec
from quart import Blueprint, Response

from jaxembed.server.body import check_batch, decode, read_body_as, read_data
from jaxembed.server.encoding import json_response, wants_octets
from jaxembed.server.errors import BadField
from jaxembed.server.jina import answer_jina
from jaxembed.server.meter import Meter, blame, current_meter
from jaxembed.server.models import Models
from jaxembed.server.rerank import DocumentsRequest
from jaxembed.server.service import current_service
from jaxembed.server.tei import EmbedRequest, answer_embed
from jaxembed.server.tei_scores import PredictRequest, RerankRequest, answer_predict, answer_rerank

blueprint = Blueprint("hosted", __name__)

AnyRequest = EmbedRequest | RerankRequest | DocumentsRequest | PredictRequest


class Asked(msgspec.Struct):
    """As much of a body as says what it asks for."""

    model: str | None = None
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Keys(msgspec.Struct):
    """As much of a body for /rerank as tells TEI's from Jina's."""

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
        data = await read_data()
        with meter.time("decode"):
            body = decode_rerank(data)
        return await answer_any(meter, body, octets=False)


@blueprint.post("/")
@blueprint.post("/invocations")
async def invocations() -> Response:
    """Whatever the body asks for."""
    with current_meter() as meter:
        data = await read_data()
        with meter.time("decode"):
            body = decode_any(data, meter.service.models)
        return await answer_any(meter, body, octets=wants_octets())


@blueprint.post("/vertex")
async def vertex() -> Response:
    """What each instance asks for, all at once; the first failure answers for all."""
    service = current_service()
    with current_meter():
        body = await read_body_as(VertexRequest)
    check_batch(len(body.instances))  # decoding holds the event loop
    requests = [decode_any(raw, service.models) for raw in body.instances]
    check_batch(sum(map(_count, requests)))
    meters = [Meter(service) for _ in requests]
    results = await asyncio.gather(*map(_instance, meters, requests), return_exceptions=True)
    parts = []
    for meter, result in zip(meters, results, strict=True):
        if isinstance(result, BaseException):
            blame(meter)
            raise result
        parts.append(result)
    return json_response(b'{"predictions":[' + b",".join(parts) + b"]}")


def decode_rerank(data: bytes | bytearray | msgspec.Raw) -> RerankRequest | DocumentsRequest:
    """TEI's body, or Jina's: clients send both to /rerank."""
    keys = decode(data, Keys)
    if keys.texts is not msgspec.UNSET:
        return decode(data, RerankRequest)
    if keys.documents is not msgspec.UNSET:
        return decode(data, DocumentsRequest)
    raise BadField(
        "Object missing required field `texts` (or `documents`, in Jina's form)", field="texts"
    )


def decode_any(data: bytes | bytearray | msgspec.Raw, models: Models) -> AnyRequest:
    """The body of one of the routes with a task."""
    asked = decode(data, Asked)
    if asked.query is not msgspec.UNSET:
        return decode_rerank(data)
    embeds = any(embedder.spec.task == "embed" for embedder in models.meant(asked.model))
    return decode(data, EmbedRequest) if embeds else decode(data, PredictRequest)


async def answer_any(meter: Meter, body: AnyRequest, *, octets: bool) -> Response:
    """As the route that the body is for; `octets` is for vectors only."""
    match body:
        case EmbedRequest():
            return await answer_embed(meter, body, octets=octets)
        case RerankRequest():
            return await answer_rerank(meter, body)
        case DocumentsRequest():
            return await answer_jina(meter, body)
        case PredictRequest():
            return await answer_predict(meter, body)


async def _instance(meter: Meter, body: AnyRequest) -> bytes:
    """The answer to one instance of a /vertex request, counted as a request of its own."""
    with meter:
        response = await answer_any(meter, body, octets=False)
        return await response.get_data(as_text=False)


def _count(body: AnyRequest) -> int:
    """How many inputs a body has; a text, a pair or a list of token ids is one."""
    match body:
        case RerankRequest(texts=texts):
            return len(texts)
        case DocumentsRequest(documents=documents):
            return len(documents)
        case EmbedRequest(inputs=[[*_] | str(), *_] as inputs):
            return len(inputs)
        case PredictRequest(inputs=[[*_], *_] as inputs):
            return len(inputs)
    return 1
