"""GET /info: the models and their limits, in the form of Text Embeddings Inference."""

from collections.abc import Collection
from typing import Any

import msgspec
from quart import Blueprint, Response, request

from jaxembed import __version__
from jaxembed.errors import ModelUnavailable
from jaxembed.runtime.diagnostics.examine import examine
from jaxembed.runtime.model import LoadedModel
from jaxembed.server.auth.permissions import check_name
from jaxembed.server.http.connection import CONNECTION_BYTES
from jaxembed.server.http.encoding import json_response
from jaxembed.server.registry.models import Models
from jaxembed.server.service import Service, current_service

blueprint = Blueprint("info", __name__)

TEI_POOLING_NAMES = {
    "lasttoken": "last_token"
}  # the others are spelled as sentence-transformers does
MODEL_TYPES = {"rerank": "reranker", "classify": "classifier"}


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


@blueprint.get("/info")
async def info() -> Response:
    """The answer for the model named in `?model=`, or for the first. With `?verbose` it has the
    speed of every model under `jaxembed.doctor`."""
    service = current_service()
    name = request.args.get("model")
    permitted = check_name(name)
    loaded = (
        _in_memory(service.models, name, permitted) if name else service.models.first(permitted)
    )
    answer = model_info(service, loaded, permitted)
    if "verbose" in request.args:
        shown = service.models.among(permitted)
        models = {service.models.name_of(one, permitted): one for one in shown}
        answer.jaxembed["doctor"] = examine(models, service.history.window(models))
    return json_response(msgspec.json.encode(answer))


def _in_memory(models: Models, name: str, permitted: Collection[str] | None) -> LoadedModel:
    residence = models.named(name, permitted).residence
    if residence is None:
        raise ModelUnavailable(f"{name} is not in memory; it is loaded when a request asks for it")
    return residence.loaded


def model_info(
    service: Service, loaded: LoadedModel, permitted: Collection[str] | None = None
) -> Info:
    """The answer of /info about one model, beside those with a permitted name if not all are."""
    shown = service.models.among(permitted)
    more = loaded.describe()
    more["accounted_bytes"] = accounted_bytes(service)
    more["connection_bytes"] = CONNECTION_BYTES
    if len(shown) > 1:
        more["models"] = [_summary(service.models.name_of(one, permitted), one) for one in shown]
    return Info(
        model_id=loaded.name,
        model_sha=loaded.spec.revision,
        model_dtype=loaded.dtype,
        served_model_name=service.models.name_of(loaded, permitted),
        model_type=_model_type(loaded),
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


def accounted_bytes(service: Service) -> int:
    """The most bytes that clients can make the process take, without connections: the memory of
    requests and that of tokenizing."""
    tokenizing = sum(loaded.tokenizing_bytes for loaded in service.models)
    return service.models.capacity.max_bytes + tokenizing


def _model_type(loaded: LoadedModel) -> dict[str, dict[str, Any]]:
    """TEI's object with one key: the pooling of an embedding model, or the labels of others."""
    spec = loaded.spec
    if spec.task == "embed":
        pooling = "+".join(TEI_POOLING_NAMES.get(name, name) for name in spec.pooling)
        return {"embedding": {"pooling": pooling}}
    id2label = {str(i): label for i, label in enumerate(spec.labels)}
    label2id = {label: i for i, label in enumerate(spec.labels)}
    return {MODEL_TYPES[spec.task]: {"id2label": id2label, "label2id": label2id}}


def _summary(name: str, loaded: LoadedModel) -> dict[str, Any]:
    return {
        "name": name,
        "task": loaded.spec.task,
        "dtype": loaded.dtype,
        "max_input_length": loaded.max_input_tokens,
        "max_batch_tokens": loaded.max_batch_tokens,
        "max_batch_requests": loaded.config.max_batch_requests,
    }
