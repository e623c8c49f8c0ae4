"""What all commands share: log lines, and help pages with options in sections, an example, and
summaries in whole sentences."""

from collections.abc import Callable
from typing import Any

import click

from jaxembed.cli.logs import configure_logging

OWN = "Options"  # title of the options that belong to one command alone
UNCUT = 10_000  # characters, more than any summary has


def section(title: str, *options: Callable) -> Callable:
    """Return a decorator that adds the options to a command, in this order, below a title in
    `--help`."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            option(function)
            function.__click_params__[-1].section = title
        return function

    return add


class Command(click.Command):
    """A command that writes log lines, and whose help has an example and its options by section."""

    def __init__(self, *arguments: Any, example: str, **attributes: Any):
        super().__init__(*arguments, **attributes)
        self.example = example

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; its log lines go to standard error, as JSON if it has such a flag."""
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
        """Write the first sentence of the help of each command, however long it is."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(UNCUT)) for name, one in self.commands.items()]
            )
