"""POST /v1/multimodalembeddings in the words of Voyage: inputs of parts, each a text or an image.
Knows JSON and no tokens."""

from typing import Literal

import msgspec
from quart import Blueprint, Response

from jaxembed.data.spec import IMAGE_ROUTE
from jaxembed.preprocessing.images.decode import ImageFacts
from jaxembed.runtime.options import Asked, Embeddings, EncodeOptions
from jaxembed.runtime.tasks import Intent
from jaxembed.server.http.encoding import json_list_response
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import accept, embed_inputs, encode_answer
from jaxembed.server.pipeline.body import (
    AnyPriority,
    RequestInputs,
    priority_of,
    read_body_as,
    read_sources,
)
from jaxembed.server.pipeline.media import Content, facts_of_images, only_part
from jaxembed.server.pipeline.representations import DENSE
from jaxembed.server.pipeline.vectors import (
    Format,
    VectorsRequest,
    asked_dtype,
    purposes_of,
    with_choices,
)
from jaxembed.server.routes.openai import vector_encoder
from jaxembed.server.service import current_service

blueprint = Blueprint("multimodal", __name__)


class MultimodalRequest(VectorsRequest, kw_only=True):
    """Voyage's fields, and `prompt_name`, `normalize` and `priority` as at /v1/embeddings. An input
    is one image, or texts, which are lines of one."""

    inputs: list[Content]
    model: str | None = None
    input_type: str | None = None
    truncation: bool | None = None
    output_dimension: int | None = None
    output_encoding: Literal["base64"] | None = None
    encoding_format: Format | None = None  # what Voyage's own clients send
    prompt_name: str | None = None
    normalize: bool | None = None
    priority: AnyPriority | None = None


class MultimodalUsage(msgspec.Struct):
    """The tokens of texts that were really run, and the pixels of the images as they came."""

    text_tokens: int
    image_pixels: int
    video_pixels: int
    total_tokens: int


class MultimodalObject(msgspec.Struct):
    """The vector of an input: numbers, or base64 of their little-endian bytes."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class MultimodalResponse(msgspec.Struct):
    """The embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[MultimodalObject]
    model: str
    usage: MultimodalUsage


@blueprint.post("/v1/multimodalembeddings")
async def embed_multimodal() -> Response:
    """Answer with one vector per input."""
    with current_meter() as meter:
        body = await read_body_as(MultimodalRequest)
        dtype, field = asked_dtype(body), "output_dimension"
        await meter.find(body.model, "embed", DENSE)
        inputs = _read(body)
        options = EncodeOptions(  # the answer has no place for other outputs
            prompt_name=body.prompt_name,
            truncate=body.truncation,
            dimensions=body.output_dimension or None,
            normalize=body.normalize is not False,
            priority=priority_of(body.priority),
            bare_ids=current_service().config.accept_bare_token_ids,
        )
        asked = Asked(options, purposes_of(body), dtype=dtype, dimensions_field=field)
        intent = accept(meter, inputs, asked)
        answer = await embed_inputs(meter, inputs, intent)
        return await encode_answer(meter, answer, lambda: _respond(meter, body, intent, answer))


def _read(body: MultimodalRequest) -> RequestInputs:
    """The inputs of a body."""
    places = (f"inputs[{k}].content" for k in range(len(body.inputs)))
    sources = map(only_part, (one.content for one in body.inputs), places)
    return read_sources(list(sources), "inputs")


async def _respond(
    meter: Meter, body: MultimodalRequest, intent: Intent, answer: Embeddings
) -> Response:
    vector, dense = vector_encoder(body.output_encoding or body.encoding_format), answer.dense

    def items(start: int, stop: int) -> list[dict]:
        return [
            {"object": "embedding", "embedding": vector(dense[i]), "index": i}
            for i in range(start, stop)
        ]

    usage = _usage(meter, answer, await facts_of_images(meter.images))
    rest = {"model": meter.served_name, "usage": usage}
    response = await json_list_response(len(dense), dense.shape[1], items, rest)
    return with_choices(response, intent)


def _usage(meter: Meter, answer: Embeddings, facts: list[ImageFacts]) -> dict[str, int]:
    """The fields of MultimodalUsage."""
    total = int(answer.num_tokens.sum())
    image = meter.loaded.engines.get(IMAGE_ROUTE)
    of_images = 0 if image is None else len(facts) * image.spec.max_input_tokens
    return {
        "text_tokens": total - of_images,
        "image_pixels": sum(one.width * one.height for one in facts),
        "video_pixels": 0,
        "total_tokens": total,
    }
