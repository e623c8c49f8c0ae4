"""Describes a loaded model: the fields that /info has in addition to TEI's."""

from collections.abc import Mapping

from jaxembed.config import EngineConfig
from jaxembed.data.spec import Routes
from jaxembed.engine.admission import Capacity
from jaxembed.runtime.routes import LoadedRoute


def describe_model(
    texts: Routes,
    routes: Mapping[str, LoadedRoute],
    config: EngineConfig,
    capacity: Capacity,
    tokenizing_bytes: int,
) -> dict[str, object]:
    """The fields about a model; `texts` are the specs of the routes that take texts."""
    spec, template = texts.main, texts.main.template
    of_task: dict[str, object] = {
        "labels": list(spec.labels),
        "score_function": spec.score_function,
        "template": template is not None,
        "instruction": template.instruction if template and template.takes_instruction else None,
    }
    if spec.task == "embed":
        of_task = {"dimensions": spec.dim, "prompts": sorted(spec.prompts)}
    described = {
        "task": spec.task,
        **of_task,
        "adapters": list(spec.adapter_names),
        **_describe_route(routes[texts.main_route]),
        "parallel": config.parallel,
        "max_queue_tokens": capacity.max_tokens,
        "max_queue_bytes": capacity.max_bytes,
        "tokenizing_bytes": tokenizing_bytes,
        "cache_bytes": config.cache_bytes,
    }
    if len(texts.specs) > 1:
        described["default_route"] = texts.default
        described["routes"] = {route: _describe_route(routes[route]) for route in texts.specs}
    for route in routes.values():
        if not route.takes_texts:
            described["images"] = _describe_route(route)
    return described


def _describe_route(route: LoadedRoute) -> dict[str, object]:
    plan = route.plan
    return {
        "architecture": route.spec.architecture,
        "max_input_length": plan.max_input_tokens,
        "device": plan.device_name,
        "devices": max(len(plan.devices), 1),
        "dtype": plan.dtype,
        "kernels": plan.kernels.describe(),
        "buckets": [str(bucket) for bucket in plan.grid.buckets],
        "compiled_buckets": [str(bucket) for bucket in route.engine.snapshot().compiled],
        "content_hash": route.spec.content_hash,
    }
