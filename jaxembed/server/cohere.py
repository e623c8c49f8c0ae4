"""POST /v2/rerank in the words of Cohere. Knows JSON and no tokens."""

import msgspec
from quart import Blueprint, Response, g

from jaxembed.server.answering import encode_answer
from jaxembed.server.body import read_body_as
from jaxembed.server.encoding import json_answer, json_stream
from jaxembed.server.meter import current_meter
from jaxembed.server.rerank import DocumentsRequest, Result, rerank_documents

blueprint = Blueprint("cohere", __name__)

SEARCH_UNITS = 1  # what Cohere bills for a request; some clients add it up


class CohereMeta(msgspec.Struct):
    """`tokens.input_tokens` are those really run."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]


class CohereResponse(msgspec.Struct):
    """The best documents, best first; equal ones in the order they came."""

    results: list[Result]
    id: str
    meta: CohereMeta


@blueprint.post("/v2/rerank")
async def rerank_cohere() -> Response:
    """Rank documents by how well they answer a query."""
    with current_meter() as meter:
        answer, results = await rerank_documents(meter, await read_body_as(DocumentsRequest))
        meta = {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": SEARCH_UNITS},
            "tokens": {"input_tokens": int(answer.num_tokens.sum()), "output_tokens": 0},
        }
        rest = {"id": g.request_id, "meta": meta}
        return await encode_answer(
            meter, answer, lambda: json_stream(json_answer({"results": results()}, rest))
        )
