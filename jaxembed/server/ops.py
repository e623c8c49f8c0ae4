"""Health, metrics, the list of models: what operators and probes ask. Never waits for a device."""

from typing import Literal

import msgspec
from quart import Blueprint, Response

from jaxembed.server.encoding import json_response
from jaxembed.server.errors import Unhealthy
from jaxembed.server.models import Models
from jaxembed.server.service import current_service
from jaxembed.spec import Task

blueprint = Blueprint("ops", __name__)
metrics_blueprint = Blueprint("metrics", __name__)

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class ServedModel(msgspec.Struct):
    """One served name."""

    id: str
    created: int
    max_model_len: int
    task: Task
    object: Literal["model"] = "model"
    owned_by: str = "jaxembed"


class ModelList(msgspec.Struct):
    """The names this server answers to."""

    data: list[ServedModel]
    object: Literal["list"] = "list"


@blueprint.get("/")
@blueprint.get("/health")
@blueprint.get("/ping")
async def health() -> Response:
    """200 while every model answers."""
    if not current_service().models.healthy:
        raise Unhealthy("unhealthy")
    return Response(b"")


@blueprint.get("/livez")
async def livez() -> Response:
    """200 while the process lives."""
    return Response(b"")


@blueprint.get("/ready")
async def ready() -> Response:
    """200 while traffic should come here: warm, healthy and not shutting down."""
    models = current_service().models
    if models.draining:
        raise Unhealthy("not ready: shutting down")
    if not models.healthy:
        raise Unhealthy("not ready: unhealthy")
    if not models.ready:
        raise Unhealthy("not ready: still warming up")
    return Response(b"")


@blueprint.get("/v1/models")
async def list_models() -> Response:
    """Every served name."""
    models = current_service().models
    listed = ModelList([_model(name, models) for name in models.names])
    return json_response(msgspec.json.encode(listed))


@blueprint.get("/v1/models/<path:name>")
async def model(name: str) -> Response:
    """One served name."""
    return json_response(msgspec.json.encode(_model(name, current_service().models)))


@metrics_blueprint.get("/metrics")
async def metrics() -> Response:
    """Every metric in the Prometheus text format."""
    return Response(current_service().models.exposition(), content_type=EXPOSITION)


def _model(name: str, models: Models) -> ServedModel:
    embedder = models[name]
    return ServedModel(
        id=name, created=0, max_model_len=embedder.max_input_tokens, task=embedder.spec.task
    )
