"""Formats the lines of the log."""

import logging
import os

import orjson

from jaxembed.observability.tracing import current_trace

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(json_output: bool) -> None:
    """Log to standard error: jaxembed at the level LOG_LEVEL (default: INFO) and above, other
    libraries at WARNING and above. With `json_output` each line is a JSON object."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter(LINE))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    # Orbax logs many lines for each file through absl, and tracebacks of errors that it also raises
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    level = os.environ.get("LOG_LEVEL", "info").upper()
    levels = logging.getLevelNamesMapping()
    for name in ("jaxembed", "converters"):
        logging.getLogger(name).setLevel(levels.get(level, logging.INFO))


def is_json() -> bool:
    """Return whether log lines are JSON objects."""
    return any(isinstance(one.formatter, JsonFormatter) for one in logging.getLogger().handlers)


class TextFormatter(logging.Formatter):
    """Formats each log line as text, with the trace id of its request, if any."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback; `format` appends the traceback, if any."""
        line, trace = super().formatMessage(record), current_trace()
        return line if trace is None else f"{line} trace_id={trace.trace_id}"


class JsonFormatter(logging.Formatter):
    """Formats each log line as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
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
