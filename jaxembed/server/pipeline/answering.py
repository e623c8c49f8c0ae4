"""Runs a request on the model that `Meter.find` has found, and counts the request as accepted.

A route for embeddings calls `accept`, which resolves what the request asks for into an Intent, and
then `embed_inputs`. Afterwards `Meter.answer` times and counts the response.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import msgspec
import numpy as np
from msgspec.structs import replace

from jaxembed.data.inputs import Content, Input, Text
from jaxembed.errors import InvalidChunk, InvalidInput
from jaxembed.runtime.options import (
    Embeddings,
    EncodeOptions,
    RequestedOptions,
    ScoreOptions,
    Scores,
    TokenScores,
)
from jaxembed.runtime.requests import Answer, AnyRequest
from jaxembed.runtime.similarity import compare_first, compare_outputs
from jaxembed.runtime.tasks import Intent
from jaxembed.server.meter import Meter
from jaxembed.server.pipeline.body import (
    RequestChunks,
    RequestInputs,
    RequestTexts,
    Source,
    as_input,
    characters_of,
    check_batch,
    image_files,
    read_images,
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
    has_images = isinstance(inputs, RequestInputs) and inputs.has_images
    return meter.loaded.tasks.intent(requested, with_images=has_images)


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
    has_roles = spec.interaction is not None or spec.reads_pages
    is_symmetric = len(loaded.text_routes) == 1 and not has_roles
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
    query: Source,
    documents: Sequence[Source],
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
    # TEI counts the query once per document
    characters = characters_of(query) * len(documents) + sum(map(characters_of, documents))
    inputs = RequestInputs("batch", characters, field, list(map(as_input, documents)))
    of_query = RequestInputs("single", 0, "query", [as_input(query)])
    meter.accept(inputs)
    options = replace(options, adapter=meter.adapter)
    tasks = meter.loaded.tasks
    if inputs.has_images or of_query.has_images:
        tasks.check_images()
    together = RequestInputs("batch", 0, field, [*of_query.items, *inputs.items])
    try:  # the limits of a request hold for all of its images
        asked, *contents = _contents(await _read_images(meter, together))
    except InvalidInput as error:
        if error.index is None:
            raise
        about, index = (inputs, error.index - 1) if error.index else (of_query, 0)
        raise error.at(index=None, field=about.place(index, error.part)) from error
    if meter.loaded.spec.task != "embed":
        with _about(of_query, only="query"):
            return await _answer(meter, tasks.rerank(asked, contents, options))
    with _about(of_query, only="query"):
        query_request, documents_request, weights = tasks.compare(asked, contents, options)
    with _about(of_query):
        query_answer = await _answer(meter, query_request)
    answer = await _answer(meter, documents_request)
    runner = meter.loaded.runner
    return await runner.off_loop(compare_outputs, query_answer, answer, weights, contents)


@contextmanager
def _about(inputs: RequestInputs, only: str | None = None) -> Iterator[None]:
    """Let errors of the `with` block that name no field, or only those with the field `only`, name
    the single one of the `inputs`, or its refused part."""
    try:
        yield
    except InvalidInput as error:
        if error.field != only:
            raise
        raise error.at(index=None, field=inputs.place(0, error.part)) from error


def _contents(items: Sequence[Input]) -> list[Content]:
    return [item.text if isinstance(item, Text) else cast(Content, item) for item in items]


async def _answer(meter: Meter, request: AnyRequest[Answer]) -> Answer:
    """Run a request on the model that the meter has leased, and return the answer."""
    meter.route = request.route
    return await meter.loaded.answer(request, meter.reservation)


async def _read_images(meter: Meter, inputs: RequestInputs) -> Sequence[Input]:
    """Return the inputs with the bytes of their images, and keep these bytes in the meter."""
    if not inputs.has_images:
        return cast(Sequence[Input], inputs.items)
    items = await read_images(inputs.items, meter.reservation)
    meter.images = [*meter.images, *image_files(items)]
    return items
