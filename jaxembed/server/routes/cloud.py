"""The routes that choose how to handle a body: /rerank, and the routes of hosting platforms, which
are /, /invocations (SageMaker) and /vertex (Vertex AI).

/rerank takes bodies in TEI's form and in Jina's. The other routes handle a body with a `query` as
/rerank does. Any other body is handled as /embed does if the model that it names is an embedding
model, or if it names none and an embedding model is served; if not, as /predict does.
/embed_sparse or /embed_multi takes the place of /embed if its output is the primary output of that
model, or of all served embedding models, and /token_classify that of /predict if the model, or
every served model, is a token classifier.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from quart import Blueprint

from jaxembed.data.outputs import OutputName
from jaxembed.server.auth.permissions import check_name
from jaxembed.server.errors import BadField
from jaxembed.server.http.encoding import json_response, wants_octets
from jaxembed.server.http.exchange import Response, current_exchange
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.body import (
    TypedInput,
    check_batch,
    check_count,
    read_body,
    read_body_as,
)
from jaxembed.server.pipeline.decoding import AT_ONCE, decode
from jaxembed.server.routes.rerank import DocumentsRequest, answer_jina
from jaxembed.server.routes.tei import (
    EmbedMultiRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    RerankRequest,
    TokenClassifyRequest,
    answer_embed,
    answer_multi,
    answer_predict,
    answer_rerank,
    answer_sparse,
    answer_token_classify,
)

if TYPE_CHECKING:
    from jaxembed.server.registry.pool import ModelPool

blueprint: Any = Blueprint("hosted", __name__)

INSTANCES_AT_ONCE = 64  # instances of a /vertex request that run at once; starting one takes 0.3 ms

AnyEmbedRequest = EmbedRequest | EmbedSparseRequest | EmbedMultiRequest
AnyRequest = (
    AnyEmbedRequest | RerankRequest | DocumentsRequest | PredictRequest | TokenClassifyRequest
)

EMBED_REQUESTS: dict[
    OutputName, type[AnyEmbedRequest]
] = {  # the type of the body for each primary output of a model
    "dense": EmbedRequest,
    "sparse": EmbedSparseRequest,
    "multi_vector": EmbedMultiRequest,
}


class RouteFields(msgspec.Struct):
    """The fields that decide which route handles a body. To rerank, TEI's clients send `texts`, and
    Jina's clients send `documents`."""

    model: str | None = None
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class VertexRequest(msgspec.Struct):
    """A request of Vertex AI. Each instance is a body that another route could take."""

    instances: list[msgspec.Raw]  # JSON, so that each instance is decoded separately


class VertexResponse(msgspec.Struct):
    """The answers to the instances, in their order."""

    predictions: list[Any]


@blueprint.post("/rerank")
async def rerank_texts() -> Response:
    """Rank texts by their scores. A body with `documents` gets the response of /v1/rerank."""
    with current_meter() as meter:
        data = await read_body(meter.service.config.payload_limit)
        with meter.time("decode"):
            body = await _decode_rerank(data, await decode(data, RouteFields, check_count))
        return await answer_any(meter, body, raw_bytes=False)


@blueprint.post("/")
@blueprint.post("/invocations")
async def root() -> Response:
    """Answer a body as the route that `decode_any` chooses for it does. /invocations is for
    SageMaker."""
    with current_meter() as meter:
        data = await read_body(meter.service.config.payload_limit)
        with meter.time("decode"):
            body = await decode_any(data, meter.service.pool)
        return await answer_any(meter, body, raw_bytes=wants_octets())


@blueprint.post("/vertex")
async def vertex() -> Response:
    """Run all instances concurrently, and answer with their results in order. If several fail, the
    error of the one that comes first in the request is raised. Raises BatchTooLarge if there are
    too many instances, or too many inputs in all instances together."""
    with current_meter() as outer:
        instances = (await read_body_as(outer, VertexRequest)).instances
    check_batch(len(instances))
    requests: list[AnyRequest] = []
    input_count = 0
    for instance in instances:
        # divide AT_ONCE, so that all instances block the event loop no longer than one body
        requests.append(await decode_any(instance, outer.service.pool, AT_ONCE // len(instances)))
        input_count += _input_count(requests[-1])
        check_batch(input_count)
    meters = [Meter(outer.service, outer.reservation) for _ in requests]
    gate = asyncio.Semaphore(INSTANCES_AT_ONCE)

    async def answer(meter: Meter, body: AnyRequest) -> bytes:
        """Answer one instance. The metrics count it as a request."""
        async with gate:
            await asyncio.sleep(0)  # let other requests run
            with meter:
                response = await answer_any(meter, body, raw_bytes=False)
                return await response.read()

    results = await asyncio.gather(*map(answer, meters, requests), return_exceptions=True)
    answers = []
    for meter, result in zip(meters, results, strict=True):
        if isinstance(result, BaseException):
            current_exchange().meter = (
                meter  # the failure is counted for the model of the instance that failed
            )
            raise result
        answers.append(result)
    return json_response(b'{"predictions":[' + b",".join(answers) + b"]}")


async def decode_any(
    data: bytes | bytearray | msgspec.Raw, pool: "ModelPool", at_once: int = AT_ONCE
) -> AnyRequest:
    """Choose the route that handles a body, and decode the body as a request of that route. The
    type of the result tells which route it is.

    A body of more than `at_once` bytes is decoded in slices, between which other tasks run. Raises
    InvalidInput, Forbidden, and the errors of `ModelPool.specs_of`.
    """
    fields = await decode(data, RouteFields, check_count, at_once)
    if fields.query is not msgspec.UNSET:
        return await _decode_rerank(data, fields, at_once)
    specs = await pool.specs_of(fields.model, check_name(fields.model))
    primaries: set[OutputName] = {spec.primary for spec in specs if spec.task == "embed"}
    if not primaries:
        is_of_tokens = {spec.task for spec in specs} == {"token_classify"}
        kind = TokenClassifyRequest if is_of_tokens else PredictRequest
    else:
        kind = EmbedRequest if len(primaries) > 1 else EMBED_REQUESTS[primaries.pop()]
    return await decode(data, kind, check_count, at_once)


async def _decode_rerank(
    data: bytes | bytearray | msgspec.Raw, fields: RouteFields, at_once: int = AT_ONCE
) -> RerankRequest | DocumentsRequest:
    """Decode a body for /rerank, in TEI's form if `fields` has texts, or in Jina's form if it has
    documents. Raises BadField if it has neither, and InvalidInput."""
    if fields.texts is not msgspec.UNSET:
        return await decode(data, RerankRequest, check_count, at_once)
    if fields.documents is not msgspec.UNSET:
        return await decode(data, DocumentsRequest, check_count, at_once)
    raise BadField(
        "Object missing required field `texts` (or `documents`, in Jina's form)", field="texts"
    )


async def answer_any(meter: Meter, body: AnyRequest, *, raw_bytes: bool) -> Response:
    """Answer a body as the route for its type does. With `raw_bytes`, dense and multi-vector
    embeddings are answered as raw bytes."""
    match body:
        case EmbedRequest():
            return await answer_embed(meter, body, raw_bytes=raw_bytes)
        case EmbedSparseRequest():
            return await answer_sparse(meter, body)
        case EmbedMultiRequest():
            return await answer_multi(meter, body, raw_bytes=raw_bytes)
        case RerankRequest():
            return await answer_rerank(meter, body)
        case DocumentsRequest():
            return await answer_jina(meter, body)
        case PredictRequest():
            return await answer_predict(meter, body)
        case TokenClassifyRequest():
            return await answer_token_classify(meter, body)


def _input_count(body: AnyRequest) -> int:
    """Return the number of inputs of a body. A text, a pair or a list of token ids is one input."""
    match body:  # a single input, such as a list of token ids, matches no pattern
        case (
            RerankRequest(texts=inputs)
            | DocumentsRequest(documents=inputs)
            | PredictRequest(inputs=[[*_], *_] as inputs)
            | TokenClassifyRequest(inputs=[[*_] | str(), *_] as inputs)
            | EmbedRequest(inputs=[[*_] | str() | TypedInput(), *_] as inputs)
            | EmbedSparseRequest(inputs=[[*_] | str(), *_] as inputs)
            | EmbedMultiRequest(inputs=[[*_] | str() | TypedInput(), *_] as inputs)
        ):
            return len(inputs)
    return 1
