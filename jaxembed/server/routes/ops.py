"""Routes for operators and probes: health, metrics, and the models with their limits. No handler
waits for a device, so these routes answer even if a device hangs."""

import time
from collections.abc import Collection
from typing import Any, Literal

import msgspec
from prometheus_client import generate_latest
from quart import Blueprint, request

from jaxembed import __version__
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import Task
from jaxembed.errors import ModelUnavailable
from jaxembed.observability.metrics import text_format
from jaxembed.runtime.diagnostics.examine import examine
from jaxembed.runtime.tasks import tasks_of
from jaxembed.server.auth.permissions import check_name
from jaxembed.server.errors import Unhealthy
from jaxembed.server.http.connection import CONNECTION_BYTES
from jaxembed.server.http.encoding import json_response
from jaxembed.server.http.exchange import Response
from jaxembed.server.metrics import access_registry, process_registry
from jaxembed.server.registry.models import Models
from jaxembed.server.routes.playground import redirect_to_playground
from jaxembed.server.service import current_service

blueprint: Any = Blueprint("ops", __name__)
metrics_blueprint: Any = Blueprint("metrics", __name__)

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# TEI's names of poolings by the names in sentence-transformers, where the two differ.
TEI_POOLING_NAMES = {"lasttoken": "last_token"}
MODEL_TYPES = {
    "rerank": "reranker",
    "classify": "classifier",
    "token_classify": "token_classifier",
}


class QueueStats(msgspec.Struct):
    """The queue of one model, as Infinity's clients read it."""

    queue_absolute: int  # number of inputs that wait for a batch
    queue_fraction: float  # queue_absolute / the maximum number of admitted inputs


class ServedModel(msgspec.Struct):
    """A served name and its model. `task`, `capabilities` and `outputs` are set when the model has
    been loaded once, `max_model_len` and `stats` only while the model is in memory."""

    id: str
    created: int
    loaded: bool  # whether the model is in memory
    max_model_len: int | None = None  # maximum tokens of an input
    task: Task | None = None
    capabilities: tuple[Task | Literal["image_embed"], ...] = ()  # Infinity's name for tasks
    outputs: tuple[OutputName, ...] = ()  # empty unless it is an embedding model
    stats: QueueStats = msgspec.field(default_factory=lambda: QueueStats(0, 0.0))
    parent: str | msgspec.UnsetType = msgspec.UNSET  # for an adapter: the name of its model
    object: Literal["model"] = "model"
    owned_by: str | msgspec.UnsetType = "jaxembed"


class ModelList(msgspec.Struct):
    """The served names that the API key of the request may use."""

    data: list[ServedModel]
    object: Literal["list"] = "list"


class Health(msgspec.Struct):
    """The body of /health: the time of the server's clock, which Infinity's client reads."""

    unix: float  # seconds since 1970


class Info(msgspec.Struct):
    """One model and its limits, with the fields of TEI. `jaxembed` has further facts, and lists all
    models in memory if there are several."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    jaxembed: dict[str, Any]


@blueprint.get("/")
async def probe() -> Response:
    """Answer 200 if every model is healthy, or redirect a browser to the playground if that is on.
    Raises Unhealthy if a model is not healthy."""
    _check_health()
    return redirect_to_playground() or Response(b"")


@blueprint.get("/ping")
async def ping() -> Response:
    """Answer 200 if every model is healthy, for SageMaker. Raises Unhealthy if a model is not."""
    _check_health()
    return Response(b"")


@blueprint.get("/health")
async def health() -> Response:
    """Answer 200 with a body for Infinity's client if every model is healthy. Raises Unhealthy if a
    model is not."""
    _check_health()
    return json_response(msgspec.json.encode(Health(time.time())))


@blueprint.get("/livez")
async def livez() -> Response:
    """Answer 200 unless all devices of a model hang. If they do, raise Unhealthy: a supervisor must
    end the process, because a thread in native code cannot be stopped."""
    if current_service().models.stuck:
        raise Unhealthy("a device call does not return; restart the server")
    return Response(b"")


@blueprint.get("/ready")
async def ready() -> Response:
    """Answer 200 if the server should get traffic, that is if all models are warm and healthy and
    it is not shutting down. Raises Unhealthy if it should not."""
    models = current_service().models
    if models.draining or any(loaded.draining for loaded in models):
        raise Unhealthy("not ready: the server is shutting down")
    if not models.healthy:
        raise Unhealthy("not ready: a model is unhealthy")
    if not models.ready:
        raise Unhealthy("not ready: a model is still warming up")
    return Response(b"")


@blueprint.get("/v1/models")
@blueprint.get("/models")
async def list_models() -> Response:
    """List the served names that the API key of the request may use. /models leaves `owned_by` out,
    because Infinity's client fails on any owner but its own."""
    models, permitted = current_service().models, check_name(None)
    listed = [_describe_name(name, models, permitted) for name in models.names_among(permitted)]
    if request.path == "/models":
        for item in listed:
            item.owned_by = msgspec.UNSET
    return json_response(msgspec.json.encode(ModelList(listed)))


@blueprint.get("/v1/models/<model:name>")
async def model(name: str) -> Response:
    """Describe one served name. Raises Forbidden and UnknownModel."""
    described = _describe_name(name, current_service().models, check_name(name))
    return json_response(msgspec.json.encode(described))


@blueprint.get("/info")
async def info() -> Response:
    """Describe the model named in `?model=`, or the first model in memory that the API key may use.
    `?verbose` adds facts about the speed of every model, in `jaxembed.doctor` of the response.

    Raises Forbidden, UnknownModel, and ModelUnavailable if the model is not in memory.
    """
    service = current_service()
    models, name = service.models, request.args.get("model")
    permitted = check_name(name)
    if name:
        instance = models.named(name, permitted).instance
        if instance is None:
            raise ModelUnavailable(
                f"{name} is not in memory; the server loads it when a request needs it"
            )
        loaded = instance.loaded
    else:
        loaded = models.first(permitted)
    spec = loaded.spec
    if spec.task == "embed":
        pooling = "+".join(TEI_POOLING_NAMES.get(name, name) for name in spec.pooling)
        model_type: dict[str, dict[str, Any]] = {"embedding": {"pooling": pooling}}
    else:
        id2label = {str(i): label for i, label in enumerate(spec.labels)}
        label2id = {label: i for i, label in enumerate(spec.labels)}
        model_type = {MODEL_TYPES[spec.task]: {"id2label": id2label, "label2id": label2id}}
    visible = {models.name_of(model, permitted): model for model in models.loaded_among(permitted)}
    details = loaded.describe()
    # The maximum memory that clients can make the process use, apart from that of connections.
    tokenizing = sum(model.tokenizing_bytes for model in models)
    details["accounted_bytes"] = models.capacity.max_bytes + tokenizing
    details["connection_bytes"] = CONNECTION_BYTES
    details["front_ends"] = 0 if service.fronts is None else service.fronts.serving
    if len(visible) > 1:
        details["models"] = [
            {
                "name": name,
                "task": model.spec.task,
                "dtype": model.dtype,
                "max_input_length": model.max_input_tokens,
                "max_batch_tokens": model.max_batch_tokens,
                "max_batch_requests": model.config.max_batch_requests,
            }
            for name, model in visible.items()
        ]
    if "verbose" in request.args:
        assert service.history is not None
        details["doctor"] = examine(visible, service.history.window(visible))
    answer = Info(
        model_id=loaded.name,
        model_sha=spec.revision,
        model_dtype=loaded.dtype,
        served_model_name=models.name_of(loaded, permitted),
        model_type=model_type,
        max_concurrent_requests=loaded.config.max_concurrent_requests,
        max_input_length=loaded.max_input_tokens,
        max_batch_tokens=loaded.max_batch_tokens,
        max_batch_requests=loaded.config.max_batch_requests,
        max_client_batch_size=service.config.max_client_batch_size,
        auto_truncate=loaded.text.truncate,
        tokenization_workers=loaded.tokenization_workers,
        version=__version__,
        sha=None,
        docker_label=None,
        jaxembed=details,
    )
    return json_response(msgspec.json.encode(answer))


@metrics_blueprint.get("/metrics")
async def metrics() -> Response:
    """Return the metrics of the models, API keys, audit log and process in the Prometheus text
    format."""
    service = current_service()
    if service.fronts is not None:
        await service.fronts.collect()
    series = service.models.exposition()
    if service.keyring is not None or service.audit is not None:
        series += text_format(access_registry(service.keyring, service.audit))
    series += generate_latest(process_registry())
    return Response(series, content_type=METRICS_CONTENT_TYPE)


def _check_health() -> None:
    if not current_service().models.healthy:
        raise Unhealthy("unhealthy")  # as TEI


def _describe_name(name: str, models: Models, permitted: Collection[str] | None) -> ServedModel:
    """Describe the model or adapter served as `name`. Raises UnknownModel, whose message lists only
    the names in `permitted`; None permits all."""
    known, adapter = models.named(name, permitted), models.adapter_of(name)
    described = ServedModel(id=name, created=0, loaded=known.instance is not None)
    if known.spec is not None:
        described.task, described.capabilities = known.spec.task, tasks_of(known.spec)
        if known.spec.task == "embed":
            described.outputs = known.spec.representations
            if known.takes_images:
                described.capabilities += ("image_embed",)
    if known.instance is not None:
        loaded = known.instance.loaded
        waiting = loaded.waiting
        described.max_model_len = loaded.max_input_tokens
        described.stats = QueueStats(waiting, waiting / loaded.config.max_concurrent_requests)
    if adapter:
        described.parent = name.removesuffix(f":{adapter}")
    return described
