"""Reads a Router of sentence-transformers: the modules of each route, and the default route.

A route must be chosen by the task of a text, such as "query". Other routing is not supported.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from jaxembed.data.spec import ROUTE_NAME
from jaxembed.errors import CheckpointError, UnsupportedModel

CONFIG_FILES = ("router_config.json", "config.json")  # config.json is that of the older Asym

ROUTERS = {
    "sentence_transformers.models.Router",
    "sentence_transformers.models.Asym",
    "sentence_transformers.base.modules.router.Router",
}
_PARAMETERS = {"default_route", "allow_empty_key", "route_mappings"}

# A route with one of these names is chosen by the kind of an input, not by a task.
MODALITIES = {"text", "image", "audio", "video", "message"}

Listed = list[tuple[str, str]]  # the type and the folder of each module


@dataclass(frozen=True)
class Router:
    """The modules of each route in order, and the route of a text that names none."""

    routes: dict[str, Listed]
    default: str | None


def plain_type(kind: str) -> str:
    """Return the type of a module as modules.json writes it, such as `models.Pooling`. A Router may
    write `models.Pooling.Pooling`."""
    parent, _, name = kind.rpartition(".")
    return parent if parent.endswith(f".{name}") else kind


def read_router(path: str, config: Mapping[str, Any], folder: str, later: Listed) -> Router:
    """Read the routes of a Router. A route has its own modules, and then the modules `later`, which
    follow the Router in modules.json.

    `config` is the content of the file `path`, and `folder` is the Router's folder in the model.
    Raises UnsupportedModel for routes that are not chosen by a task alone, for a Router within a
    route, and for other settings or names that are not supported; CheckpointError for a damaged
    file.
    """
    try:
        types, structure = dict(config["types"]), dict(config["structure"])
        parameters = {key: value for key, value in dict(config["parameters"]).items() if value}
        routes: dict[str, Listed] = {
            name: [(plain_type(types[key]), str(PurePosixPath(folder, key))) for key in modules]
            for name, modules in structure.items()
        }
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: wanted types, structure and parameters of a Router"
        ) from error
    if unknown := sorted(set(parameters) - _PARAMETERS):
        raise UnsupportedModel(f"{path}: not supported: {', '.join(unknown)}")
    for name, modules in routes.items():
        if any(kind in ROUTERS for kind, _ in modules):
            raise UnsupportedModel(f"{path}: route {name!r} has a Router of its own")
    # by route: the task by which route_mappings chooses it; other routes are chosen by their name
    tasks: dict[str, str] = {}
    for key, route in (parameters.get("route_mappings") or {}).items():
        try:
            task, modality = ast.literal_eval(key)
        except (ValueError, SyntaxError, TypeError) as error:
            raise CheckpointError(
                f"{path}: route_mappings has the key {key!r}, which is not a pair"
            ) from error
        if task is None or modality not in (None, "text"):
            raise UnsupportedModel(
                f"{path}: route_mappings chooses {route!r} by {key}; known: a task of texts"
            )
        if route not in routes:
            raise CheckpointError(f"{path}: there is no route {route!r} among {_shown(routes)}")
        if tasks.setdefault(route, task) != task:
            raise UnsupportedModel(
                f"{path}: the tasks {tasks[route]!r} and {task!r} share a route; known: one task "
                "per route"
            )
    names = [tasks.get(name, name) for name in routes]  # a route is renamed to its task
    if len(set(names)) < len(names):
        raise UnsupportedModel(f"{path}: two routes have the same task: {_shown(names)}")
    default = parameters.get("default_route")
    if default is None and config["parameters"].get("allow_empty_key", True):
        default = next(iter(routes), None)
    if not routes or (default is not None and default not in routes):
        raise CheckpointError(f"{path}: there is no route {default!r} among {_shown(routes)}")
    renamed = {tasks.get(name, name): [*modules, *later] for name, modules in routes.items()}
    if by_modality := sorted(MODALITIES & set(renamed)):
        raise UnsupportedModel(
            f"{path}: the routes {_shown(by_modality)} are chosen by the modality of an input; "
            "known: routes of tasks, such as query and document"
        )
    if bad := [name for name in renamed if not re.search(ROUTE_NAME, name)]:
        raise UnsupportedModel(
            f"{path}: the names of the routes {_shown(map(repr, bad))} are not supported; known: "
            "letters, digits, _ and -"
        )
    return Router(renamed, None if default is None else tasks.get(default, default))


def _shown(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
