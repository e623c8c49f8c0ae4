"""Builds the OpenAPI 3.0 document from the msgspec Structs of the routes. Knows no request.

The version is 3.0 because the bundled Swagger UI cannot read 3.1. quart-schema writes 3.1 and loads
its pages from a CDN.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from werkzeug.routing import Rule

from jaxembed import __version__
from jaxembed.data.inputs import Priority
from jaxembed.server.errors import REPOSITORY, Dialect, dialect_of
from jaxembed.server.http.encoding import JSON, OCTETS
from jaxembed.server.pipeline.body import PRIORITY
from jaxembed.server.pipeline.unsupported import ModelRequest, unserved
from jaxembed.server.routes import (
    classify,
    cloud,
    cohere,
    cohere_embed,
    contextualized,
    info,
    jina,
    multi,
    multimodal,
    openai,
    ops,
    tei,
    tei_scores,
    triton,
    voyage,
)
from jaxembed.server.routes.common import scoring
from jaxembed.server.routes.common.rerank import DocumentsRequest

PATH_PARAMETER = re.compile(r"<(?:\w+:)?(\w+)>")


class OpenAIErrorDetail(msgspec.Struct):
    """A description of the error; `param` is the path of the field that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    """The body of every error under /v1; `detail` repeats the message."""

    error: OpenAIErrorDetail
    detail: str


class TeiError(msgspec.Struct):
    """The body of every other error."""

    error: str
    error_type: str


class CohereError(msgspec.Struct):
    """The body of every error under /v2 and of /v1/embed."""

    message: str


ERRORS: dict[Dialect, type] = {"openai": OpenAIError, "cohere": CohereError, "tei": TeiError}


class AnyOf:
    """A union of the possible types of a body: msgspec has no union of Structs without a tag."""

    def __init__(self, *kinds: Any):
        self.kinds = kinds


@dataclass(frozen=True)
class Route:
    """The bodies of a handler's requests and responses.

    `response` is a type for JSON, a media type for anything else, or None.
    """

    endpoint: str  # `<blueprint>.<handler>`; the handler's decorators have the paths
    summary: str
    request: Any = None
    response: Any = None
    octets: bool = False  # also answers raw bytes
    query: tuple[str, ...] = ()  # the names of parameters after `?`


VECTORS = list[list[float]]
RERANKS = AnyOf(tei_scores.RerankRequest, DocumentsRequest)
RANKINGS = AnyOf(list[tei_scores.Rank], jina.JinaResponse)
LABELS = AnyOf(list[scoring.Prediction], list[list[scoring.Prediction]])
TERMS = list[list[multi.Term]]
ANY_REQUEST = AnyOf(*cloud.EMBEDS.values(), *RERANKS.kinds, tei_scores.PredictRequest)
ANY_RESPONSE = AnyOf(VECTORS, TERMS, list[VECTORS], *RANKINGS.kinds, *LABELS.kinds)
UNQUEUED = (tei.TokenizeRequest, tei.DecodeRequest)  # they run no device, so they take no priority

# fmt: off
ROUTES = (
    Route("openai.embeddings", "Embed, as OpenAI", openai.EmbeddingsRequest,
          openai.EmbeddingsResponse, octets=True),
    Route("contextualized.contextualized_embeddings",
          "A vector of each chunk of documents, as Voyage", contextualized.ContextualizedRequest,
          contextualized.ContextualizedResponse),
    Route("multimodal.embed_multimodal", "Embed texts and images, as Voyage",
          multimodal.MultimodalRequest, multimodal.MultimodalResponse),
    Route("ops.list_models", "The served names", response=ops.ModelList),
    Route("ops.list_models_unprefixed", "The served names, as Infinity", response=ops.ModelList),
    Route("ops.model", "One served name", response=ops.ServedModel),
    Route("tei.embed", "One vector per input", tei.EmbedRequest, VECTORS, octets=True),
    Route("tei.embed_all", "One vector per token", tei.EmbedAllRequest, list[VECTORS]),
    Route("tei.similarities", "Similarities", tei.SimilarityRequest, list[float]),
    Route("tei.tokenize", "Tokens", tei.TokenizeRequest, list[list[tei.Token]]),
    Route("tei.decode_ids", "Text of token ids", tei.DecodeRequest, list[str]),
    Route("multi.embed_sparse", "Weights of terms", multi.EmbedSparseRequest, TERMS),
    Route("multi.embed_multi", "Vectors to compare token by token", multi.EmbedMultiRequest,
          list[VECTORS], octets=True),
    Route("multi.multi_vector", "Vectors to compare token by token, as Jina",
          openai.EmbeddingsRequest, openai.EmbeddingsResponse),
    Route("hosted.rerank_texts", "Texts by how well they answer a query; also takes Jina's body",
          RERANKS, RANKINGS),
    Route("tei_scores.predict", "Labels with scores", tei_scores.PredictRequest, LABELS),
    Route("jina.rerank_jina", "Rerank, as Jina; as Voyage with `top_k` or `truncation`",
          DocumentsRequest, AnyOf(jina.JinaResponse, voyage.VoyageResponse)),
    Route("cohere.rerank_cohere", "Rerank, as Cohere", DocumentsRequest, cohere.CohereResponse),
    Route("cohere_embed.embed_cohere", "Embed, as Cohere", cohere_embed.CohereEmbedRequest,
          cohere_embed.EmbeddingsByType),
    Route("cohere_embed.embed_cohere_v1", "Embed, as Cohere's version 1",
          cohere_embed.CohereEmbedRequest,
          AnyOf(cohere_embed.EmbeddingsFloats, cohere_embed.EmbeddingsByType)),
    Route("classify.classify", "Labels with scores, as Infinity", classify.ClassifyRequest,
          classify.ClassifyResponse),
    Route("hosted.root", "What the body asks for", ANY_REQUEST, ANY_RESPONSE, octets=True),
    Route("hosted.invocations", "What the body asks for, for SageMaker", ANY_REQUEST,
          ANY_RESPONSE, octets=True),
    Route("hosted.vertex", "What each instance asks for, for Vertex AI", cloud.VertexRequest,
          cloud.VertexResponse),
    Route("info.info", "A model and its limits; with `verbose` what its speed depends on",
          response=info.Info, query=("model", "verbose")),
    Route("repository.index", "Every model by name, and whether it is in memory",
          triton.IndexRequest, list[triton.IndexedModel]),
    Route("repository.load", "Load a model", triton.LoadRequest, triton.IndexedModel),
    Route("repository.unload", "Take a model out of memory", triton.LoadRequest,
          triton.IndexedModel),
    Route("repository.alias", "Move a name to another model", triton.AliasRequest,
          triton.IndexedModel),
    Route("repository.drop_alias", "Drop such a name", response=triton.IndexedModel),
    Route("ops.probe", "Health"),
    Route("ops.health", "Whether the model answers", response=ops.Health),
    Route("ops.ping", "Health, for SageMaker"),
    Route("ops.livez", "Whether the process can go on"),
    Route("ops.ready", "Whether traffic should come here"),
    Route("metrics.metrics", "Prometheus metrics", response="text/plain"),
    Route("docs.page", "This page", response="text/html"),
    Route("playground.playground", "A page to try the models", response="text/html"),
    Route("docs.openapi", "This document", response=dict[str, Any]),
)
# fmt: on


def document(rules: Iterable[Rule]) -> dict:
    """Build the OpenAPI document of ROUTES, as values for JSON.

    `rules` are the URL rules of the app. They give each endpoint in ROUTES its paths and methods;
    rules of other endpoints are left out, and so are endpoints without a rule.
    """
    kinds = [
        kind
        for route in ROUTES
        for body in (route.request, route.response)
        if body is not None and not isinstance(body, str)
        for kind in _kinds(body)
    ]
    kinds += ERRORS.values()
    shapes, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for name, schema in components.items():
        components[name] = _of_served(schema)
    schemas = {str(kind): shape for kind, shape in zip(kinds, shapes, strict=True)}
    paths: dict[str, dict] = {}
    operations = _operations(rules)
    for route in ROUTES:
        for path, method in operations[route.endpoint]:
            paths.setdefault(path, {})[method] = _operation(route, path, method, schemas)
    return {
        "openapi": "3.0.3",
        "info": {"title": "jaxembed", "version": __version__},
        "paths": as_openapi_3_0(paths),
        "components": {
            "schemas": as_openapi_3_0(components),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def as_openapi_3_0(schema: Any) -> Any:
    """Convert a JSON Schema of msgspec to OpenAPI 3.0.

    In JSON Schema 2020-12 null is a type; OpenAPI 3.0 has the keyword `nullable` instead.
    """
    if isinstance(schema, list):
        return [as_openapi_3_0(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: as_openapi_3_0(value) for key, value in schema.items()}
    choices = schema.get("anyOf")
    if not isinstance(choices, list) or {"type": "null"} not in choices:
        return schema
    rest = [choice for choice in choices if choice != {"type": "null"}]
    del schema["anyOf"]
    if len(rest) == 1 and "$ref" not in rest[0]:
        return {**rest[0], **schema, "nullable": True}
    return {**schema, "anyOf": rest, "nullable": True}


def _of_served(schema: dict) -> dict:
    """Remove from a schema the fields that a body may have only with values without effect."""
    fields = unserved(ModelRequest)
    properties = schema.get("properties", {}).items()
    served = {n: field for n, field in properties if n not in fields or field != {"default": None}}
    return schema | {"properties": served} if properties else schema


def _kinds(body: Any) -> tuple:
    """The types that a body may have."""
    return body.kinds if isinstance(body, AnyOf) else (body,)


def _schema(body: Any, schemas: dict[str, dict]) -> dict:
    """The schema of a body; `schemas` are the schemas by name of the type."""
    found = [schemas[str(kind)] for kind in _kinds(body)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _operations(rules: Iterable[Rule]) -> dict[str, list[tuple[str, str]]]:
    """The pairs of path and method of each endpoint, in the order of the handler's decorators.

    The rules have the reverse order, because Python applies the last decorator first.
    """
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for rule in rules:
        path = PATH_PARAMETER.sub(r"{\1}", rule.rule)
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            found[rule.endpoint].insert(0, (path, method.lower()))
    return found


def _operation(route: Route, path: str, method: str, schemas: dict[str, dict]) -> dict:
    """Build the OpenAPI operation of a route for one path and method."""
    name = path.strip("/").replace("/", "_").replace("{", "").replace("}", "") or "root"
    error = ERRORS[dialect_of(path)]
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{method}_{name}",
        "tags": [error.__name__.removesuffix("Error")],
        "responses": {
            "default": {"description": "Error", "content": {JSON: {"schema": schemas[str(error)]}}}
        },
    }
    operation["responses"]["200"] = {"description": "OK", **_content(route, schemas)}
    if route.request is not None:
        body = {"required": True, "content": {JSON: {"schema": _schema(route.request, schemas)}}}
        operation["requestBody"] = body
    if parameters := _parameters(route, path):
        operation["parameters"] = parameters
    return operation


def _parameters(route: Route, path: str) -> list[dict]:
    """The parameters of a request in its path, query and headers."""
    text = {"type": "string"}
    parameters: list[dict] = []
    for name in re.findall(r"\{(\w+)\}", path):
        parameters.append({"name": name, "in": "path", "required": True, "schema": text})
    for name in route.query:
        parameters.append({"name": name, "in": "query", "schema": text, "allowEmptyValue": True})
    is_queued = route.request not in UNQUEUED and not path.startswith(REPOSITORY)
    if route.request is not None and is_queued:
        choices = text | {"enum": list(get_args(Priority))}
        parameters.append({"name": PRIORITY, "in": "header", "schema": choices})
    return parameters


def _content(route: Route, schemas: dict[str, dict]) -> dict:
    """The `content` of a successful response: its schema by media type. Empty without a body."""
    if route.response is None:
        return {}
    if isinstance(route.response, str):
        return {"content": {route.response: {"schema": {"type": "string"}}}}
    content: dict[str, Any] = {JSON: {"schema": _schema(route.response, schemas)}}
    if route.octets:
        content[OCTETS] = {"schema": {"type": "string", "format": "binary"}}
    return {"content": content}
