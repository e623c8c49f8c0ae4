"""POST /v2/embed, /v1/embed and /v2/rerank, as Cohere's API defines them."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from quart import Blueprint

from jaxembed.quantise import embedding_dtype, quantise
from jaxembed.runtime.options import Embeddings, EncodeOptions, RequestedOptions, Scores
from jaxembed.runtime.postprocess import to_base64
from jaxembed.server.errors import BadField
from jaxembed.server.http.encoding import (
    json_answer,
    json_items,
    json_lists,
    json_stream,
    object_width,
)
from jaxembed.server.http.exchange import Response, current_exchange
from jaxembed.server.meter import current_meter
from jaxembed.server.pipeline.answering import accept, embed_inputs
from jaxembed.server.pipeline.body import (
    AnyPriority,
    ImageSource,
    PartsInput,
    Source,
    facts_of_images,
    priority_of,
    read_body_as,
    read_inputs,
)
from jaxembed.server.pipeline.fields import (
    DENSE,
    ModelRequest,
    Unserved,
    prompt_options,
    purposes_of,
    with_choices,
)
from jaxembed.server.routes.rerank import DocumentsRequest, Result, rerank_documents

blueprint: Any = Blueprint("cohere", __name__)

ApiVersion = Literal["1", "2"]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
CohereTruncate = Literal["NONE", "START", "END"]

# Calibration ranges by type: the lowest and the highest value of each dimension, float32 [2, dim],
# or None for a type that needs no ranges.
Ranges = dict[EmbeddingType, np.ndarray | None]

_TYPES = Unserved("send `embedding_types`", ("float", ["float"]))

SEARCH_UNITS = 1  # what Cohere bills for a request to rerank; some clients sum the units


class CohereEmbedRequest(ModelRequest, kw_only=True):
    """A request to embed, with Cohere's fields; `prompt_name` and `normalize` are as at
    /v1/embeddings.

    Exactly one of `texts`, `images` and `inputs` holds what to embed. `input_type` says what the
    texts are for; the value image, sent with images, has no effect. `truncate` is the side on which
    to truncate, START or END, or NONE to refuse inputs over the limit. A number as `priority` has
    no effect.
    """

    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[PartsInput] | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: CohereTruncate | None = None
    output_dimension: int | None = None
    dimensions: Annotated[Any, Unserved("send `output_dimension`", (0,))] = None
    output_dtype: Annotated[Any, _TYPES] = None
    embedding_type: Annotated[Any, _TYPES] = None
    normalize: bool | None = None
    priority: AnyPriority | None = None


class CohereMeta(msgspec.Struct):
    """Facts about the request. `tokens.input_tokens` counts the tokens that the model ran."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]


class CohereResponse(msgspec.Struct):
    """The best documents, best first. Documents of equal score keep their order."""

    results: list[Result]
    id: str
    meta: CohereMeta


class ImageShown(msgspec.Struct):
    """The facts in the header of an image file: the size in pixels, the format, and the bits per
    pixel."""

    width: int
    height: int
    format: str
    bit_depth: int


class EmbedResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields that EmbeddingsByType and EmbeddingsFloats have in common."""

    id: str
    texts: list[str]
    meta: CohereMeta
    images: list[ImageShown] | msgspec.UnsetType = msgspec.UNSET


class EmbeddingsByType(EmbedResponse, kw_only=True, omit_defaults=True):
    """The response with one vector per input for each type that the request asks for. A vector is a
    list of numbers, or base64 of little-endian float32 numbers. The types binary and ubinary pack
    eight dimensions into a number."""

    response_type: Literal["embeddings_by_type"]
    embeddings: dict[str, list[list[float] | str]]


class EmbeddingsFloats(EmbedResponse, kw_only=True, omit_defaults=True):
    """The response of /v1/embed to a body that names no types: one vector per input."""

    response_type: Literal["embeddings_floats"]
    embeddings: list[list[float]]


@blueprint.post("/v2/rerank")
async def rerank_cohere() -> Response:
    """Rank documents by how well they answer a query."""
    with current_meter() as meter:
        answer, results = await rerank_documents(meter, await read_body_as(meter, DocumentsRequest))
        rest = {"id": current_exchange().request_id, "meta": _meta_of(answer, "2")}
        encoded = json_answer({"results": results()}, rest)
        return await meter.answer(answer, json_stream(encoded))


@blueprint.post("/v2/embed")
async def embed_cohere() -> Response:
    """Answer with one vector per input, in each type that the body names."""
    return await _embed("2")


@blueprint.post("/v1/embed")
async def embed_cohere_v1() -> Response:
    """Answer with one vector per input as EmbeddingsFloats, or if the body names types as
    EmbeddingsByType."""
    return await _embed("1")


async def _embed(version: ApiVersion) -> Response:
    """Answer a request to embed in the form of Cohere's API `version`."""
    with current_meter() as meter:
        body = await read_body_as(meter, CohereEmbedRequest)
        sources, field = _sources(body)
        await meter.find(body.model, "embed", DENSE)
        inputs = read_inputs(sources, field)
        # the `input_type` image names no purpose of texts
        of_images = body.input_type == "image" and inputs.has_images
        requested = RequestedOptions(
            EncodeOptions(  # dense is the only output
                **prompt_options(body),
                truncate=None if body.truncate is None else body.truncate != "NONE",
                truncation_side="left" if body.truncate == "START" else "right",
                dimensions=body.output_dimension or None,
                normalize=body.normalize is not False,
                priority=priority_of(body.priority),
                bare_ids=meter.service.config.accept_bare_token_ids,
            ),
            purposes=() if of_images else purposes_of(body),
            types=tuple(
                embedding_dtype(item) for item in body.embedding_types or () if item != "base64"
            ),
            dimensions_field="output_dimension",
        )
        intent = accept(meter, inputs, requested)
        answer = await embed_inputs(meter, inputs, intent)
        texts = [item for item in sources if isinstance(item, str)]
        rest: dict[str, Any] = {"meta": _meta_of(answer, version)}
        if facts := await facts_of_images(meter.images):
            rest["images"] = [asdict(item) for item in facts]

        async def encode() -> Response:
            # the types that the body names, each with its calibration ranges
            ranges: Ranges = {
                name: None if name == "base64" else intent.types[name]
                for name in body.embedding_types or ()
            }
            response = await json_stream(_parts(answer, texts, rest, ranges, version))
            return with_choices(response, intent)

        return await meter.answer(answer, encode())


def _sources(body: CohereEmbedRequest) -> tuple[Sequence[Source], str]:
    """Return the texts or images to embed, and the name of the field that holds them. Raises
    BadField unless exactly one of `texts`, `images` and `inputs` is given."""
    fields = [field for field in ("texts", "images", "inputs") if getattr(body, field) is not None]
    if len(fields) > 1:
        shown = " and ".join(f"`{field}`" for field in fields)
        raise BadField(f"the body has {shown}; send one of them", field=fields[-1])
    if body.texts is not None:
        return body.texts, "texts"
    if body.images is not None:
        return [ImageSource(image) for image in body.images], "images"
    if body.inputs is None:
        raise BadField(
            "Object missing required field `texts` (or `images`, `inputs`)", field="texts"
        )
    return [item.source for item in body.inputs], "inputs"


async def _parts(
    answer: Embeddings,
    texts: list[str],
    rest: dict[str, Any],
    ranges: Ranges,
    version: ApiVersion,
) -> AsyncIterator[bytes]:
    """Yield the JSON of the response in slices: EmbeddingsFloats if `version` is 1 and the body
    names no types, else EmbeddingsByType. `rest` has the fields `meta` and `images`. `ranges` maps
    the types that the body names to their calibration ranges."""
    is_bare = version == "1" and not ranges
    response_type = "embeddings_floats" if is_bare else "embeddings_by_type"
    rest = {"response_type": response_type, "id": current_exchange().request_id, **rest}
    text_items = json_items(len(texts), object_width(texts), lambda start, stop: texts[start:stop])
    lists = {"texts": text_items}
    if is_bare:
        lists = {"embeddings": _vectors(answer.dense, "float", None), "texts": text_items}
    else:  # `embeddings` is an object with a list for each type
        yield b'{"embeddings":{'
        types: Ranges = ranges or {"float": None}
        vectors = {name: _vectors(answer.dense, name, types[name]) for name in types}
        async for part in json_lists(vectors):
            yield part
        yield b"},"
    async for part in json_answer(lists, rest, first=b"{" if is_bare else b""):
        yield part


def _vectors(
    dense: np.ndarray, name: EmbeddingType, ranges: np.ndarray | None
) -> AsyncIterator[bytes]:
    """Return an iterator over the items of a JSON list, in slices: the vectors in the type `name`.
    Each slice is encoded when it is written, so that no copy of all vectors is in memory. `dense`
    is float32 `[inputs, dim]`. `ranges` are the calibration ranges of the type, float32 `[2, dim]`,
    or None if it needs none."""

    def items(start: int, stop: int) -> np.ndarray | list[str]:
        rows = dense[start:stop]
        if name == "base64":
            return [to_base64(row) for row in rows]
        return quantise(rows, name, ranges)

    return json_items(len(dense), dense.shape[1], items)


def _meta_of(answer: Embeddings | Scores, version: ApiVersion) -> dict:
    """Return the fields of CohereMeta. The billed units are those of Cohere: the tokens of a
    request to embed, and one search for a request to rerank."""
    tokens = answer.total_tokens
    is_search = isinstance(answer, Scores)
    return {
        "api_version": {"version": version},
        "billed_units": {"search_units": SEARCH_UNITS} if is_search else {"input_tokens": tokens},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }
