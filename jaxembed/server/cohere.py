"""The rerank routes of Jina (/v1/rerank) and Cohere (/v2/rerank). Knows JSON and the Embedder.

Infinity, vLLM and Cohere's own client for its first version speak Jina's dialect, more or less. One
body serves both routes; the answers differ.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from quart import Blueprint, Response, g

from jaxembed.errors import EmptyInput, InvalidInput
from jaxembed.options import ScoreOptions, Scores
from jaxembed.postprocess import rank
from jaxembed.server.body import RequestSize, check_batch, read_json
from jaxembed.server.encoding import (
    encoding_time,
    json_answer,
    json_items,
    json_response,
    object_width,
)
from jaxembed.server.meter import Meter
from jaxembed.server.openai import Usage
from jaxembed.server.scoring import shown, size_of
from jaxembed.server.service import current_service

blueprint = Blueprint("cohere", __name__)

SEARCH_UNITS = 1  # what Cohere bills for a request; some clients add it up

_CUT = "a long document is cut at the limit, not split; `max_tokens_per_doc` sets a lower one"
UNSUPPORTED: dict[str, tuple[tuple, str]] = {  # fields: what asks for nothing, and why no more
    "rank_fields": (([], ["text"]), "documents are ranked by their `text`"),
    "max_chunks_per_doc": ((1,), _CUT),
    "overlap_tokens": ((0,), _CUT),
    "max_tokens_per_query": ((0,), "a query is cut only where it leaves no room for a document"),
    "relevant_spans": (({"mode": "disabled"},), "a document is scored as a whole"),
}


class Document(msgspec.Struct):
    """A document as an object; its other fields are not read and do not come back."""

    text: str


class DocumentsRequest(msgspec.Struct):
    """The fields of Jina, Cohere, Infinity and vLLM; `raw_scores`, `truncate` and `instruction` on
    both routes.

    Null or 0 as `top_n` asks for all documents, as `max_tokens_per_doc` for the model's own limit.
    `priority` and `user` change nothing. The fields after `user` are for what is not supported, and
    may only ask for nothing.
    """

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    priority: int | None = None
    user: str | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: int | None = None
    overlap_tokens: int | None = None
    max_tokens_per_query: int | None = None
    relevant_spans: dict[str, Any] | None = None


class JinaResult(msgspec.Struct, omit_defaults=True):
    """A document's place in the request and its score; the document itself where asked for."""

    index: int
    relevance_score: float
    document: Document | msgspec.UnsetType = msgspec.UNSET


class JinaResponse(msgspec.Struct):
    """The best documents, best first; equal ones in the order they came."""

    results: list[JinaResult]
    object: Literal["rerank"]
    id: str
    created: int
    model: str
    usage: Usage


class CohereMeta(msgspec.Struct):
    """`tokens.input_tokens` are those really run."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]


class CohereResponse(msgspec.Struct):
    """The best documents, best first; equal ones in the order they came."""

    results: list[JinaResult]
    id: str
    meta: CohereMeta


@dataclass(frozen=True)
class Reranked:
    """A request's documents in their new order."""

    size: RequestSize
    answer: Scores
    results: bytes  # the inside of a JSON list

    @property
    def tokens(self) -> int:
        return int(self.answer.num_tokens.sum())


@blueprint.post("/v1/rerank")
async def rerank_jina() -> Response:
    """Rank documents by how well they answer a query."""
    with Meter(current_service()) as meter:
        return await answer_jina(meter, await read_json(DocumentsRequest))


@blueprint.post("/v2/rerank")
async def rerank_cohere() -> Response:
    """As /v1/rerank, in Cohere's words."""
    with Meter(current_service()) as meter:
        reranked = await _rerank(meter, await read_json(DocumentsRequest))
        meta = {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": SEARCH_UNITS},
            "tokens": {"input_tokens": reranked.tokens, "output_tokens": 0},
        }
        body = json_answer("results", reranked.results, {"id": g.request_id, "meta": meta})
        return meter.stamp(json_response(body), reranked.size, reranked.answer)


async def answer_jina(meter: Meter, body: DocumentsRequest) -> Response:
    """Jina's answer to one body, from wherever it came."""
    reranked = await _rerank(meter, body)
    rest = {
        "object": "rerank",
        "id": f"rerank-{g.request_id}",
        "created": int(time.time()),
        "model": meter.service.name_of(meter.embedder),
        "usage": {"prompt_tokens": reranked.tokens, "total_tokens": reranked.tokens},
    }
    response = json_response(json_answer("results", reranked.results, rest))
    return meter.stamp(response, reranked.size, reranked.answer)


async def _rerank(meter: Meter, body: DocumentsRequest) -> Reranked:
    _check(body)
    embedder = meter.service.find(body.model, "rerank")
    check_batch(len(body.documents))
    texts = [item if isinstance(item, str) else item.text for item in body.documents]
    size = size_of(body.query, texts)
    meter.accept(embedder, size)
    options = ScoreOptions(
        truncate=body.truncate,
        instruction=body.instruction,
        max_document_tokens=body.max_tokens_per_doc or None,
    )
    answer = await embedder.score_documents(body.query, texts, options)
    found = shown(answer, embedder.spec, body.raw_scores)[:, 0]
    order = rank(answer.logits[:, 0])[: body.top_n or None].tolist()
    with encoding_time():
        results = await _results(found, order, texts if body.return_documents else None)
    return Reranked(size, answer, results)


async def _results(found: np.ndarray, order: Sequence[int], texts: Sequence[str] | None) -> bytes:
    """The results as the inside of a JSON list, with the documents' texts where given."""

    def items(start: int, stop: int) -> list[dict]:
        part = order[start:stop]
        if texts is None:
            return [{"index": i, "relevance_score": found[i]} for i in part]
        return [
            {"index": i, "relevance_score": found[i], "document": {"text": texts[i]}} for i in part
        ]

    return await json_items(len(order), object_width(texts or ()), items)


def _check(body: DocumentsRequest) -> None:
    """Raises InvalidInput for what is empty, out of range, or not supported."""
    if not body.query:
        raise EmptyInput("`query` cannot be empty", field="query")
    if not body.documents:
        raise EmptyInput("`documents` cannot be empty", field="documents")
    for field in ("top_n", "max_tokens_per_doc"):
        value = getattr(body, field)
        if value is not None and value < 0:
            raise InvalidInput(
                f"`{field}` must be 1 or more; null or 0 means no limit. Given: {value}",
                field=field,
            )
    for field, (nothing, reason) in UNSUPPORTED.items():
        value = getattr(body, field)
        if value is not None and value not in nothing:
            raise InvalidInput(f"`{field}` is not supported: {reason}", field=field)
