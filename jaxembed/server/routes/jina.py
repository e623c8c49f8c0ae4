"""POST /v1/rerank in the words of Jina, or of Voyage. Knows JSON and no tokens.

Infinity, vLLM and Cohere's own client for its first version speak Jina's dialect, more or less. So
do clients of Voyage, but for the answer, unless they say `top_k` or `truncation`: Jina's answer has
the list of results under both names for them.
"""

import time
from collections.abc import Awaitable
from typing import Literal

import msgspec
from quart import Blueprint, Response, g

from jaxembed.server.http.encoding import json_answer, json_stream
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import encode_answer
from jaxembed.server.pipeline.body import read_body_as
from jaxembed.server.routes.common.rerank import DocumentsRequest, Result, rerank_documents
from jaxembed.server.routes.common.usage import Usage, usage_of
from jaxembed.server.routes.voyage import answer_voyage

blueprint = Blueprint("jina", __name__)


class JinaResponse(msgspec.Struct):
    """The best documents, best first; equal ones in the order they came. `data` is `results` again,
    where clients of Voyage look for them."""

    results: list[Result]
    data: list[Result]
    object: Literal["rerank"]
    id: str
    created: int
    model: str
    usage: Usage


@blueprint.post("/v1/rerank")
async def rerank_jina() -> Response:
    """Rank documents by how well they answer a query."""
    with current_meter() as meter:
        body = await read_body_as(DocumentsRequest)
        answer = answer_jina if (body.top_k, body.truncation) == (None, None) else answer_voyage
        return await answer(meter, body)


async def answer_jina(meter: Meter, body: DocumentsRequest) -> Response:
    """The answer to one body, whichever route it came by."""
    answer, results = await rerank_documents(meter, body)
    rest = {
        "object": "rerank",
        "id": f"rerank-{g.request_id}",
        "created": int(time.time()),
        "model": meter.served_name,
        "usage": usage_of(answer),
    }

    def encode() -> Awaitable[Response]:
        return json_stream(json_answer({"results": results(), "data": results()}, rest))

    return await encode_answer(meter, answer, encode)
