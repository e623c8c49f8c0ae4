"""Defines which modules each optional extra of the package installs, and raises the error if one of
them is missing."""

from contextlib import suppress
from importlib.util import find_spec

from jaxembed.errors import ConfigError

MODULES = {
    "gs": ("gcsfs",),
    "images": ("PIL",),
    "otel": (
        "opentelemetry.sdk",
        "opentelemetry.exporter.otlp.proto.grpc",
        "opentelemetry.exporter.otlp.proto.http",
    ),
    "parquet": ("pyarrow",),
    "pdf": ("PIL", "pypdfium2"),
    "s3": ("s3fs",),
}


def require(extra: str, purpose: str) -> None:
    """Raise ConfigError if a module of an extra is not installed.

    `purpose` begins the message: it names what needs the extra, such as "Parquet files". Commands
    call this before they load a model.
    """
    for module in MODULES[extra]:
        spec = None
        with suppress(ModuleNotFoundError):  # the package of the module is missing
            spec = find_spec(module)
        if spec is None:
            raise ConfigError(
                f"{purpose}: the extra `{extra}` is needed, and {module} is not installed. Install "
                f"it: pip install 'jaxembed[{extra}]', or in a clone: make .venv/{extra}.stamp"
            )
