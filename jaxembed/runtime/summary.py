"""Summarises a model from its spec alone, before it is loaded."""

import math
from typing import Any, get_args

import msgspec

from jaxembed.data.spec import DType, ModelSpec, Routes
from jaxembed.engine.bucket import LONGEST_DEFAULT_ROW
from jaxembed.engine.placement import placed_bytes
from jaxembed.models import parameter_shapes, position_limit


def summary_of_routes(routes: Routes) -> dict[str, Any]:
    """Summarise the main route of a model as plain values for JSON.

    If the model has several routes, `routes` has the summary of each.
    """
    facts = summary(routes.main)
    if len(routes.specs) > 1:
        facts["default_route"] = routes.default
        facts["routes"] = {route: summary(spec) for route, spec in routes.specs.items()}
    return facts


def summary(spec: ModelSpec) -> dict[str, Any]:
    """Summarise one route of a model as plain values for JSON.

    Its `parameter_bytes` is the size of the parameters on a device, for each dtype to serve in.
    """
    shapes = {name: leaf.shape for name, leaf in parameter_shapes(spec).items()}
    if spec.task == "embed":
        task_fields = {
            "outputs": spec.widths,
            "normalized": spec.head.normalize,
            "prompts": spec.prompts,
            "default_prompt_name": spec.default_prompt_name,
            "include_prompt": spec.include_prompt,
            "interaction": msgspec.to_builtins(spec.interaction),
        }
    else:
        task_fields = {
            "outputs": {spec.primary: spec.dim},
            "labels": list(spec.labels),
            "score_function": spec.score_function,
            "template": msgspec.to_builtins(spec.template),
        }
    # The limits of an input in tokens: the limit of the checkpoint, the positions of the backbone
    # (None: no limit), and the limit of a server without --max-input-length and --buckets.
    positions = position_limit(spec)
    limit = spec.max_input_tokens if positions is None else min(spec.max_input_tokens, positions)
    limits = {
        "max_input_tokens": spec.max_input_tokens,
        "positions": positions,
        "served_by_default": limit if spec.is_static else min(limit, LONGEST_DEFAULT_ROW),
    }
    dtypes: tuple[DType, ...] = ("float32",) if spec.is_static else get_args(DType)
    return {
        "source": spec.source,
        "revision": spec.revision,
        "converted": bool(spec.content_hash),
        "content_hash": spec.content_hash or None,
        "format_version": spec.format_version,
        "architecture": spec.architecture,
        "task": spec.task,
        "dimensions": spec.dim,
        **task_fields,
        "pooling": list(spec.pooling),
        "adapters": list(spec.adapter_names),
        "modules": [msgspec.to_builtins(module) for module in spec.head.modules],
        "limits": limits,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "parameter_dtype": spec.dtype,
        "parameter_bytes": {dtype: placed_bytes(shapes, dtype) for dtype in dtypes},
        "config": spec.config,
    }
