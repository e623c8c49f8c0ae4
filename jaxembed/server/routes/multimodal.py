"""POST /v1/multimodalembeddings in the words of Voyage: inputs of parts, each a text or an image.
Knows JSON and no tokens."""

from dataclasses import replace
from typing import Literal

import msgspec
from quart import Blueprint, Response

from jaxembed.data.spec import IMAGE_ROUTE
from jaxembed.preprocessing.images.decode import ImageFacts
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import Embeddings, EncodeOptions
from jaxembed.server.http.encoding import json_answer, json_items, json_stream
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import embed_inputs, encode_answer
from jaxembed.server.pipeline.body import AnyPriority, RequestInputs, read_body_as, read_sources
from jaxembed.server.pipeline.media import Content, facts_of_images, only_part
from jaxembed.server.pipeline.vectors import VectorsRequest, asked_dtype
from jaxembed.server.routes import openai

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
    encoding_format: openai.Format | None = None  # what Voyage's own clients send
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
        request = openai.EmbeddingsRequest(
            input=[],
            model=body.model,
            encoding_format=body.output_encoding or body.encoding_format,
            output_dimension=body.output_dimension,
            output_dtype=asked_dtype(body),
            truncation=body.truncation,
            prompt_name=body.prompt_name,
            input_type=body.input_type,
            normalize=body.normalize,
            priority=body.priority,
        )

        def read() -> RequestInputs:
            places = (f"inputs[{k}].content" for k in range(len(body.inputs)))
            sources = map(only_part, (one.content for one in body.inputs), places)
            return read_sources(list(sources), "inputs")

        def options(loaded: LoadedModel) -> EncodeOptions:
            # the answer has no place for other outputs
            return replace(openai.options(request, loaded), outputs=frozenset({"dense"}))

        answer = await embed_inputs(meter, body.model, read, options)
        return await encode_answer(meter, answer, lambda: _respond(meter, request, answer))


async def _respond(meter: Meter, request: openai.EmbeddingsRequest, answer: Embeddings) -> Response:
    vector, dense = openai.vector_encoder(request), answer.dense

    def items(start: int, stop: int) -> list[dict]:
        return [
            {"object": "embedding", "embedding": vector(dense[i]), "index": i}
            for i in range(start, stop)
        ]

    data = json_items(len(dense), dense.shape[1], items)
    usage = _usage(meter, answer, await facts_of_images(meter.images))
    rest = {"model": meter.served_name, "usage": usage}
    response = await json_stream(json_answer({"data": data}, rest, first=b'{"object":"list",'))
    return openai.with_prompt(response, request, meter.loaded.spec)


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
