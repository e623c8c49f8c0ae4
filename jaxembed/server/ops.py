"""Health, metrics, the list of models: what operators and probes ask. Never waits for a device."""

from typing import Literal

import msgspec
from quart import Blueprint, Response

from jaxembed.server.encoding import json_response
from jaxembed.server.errors import Unhealthy, UnknownModel
from jaxembed.server.service import Service, current_service

blueprint = Blueprint("ops", __name__)
metrics_blueprint = Blueprint("metrics", __name__)

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Model(msgspec.Struct):
    """One served name."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "jaxembed"


class ModelList(msgspec.Struct):
    """The names this server answers to."""

    data: list[Model]
    object: Literal["list"] = "list"


@blueprint.get("/")
@blueprint.get("/health")
@blueprint.get("/ping")
async def health() -> Response:
    """200 while the model answers."""
    if not current_service().embedder.healthy:
        raise Unhealthy("unhealthy")
    return Response(b"")


@blueprint.get("/livez")
async def livez() -> Response:
    """200 while the process lives."""
    return Response(b"")


@blueprint.get("/ready")
async def ready() -> Response:
    """200 while traffic should come here: warm, healthy and not shutting down."""
    embedder = current_service().embedder
    if embedder.draining:
        raise Unhealthy("not ready: shutting down")
    if not embedder.healthy:
        raise Unhealthy("not ready: unhealthy")
    if not embedder.ready:
        raise Unhealthy("not ready: still warming up")
    return Response(b"")


@blueprint.get("/v1/models")
async def models() -> Response:
    """Every served name."""
    service = current_service()
    listed = ModelList([_model(name, service) for name in service.names])
    return json_response(msgspec.json.encode(listed))


@blueprint.get("/v1/models/<path:name>")
async def model(name: str) -> Response:
    """One served name."""
    service = current_service()
    if name not in service.names:
        raise UnknownModel(
            f"the model `{name}` does not exist; this server has {', '.join(service.names)}",
            field="model",
        )
    return json_response(msgspec.json.encode(_model(name, service)))


@metrics_blueprint.get("/metrics")
async def metrics() -> Response:
    """Every metric in the Prometheus text format."""
    return Response(current_service().telemetry.exposition(), content_type=EXPOSITION)


def _model(name: str, service: Service) -> Model:
    return Model(id=name, created=0, max_model_len=service.embedder.max_input_tokens)
