"""What operators and probes ask: health, metrics, the models and their limits. Never waits for a
device."""

import time
from collections.abc import Collection
from typing import Any, Literal

import msgspec
from prometheus_client import generate_latest
from quart import Blueprint, Response, request

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
from jaxembed.server.metrics import access_registry, process_registry
from jaxembed.server.registry.models import Models
from jaxembed.server.routes.playground import lead_browsers
from jaxembed.server.service import current_service

blueprint = Blueprint("ops", __name__)
metrics_blueprint = Blueprint("metrics", __name__)

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
# The others are spelled as sentence-transformers does.
TEI_POOLING_NAMES = {"lasttoken": "last_token"}
MODEL_TYPES = {"rerank": "reranker", "classify": "classifier"}


class QueueStats(msgspec.Struct):
    """The work that waits for one model, as Infinity's clients read it."""

    queue_absolute: int  # inputs that wait for a batch
    queue_fraction: float  # of the most that may be admitted


class ServedModel(msgspec.Struct):
    """One served name. Of a model that was never in memory only that is known."""

    id: str
    created: int
    loaded: bool  # whether it is in memory
    max_model_len: int | None = None  # while it is
    task: Task | None = None
    capabilities: tuple[Task | Literal["image_embed"], ...] = ()  # in Infinity's words
    outputs: tuple[OutputName, ...] = ()  # of an embedding model: how a text may be represented
    stats: QueueStats = msgspec.field(default_factory=lambda: QueueStats(0, 0.0))
    parent: str | msgspec.UnsetType = msgspec.UNSET  # the name of an adapter's model
    object: Literal["model"] = "model"
    owned_by: str | msgspec.UnsetType = "jaxembed"


class ModelList(msgspec.Struct):
    """The names this server answers to."""

    data: list[ServedModel]
    object: Literal["list"] = "list"


class Health(msgspec.Struct):
    """The time on the server's clock, which Infinity's client reads."""

    unix: float  # seconds since 1970


class Info(msgspec.Struct):
    """One model and its limits. `jaxembed` has the fields that TEI lacks, and with several models a
    list of them all."""

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
    """200 while every model answers. A browser is led to the page, where there is one."""
    _check_health()
    return lead_browsers() or Response(b"")


@blueprint.get("/ping")
async def ping() -> Response:
    """200 while every model answers, for SageMaker."""
    _check_health()
    return Response(b"")


@blueprint.get("/health")
async def health() -> Response:
    """200 while every model answers, with a body for Infinity's client."""
    _check_health()
    return json_response(msgspec.json.encode(Health(time.time())))


@blueprint.get("/livez")
async def livez() -> Response:
    """200 while the process can do work, or will. 503 when no device of a model returns from its
    call: a thread in native code cannot be stopped, so whoever supervises the process must end it.
    """
    if current_service().models.stuck:
        raise Unhealthy("stuck in a device call that does not return: end this process")
    return Response(b"")


@blueprint.get("/ready")
async def ready() -> Response:
    """200 while traffic should come here: warm, healthy and not shutting down."""
    models = current_service().models
    if models.draining or any(loaded.draining for loaded in models):
        raise Unhealthy("not ready: shutting down")
    if not models.healthy:
        raise Unhealthy("not ready: unhealthy")
    if not models.ready:
        raise Unhealthy("not ready: still warming up")
    return Response(b"")


@blueprint.get("/v1/models")
async def list_models() -> Response:
    """Every served name that the request may use."""
    return _list_models("jaxembed")


@blueprint.get("/models")
async def list_models_unprefixed() -> Response:
    """As /v1/models without `owned_by`: Infinity's client fails on an owner other than its own."""
    return _list_models(msgspec.UNSET)


def _list_models(owner: str | msgspec.UnsetType) -> Response:
    models, permitted = current_service().models, check_name(None)
    listed = [_model(name, models, permitted) for name in models.names_among(permitted)]
    for one in listed:
        one.owned_by = owner
    return json_response(msgspec.json.encode(ModelList(listed)))


@blueprint.get("/v1/models/<model:name>")
async def model(name: str) -> Response:
    """One served name."""
    found = _model(name, current_service().models, check_name(name))
    return json_response(msgspec.json.encode(found))


@blueprint.get("/info")
async def info() -> Response:
    """The answer for the model named in `?model=`, or for the first, beside those with a permitted
    name if not all are. With `?verbose` it has the speed of every model under `jaxembed.doctor`."""
    service = current_service()
    models, name = service.models, request.args.get("model")
    permitted = check_name(name)
    if name:
        residence = models.named(name, permitted).residence
        if residence is None:
            raise ModelUnavailable(
                f"{name} is not in memory; it is loaded when a request asks for it"
            )
        loaded = residence.loaded
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
    shown = {models.name_of(one, permitted): one for one in models.among(permitted)}
    more = loaded.describe()
    # The most bytes that clients can make the process take, without connections: the memory of
    # requests and that of tokenizing.
    tokenizing = sum(one.tokenizing_bytes for one in models)
    more["accounted_bytes"] = models.capacity.max_bytes + tokenizing
    more["connection_bytes"] = CONNECTION_BYTES
    if len(shown) > 1:
        more["models"] = [
            {
                "name": name,
                "task": one.spec.task,
                "dtype": one.dtype,
                "max_input_length": one.max_input_tokens,
                "max_batch_tokens": one.max_batch_tokens,
                "max_batch_requests": one.config.max_batch_requests,
            }
            for name, one in shown.items()
        ]
    if "verbose" in request.args:
        more["doctor"] = examine(shown, service.history.window(shown))
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
        jaxembed=more,
    )
    return json_response(msgspec.json.encode(answer))


@metrics_blueprint.get("/metrics")
async def metrics() -> Response:
    """Every metric in the Prometheus text format: of the models, the keys and the process."""
    service = current_service()
    series = service.models.exposition()
    if service.keyring is not None or service.audit is not None:
        series += text_format(access_registry(service.keyring, service.audit))
    series += generate_latest(process_registry())
    return Response(series, content_type=EXPOSITION)


def _check_health() -> None:
    if not current_service().models.healthy:
        raise Unhealthy("unhealthy")


def _model(name: str, models: Models, permitted: Collection[str] | None) -> ServedModel:
    known, adapter = models.named(name, permitted), models.adapter_of(name)
    listed = ServedModel(id=name, created=0, loaded=known.residence is not None)
    if known.spec is not None:
        listed.task, listed.capabilities = known.spec.task, tasks_of(known.spec)
        if known.spec.task == "embed":
            listed.outputs = known.spec.representations
        if known.takes_images:
            listed.capabilities += ("image_embed",)
    if known.residence is not None:
        loaded = known.residence.loaded
        waiting = loaded.waiting
        listed.max_model_len = loaded.max_input_tokens
        listed.stats = QueueStats(waiting, waiting / loaded.config.max_concurrent_requests)
    if adapter:
        listed.parent = name.removesuffix(f":{adapter}")
    return listed
