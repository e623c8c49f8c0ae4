"""Loads a model as the flags of a command ask."""

from collections.abc import Sequence
from typing import Any

from jaxembed.cli.jax_setup import configure_jax
from jaxembed.cli.progress import compile_bar
from jaxembed.cli.settings import engine_config, model_source, text_config
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import Task
from jaxembed.errors import ConfigError, WrongTask


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


def load_embedder(model: str | None, flags: dict[str, Any]):
    """An Embedder of the model. Raises JaxembedError."""
    loaded = load_model(model, flags)
    from jaxembed.embedder import Embedder

    return Embedder.of(loaded)


def refuse_without_outputs(
    model: str | None,
    prompt_name: str | None,
    flags: dict[str, Any],
    outputs: Sequence[OutputName] = ("dense",),
    *,
    of_images: bool = False,
) -> None:
    """Raise WrongTask if the model does not give these outputs, or takes no images, and ConfigError
    if nothing says by which of its routes, before its weights are downloaded."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.checkpoints import hub
    from jaxembed.runtime.tasks import KIND

    source = model_source(model, flags)
    routes = hub.describe_model(source)
    name, task = source.name, routes.main.task
    if task != "embed":
        raise WrongTask(f"{name} is {KIND[task]}, which gives no vectors; use `jaxembed {task}`")
    spec = routes.image if of_images else routes.main
    if spec is None:
        raise WrongTask(
            f"{name} takes texts and no images, and the inputs are images; name a model of both "
            "with --model, such as openai/clip-vit-base-patch32"
        )
    offered = spec.representations
    if missing := [one for one in outputs if one not in offered]:
        raise WrongTask(
            f"{name} gives no {' and no '.join(missing)} output, only {' and '.join(offered)}, "
            f"which `jaxembed embed` writes with --outputs {' --outputs '.join(offered)}"
        )
    if of_images:
        return
    if routes.default is None and prompt_name is None and flags["default_prompt_name"] is None:
        raise ConfigError(f"--prompt-name must name a route of {name}: {', '.join(routes.specs)}")


def refuse_without_task(model: str | None, task: Task, flags: dict[str, Any]) -> None:
    """Raise WrongTask if the model cannot do the task, before its weights are downloaded."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.checkpoints import hub
    from jaxembed.runtime.tasks import check_task

    source = model_source(model, flags)
    check_task(source.name, hub.describe_model(source).main, task)
