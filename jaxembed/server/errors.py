"""Maps each exception to an HTTP status and a JSON body, in the error format of the route's API."""

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

import orjson
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
    WrongParts,
    WrongTask,
)
from jaxembed.observability.tracing import current_trace
from jaxembed.server.http.encoding import json_response
from jaxembed.server.http.exchange import Response, current_exchange
from jaxembed.server.meter import current_meter
from jaxembed.server.service import current_service

logger = logging.getLogger(__name__)

Dialect = Literal["tei", "openai", "cohere"]


class BadJson(InvalidInput):
    """The body is not valid JSON, or has a `Content-Encoding`."""


class BadField(InvalidInput):
    """The body is JSON, but not of the form that the route takes. The message has the path of the
    value that is not."""


class Unhealthy(JaxembedError):
    """The server cannot run requests now."""


class PlaygroundOff(JaxembedError):
    """The playground page was requested, but the server runs without it."""


class LoadFailed(JaxembedError):
    """An admin route cannot load the requested model. As in Triton, the status is 400."""


class Unauthorized(JaxembedError):
    """The API key or the admin key is missing, unknown or expired."""


@dataclass(frozen=True)
class Reply:
    """The status and the fields of the response to one class of errors, in the format of TEI or of
    OpenAI. Cohere's format has the status of OpenAI's. `err` is the label under which metrics count
    the failure; None means that they do not count it. `tei_prefix` precedes the message."""

    tei_status: int
    tei_type: str
    openai_status: int
    openai_type: str
    code: str | None
    err: str | None
    tei_prefix: str = ""


LOAD_RETRY_S = 5  # value of `Retry-After` if a model is not in memory
LONGEST_MESSAGE = 4000  # maximum characters of an error message
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

REPOSITORY = "/v2/repository/"  # prefix of Triton's routes, whose errors have TEI's format

# Infinity's routes without the prefix /v1, whose errors have OpenAI's format.
UNPREFIXED = ("/embeddings", "/classify", "/models")

COHERE = ("/v1/embed",)  # Cohere's routes that are not under /v2/

# The messages for HTTP errors, by status.
HINTS = {
    404: "the route {path} does not exist; GET /docs lists the routes",
    405: "this route does not accept {method}; it accepts {allowed}",
    408: "the body did not arrive in time",
    413: "the body is larger than {limit} bytes; send smaller batches or raise --payload-limit",
    415: "expected a request with `Content-Type: application/json`, got {content_type}; "
    "with curl add -H 'Content-Type: application/json'",
}


def dialect_of(path: str) -> Dialect:
    """Return the API whose error format the route at `path` uses.

    Routes under /v2/ other than Triton's, and those in COHERE, use Cohere's format. Other routes
    under /v1/, and those in UNPREFIXED, use OpenAI's format. All other routes use TEI's format,
    Triton's routes included.
    """
    if path.startswith(REPOSITORY):
        return "tei"
    if path.startswith("/v2/") or path in COHERE:
        return "cohere"
    return "openai" if path.startswith("/v1/") or path in UNPREFIXED else "tei"


def refuse(error: Exception) -> Response:
    """Build the response to an exception from its entry in REPLIES, and count the failure. The
    details of an unexpected exception are written to the log only."""
    # the reply of the error's class, or of its nearest base class that has one
    reply = next(REPLIES[kind] for kind in type(error).__mro__ if kind in REPLIES)
    if reply.err is not None:
        current_meter().telemetry.request_failure.labels(reply.err).inc()
    exchange = current_exchange()
    is_tei, request_id = dialect_of(exchange.path) == "tei", exchange.request_id
    field, place = _places(error)
    if reply.err != "inference":
        # TEI names the field without an index. TEI has no images, so messages about images may have
        # the index.
        names_field_only = is_tei and not _is_of_part(error)
        message = _clipped(_message(error, (field if names_field_only else place) or "inputs"))
    elif isinstance(error, JaxembedError):
        message = f"{error} (request id {request_id})"
        logger.error("request %s failed: %s", request_id, error)
    else:  # only the log gets the internal details
        message = (
            "internal error: this is a bug in jaxembed; the server's log has the details of "
            f"request {request_id}"
        )
        logger.error(
            "request %s failed with an unexpected error. This is a bug in jaxembed",
            request_id,
            exc_info=error,
        )
    if is_tei:
        status, message, kind = reply.tei_status, reply.tei_prefix + message, reply.tei_type
    else:
        status, kind = reply.openai_status, reply.openai_type
    response = _response(error, status, message, kind, place, reply.code)
    if isinstance(error, Overloaded):
        response.headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, ModelUnavailable):
        response.headers["retry-after"] = str(LOAD_RETRY_S)
    if isinstance(error, ShuttingDown):
        response.headers["connection"] = "close"
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    return response


def refuse_http(error: HTTPException) -> Response:
    """Build the JSON response to an HTTP error (404, 405, 413, 415, ...). The message is the one in
    HINTS for the status, or if there is none, the description of the error."""
    exchange, status = current_exchange(), error.code or 500
    message = error.description or HTTPStatus(status).phrase
    if status in HINTS:
        content_type = exchange.headers.get("content-type")
        message = HINTS[status].format(
            path=_clipped(exchange.path),
            method=exchange.method,
            allowed=", ".join(sorted(getattr(error, "valid_methods", None) or ())),
            limit=current_service().config.payload_limit,
            content_type=f"`{content_type}`" if content_type else "none",
        )
    kind = _BAD
    if dialect_of(exchange.path) == "tei":
        kind = {404: "NotFound", 405: "MethodNotAllowed"}.get(status, "Validation")
    response = _response(error, status, message, kind, param=None, code=None)
    for name, value in error.get_headers():
        if name.lower() not in ("content-type", "content-length"):  # `Allow`, for example
            response.headers[name.lower()] = value
    return response


def _response(
    error: Exception, status: int, message: str, kind: str, param: str | None, code: str | None
) -> Response:
    """Build the response to an error in the format of the route's API, and note the error in the
    trace. `kind` is the type of the error for clients, `param` the path of the refused value in the
    body, and `code` the error code of OpenAI's API."""
    if (trace := current_trace()) is not None:
        trace.error = type(error).__name__
    match dialect_of(current_exchange().path):
        case "openai":
            body = {
                "error": {"message": message, "type": kind, "param": param, "code": code},
                "detail": message,  # clients of Voyage, Jina and Infinity read it here
            }
        case "cohere":
            body = {"message": message}
        case "tei":
            body = {"error": message, "error_type": kind}
    return json_response(orjson.dumps(body), status)


def _places(error: Exception) -> tuple[str | None, str | None]:
    """Return the field of the body that an error is about, and the path of the refused value, such
    as `inputs` and `inputs[3]`. Both are None if unknown."""
    field, index = getattr(error, "field", None), getattr(error, "index", None)
    inputs = getattr(current_meter(), "size", None)
    if field is not None:
        return field, field if index is None else f"{field}[{index}]"
    if inputs is not None and index is not None:
        return inputs.field, inputs.place(index, getattr(error, "part", None))
    return None, None


def _is_of_part(error: Exception) -> bool:
    """Whether the message of an error needs the path of the input or part that it is about: it is
    about an image, or says nothing of its place."""
    is_plain = type(error) is InvalidInput and error.field is None and error.index is not None
    return is_plain or isinstance(error, InvalidImage | MediaUrlError | WrongParts)


def _message(error: Exception, field: str) -> str:
    """Return the message of an error for clients. Some errors have the message of TEI, or a longer
    one than the error itself. `field` is the field or path in the body that the message names."""
    match error:
        case NoInputs():
            return f"`{field}` cannot be empty"
        case EmptyInput():
            return f"Input validation error: `{field}` cannot be empty"
        case InputTooLong(limit=limit, got=got, exact=exact):
            count = got if exact else f"at least {got}"
            return (
                f"Input validation error: `{field}` must have less than {limit} tokens. Given: "
                f"{count}. Let the request truncate (as its route documents it) or start "
                "the server with --auto-truncate true"
            )
        case InvalidInput() if _is_of_part(error):
            return f"`{field}`: {error}"
        case InvalidChunk(reason=reason):
            return f"`{field}` {reason}"
        case BareTokenIds(before=before, after=after):
            reason = (
                f"puts {list(before)} before and {list(after)} after a text, which these ids lack"
                if before or after
                else "adds no special tokens by which its ids can be recognised"
            )
            return (  # the message names both ways to have the token ids accepted
                f"the token ids in `{field}` may be those of another tokenizer: this model's "
                f"tokenizer {reason}. Send texts (LangChain's OpenAIEmbeddings: "
                "check_embedding_ctx_length=False), or start the server with "
                "--accept-bare-token-ids to run the ids unchanged"
            )
        case UnknownPrompt(name=name, available=available):
            reason = (
                "it was not found in the Sentence Transformers prompts. Available prompts: "
                f"[{', '.join(available)}]"
                if available
                else "no prompts were found in the Sentence Transformers configuration"
            )
            return f"Input validation error: `prompt_name` is `{name}` but {reason}"
        case UnknownPurpose(purpose=purpose, known=known):
            return f"`{field}` of {purpose!r} is unknown; wanted one of {', '.join(known)}"
        case UnknownRoute(asked=asked, available=available):
            routes = f"one of the routes of this model: {', '.join(available)}"
            if asked is not None:
                return f"`{field}` of {asked!r} does not name {routes}"
            return f"`{field}` (or `input_type` or `task` of /v1/embeddings) must name {routes}"
        case TokenizerError():
            return f"tokenizer error {error}"  # as TEI
    return str(error)


def _clipped(message: str) -> str:
    """Return the message, without its middle if it is longer than LONGEST_MESSAGE characters,
    because it may quote a value of any size."""
    half = LONGEST_MESSAGE // 2
    return message if len(message) <= 2 * half else f"{message[:half]} ... {message[-half:]}"
