"""POST /v2/embed and /v1/embed in the words of Cohere: translates bodies into those of
/v1/embeddings, and writes answers as Cohere's clients read them. Knows JSON and no tokens."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from quart import Blueprint, Response, g

from jaxembed.loaded_model import LoadedModel
from jaxembed.options import Embeddings, EncodeOptions
from jaxembed.postprocess import to_base64
from jaxembed.processors.tokenizer import Side
from jaxembed.quantise import quantise
from jaxembed.server import openai
from jaxembed.server.answering import embed_inputs, encode_answer
from jaxembed.server.body import (
    MOST_CONTENT,
    AnyPriority,
    read_body_as,
    read_inputs,
    too_many_parts,
)
from jaxembed.server.cohere import ApiVersion, CohereMeta, meta_of
from jaxembed.server.encoding import (
    json_answer,
    json_items,
    json_lists,
    json_stream,
    object_width,
)
from jaxembed.server.errors import BadField
from jaxembed.server.meter import current_meter
from jaxembed.server.unsupported import ModelRequest, Unserved

blueprint = Blueprint("cohere_embed", __name__)

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
CohereTruncate = Literal["NONE", "START", "END"]

Ranges = dict[EmbeddingType, np.ndarray | None]  # of each type asked for; None where it needs none

CUT_SIDES: dict[CohereTruncate | None, Side] = {"START": "left"}


_TYPES = Unserved("send `embedding_types`", ("float", ["float"]))


class ContentPart(msgspec.Struct, gc=False):
    """A part of an input. Those that are not texts are refused."""

    type: Literal["text", "image_url"]
    text: str | None = None


class ContentInput(msgspec.Struct, gc=False):
    """An input of several parts, which has one vector: that of their texts as lines of one.

    Its parts become one as soon as it is decoded: many small ones take much memory. Raises
    ValueError for a part that is no text.
    """

    content: list[ContentPart]

    def __post_init__(self) -> None:
        if len(self.content) > MOST_CONTENT:
            raise ValueError(too_many_parts(len(self.content)))
        for k, part in enumerate(self.content):
            if part.type != "text":
                raise ValueError(
                    f"`content[{k}]` of the type `{part.type}` is not supported: this server takes "
                    "texts alone"
                )
            if not part.text:
                raise ValueError(f"`content[{k}].text` cannot be empty")
        self.content = [ContentPart("text", "\n".join(part.text or "" for part in self.content))]


class CohereEmbedRequest(ModelRequest, kw_only=True):
    """Cohere's fields, of which `texts` or `inputs` holds what to embed; and `prompt_name` and
    `normalize` as at /v1/embeddings.

    `truncate` is START or END for the side that is cut off, NONE to refuse what is too long. A
    number as `priority` changes nothing.
    """

    texts: list[str] | None = None
    inputs: list[ContentInput] | None = None
    model: str | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: CohereTruncate | None = None
    output_dimension: int | None = None
    dimensions: Annotated[Any, Unserved("send `output_dimension`", (0,))] = None
    output_dtype: Annotated[Any, _TYPES] = None
    embedding_type: Annotated[Any, _TYPES] = None
    prompt_name: str | None = None
    normalize: bool | None = None
    priority: AnyPriority | None = None


class EmbeddingsByType(msgspec.Struct):
    """For each type that was asked for one vector per input: a list of numbers, or base64 of
    little-endian float32. Both kinds of bits have eight dimensions to a number."""

    response_type: Literal["embeddings_by_type"]
    id: str
    embeddings: dict[str, list[list[float] | str]]
    texts: list[str]
    meta: CohereMeta


class EmbeddingsFloats(msgspec.Struct):
    """The answer of version 1 to a body that asks for no types: one vector per input."""

    response_type: Literal["embeddings_floats"]
    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: CohereMeta


@blueprint.post("/v2/embed")
async def embed_cohere() -> Response:
    """Answer with one vector per input, of each type."""
    return await _embed("2")


@blueprint.post("/v1/embed")
async def embed_cohere_v1() -> Response:
    """Answer with one vector per input; of each type if the body names types."""
    return await _embed("1")


async def _embed(version: ApiVersion) -> Response:
    with current_meter() as meter:
        body = await read_body_as(CohereEmbedRequest)
        texts, field = _texts(body)
        request = _as_openai(body)
        ranges: Ranges = {}

        def options(loaded: LoadedModel) -> EncodeOptions:
            side = CUT_SIDES.get(body.truncate, "right")
            chosen = replace(
                openai.options(request, loaded),
                outputs=frozenset({"dense"}),  # no other is answered
                truncation_side=side,
            )
            ranges.update(_ranges(body, replace(chosen, adapter=meter.adapter), loaded))
            return chosen

        answer = await embed_inputs(meter, body.model, lambda: read_inputs(texts, field), options)

        async def encode() -> Response:
            response = await json_stream(_parts(answer, texts, ranges, version))
            return openai.with_prompt(response, request, meter.loaded.spec)

        return await encode_answer(meter, answer, encode)


def _texts(body: CohereEmbedRequest) -> tuple[list[str], str]:
    """The texts to embed, and the field that they came in. Raises BadField unless there is exactly
    one such field."""
    if body.texts is not None and body.inputs is not None:
        raise BadField(
            "`texts` and `inputs` both hold what to embed; send one of them", field="inputs"
        )
    if body.texts is not None:
        return body.texts, "texts"
    if body.inputs is None:
        raise BadField("Object missing required field `texts` (or `inputs`)", field="texts")
    return [part.text or "" for item in body.inputs for part in item.content], "inputs"


def _as_openai(body: CohereEmbedRequest) -> openai.EmbeddingsRequest:
    """The options of a body in the words of /v1/embeddings, without its texts."""
    return openai.EmbeddingsRequest(
        input=[],
        model=body.model,
        output_dimension=body.output_dimension,
        truncate=None if body.truncate is None else body.truncate != "NONE",
        prompt_name=body.prompt_name,
        input_type=body.input_type,
        normalize=body.normalize,
        priority=body.priority,
    )


def _ranges(body: CohereEmbedRequest, options: EncodeOptions, loaded: LoadedModel) -> Ranges:
    """The types that a body asks for, in its order, with what each needs. Raises InvalidInput for
    those that the model cannot give."""
    field = "embedding_types"
    return {
        name: None if name == "base64" else loaded.tasks.ranges(options, name, field)
        for name in body.embedding_types or ()
    }


async def _parts(
    answer: Embeddings, texts: list[str], ranges: Ranges, version: ApiVersion
) -> AsyncIterator[bytes]:
    """The answer as EmbeddingsByType, or as EmbeddingsFloats, in slices."""
    is_bare = version == "1" and not ranges
    rest = {
        "response_type": "embeddings_floats" if is_bare else "embeddings_by_type",
        "id": g.request_id,
        "meta": meta_of(answer, version),
    }
    if is_bare:
        yield b'{"embeddings":['
        async for part in _vectors(answer.dense, "float", None):
            yield part
        yield b"],"
    else:
        yield b'{"embeddings":{'
        asked: Ranges = ranges or {"float": None}
        lists = {name: _vectors(answer.dense, name, kept) for name, kept in asked.items()}
        async for part in json_lists(lists):
            yield part
        yield b"},"
    shown = json_items(len(texts), object_width(texts), lambda start, stop: texts[start:stop])
    async for part in json_answer({"texts": shown}, rest, first=b""):
        yield part


def _vectors(
    dense: np.ndarray, name: EmbeddingType, ranges: np.ndarray | None
) -> AsyncIterator[bytes]:
    """The inside of a JSON list of the vectors as this type, in slices: each is encoded when it is
    written, so that none is held beside the float32 ones."""

    def items(start: int, stop: int) -> np.ndarray | list[str]:
        rows = dense[start:stop]
        if name == "base64":
            return [to_base64(row) for row in rows]
        return quantise(rows, name, ranges)

    count, width = dense.shape
    return json_items(count, width, items)
