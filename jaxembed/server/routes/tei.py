"""The routes of Text Embeddings Inference (TEI) 1.9, TEI's body for /rerank, and the routes
/embed_multi and /token_classify, which TEI does not have.

TEI serves one model. Here each body may name a `model`, and the bodies of routes that run a model
may have a `priority`. The route /rerank itself is in `cloud.py`, because it also takes Jina's body.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from quart import Blueprint

from jaxembed.data.inputs import AggregationStrategy, Priority, Text, Tokens
from jaxembed.data.outputs import OutputName
from jaxembed.errors import EmptyInput, InvalidInput, NoInputs, WrongTask, counted
from jaxembed.preprocessing.tokenizer import Tokenizer
from jaxembed.quantise import EmbeddingDtype
from jaxembed.runtime.entities import OUTSIDE, find_entities
from jaxembed.runtime.options import (
    Embeddings,
    EncodeOptions,
    RequestedOptions,
    ScoreOptions,
    TokenScores,
)
from jaxembed.runtime.tasks import Intent
from jaxembed.server.http.encoding import (
    json_list,
    json_matrices,
    json_matrix,
    json_response,
    json_stream,
    octet_response,
    wants_octets,
)
from jaxembed.server.http.exchange import Response
from jaxembed.server.meter import Meter, current_meter
from jaxembed.server.pipeline.answering import (
    accept,
    compare_texts,
    embed_inputs,
    score_documents,
    score_inputs,
    score_tokens,
)
from jaxembed.server.pipeline.body import (
    InputUnion,
    RequestInputs,
    TypedInputs,
    check_batch,
    priority_of,
    read_body_as,
    read_inputs,
    read_texts_and_pairs,
)
from jaxembed.server.pipeline.decoding import TokenId, mixed_items_error
from jaxembed.server.pipeline.fields import (
    DENSE,
    ModelRequest,
    RefusedFields,
    TermNames,
    Unserved,
    VectorsRequest,
    merged_values,
    prompt_options,
    purposes_of,
    requested_dtype,
    with_kind,
)
from jaxembed.server.routes.rerank import (
    TOP_N,
    BestChunk,
    RankingRequest,
    chunk_of,
    json_predictions,
    json_ranking,
    ranking_options,
)

blueprint: Any = Blueprint("tei", __name__)

Direction = Literal["Left", "left", "Right", "right"]
SIDES: dict[Direction | None, Literal["left", "right"]] = {
    None: "right",
    "Left": "left",
    "left": "left",
    "Right": "right",
    "right": "right",
}


ROUTES_BY_OUTPUT: dict[OutputName, str] = {  # for models without a dense output
    "sparse": "/embed_sparse",
    "multi_vector": "/embed_multi",
}

_RETURN_TEXT = Unserved("send `return_text`, or the texts as `documents`", (False,))
_DOCUMENTS = Unserved("send either `texts` or `documents`", ([],))
SLICE_TERMS = 2048  # terms that are encoded before the event loop runs other tasks
TOKENS_AT_ONCE = 256  # tokens whose entities are found on the event loop, in 0.2 to 3 ms
MAX_SHAPE_CHARACTERS = 4096  # of the shape header; clients and proxies refuse long headers

# Messages for a model without the output: TEI's, and a similar one for /embed_multi.
REFUSALS: dict[OutputName, str] = {
    "sparse": "Model is not an embedding model with SPLADE pooling",
    "multi_vector": "Model is not an embedding model with several vectors for a text",
}

_ONE = "this route returns one output; /v1/embeddings and /embeddings can return several"


class InputsRequest(VectorsRequest, kw_only=True):
    """The base of the bodies in TEI's form whose responses have vectors."""

    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    inputs: Any
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    priority: Priority | None = None


class EmbedRequest(InputsRequest, kw_only=True):
    """The body of /embed: one input or a list of inputs. A list of integers is one input of token
    ids. An input may be an object that names its type; an image must be such an object."""

    inputs: TypedInputs
    normalize: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=0)] | None = None


class EmbedAllRequest(InputsRequest, kw_only=True):
    """The body of /embed_all: the fields of /embed without `dimensions`, because the vectors are
    neither truncated nor normalised."""

    inputs: InputUnion
    normalize: Annotated[Any, Unserved("vectors of tokens are not normalised", (False,))] = None


class SimilarityInputs(msgspec.Struct):
    """One text and the texts to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(RefusedFields, kw_only=True):
    """Options for tokenizing the texts of a /similarity request."""

    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None


class SimilarityRequest(ModelRequest, kw_only=True):
    """A request for the similarity of the source sentence to each other sentence."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None
    priority: Priority | None = None


class TokenizeRequest(RefusedFields, kw_only=True):
    """The body of /tokenize: one text or a list of texts."""

    inputs: str | list[str]
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    model: str | None = None


class Token(msgspec.Struct):
    """A token of a text. `start` and `stop` are its byte offsets in the text with the prompt in
    front, or null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(msgspec.Struct):
    """The body of /decode: one sequence of token ids, or a list of sequences. For a model with
    several routes, `prompt_name` names the route whose tokenizer made the ids."""

    ids: list[TokenId | list[TokenId]]
    skip_special_tokens: bool | None = None
    prompt_name: str | None = None
    model: str | None = None


class RerankRequest(RankingRequest, kw_only=True):
    """A query, and the texts to rank by how well they answer the query. TEI has only these of the
    optional fields: `truncate`, `truncation_direction`, `raw_scores` and `return_text`."""

    query: str
    texts: list[str]
    documents: Annotated[Any, _DOCUMENTS] = None
    return_documents: Annotated[Any, _RETURN_TEXT] = None
    truncation_direction: Direction | None = None
    return_text: bool | None = None
    priority: Priority | None = None


class Rank(msgspec.Struct, omit_defaults=True):
    """The index of a text in the request, its score, and the text if the request asks for it."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET
    chunk: BestChunk | msgspec.UnsetType = msgspec.UNSET


class PredictRequest(ModelRequest, kw_only=True):
    """The body of /predict. `"a"` and `["a"]` are one text, `["a", "b"]` is one pair of texts, and
    `[["a"], ["b", "c"]]` is a batch of a text and a pair. An empty list is refused."""

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool | None = None
    priority: Priority | None = None


@blueprint.post("/embed")
async def embed() -> Response:
    """Answer with one vector per input."""
    with current_meter() as meter:
        return await answer_embed(
            meter, await read_body_as(meter, EmbedRequest), raw_bytes=wants_octets()
        )


@blueprint.post("/embed_all")
async def embed_all() -> Response:
    """Answer with one vector per token, special tokens included. The vector is the state of the
    token before pooling."""
    with current_meter() as meter:
        body = await read_body_as(meter, EmbedAllRequest)
        await meter.find(body.model, "embed")
        inputs = read_inputs(body.inputs, field="inputs")
        options = EncodeOptions(
            outputs=frozenset({"tokens"}),
            **prompt_options(body),
            truncate=body.truncate,
            truncation_side=SIDES[body.truncation_direction],
            normalize=False,
            priority=priority_of(body.priority),
        )
        intent = accept(meter, inputs, RequestedOptions(options, dtype=requested_dtype(body)))
        answer = await embed_inputs(meter, inputs, intent)
        response = await meter.answer(answer, json_stream(json_matrices(answer.tokens)))
        return with_kind(response, intent)


def _place_of_sentence(index: int) -> str:
    """Return the path of a sentence, of which the source sentence is the first."""
    return f"inputs.sentences[{index - 1}]" if index else "inputs.source_sentence"


class Sentences(RequestInputs, frozen=True):
    """The sentences of a body of /similarity: the source sentence, and then the others."""

    def place(self, index: int, part: int | None = None) -> str:
        """Return the path of a sentence."""
        return _place_of_sentence(index)


@blueprint.post("/similarity")
async def similarities() -> Response:
    """Answer with the similarity of the source sentence to each other sentence."""
    with current_meter() as meter:
        body = await read_body_as(meter, SimilarityRequest)
        parameters = body.parameters or SimilarityParameters()
        options = EncodeOptions(
            **prompt_options(parameters),
            truncate=parameters.truncate,
            truncation_side=SIDES[parameters.truncation_direction],
            priority=priority_of(body.priority),
        )
        await meter.find(body.model, "embed")
        texts = body.inputs
        if not texts.sentences:
            raise NoInputs("inputs.sentences")
        # As in TEI, the source sentence counts towards the limit on the batch size.
        listed = [texts.source_sentence, *texts.sentences]
        if "" in listed:
            raise EmptyInput(_place_of_sentence(listed.index("")))
        inputs = Sentences(*msgspec.structs.astuple(read_inputs(listed, field="inputs")))
        answer, scores = await compare_texts(meter, inputs, options)
        encoded = orjson.dumps(scores, option=orjson.OPT_SERIALIZE_NUMPY)
        return meter.stamp(json_response(encoded), answer)


@blueprint.post("/tokenize")
async def tokenize() -> Response:
    """Answer with the tokens of each text and their byte offsets. No text is truncated."""
    with current_meter() as meter:
        body = await read_body_as(meter, TokenizeRequest)
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        if not texts:
            raise NoInputs("inputs")
        check_batch(len(texts))
        if "" in texts:
            raise EmptyInput("inputs", texts.index(""))
        loaded = await meter.find(body.model, task=None)
        tokens = await loaded.tokenize_async(
            texts,
            add_special_tokens=body.add_special_tokens is not False,
            prompt_name=body.prompt_name,
            reservation=meter.reservation,
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
        body = await read_body_as(meter, DecodeRequest)
        if not body.ids or (isinstance(body.ids, list) and [] in body.ids):
            raise EmptyInput("ids")
        items = read_inputs(body.ids, field="ids").items
        loaded = await meter.find(body.model, task=None)
        texts = await loaded.decode_async(
            [item.ids for item in items if isinstance(item, Tokens)],
            skip_special_tokens=body.skip_special_tokens is not False,
            prompt_name=body.prompt_name,
            reservation=meter.reservation,
        )
        return json_response(orjson.dumps(texts))


@blueprint.post("/predict")
async def predict() -> Response:
    """Answer with every label and its score for each input, best first. A reranker has one
    label."""
    with current_meter() as meter:
        return await answer_predict(meter, await read_body_as(meter, PredictRequest))


async def answer_embed(meter: Meter, body: EmbedRequest, *, raw_bytes: bool) -> Response:
    """Answer a body of /embed, which may come from another route. With `raw_bytes` the response has
    the vectors as raw bytes, else as JSON.

    Raises InvalidInput, and the errors of `Meter.find` and `embed_inputs`. For a model without a
    dense output it raises WrongTask, whose message names the route to use.
    """
    loaded = await meter.find(body.model, "embed", DENSE)
    inputs = read_inputs(body.inputs, field="inputs")
    primary, dimensions = loaded.spec.primary, body.dimensions
    if primary in ROUTES_BY_OUTPUT:
        raise WrongTask(
            f"{loaded.name} has no dense output, only {primary}; send the request to "
            f"{ROUTES_BY_OUTPUT[primary]}"
        )
    if dimensions == 0:  # the next two messages are TEI's; /v1/embeddings accepts 0
        raise InvalidInput(
            "Input validation error: `dimensions` should be positive", field="dimensions"
        )
    if dimensions is not None and dimensions > loaded.spec.dim:
        raise InvalidInput(
            "Input validation error: `dimensions` should be smaller than the maximum embedding "
            f"dimension. Wanted: {loaded.spec.dim} or less. Given: {dimensions}",
            field="dimensions",
        )
    options = EncodeOptions(
        **prompt_options(body),
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        dimensions=dimensions,
        normalize=body.normalize is not False,
        priority=priority_of(body.priority),
    )
    intent = accept(meter, inputs, RequestedOptions(options, dtype=requested_dtype(body)))
    answer = await embed_inputs(meter, inputs, intent)
    dense = answer.dense
    encoded = octet_response(dense) if raw_bytes else json_stream(json_matrix(dense))
    return with_kind(await meter.answer(answer, encoded), intent)


async def answer_rerank(meter: Meter, body: RerankRequest) -> Response:
    """Answer a body of /rerank in TEI's form: the best text first, and among texts of equal score
    the last one first, as TEI does. Raises NoInputs, and the errors of `ranking_options`,
    `Meter.find` and `score_documents`."""
    texts = body.texts
    if not texts:
        raise NoInputs("texts")
    options = ranking_options(
        body,
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        priority=priority_of(body.priority),
    )
    (top_n,) = merged_values(body, TOP_N)
    await meter.find(body.model, "rerank")
    answer = await score_documents(meter, body.query, texts, options, field="texts")

    def item(i: int, score: np.float32) -> dict:
        text = {"text": texts[i]} if body.return_text else {}
        return {"index": i, **text, "score": score, **chunk_of(answer, i)}

    ranks = json_ranking(
        answer,
        item,
        texts if body.return_text else None,
        raw_scores=bool(body.raw_scores),
        ties="last",
        top_n=top_n,
    )
    return await meter.answer(answer, json_stream(json_list(ranks)))


async def answer_predict(meter: Meter, body: PredictRequest) -> Response:
    """Answer a body of /predict, which may come from another route. Raises InvalidInput for a list
    that mixes texts and lists, and the errors of `Meter.find` and `score_inputs`."""
    await meter.find(body.model, "classify")
    raw = body.inputs
    texts = [raw] if isinstance(raw, str) else [item for item in raw if isinstance(item, str)]
    if isinstance(raw, str) or len(texts) == len(raw):  # a flat list is one input
        inputs = read_texts_and_pairs([texts], "inputs", method="single")
    elif texts:
        first = next(i for i, item in enumerate(raw) if isinstance(item, str))
        raise mixed_items_error("inputs", first, "a list of one or two texts", "str")
    else:
        inputs = read_texts_and_pairs(raw, "inputs", method="batch")
    options = ScoreOptions(
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        priority=priority_of(body.priority),
    )
    answer = await score_inputs(meter, inputs, options)
    labels = json_predictions(answer, raw_scores=bool(body.raw_scores), ties="last")
    encoded = labels if inputs.method == "single" else json_list(labels)
    return await meter.answer(answer, json_stream(encoded))


class TokenClassifyRequest(ModelRequest, kw_only=True):
    """The body of /token_classify: one text or a list of texts, and how tokens become entities, as
    in TokenClassificationPipeline of transformers."""

    inputs: InputUnion
    aggregation_strategy: AggregationStrategy | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    priority: Priority | None = None
    ignore_labels: list[str] | None = None
    parameters: Annotated[Any, Unserved("send its fields beside `inputs`")] = None
    stride: Annotated[Any, Unserved("send long texts in parts, or with `truncate`", (0,))] = None
    raw_scores: Annotated[Any, Unserved("scores are a softmax over the labels", (False,))] = None


class TokenLabel(msgspec.Struct):
    """A token with a label, its score, and its place in the text in characters. `index` is the
    number of the token, special tokens included."""

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


class EntityGroup(msgspec.Struct):
    """Neighbouring tokens with a label, its score, and their place in the text in characters."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


@blueprint.post("/token_classify")
async def token_classify() -> Response:
    """Answer with the entities in each text."""
    with current_meter() as meter:
        return await answer_token_classify(meter, await read_body_as(meter, TokenClassifyRequest))


async def answer_token_classify(meter: Meter, body: TokenClassifyRequest) -> Response:
    """Answer a body of /token_classify, which may come from another route. Raises InvalidInput for
    token ids, and the errors of `Meter.find` and `score_tokens`."""
    if body.ignore_labels not in (None, [OUTSIDE]):
        raise InvalidInput(
            f"`ignore_labels` must be [{OUTSIDE!r}], the only label that is left out",
            field="ignore_labels",
        )
    loaded = await meter.find(body.model, "token_classify")
    inputs = read_inputs(body.inputs, field="inputs")
    options = ScoreOptions(
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        priority=priority_of(body.priority),
    )
    answer = await score_tokens(meter, inputs, options)
    texts = [item.text for item in inputs.items if isinstance(item, Text)]
    tokenizer = loaded.text_processor_of(meter.route).tokenizer
    found = _entities(answer, texts, tokenizer, body.aggregation_strategy or "none")
    encoded = found if inputs.method == "single" else json_list(found)
    return await meter.answer(answer, json_stream(encoded))


async def _entities(
    answer: TokenScores, texts: Sequence[str], tokenizer: Tokenizer, strategy: AggregationStrategy
) -> AsyncIterator[bytes]:
    """Yield the items of a JSON list, without the list's brackets: for each text a list of
    TokenLabels or EntityGroups. Other tasks run between texts, and during a long text."""

    def encoded(number: int) -> bytes:
        name = "entity" if strategy == "none" else "entity_group"
        listed = []
        for one in find_entities(answer, number, texts[number], tokenizer, strategy):
            index = {} if one.index is None else {"index": one.index}
            score = np.float32(one.score)  # which orjson writes in fewer digits
            place = {"word": one.word, "start": one.start, "end": one.end}
            listed.append({name: one.label, "score": score, **index, **place})
        return orjson.dumps(listed, option=orjson.OPT_SERIALIZE_NUMPY)

    for number, tokens in enumerate(answer.num_tokens.tolist()):
        if number:
            yield b","
        is_long = tokens > TOKENS_AT_ONCE
        yield await asyncio.to_thread(encoded, number) if is_long else encoded(number)
        await asyncio.sleep(0)


class EmbedSparseRequest(ModelRequest, kw_only=True):
    """The body of /embed_sparse. `max_active_dims` limits the number of terms of an input, and
    `return_tokens` adds the terms themselves."""

    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    inputs: InputUnion
    outputs: Annotated[Any, Unserved(_ONE, (["sparse"],))] = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    input_type: str | None = None
    max_active_dims: int | None = None
    return_tokens: bool | None = None
    priority: Priority | None = None


class EmbedMultiRequest(InputsRequest, kw_only=True):
    """The body of /embed_multi: the fields of /embed without `normalize`, and also `input_type`,
    because models may treat queries and documents differently."""

    inputs: TypedInputs
    outputs: Annotated[Any, Unserved(_ONE, (["multi_vector"],))] = None
    input_type: str | None = None
    dimensions: int | None = None


class Term(msgspec.Struct, omit_defaults=True):
    """The index of a term in the vocabulary, its weight as `value`, and the term itself as `token`
    if the request asks for it."""

    index: int
    value: float
    token: str | msgspec.UnsetType = msgspec.UNSET


@blueprint.post("/embed_sparse")
async def embed_sparse() -> Response:
    """Answer with the terms of each input whose weight is not zero, in the order of their
    indices."""
    with current_meter() as meter:
        return await answer_sparse(meter, await read_body_as(meter, EmbedSparseRequest))


@blueprint.post("/embed_multi")
async def embed_multi() -> Response:
    """Answer with the vectors of each input's tokens, for models that compare token by token."""
    with current_meter() as meter:
        body = await read_body_as(meter, EmbedMultiRequest)
        return await answer_multi(meter, body, raw_bytes=wants_octets())


async def answer_sparse(meter: Meter, body: EmbedSparseRequest) -> Response:
    """Answer a body of /embed_sparse, which may come from another route. Raises WrongTask for a
    model without a sparse output, and the errors of `Meter.find` and `embed_inputs`."""
    intent, inputs = await _accept(meter, body, "sparse", max_active_dims=body.max_active_dims)
    answer = await embed_inputs(meter, inputs, intent)
    names = meter.loaded.text_processor_of(meter.route).term_names if body.return_tokens else None
    return await meter.answer(answer, json_stream(_terms(answer, names)))


async def answer_multi(meter: Meter, body: EmbedMultiRequest, *, raw_bytes: bool) -> Response:
    """Answer a body of /embed_multi, which may come from another route. With `raw_bytes` the
    response is raw bytes, else JSON. Raises WrongTask for a model without a multi-vector output,
    InvalidInput if the shape header is too long, and the errors of `Meter.find` and
    `embed_inputs`."""
    intent, inputs = await _accept(
        meter, body, "multi_vector", requested_dtype(body), dimensions=body.dimensions or None
    )
    answer = await embed_inputs(meter, inputs, intent)
    return with_kind(await meter.answer(answer, _matrices(answer, raw_bytes=raw_bytes)), intent)


async def _accept(
    meter: Meter,
    body: EmbedSparseRequest | EmbedMultiRequest,
    output: OutputName,
    dtype: EmbeddingDtype | None = None,
    **options: Any,
) -> tuple[Intent, RequestInputs]:
    """Find the model of a body, and return what the body asks for, resolved for the model, and the
    inputs. `output` is the one output to compute, `dtype` its dtype if the body names one, and
    `options` are further fields of EncodeOptions. Raises WrongTask for a model without the
    output."""
    loaded = await meter.find(body.model, "embed", {output})
    inputs = read_inputs(body.inputs, field="inputs")
    if output not in loaded.spec.representations:
        raise WrongTask(REFUSALS[output])
    encode_options = EncodeOptions(
        outputs=frozenset({output}),
        **prompt_options(body),
        truncate=body.truncate,
        truncation_side=SIDES[body.truncation_direction],
        priority=priority_of(body.priority),
        **options,
    )
    return accept(
        meter, inputs, RequestedOptions(encode_options, purposes_of(body), dtype=dtype)
    ), inputs


async def _terms(answer: Embeddings, names: TermNames | None) -> AsyncIterator[bytes]:
    """Yield a JSON list in slices, between which other tasks run: for each input a list of Terms.
    `names` maps the indices of terms to the terms themselves; None leaves the terms out."""
    # `pending` counts the terms and inputs whose JSON is in `parts`
    sparse, parts, pending = answer.sparse, [b"["], 0
    for row, (indices, values) in enumerate(zip(sparse.indices, sparse.values, strict=True)):
        parts.append(b",[" if row else b"[")
        for start in range(0, len(indices), SLICE_TERMS):
            part = slice(start, start + SLICE_TERMS)
            parts += [b"," * bool(start), _json_terms(indices[part], values[part], names)]
            pending += len(indices[part])
            if pending >= SLICE_TERMS:
                yield b"".join(parts)
                parts, pending = [], 0
                await asyncio.sleep(0)
        parts.append(b"]")
        pending += 1
    yield b"".join([*parts, b"]"])


def _json_terms(indices: np.ndarray, values: np.ndarray, names: TermNames | None) -> bytes:
    """Return the JSON of one or more Terms, joined by commas. It is faster than a dict for each."""
    weights = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
    pairs = zip(indices.tolist(), weights, strict=True)
    if names is None:
        return b",".join([b'{"index":%d,"value":%b}' % pair for pair in pairs])
    named = zip(pairs, names(indices.tolist()), strict=True)
    terms = [b'{"index":%d,"value":%b,"token":%b}' % (*p, orjson.dumps(name)) for p, name in named]
    return b",".join(terms)


async def _matrices(answer: Embeddings, *, raw_bytes: bool) -> Response:
    """Encode the vectors of each input as JSON, or with `raw_bytes` as raw bytes, row after row.
    With raw bytes, the header x-embedding-shape has the number of vectors of each input and their
    width, such as `3,5;128`. Raises InvalidInput if the header is too long."""
    vectors = answer.multi_vector
    if not raw_bytes:
        return await json_stream(json_matrices(vectors))
    counts = ",".join(map(str, np.diff(vectors.offsets).tolist()))
    if len(counts) > MAX_SHAPE_CHARACTERS:
        raise InvalidInput(
            f"raw bytes of so many inputs ({len(vectors)}) need a header of "
            f"{counted(len(counts), 'character')}; the maximum is {MAX_SHAPE_CHARACTERS}, "
            "so send fewer inputs or accept JSON",
            field="inputs",
        )
    return await octet_response(vectors.values, f"{counts};{vectors.values.shape[1]}")
