"""The steps of every request that a model runs, once: find the model, accept the request, run it,
encode the answer. Knows no dialect."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
from quart import Response

from jaxembed.data.inputs import Image, Input, Text
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import Task
from jaxembed.errors import InvalidChunk, InvalidInput
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import Embeddings, EncodeOptions, ScoreOptions, Scores
from jaxembed.runtime.requests import Answer, Request
from jaxembed.runtime.similarity import compare_first, compare_outputs
from jaxembed.server.meter import Meter, RequestSize
from jaxembed.server.pipeline.body import RequestInputs, RequestTexts, check_batch
from jaxembed.server.pipeline.late import RequestChunks
from jaxembed.server.pipeline.media import ImageSource, read_images, text_or_image

Size = TypeVar("Size", bound=RequestSize)
Options = TypeVar("Options", EncodeOptions, ScoreOptions)

DENSE: frozenset[OutputName] = frozenset({"dense"})


async def embed_inputs(
    meter: Meter,
    model: str | None,
    read: Callable[[], RequestInputs],
    options: Callable[[LoadedModel], EncodeOptions],
    *,
    outputs: Collection[OutputName] = DENSE,
) -> Embeddings:
    """The vectors of a request to embed. `read` and `options` are called once the model is known:
    they raise what is wrong with the body. Where the body names no model, one that gives these
    outputs is preferred."""
    loaded, inputs = await _accept(meter, model, "embed", read, outputs)
    asked = _adapted(meter, options(loaded))
    if any(isinstance(item, ImageSource) for item in inputs.items):
        loaded.tasks.check_images()
    items = await read_images(inputs.items, meter.held)
    meter.images = [item.data for item in items if isinstance(item, Image)]
    return await _answer(meter, loaded.tasks.embed(items, asked))


async def embed_chunks(
    meter: Meter,
    model: str | None,
    read: Callable[[], RequestChunks],
    options: Callable[[LoadedModel], EncodeOptions],
) -> Embeddings:
    """The vectors of the chunks of a request's texts, with `read` and `options` as in
    `embed_inputs`. An error of a chunk names its place in the body."""
    loaded, texts = await _accept(meter, model, "embed", read, DENSE)
    request = loaded.tasks.embed_chunks(texts.items, _adapted(meter, options(loaded)))
    try:
        return await _answer(meter, request)
    except InvalidChunk as error:
        error.field, error.index = texts.chunk_place(error.index or 0, error.chunk), None
        raise


async def compare_texts(
    meter: Meter,
    model: str | None,
    read: Callable[[], RequestInputs],
    options: EncodeOptions,
) -> tuple[Embeddings, np.ndarray]:
    """The outputs of a text, the first input, and of those to compare with it, and how similar it
    is to each of them."""
    loaded, inputs = await _accept(meter, model, "embed", read)
    output = loaded.spec.representations[0]
    options = replace(_adapted(meter, options), outputs=frozenset({output}))
    items = await read_images(inputs.items, meter.held)
    answer = await _embed_to_compare(meter, items, options)
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
    is_symmetric = len(loaded.routes) == 1 and spec.interaction is None and spec.image is None
    if is_symmetric or options.prompt_name is not None:
        return await _answer(meter, tasks.embed(inputs, options))
    query = tasks.embed(inputs[:1], tasks.for_role("query", options))
    documents = tasks.embed(inputs[1:], tasks.for_role("document", options))
    first = await _answer(meter, query)
    try:
        return Embeddings.joined([first, await _answer(meter, documents)])
    except InvalidInput as error:
        error.index = 1 + (error.index or 0)
        raise


async def score_inputs(
    meter: Meter,
    model: str | None,
    read: Callable[[], RequestTexts],
    options: Callable[[], ScoreOptions],
) -> Scores:
    """The logits of a request to classify, with `read` and `options` as in `embed_inputs`."""
    loaded, inputs = await _accept(meter, model, "classify", read)
    request = loaded.tasks.score(inputs.items, _adapted(meter, options()))
    return await _answer(meter, request)


async def score_documents(
    meter: Meter,
    model: str | None,
    query: str,
    documents: Sequence[str | ImageSource],
    options: ScoreOptions,
    *,
    field: str,
) -> Scores:
    """The logits of a request to rerank, whose documents came in `field`."""

    def read() -> RequestInputs:
        check_batch(len(documents))
        # the query counts once for each document, as in TEI
        characters = len(query) * len(documents)
        characters += sum(len(one) for one in documents if isinstance(one, str))
        return RequestInputs("batch", characters, field, list(map(text_or_image, documents)))

    loaded, inputs = await _accept(meter, model, "rerank", read)
    options = _adapted(meter, options)
    if any(isinstance(one, ImageSource) for one in documents):
        loaded.tasks.check_images()
    items = await read_images(inputs.items, meter.held)
    given = [one.text if isinstance(one, Text) else cast(Image, one) for one in items]
    if loaded.spec.task == "embed":
        return await _compare(meter, query, given, options, field)
    return await _answer(meter, loaded.tasks.rerank(query, given, options))


async def _compare(
    meter: Meter, query: str, documents: Sequence[str | Image], options: ScoreOptions, field: str
) -> Scores:
    """The similarities of documents and a query, by the outputs of both."""
    of_query, of_documents, weights = meter.loaded.tasks.compare(query, documents, options)
    try:
        first = await _answer(meter, of_query)
    except InvalidInput as error:
        error.field, error.index = error.field or "query", None
        raise
    try:
        others = await _answer(meter, of_documents)
    except InvalidInput as error:
        error.field = error.field or field
        raise
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


def _adapted(meter: Meter, options: Options) -> Options:
    """The options with the adapter that the body's `model` names."""
    return options if meter.adapter is None else replace(options, adapter=meter.adapter)


async def _accept(
    meter: Meter,
    model: str | None,
    task: Task,
    read: Callable[[], Size],
    outputs: Collection[OutputName] = (),
) -> tuple[LoadedModel, Size]:
    """The model, and what `read` gives, counted as accepted by this model."""
    loaded = await meter.find(model, task, outputs)
    inputs = read()
    meter.accept(inputs)
    return loaded, inputs
