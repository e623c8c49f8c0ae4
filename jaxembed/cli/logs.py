"""Log lines on standard error, as text or as JSON."""

import logging
import os

from jaxembed.observability.tracing import current_trace

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TRACED_LINE = LINE + " trace_id=%(trace_id)s"


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
