"""Progress of long steps on standard error."""

import logging
import sys
from collections.abc import Callable

import click

logger = logging.getLogger("jaxembed")


def compile_bar() -> Callable[[int, int], None] | None:
    """What shows a progress bar over the buckets, on a terminal; None elsewhere, where log lines
    report progress."""
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
    """What shows the current step: in one line that changes on a terminal, elsewhere in a log line
    at the start of each step."""
    terminal = sys.stderr.isatty()

    def show(what: str, done: int, total: int) -> None:
        count = f", {done} of {total}" if total > 1 else ""
        if terminal:
            click.echo(f"\r\033[K{what}{count}", nl=False, err=True)
        elif done == 1:
            logger.info("%s%s", what, f", {total} in all" if total > 1 else "")

    return show
