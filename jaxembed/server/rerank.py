"""Reranks a body with `documents`. Jina and Cohere take the same body, and give the same results
in different answers."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np

from jaxembed.errors import InvalidInput, NoInputs
from jaxembed.options import ScoreOptions, Scores
from jaxembed.server.body import AnyPriority, priority_of
from jaxembed.server.meter import Meter
from jaxembed.server.scoring import json_ranks, score_documents

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
    every route.

    Null or 0 as `top_n` asks for all documents, as `max_tokens_per_doc` for the model's own limit.
    A number as `priority` and any `user` change nothing. The fields after `user` are for what is
    not supported, and may only ask for nothing.
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
    priority: AnyPriority | None = None
    user: str | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: int | None = None
    overlap_tokens: int | None = None
    max_tokens_per_query: int | None = None
    relevant_spans: dict[str, Any] | None = None


class Result(msgspec.Struct, omit_defaults=True):
    """A document's place in the request and its score; the document itself where asked for."""

    index: int
    relevance_score: float
    document: Document | msgspec.UnsetType = msgspec.UNSET


async def rerank_documents(
    meter: Meter, body: DocumentsRequest
) -> tuple[Scores, AsyncIterator[bytes]]:
    """The model's answer, and the best documents as Results, the inside of a JSON list."""
    _check(body)
    texts = [item if isinstance(item, str) else item.text for item in body.documents]
    options = ScoreOptions(
        truncate=body.truncate,
        instruction=body.instruction,
        max_document_tokens=body.max_tokens_per_doc or None,
        priority=priority_of(body.priority),
    )
    answer = await score_documents(meter, body.model, body.query, texts, options, field="documents")

    def result(i: int, score: np.float32) -> dict:
        found = {"index": i, "relevance_score": score}
        return found | {"document": {"text": texts[i]}} if body.return_documents else found

    results = json_ranks(
        answer,
        result,
        texts if body.return_documents else None,
        raw_scores=bool(body.raw_scores),
        ties="first",
        top_n=body.top_n or None,
    )
    return answer, results


def _check(body: DocumentsRequest) -> None:
    """Raises InvalidInput for what is empty, out of range, or not supported."""
    if not body.documents:
        raise NoInputs("documents")
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
