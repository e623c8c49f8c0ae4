"""The routes of Text Embeddings Inference 1.9 that embed and tokenize. Knows no devices.

Unlike in TEI, which serves one model, each body may have a `model`. Bodies of routes that run the
model may also have a `priority`.
"""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
import orjson
from quart import Blueprint, Response

from jaxembed.data.inputs import Priority, Tokens
from jaxembed.data.outputs import OutputName
from jaxembed.errors import EmptyInput, InvalidInput, NoInputs, WrongTask
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import Asked, Embeddings, EncodeOptions
from jaxembed.server.http.encoding import (
    json_matrices,
    json_matrix,
    json_response,
    json_stream,
    octet_response,
    wants_octets,
)
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import (
    accept,
    compare_texts,
    embed_inputs,
    encode_answer,
)
from jaxembed.server.pipeline.body import (
    InputUnion,
    RequestInputs,
    TypedInputs,
    check_batch,
    priority_of,
    read_body_as,
    read_inputs,
)
from jaxembed.server.pipeline.decoding import TokenId
from jaxembed.server.pipeline.representations import DENSE
from jaxembed.server.pipeline.unsupported import ModelRequest, Unserved
from jaxembed.server.pipeline.vectors import VectorsRequest, asked_dtype, with_dtype

blueprint = Blueprint("tei", __name__)

Direction = Literal["Left", "left", "Right", "right"]
SIDES: dict[Direction | None, Literal["left", "right"]] = {
    None: "right",
    "Left": "left",
    "left": "left",
    "Right": "right",
    "right": "right",
}


OTHER_ROUTES: dict[OutputName, str] = {  # than /embed, which answers dense vectors
    "sparse": "/embed_sparse",
    "multi_vector": "/embed_multi",
}


class EmbedRequest(VectorsRequest, kw_only=True):
    """One input or a list of them; a list of integers is one input of token ids. Inputs may also
    say their type, which images must."""

    inputs: TypedInputs
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=0)] | None = None
    model: str | None = None
    priority: Priority | None = None


class EmbedAllRequest(VectorsRequest, kw_only=True):
    """The fields of /embed without `dimensions`: vectors are whole and not normalised."""

    inputs: InputUnion
    normalize: Annotated[Any, Unserved("vectors of tokens are not normalised", (False,))] = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    model: str | None = None
    priority: Priority | None = None


class SimilarityInputs(msgspec.Struct):
    """One text and the texts to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(ModelRequest, kw_only=True):
    """Settings of how the texts are tokenized."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None


class SimilarityRequest(ModelRequest, kw_only=True):
    """A request for the similarity of the source with each sentence."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None
    model: str | None = None
    priority: Priority | None = None


class TokenizeRequest(msgspec.Struct):
    """Texts only: token ids are refused."""

    inputs: str | list[str]
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    model: str | None = None


class Token(msgspec.Struct):
    """`start` and `stop` are byte offsets into the prompted text, null for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(msgspec.Struct):
    """One sequence of token ids, or a list of them. `prompt_name` names the route that they are
    of, of a model with several."""

    ids: list[TokenId | list[TokenId]]
    skip_special_tokens: bool | None = None
    prompt_name: str | None = None
    model: str | None = None


@blueprint.post("/embed")
async def embed() -> Response:
    """Answer with one vector per input."""
    with current_meter() as meter:
        return await answer_embed(meter, await read_body_as(EmbedRequest), octets=wants_octets())


@blueprint.post("/embed_all")
async def embed_all() -> Response:
    """Answer with one vector per token, before pooling; special tokens have one too."""
    with current_meter() as meter:
        body = await read_body_as(EmbedAllRequest)
        await meter.find(body.model, "embed")
        inputs = read_inputs(body.inputs, field="inputs")
        options = EncodeOptions(
            outputs=frozenset({"tokens"}),
            prompt_name=body.prompt_name,
            truncate=body.truncate,
            truncation_side=SIDES[body.truncation_direction],
            normalize=False,
            priority=priority_of(body.priority),
        )
        intent = accept(meter, inputs, Asked(options, dtype=asked_dtype(body)))
        answer = await embed_inputs(meter, inputs, intent)
        matrices = answer.tokens
        response = await encode_answer(meter, answer, lambda: json_stream(json_matrices(matrices)))
        return with_dtype(response, intent)


@blueprint.post("/similarity")
async def similarities() -> Response:
    """Answer with the similarity of the source with each sentence."""
    with current_meter() as meter:
        body = await read_body_as(SimilarityRequest)
        parameters = body.parameters or SimilarityParameters()
        options = EncodeOptions(
            prompt_name=parameters.prompt_name,
            truncate=parameters.truncate,
            truncation_side=SIDES[parameters.truncation_direction],
            priority=priority_of(body.priority),
        )
        await meter.find(body.model, "embed")
        answer, scores = await compare_texts(meter, _texts_to_compare(body.inputs), options)
        response = json_response(orjson.dumps(scores, option=orjson.OPT_SERIALIZE_NUMPY))
        return meter.stamp(response, answer)


@blueprint.post("/tokenize")
async def tokenize() -> Response:
    """Answer with the tokens of each text and their byte offsets. Nothing is truncated."""
    with current_meter() as meter:
        body = await read_body_as(TokenizeRequest)
        texts = _texts_to_show(body.inputs)
        loaded = await meter.find(body.model, None)
        tokens = await loaded.tokenize_async(
            texts,
            add_special_tokens=body.add_special_tokens is not False,
            prompt_name=body.prompt_name,
            held=meter.held,
        )
        parts = []
        for pieces in tokens:
            parts.append(orjson.dumps(pieces))
            await asyncio.sleep(0)
        return json_response(b"[" + b",".join(parts) + b"]")


@blueprint.post("/decode")
async def decode_ids() -> Response:
    """Answer with the text of each sequence of token ids."""
    with current_meter() as meter:
        body = await read_body_as(DecodeRequest)
        if not body.ids or (isinstance(body.ids, list) and [] in body.ids):
            raise EmptyInput("ids")
        items = read_inputs(body.ids, field="ids").items
        loaded = await meter.find(body.model, None)
        texts = await loaded.decode_async(
            [item.ids for item in items if isinstance(item, Tokens)],
            skip_special_tokens=body.skip_special_tokens is not False,
            prompt_name=body.prompt_name,
            held=meter.held,
        )
        return json_response(orjson.dumps(texts))


async def answer_embed(meter: Meter, body: EmbedRequest, *, octets: bool) -> Response:
    """The response to a body of /embed; other routes take such bodies too.

    With `octets` the vectors are raw bytes, otherwise JSON.
    """

    loaded = await meter.find(body.model, "embed", DENSE)
    inputs = read_inputs(body.inputs, field="inputs")
    _check_dense(loaded)
    options = EncodeOptions(
        prompt_name=body.prompt_name,
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        dimensions=_check_dimensions(body.dimensions, loaded.spec.dim),
        normalize=body.normalize is not False,
        priority=priority_of(body.priority),
    )
    intent = accept(meter, inputs, Asked(options, dtype=asked_dtype(body)))
    answer = await embed_inputs(meter, inputs, intent)
    response = await encode_answer(meter, answer, lambda: _vectors(answer, octets=octets))
    return with_dtype(response, intent)


async def _vectors(answer: Embeddings, *, octets: bool) -> Response:
    """The response with the vectors, as raw bytes with `octets`, otherwise as JSON."""
    if octets:
        return octet_response(answer.dense)
    return await json_stream(json_matrix(answer.dense))


def _check_dense(loaded: LoadedModel) -> None:
    """Raise WrongTask, which names another route, for a model without a dense output."""
    primary = loaded.spec.primary
    if primary in OTHER_ROUTES:
        raise WrongTask(
            f"{loaded.name} gives no dense output, only {primary}, which "
            f"{OTHER_ROUTES[primary]} answers"
        )


def _check_dimensions(dimensions: int | None, largest: int) -> int | None:
    """Check the number of dimensions to which vectors are cut, and return it unchanged.

    `largest` is that of the model's own vectors. None means not to cut them. Raises InvalidInput
    with TEI's message for 0, which OpenAI's route accepts, and for more than `largest`.
    """
    if dimensions == 0:
        raise InvalidInput(
            "Input validation error: `dimensions` should be positive", field="dimensions"
        )
    if dimensions is not None and dimensions > largest:
        raise InvalidInput(
            "Input validation error: `dimensions` should be smaller than the maximum embedding "
            f"dimension. Wanted: {largest} or less. Given: {dimensions}",
            field="dimensions",
        )
    return dimensions


def _texts_to_show(inputs: str | list[str]) -> list[str]:
    """The texts to tokenize. Raises InvalidInput if there are none or too many, or one is empty."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not texts:
        raise NoInputs("inputs")
    check_batch(len(texts))
    if "" in texts:
        raise EmptyInput("inputs", texts.index(""))
    return texts


def _texts_to_compare(wanted: SimilarityInputs) -> RequestInputs:
    """The source and the sentences as one batch, in this order. Raises NoInputs without sentences.

    As in TEI, the limit on the batch size counts the source too.
    """
    if not wanted.sentences:
        raise NoInputs("inputs.sentences")
    return read_inputs([wanted.source_sentence, *wanted.sentences], field="inputs")
