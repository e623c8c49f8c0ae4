"""The steps of every request that a model runs, after `Meter.find` has found the model: accept the
inputs and work out what is meant, run it, encode the answer."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from quart import Response

from jaxembed.data.inputs import Image, Input, Text
from jaxembed.errors import InvalidChunk, InvalidInput
from jaxembed.runtime.options import Asked, Embeddings, EncodeOptions, ScoreOptions, Scores
from jaxembed.runtime.requests import Answer, Request
from jaxembed.runtime.similarity import compare_first, compare_outputs
from jaxembed.runtime.tasks import Intent
from jaxembed.server.meter import Meter
from jaxembed.server.pipeline.body import RequestInputs, RequestTexts, read_documents
from jaxembed.server.pipeline.late import RequestChunks
from jaxembed.server.pipeline.media import ImageSource, read_images


def accept(meter: Meter, inputs: RequestInputs | RequestChunks, asked: Asked) -> Intent:
    """Count the request as accepted by the model, and work out what is asked of it."""
    meter.accept(inputs)
    if meter.adapter is not None:
        asked = replace(asked, options=replace(asked.options, adapter=meter.adapter))
    return meter.loaded.tasks.intent(asked, with_images=ImageSource in map(type, inputs.items))


async def embed_inputs(meter: Meter, inputs: RequestInputs, intent: Intent) -> Embeddings:
    """The outputs of each input."""
    items = await _read_images(meter, inputs)
    return await _answer(meter, meter.loaded.tasks.request(items, intent))


async def embed_chunks(meter: Meter, texts: RequestChunks, intent: Intent) -> Embeddings:
    """The vectors of the chunks of texts. An error of a chunk names its place in the body."""
    try:
        return await _answer(meter, meter.loaded.tasks.request_chunks(texts.items, intent))
    except InvalidChunk as error:
        raise error.at(None, texts.chunk_place(error.index or 0, error.chunk)) from error


async def compare_texts(
    meter: Meter, inputs: RequestInputs, options: EncodeOptions
) -> tuple[Embeddings, np.ndarray]:
    """The outputs of a text, the first input, and of those to compare with it, and how similar it
    is to each of them."""
    meter.accept(inputs)
    loaded = meter.loaded
    output = loaded.spec.representations[0]
    options = replace(options, outputs=frozenset({output}), adapter=meter.adapter)
    answer = await _embed_to_compare(meter, await _read_images(meter, inputs), options)
    if output == "dense":
        return answer, compare_first(answer)
    # Other outputs take milliseconds, in which the event loop would stand still.
    return answer, await loaded.runner.off_loop(compare_first, answer)


async def _embed_to_compare(
    meter: Meter, inputs: Sequence[Input], options: EncodeOptions
) -> Embeddings:
    """The outputs of all inputs. Of a model with several routes, or one that treats queries and
    documents differently, the first is a query and the others are documents, unless a prompt is
    named."""
    loaded = meter.loaded
    tasks, spec = loaded.tasks, loaded.spec
    is_symmetric = len(loaded.text_routes) == 1 and spec.interaction is None and spec.image is None
    if is_symmetric or options.prompt_name is not None:
        return await _answer(meter, tasks.embed(inputs, options))
    query = tasks.embed(inputs[:1], tasks.for_role("query", options))
    documents = tasks.embed(inputs[1:], tasks.for_role("document", options))
    first = await _answer(meter, query)
    try:
        return Embeddings.joined([first, await _answer(meter, documents)])
    except InvalidInput as error:
        raise error.at(1 + (error.index or 0)) from error


async def score_inputs(meter: Meter, inputs: RequestTexts, options: ScoreOptions) -> Scores:
    """The logits of texts and pairs to classify."""
    meter.accept(inputs)
    options = replace(options, adapter=meter.adapter)
    return await _answer(meter, meter.loaded.tasks.score(inputs.items, options))


async def score_documents(
    meter: Meter,
    query: str,
    documents: Sequence[str | ImageSource],
    options: ScoreOptions,
    *,
    field: str,
) -> Scores:
    """The logits of a query and each of the documents, which came in `field`."""
    inputs = read_documents(query, documents, field)
    meter.accept(inputs)
    options = replace(options, adapter=meter.adapter)
    if ImageSource in map(type, documents):
        meter.loaded.tasks.check_images()
    items = await _read_images(meter, inputs)
    given = [one.text if isinstance(one, Text) else cast(Image, one) for one in items]
    if meter.loaded.spec.task == "embed":
        return await _compare(meter, query, given, options, field)
    return await _answer(meter, meter.loaded.tasks.rerank(query, given, options))


async def _compare(
    meter: Meter, query: str, documents: Sequence[str | Image], options: ScoreOptions, field: str
) -> Scores:
    """The similarities of documents and a query, by the outputs of both."""
    of_query, of_documents, weights = meter.loaded.tasks.compare(query, documents, options)
    try:
        first = await _answer(meter, of_query)
    except InvalidInput as error:
        raise error.at(None, error.field or "query") from error
    try:
        others = await _answer(meter, of_documents)
    except InvalidInput as error:
        raise error.at(error.index, error.field or field) from error
    runner = meter.loaded.runner
    return await runner.off_loop(compare_outputs, first, others, weights, documents)


async def encode_answer(
    meter: Meter, answer: Embeddings | Scores, encode: Callable[[], Awaitable[Response]]
) -> Response:
    """The response that `encode` makes of the answer, timed, counted and stamped."""
    with meter.time("encode"):
        response = await encode()
    return meter.stamp(response, answer)


async def _answer(meter: Meter, request: Request[Answer]) -> Answer:
    """What the model found answers, on the route of the request."""
    meter.route = request.route
    return await meter.loaded.answer(request, meter.held)


async def _read_images(meter: Meter, inputs: RequestInputs) -> Sequence[Input]:
    """The inputs, with the bytes of their images."""
    if ImageSource not in map(type, inputs.items):
        return cast(Sequence[Input], inputs.items)
    items = await read_images(inputs.items, meter.held)
    meter.images = [item.data for item in items if isinstance(item, Image)]
    return items
