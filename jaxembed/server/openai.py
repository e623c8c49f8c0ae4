"""POST /v1/embeddings as OpenAI defines it. Knows JSON and the Embedder; no tokens, no devices.

A request becomes `Input`s, the Embedder turns those into vectors, and these become the answer.
"""

from typing import Literal

import msgspec
import numpy as np
from quart import Blueprint, Response

from jaxembed.options import Embeddings, EncodeOptions
from jaxembed.postprocess import to_base64
from jaxembed.server.body import AnyPriority, InputUnion, priority_of, read_body_as, read_inputs
from jaxembed.server.encoding import (
    json_answer,
    json_items,
    json_stream,
    octet_response,
    wants_octets,
)
from jaxembed.server.meter import current_meter
from jaxembed.server.unsupported import ModelRequest, agreed
from jaxembed.server.usage import Usage, usage_of

blueprint = Blueprint("openai", __name__)

Format = Literal["float", "base64"]


class EmbeddingsRequest(ModelRequest, kw_only=True):
    """OpenAI's fields, `truncate`, `prompt_name`, `normalize` and `priority`; and what Voyage, Jina
    and LiteLLM call three of these: `truncation`, `normalized`, `output_dimension`."""

    input: InputUnion
    model: str | None = None
    encoding_format: Format | None = None
    dimensions: int | None = None
    output_dimension: int | None = None
    user: str | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    normalized: bool | None = None
    priority: AnyPriority | None = None


class EmbeddingObject(msgspec.Struct):
    """One vector: a list of floats, or base64 of little-endian float32."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class EmbeddingsResponse(msgspec.Struct):
    """The embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: Usage


@blueprint.post("/v1/embeddings")
@blueprint.post("/embeddings")
async def embeddings() -> Response:
    """The whole way of a request, from JSON to vectors and back."""
    with current_meter() as meter:
        body = await read_body_as(EmbeddingsRequest)
        embedder = meter.find(body.model, "embed")
        inputs = read_inputs(body.input, field="input")
        meter.accept(inputs)
        answer = await embedder.answer(inputs.items, options(body))
        with meter.time("encode"):
            response = await respond(answer, body.encoding_format, meter.served_name)
        return meter.stamp(response, answer)


def options(body: EmbeddingsRequest) -> EncodeOptions:
    """What to ask of the Embedder. This route normalises unless asked not to, as OpenAI does."""
    return EncodeOptions(
        prompt_name=body.prompt_name,
        truncate=agreed(body, "truncate", "truncation"),
        dimensions=agreed(body, "dimensions", "output_dimension", unset=(None, 0)),
        normalize=agreed(body, "normalize", "normalized") is not False,
        priority=priority_of(body.priority),
    )


async def respond(answer: Embeddings, encoding_format: Format | None, model: str) -> Response:
    """The vectors in the form asked for."""
    if wants_octets():
        return octet_response(answer.dense)
    vector = to_base64 if encoding_format == "base64" else _as_is

    def items(start: int, stop: int) -> list[dict]:
        return [
            {"object": "embedding", "embedding": vector(answer.dense[i]), "index": i}
            for i in range(start, stop)
        ]

    count, width = answer.dense.shape
    data, rest = json_items(count, width, items), {"model": model, "usage": usage_of(answer)}
    return await json_stream(json_answer("data", data, rest, first=b'{"object":"list",'))


def _as_is(row: np.ndarray) -> np.ndarray:
    return row
