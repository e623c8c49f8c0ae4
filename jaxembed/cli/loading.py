"""Loads a model as the flags of a command ask."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxembed.cli.jax_setup import configure_jax
from jaxembed.cli.progress import compile_bar
from jaxembed.cli.settings import engine_config, model_source, text_config
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import Task
from jaxembed.errors import ConfigError, WrongTask

if TYPE_CHECKING:
    from jaxembed.bulk.row_source import RowSource
    from jaxembed.embedder import Embedder


def load_model(model: str | None, flags: dict[str, Any], **options: Any):
    """A LoadedModel; `options` are further arguments of it. Raises JaxembedError."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.runtime.model import LoadedModel

    return LoadedModel(
        model_source(model, flags),
        config=engine_config(flags),
        text=text_config(flags),
        on_progress=compile_bar(),
        **options,
    )


def load_for_outputs(
    model: str | None,
    prompt_name: str | None,
    flags: dict[str, Any],
    source: "RowSource",
    outputs: Sequence[OutputName] = ("dense",),
) -> "Embedder":
    """An Embedder of a model that gives these outputs of such rows.

    Before its weights are downloaded it raises WrongTask if the model does not, and ConfigError if
    nothing says by which of its routes.
    """
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.checkpoints import hub
    from jaxembed.embedder import Embedder
    from jaxembed.runtime.tasks import KIND

    origin = model_source(model, flags)
    routes = hub.describe_model(origin)
    name, task = origin.name, routes.main.task
    if task != "embed":
        raise WrongTask(f"{name} is {KIND[task]}, which gives no vectors; use `jaxembed {task}`")
    offered = source.spec(routes, name).representations
    if missing := [one for one in outputs if one not in offered]:
        raise WrongTask(
            f"{name} gives no {' and no '.join(missing)} output, only {' and '.join(offered)}, "
            f"which `jaxembed embed` writes with --outputs {' --outputs '.join(offered)}"
        )
    named = source.named_routes(routes)
    if named and prompt_name is None and flags["default_prompt_name"] is None:
        raise ConfigError(f"--prompt-name must name a route of {name}: {', '.join(named)}")
    return Embedder.of(load_model(model, flags))


def load_for_task(model: str | None, task: Task, flags: dict[str, Any]) -> "Embedder":
    """An Embedder of a model that can do the task. Raises WrongTask before its weights are
    downloaded if it cannot."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.checkpoints import hub
    from jaxembed.embedder import Embedder
    from jaxembed.runtime.tasks import check_task

    source = model_source(model, flags)
    check_task(source.name, hub.describe_model(source).main, task)
    return Embedder.of(load_model(model, flags))
