"""POST /v2/embed, /v1/embed and /v2/rerank in the words of Cohere. Knows JSON and no tokens."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from quart import Blueprint, Response, g

from jaxembed.preprocessing.tokenizer import Side
from jaxembed.quantise import embedding_dtype, quantise
from jaxembed.runtime.options import Asked, Embeddings, EncodeOptions, Scores
from jaxembed.runtime.postprocess import to_base64
from jaxembed.server.errors import BadField
from jaxembed.server.http.encoding import (
    json_answer,
    json_items,
    json_lists,
    json_stream,
    object_width,
)
from jaxembed.server.meter import current_meter
from jaxembed.server.pipeline.answering import accept, embed_inputs
from jaxembed.server.pipeline.body import (
    MOST_CONTENT,
    AnyPriority,
    ImageSource,
    ImageUrl,
    facts_of_images,
    priority_of,
    read_body_as,
    read_inputs,
    too_many_parts,
)
from jaxembed.server.pipeline.fields import DENSE, ModelRequest, Unserved, purposes_of, with_choices
from jaxembed.server.routes.rerank import DocumentsRequest, Result, rerank_documents

blueprint = Blueprint("cohere", __name__)

ApiVersion = Literal["1", "2"]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
CohereTruncate = Literal["NONE", "START", "END"]

Ranges = dict[EmbeddingType, np.ndarray | None]  # of each type asked for; None where it needs none

CUT_SIDES: dict[CohereTruncate | None, Side] = {"START": "left"}

_TYPES = Unserved("send `embedding_types`", ("float", ["float"]))

SEARCH_UNITS = 1  # what Cohere bills for a request; some clients add it up


class ContentPart(msgspec.Struct, gc=False):
    """A part of an input: a text, or an image by its URL."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: str | ImageUrl | None = None


class ContentInput(msgspec.Struct, gc=False):
    """An input of several parts, which has one vector: that of its one image, or of its texts as
    lines of one.

    Its parts become one as soon as it is decoded: many small ones take much memory. Raises
    ValueError for an image beside other parts.
    """

    content: list[ContentPart]

    def __post_init__(self) -> None:
        if len(self.content) > MOST_CONTENT:
            raise ValueError(too_many_parts(len(self.content)))
        for k, part in enumerate(self.content):
            field = "text" if part.type == "text" else "image_url"
            if not getattr(part, field):
                raise ValueError(f"`content[{k}].{field}` cannot be empty")
            if field == "image_url" and len(self.content) > 1:
                raise ValueError(
                    f"`content[{k}]` is an image beside other parts, and this server gives an "
                    "image a vector of its own"
                )
        if all(part.type == "text" for part in self.content):
            text = "\n".join(part.text or "" for part in self.content)
            self.content = [ContentPart("text", text)]

    @property
    def source(self) -> str | ImageSource:
        """The text, or the image."""
        (part,) = self.content
        url = part.image_url
        if url is None:
            return part.text or ""
        return ImageSource(url.url if isinstance(url, ImageUrl) else url)


class CohereEmbedRequest(ModelRequest, kw_only=True):
    """Cohere's fields, of which `texts`, `images` or `inputs` holds what to embed; and
    `prompt_name` and `normalize` as at /v1/embeddings. For images an `input_type` of image changes
    nothing.

    `truncate` is START or END for the side that is cut off, NONE to refuse what is too long. A
    number as `priority` changes nothing.
    """

    texts: list[str] | None = None
    images: list[str] | None = None
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


class CohereMeta(msgspec.Struct):
    """`tokens.input_tokens` are those really run."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]


class CohereResponse(msgspec.Struct):
    """The best documents, best first; equal ones in the order they came."""

    results: list[Result]
    id: str
    meta: CohereMeta


class ImageShown(msgspec.Struct):
    """What the header of an image says: `bit_depth` is that of a pixel."""

    width: int
    height: int
    format: str
    bit_depth: int


class EmbeddingsByType(msgspec.Struct, omit_defaults=True):
    """For each type that was asked for one vector per input: a list of numbers, or base64 of
    little-endian float32. Both kinds of bits have eight dimensions to a number."""

    response_type: Literal["embeddings_by_type"]
    id: str
    embeddings: dict[str, list[list[float] | str]]
    texts: list[str]
    meta: CohereMeta
    images: list[ImageShown] | msgspec.UnsetType = msgspec.UNSET


class EmbeddingsFloats(msgspec.Struct, omit_defaults=True):
    """The answer of version 1 to a body that asks for no types: one vector per input."""

    response_type: Literal["embeddings_floats"]
    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: CohereMeta
    images: list[ImageShown] | msgspec.UnsetType = msgspec.UNSET


@blueprint.post("/v2/rerank")
async def rerank_cohere() -> Response:
    """Rank documents by how well they answer a query."""
    with current_meter() as meter:
        answer, results = await rerank_documents(meter, await read_body_as(meter, DocumentsRequest))
        rest = {"id": g.request_id, "meta": _meta_of(answer, "2")}
        encoded = json_answer({"results": results()}, rest)
        return await meter.answer(answer, json_stream(encoded))


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
        body = await read_body_as(meter, CohereEmbedRequest)
        sources, field = _sources(body)
        await meter.find(body.model, "embed", DENSE)
        inputs = read_inputs(sources, field)
        of_images = body.input_type == "image" and ImageSource in map(type, sources)
        options = EncodeOptions(
            prompt_name=body.prompt_name,
            truncate=None if body.truncate is None else body.truncate != "NONE",
            truncation_side=CUT_SIDES.get(body.truncate, "right"),
            dimensions=body.output_dimension or None,
            normalize=body.normalize is not False,
            priority=priority_of(body.priority),
            bare_ids=meter.service.config.accept_bare_token_ids,
        )
        asked = Asked(  # dense vectors, for no other output is answered
            options,
            () if of_images else purposes_of(body),
            types=tuple(
                embedding_dtype(one) for one in body.embedding_types or () if one != "base64"
            ),
            dimensions_field="output_dimension",
        )
        intent = accept(meter, inputs, asked)
        answer = await embed_inputs(meter, inputs, intent)
        texts = [one for one in sources if isinstance(one, str)]
        rest: dict[str, Any] = {"meta": _meta_of(answer, version)}
        if facts := await facts_of_images(meter.images):
            rest["images"] = [asdict(one) for one in facts]

        async def encode() -> Response:
            # the types that the body asks for, in its order, with the ranges that each needs
            ranges: Ranges = {
                name: None if name == "base64" else intent.types[name]
                for name in body.embedding_types or ()
            }
            response = await json_stream(_parts(answer, texts, rest, ranges, version))
            return with_choices(response, intent)

        return await meter.answer(answer, encode())


def _sources(body: CohereEmbedRequest) -> tuple[Sequence[str | ImageSource], str]:
    """The texts and images to embed, and the field that they came in. Raises BadField unless there
    is exactly one such field."""
    given = [name for name in ("texts", "images", "inputs") if getattr(body, name) is not None]
    if len(given) > 1:
        shown = " and ".join(f"`{name}`" for name in given)
        raise BadField(f"{shown} both hold what to embed; send one of them", field=given[-1])
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
    """The answer as EmbeddingsByType, or as EmbeddingsFloats, in slices. `rest` has the fields that
    are not lists of inputs."""
    is_bare = version == "1" and not ranges
    kind = "embeddings_floats" if is_bare else "embeddings_by_type"
    rest = {"response_type": kind, "id": g.request_id, **rest}
    shown = json_items(len(texts), object_width(texts), lambda start, stop: texts[start:stop])
    lists = {"texts": shown}
    if is_bare:
        lists = {"embeddings": _vectors(answer.dense, "float", None), "texts": shown}
    else:
        yield b'{"embeddings":{'
        asked: Ranges = ranges or {"float": None}
        async for part in json_lists(
            {name: _vectors(answer.dense, name, kept) for name, kept in asked.items()}
        ):
            yield part
        yield b"},"
    async for part in json_answer(lists, rest, first=b"{" if is_bare else b""):
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

    return json_items(len(dense), dense.shape[1], items)


def _meta_of(answer: Embeddings | Scores, version: ApiVersion) -> dict:
    """The fields of CohereMeta: Cohere bills the tokens of texts to embed, and searches."""
    tokens = int(answer.num_tokens.sum())
    is_search = isinstance(answer, Scores)
    return {
        "api_version": {"version": version},
        "billed_units": {"search_units": SEARCH_UNITS} if is_search else {"input_tokens": tokens},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }
