"""The routes of hosting platforms, which know no tasks: /, /invocations (SageMaker), /vertex.

A body with a `query` is one for /rerank. Any other is one for /embed or /predict, as the model can
that it names; if it names none, for /embed where an embedding model is served.
"""

import asyncio
from typing import Any

import msgspec
from quart import Blueprint, Response

from jaxembed.server.body import check_batch, decode, decoding_time, read_data, read_json
from jaxembed.server.cohere import DocumentsRequest, answer_jina
from jaxembed.server.encoding import json_response, wants_octets
from jaxembed.server.meter import Meter
from jaxembed.server.models import Models
from jaxembed.server.service import current_service
from jaxembed.server.tei import EmbedRequest, answer_embed
from jaxembed.server.tei_scores import (
    PredictRequest,
    RerankRequest,
    answer_predict,
    answer_rerank,
    decode_rerank,
)

blueprint = Blueprint("hosted", __name__)

AnyRequest = EmbedRequest | RerankRequest | DocumentsRequest | PredictRequest


class Asked(msgspec.Struct):
    """As much of a body as says what it asks for."""

    model: str | None = None
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class VertexRequest(msgspec.Struct):
    """Vertex AI's envelope; each instance is a body as the other routes take it."""

    instances: list[msgspec.Raw]  # decoded one by one, each by itself


class VertexResponse(msgspec.Struct):
    """For each instance the answer to it."""

    predictions: list[Any]


@blueprint.post("/")
@blueprint.post("/invocations")
async def invocations() -> Response:
    """Whatever the body asks for."""
    service = current_service()
    with Meter(service) as meter:
        data = await read_data()
        with decoding_time():
            body = decode_any(data, service.models)
        return await answer_any(meter, body, octets=wants_octets())


@blueprint.post("/vertex")
async def vertex() -> Response:
    """What each instance asks for, all at once; the first failure answers for all."""
    body = await read_json(VertexRequest)
    models = current_service().models
    requests = [decode_any(raw, models) for raw in body.instances]
    check_batch(sum(map(_count, requests)))
    results = await asyncio.gather(*map(_instance, requests), return_exceptions=True)
    parts = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        parts.append(result)
    return json_response(b'{"predictions":[' + b",".join(parts) + b"]}")


def decode_any(data: bytes | msgspec.Raw, models: Models) -> AnyRequest:
    """The body of one of the routes with a task."""
    asked = decode(data, Asked)
    if asked.query is not msgspec.UNSET:
        return decode_rerank(data)
    meant = [models[asked.model]] if asked.model else models
    embeds = any(embedder.spec.task == "embed" for embedder in meant)
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


async def _instance(body: AnyRequest) -> bytes:
    """The answer to one instance of a /vertex request, counted as a request of its own."""
    with Meter(current_service()) as meter:
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
