"""POST /v1/rerank as Jina's or Voyage's API defines it, and POST /classify as Infinity's does. The
module also has what all routes that rerank or classify share: the bodies to rerank, and the lists
of scores as JSON.

Infinity, vLLM and Cohere's client for version 1 use nearly the same API as Jina. Cohere's routes
and Voyage's API have the same body and results, but the response around the results differs. A body
with `top_k` or `truncation` gets Voyage's response. Any other body gets Jina's response, which
repeats the results as `data`, where Voyage's clients read them.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from quart import Blueprint

from jaxembed.errors import InvalidInput, NoInputs
from jaxembed.preprocessing.windows import MAX_WINDOWS
from jaxembed.runtime.options import Chunk, ScoreOptions, Scores
from jaxembed.runtime.postprocess import Ties, rank
from jaxembed.server.http.encoding import (
    OBJECT_WIDTH,
    json_answer,
    json_items,
    json_stream,
    object_width,
)
from jaxembed.server.http.exchange import Response, current_exchange
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import Usage, score_documents, score_inputs, usage_of
from jaxembed.server.pipeline.body import (
    IMAGES,
    AnyPriority,
    ContentItem,
    Source,
    TextOrImage,
    check_parts,
    joined_parts,
    priority_of,
    read_body_as,
    read_texts_and_pairs,
)
from jaxembed.server.pipeline.fields import TRUNCATE, ModelRequest, merged_values

blueprint: Any = Blueprint("rerank", __name__)

LongDocuments = Literal["truncate", "chunk"]

TOP_N = ("top_n", "top_k")  # names of one field in different clients


class Prediction(msgspec.Struct):
    """A label and its score."""

    score: float
    label: str


class Document(TextOrImage, omit_defaults=True):
    """A query or a document as an object: a text, an image as a URL, a data URI or base64, or both,
    or a list of parts in `content` (vLLM). Other fields of the object are ignored, and are not in
    the response, but those that other APIs give to images are refused. Raises ValueError for an
    object with none of them, and for too many parts."""

    content: list[ContentItem] | None = None
    images: Any = None
    image_url: Any = None
    image_base64: Any = None

    def __post_init__(self) -> None:
        others = ("images", "image_url", "image_base64")
        if wrong := [name for name in others if getattr(self, name) is not None]:
            raise ValueError(f"Expected an image in `image`, or parts in `content`, not {wrong[0]}")
        check_parts(self.content)
        if self.content is None:
            super().__post_init__()
        elif not self.content or self.text is not None or self.image is not None:
            raise ValueError("Expected `content` with at least one part, or `text` and `image`")

    @property
    def source(self) -> Source:
        """The text, the image, or the parts."""
        if not self.content:
            return super().source
        return joined_parts([part.source for part in self.content], ".content")


class RankingRequest(ModelRequest, kw_only=True):
    """The fields of every body to rerank.

    `top_n`, or Voyage's `top_k`, limits the number of results; null or 0 asks for all.
    `max_tokens_per_doc` truncates documents; null or 0 means the limit of the model. A
    `max_chunks_per_doc` over 1, or `long_documents` of chunk, divides a document over the limit
    into chunks, and the best chunk gives the score.
    """

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
    """A body to rerank in the form that Jina, Cohere, Voyage, Infinity and vLLM share. All routes
    that take this body accept `raw_scores`, `truncate` (Voyage: `truncation`) and `instruction`.
    `user`, and a number as `priority`, have no effect."""

    query: str | Document
    documents: list[str | Document]
    return_documents: bool | None = None
    truncation: bool | None = None
    priority: AnyPriority | None = None
    user: str | None = None


class BestChunk(msgspec.Struct):
    """The chunk whose score is the score of the document. `index` is the number of the chunk,
    `start` its first character in the document and `end` the character after its last. Present only
    if documents may be divided."""

    index: int
    start: int
    end: int


class ScoredDocument(msgspec.Struct, omit_defaults=True):
    """The index of a document in the request, and its score."""

    index: int
    relevance_score: float
    chunk: BestChunk | msgspec.UnsetType = msgspec.UNSET


class Result(ScoredDocument, omit_defaults=True):
    """The index of a document in the request, its score, and the document if the request asks for
    it."""

    document: Document | msgspec.UnsetType = msgspec.UNSET


class JinaResponse(msgspec.Struct):
    """The best documents, best first. Documents of equal score keep their order. `data` repeats
    `results` for clients of Voyage."""

    results: list[Result]
    data: list[Result]
    object: Literal["rerank"]
    id: str
    created: int
    model: str
    usage: Usage


class VoyageResult(ScoredDocument, omit_defaults=True):
    """The index of a document in the request, its score, and its text if the request asks for
    it."""

    document: str | msgspec.UnsetType = msgspec.UNSET


class VoyageResponse(msgspec.Struct):
    """The best documents, best first. Documents of equal score keep their order."""

    object: Literal["list"]
    data: list[VoyageResult]
    model: str
    usage: Usage


@blueprint.post("/v1/rerank")
async def rerank_jina() -> Response:
    """Rank documents. The response has Voyage's form if the body has `top_k` or `truncation`, else
    Jina's form."""
    with current_meter() as meter:
        body = await read_body_as(meter, DocumentsRequest)
        if (body.top_k, body.truncation) == (None, None):
            return await answer_jina(meter, body)
        answer, results = await rerank_documents(meter, body, as_strings=True)
        rest = {"model": meter.served_name, "usage": usage_of(answer)}
        encoded = json_answer({"data": results()}, rest, first=b'{"object":"list",')
        return await meter.answer(answer, json_stream(encoded))


async def answer_jina(meter: Meter, body: DocumentsRequest) -> Response:
    """Answer a body to rerank in Jina's form. The body may come from any route."""
    answer, results = await rerank_documents(meter, body)
    rest = {
        "object": "rerank",
        "id": f"rerank-{current_exchange().request_id}",
        "created": int(time.time()),
        "model": meter.served_name,
        "usage": usage_of(answer),
    }
    encoded = json_answer({"results": results(), "data": results()}, rest)
    return await meter.answer(answer, json_stream(encoded))


async def rerank_documents(
    meter: Meter, body: DocumentsRequest, *, as_strings: bool = False
) -> tuple[Scores, Callable[[], AsyncIterator[bytes]]]:
    """Score the documents of a body. Returns the scores, and a function that yields the best
    Results, best first, as the items of a JSON list in slices. It may be called several times. With
    `as_strings` the field `document` of a Result is the text alone.

    Raises InvalidInput, and the errors of `Meter.find` and `score_documents`.
    """
    if not body.documents:
        raise NoInputs("documents")
    query, *sources = [
        item if isinstance(item, str) else item.source for item in (body.query, *body.documents)
    ]
    texts = [source if isinstance(source, str) else "" for source in sources]
    if body.return_documents and not IMAGES.isdisjoint(map(type, sources)):
        raise InvalidInput(
            "`return_documents` supports only texts, and the request has images; leave it out",
            field="return_documents",
        )
    (truncate,) = merged_values(body, TRUNCATE)
    options = ranking_options(body, truncate=truncate, priority=priority_of(body.priority))
    await meter.find(body.model, "rerank")
    answer = await score_documents(meter, query, sources, options, field="documents")

    def result(i: int, score: np.float32) -> dict:
        fields = {"index": i, "relevance_score": score, **chunk_of(answer, i)}
        if body.return_documents:
            fields["document"] = texts[i] if as_strings else {"text": texts[i]}
        return fields

    results = partial(
        json_ranking,
        answer,
        result,
        texts if body.return_documents else None,
        raw_scores=bool(body.raw_scores),
        ties="first",
        top_n=merged_values(body, TOP_N)[0],
    )
    return answer, results


def ranking_options(body: RankingRequest, **more: Any) -> ScoreOptions:
    """Return the ScoreOptions that a body asks for. `more` are further fields of ScoreOptions.
    Raises InvalidInput for a number out of range and for fields that contradict each other."""
    for field in ("top_n", "top_k", "max_tokens_per_doc"):
        value = getattr(body, field)
        if value is not None and value < 0:
            raise InvalidInput(
                f"`{field}` must be 1 or more; null or 0 means no limit. Given: {value}",
                field=field,
            )
    chunks = body.max_chunks_per_doc
    if body.long_documents == "truncate" and (chunks or 1) > 1:
        raise InvalidInput(
            f"`long_documents` of truncate contradicts `max_chunks_per_doc` of {chunks}; "
            "send one of them",
            field="long_documents",
        )
    return ScoreOptions(
        instruction=body.instruction or None,
        max_document_tokens=body.max_tokens_per_doc or None,
        max_chunks=chunks or (MAX_WINDOWS if body.long_documents == "chunk" else 1),
        overlap_tokens=body.overlap_tokens,
        weights=tuple(body.weights) if body.weights else None,
        **more,
    )


def chunk_of(answer: Scores, document: int) -> dict[str, Chunk]:
    """Return the field `chunk` of the result for the document with this index, or no field if
    documents may not be divided."""
    return {} if answer.chunks is None else {"chunk": answer.chunks[document]}


async def json_ranking(
    answer: Scores,
    item: Callable[[int, Any], dict],
    texts: Sequence[str] | None = None,
    *,
    raw_scores: bool,
    ties: Ties,
    top_n: int | None = None,
) -> AsyncIterator[bytes]:
    """Yield the items of a JSON list of the best documents, best first, in slices.

    `item(index, score)` makes the object of a document; `score` is a numpy.float32. `texts` are the
    documents, if the objects contain them. `ties` says which of two documents of equal score comes
    first.
    """
    scores = answer.shown(raw_scores)[:, 0]
    order = rank(answer.logits[:, 0], ties)[:top_n].tolist()

    def items(start: int, stop: int) -> list[dict]:
        return [item(i, scores[i]) for i in order[start:stop]]

    async for part in json_items(len(order), object_width(texts or ()), items):
        yield part


async def json_predictions(answer: Scores, *, raw_scores: bool, ties: Ties) -> AsyncIterator[bytes]:
    """Yield the items of a JSON list, without the list's brackets, in slices: for each input a list
    of its labels with scores, best first. `ties` says which of two labels with equal logits comes
    first."""
    scores, labels = answer.shown(raw_scores), answer.labels

    def items(start: int, stop: int) -> list[list[dict]]:
        return [
            [{"score": scores[i, k], "label": labels[k]} for k in rank(answer.logits[i], ties)]
            for i in range(start, stop)
        ]

    async for part in json_items(len(scores), OBJECT_WIDTH * len(labels), items):
        yield part


class ClassifyRequest(ModelRequest, kw_only=True):
    """A request to classify a text, or a list of texts and pairs. A pair is a list of two texts.

    `["a", "b"]` is two texts here, whereas /predict takes it as one pair.
    """

    input: str | list[str | list[str]]
    raw_scores: bool | None = None
    truncate: bool | None = None
    priority: AnyPriority | None = None


class ClassifyResponse(msgspec.Struct):
    """The labels and scores. `data` has for each input a list of all labels with their scores, best
    first."""

    data: list[list[Prediction]]
    object: Literal["classify"]
    id: str
    created: int
    model: str
    usage: Usage


@blueprint.post("/classify")
@blueprint.post("/v1/classify")
async def classify() -> Response:
    """Answer with every label of each input and its score. A reranker has one label."""
    with current_meter() as meter:
        body = await read_body_as(meter, ClassifyRequest)
        await meter.find(body.model, "classify")
        if isinstance(body.input, str):
            inputs = read_texts_and_pairs([[body.input]], "input", method="single")
        else:
            groups = [[item] if isinstance(item, str) else item for item in body.input]
            inputs = read_texts_and_pairs(groups, "input", method="batch")
        options = ScoreOptions(truncate=body.truncate, priority=priority_of(body.priority))
        answer = await score_inputs(meter, inputs, options)
        rest = {
            "object": "classify",
            "id": f"classify-{current_exchange().request_id}",
            "created": int(time.time()),
            "model": meter.served_name,
            "usage": usage_of(answer),
        }
        data = json_predictions(answer, raw_scores=bool(body.raw_scores), ties="first")
        return await meter.answer(answer, json_stream(json_answer({"data": data}, rest)))
