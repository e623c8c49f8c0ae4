"""The routes of Text Embeddings Inference 1.9 that score: /predict, and its body for /rerank.

The route /rerank is in `cloud.py`, because clients send it Jina's body too. Knows no devices.
"""

from collections.abc import Awaitable
from typing import Annotated, Any

import msgspec
import numpy as np
from quart import Blueprint, Response

from jaxembed.data.inputs import Priority
from jaxembed.errors import EmptyInput, NoInputs
from jaxembed.runtime.options import ScoreOptions
from jaxembed.server.http.encoding import json_list, json_stream
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import encode_answer, score_documents, score_inputs
from jaxembed.server.pipeline.body import (
    RequestTexts,
    priority_of,
    read_body_as,
    read_texts_and_pairs,
)
from jaxembed.server.pipeline.decoding import mixed
from jaxembed.server.pipeline.unsupported import ModelRequest, Unserved
from jaxembed.server.routes.common.rerank import (
    BestChunk,
    RankingRequest,
    chunk_of,
    most_results,
    ranking_options,
)
from jaxembed.server.routes.common.scoring import json_predictions, json_ranks
from jaxembed.server.routes.tei import SIDES, Direction

blueprint = Blueprint("tei_scores", __name__)

_RETURN_TEXT = Unserved("send `return_text`, or the texts as `documents`", (False,))


class RerankRequest(RankingRequest, kw_only=True):
    """A query, and the texts to rank by how well they answer it. TEI has `truncate`,
    `truncation_direction`, `raw_scores` and `return_text` of the other fields."""

    texts: list[str]
    return_documents: Annotated[Any, _RETURN_TEXT] = None
    truncation_direction: Direction | None = None
    return_text: bool | None = None
    priority: Priority | None = None


class Rank(msgspec.Struct, omit_defaults=True):
    """A text's place in the request and its score; the text itself where asked for."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET
    chunk: BestChunk | msgspec.UnsetType = msgspec.UNSET


class PredictRequest(ModelRequest, kw_only=True):
    """`"a"` and `["a"]` are one text, `["a", "b"]` is one pair, and `[["a"], ["b", "c"]]` a batch
    of a text and a pair. An empty list is refused as an empty input."""

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool | None = None
    model: str | None = None
    priority: Priority | None = None


@blueprint.post("/predict")
async def predict() -> Response:
    """Every label of each input with its score, best first. A reranker has one label."""
    with current_meter() as meter:
        return await answer_predict(meter, await read_body_as(PredictRequest))


async def answer_rerank(meter: Meter, body: RerankRequest) -> Response:
    """The answer to one TEI body for /rerank: best first, and of equal texts the last first, as in
    TEI."""
    texts = body.texts
    if not texts:
        raise NoInputs("texts")
    options = ranking_options(
        body,
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        priority=priority_of(body.priority),
    )
    top_n = most_results(body)
    await meter.find(body.model, "rerank")
    answer = await score_documents(meter, body.query, texts, options, field="texts")

    def item(i: int, score: np.float32) -> dict:
        text = {"text": texts[i]} if body.return_text else {}
        return {"index": i, **text, "score": score, **chunk_of(answer, i)}

    def encode() -> Awaitable[Response]:
        inside = json_ranks(
            answer,
            item,
            texts if body.return_text else None,
            raw_scores=bool(body.raw_scores),
            ties="last",
            top_n=top_n,
        )
        return json_stream(json_list(inside))

    return await encode_answer(meter, answer, encode)


async def answer_predict(meter: Meter, body: PredictRequest) -> Response:
    """The answer to one /predict body, whichever route it came by."""
    await meter.find(body.model, "classify")
    inputs = _read_inputs(body.inputs)
    options = ScoreOptions(
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        priority=priority_of(body.priority),
    )
    answer = await score_inputs(meter, inputs, options)

    def encode() -> Awaitable[Response]:
        inside = json_predictions(answer, raw_scores=bool(body.raw_scores), ties="last")
        return json_stream(inside if meter.size.method == "single" else json_list(inside))

    return await encode_answer(meter, answer, encode)


def _read_inputs(raw: str | list[str | list[str]]) -> RequestTexts:
    """The inputs, in one of the forms that PredictRequest lists."""
    if isinstance(raw, str):
        return read_texts_and_pairs([[raw]], "inputs", "single")
    if not raw:
        raise EmptyInput("inputs")
    flat = [item for item in raw if isinstance(item, str)]
    if len(flat) == len(raw):
        return read_texts_and_pairs([flat], "inputs", "single")
    groups = []
    for i, item in enumerate(raw):
        if isinstance(item, str):
            raise mixed("inputs", i, "a list of one or two texts", "str")
        groups.append(item)
    return read_texts_and_pairs(groups, "inputs", "batch")
