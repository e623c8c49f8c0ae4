"""POST /v2/rerank, and what all answers in the words of Cohere say of themselves. Knows JSON and no
tokens."""

from typing import Literal

import msgspec
from quart import Blueprint, Response, g

from jaxembed.runtime.options import Embeddings, Scores
from jaxembed.server.http.encoding import json_answer, json_stream
from jaxembed.server.meter import current_meter
from jaxembed.server.pipeline.answering import encode_answer
from jaxembed.server.pipeline.body import read_body_as
from jaxembed.server.routes.common.rerank import DocumentsRequest, Result, rerank_documents

blueprint = Blueprint("cohere", __name__)

ApiVersion = Literal["1", "2"]

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
        rest = {"id": g.request_id, "meta": meta_of(answer, "2")}
        return await encode_answer(
            meter, answer, lambda: json_stream(json_answer({"results": results()}, rest))
        )


def meta_of(answer: Embeddings | Scores, version: ApiVersion) -> dict:
    """The fields of CohereMeta: Cohere bills the tokens of texts to embed, and searches."""
    tokens = int(answer.num_tokens.sum())
    is_search = isinstance(answer, Scores)
    return {
        "api_version": {"version": version},
        "billed_units": {"search_units": SEARCH_UNITS} if is_search else {"input_tokens": tokens},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }
