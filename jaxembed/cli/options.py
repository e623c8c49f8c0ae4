"""What the commands share: log lines, help pages, options and exit statuses."""

import errno
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from jaxembed.checkpoints.source import adapter_folders, default_cache_dir
from jaxembed.config import EngineConfig
from jaxembed.data.spec import DType, PoolingChoice, Quantize
from jaxembed.errors import (
    BackendError,
    CheckpointError,
    HubUnreachable,
    JaxembedError,
    NoRoom,
    StoreUnreachable,
)
from jaxembed.observability.log import configure_logging
from jaxembed.platform.files import DISK_FULL

OWN = "Options"  # title in `--help` of the options that only one command has
MAX_SUMMARY_CHARACTERS = 10_000  # longer than any summary


def section(title: str, *options: Callable) -> Callable:
    """Return a decorator that adds `options` to a command. `--help` shows them in this order, below
    `title`."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            option(function)  # appends to __click_params__, which click reads in reverse order
            function.__click_params__[-1].section = title
        return function

    return add


class Command(click.Command):
    """A command that sets up logging before it runs. Its help has an example, and shows the options
    by section."""

    def __init__(self, *arguments: Any, example: str, **attributes: Any):
        super().__init__(*arguments, **attributes)
        self.example = example

    def invoke(self, ctx: click.Context) -> Any:
        """Set up logging and run the command. Log lines are JSON if the command has the flag
        --json-output and it is set."""
        configure_logging(ctx.params.get("json_output", False))
        return super().invoke(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description, and the example after it."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Example"):
            formatter.write(f"{'':{formatter.current_indent}}{self.example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each section below its title."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "section", OWN), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A group that lists its commands in the order in which they were added."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the whole first sentence of its help."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(MAX_SUMMARY_CHARACTERS))
                    for name, command in self.commands.items()
                ]
            )


def echo_json(value: Any) -> None:
    """Print a value as indented JSON, for the flag `--json` of a command."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


# Poolings by their names in TEI, which are the values of --pooling.
POOLING_CHOICES: dict[str, PoolingChoice] = {
    "cls": "cls",
    "mean": "mean",
    "last-token": "lasttoken",
    "splade": "splade",
}


class FiniteRange(click.FloatRange):
    """A click type for finite numbers within bounds. It refuses nan, which click's FloatRange
    accepts."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def tei_option(flag: str, **attributes: Any) -> Callable:
    """Return a decorator that adds an option of TEI. As in TEI, an environment variable also sets
    it, which has the name of the flag in capitals."""
    name = flag.removeprefix("--").split("/")[0]
    return click.option(flag, envvar=name.upper().replace("-", "_"), show_envvar=True, **attributes)


def named_folders(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> dict[str, Path]:
    """Parse the values NAME=DIR of --adapter, and return each DIR by its NAME. Raises BadParameter
    for a value of another form, and for a name that is repeated or not allowed. It is a callback
    of click."""
    folders: dict[str, str] = {}
    for value in given:
        name, equals, folder = value.partition("=")
        if not equals or name in folders:
            raise click.BadParameter(
                f"{value!r}: expected NAME=DIR, with a different NAME for each adapter"
            )
        folders[name] = folder
    try:
        return adapter_folders(folders)
    except CheckpointError as error:
        raise click.BadParameter(str(error)) from error


MODEL_FLAG = click.option(
    "--model",
    "-m",
    help="Model to load: a directory or a hub id (default: all-MiniLM-L6-v2).",
)
TEXT_COLUMN_FLAG = click.option(
    "--text-column",
    default="text",
    show_default=True,
    help="Column that contains the texts (ignored for .txt files).",
)
OUTPUT_FLAG = click.option(
    "--output", "-o", required=True, help="Folder of Parquet files to write."
)
RAW_SCORES_FLAG = click.option(
    "--raw-scores",
    is_flag=True,
    help="Write the logits of a reranker or classifier instead of scores from 0 to 1.",
)
JOB_OPTIONS = section(
    "Output folder",
    click.option(
        "--id-column",
        help="Column of the input to copy as the first column of the output. A row without a value "
        "in it is a bad row (see --on-error).",
    ),
    click.option(
        "--keep",
        multiple=True,
        help="Another column of the input to copy to the output. Repeat for several.",
    ),
    click.option(
        "--part-rows",
        type=click.IntRange(1),
        default=65_536,
        show_default=True,
        help="Number of input rows in each part of the folder.",
    ),
    click.option(
        "--on-error",
        type=click.Choice(["fail", "skip"]),
        default="fail",
        show_default=True,
        help="What to do with a row that cannot be read or computed: fail stops the job, skip "
        "leaves the row out and lists it in _skipped.jsonl.",
    ),
    click.option(
        "--reuse",
        help="Folder of an earlier job. Its results are copied for rows with equal inputs.",
    ),
)

SPLADE_FLAG = tei_option(
    "--pooling",
    type=click.Choice(["splade"]),
    help="Turn a masked language model that has no modules.json into a sparse encoder.",
)

CACHE_DIR = click.option(
    "--cache-dir",
    envvar="JAXEMBED_CACHE",
    show_envvar=True,
    type=click.Path(path_type=Path),
    default=default_cache_dir,
    show_default="~/.cache/jaxembed",
    help="Directory for converted models and compiled programs. It must not be writable by "
    "other users.",
)

MODEL_OPTIONS = section(
    "Model",
    tei_option(
        "--revision",
        help="Branch, tag or commit of a model from the hub (default: the newest).",
    ),
    click.option(
        "--offline",
        is_flag=True,
        help="Download nothing: use only models that are already on this machine.",
    ),
    tei_option("--hf-token", help="Access token for the Hugging Face hub."),
    tei_option(
        "--dense-path",
        help="Folder of the Dense module to use instead of the one that modules.json names.",
    ),
    click.option(
        "--cutoff-layer",
        type=click.IntRange(min=1),
        help="Last layer to run, of a reranker with a head after each of several layers (default: "
        "all layers).",
    ),
    click.option(
        "--adapter",
        multiple=True,
        metavar="NAME=DIR",
        callback=named_folders,
        help="Low-rank adapter in PEFT's format to load with the model; requests choose it by its "
        "NAME. Repeat for several.",
    ),
    CACHE_DIR,
    tei_option(
        "--huggingface-hub-cache",
        type=click.Path(path_type=Path),
        help="Directory for files downloaded from the hub (default: chosen by huggingface_hub).",
    ),
)

ENGINE_OPTIONS = section(
    "Engine",
    tei_option(
        "--pooling",
        type=click.Choice(list(POOLING_CHOICES)),
        help="Pooling to use instead of the checkpoint's; splade turns a masked language model "
        "into a sparse encoder.",
    ),
    tei_option(
        "--dtype",
        type=click.Choice(get_args(DType)),
        help="Data type of weights and matrix products (default: bfloat16 if the device has native "
        "bfloat16 products, else float32).",
    ),
    click.option(
        "--quantize",
        type=click.Choice(get_args(Quantize)),
        help="Compute in int8: int8-weights stores large weights in a byte each, on any device; "
        "int8 also multiplies in int8, on a CPU with native kernels.",
    ),
    click.option(
        "--quantize-anyway",
        is_flag=True,
        help="Quantize even if this changes the vectors of the model more than is allowed.",
    ),
    click.option(
        "--devices", type=click.IntRange(1), help="Number of devices to use (default: all)."
    ),
    click.option(
        "--parallel",
        type=click.Choice(["replicas", "sharded"]),
        default="replicas",
        show_default=True,
        help="How to use several devices: replicas runs different batches on each device, sharded "
        "divides each batch among all devices.",
    ),
    click.option(
        "--tensor-parallel",
        type=click.IntRange(1),
        default=EngineConfig.tensor_parallel,
        show_default=True,
        help="Number of devices that hold a model together, for models that are too large for one "
        "device: each holds its share of the weights of attention and MLPs.",
    ),
    click.option(
        "--warmup",
        type=click.Choice(["minimal", "full"]),
        help="Batch shapes to compile before the model is ready: minimal compiles the few most "
        "needed, full compiles all (default: full on a GPU, else minimal).",
    ),
    click.option(
        "--kernels",
        default=EngineConfig.kernels,
        show_default=True,
        help="Kernels to compute with: auto (the fastest that pass the correctness check), xla, "
        "native (CPU), flash or triton (GPU), or splash (TPU).",
    ),
    tei_option(
        "--max-batch-tokens",
        type=click.IntRange(1),
        help="Maximum tokens in a batch, padding included (default: 16384; on a CPU chosen from "
        "its measured speed).",
    ),
    tei_option(
        "--max-batch-requests",
        type=click.IntRange(1),
        help="Maximum sequences in a batch (default: no limit).",
    ),
    click.option(
        "--buckets",
        type=click.Path(path_type=Path),
        help="JSON file with the batch shapes to compile, as `jaxembed tune` writes it (default: a "
        "built-in grid).",
    ),
    click.option(
        "--max-input-length",
        envvar="MAX_INPUT_LENGTH",
        show_envvar=True,
        type=click.IntRange(1),
        help="Maximum tokens in one input (default: the limit of the model).",
    ),
    click.option(
        "--device-memory-fraction",
        type=FiniteRange(0, 1, min_open=True),
        help="Share of a GPU's memory to use, allocated as needed (default: JAX allocates three "
        "quarters at the start).",
    ),
    click.option(
        "--null-model",
        is_flag=True,
        hidden=True,
        help="Answer with constants, to measure the host without a device.",
    ),
)

TEXT_OPTIONS = section(
    "Texts",
    tei_option(
        "--auto-truncate",
        type=bool,
        is_flag=False,
        flag_value=True,
        default=True,
        show_default=True,
        help="Whether to truncate inputs over the limit unless a request says otherwise; false "
        "refuses them.",
    ),
    tei_option(
        "--default-prompt",
        help="Text to put in front of every input (default: the checkpoint's default prompt).",
    ),
    tei_option(
        "--default-prompt-name",
        help="Name of the model's prompt to put in front of every input (default: the "
        "checkpoint's default prompt).",
    ),
    tei_option(
        "--tokenization-workers",
        type=click.IntRange(1),
        help="Number of tokenizer threads (default: one less than the number of cores, at least "
        "4).",
    ),
)


# Exit statuses of `verify`, of `doctor`, and of all commands.
EXIT_AGREES, EXIT_DISAGREES = 0, 1
EXIT_HEALTHY, EXIT_FINDINGS = 0, 1
EXIT_REFUSED = 2  # the command, its options or its files are wrong; no retry helps
EXIT_TEMPORARY = 75  # the same command may succeed later; EX_TEMPFAIL of sysexits.h

# The exit status for each class of errors; other errors have that of their nearest base class.
STATUSES: dict[type[BaseException], int] = {
    JaxembedError: EXIT_REFUSED,
    HubUnreachable: EXIT_TEMPORARY,
    StoreUnreachable: EXIT_TEMPORARY,
    BackendError: EXIT_TEMPORARY,
    NoRoom: EXIT_REFUSED,
    TimeoutError: EXIT_TEMPORARY,  # raised also if a file stays locked
}
TEMPORARY_ERRNOS = {  # numbers of OSErrors that may pass
    *DISK_FULL,
    errno.EADDRINUSE,
    errno.EADDRNOTAVAIL,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    socket.EAI_AGAIN,
}


def exit_status(error: BaseException) -> int:
    """Return EXIT_TEMPORARY if the error or one of its causes may pass, so that a retry helps, else
    EXIT_REFUSED."""
    reason: BaseException | None = error
    while reason is not None:
        status = next((STATUSES[kind] for kind in type(reason).__mro__ if kind in STATUSES), None)
        has_errno = isinstance(reason, OSError) and reason.errno in TEMPORARY_ERRNOS
        if status == EXIT_TEMPORARY or has_errno:
            return EXIT_TEMPORARY
        reason = reason.__cause__
    return EXIT_REFUSED
