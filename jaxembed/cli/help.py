"""What all commands share: log lines, and help pages with options in sections, an example, and
summaries in whole sentences."""

import logging
import os
from collections.abc import Callable
from typing import Any

import click

from jaxembed.observability.tracing import current_trace

OWN = "Options"  # title of the options that belong to one command alone
UNCUT = 10_000  # characters, more than any summary has
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TRACED_LINE = LINE + " trace_id=%(trace_id)s"


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


def configure_logging(json_output: bool) -> None:
    """Log to standard error: jaxembed from LOG_LEVEL (by default INFO) up, its libraries from
    WARNING up."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    # Orbax logs many lines for each file, and tracebacks of errors that it also raises
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    level = os.environ.get("LOG_LEVEL", "info").upper()
    levels = logging.getLevelNamesMapping()
    for name in ("jaxembed", "converters"):
        logging.getLogger(name).setLevel(levels.get(level, logging.INFO))


class TextFormatter(logging.Formatter):
    """Formats each log line as text, with the id of the trace of the request that it is of."""

    def __init__(self) -> None:
        super().__init__(LINE)
        self._traced = logging.Formatter(TRACED_LINE)

    def format(self, record: logging.LogRecord) -> str:
        trace = current_trace()
        if trace is None:
            return super().format(record)
        record.trace_id = trace.trace_id
        return self._traced.format(record)


class JsonFormatter(logging.Formatter):
    """Formats each log line as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        import orjson

        line = {
            "timestamp": self.formatTime(record),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
        }
        if (trace := current_trace()) is not None:
            line["trace_id"] = trace.trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()
