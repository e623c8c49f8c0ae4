"""Runs `jaxembed` commands in processes that are forked from one in which all is imported."""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax

from jaxembed.cli import main

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "commands",
        "converters",
        "jaxembed.tools.doctor",
        "jaxembed.engine.build",
        "jaxembed.server.app",
    ]
)


class Done(NamedTuple):
    """How a command ended, and what it wrote."""

    returncode: int | None
    stdout: str
    stderr: str


def run(*arguments: str, **environment: str) -> Done:
    """Run `jaxembed` with these arguments and with no other variables of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = FORKS.Process(target=_run, args=(arguments, environment, out, err))
        process.start()
        process.join(120)
        if process.exitcode is None:
            process.kill()
            process.join()
        return Done(process.exitcode, out.read_text(), err.read_text())


def _run(arguments: tuple[str, ...], environment: dict[str, str], out: Path, err: Path) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.clear()
    os.environ.update({"PATH": "", "JAX_PLATFORMS": "cpu", **environment})
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    sys.argv = ["jaxembed", *arguments]
    main()
