"""Turns each error into a status and a body, in the dialect of the route. No other file does."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

import orjson
from quart import Response, g, request
from werkzeug.exceptions import HTTPException

from jaxembed.errors import (
    BackendError,
    BareTokenIds,
    BatchTooLarge,
    Cancelled,
    DeviceStuck,
    EmptyInput,
    Forbidden,
    InputTooLong,
    InvalidChunk,
    InvalidImage,
    InvalidInput,
    JaxembedError,
    MediaUrlError,
    ModelUnavailable,
    NoInputs,
    Overloaded,
    QuotaExceeded,
    RequestTooLarge,
    ShuttingDown,
    TokenizerError,
    UnknownModel,
    UnknownPrompt,
    UnknownPurpose,
    UnknownRoute,
    WrongTask,
)
from jaxembed.observability.tracing import current_trace
from jaxembed.server.http.encoding import json_response
from jaxembed.server.meter import current_meter
from jaxembed.server.service import current_service

logger = logging.getLogger(__name__)

Dialect = Literal["tei", "openai", "cohere"]


class BadJson(InvalidInput):
    """A body that is no JSON at all."""


class BadField(InvalidInput):
    """JSON of the wrong shape; the message names the path."""


class Unhealthy(JaxembedError):
    """The server cannot take work now."""


class PlaygroundOff(JaxembedError):
    """The page is asked for on a server that does not have it."""


class LoadFailed(JaxembedError):
    """A model that was to be loaded cannot be; Triton's status is that of a wrong request."""


class Unauthorized(JaxembedError):
    """No API key, not one of ours, or one that has expired."""


@dataclass(frozen=True)
class Reply:
    """How one class of errors looks on the wire, and under which `err` it is counted.

    Cohere's statuses are OpenAI's.
    """

    tei_status: int
    tei_type: str
    openai_status: int
    openai_type: str
    code: str | None
    err: str | None
    tei_prefix: str = ""


LOAD_RETRY_S = 5  # after which to ask again for a model that is not in memory
LONGEST_MESSAGE = 4000  # characters
_SHAPE_PREFIX = "Failed to deserialize the JSON body into the target type: "
_JSON_PREFIX = "Failed to parse the request body as JSON: "
_BAD = "invalid_request_error"
_FAILED = "server_error"

# fmt: off
REPLIES: dict[type[Exception], Reply] = {
    BadJson:        Reply(400, "Validation", 400, _BAD, "invalid_json", "validation", _JSON_PREFIX),
    BadField:       Reply(422, "Validation", 400, _BAD, None, "validation", _SHAPE_PREFIX),
    UnknownModel:   Reply(404, "Validation", 404, _BAD, "model_not_found", "validation"),
    EmptyInput:     Reply(400, "Empty", 400, _BAD, None, "tokenization"),
    InputTooLong:   Reply(422, "Validation", 400, _BAD, "context_length_exceeded", "tokenization"),
    BatchTooLarge:  Reply(422, "Validation", 400, _BAD, None, "batch_size"),
    RequestTooLarge: Reply(422, "Validation", 400, _BAD, None, "batch_size"),
    MediaUrlError:  Reply(422, "Validation", 400, _BAD, "invalid_media_url", "validation"),
    InvalidInput:   Reply(422, "Validation", 400, _BAD, None, "validation"),
    TokenizerError: Reply(422, "Tokenizer", 400, _BAD, None, "tokenization"),
    WrongTask:      Reply(424, "Backend", 400, _BAD, None, "model_type", "Backend error: "),
    ShuttingDown:   Reply(503, "Unhealthy", 503, _FAILED, "shutting_down", "overloaded"),
    QuotaExceeded:  Reply(429, "Overloaded", 429, "rate_limit_error", "rate_limit_exceeded",
                          "overloaded"),
    Overloaded:     Reply(429, "Overloaded", 429, "rate_limit_error", "overloaded", "overloaded"),
    Unhealthy:      Reply(503, "Unhealthy", 503, _FAILED, "unhealthy", None),
    PlaygroundOff:  Reply(404, "NotFound", 404, _BAD, None, None),
    LoadFailed:     Reply(400, "Backend", 400, _BAD, None, None),
    Unauthorized:   Reply(401, "Unauthorized", 401, _BAD, "invalid_api_key", None),
    Forbidden:      Reply(403, "Forbidden", 403, _BAD, "not_permitted", None),
    Cancelled:      Reply(503, "Unhealthy", 503, _FAILED, "cancelled", "dropped"),
    DeviceStuck:    Reply(503, "Unhealthy", 503, _FAILED, "device_stuck", "inference"),
    ModelUnavailable: Reply(503, "Unhealthy", 503, _FAILED, "model_unavailable", "overloaded"),
    BackendError:   Reply(424, "Backend", 503, _FAILED, None, "inference", "Backend error: "),
    JaxembedError:  Reply(424, "Backend", 503, _FAILED, None, "inference", "Backend error: "),
    Exception:      Reply(500, "Backend", 500, _FAILED, None, "inference"),
}
# fmt: on

REPOSITORY = "/v2/repository/"  # the routes of Triton, whose errors look like TEI's

# Routes that Infinity has without /v1; its errors look like OpenAI's.
UNPREFIXED = ("/embeddings", "/classify", "/models")

COHERE = ("/v1/embed",)  # of Cohere, though not under /v2/

HINTS = {
    404: "there is no such route as {path}; GET /docs lists those there are",
    405: "this route does not take {method}; it takes {allowed}",
    408: "the body did not arrive in time",
    413: "the body is larger than {limit} bytes; send smaller batches or raise --payload-limit",
    415: "expected request with `Content-Type: application/json`, got {content_type}; "
    "with curl add -H 'Content-Type: application/json'",
}


def dialect_of(path: str) -> Dialect:
    """The dialect of a route's errors: Cohere's under /v2/ and on the routes of COHERE, OpenAI's on
    others under /v1/ and on the routes of UNPREFIXED, TEI's on all others, and on Triton's."""
    if path.startswith(REPOSITORY):
        return "tei"
    if path.startswith("/v2/") or path in COHERE:
        return "cohere"
    return "openai" if path.startswith("/v1/") or path in UNPREFIXED else "tei"


def rule_of(error: Exception) -> Reply:
    """The reply of the error's class, or of the nearest ancestor that has one."""
    return next(REPLIES[kind] for kind in type(error).__mro__ if kind in REPLIES)


async def refuse(error: Exception) -> Response:
    """The answer to a request that failed with an error of ours or an unexpected one, counted."""
    rule = rule_of(error)
    if (trace := current_trace()) is not None:
        trace.error = type(error).__name__
    if rule.err is not None:
        current_meter().telemetry.request_failure.labels(rule.err).inc()
    dialect = dialect_of(request.path)
    field, place = _places(error)
    # TEI's messages have no index, and it takes no images
    is_as_tei = dialect == "tei" and not isinstance(error, InvalidImage | MediaUrlError)
    message = _message(error, rule, field if is_as_tei else place)
    match dialect:
        case "openai":
            response = _openai(rule.openai_status, message, rule.openai_type, place, rule.code)
        case "cohere":
            response = _json(rule.openai_status, {"message": message})
        case "tei":
            response = _tei(rule.tei_status, rule.tei_prefix + message, rule.tei_type)
    return _with_headers(response, error)


async def refuse_http(error: HTTPException) -> Response:
    """The answer to an error of HTTP (404, 405, 413, 415, ...) as JSON, with what would be
    right."""
    status = error.code or 500
    message = _hint(status, error)
    if (trace := current_trace()) is not None:
        trace.error = type(error).__name__
    match dialect_of(request.path):
        case "openai":
            response = _openai(status, message, _BAD, None, None)
        case "cohere":
            response = _json(status, {"message": message})
        case "tei":
            kind = {404: "NotFound", 405: "MethodNotAllowed"}.get(status, "Validation")
            response = _tei(status, message, kind)
    for name, value in error.get_headers():
        if name.lower() not in ("content-type", "content-length"):
            response.headers[name] = value
    return response


def _places(error: Exception) -> tuple[str | None, str | None]:
    """The field at fault and the path of the input in it, each None if unknown."""
    field, index = getattr(error, "field", None), getattr(error, "index", None)
    size = getattr(current_meter(), "size", None)
    if field is not None:
        return field, field if index is None else f"{field}[{index}]"
    if size is not None and index is not None:
        return size.field, size.place(index)
    return None, None


def _hint(status: int, error: HTTPException) -> str:
    if status not in HINTS:
        return error.description or HTTPStatus(status).phrase
    return HINTS[status].format(
        path=_clipped(request.path),
        method=request.method,
        allowed=", ".join(sorted(getattr(error, "valid_methods", None) or ())),
        limit=current_service().config.payload_limit,
        content_type=f"`{request.content_type}`" if request.content_type else "none",
    )


def _message(error: Exception, rule: Reply, field: str | None) -> str:
    """The message for the client. For a failure of the server it holds the request id and no
    internals, and the log gets the details."""
    if rule.err != "inference":
        return _clipped(_words(error, field or "inputs"))
    request_id = g.get("request_id", "-")
    if isinstance(error, JaxembedError):
        logger.error("request %s failed: %s", request_id, error)
        return f"{error} (request id {request_id})"
    logger.error("request %s met a bug", request_id, exc_info=error)
    return f"internal error: this is a bug in jaxembed; the log has it as request {request_id}"


def _words(error: Exception, field: str) -> str:
    """The error in TEI's words if TEI has it, else its own message."""
    match error:
        case NoInputs():
            return f"`{field}` cannot be empty"
        case EmptyInput():
            return f"Input validation error: `{field}` cannot be empty"
        case InputTooLong(limit=limit, got=got, exact=exact):
            count = got if exact else f"at least {got}"
            return (
                f"Input validation error: `{field}` must have less than {limit} tokens. Given: "
                f"{count}. Send `truncate: true` or start the server with --auto-truncate true"
            )
        case InvalidImage() | MediaUrlError():
            return f"`{field}`: {error}"
        case InvalidChunk(reason=reason):
            return f"`{field}` {reason}"
        case BareTokenIds(before=before, after=after):
            return _about_bare_ids(field, before, after)
        case UnknownPrompt(name=name, available=available):
            prompts = f"Available prompts: [{', '.join(available)}]"
            reason = f"it was not found in the Sentence Transformers prompts. {prompts}"
            if not available:
                reason = "no prompts were found in the Sentence Transformers configuration"
            return f"Input validation error: `prompt_name` is `{name}` but {reason}"
        case UnknownPurpose(purpose=purpose, known=known):
            return f"`{field}` of {purpose!r} is unknown; wanted one of {', '.join(known)}"
        case UnknownRoute(asked=asked, available=available):
            routes = f"the routes of this model: {', '.join(available)}"
            if asked is not None:
                return f"`{field}` of {asked!r} names none of {routes}"
            return (
                f"`{field}` (or `input_type` or `task` of /v1/embeddings) must name one of {routes}"
            )
        case TokenizerError():
            return f"tokenizer error {error}"
    return str(error)


def _about_bare_ids(field: str, before: Sequence[int], after: Sequence[int]) -> str:
    """The message about refused token ids, with the two ways to have inputs accepted."""
    reason = "which adds no special tokens to tell them by"
    if before or after:
        around = f"{list(before)} before and {list(after)} after"
        reason = f"which puts special tokens around a text: {around}"
    return (
        f"`{field}` holds token ids that are not known to be of this model's tokenizer, {reason}. "
        "Send texts (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False), or start "
        "the server with --accept-bare-token-ids to run the ids as they are"
    )


def _clipped(message: str) -> str:
    """The message, without its middle if it is long: it may quote a value of any size."""
    half = LONGEST_MESSAGE // 2
    return message if len(message) <= 2 * half else f"{message[:half]} ... {message[-half:]}"


def _openai(status: int, message: str, kind: str, param: str | None, code: str | None) -> Response:
    """`detail` is the message again, where clients of Voyage, Jina and Infinity look for it."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return _json(status, {"error": error, "detail": message})


def _tei(status: int, message: str, kind: str) -> Response:
    return _json(status, {"error": message, "error_type": kind})


def _json(status: int, body: dict) -> Response:
    return json_response(orjson.dumps(body), status)


def _with_headers(response: Response, error: Exception) -> Response:
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, ModelUnavailable):
        response.headers["Retry-After"] = str(LOAD_RETRY_S)
    if isinstance(error, ShuttingDown):
        response.headers["Connection"] = "close"
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
