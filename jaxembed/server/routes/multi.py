"""The routes that answer one kind of output alone: /embed_sparse of Text Embeddings Inference, and
/embed_multi beside it. Knows no devices."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson
from quart import Blueprint, Response

from jaxembed.data.inputs import Priority
from jaxembed.data.outputs import OutputName
from jaxembed.errors import InvalidInput, WrongTask
from jaxembed.quantise import EmbeddingDtype
from jaxembed.runtime.options import Asked, Embeddings, EncodeOptions
from jaxembed.runtime.postprocess import to_bytes
from jaxembed.runtime.tasks import Intent
from jaxembed.server.http.encoding import (
    OCTETS,
    json_matrices,
    json_stream,
    wants_octets,
)
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import accept, embed_inputs
from jaxembed.server.pipeline.body import (
    InputUnion,
    RequestInputs,
    TypedInputs,
    priority_of,
    read_body_as,
    read_inputs,
)
from jaxembed.server.pipeline.fields import (
    ModelRequest,
    TermNames,
    Unserved,
    asked_dtype,
    purposes_of,
    with_dtype,
)
from jaxembed.server.routes.tei import SIDES, Direction, InputsRequest

blueprint = Blueprint("multi", __name__)

SLICE_TERMS = 2048  # terms that are written before other tasks run
MOST_COUNTS = 4096  # characters of a header: clients and proxies refuse long ones

# TEI's words, and theirs for the route that it lacks.
REFUSALS: dict[OutputName, str] = {
    "sparse": "Model is not an embedding model with SPLADE pooling",
    "multi_vector": "Model is not an embedding model with several vectors for a text",
}

_ONE = "this route answers one output; /v1/embeddings and /embeddings take several"


class EmbedSparseRequest(ModelRequest, kw_only=True):
    """TEI's fields, `input_type`, and how many terms are answered and how."""

    inputs: InputUnion
    outputs: Annotated[Any, Unserved(_ONE, (["sparse"],))] = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    max_active_dims: int | None = None
    return_tokens: bool | None = None
    model: str | None = None
    priority: Priority | None = None


class EmbedMultiRequest(InputsRequest, kw_only=True):
    """The fields of /embed, and `input_type`: queries and documents may be treated differently."""

    inputs: TypedInputs
    outputs: Annotated[Any, Unserved(_ONE, (["multi_vector"],))] = None
    input_type: str | None = None
    dimensions: int | None = None


class Term(msgspec.Struct, omit_defaults=True):
    """The number of a term in the vocabulary and its weight; the term itself where asked for."""

    index: int
    value: float
    token: str | msgspec.UnsetType = msgspec.UNSET


@blueprint.post("/embed_sparse")
async def embed_sparse() -> Response:
    """Answer with the weights of each input's terms, those that are not zero, by their index."""
    with current_meter() as meter:
        return await answer_sparse(meter, await read_body_as(meter, EmbedSparseRequest))


@blueprint.post("/embed_multi")
async def embed_multi() -> Response:
    """Answer with the vectors of each input's tokens, for models that compare token by token."""
    with current_meter() as meter:
        body = await read_body_as(meter, EmbedMultiRequest)
        return await answer_multi(meter, body, octets=wants_octets())


async def answer_sparse(meter: Meter, body: EmbedSparseRequest) -> Response:
    """The response to a body of /embed_sparse, whichever route it came by."""
    intent, inputs = await _accept(meter, body, "sparse", max_active_dims=body.max_active_dims)
    answer = await embed_inputs(meter, inputs, intent)
    names = None
    if body.return_tokens:
        names = meter.loaded.tokenized_by(meter.route).term_names
    return await meter.answer(answer, json_stream(_terms(answer, names)))


async def answer_multi(meter: Meter, body: EmbedMultiRequest, *, octets: bool) -> Response:
    """The response to a body of /embed_multi, whichever route it came by, as `answer_embed`."""
    intent, inputs = await _accept(
        meter, body, "multi_vector", asked_dtype(body), dimensions=body.dimensions or None
    )
    answer = await embed_inputs(meter, inputs, intent)
    return with_dtype(await meter.answer(answer, _matrices(answer, octets=octets)), intent)


async def _accept(
    meter: Meter,
    body: EmbedSparseRequest | EmbedMultiRequest,
    output: OutputName,
    dtype: EmbeddingDtype | None = None,
    **options: Any,
) -> tuple[Intent, RequestInputs]:
    """The inputs, accepted by the model of a body, and what the body asks of it: the one output.
    Raises WrongTask for a model that does not give it."""
    loaded = await meter.find(body.model, "embed", {output})
    inputs = read_inputs(body.inputs, field="inputs")
    if output not in loaded.spec.representations:
        raise WrongTask(REFUSALS[output])
    asked = EncodeOptions(
        outputs=frozenset({output}),
        prompt_name=body.prompt_name,
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        priority=priority_of(body.priority),
        **options,
    )
    return accept(meter, inputs, Asked(asked, purposes_of(body), dtype=dtype)), inputs


async def _terms(answer: Embeddings, names: TermNames | None) -> AsyncIterator[bytes]:
    """A list of Terms for each input, in slices; a long list is divided."""
    sparse, parts, count = answer.sparse, [b"["], 0
    for number, (indices, values) in enumerate(zip(sparse.indices, sparse.values, strict=True)):
        parts.append(b",[" if number else b"[")
        for start in range(0, len(indices), SLICE_TERMS):
            part = slice(start, start + SLICE_TERMS)
            parts += [b"," * bool(start), _json_terms(indices[part], values[part], names)]
            count += len(indices[part])
            if count >= SLICE_TERMS:
                yield b"".join(parts)
                parts, count = [], 0
                await asyncio.sleep(0)
        parts.append(b"]")
        count += 1
    yield b"".join([*parts, b"]"])


def _json_terms(indices: np.ndarray, values: np.ndarray, names: TermNames | None) -> bytes:
    """The inside of a list of Terms, one or more, written without a dict for each."""
    numbers = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
    pairs = zip(indices.tolist(), numbers, strict=True)
    if names is None:
        return b",".join([b'{"index":%d,"value":%b}' % pair for pair in pairs])
    shown = zip(pairs, names(indices.tolist()), strict=True)
    terms = [b'{"index":%d,"value":%b,"token":%b}' % (*p, orjson.dumps(name)) for p, name in shown]
    return b",".join(terms)


async def _matrices(answer: Embeddings, *, octets: bool) -> Response:
    """The vectors of each input as JSON, or with `octets` the bytes of all, row after row, with the
    numbers of rows and the width in a header."""
    vectors = answer.multi_vector
    if not octets:
        return await json_stream(json_matrices(vectors))
    counts = ",".join(map(str, np.diff(vectors.offsets).tolist()))
    if len(counts) > MOST_COUNTS:
        raise InvalidInput(
            f"raw bytes of {len(vectors)} inputs need a header of {len(counts)} characters, and at "
            f"most {MOST_COUNTS} are sent; send fewer inputs, or accept JSON",
            field="inputs",
        )
    response = Response(to_bytes(vectors.values), content_type=OCTETS)
    response.headers["x-embedding-shape"] = f"{counts};{vectors.values.shape[1]}"
    return response
