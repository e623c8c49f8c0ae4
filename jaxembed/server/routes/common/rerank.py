"""What all bodies to rerank have in common, and the body with `documents`. Jina and Cohere take
the same body and give the same results, in different answers."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from jaxembed.errors import InvalidInput, NoInputs
from jaxembed.preprocessing.windows import MOST_WINDOWS
from jaxembed.runtime.options import Chunk, ScoreOptions, Scores
from jaxembed.server.meter import Meter
from jaxembed.server.pipeline.answering import score_documents
from jaxembed.server.pipeline.body import AnyPriority, priority_of
from jaxembed.server.pipeline.media import ImageSource
from jaxembed.server.pipeline.unsupported import ModelRequest, agreed
from jaxembed.server.routes.common.scoring import json_ranks

LongDocuments = Literal["truncate", "chunk"]


class Document(msgspec.Struct, omit_defaults=True):
    """A document as an object: a text, or an image as a URL, a data URI or base64. Its other fields
    are not read and do not come back. Raises ValueError for one that holds both or none."""

    text: str | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.image is None):
            raise ValueError("Expected an object with `text`, or with `image`")

    @property
    def source(self) -> str | ImageSource:
        """The text, or the image."""
        return self.text or "" if self.image is None else ImageSource(self.image, bare=True)


class RankingRequest(ModelRequest, kw_only=True):
    """The fields of every body to rerank.

    Null or 0 as `top_n`, or Voyage's `top_k`, asks for all documents, as `max_tokens_per_doc` for
    the model's own limit. `max_chunks_per_doc` over 1, or `long_documents` of "chunk", divides
    documents that are too long.
    """

    query: str
    model: str | None = None
    top_n: int | None = None
    top_k: int | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    overlap_tokens: int | None = None
    long_documents: LongDocuments | None = None
    weights: list[float] | None = None
    instruction: str | None = None


class DocumentsRequest(RankingRequest, kw_only=True):
    """The fields of Jina, Cohere, Voyage, Infinity and vLLM; `raw_scores`, `truncate` and
    `instruction` on every route. Voyage says `truncation`. A number as `priority` and any `user`
    change nothing.
    """

    documents: list[str | Document]
    return_documents: bool | None = None
    truncation: bool | None = None
    priority: AnyPriority | None = None
    user: str | None = None


class BestChunk(msgspec.Struct):
    """The part of a document that has its score: its number, its first character and the one after
    its last. Only where documents may be divided."""

    index: int
    start: int
    end: int


class Result(msgspec.Struct, omit_defaults=True):
    """A document's place in the request and its score; the document itself where asked for."""

    index: int
    relevance_score: float
    chunk: BestChunk | msgspec.UnsetType = msgspec.UNSET
    document: Document | msgspec.UnsetType = msgspec.UNSET


async def rerank_documents(
    meter: Meter, body: DocumentsRequest, *, as_strings: bool = False
) -> tuple[Scores, Callable[[], AsyncIterator[bytes]]]:
    """The model's answer, and a function that gives the best documents as Results: at each call the
    inside of a JSON list, in slices. With `as_strings` the document of a Result is its text."""
    if not body.documents:
        raise NoInputs("documents")
    sources = [item if isinstance(item, str) else item.source for item in body.documents]
    texts = [one if isinstance(one, str) else "" for one in sources]
    if body.return_documents and any(isinstance(one, ImageSource) for one in sources):
        raise InvalidInput(
            "`return_documents` is for texts, and some documents are images; leave it out",
            field="return_documents",
        )
    options = ranking_options(
        body,
        truncate=agreed(body, "truncate", "truncation"),
        priority=priority_of(body.priority),
    )
    await meter.find(body.model, "rerank")
    answer = await score_documents(meter, body.query, sources, options, field="documents")

    def result(i: int, score: np.float32) -> dict:
        found = {"index": i, "relevance_score": score, **chunk_of(answer, i)}
        if body.return_documents:
            found["document"] = texts[i] if as_strings else {"text": texts[i]}
        return found

    results = partial(
        json_ranks,
        answer,
        result,
        texts if body.return_documents else None,
        raw_scores=bool(body.raw_scores),
        ties="first",
        top_n=most_results(body),
    )
    return answer, results


def ranking_options(body: RankingRequest, **more: Any) -> ScoreOptions:
    """The options that a body asks for, and `more` fields of ScoreOptions. Raises InvalidInput for
    a number out of range and for fields that contradict each other."""
    for field in ("top_n", "top_k", "max_tokens_per_doc"):
        value = getattr(body, field)
        if value is not None and value < 0:
            raise InvalidInput(
                f"`{field}` must be 1 or more; null or 0 means no limit. Given: {value}",
                field=field,
            )
    return ScoreOptions(
        instruction=body.instruction or None,
        max_document_tokens=body.max_tokens_per_doc or None,
        max_chunks=_most_chunks(body.max_chunks_per_doc, body.long_documents),
        overlap_tokens=body.overlap_tokens,
        weights=tuple(body.weights) if body.weights else None,
        **more,
    )


def most_results(body: RankingRequest) -> int | None:
    """How many of the best results to answer; None for all. Raises InvalidInput if `top_n` and
    `top_k` differ."""
    return agreed(body, "top_n", "top_k", unset=(None, 0))


def _most_chunks(asked: int | None, long: LongDocuments | None) -> int:
    """The most windows of a document; 1 cuts it. Raises InvalidInput if the fields contradict each
    other."""
    if long == "truncate" and (asked or 1) > 1:
        raise InvalidInput(
            f"`long_documents` of truncate contradicts `max_chunks_per_doc` of {asked}; "
            "send one of them",
            field="long_documents",
        )
    return asked or (MOST_WINDOWS if long == "chunk" else 1)


def chunk_of(answer: Scores, document: int) -> dict[str, Chunk]:
    """The field of a result that says which chunk of its document counts, if any."""
    return {} if answer.chunks is None else {"chunk": answer.chunks[document]}
