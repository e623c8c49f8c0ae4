"""POST /classify in the words of Infinity, whose clients read this answer. Knows no devices.

vLLM has a route of this name with another answer (`data[].probs`).
"""

import time
from collections.abc import Awaitable
from typing import Literal

import msgspec
from quart import Blueprint, Response, g

from jaxembed.errors import EmptyInput
from jaxembed.runtime.options import ScoreOptions
from jaxembed.server.http.encoding import json_answer, json_stream
from jaxembed.server.meter import current_meter
from jaxembed.server.pipeline.answering import encode_answer, score_inputs
from jaxembed.server.pipeline.body import (
    AnyPriority,
    RequestTexts,
    priority_of,
    read_body_as,
    read_texts_and_pairs,
)
from jaxembed.server.pipeline.unsupported import ModelRequest
from jaxembed.server.routes.common.scoring import Prediction, json_predictions
from jaxembed.server.routes.common.usage import Usage, usage_of

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
        body = await read_body_as(ClassifyRequest)
        await meter.find(body.model, "classify")
        inputs = _read_input(body.input)
        options = ScoreOptions(truncate=body.truncate, priority=priority_of(body.priority))
        answer = await score_inputs(meter, inputs, options)
        rest = {
            "object": "classify",
            "id": f"classify-{g.request_id}",
            "created": int(time.time()),
            "model": meter.served_name,
            "usage": usage_of(answer),
        }

        def encode() -> Awaitable[Response]:
            data = json_predictions(answer, raw_scores=bool(body.raw_scores), ties="first")
            return json_stream(json_answer({"data": data}, rest))

        return await encode_answer(meter, answer, encode)


def _read_input(raw: str | list[str | list[str]]) -> RequestTexts:
    if isinstance(raw, str):
        return read_texts_and_pairs([[raw]], "input", "single")
    if not raw:
        raise EmptyInput("input")
    groups = [[item] if isinstance(item, str) else item for item in raw]
    return read_texts_and_pairs(groups, "input", "batch")
