"""`jaxembed serve`: serves one or several models over HTTP."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from jaxembed.cli.loading import configure_jax, engine_config, load_model, model_source
from jaxembed.cli.options import ENGINE_OPTIONS, MODEL_OPTIONS, TEXT_OPTIONS, Command
from jaxembed.cli.server_options import REPOSITORY_OPTIONS, SERVER_OPTIONS, server_config, tracer_of
from jaxembed.config import PoolLimits
from jaxembed.data.spec import Task
from jaxembed.errors import ConfigError, JaxembedError

logger = logging.getLogger("jaxembed")

_ALONE = "serve that model in a separate process"
_CONVERT = "convert that model with `jaxembed convert {flag}`, and serve the converted checkpoint"
SINGLE_MODEL_FLAGS = {  # flags for a single model, and what to do instead for several models
    "revision": _CONVERT,
    "dense_path": _CONVERT,
    "cutoff_layer": _CONVERT,
    "adapter": _CONVERT,
    "pooling": _ALONE,
    "buckets": _ALONE,
    "max_input_length": _ALONE,
    "default_prompt": _ALONE,
    "default_prompt_name": _ALONE,
}


@click.command(
    "serve",
    cls=Command,
    example="jaxembed serve sentence-transformers/all-MiniLM-L6-v2 --port 9000",
)
@click.argument("model", nargs=-1)
@SERVER_OPTIONS
@REPOSITORY_OPTIONS
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def serve_command(
    model: tuple[str, ...],
    model_id: tuple[str, ...],
    served_model_name: tuple[str, ...],
    **flags: Any,
) -> None:
    """Serve models over HTTP with the APIs of OpenAI, TEI, Jina and Cohere.

    MODEL is a directory, a hub id, or the s3:// or gs:// URL of a converted model. Without MODEL
    the server loads all-MiniLM-L6-v2, unless --loadable or --model-repository names others.

    Several models share the devices and the limits on waiting work. A request names its model in
    the field `model`.
    """
    models = models_to_serve(model, model_id)
    has_loadable = flags["loadable"] or flags["model_repository"] is not None
    if len(models) > 1 or has_loadable:
        _refuse_flags_of_one_model(flags, models)
    _refuse_blank_keys(flags["api_key"], flags["admin_key"])
    tracer = tracer_of(flags)
    from jaxembed.checkpoints.source import DEFAULT_MODEL
    from jaxembed.engine.admission import capacity_of
    from jaxembed.platform import object_store
    from jaxembed.server.registry.models import Catalog, Models, served_names
    from jaxembed.server.run import listen, run

    models = models or (() if has_loadable else (DEFAULT_MODEL,))
    for name in models:
        object_store.require_extra(name)  # raises if the extra for this URL is not installed
    can_load = has_loadable or flags["admin_key"] is not None or flags["admin_port"] is not None
    loadable = Catalog(flags["loadable"], flags["model_repository"]) if can_load else None
    aliases = model_aliases(served_model_name, models)
    served_names(models, aliases)  # raises if two models have one name, before a long load
    config = server_config(flags)
    keyring, audit = _open_files(flags)
    listener = listen(config.host, config.port)  # raises if the port is in use
    logger.info(_access_line(config.api_keys, 0 if keyring is None else len(keyring)))
    capacity = capacity_of(engine_config(flags))
    loaded: list[Any] = []
    for name in models:
        try:  # the models loaded before this one compile meanwhile
            loaded.append(load_model(name, flags, capacity=capacity, wait=False))
        except JaxembedError as error:
            for earlier in loaded:
                earlier.close(timeout_s=0.0)
            if len(models) == 1:
                raise
            raise ConfigError(f"{name} cannot be served: {error}") from error
    run(
        Models(loaded, aliases, capacity=capacity, loadable=loadable),
        config,
        listener,
        load=partial(_load_later, flags, capacity) if can_load else None,
        limits=_pool_limits(flags, loaded) if can_load else None,
        describe=partial(_task_of, flags) if can_load else None,
        keyring=keyring,
        audit=audit,
        tracer=tracer,
    )


def _open_files(flags: dict[str, Any]) -> tuple[Any, Any]:
    """Open the key file and the audit log. Returns a Keyring and an AuditLog, or None for one whose
    flag is not set. From here on SIGHUP is ignored until the server runs, because it would end the
    process. Raises ConfigError."""
    from jaxembed.server.auth.audit import AuditLog
    from jaxembed.server.auth.keyring import Keyring

    key_path, log_path = flags["api_key_file"], flags["audit_log"]
    for path, variable in ((key_path, "API_KEY_FILE"), (log_path, "AUDIT_LOG")):
        value = os.environ.get(variable)
        if path is None and value is not None:  # click treats a blank variable as unset
            raise ConfigError(
                f"{variable} is set but blank ({value!r}); give it a path, or unset it"
            )
    if key_path is None and log_path is None:
        return None, None
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    used_keys = dict.fromkeys(flags["api_key"], "--api-key")
    if flags["admin_key"] is not None:
        used_keys[flags["admin_key"]] = "--admin-key"
    return key_path and Keyring(key_path, taken=used_keys), log_path and AuditLog(log_path)


def models_to_serve(model: tuple[str, ...], model_id: tuple[str, ...]) -> tuple[str, ...]:
    """Return the models to serve, each once: the values of MODEL and of --model-id. The environment
    variable MODEL_ID, which also sets --model-id, is ignored if MODEL is given."""
    source = click.get_current_context().get_parameter_source("model_id")
    if model and source is ParameterSource.ENVIRONMENT:
        model_id = ()
    return tuple(dict.fromkeys(model + model_id))


def _refuse_blank_keys(keys: tuple[str, ...], admin_key: str | None) -> None:
    """Raise ConfigError if a key is blank, or the admin key is also an API key. The environment
    variables are also checked, because click treats a blank variable as unset, and then the server
    would be open to everybody."""
    if blank := [key for key in keys if not key.strip()]:
        raise ConfigError(
            f"--api-key is blank ({blank[0]!r}); give a key that clients can send, or leave the "
            "flag out and unset API_KEY to serve without one"
        )
    variable = os.environ.get("API_KEY")
    if not keys and variable is not None:
        raise ConfigError(
            f"API_KEY is set but blank ({variable!r}); give it a key that clients must send, or "
            "unset it to serve without one"
        )
    value = os.environ.get("ADMIN_KEY") if admin_key is None else admin_key
    if value is not None and not value.strip():
        raise ConfigError(
            f"--admin-key (ADMIN_KEY) is blank ({value!r}); give a key, or leave it out and unset "
            "ADMIN_KEY"
        )
    if admin_key in keys:
        raise ConfigError("--admin-key is also an --api-key; give it a different value")


def _access_line(keys: tuple[str, ...], in_file: int) -> str:
    """Return the log line that says whether requests need a key. `keys` are the values of
    --api-key, and `in_file` is the number of keys in the key file."""
    total = len(keys) + in_file
    if not total:
        return "no API key is required; set --api-key (API_KEY) or --api-key-file to require one"
    needed = "the API key" if total == 1 else f"one of {total} API keys"
    return f"requests need {needed}{f' ({in_file} in --api-key-file)' if in_file else ''}"


def _refuse_flags_of_one_model(flags: dict[str, Any], models: Sequence[str]) -> None:
    """Raise UsageError if a flag of SINGLE_MODEL_FLAGS is set. It is called if the server may have
    several models; `models` are those named on the command line."""
    for name, remedy in SINGLE_MODEL_FLAGS.items():
        if flags[name] not in (None, {}):
            flag = "--" + name.replace("_", "-")
            several = f"this server has {len(models)}: {', '.join(models)}"
            reason = several if len(models) > 1 else "this server may load others"
            raise click.UsageError(
                f"{flag} is for a single model, and {reason}; {remedy.format(flag=flag)}"
            )


def model_aliases(names: Sequence[str], models: Sequence[str]) -> dict[str, list[str]]:
    """Return the served names of each model, by model. `names` are the values of
    --served-model-name: NAME=MODEL, or NAME if there is one model. Raises UsageError for a value of
    another form, and for an unknown model."""
    aliases: dict[str, list[str]] = {}
    for value in names:
        name, equals, model = value.partition("=")
        if not equals and len(models) == 1:
            model = models[0]
        if not name or model not in models:
            raise click.UsageError(
                f"--served-model-name {value}: expected NAME=MODEL, where MODEL is one of "
                + ", ".join(models)
            )
        aliases.setdefault(model, []).append(name)
    return aliases


def _load_later(
    flags: dict[str, Any], capacity: Any, model: str, reserve: Callable[[int], object]
) -> Any:
    """Load a model while the server runs, and return it when it has answered a probe. All models
    share the limits on waiting work in `capacity`. `reserve` is called with the number of bytes
    that the model will take. Raises JaxembedError."""
    loaded = load_model(model, flags, capacity=capacity, reserve=reserve)
    try:
        loaded.probe()
    except BaseException:
        loaded.close(timeout_s=0.0)
        raise
    return loaded


def _task_of(flags: dict[str, Any], model: str) -> Task:
    """Return the task of a model without loading it. Raises JaxembedError."""
    from jaxembed.checkpoints import hub

    return hub.describe_model(model_source(model, flags)).main.task


def _pool_limits(flags: dict[str, Any], loaded: Sequence[Any]) -> PoolLimits:
    """Return the limits on the memory of models, and on the times of loading and eviction. Raises
    ConfigError if the `loaded` models already take more than --model-memory."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    import jax

    from jaxembed.engine.placement import room_for_models

    taken = sum(model.resident_bytes for model in loaded)
    max_bytes = flags["model_memory"]
    if max_bytes is not None and taken > max_bytes:
        raise ConfigError(
            f"--model-memory {max_bytes}: the models on the command line take {taken} bytes; give "
            "at least as many"
        )
    if max_bytes is None:
        device = jax.local_devices()[0]
        room = room_for_models(device)
        # on a CPU, `room` is the memory that the loaded models have left free
        max_bytes = room if room is None or device.platform != "cpu" else room + taken
    return PoolLimits(max_bytes, flags["load_timeout"], flags["model_keep_alive"])
