"""Options that several commands share, and the functions that make options."""

import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import click

from jaxembed.adapter_folders import adapter_folders
from jaxembed.config import EngineConfig
from jaxembed.errors import CheckpointError
from jaxembed.spec import DType, PoolingChoice

# TEI's names of poolings, which --pooling takes.
POOLING_CHOICES: dict[str, PoolingChoice] = {
    "cls": "cls",
    "mean": "mean",
    "last-token": "lasttoken",
    "splade": "splade",
}


class FiniteRange(click.FloatRange):
    """The type of finite numbers within bounds. Click's range would let nan pass."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def tei_option(flag: str, **attributes: Any) -> Callable:
    """An option that can also be set by TEI's environment variable, its name in capitals."""
    name = flag.removeprefix("--").split("/")[0]
    return click.option(flag, envvar=name.upper().replace("-", "_"), show_envvar=True, **attributes)


def together(*options: Callable) -> Callable:
    """One decorator that adds all of the options, in this order."""
    return lambda command: reduce(lambda wrapped, option: option(wrapped), options[::-1], command)


def named_folders(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> dict[str, Path]:
    """The folders of NAME=DIR, by name. Raises BadParameter for other forms, and names twice."""
    folders: dict[str, str] = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not equals or name in folders:
            raise click.BadParameter(f"{one!r}: wanted NAME=DIR, each with a NAME of its own")
        folders[name] = folder
    try:
        return adapter_folders(folders)
    except CheckpointError as error:
        raise click.BadParameter(str(error)) from error


MODEL_FLAG = click.option(
    "--model", "-m", help="A directory or a hub id. Default: all-MiniLM-L6-v2."
)
TEXT_COLUMN_FLAG = click.option(
    "--text-column", default="text", show_default=True, help="Has the texts; not of .txt files."
)
OUTPUT_FLAG = click.option("--output", "-o", required=True, help="A folder, or one file.")
RAW_SCORES_FLAG = click.option(
    "--raw-scores",
    is_flag=True,
    help="The logits of a reranker or classifier instead of scores from 0 to 1.",
)
JOB_OPTIONS = together(
    click.option("--id-column", help="Keep this column, first; rows without a value are bad."),
    click.option("--keep", multiple=True, help="Keep this column of the input. Repeatable."),
    click.option(
        "--part-rows",
        type=click.IntRange(1),
        default=65_536,
        show_default=True,
        help="Rows of the input in each part of a folder.",
    ),
    click.option(
        "--on-error",
        type=click.Choice(["fail", "skip"]),
        default="fail",
        show_default=True,
        help="What to do with a row that is bad: stop, or leave it out and name it in a report.",
    ),
    click.option("--reuse", help="The folder of an earlier run, whose equal rows are taken."),
)

SPLADE_FLAG = tei_option(
    "--pooling",
    type=click.Choice(["splade"]),
    help="Make a sparse encoder of a masked language model that has no modules.json.",
)

MODEL_OPTIONS = together(
    tei_option("--revision", help="Branch, tag or commit of a hub model."),
    click.option("--offline", is_flag=True, help="Use only what is downloaded or copied already."),
    tei_option("--hf-token", help="Token for the hub."),
    tei_option("--dense-path", help="Use this Dense module instead of the one in modules.json."),
    click.option(
        "--adapter",
        multiple=True,
        metavar="NAME=DIR",
        callback=named_folders,
        help="A low-rank adapter as PEFT saves it, which requests ask for by NAME. Repeatable.",
    ),
    click.option(
        "--cache-dir",
        envvar="JAXEMBED_CACHE",
        show_envvar=True,
        type=click.Path(path_type=Path),
        default=lambda: Path.home() / ".cache" / "jaxembed",
        show_default="~/.cache/jaxembed",
        help="Converted models and compiled programs. Refused where others can write.",
    ),
    tei_option(
        "--huggingface-hub-cache",
        type=click.Path(path_type=Path),
        help="Where hub downloads are kept.",
    ),
)

ENGINE_OPTIONS = together(
    tei_option(
        "--pooling",
        type=click.Choice(list(POOLING_CHOICES)),
        help="Pool this way instead of as the checkpoint says; splade: weigh terms by the head of "
        "a masked language model.",
    ),
    tei_option(
        "--dtype",
        type=click.Choice(get_args(DType)),
        help="Default: bfloat16 where the device multiplies it natively, else float32.",
    ),
    click.option("--devices", type=click.IntRange(1), help="Use this many. Default: all."),
    click.option(
        "--parallel",
        type=click.Choice(["replicas", "sharded"]),
        default="replicas",
        show_default=True,
        help="One replica a device, or every batch over all devices.",
    ),
    click.option(
        "--warmup",
        type=click.Choice(["minimal", "full"]),
        help="Buckets compiled before ready. Default: full on a GPU, else minimal.",
    ),
    click.option(
        "--kernels",
        default=EngineConfig.kernels,
        show_default=True,
        help="The fastest that are right; xla; native (CPU); flash or triton (GPU); splash (TPU).",
    ),
    tei_option("--max-batch-tokens", type=click.IntRange(1), help="Of a batch, padding counted."),
    tei_option("--max-batch-requests", type=click.IntRange(1), help="Sequences in a batch."),
    click.option(
        "--buckets",
        type=click.Path(path_type=Path),
        help="JSON file with the grid of shapes; `jaxembed tune` writes one.",
    ),
    click.option(
        "--max-input-length",
        envvar="MAX_INPUT_LENGTH",
        show_envvar=True,
        type=click.IntRange(1),
        help="Tokens of an input. Default: what the model says.",
    ),
    click.option(
        "--device-memory-fraction",
        type=FiniteRange(0, 1, min_open=True),
        help="Share of a GPU's memory to take; taken as needed, not at once.",
    ),
    click.option("--null-model", is_flag=True, hidden=True, help="Constants: measures the host."),
)

TEXT_OPTIONS = together(
    tei_option(
        "--auto-truncate",
        type=bool,
        is_flag=False,
        flag_value=True,
        default=True,
        show_default=True,
        help="Cut inputs over the limit unless the request says otherwise.",
    ),
    tei_option("--default-prompt", help="Text put before every input."),
    tei_option("--default-prompt-name", help="The same, by its name in the model's prompts."),
    tei_option(
        "--tokenization-workers",
        type=click.IntRange(1),
        help="Tokenizer threads. Default: cores less one, at least 4.",
    ),
)
