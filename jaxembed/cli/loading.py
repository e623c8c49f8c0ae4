"""Loads a model and runs a job as the flags of a command ask: makes the settings, configures JAX,
and shows progress on standard error.

In this module, `flags` maps the names of the flags, with underscores, to their values.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxembed import memory
from jaxembed.checkpoints.source import ModelSource
from jaxembed.cli.options import POOLING_CHOICES
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.outputs import OutputName
from jaxembed.data.spec import Task
from jaxembed.errors import BackendError, ConfigError, WrongTask, counted
from jaxembed.platform.signals import set_resume_hint

if TYPE_CHECKING:
    from jaxembed.bulk.row_source import RowSource
    from jaxembed.embedder import Embedder

logger = logging.getLogger("jaxembed")

FOLDER_FLAGS = ("id_column", "keep", "part_rows", "on_error", "reuse")  # the flags in JOB_OPTIONS


def model_source(model: str | None, flags: dict[str, Any]) -> ModelSource:
    """Return the ModelSource that says where a model comes from and how it is converted. Raises
    CheckpointError.

    Sets the environment variable HF_HUB_CACHE if --huggingface-hub-cache is given.
    """
    if flags["huggingface_hub_cache"]:
        os.environ["HF_HUB_CACHE"] = str(flags["huggingface_hub_cache"])
    return ModelSource(
        model,
        revision=flags["revision"],
        offline=flags["offline"],
        token=flags["hf_token"],
        cache_dir=flags["cache_dir"],
        dense_path=flags["dense_path"],
        cutoff_layer=flags["cutoff_layer"],
        adapters=flags["adapter"],
        pooling=flags["pooling"] and POOLING_CHOICES[flags["pooling"]],
    )


def engine_config(flags: dict[str, Any]) -> EngineConfig:
    """Return the settings of the engine.

    Only `serve` has the flags for admission and for the cache of answers. For other commands, these
    settings have the defaults of EngineConfig.
    """
    server_settings = {
        name: flags[name]
        for name in (
            "max_concurrent_requests",
            "max_queue_tokens",
            "max_queue_bytes",
            "cache_bytes",
        )
        if flags.get(name) is not None
    }
    return EngineConfig(
        dtype=flags["dtype"],
        quantize=flags["quantize"],
        quantize_anyway=flags["quantize_anyway"],
        devices=flags["devices"],
        parallel=flags["parallel"],
        tensor_parallel=flags["tensor_parallel"],
        warmup=flags["warmup"],
        kernels=flags["kernels"],
        max_batch_tokens=flags["max_batch_tokens"],
        max_batch_requests=flags["max_batch_requests"],
        buckets=flags["buckets"],
        max_input_tokens=flags["max_input_length"],
        null_model=flags["null_model"],
        **server_settings,
    )


def text_config(flags: dict[str, Any]) -> TextConfig:
    """Return the settings for tokenizing texts, which apply if a request does not say otherwise."""
    return TextConfig(
        truncate=flags["auto_truncate"],
        default_prompt=flags["default_prompt"],
        default_prompt_name=flags["default_prompt_name"],
        max_instruction_tokens=flags.get("max_instruction_tokens"),
        workers=flags["tokenization_workers"],
    )


def configure_jax(cache_dir: Path, memory_fraction: float | None) -> None:
    """Configure memory, JAX and threads for the whole process, then start the devices.

    Compiled programs are kept in `cache_dir`. `memory_fraction` is the share of a GPU's memory to
    use, from 0 to 1. Raises ConfigError if `cache_dir` cannot be made, other users can write to it,
    or JAX_PLATFORMS names an unknown kind of device; BackendError if a device cannot be started.
    """
    # the variable shows whether the user tunes glibc
    if "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        memory.keep()
    if memory_fraction is not None:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(memory_fraction)
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # JAX refuses old and new name
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from jaxembed.engine.compiles import keep_programs

    try:
        keep_programs(cache_dir)
    except OSError as error:
        raise ConfigError(
            f"--cache-dir {cache_dir} (JAXEMBED_CACHE) cannot be used: {error.strerror}"
        ) from error
    # a worker thread waits for its batch anyway, and asynchronous dispatch would start more threads
    # than there are cores
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    sys.setswitchinterval(0.0005)  # keeps the event loop responsive beside the engine's threads
    try:
        jax.local_devices()
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS") or "not set"
        # A known kind of device may be in use or not started yet, so a retry may help. An unknown
        # kind is a mistake in JAX_PLATFORMS.
        kind = ConfigError if "known backends" in str(error) else BackendError
        raise kind(f"JAX cannot start a device (JAX_PLATFORMS is {platforms}): {error}") from error


def load_model(model: str | None, flags: dict[str, Any], **options: Any):
    """Configure JAX, load a model with the settings in `flags`, and return the LoadedModel.
    `options` are further arguments of LoadedModel. Raises JaxembedError."""
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
    text_options: Mapping[str, Any],
    flags: dict[str, Any],
    source: "RowSource",
    outputs: Sequence[OutputName] = ("dense",),
) -> "Embedder":
    """Load a model that can compute `outputs` for the rows of `source`. Raises the errors of
    `load_model`.

    The model is checked before its weights are downloaded. `text_options` are options for texts.
    Raises WrongTask if it cannot compute the outputs, and ConfigError if it has no default route
    and no prompt name selects a route, or for an option that the rows do not take.
    """
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.checkpoints import hub
    from jaxembed.embedder import Embedder
    from jaxembed.runtime.tasks import KIND

    origin = model_source(model, flags)
    routes = hub.describe_model(origin)
    name, task = origin.name, routes.main.task
    if task != "embed":
        raise WrongTask(f"{name} is {KIND[task]}, which computes no vectors; use `jaxembed {task}`")
    spec = source.spec(routes, name)
    given = {**flags, **text_options}
    for option in source.unused_flags(spec):
        if given.get(option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')} is for texts, and the inputs are images; leave it "
                "out"
            )
    offered = spec.representations
    if missing := [output for output in outputs if output not in offered]:
        raise WrongTask(
            f"{name} has no {' and no '.join(missing)} output; `jaxembed embed` can write "
            f"--outputs {' --outputs '.join(offered)}"
        )
    route_names = source.named_routes(routes)
    names = text_options.get("prompt_name"), flags["default_prompt_name"]
    if route_names and names == (None, None):
        raise ConfigError(f"--prompt-name must name a route of {name}: {', '.join(route_names)}")
    return Embedder.of(load_model(model, flags))


def load_for_task(model: str | None, task: Task, flags: dict[str, Any]) -> "Embedder":
    """Load a model that can do the task for each row alone. Raises the errors of `load_model`, and
    WrongTask before weights are downloaded if the model cannot do the task."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.checkpoints import hub
    from jaxembed.embedder import Embedder
    from jaxembed.runtime.tasks import check_pairs, check_task

    source = model_source(model, flags)
    spec = hub.describe_model(source).main
    check_task(source.name, spec, task)
    check_pairs(source.name, spec)
    return Embedder.of(load_model(model, flags))


def compile_bar() -> Callable[[int, int], None] | None:
    """Return a function that shows a progress bar, given the number of compiled buckets and of all
    buckets. Return None if standard error is not a terminal; then log lines report progress."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar = tqdm(desc="compile", unit=" buckets", leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


def step_lines() -> Callable[[str, int, int], None]:
    """Return a function that shows progress, given the name `what` of a step and the number `done`
    of its present item among `total`. A terminal shows one line that changes. If standard error is
    not a terminal, there is a log line at the start of each step."""
    terminal = sys.stderr.isatty()

    def show(what: str, done: int, total: int) -> None:
        count = f", {done} of {total}" if total > 1 else ""
        if terminal:
            click.echo(f"\r\033[K{what}{count}", nl=False, err=True)
        elif done == 1:
            logger.info("%s%s", what, f", {total} in total" if total > 1 else "")

    return show


def folder_options(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove the flags in JOB_OPTIONS from `flags`, and return their values by name."""
    return {name: flags.pop(name) for name in FOLDER_FLAGS}


def check_folder_job(inputs: Sequence[str], output: str, files: str = "") -> None:
    """Check the inputs and the output folder of a job before a model is loaded.

    Raises ConfigError if the name of the folder has a dot like that of a file, an input is missing,
    or an extra that is needed is not installed. `files` lists for the message the kinds of files
    that `output` could name instead of a folder.
    """
    from jaxembed.bulk.sources import IMAGE_FILES, ROW_FILES, input_files
    from jaxembed.platform import object_store
    from jaxembed.platform.extras import require

    # a dot at the start or the end of the name is allowed, as in `..` and `.name`
    if "." in output.rstrip("/").rpartition("/")[2].strip("."):
        raise ConfigError(
            f"--output {output}: expected {files}a folder for Parquet files, whose name must not "
            "have a dot"
        )
    require("parquet", f"--output {output}, a folder of Parquet files")
    object_store.require_extra(output)
    input_files(inputs, (*ROW_FILES, *IMAGE_FILES))


def run_folder_job(
    load: Callable[[], "Embedder"],
    make: Callable[["Embedder"], Any],
    inputs: tuple[str, ...],
    output: str,
    chosen: dict[str, Any],
) -> None:
    """Run a job with a progress bar, and log a summary. `load` loads the model, `make` returns the
    Computation to run with the model, and `chosen` is what `folder_options` has returned. Raises
    the errors of `load` and `run_job`."""
    from tqdm import tqdm

    from jaxembed.bulk.run import JobProgress, Rows, run_job

    reuse = chosen.pop("reuse")
    rows = Rows(inputs, **chosen)
    embedder = load()
    try:
        computation = make(embedder)
        telemetry = embedder.model.telemetry
        started_at = time.monotonic()
        with tqdm(unit=" rows", desc=computation.describe()["task"], disable=None) as bar:

            def show(progress: JobProgress) -> None:
                if progress.share:
                    bar.total = round(progress.rows / progress.share)
                batches, fills = telemetry.batch_fill.totals()
                bar.set_postfix_str(f"fill {fills / max(batches, 1):.2f}", refresh=False)
                if not bar.n:  # at first, leave rows of earlier runs out of the rate
                    bar.initial = bar.n = max(progress.rows - computation.rows_per_call, 0)
                bar.update(progress.rows - bar.n)

            set_resume_hint(
                f"run the same command again to continue after the finished parts in {output}"
            )
            summary = run_job(computation, rows, output, reuse=reuse, on_progress=show)
        seconds = time.monotonic() - started_at
    finally:
        embedder.close()
    logger.info(
        "%s has %s in %s%s; computed %s in %.1f s (%.0f per second)%s%s",
        output,
        counted(summary.rows, "row"),
        counted(summary.parts, "part"),
        f", {counted(summary.parts_from_before, 'part')} from earlier runs"
        if summary.parts_from_before
        else "",
        counted(summary.computed, "row"),
        seconds,
        summary.computed / seconds,
        f", copied {counted(summary.reused, 'row')} from {reuse}" if summary.reused else "",
        f", left out {counted(summary.skipped, 'row')}: see _skipped.jsonl"
        if summary.skipped
        else "",
    )
    warn_of_truncation(embedder)


def warn_of_truncation(embedder: "Embedder") -> None:
    """Log a warning if the model has truncated texts."""
    if truncated := int(embedder.model.telemetry.truncated_inputs.value):
        logger.warning(
            "truncated %s that had more tokens than allowed (the limit of the model is %d); "
            "--auto-truncate false refuses such texts",
            counted(truncated, "text"),
            embedder.max_input_tokens,
        )
