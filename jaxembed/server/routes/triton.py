"""The routes that load and unload models, as in Triton's model repository API, and routes that move
and drop aliases.

A request names a model by a name that the operator has configured. It cannot make the server load
another path or URL.
"""

from typing import Any, TypeVar

import msgspec
from quart import Blueprint

from jaxembed.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    InvalidInput,
    ShuttingDown,
)
from jaxembed.server import access
from jaxembed.server.auth.permissions import note_model
from jaxembed.server.errors import BadField, LoadFailed
from jaxembed.server.http.encoding import json_response
from jaxembed.server.http.exchange import Response
from jaxembed.server.pipeline.body import check_count, read_body
from jaxembed.server.pipeline.decoding import decode
from jaxembed.server.registry.models import KnownModel, Models
from jaxembed.server.registry.pool import ModelPool, State
from jaxembed.server.service import current_service

blueprint: Any = Blueprint("repository", __name__)
blueprint.before_request(access.check_admin_key)

VERSION_DIGITS = 12  # hexadecimal digits of the content hash that are shown as the version

Body = TypeVar("Body")


class IndexRequest(msgspec.Struct):
    """Which models to list."""

    ready: bool = False  # whether to list only models in memory


class IndexedModel(msgspec.Struct):
    """A model under one of its names. `version` is the beginning of the content hash of the
    checkpoint, or empty if the model was never loaded."""

    name: str
    version: str
    state: State
    reason: str
    pinned: bool
    bytes: int  # memory that the model takes; 0 if it is not in memory


class LoadRequest(msgspec.Struct):
    """Options to load or unload a model. The parameter `pinned` of a request to load says whether
    the model is never evicted to make room."""

    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class AliasRequest(msgspec.Struct):
    """The model that an alias shall name."""

    model: str


@blueprint.post("/v2/repository/index")
async def index() -> Response:
    """List every model under each of its names; with `ready`, list only models in memory."""
    body, pool = await _body(IndexRequest), current_service().pool
    models = pool.models
    if models.can_load:
        models.discover()  # models may have been added or removed
    listed = [
        _indexed(pool, name, known) for known in models.known for name in models.names_of(known)
    ]
    wanted = [item for item in listed if item.state == "READY" or not body.ready]
    return json_response(msgspec.json.encode(wanted))


@blueprint.post("/v2/repository/models/<model:name>/load")
async def load(name: str) -> Response:
    """Load a model and wait until it has answered a probe. Raises LoadFailed, BadField for another
    parameter than `pinned`, and the errors of `_known`."""
    body, pool = await _body(LoadRequest), current_service().pool
    pinned = _flag(body.parameters, "pinned")
    known = _known(pool.models, name)
    try:
        await pool.load(known, pinned=pinned)
        await _update_front_ends()
    except (BackendError, CheckpointError, ConfigError) as error:
        raise LoadFailed(f"{name} cannot be loaded: {error}") from error
    return json_response(msgspec.json.encode(_indexed(pool, name, known)))


@blueprint.post("/v2/repository/models/<model:name>/unload")
async def unload(name: str) -> Response:
    """Evict a model and wait until its memory is freed; the next request loads it again. Raises
    BadField for another parameter than `unload_dependents`, and the errors of `_known`."""
    body, pool = await _body(LoadRequest), current_service().pool
    _flag(body.parameters, "unload_dependents")  # no effect, because no model has dependents
    known = _known(pool.models, name)
    await pool.unload(known)
    await _update_front_ends()
    return json_response(msgspec.json.encode(_indexed(pool, name, known)))


@blueprint.put("/v2/repository/aliases/<model:alias>")
async def alias(alias: str) -> Response:
    """Load the model in the body, and then move the alias to it. Raises LoadFailed, InvalidInput
    for a name that cannot be an alias, and the errors of `_known`."""
    body, pool = await _body(AliasRequest), current_service().pool
    known = _known(pool.models, body.model)
    try:
        await pool.move(alias, body.model)
        await _update_front_ends()
    except (BackendError, CheckpointError, ConfigError) as error:
        raise LoadFailed(f"{body.model} cannot be loaded: {error}") from error
    return json_response(msgspec.json.encode(_indexed(pool, alias, known)))


@blueprint.delete("/v2/repository/aliases/<model:alias>")
async def drop_alias(alias: str) -> Response:
    """Remove an alias. The response describes the model under another of its names. Raises
    UnknownModel, and InvalidInput for a name that is not an alias or is the only name of a
    model."""
    pool = current_service().pool
    note_model(alias)
    known = pool.models.drop_alias(alias)
    await _update_front_ends()
    return json_response(msgspec.json.encode(_indexed(pool, pool.models.names_of(known)[0], known)))


async def _update_front_ends() -> None:
    """Wait until all front-end processes use the models and names of now."""
    fronts = current_service().fronts
    if fronts is not None:
        await fronts.update()


async def _body(kind: type[Body]) -> Body:
    """Decode the body as `kind`. It may lack a Content-Type and may be empty, because Triton's
    clients send no Content-Type, and no body without options."""
    data = await read_body(current_service().config.payload_limit, may_be_undeclared=True)
    return await decode(data or bytearray(b"{}"), kind, check_count)


def _known(models: Models, name: str) -> KnownModel:
    """Return the model with this name, and note the name for the audit log. Raises ShuttingDown,
    UnknownModel, and InvalidInput for the name of an adapter."""
    note_model(name)
    if models.draining:
        raise ShuttingDown("the server is shutting down", retry_after_s=5)
    known = models[name]
    if name not in models.names_of(known):
        raise InvalidInput(f"`{name}` is the name of an adapter; send the name of its model")
    return known


def _indexed(pool: ModelPool, name: str, known: KnownModel) -> IndexedModel:
    """Describe a model under one of its names."""
    state, reason = pool.state(known)
    return IndexedModel(
        name=name,
        version=known.spec.content_hash[:VERSION_DIGITS] if known.spec else "",
        state=state,
        reason=reason,
        pinned=known.pinned,
        bytes=known.instance.loaded.resident_bytes if known.instance else 0,
    )


def _flag(parameters: dict[str, Any], flag: str) -> bool | None:
    """Return the value of the parameter `flag`; None if it is not sent. Raises BadField if the
    value is not a boolean, and for any other parameter. Triton's `config` is refused too, because
    the flags of the server say how to load a model."""
    for parameter, value in parameters.items():
        if parameter != flag:
            raise BadField(f"`parameters.{parameter}` is not supported; send only `{flag}`")
        if not isinstance(value, bool):
            raise BadField(f"`parameters.{flag}` must be true or false. Given: {value!r}"[:200])
    return parameters.get(flag)
