"""The routes of Text Embeddings Inference 1.9 that score: /rerank, /predict. Knows no devices."""

from collections.abc import Sequence

import msgspec
import numpy as np
from quart import Blueprint, Response

from jaxembed.errors import EmptyInput
from jaxembed.options import ScoreOptions
from jaxembed.server.body import (
    RequestTexts,
    check_batch,
    decode,
    decoding_time,
    empty,
    mixed,
    read_data,
    read_json,
    read_texts,
)
from jaxembed.server.cohere import DocumentsRequest, answer_jina
from jaxembed.server.encoding import encoding_time, json_items, json_response, object_width
from jaxembed.server.errors import BadField
from jaxembed.server.meter import Meter
from jaxembed.server.scoring import json_predictions, shown, size_of
from jaxembed.server.service import current_service
from jaxembed.server.tei import SIDES, Direction

blueprint = Blueprint("tei_scores", __name__)


class RerankRequest(msgspec.Struct):
    """A query, and the texts to rank by how well they answer it."""

    query: str
    texts: list[str]
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    return_text: bool = False
    model: str | None = None


class Rank(msgspec.Struct, omit_defaults=True):
    """A text's place in the request and its score; the text itself where asked for."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class PredictRequest(msgspec.Struct):
    """`"a"` and `["a"]` are one text, `["a", "b"]` is one pair, and `[["a"], ["b", "c"]]` a batch
    of a text and a pair. An empty list is refused as an empty input."""

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    model: str | None = None


class Keys(msgspec.Struct):
    """As much of a /rerank body as tells TEI's from Jina's."""

    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


@blueprint.post("/rerank")
async def rerank() -> Response:
    """The texts in order of their scores; a body with `documents` is answered as /v1/rerank."""
    with Meter(current_service()) as meter:
        data = await read_data()
        with decoding_time():
            body = decode_rerank(data)
        if isinstance(body, DocumentsRequest):
            return await answer_jina(meter, body)
        return await answer_rerank(meter, body)


@blueprint.post("/predict")
async def predict() -> Response:
    """Every label of each input with its score, best first. A reranker has one label."""
    with Meter(current_service()) as meter:
        return await answer_predict(meter, await read_json(PredictRequest))


def decode_rerank(data: bytes | msgspec.Raw) -> RerankRequest | DocumentsRequest:
    """TEI's body, or Jina's: clients send both to /rerank."""
    keys = decode(data, Keys)
    if keys.texts is not msgspec.UNSET:
        return decode(data, RerankRequest)
    if keys.documents is not msgspec.UNSET:
        return decode(data, DocumentsRequest)
    raise BadField(
        "Object missing required field `texts` (or `documents`, in Jina's form)", field="texts"
    )


async def answer_rerank(meter: Meter, body: RerankRequest) -> Response:
    """The answer to one /rerank body, from wherever it came."""
    texts = body.texts
    if not texts:
        raise EmptyInput("`texts` cannot be empty", field="texts")
    embedder = meter.service.find(body.model, "rerank")
    check_batch(len(texts))
    if not body.query and "" in texts:
        raise empty("inputs", f"texts[{texts.index('')}]")
    size = size_of(body.query, texts)
    meter.accept(embedder, size)
    options = ScoreOptions(truncate=body.truncate, truncation_side=SIDES[body.truncation_direction])
    answer = await embedder.score_documents(body.query, texts, options)
    found = shown(answer, embedder.spec, body.raw_scores)[:, 0]
    order = _descending(answer.logits[:, 0]).tolist()
    with encoding_time():
        inside = await _ranks(found, order, texts if body.return_text else None)
    return meter.stamp(json_response(b"[" + inside + b"]"), size, answer)


async def answer_predict(meter: Meter, body: PredictRequest) -> Response:
    """The answer to one /predict body, from wherever it came."""
    embedder = meter.service.find(body.model, "classify")
    inputs = _read_inputs(body.inputs)
    meter.accept(embedder, inputs)
    options = ScoreOptions(truncate=body.truncate, truncation_side=SIDES[body.truncation_direction])
    answer = await embedder.score(inputs.items, options)
    with encoding_time():
        inside = await json_predictions(answer, embedder.spec, body.raw_scores, _descending)
    response = json_response(inside if inputs.method == "single" else b"[" + inside + b"]")
    return meter.stamp(response, inputs, answer)


def _read_inputs(raw: str | list[str | list[str]]) -> RequestTexts:
    """The forms that PredictRequest lists."""
    if isinstance(raw, str):
        return read_texts([[raw]], "inputs", "single")
    if not raw:
        raise empty("inputs")
    flat = [item for item in raw if isinstance(item, str)]
    if len(flat) == len(raw):
        return read_texts([flat], "inputs", "single")
    groups = []
    for i, item in enumerate(raw):
        if isinstance(item, str):
            raise mixed("inputs", i, "a list of one or two texts", item)
        groups.append(item)
    return read_texts(groups, "inputs", "batch")


async def _ranks(found: np.ndarray, order: Sequence[int], texts: Sequence[str] | None) -> bytes:
    """The inside of /rerank's list."""

    def items(start: int, stop: int) -> list[dict]:
        if texts is None:
            return [{"index": i, "score": found[i]} for i in order[start:stop]]
        return [{"index": i, "text": texts[i], "score": found[i]} for i in order[start:stop]]

    return await json_items(len(order), object_width(texts or ()), items)


def _descending(logits: np.ndarray) -> np.ndarray:
    """Indices from the highest to the lowest; of equal ones the last first, as in TEI."""
    return np.argsort(logits, kind="stable")[::-1]
