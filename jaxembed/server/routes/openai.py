"""POST /v1/embeddings as OpenAI defines it. Knows JSON, but no tokens and no devices.

A request is read into `Input`s, a loaded model computes their vectors, and the vectors are encoded
into the response.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from quart import Blueprint, Response

from jaxembed.data.outputs import REPRESENTATIONS
from jaxembed.errors import EmptyInput, InvalidInput
from jaxembed.preprocessing.late import Chunked
from jaxembed.runtime.options import Asked, Embeddings, EncodeOptions
from jaxembed.runtime.postprocess import to_base64
from jaxembed.runtime.tasks import Intent
from jaxembed.server.errors import BadField
from jaxembed.server.http.encoding import (
    OCTETS,
    json_list_response,
    octet_response,
    wants_octets,
)
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import (
    accept,
    embed_chunks,
    embed_inputs,
    encode_answer,
)
from jaxembed.server.pipeline.body import (
    AnyPriority,
    MixedInputs,
    RequestInputs,
    check_listed,
    priority_of,
    read_body_as,
    read_inputs,
)
from jaxembed.server.pipeline.late import (
    WINDOWS,
    ChunksRequest,
    RequestChunks,
    asks_for_chunks,
    read_chunks,
)
from jaxembed.server.pipeline.media import ContentItem, only_part, text_or_image
from jaxembed.server.pipeline.representations import (
    DENSE,
    SparseEmbedding,
    fields_of,
    wanted_outputs,
    width_of,
)
from jaxembed.server.pipeline.unsupported import agreed
from jaxembed.server.pipeline.vectors import Format, asked_dtype, purposes_of, with_choices
from jaxembed.server.routes.common.usage import Usage, usage_of
from jaxembed.server.service import current_service

blueprint = Blueprint("openai", __name__)

SERVED_MODALITIES = (None, "text", "image")  # that `modality` may name


class Message(msgspec.Struct):
    """A message of a chat, whose content is a text, or parts."""

    role: str
    content: str | list[ContentItem]


class EmbeddingsRequest(ChunksRequest, kw_only=True):
    """OpenAI's fields, and `truncate`, `prompt_name`, `normalize`, `priority` and those of
    ChunksRequest.

    `outputs` are some of dense, sparse and multi_vector, of models that give several;
    `return_multivector` is Jina's name of the last. `max_active_dims` keeps so many terms of a
    sparse output; `return_tokens` names them, and the token of each of several vectors.

    Three fields also have the names that Voyage, Jina and LiteLLM use: `truncation` for `truncate`,
    `normalized` for `normalize`, `output_dimension` for `dimensions`. `input_type` (Cohere, Voyage,
    NVIDIA) and `task` (Jina) choose a prompt by the purpose of the texts. Jina's clients may send a
    text or an image as an object. With a `modality` of image (Infinity) each text is the URL of an
    image. vLLM's clients send `messages` in place of `input`: one, which is one input.
    """

    input: MixedInputs | msgspec.UnsetType = msgspec.UNSET
    messages: list[Message] | None = None
    modality: str | None = None
    model: str | None = None
    dimensions: int | None = None
    output_dimension: int | None = None
    user: str | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None
    normalize: bool | None = None
    normalized: bool | None = None
    priority: AnyPriority | None = None
    outputs: list[str] | None = None
    return_multivector: bool | None = None
    max_active_dims: int | None = None
    return_tokens: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modality not in SERVED_MODALITIES:
            raise InvalidInput(
                f"`modality` of {self.modality!r} is not supported; known: text, image",
                field="modality",
            )
        if self.input is not msgspec.UNSET and self.messages:
            raise BadField("`input` and `messages` are both given; send one of them", field="input")
        if self.input is msgspec.UNSET and not self.messages:
            raise BadField("Object missing required field `input` (or `messages`)", field="input")


class EmbeddingObject(msgspec.Struct, omit_defaults=True):
    """The outputs of an input. The vector is a list of numbers, or base64 of their little-endian
    bytes, or null where it was not asked for; so are the vectors to compare token by token, of
    which base64 has the `shape` beside it. `tokens` are theirs, where asked for.

    A chunk with a place also has the index of its input, and where it starts and ends there, in the
    `offset_unit` of the request.
    """

    object: Literal["embedding"]
    embedding: list[float] | str | None
    index: int
    sparse_embedding: SparseEmbedding | msgspec.UnsetType = msgspec.UNSET
    embeddings: list[list[float]] | str | msgspec.UnsetType = msgspec.UNSET
    shape: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET
    tokens: list[str] | msgspec.UnsetType = msgspec.UNSET
    input_index: int | msgspec.UnsetType = msgspec.UNSET
    start: int | msgspec.UnsetType = msgspec.UNSET
    end: int | msgspec.UnsetType = msgspec.UNSET


class EmbeddingsResponse(msgspec.Struct):
    """The embeddings, in the order of the inputs and of the chunks in each."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: Usage


@blueprint.post("/v1/embeddings")
@blueprint.post("/embeddings")
async def embeddings() -> Response:
    """Answer a request for embeddings."""
    with current_meter() as meter:
        return await answer_openai(meter, await read_body_as(EmbeddingsRequest))


async def answer_openai(meter: Meter, body: EmbeddingsRequest) -> Response:
    """The answer to one body: the vectors of the inputs, or of their chunks."""
    in_chunks = asks_for_chunks(body)
    await meter.find(body.model, "embed", DENSE if in_chunks else wanted_outputs(body))
    inputs = _read(body)
    given = read_chunks(body, inputs) if in_chunks else inputs
    intent = accept(meter, given, asked_of(body))
    _check_form(intent)
    if isinstance(given, RequestChunks):
        answer = await embed_chunks(meter, given, intent)
    else:
        answer = await embed_inputs(meter, given, intent)
    return await encode_answer(meter, answer, lambda: respond(meter, body, intent, answer))


def _read(body: EmbeddingsRequest) -> RequestInputs:
    """The inputs of a body."""
    if body.messages:
        return _read_messages(body.messages)
    assert not isinstance(body.input, msgspec.UnsetType)
    return read_inputs(body.input, field="input", are_images=body.modality == "image")


def _check_form(intent: Intent) -> None:
    """Raise InvalidInput for outputs that raw bytes cannot show, if the client accepts these."""
    outputs = intent.options.outputs
    if outputs != DENSE and wants_octets():
        shown = " and ".join(name for name in REPRESENTATIONS if name in outputs)
        raise InvalidInput(
            f"`Accept: {OCTETS}` is for the dense vector alone, and the answer has {shown}; accept "
            "application/json (`encoding_format` of base64 is shorter), or ask /embed_multi for "
            "several vectors",
            field="outputs",
        )


def _read_messages(messages: Sequence[Message]) -> RequestInputs:
    """The input that a message is. Raises InvalidInput for several: a chat has no template here."""
    if len(messages) != 1 or messages[0].role != "user":
        raise InvalidInput(
            "`messages` must be one message of the role `user`, which is one input: texts are not "
            "put into a chat template here",
            field="messages",
        )
    content, place = messages[0].content, "messages[0].content"
    source = content if isinstance(content, str) else only_part(content, place)
    if not source:
        raise EmptyInput(place)
    size = len(source) if isinstance(source, str) else 0
    return RequestInputs("single", size, place, [text_or_image(source)])


def asked_of(body: EmbeddingsRequest) -> Asked:
    """What a body asks for. Vectors are normalised unless it says otherwise, as OpenAI does.

    Raises InvalidInput for fields that contradict each other.
    """
    if body.outputs:
        check_listed("outputs", len(body.outputs))
    return Asked(
        EncodeOptions(
            prompt_name=body.prompt_name,
            max_active_dims=body.max_active_dims,
            truncate=agreed(body, "truncate", "truncation"),
            dimensions=agreed(body, "dimensions", "output_dimension", unset=(None, 0)),
            normalize=agreed(body, "normalize", "normalized") is not False,
            priority=priority_of(body.priority),
            bare_ids=current_service().config.accept_bare_token_ids,
        ),
        purposes=purposes_of(body),
        outputs=tuple(body.outputs or ()),
        multi_vector=bool(body.return_multivector),
        tokens=bool(body.return_tokens),
        dtype=asked_dtype(body),
        dimensions_field="dimensions" if body.dimensions else "output_dimension",
    )


async def respond(
    meter: Meter, body: EmbeddingsRequest, intent: Intent, answer: Embeddings
) -> Response:
    """The response with the vectors as raw bytes or JSON, and the headers of what was chosen."""
    if wants_octets():
        response = octet_response(answer.dense)
    else:
        response = await _json_response(meter, body, answer)
    if answer.chunked is not None:
        response.headers.add(WINDOWS, str(int(answer.chunked.windows.sum())))
    return with_choices(response, intent)


async def _json_response(meter: Meter, body: EmbeddingsRequest, answer: Embeddings) -> Response:
    """The response with the vectors as JSON in the form of EmbeddingsResponse.

    The JSON is encoded in slices, between which other tasks run.
    """
    vector, names = vector_encoder(body.encoding_format), None
    if body.return_tokens:
        names = meter.loaded.tokenized_by(meter.route).term_names
    places = None if body.late_chunking or answer.chunked is None else _places(answer.chunked)

    def items(start: int, stop: int) -> list[dict]:
        found = [
            {
                "object": "embedding",
                **fields_of(answer, i, vector, names),
                "index": i,
            }
            for i in range(start, stop)
        ]
        if places is not None:
            for item, place in zip(found, places[start:stop].tolist(), strict=True):
                item.update(zip(("input_index", "start", "end"), place, strict=True))
        return found

    count = len(next(iter(answer.values.values())))
    rest = {"model": meter.served_name, "usage": usage_of(answer)}
    return await json_list_response(count, width_of(answer), items, rest)


def _places(chunked: Chunked) -> np.ndarray:
    """The number of the input of each chunk, its first character and the one after its last: int64
    `[chunks, 3]`."""
    inputs = np.repeat(np.arange(len(chunked.counts)), chunked.counts)
    return np.column_stack([inputs, chunked.bounds])


def vector_encoder(asked: Format | None) -> Callable[[np.ndarray], np.ndarray | str]:
    """What makes a value for JSON of a vector: a list of numbers, or a string of its little-endian
    bytes."""
    return to_base64 if asked == "base64" else _as_is


def _as_is(row: np.ndarray) -> np.ndarray:
    """The vector itself: orjson writes it as a list of numbers."""
    return row
