"""The command line: a module for each command. Only this package reads environment variables."""

import logging
import os
import sys
import threading
from typing import NoReturn

import click

from jaxembed import __version__
from jaxembed.cli.cache import cache_command
from jaxembed.cli.calibrate import calibrate_command
from jaxembed.cli.convert import convert_command
from jaxembed.cli.doctor import doctor_command
from jaxembed.cli.embed import embed_command
from jaxembed.cli.info import info_command
from jaxembed.cli.key import key_command
from jaxembed.cli.models import models_command
from jaxembed.cli.options import Group, exit_status
from jaxembed.cli.score import classify_command, rerank_command, token_classify_command
from jaxembed.cli.serve import serve_command
from jaxembed.cli.tune import tune_command
from jaxembed.cli.verify import verify_command
from jaxembed.errors import JaxembedError
from jaxembed.platform.signals import end_at_signals

# Commands import JAX, the engine and the server inside their functions, so that --help is quick.

# How the names of threads that call XLA begin.
XLA_THREAD_PREFIXES = ("compile-", "worker-", "time-buckets", "timing-")


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "-V", "--version", prog_name="jaxembed")
def cli() -> None:
    """Embed, rerank and classify texts and images on CPU, GPU and TPU.

    `jaxembed COMMAND --help` explains a command.
    """


for _command in (
    serve_command,
    embed_command,
    rerank_command,
    classify_command,
    token_classify_command,
    info_command,
    models_command,
    convert_command,
    verify_command,
    calibrate_command,
    doctor_command,
    tune_command,
    key_command,
    cache_command,
):
    cli.add_command(_command)


def main() -> None:
    """Run the command line and end the process. For a JaxembedError, print one line and exit with
    the status that `exit_status` gives it. After a signal, the status is 128 plus the number of the
    signal."""
    end_at_signals()
    try:
        cli(standalone_mode=True)
    except SystemExit as done:
        _exit(done.code if isinstance(done.code, int) else 1)
    except JaxembedError as error:
        click.echo(f"jaxembed: {error}", err=True)
        _exit(exit_status(error))


def _exit(status: int) -> NoReturn:
    """End the process, without the interpreter's clean-up if a thread is still inside XLA.

    Such a thread compiles a program, or waits for a device that hangs. It cannot be stopped, and
    the clean-up would unwind its stack and so abort the process.
    """
    if any(thread.name.startswith(XLA_THREAD_PREFIXES) for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
