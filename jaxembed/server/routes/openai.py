"""POST /v1/embeddings as OpenAI's API defines it, and POST /v1/multi-vector as Jina's defines it.

A request is read into inputs, or for late chunking into texts with the offsets of their chunks. A
loaded model computes the embeddings, which are encoded into the response.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
from quart import Blueprint

from jaxembed.data.inputs import ChunkedText, ChunkSize, OffsetUnit, Text, Tokens
from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.errors import EmptyInput, InvalidInput
from jaxembed.preprocessing.windows import join_texts
from jaxembed.runtime.options import Embeddings, EncodeOptions, RequestedOptions
from jaxembed.runtime.postprocess import to_base64
from jaxembed.runtime.tasks import Intent
from jaxembed.server.errors import BadField
from jaxembed.server.http.encoding import (
    OCTETS,
    json_list_response,
    octet_response,
    wants_octets,
)
from jaxembed.server.http.exchange import Response
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import Usage, accept, embed_inputs, usage_of
from jaxembed.server.pipeline.body import (
    AnyPriority,
    ContentItem,
    MixedInputs,
    RequestChunks,
    RequestInputs,
    as_input,
    characters_of,
    check_batch,
    check_parts,
    check_value_list,
    joined_parts,
    priority_of,
    read_body_as,
    read_inputs,
)
from jaxembed.server.pipeline.fields import (
    DENSE,
    DIMENSIONS,
    ENCODERS,
    NORMALIZE,
    TRUNCATE,
    WINDOWS,
    FormattedRequest,
    TermNames,
    merged_values,
    prompt_options,
    purposes_of,
    requested_dtype,
    with_choices,
)

blueprint: Any = Blueprint("openai", __name__)

ChunkLists = list[list[int | list[int]]]  # pairs for one text, or a list of pairs for each text


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat. Its content is a text or a list of parts; `name` has no effect. Raises
    ValueError for too many parts."""

    role: str
    content: str | list[ContentItem]
    name: Any = None

    def __post_init__(self) -> None:
        check_parts(self.content)


class ChunksRequest(FormattedRequest, kw_only=True):
    """The base of bodies that can divide texts into chunks, each of which gets a vector (late
    chunking).

    With `late_chunking` (Jina) the inputs are the chunks of one text. `chunks` has for each text
    the offsets `[start, end]` of its chunks, counted in the `offset_unit`. `chunk_size` is the
    number of tokens of a chunk; neighbouring chunks share `chunk_overlap` tokens.
    """

    late_chunking: bool | None = None
    chunks: ChunkLists | None = None
    chunk_size: int | None = None
    chunk_overlap: int | None = None
    offset_unit: OffsetUnit | None = None


class EmbeddingsRequest(ChunksRequest, kw_only=True):
    """A request for embeddings, with the fields of OpenAI's and several other APIs.

    `outputs` names one or more of dense, sparse and multi_vector, which the model must have. Jina's
    `return_multivector` asks for multi_vector. `max_active_dims` limits the number of terms of a
    sparse embedding. `return_tokens` adds the terms of a sparse embedding, and the token of each
    vector of a multi-vector embedding.

    Three fields have a second name that Voyage, Jina or LiteLLM uses: `truncation` for `truncate`,
    `normalized` for `normalize`, `output_dimension` for `dimensions`. `input_type` (Cohere, Voyage,
    NVIDIA) and `task` (Jina) choose a prompt by the purpose of the texts. An item of `input` may be
    an object with a text, an image, or both as one input (Jina). With a `modality` of image
    (Infinity) each text is the URL of an image. vLLM sends `messages` instead of `input`: one
    message of the user, which is one input. A message of the system before it is its prompt, if the
    model has a chat template.
    """

    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    input: MixedInputs | msgspec.UnsetType = msgspec.UNSET
    messages: list[Message] | None = None
    modality: str | None = None
    dimensions: int | None = None
    output_dimension: int | None = None
    user: str | None = None
    truncate: bool | None = None
    truncation: bool | None = None
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
        if self.modality not in (None, "text", "image"):
            raise InvalidInput(
                f"`modality` of {self.modality!r} is not supported; send text or image",
                field="modality",
            )
        if self.messages and self.modality == "image":
            raise InvalidInput(
                "`modality` of image is for `input`; the parts of `messages` have types",
                field="modality",
            )
        if self.input is not msgspec.UNSET and self.messages:
            raise BadField("the body has `input` and `messages`; send one of them", field="input")
        if self.input is msgspec.UNSET and not self.messages:
            raise BadField("Object missing required field `input` (or `messages`)", field="input")


class SparseEmbedding(msgspec.Struct, omit_defaults=True):
    """The terms of a text whose weight is not 0. `indices` are the indices of the terms in the
    vocabulary, ascending; `values` are the weights of the terms; `tokens` are the terms themselves,
    if the request asks for them."""

    indices: list[int]
    values: list[float]
    tokens: list[str] | msgspec.UnsetType = msgspec.UNSET


class EmbeddingObject(msgspec.Struct, omit_defaults=True):
    """The outputs of an input or of a chunk.

    `embedding` is the dense vector: a list of numbers, or base64 of their little-endian bytes. If
    the request does not ask for it, it is null, or an empty string with base64. `embeddings` are
    the vectors of a multi-vector embedding in the same form; with base64, `shape` is their shape.
    `tokens` are the tokens of these vectors, if the request asks for them.

    If the request has `chunks` or `chunk_size`, the object also has the index of its input, and the
    `start` and `end` of the chunk in the input, in the `offset_unit` of the request.
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
    """The embeddings in the order of the inputs, and for each input in the order of its chunks."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: Usage


@blueprint.post("/v1/embeddings")
@blueprint.post("/embeddings")
async def embeddings() -> Response:
    """Answer a request for embeddings."""
    with current_meter() as meter:
        return await _answer(meter, await read_body_as(meter, EmbeddingsRequest))


@blueprint.post("/v1/multi-vector")
async def multi_vector() -> Response:
    """Answer as /v1/embeddings does if `return_multivector` is true, for clients of Jina."""
    with current_meter() as meter:
        body = await read_body_as(meter, EmbeddingsRequest)
        body.return_multivector = True
        return await _answer(meter, body)


async def _answer(meter: Meter, body: EmbeddingsRequest) -> Response:
    """Compute the embeddings of the inputs of a body, or of their chunks, and answer with them."""
    in_chunks = _asks_for_chunks(body)
    asked_outputs = set(body.outputs or ())
    if body.return_multivector:
        asked_outputs.add("multi_vector")
    output_names: list[OutputName] = [name for name in REPRESENTATIONS if name in asked_outputs]
    # chunks have dense vectors only
    await meter.find(body.model, "embed", DENSE if in_chunks or not output_names else output_names)
    if body.messages:
        inputs = _read_messages(body, in_chat=meter.loaded.spec.chat is not None)
    else:
        assert not isinstance(body.input, msgspec.UnsetType)
        inputs = read_inputs(body.input, field="input", are_images=body.modality == "image")
    if in_chunks:
        inputs = _read_chunks(body, inputs)
    if body.outputs:
        check_value_list("outputs", len(body.outputs))  # raises for too many
    # As in OpenAI's API, vectors are normalised unless the body says otherwise.
    truncate, dimensions, normalize = merged_values(body, TRUNCATE, DIMENSIONS, NORMALIZE)
    requested = RequestedOptions(
        EncodeOptions(
            **prompt_options(body),
            max_active_dims=body.max_active_dims,
            truncate=truncate,
            dimensions=dimensions,
            normalize=normalize is not False,
            priority=priority_of(body.priority),
            bare_ids=meter.service.config.accept_bare_token_ids,
        ),
        purposes=purposes_of(body),
        outputs=tuple(body.outputs or ()),
        multi_vector=bool(body.return_multivector),
        tokens=bool(body.return_tokens),
        dtype=requested_dtype(body),
        dimensions_field="dimensions" if body.dimensions else "output_dimension",
    )
    intent = accept(meter, inputs, requested)
    outputs = intent.options.outputs
    if outputs != DENSE and wants_octets():
        shown = " and ".join(name for name in REPRESENTATIONS if name in outputs)
        raise InvalidInput(
            f"`Accept: {OCTETS}` supports only the dense output, and the response has {shown}; "
            "accept application/json (`encoding_format` of base64 is shorter), or send the request "
            "to /embed_multi for multi-vector embeddings",
            field="outputs",
        )
    answer = await embed_inputs(meter, inputs, intent)
    return await meter.answer(answer, _respond(meter, body, intent, answer))


def _asks_for_chunks(body: EmbeddingsRequest) -> bool:
    """Return whether a body asks for vectors of chunks. Raises InvalidInput if two fields define
    the chunks, if `chunk_overlap` is given without `chunk_size`, or if `offset_unit` is given
    without `chunks` or `chunk_size`."""
    is_given = {
        "late_chunking": body.late_chunking,
        "chunks": body.chunks,
        "chunk_size": body.chunk_size is not None,
    }
    fields = [field for field in is_given if is_given[field]]
    if len(fields) > 1:
        raise InvalidInput(
            f"`{fields[0]}` and `{fields[1]}` both define the chunks; send one of them",
            field=fields[1],
        )
    if body.chunk_overlap and "chunk_size" not in fields:
        raise InvalidInput("`chunk_overlap` requires `chunk_size`", field="chunk_overlap")
    if body.offset_unit is not None and fields in ([], ["late_chunking"]):
        raise InvalidInput("`offset_unit` requires `chunks` or `chunk_size`", field="offset_unit")
    return bool(fields)


def _read_messages(body: EmbeddingsRequest, *, in_chat: bool) -> RequestInputs:
    """Read a chat as one input. `in_chat` says whether the model puts inputs into a chat template;
    a system message then becomes the `prompt` of the body. Raises EmptyInput, and InvalidInput for
    a chat with other messages."""
    *before, last = body.messages or []
    is_prompt = [m.role == "system" and isinstance(m.content, str) for m in before]
    if last.role != "user" or (is_prompt and (is_prompt != [True] or not in_chat)):
        allowed = ", after at most one of the role `system` that is a text" if in_chat else ""
        raise InvalidInput(
            f"`messages` must be one message of the role `user`, which is one input{allowed}",
            field="messages",
        )
    if before and body.prompt is not None:
        raise InvalidInput(
            "a message of the role `system` and `prompt` are the same; send one", field="prompt"
        )
    if before:
        body.prompt = str(before[0].content)
    content, place = last.content, f"messages[{len(before)}].content"
    if not content:
        raise EmptyInput(place)
    parts = [content] if isinstance(content, str) else [part.source for part in content]
    source = joined_parts(parts)
    return RequestInputs("single", characters_of(source), place, [as_input(source)])


def _read_chunks(body: EmbeddingsRequest, inputs: RequestInputs) -> RequestChunks:
    """Return the texts of a body, divided as `late_chunking`, `chunk_size` or `chunks` says. With
    `late_chunking` the inputs are the chunks of one text.

    Raises InvalidInput for an input that is no text, and if `chunks` does not have one or more
    pairs of integers for each text; BatchTooLarge and RequestTooLarge for too many chunks.
    """
    texts = []
    for index, item in enumerate(inputs.items):
        if not isinstance(item, Text):
            kind = "a list of token ids" if isinstance(item, Tokens) else "no text alone"
            raise InvalidInput(
                f"`{inputs.place(index)}` is {kind}, and only texts can have chunks",
                field=inputs.place(index),
            )
        texts.append(item.text)
    unit = body.offset_unit or "code-points"
    if body.late_chunking:
        return RequestChunks(
            method="single",
            characters=inputs.characters,
            field=inputs.field,
            items=[join_texts(texts)],
            chunk_place=lambda _, chunk: inputs.place(chunk),
        )
    if body.chunk_size is not None:
        size = ChunkSize(body.chunk_size, body.chunk_overlap or 0)
        items = [ChunkedText(text, size, unit) for text in texts]
        return RequestChunks(
            method=inputs.method,
            characters=inputs.characters,
            field=inputs.field,
            items=items,
            chunk_place=lambda text, _: inputs.place(text),
        )
    chunks = body.chunks or []
    is_flat = isinstance(next(iter(chunks[0]), None), int)  # the pairs of one text are not nested
    lists = [chunks] if is_flat else chunks

    def place_of(text: int, chunk: int) -> str:
        return f"chunks[{chunk}]" if is_flat else f"chunks[{text}][{chunk}]"

    if len(lists) != len(texts):
        raise InvalidInput(
            "`chunks` must have one list of [start, end] for each text. "
            f"Number of texts: {len(texts)}. Number of lists: {len(lists)}",
            field="chunks",
        )
    if [] in lists:
        place = f"chunks[{lists.index([])}]"
        raise InvalidInput(
            f"`{place}` is empty; each text needs one [start, end] or more", field=place
        )
    check_batch(sum(map(len, lists)))
    items = [
        ChunkedText(
            text, [_chunk_bounds(pair, place_of(i, k)) for k, pair in enumerate(lists[i])], unit
        )
        for i, text in enumerate(texts)
    ]
    return RequestChunks(inputs.method, inputs.characters, inputs.field, items, place_of)


def _chunk_bounds(given: object, place: str) -> tuple[int, int]:
    """Return the start and the end of a chunk. Raises InvalidInput if `given` is not a pair of
    integers; the message has `place`, the path of the pair in the body."""
    match given:
        case [int() as start, int() as end]:
            return start, end
    raise InvalidInput(f"`{place}` must be [start, end], two integers", field=place)


async def _respond(
    meter: Meter, body: EmbeddingsRequest, intent: Intent, answer: Embeddings
) -> Response:
    """Encode the answer as raw bytes if the client prefers them, else as EmbeddingsResponse.
    Headers name the chosen prompt and dtype, and for texts in chunks the number of windows that the
    model ran."""
    chunked = answer.chunked
    if wants_octets():
        response = await octet_response(answer.dense)
    else:
        encoder, term_names, spans = ENCODERS[body.encoding_format], None, None
        if body.return_tokens:
            term_names = meter.loaded.text_processor_of(meter.route).term_names
        if chunked is not None and not body.late_chunking:
            # each row has the index of the input, the start and the end of a chunk
            input_indices = np.repeat(np.arange(len(chunked.counts)), chunked.counts)
            spans = np.column_stack([input_indices, chunked.bounds])

        def items(start: int, stop: int) -> list[dict]:
            objects = [
                {"object": "embedding", **_fields_of(answer, i, encoder, term_names), "index": i}
                for i in range(start, stop)
            ]
            if spans is not None:
                for item, span in zip(objects, spans[start:stop].tolist(), strict=True):
                    item.update(zip(("input_index", "start", "end"), span, strict=True))
            return objects

        count = len(next(iter(answer.values.values())))
        rest = {"model": meter.served_name, "usage": usage_of(answer)}
        response = await json_list_response(count, _width_of(answer), items, rest)
    if chunked is not None:
        response.headers[WINDOWS] = str(int(chunked.windows.sum()))
    return with_choices(response, intent)


def _width_of(answer: Embeddings) -> int:
    """Return how many numbers the outputs of one input have on average, where a term of a sparse
    embedding counts as 2. The width decides how many inputs are encoded in one slice."""
    count, width = max(len(answer.num_tokens), 1), 0
    if "dense" in answer.values:
        width += answer.values["dense"].shape[1]
    if "sparse" in answer.values:
        width += 2 * sum(map(len, answer.sparse.values)) // count
    if "multi_vector" in answer.values:
        width += answer.multi_vector.values.size // count
    return width


def _fields_of(
    answer: Embeddings,
    index: int,
    encoder: Callable[[np.ndarray], np.ndarray | str],
    names: TermNames | None,
) -> dict[str, Any]:
    """Return the fields of EmbeddingObject with the outputs of the input or chunk number `index`.

    `encoder` converts vectors to numbers or base64. `names` maps ids of terms or tokens to texts;
    None leaves `tokens` out. Clients expect the field `embedding`, so without a dense output it is
    null. With base64 it is an empty string, because OpenAI's client for Node decodes it.
    """
    fields: dict[str, Any] = {"embedding": "" if encoder is to_base64 else None}
    if "dense" in answer.values:
        fields["embedding"] = encoder(answer.values["dense"][index])
    if "sparse" in answer.values:
        indices, values = answer.sparse.indices[index], answer.sparse.values[index]
        tokens = {} if names is None else {"tokens": names(indices.tolist())}
        fields["sparse_embedding"] = {"indices": indices, "values": values, **tokens}
    if "multi_vector" in answer.values:
        vectors = answer.multi_vector[index]
        fields["embeddings"] = encoder(vectors)
        if isinstance(fields["embeddings"], str):
            fields["shape"] = vectors.shape
        if names is not None and answer.vector_ids is not None:
            rows = slice(*answer.multi_vector.offsets[index : index + 2])
            fields["tokens"] = names(answer.vector_ids[rows].tolist())
    return fields
