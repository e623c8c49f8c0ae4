"""Builds the OpenAPI document from the msgspec Structs of the routes, and serves it with an
installed Swagger UI, without a CDN. The document has version 3.0 of OpenAPI, because the installed
Swagger UI cannot read 3.1."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import msgspec
import orjson
import swagger_ui_bundle
from quart import Blueprint, current_app
from werkzeug.exceptions import NotFound
from werkzeug.routing import Rule

from jaxembed import __version__
from jaxembed.data.inputs import Priority
from jaxembed.server.errors import REPOSITORY, Dialect, dialect_of
from jaxembed.server.http.encoding import JSON, OCTETS, json_response
from jaxembed.server.http.exchange import Response
from jaxembed.server.pipeline.body import PRIORITY
from jaxembed.server.pipeline.fields import ModelRequest, refused_fields
from jaxembed.server.routes import (
    cloud,
    cohere,
    openai,
    ops,
    rerank,
    tei,
    triton,
    voyage,
)
from jaxembed.server.routes.playground import page_response

blueprint: Any = Blueprint("openapi", __name__)

ASSETS = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}
PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>jaxembed</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon-32x32.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui"})</script>
</body>
</html>
"""

PATH_PARAMETER = re.compile(r"<(?:\w+:)?(\w+)>")


class OpenAIErrorDetail(msgspec.Struct):
    """A description of an error. `param` is the path of the field that caused the error."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    """The body of every error of OpenAI's, Jina's, Voyage's and Infinity's routes. `detail` repeats
    the message."""

    error: OpenAIErrorDetail
    detail: str


class TeiError(msgspec.Struct):
    """The body of every error of TEI's routes, Triton's routes and all routes without another
    format."""

    error: str
    error_type: str


class CohereError(msgspec.Struct):
    """The body of every error of Cohere's routes."""

    message: str


ERRORS: dict[Dialect, type] = {"openai": OpenAIError, "cohere": CohereError, "tei": TeiError}


@dataclass(frozen=True)
class Route:
    """A handler, and the bodies of its requests and responses.

    `request` and `response` are types of JSON bodies, or None for no body. A tuple lists
    alternative types, because msgspec has no union of Structs without a tag. If the response is not
    JSON, `response` is its media type.
    """

    endpoint: str  # `<blueprint>.<handler>`; the handler's decorators have the paths
    summary: str
    request: Any = None
    response: Any = None
    raw_bytes: bool = False  # whether the handler can also answer with raw bytes
    query: tuple[str, ...] = ()  # names of query parameters


VECTORS = list[list[float]]
RERANKS = (tei.RerankRequest, rerank.DocumentsRequest)
RANKINGS = (list[tei.Rank], rerank.JinaResponse)
LABELS = (list[rerank.Prediction], list[list[rerank.Prediction]])
TOKENS, GROUPS = list[tei.TokenLabel], list[tei.EntityGroup]
ENTITIES = (TOKENS, GROUPS, list[TOKENS], list[GROUPS])
TERMS = list[list[tei.Term]]
LABELLING = tei.PredictRequest, tei.TokenClassifyRequest
ANY_REQUEST = (*cloud.EMBED_REQUESTS.values(), *RERANKS, *LABELLING)
ANY_RESPONSE = (VECTORS, TERMS, list[VECTORS], *RANKINGS, *LABELS, *ENTITIES)
UNQUEUED = (tei.TokenizeRequest, tei.DecodeRequest)  # need no device, so they have no priority

# fmt: off
ROUTES = (
    Route("openai.embeddings", "Embed, as OpenAI", openai.EmbeddingsRequest,
          openai.EmbeddingsResponse, raw_bytes=True),
    Route("voyage.contextualized_embeddings",
          "Embed the chunks of documents, as Voyage", voyage.ContextualizedRequest,
          voyage.ContextualizedResponse),
    Route("voyage.embed_multimodal", "Embed texts and images, as Voyage",
          voyage.MultimodalRequest, voyage.MultimodalResponse),
    Route("ops.list_models", "List the served names; /models as Infinity", response=ops.ModelList),
    Route("ops.model", "Describe a served name", response=ops.ServedModel),
    Route("tei.embed", "Embed: one vector per input", tei.EmbedRequest, VECTORS, raw_bytes=True),
    Route("tei.embed_all", "Embed: one vector per token", tei.EmbedAllRequest, list[VECTORS]),
    Route("tei.similarities", "Similarities of a sentence to others", tei.SimilarityRequest,
          list[float]),
    Route("tei.tokenize", "Tokens", tei.TokenizeRequest, list[list[tei.Token]]),
    Route("tei.decode_ids", "Text of token ids", tei.DecodeRequest, list[str]),
    Route("tei.embed_sparse", "Sparse embeddings", tei.EmbedSparseRequest, TERMS),
    Route("tei.embed_multi", "Multi-vector embeddings", tei.EmbedMultiRequest,
          list[VECTORS], raw_bytes=True),
    Route("openai.multi_vector", "Multi-vector embeddings, as Jina",
          openai.EmbeddingsRequest, openai.EmbeddingsResponse),
    Route("hosted.rerank_texts", "Rerank, as TEI; as Jina with `documents`",
          RERANKS, RANKINGS),
    Route("tei.predict", "Labels with scores", tei.PredictRequest, LABELS),
    Route("tei.token_classify", "Entities in texts", tei.TokenClassifyRequest, ENTITIES),
    Route("rerank.rerank_jina", "Rerank, as Jina; as Voyage with `top_k` or `truncation`",
          rerank.DocumentsRequest, (rerank.JinaResponse, rerank.VoyageResponse)),
    Route("cohere.rerank_cohere", "Rerank, as Cohere", rerank.DocumentsRequest,
          cohere.CohereResponse),
    Route("cohere.embed_cohere", "Embed, as Cohere", cohere.CohereEmbedRequest,
          cohere.EmbeddingsByType),
    Route("cohere.embed_cohere_v1", "Embed, as Cohere's version 1",
          cohere.CohereEmbedRequest,
          (cohere.EmbeddingsFloats, cohere.EmbeddingsByType)),
    Route("rerank.classify", "Labels with scores, as Infinity", rerank.ClassifyRequest,
          rerank.ClassifyResponse),
    Route("hosted.root", "Choose the task by the body; /invocations for SageMaker", ANY_REQUEST,
          ANY_RESPONSE, raw_bytes=True),
    Route("hosted.vertex", "Choose the task of each instance, for Vertex AI", cloud.VertexRequest,
          cloud.VertexResponse),
    Route("ops.info", "A model and its limits; with `verbose` facts about its speed",
          response=ops.Info, query=("model", "verbose")),
    Route("repository.index", "List the models and their states",
          triton.IndexRequest, list[triton.IndexedModel]),
    Route("repository.load", "Load a model", triton.LoadRequest, triton.IndexedModel),
    Route("repository.unload", "Unload a model", triton.LoadRequest,
          triton.IndexedModel),
    Route("repository.alias", "Move an alias to another model", triton.AliasRequest,
          triton.IndexedModel),
    Route("repository.drop_alias", "Drop an alias", response=triton.IndexedModel),
    Route("ops.probe", "Health"),
    Route("ops.health", "Health, as Infinity", response=ops.Health),
    Route("ops.ping", "Health, for SageMaker"),
    Route("ops.livez", "Whether the process is alive"),
    Route("ops.ready", "Whether the server is ready for requests"),
    Route("metrics.metrics", "Prometheus metrics", response="text/plain"),
    Route("openapi.page", "This page", response="text/html"),
    Route("playground.playground", "A page to try the models", response="text/html"),
    Route("openapi.openapi", "This document", response=dict[str, Any]),
)
# fmt: on


def document(rules: Iterable[Rule]) -> dict:
    """Build the OpenAPI document of ROUTES, as plain values for JSON.

    `rules` are the URL rules of the app: each gives a path and the methods of an endpoint. Rules of
    endpoints that are not in ROUTES, and endpoints in ROUTES without a rule, are left out.
    """
    bodies = [body for route in ROUTES for body in (route.request, route.response)]
    kinds = [kind for body in bodies if not isinstance(body, str) for kind in _kinds(body)]
    kinds += ERRORS.values()
    shapes, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    # Leave out fields that are declared only to be refused.
    fields, _ = refused_fields(ModelRequest)
    for schema in components.values():
        properties = schema.get("properties", {})
        for name in fields:
            if properties.get(name) == {"default": None}:
                del properties[name]
    schemas = {str(kind): shape for kind, shape in zip(kinds, shapes, strict=True)}
    # The paths and methods of each endpoint, in the order of the decorators in the source. Python
    # applies the last decorator first, so the order of the rules is reversed.
    path_methods: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for rule in reversed(list(rules)):
        path = PATH_PARAMETER.sub(r"{\1}", rule.rule)
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            path_methods[rule.endpoint].append((path, method.lower()))
    paths: dict[str, dict] = {}
    for route in ROUTES:
        for path, method in path_methods[route.endpoint]:
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

    msgspec's JSON Schema (2020-12) has a type null. OpenAPI 3.0 has the keyword `nullable` instead.
    """
    if isinstance(schema, list):
        return [as_openapi_3_0(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: as_openapi_3_0(value) for key, value in schema.items()}
    choices = schema.get("anyOf")
    if not isinstance(choices, list) or {"type": "null"} not in choices:
        return schema
    types = [choice for choice in choices if choice != {"type": "null"}]
    del schema["anyOf"]
    # OpenAPI 3.0 ignores keywords beside $ref, so a type with $ref stays in anyOf
    if len(types) == 1 and "$ref" not in types[0]:
        return {**types[0], **schema, "nullable": True}
    return {**schema, "anyOf": types, "nullable": True}


def _kinds(body: Any) -> tuple:
    """Return the alternative types of a body; empty for no body."""
    if body is None:
        return ()
    return body if isinstance(body, tuple) else (body,)


def _schema(body: Any, schemas: dict[str, dict]) -> dict:
    """Return the OpenAPI media type object of a body. `schemas` has the schema of each type by the
    name of the type."""
    alternatives = [schemas[str(kind)] for kind in _kinds(body)]
    return {"schema": alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}}


def _operation(route: Route, path: str, method: str, schemas: dict[str, dict]) -> dict:
    """Build the OpenAPI operation of a route for one path and method. `schemas` has the schema of
    each type by the name of the type."""
    text = {"type": "string"}
    parameters: list[dict] = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": text, "allowEmptyValue": True}
        for name in route.query
    ]
    # only requests that wait for a device have a priority
    is_queued = route.request not in UNQUEUED and not path.startswith(REPOSITORY)
    if route.request is not None and is_queued:
        choices = text | {"enum": list(get_args(Priority))}
        parameters.append({"name": PRIORITY, "in": "header", "schema": choices})
    content: dict[str, Any] = {}
    if isinstance(route.response, str):
        content[route.response] = {"schema": text}
    elif route.response is not None:
        content[JSON] = _schema(route.response, schemas)
    if route.raw_bytes:
        content[OCTETS] = {"schema": text | {"format": "binary"}}
    name = path.strip("/").replace("/", "_").replace("{", "").replace("}", "") or "root"
    error = ERRORS[dialect_of(path)]
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{method}_{name}",
        "tags": [error.__name__.removesuffix("Error")],
        "responses": {
            "default": {"description": "Error", "content": {JSON: _schema(error, schemas)}},
            "200": {"description": "OK"} | ({"content": content} if content else {}),
        },
    }
    if route.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: _schema(route.request, schemas)},
        }
    if parameters:
        operation["parameters"] = parameters
    return operation


@blueprint.get("/docs")
async def page() -> Response:
    """Return the Swagger UI page. Its relative links work behind a path prefix."""
    return page_response(PAGE, files=True)


@blueprint.get("/docs/<name>")
async def asset(name: str) -> Response:
    """Return one of the files that the page loads. Raises NotFound for any other name."""
    if name not in ASSETS:
        raise NotFound
    headers = {"cache-control": "max-age=86400"}
    return Response(_read(name), content_type=ASSETS[name], headers=headers)


@blueprint.get("/openapi.json")
@blueprint.get("/api-doc/openapi.json")
async def openapi() -> Response:
    """Return the OpenAPI document."""
    return json_response(_document())


@cache
def _read(name: str) -> bytes:
    return (swagger_ui_bundle.swagger_ui_path / name).read_bytes()


@cache
def _document() -> bytes:
    """Build the document of the current app, once, as JSON."""
    return orjson.dumps(document(current_app.url_map.iter_rules()))
