"""POST /v1/embeddings as OpenAI defines it. Knows JSON, but no tokens and no devices.

A request is read into `Input`s, a loaded model computes their vectors, and the vectors are encoded
into the response.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from quart import Blueprint, Response

from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.data.spec import ModelSpec
from jaxembed.errors import EmptyInput, InvalidInput, UnknownPurpose, UnknownRoute
from jaxembed.preprocessing.late import Chunked
from jaxembed.preprocessing.prompts import Role, prompt_for, role_of
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import Embeddings, EncodeOptions
from jaxembed.runtime.postprocess import to_base64
from jaxembed.runtime.tasks import check_cut
from jaxembed.server.errors import BadField
from jaxembed.server.http.encoding import (
    OCTETS,
    json_answer,
    json_items,
    json_stream,
    octet_response,
    wants_octets,
)
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import embed_chunks, embed_inputs, encode_answer
from jaxembed.server.pipeline.body import (
    AnyPriority,
    MixedInputs,
    RequestInputs,
    priority_of,
    read_body_as,
    read_inputs,
)
from jaxembed.server.pipeline.late import WINDOWS, ChunksRequest, asks_for_chunks, read_chunks
from jaxembed.server.pipeline.media import ContentItem, only_part, text_or_image
from jaxembed.server.pipeline.representations import (
    SparseEmbedding,
    asked_outputs,
    fields_of,
    wanted_outputs,
    width_of,
)
from jaxembed.server.pipeline.unsupported import ModelRequest, agreed
from jaxembed.server.pipeline.vectors import add_dtype, asked_dtype
from jaxembed.server.routes.common.usage import Usage, usage_of
from jaxembed.server.service import current_service

blueprint = Blueprint("openai", __name__)

PROMPT = "x-prompt-name"  # response header: the name of the prompt that the request chose

Format = Literal["float", "base64"]

SERVED_MODALITIES = (None, "text", "image")  # that `modality` may name

BASE64 = ("base64", ["base64"])  # which is a type of embeddings to Jina


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
    encoding_format: Format | None = None
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
        for field in ("embedding_type", "encoding_type"):
            if getattr(self, field) in BASE64:
                if self.encoding_format == "float":
                    raise InvalidInput(
                        f"`{field}` of base64 and `encoding_format` of float contradict each "
                        "other; send one of them",
                        field=field,
                    )
                self.encoding_format = "base64"
                setattr(self, field, None)


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
    """The answer to one body."""
    answer = await _answer(meter, body)
    return await encode_answer(meter, answer, lambda: respond(meter, body, answer))


async def _answer(meter: Meter, body: EmbeddingsRequest) -> Embeddings:
    """The vectors of the inputs, or of their chunks."""

    def read() -> RequestInputs:
        if body.messages:
            return _read_messages(body.messages)
        assert not isinstance(body.input, msgspec.UnsetType)
        return read_inputs(body.input, field="input", are_images=body.modality == "image")

    def asked(loaded: LoadedModel) -> EncodeOptions:
        found = options(body, loaded)
        if wants_octets() and found.outputs != {"dense"}:
            shown = " and ".join(name for name in REPRESENTATIONS if name in found.outputs)
            raise InvalidInput(
                f"`Accept: {OCTETS}` is for the dense vector alone, and the answer has {shown}; "
                "accept application/json (`encoding_format` of base64 is shorter), or ask "
                "/embed_multi for several vectors",
                field="outputs",
            )
        return found

    if asks_for_chunks(body):
        return await embed_chunks(meter, body.model, lambda: read_chunks(body, read()), asked)
    wanted = wanted_outputs(body.outputs, body.return_multivector)
    return await embed_inputs(meter, body.model, read, asked, outputs=wanted)


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


def options(body: EmbeddingsRequest, loaded: LoadedModel) -> EncodeOptions:
    """The options of a request to a model.

    Vectors are normalised unless the body says otherwise, as OpenAI does. Raises InvalidInput for
    an unknown purpose, and for fields that contradict each other.
    """
    prompt, prompt_name, route = purpose_of(body, loaded)
    outputs = asked_outputs(body.outputs, body.return_multivector, loaded.spec)
    if body.return_tokens and outputs == {"dense"}:
        raise InvalidInput(
            "`return_tokens` is for sparse outputs and for several vectors", field="return_tokens"
        )
    return EncodeOptions(
        outputs=outputs,
        prompt=prompt,
        prompt_name=prompt_name,
        route=route,
        role=role_asked(body),
        max_active_dims=body.max_active_dims,
        truncate=agreed(body, "truncate", "truncation"),
        dimensions=_dimensions(body, outputs, loaded.spec),
        normalize=agreed(body, "normalize", "normalized") is not False,
        output_dtype=asked_dtype(body) or "float",
        priority=priority_of(body.priority),
        bare_ids=current_service().config.accept_bare_token_ids,
    )


def _dimensions(
    body: EmbeddingsRequest, outputs: frozenset[OutputName], spec: ModelSpec
) -> int | None:
    """To how many dimensions vectors are cut. Raises InvalidInput, which names the field of the
    body."""
    dimensions = agreed(body, "dimensions", "output_dimension", unset=(None, 0))
    field = "dimensions" if body.dimensions else "output_dimension"
    check_cut(spec.widths, outputs, dimensions, field)
    return dimensions


def purpose_of(
    body: ModelRequest, loaded: LoadedModel
) -> tuple[str | None, str | None, str | None]:
    """The text and the name of the prompt, as `chosen_prompt`, and the route for the purpose of the
    body."""
    return *chosen_prompt(body, loaded.spec), chosen_route(body, loaded)


def role_asked(body: ModelRequest) -> Role | None:
    """The role of the texts by the purpose in the body; None if it has none."""
    return role_of(body.input_type or body.task or "")


def chosen_prompt(body: ModelRequest, spec: ModelSpec) -> tuple[str | None, str | None]:
    """The text and the name of the prompt that the body asks for; at least one of them is None.

    If both are None, the server's default prompt is used. The text is empty if the body has a
    purpose for which the checkpoint has no prompt.

    Raises InvalidInput for an unknown purpose, and for fields that contradict each other.
    """
    found: dict[str, tuple[Role | None, str | None]] = {}
    for field in ("input_type", "task"):
        if purpose := getattr(body, field):
            try:
                found[field] = role_of(purpose), prompt_for(purpose, spec.prompts)
            except UnknownPurpose as error:
                error.field = field
                raise
    if not found:
        return None, body.prompt_name
    _check_adapters(body, found, spec)
    if body.prompt_name is not None:
        found["prompt_name"] = role_of(body.prompt_name), body.prompt_name
    for values in zip(*found.values(), strict=True):
        if len({value for value in values if value is not None}) > 1:
            shown = " and ".join(f"`{field}` of {getattr(body, field)!r}" for field in found)
            raise InvalidInput(
                f"{shown} ask for different prompts; send one of them", field=next(iter(found))
            )
    name = next((name for _, name in found.values() if name is not None), None)
    return ("" if name is None else None), name


def chosen_route(body: ModelRequest, loaded: LoadedModel) -> str | None:
    """The route for the purpose of the body, None if it has none. Raises UnknownRoute."""
    for field in ("input_type", "task"):
        if purpose := getattr(body, field):
            try:
                return loaded.tasks.route_for(purpose)
            except UnknownRoute as error:
                error.field = field
                raise
    return None


def _check_adapters(
    body: ModelRequest, found: Mapping[str, tuple[Role | None, str | None]], spec: ModelSpec
) -> None:
    """Raise InvalidInput for a purpose without an adapter if the adapters are for purposes, as
    those of Jina v3 are: the vector of none would look right."""
    tasks = [name for name in spec.adapter_names if name in spec.prompts]
    for field, (_, name) in found.items():
        if tasks and name not in tasks:
            raise InvalidInput(
                f"`{field}` of {getattr(body, field)!r}: the model has no such task; it has "
                + ", ".join(tasks),
                field=field,
            )


async def respond(meter: Meter, body: EmbeddingsRequest, answer: Embeddings) -> Response:
    """The response with the vectors as raw bytes or JSON, and the headers PROMPT and WINDOWS."""
    if wants_octets():
        response = octet_response(answer.dense)
    else:
        response = await _json_response(meter, body, answer)
    if answer.chunked is not None:
        response.headers.add(WINDOWS, str(int(answer.chunked.windows.sum())))
    return with_prompt(response, body, meter.loaded.spec)


def with_prompt(response: Response, body: EmbeddingsRequest, spec: ModelSpec) -> Response:
    """The response, with the header PROMPT if the body chose a prompt: its name, or empty for no
    prompt."""
    prompt, prompt_name = chosen_prompt(body, spec)
    if prompt is not None or prompt_name is not None:
        response.headers.add(PROMPT, prompt_name or "")
    return add_dtype(response, body)


async def _json_response(meter: Meter, body: EmbeddingsRequest, answer: Embeddings) -> Response:
    """The response with the vectors as JSON in the form of EmbeddingsResponse.

    The JSON is encoded in slices, between which other tasks run.
    """
    vector, names = vector_encoder(body), None
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
    data = json_items(count, width_of(answer), items)
    return await json_stream(json_answer({"data": data}, rest, first=b'{"object":"list",'))


def _places(chunked: Chunked) -> np.ndarray:
    """The number of the input of each chunk, its first character and the one after its last: int64
    `[chunks, 3]`."""
    inputs = np.repeat(np.arange(len(chunked.counts)), chunked.counts)
    return np.column_stack([inputs, chunked.bounds])


def vector_encoder(body: EmbeddingsRequest) -> Callable[[np.ndarray], np.ndarray | str]:
    """What makes a value for JSON of a vector: a list of numbers, or a string of its little-endian
    bytes."""
    return to_base64 if body.encoding_format == "base64" else _as_is


def _as_is(row: np.ndarray) -> np.ndarray:
    """The vector itself: orjson writes it as a list of numbers."""
    return row
