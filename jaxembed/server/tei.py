"""The routes of Text Embeddings Inference 1.9. Knows JSON and the Embedder; no devices."""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
import orjson
from quart import Blueprint, Response, request

from jaxembed import __version__
from jaxembed.embedder import Embeddings, EncodeOptions
from jaxembed.errors import EmptyInput, InvalidInput
from jaxembed.inputs import Tokens
from jaxembed.postprocess import similarity
from jaxembed.server.body import (
    InputUnion,
    RequestInputs,
    TokenId,
    check_batch,
    decode,
    empty,
    read_inputs,
    read_json,
)
from jaxembed.server.encoding import (
    encoding_time,
    json_matrices,
    json_matrix,
    json_response,
    octet_response,
    wants_octets,
)
from jaxembed.server.errors import WrongTask
from jaxembed.server.meter import Meter
from jaxembed.server.service import Service, current_service

blueprint = Blueprint("tei", __name__)

Direction = Literal["Left", "left", "Right", "right"]
SIDES: dict[str, Literal["left", "right"]] = {
    "Left": "left",
    "left": "left",
    "Right": "right",
    "right": "right",
}

POOLING_NAMES = {"lasttoken": "last_token"}  # the others are spelled as sentence-transformers does

OTHER_TASKS = {
    "/embed_sparse": "Model is not an embedding model with SPLADE pooling",
    "/predict": "Model is not a classifier model",
    "/rerank": "model is not a re-ranker model",
}


class EmbedRequest(msgspec.Struct):
    """One input or a list of them; a list of integers is one input of token ids."""

    inputs: InputUnion
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: Annotated[int, msgspec.Meta(ge=0)] | None = None


class EmbedAllRequest(msgspec.Struct):
    """As /embed; each token's vector comes back as it is, unnormalised."""

    inputs: InputUnion
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityInputs(msgspec.Struct):
    """One text and those to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct):
    """How the texts are tokenized."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityRequest(msgspec.Struct):
    """The cosine of the source with each sentence is asked for."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class TokenizeRequest(msgspec.Struct):
    """Texts only: token ids are refused."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Token(msgspec.Struct):
    """`start` and `stop` are byte offsets into the prompted text, null for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(msgspec.Struct):
    """One sequence of token ids, or a list of them."""

    ids: list[TokenId | list[TokenId]]
    skip_special_tokens: bool = True


class VertexRequest(msgspec.Struct):
    """Vertex AI's envelope; each instance is the body of /embed."""

    instances: list[msgspec.Raw]  # decoded one by one, each by itself


class VertexResponse(msgspec.Struct):
    """For each instance, what /embed answers."""

    predictions: list[list[list[float]]]


class Info(msgspec.Struct):
    """The model, its limits, and under `jaxembed` what only this server has to say."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, str]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    jaxembed: dict[str, Any]


@blueprint.post("/embed")
@blueprint.post("/")
@blueprint.post("/invocations")
async def embed() -> Response:
    """One vector per input."""
    service = current_service()
    with Meter(service) as meter:
        body = await read_json(EmbedRequest)
        inputs, answer = await _embed(service, meter, body)
        with encoding_time():
            if wants_octets():
                response = octet_response(answer.dense)
            else:
                response = json_response(await json_matrix(answer.dense))
        return meter.stamp(response, inputs, answer)


@blueprint.post("/vertex")
async def vertex() -> Response:
    """/embed for each instance, all at once; the first failure answers for all."""
    body = await read_json(VertexRequest)
    requests = [decode(raw, EmbedRequest) for raw in body.instances]
    check_batch(sum(_count(request.inputs) for request in requests))
    results = await asyncio.gather(*map(_instance, requests), return_exceptions=True)
    parts = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        parts.append(await json_matrix(result.dense))
    return json_response(b'{"predictions":[' + b",".join(parts) + b"]}")


@blueprint.post("/embed_all")
async def embed_all() -> Response:
    """One vector per token, special tokens included, before pooling."""
    service = current_service()
    with Meter(service) as meter:
        body = await read_json(EmbedAllRequest)
        inputs = read_inputs(body.inputs, field="inputs")
        meter.accept(inputs)
        options = EncodeOptions(
            outputs=frozenset({"tokens"}),
            prompt_name=body.prompt_name,
            truncate=body.truncate,
            truncation_side=SIDES[body.truncation_direction],
            normalize=False,
        )
        answer = await service.embedder.answer(inputs.items, options)
        with encoding_time():
            response = json_response(await json_matrices(answer.tokens or []))
        return meter.stamp(response, inputs, answer)


@blueprint.post("/similarity")
async def similarities() -> Response:
    """The cosine of the source with each sentence."""
    service = current_service()
    with Meter(service) as meter:
        body = await read_json(SimilarityRequest)
        inputs = _texts_to_compare(body.inputs)
        meter.accept(inputs)
        parameters = body.parameters or SimilarityParameters()
        options = EncodeOptions(
            prompt_name=parameters.prompt_name,
            truncate=parameters.truncate,
            truncation_side=SIDES[parameters.truncation_direction],
            normalize=True,
        )
        answer = await service.embedder.answer(inputs.items, options)
        scores = similarity(answer.dense[0], answer.dense[1:])
        response = json_response(orjson.dumps(scores, option=orjson.OPT_SERIALIZE_NUMPY))
        return meter.stamp(response, inputs, answer)


@blueprint.post("/tokenize")
async def tokenize() -> Response:
    """The tokens of each text, with their places in it. Nothing is truncated."""
    body = await read_json(TokenizeRequest)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts:
        raise EmptyInput("`inputs` cannot be empty", field="inputs")
    check_batch(len(texts))
    if "" in texts:
        raise empty("inputs", f"inputs[{texts.index('')}]")
    tokens = await current_service().embedder.tokenize_async(
        texts, add_special_tokens=body.add_special_tokens, prompt_name=body.prompt_name
    )
    parts = []
    for pieces in tokens:
        parts.append(orjson.dumps(pieces))
        await asyncio.sleep(0)
    return json_response(b"[" + b",".join(parts) + b"]")


@blueprint.post("/decode")
async def decode_ids() -> Response:
    """The text of each sequence of token ids."""
    body = await read_json(DecodeRequest)
    if not body.ids or [] in body.ids:
        raise empty("input_ids")
    sequences = [
        item.ids for item in read_inputs(body.ids, field="ids").items if isinstance(item, Tokens)
    ]
    texts = await current_service().embedder.decode_async(
        sequences, skip_special_tokens=body.skip_special_tokens
    )
    return json_response(orjson.dumps(texts))


@blueprint.get("/info")
async def info() -> Response:
    """What is served, and within which limits."""
    return json_response(msgspec.json.encode(describe(current_service())))


@blueprint.post("/embed_sparse")
@blueprint.post("/predict")
@blueprint.post("/rerank")
async def other_task() -> Response:
    """Tasks this server has no models for: said in TEI's words rather than with a 404."""
    raise WrongTask(OTHER_TASKS[request.path])


def describe(service: Service) -> Info:
    """The answer of /info."""
    embedder = service.embedder
    pooling = "+".join(POOLING_NAMES.get(name, name) for name in embedder.spec.pooling)
    return Info(
        model_id=embedder.name,
        model_sha=embedder.spec.revision,
        model_dtype=embedder.dtype,
        served_model_name=service.names[0],
        model_type={"embedding": {"pooling": pooling}},
        max_concurrent_requests=embedder.config.max_concurrent_requests,
        max_input_length=embedder.max_input_tokens,
        max_batch_tokens=embedder.max_batch_tokens,
        max_batch_requests=embedder.config.max_batch_requests,
        max_client_batch_size=service.config.max_client_batch_size,
        auto_truncate=embedder.text.truncate,
        tokenization_workers=embedder.tokenization_workers,
        version=__version__,
        sha=None,
        docker_label=None,
        jaxembed=embedder.describe(),
    )


async def _embed(
    service: Service, meter: Meter, body: EmbedRequest
) -> tuple[RequestInputs, Embeddings]:
    """Run one /embed body, from wherever it came."""
    inputs = read_inputs(body.inputs, field="inputs")
    meter.accept(inputs)
    options = EncodeOptions(
        prompt_name=body.prompt_name,
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        dimensions=_check_dimensions(body.dimensions, service.embedder.spec.dim),
        normalize=body.normalize,
    )
    return inputs, await service.embedder.answer(inputs.items, options)


def _count(inputs: str | list[str | int | list[int]]) -> int:
    """How many inputs there are; a text or a list of token ids is one."""
    many = isinstance(inputs, list) and bool(inputs) and not isinstance(inputs[0], int)
    return len(inputs) if many else 1


async def _instance(body: EmbedRequest) -> Embeddings:
    """Run one instance of a /vertex request, counted as a request of its own."""
    service = current_service()
    with Meter(service) as meter:
        inputs, answer = await _embed(service, meter, body)
        meter.answered(inputs, answer)
        return answer


def _check_dimensions(dimensions: int | None, largest: int) -> int | None:
    """TEI's two messages; unlike OpenAI's route, 0 is an error here."""
    if dimensions == 0:
        raise InvalidInput(
            "Input validation error: `dimensions` should be positive", field="dimensions"
        )
    if dimensions is not None and dimensions > largest:
        raise InvalidInput(
            "Input validation error: `dimensions` should be smaller than the maximum embedding "
            "dimension.",
            field="dimensions",
        )
    return dimensions


def _texts_to_compare(wanted: SimilarityInputs) -> RequestInputs:
    """The source and its sentences in one batch: the limit counts the source too, as TEI's."""
    if not wanted.sentences:
        raise EmptyInput("`inputs.sentences` cannot be empty", field="inputs.sentences")
    return read_inputs([wanted.source_sentence, *wanted.sentences], field="inputs")
