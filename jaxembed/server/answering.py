"""The steps of every request that a model runs, once: find the model, accept the request, run it,
encode the answer. Knows no dialect."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from quart import Response

from jaxembed.embedder import Embedder
from jaxembed.options import Embeddings, EncodeOptions, ScoreOptions, Scores
from jaxembed.server.body import RequestInputs, RequestTexts, check_batch
from jaxembed.server.meter import Meter, RequestSize
from jaxembed.spec import ModelSpec, Task

Size = TypeVar("Size", bound=RequestSize)


async def embed_inputs(
    meter: Meter,
    model: str | None,
    read: Callable[[], RequestInputs],
    options: Callable[[ModelSpec], EncodeOptions],
) -> Embeddings:
    """The vectors of a request to embed. `read` and `options` are called once the model is known:
    they raise what is wrong with the body."""
    embedder, inputs = _accept(meter, model, "embed", read)
    return await embedder.answer(inputs.items, options(embedder.spec), meter.held)


async def score_inputs(
    meter: Meter,
    model: str | None,
    read: Callable[[], RequestTexts],
    options: Callable[[], ScoreOptions],
) -> Scores:
    """The logits of a request to classify, with `read` and `options` as in `embed_inputs`."""
    embedder, inputs = _accept(meter, model, "classify", read)
    return await embedder.score(inputs.items, options(), meter.held)


async def score_documents(
    meter: Meter,
    model: str | None,
    query: str,
    documents: Sequence[str],
    options: ScoreOptions,
    *,
    field: str,
) -> Scores:
    """The logits of a request to rerank, whose documents came in `field`."""

    def read() -> RequestSize:
        check_batch(len(documents))
        # the query counts once for each document, as in TEI
        characters = len(query) * len(documents) + sum(map(len, documents))
        return RequestSize("batch", characters, field)

    embedder, _ = _accept(meter, model, "rerank", read)
    return await embedder.score_documents(query, documents, options, meter.held)


async def encode_answer(
    meter: Meter, answer: Embeddings | Scores, encode: Callable[[], Awaitable[Response]]
) -> Response:
    """The response that `encode` makes of the answer, timed, counted and stamped."""
    with meter.time("encode"):
        response = await encode()
    return meter.stamp(response, answer)


def _accept(
    meter: Meter, model: str | None, task: Task, read: Callable[[], Size]
) -> tuple[Embedder, Size]:
    """The model, and what `read` gives, counted as accepted by this model."""
    embedder = meter.find(model, task)
    inputs = read()
    meter.accept(inputs)
    return embedder, inputs
