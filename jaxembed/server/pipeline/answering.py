"""Runs a request on the model that `Meter.find` has found, and counts the request as accepted.

A route for embeddings calls `accept`, which resolves what the request asks for into an Intent, and
then `embed_inputs`. Afterwards `Meter.answer` times and counts the response.
"""

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
from msgspec.structs import replace

from jaxembed.data.inputs import Image, Input, Text
from jaxembed.errors import InvalidChunk, InvalidInput
from jaxembed.runtime.options import (
    Embeddings,
    EncodeOptions,
    RequestedOptions,
    ScoreOptions,
    Scores,
    TokenScores,
)
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
    """The number of tokens that the model ran, after truncation, special tokens and prompts
    included."""

    prompt_tokens: int
    total_tokens: int


def usage_of(answer: Embeddings | Scores) -> dict[str, int]:
    """Return the fields of Usage for an answer."""
    tokens = answer.total_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def accept(
    meter: Meter, inputs: RequestInputs | RequestChunks, requested: RequestedOptions
) -> Intent:
    """Record the size of a request for embeddings, count the request as accepted, and return what
    it asks for, resolved for its model. Raises WrongTask and InvalidInput."""
    meter.accept(inputs)
    if meter.adapter is not None:
        requested = replace(requested, options=replace(requested.options, adapter=meter.adapter))
    return meter.loaded.tasks.intent(requested, with_images=ImageSource in map(type, inputs.items))


async def embed_inputs(
    meter: Meter, inputs: RequestInputs | RequestChunks, intent: Intent
) -> Embeddings:
    """Return the embeddings of each input, or of each chunk of the texts. `intent` is what `accept`
    has returned. Raises the errors of `Dispatcher.answer`. The `field` of an InvalidChunk is the
    path of the chunk in the body."""
    if isinstance(inputs, RequestChunks):
        try:
            return await _answer(meter, meter.loaded.tasks.request_chunks(inputs.items, intent))
        except InvalidChunk as error:
            raise error.at(
                index=None, field=inputs.chunk_place(error.index or 0, error.chunk)
            ) from error
    items = inputs.items
    if ImageSource in map(type, items):
        items = await _read_images(meter, inputs)
    return await _answer(meter, meter.loaded.tasks.request(cast(Sequence[Input], items), intent))


async def compare_texts(
    meter: Meter, inputs: RequestInputs, options: EncodeOptions
) -> tuple[Embeddings, np.ndarray]:
    """Embed all inputs, and compare the first input with each of the others.

    Returns the embeddings, and the similarities, float [inputs - 1]. If the model has several
    routes or treats queries and documents differently, the first input is embedded as a query and
    the others as documents. If the options name a prompt, all inputs get that prompt instead.
    """
    meter.accept(inputs)
    loaded = meter.loaded
    tasks, spec = loaded.tasks, loaded.spec
    output = spec.representations[0]
    options = replace(options, outputs=frozenset({output}), adapter=meter.adapter)
    items = cast(Sequence[Input], inputs.items)
    reads_pages = spec.image is not None and output == "multi_vector"
    is_symmetric = len(loaded.text_routes) == 1 and spec.interaction is None and not reads_pages
    if is_symmetric or options.prompt_name is not None:
        answer = await _answer(meter, tasks.embed(items, options))
    else:
        query = tasks.embed(items[:1], tasks.for_role("query", options))
        documents = tasks.embed(items[1:], tasks.for_role("document", options))
        query_answer = await _answer(meter, query)
        try:
            answer = Embeddings.joined([query_answer, await _answer(meter, documents)])
        except InvalidInput as error:
            raise error.at(1 + (error.index or 0)) from error  # input 0 is the query
    if output == "dense":
        return answer, compare_first(answer)
    # Comparing sparse or multi-vector outputs here would block the event loop for milliseconds.
    return answer, await loaded.runner.off_loop(compare_first, answer)


async def score_inputs(meter: Meter, inputs: RequestTexts, options: ScoreOptions) -> Scores:
    """Return the logits of the texts and pairs of a request to classify, for every label."""
    meter.accept(inputs)
    options = replace(options, adapter=meter.adapter)
    return await _answer(meter, meter.loaded.tasks.score(inputs.items, options))


async def score_tokens(meter: Meter, inputs: RequestInputs, options: ScoreOptions) -> TokenScores:
    """Return the logits of each token of the texts of a request, for every label."""
    meter.accept(inputs)
    options = replace(options, adapter=meter.adapter)
    items = cast(Sequence[Input], inputs.items)
    return await _answer(meter, meter.loaded.tasks.score_tokens(items, options))


async def score_documents(
    meter: Meter,
    query: str,
    documents: Sequence[str | ImageSource],
    options: ScoreOptions,
    *,
    field: str,
) -> Scores:
    """Return the logits that a reranker gives the query with each document, or the similarities of
    the embeddings of query and documents if the model is an embedding model.

    `field` is the field of the body that has the documents. Raises WrongTask, InvalidInput, which
    names the refused field, and the errors of `Dispatcher.answer`.
    """
    check_batch(len(documents))
    characters = len(query) * len(documents)  # TEI counts the query once per document
    characters += sum(len(text) for text in documents if isinstance(text, str))
    inputs = RequestInputs("batch", characters, field, list(map(text_or_image, documents)))
    meter.accept(inputs)
    options = replace(options, adapter=meter.adapter)
    tasks, items = meter.loaded.tasks, inputs.items
    if ImageSource in map(type, documents):
        if meter.loaded.spec.task != "embed":
            raise InvalidInput(
                f"`{field}` has images, and {meter.loaded.name} takes texts and no images in "
                "pairs; send texts",
                field=field,
            )
        tasks.check_images()
        items = await _read_images(meter, inputs)
    contents = [item.text if isinstance(item, Text) else cast(Image, item) for item in items]
    if meter.loaded.spec.task != "embed":
        return await _answer(meter, tasks.rerank(query, contents, options))
    query_request, documents_request, weights = tasks.compare(query, contents, options)
    try:
        of_query = await _answer(meter, query_request)
    except InvalidInput as error:
        raise error.at(index=None, field=error.field or "query") from error
    try:
        of_documents = await _answer(meter, documents_request)
    except InvalidInput as error:
        raise error.at(error.index, error.field or field) from error
    runner = meter.loaded.runner
    return await runner.off_loop(compare_outputs, of_query, of_documents, weights, contents)


async def _answer(meter: Meter, request: Request[Answer]) -> Answer:
    """Run a request on the model that the meter has leased, and return the answer."""
    meter.route = request.route
    return await meter.loaded.answer(request, meter.reservation)


async def _read_images(meter: Meter, inputs: RequestInputs) -> Sequence[Input]:
    """Return the inputs with the bytes of their images, and keep these bytes in the meter."""
    items = await read_images(inputs.items, meter.reservation)
    meter.images = [item.data for item in items if isinstance(item, Image)]
    return items
