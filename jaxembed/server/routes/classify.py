"""POST /classify in the words of Infinity, whose clients read this answer. Knows no devices.

vLLM has a route of this name with another answer (`data[].probs`).
"""

import time
from typing import Literal

import msgspec
from quart import Blueprint, Response, g

from jaxembed.runtime.options import ScoreOptions
from jaxembed.server.http.encoding import json_answer, json_stream
from jaxembed.server.meter import current_meter
from jaxembed.server.pipeline.answering import Usage, score_inputs, usage_of
from jaxembed.server.pipeline.body import (
    AnyPriority,
    priority_of,
    read_body_as,
    read_texts_and_pairs,
)
from jaxembed.server.pipeline.fields import ModelRequest
from jaxembed.server.routes.rerank import Prediction, json_predictions

blueprint = Blueprint("classify", __name__)


class ClassifyRequest(ModelRequest, kw_only=True):
    """A text, or a list of texts; an item of the list may be a pair, as a list of two.

    Unlike in /predict, `["a", "b"]` are two texts.
    """

    input: str | list[str | list[str]]
    model: str | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    priority: AnyPriority | None = None


class ClassifyResponse(msgspec.Struct):
    """For each input every label, best first, in a list even where there is one input."""

    data: list[list[Prediction]]
    object: Literal["classify"]
    id: str
    created: int
    model: str
    usage: Usage


@blueprint.post("/classify")
@blueprint.post("/v1/classify")
async def classify() -> Response:
    """Every label of each input with its score. A reranker has one label."""
    with current_meter() as meter:
        body = await read_body_as(meter, ClassifyRequest)
        await meter.find(body.model, "classify")
        if isinstance(body.input, str):
            inputs = read_texts_and_pairs([[body.input]], "input", "single")
        else:
            groups = [[item] if isinstance(item, str) else item for item in body.input]
            inputs = read_texts_and_pairs(groups, "input", "batch")
        options = ScoreOptions(truncate=body.truncate, priority=priority_of(body.priority))
        answer = await score_inputs(meter, inputs, options)
        rest = {
            "object": "classify",
            "id": f"classify-{g.request_id}",
            "created": int(time.time()),
            "model": meter.served_name,
            "usage": usage_of(answer),
        }
        data = json_predictions(answer, raw_scores=bool(body.raw_scores), ties="first")
        return await meter.answer(answer, json_stream(json_answer({"data": data}, rest)))
