"""The steps of every request that a model runs, after `Meter.find` has found the model: accept the
inputs and work out what is meant, and run it. `Meter.answer` times and counts the response."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec
import numpy as np

from jaxembed.data.inputs import Image, Input, Text
from jaxembed.errors import InvalidChunk, InvalidInput
from jaxembed.runtime.options import Asked, Embeddings, EncodeOptions, ScoreOptions, Scores
from jaxembed.runtime.requests import Answer, Request
from jaxembed.runtime.similarity import compare_first, compare_outputs
from jaxembed.runtime.tasks import Intent
from jaxembed.server.meter import Meter
from jaxembed.server.pipeline.body import (
    ImageSource,
    RequestChunks,
    RequestInputs,
    RequestTexts,
    check_batch,
    read_images,
    text_or_image,
)


class Usage(msgspec.Struct):
    """Tokens really run: after truncation, special tokens and prompt included."""

    prompt_tokens: int
    total_tokens: int


def usage_of(answer: Embeddings | Scores) -> dict[str, int]:
    """The fields of Usage."""
    tokens = int(answer.num_tokens.sum())
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def accept(meter: Meter, inputs: RequestInputs | RequestChunks, asked: Asked) -> Intent:
    """Count the request as accepted by the model, and work out what is asked of it."""
    meter.accept(inputs)
    if meter.adapter is not None:
        asked = replace(asked, options=replace(asked.options, adapter=meter.adapter))
    return meter.loaded.tasks.intent(asked, with_images=ImageSource in map(type, inputs.items))


async def embed_inputs(
    meter: Meter, inputs: RequestInputs | RequestChunks, intent: Intent
) -> Embeddings:
    """The outputs of each input, or the vectors of the chunks of texts. An error of a chunk names
    its place in the body."""
    if isinstance(inputs, RequestChunks):
        try:
            return await _answer(meter, meter.loaded.tasks.request_chunks(inputs.items, intent))
        except InvalidChunk as error:
            raise error.at(None, inputs.chunk_place(error.index or 0, error.chunk)) from error
    items = inputs.items
    if ImageSource in map(type, items):
        items = await _read_images(meter, inputs)
    return await _answer(meter, meter.loaded.tasks.request(cast(Sequence[Input], items), intent))


async def compare_texts(
    meter: Meter, inputs: RequestInputs, options: EncodeOptions
) -> tuple[Embeddings, np.ndarray]:
    """The outputs of a text, the first input, and of those to compare with it, and how similar it
    is to each of them. Of a model with several routes, or one that treats queries and documents
    differently, the first is a query and the others are documents, unless a prompt is named."""
    meter.accept(inputs)
    loaded = meter.loaded
    tasks, spec = loaded.tasks, loaded.spec
    output = spec.representations[0]
    options = replace(options, outputs=frozenset({output}), adapter=meter.adapter)
    items = cast(Sequence[Input], inputs.items)
    is_symmetric = len(loaded.text_routes) == 1 and spec.interaction is None and spec.image is None
    if is_symmetric or options.prompt_name is not None:
        answer = await _answer(meter, tasks.embed(items, options))
    else:
        query = tasks.embed(items[:1], tasks.for_role("query", options))
        documents = tasks.embed(items[1:], tasks.for_role("document", options))
        first = await _answer(meter, query)
        try:
            answer = Embeddings.joined([first, await _answer(meter, documents)])
        except InvalidInput as error:
            raise error.at(1 + (error.index or 0)) from error
    if output == "dense":
        return answer, compare_first(answer)
    # Other outputs take milliseconds, in which the event loop would stand still.
    return answer, await loaded.runner.off_loop(compare_first, answer)


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
    """The logits of a query and each of the documents, which came in `field`; of an embedding model
    their similarities, by the outputs of both."""
    check_batch(len(documents))
    characters = len(query) * len(documents)  # the query counts for each of them, as in TEI
    characters += sum(len(one) for one in documents if isinstance(one, str))
    inputs = RequestInputs("batch", characters, field, list(map(text_or_image, documents)))
    meter.accept(inputs)
    options = replace(options, adapter=meter.adapter)
    tasks, items = meter.loaded.tasks, inputs.items
    if ImageSource in map(type, documents):
        tasks.check_images()
        items = await _read_images(meter, inputs)
    given = [one.text if isinstance(one, Text) else cast(Image, one) for one in items]
    if meter.loaded.spec.task != "embed":
        return await _answer(meter, tasks.rerank(query, given, options))
    of_query, of_documents, weights = tasks.compare(query, given, options)
    try:
        first = await _answer(meter, of_query)
    except InvalidInput as error:
        raise error.at(None, error.field or "query") from error
    try:
        others = await _answer(meter, of_documents)
    except InvalidInput as error:
        raise error.at(error.index, error.field or field) from error
    runner = meter.loaded.runner
    return await runner.off_loop(compare_outputs, first, others, weights, given)


async def _answer(meter: Meter, request: Request[Answer]) -> Answer:
    """What the model found answers, on the route of the request."""
    meter.route = request.route
    return await meter.loaded.answer(request, meter.held)


async def _read_images(meter: Meter, inputs: RequestInputs) -> Sequence[Input]:
    """The inputs, with the bytes of their images."""
    items = await read_images(inputs.items, meter.held)
    meter.images = [item.data for item in items if isinstance(item, Image)]
    return items
