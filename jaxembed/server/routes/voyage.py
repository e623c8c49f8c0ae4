"""The answer of /v1/rerank in the words of Voyage. Knows JSON and no tokens."""

from typing import Literal

import msgspec
from quart import Response

from jaxembed.server.http.encoding import json_answer, json_stream
from jaxembed.server.meter import Meter
from jaxembed.server.pipeline.answering import encode_answer
from jaxembed.server.routes.common.rerank import BestChunk, DocumentsRequest, rerank_documents
from jaxembed.server.routes.common.usage import Usage, usage_of


class VoyageResult(msgspec.Struct, omit_defaults=True):
    """A document's place in the request and its score; its text where asked for."""

    index: int
    relevance_score: float
    chunk: BestChunk | msgspec.UnsetType = msgspec.UNSET
    document: str | msgspec.UnsetType = msgspec.UNSET


class VoyageResponse(msgspec.Struct):
    """The best documents, best first; equal ones in the order they came."""

    object: Literal["list"]
    data: list[VoyageResult]
    model: str
    usage: Usage


async def answer_voyage(meter: Meter, body: DocumentsRequest) -> Response:
    """The answer to one body."""
    answer, results = await rerank_documents(meter, body, as_strings=True)
    rest = {"model": meter.served_name, "usage": usage_of(answer)}
    return await encode_answer(
        meter,
        answer,
        lambda: json_stream(json_answer({"data": results()}, rest, first=b'{"object":"list",')),
    )
