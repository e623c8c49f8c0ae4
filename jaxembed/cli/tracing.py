"""Where spans are sent to, from the flags and OpenTelemetry's environment variables."""

import os
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import click

from jaxembed.observability.tracing import Tracer
from jaxembed.platform.extras import require

SPANS_PATH = "/v1/traces"  # of a receiver that takes http/protobuf
PROTOCOLS = ("grpc", "http/protobuf")
SAMPLERS = ("always_on", "always_off", "traceidratio")
SAMPLER, SAMPLER_ARG = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"


def tracer_of(flags: dict[str, Any]) -> Tracer | None:
    """What sends the spans of `serve`; None without --otlp-endpoint.

    Raises UsageError for an endpoint that is no URL and for variables whose values have no meaning,
    and ConfigError if the extra is not installed.
    """
    endpoint = flags["otlp_endpoint"]
    if endpoint is None:
        return None
    protocol = _protocol()
    url = spans_url(endpoint, protocol)
    _check_sampler()
    require("otel", "--otlp-endpoint")
    from jaxembed.server.otlp import OtlpTracer

    return OtlpTracer(url, flags["otlp_service_name"], protocol)


def _protocol() -> Literal["grpc", "http/protobuf"]:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if given := os.environ.get(name):
            if given not in PROTOCOLS:
                raise click.UsageError(f"{name}={given}: wanted one of {', '.join(PROTOCOLS)}")
            return cast(Literal["grpc", "http/protobuf"], given)
    return "grpc"


def spans_url(endpoint: str, protocol: str) -> str:
    """The endpoint, over http/protobuf with the usual path if it has none. Raises UsageError if it
    is no URL."""
    if not _is_url(endpoint):
        raise click.UsageError(
            f"--otlp-endpoint {endpoint}: wanted a URL such as http://localhost:4317, with https "
            "for TLS"
        )
    if protocol == "grpc" or urlsplit(endpoint).path not in ("", "/"):
        return endpoint
    return endpoint.rstrip("/") + SPANS_PATH


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port
        return False


def _check_sampler() -> None:
    """Raise UsageError for what the library would replace by its default with a warning."""
    name, value = os.environ.get(SAMPLER), os.environ.get(SAMPLER_ARG, "")
    samplers = [prefix + one for prefix in ("", "parentbased_") for one in SAMPLERS]
    if name is not None and name.lower() not in samplers:
        raise click.UsageError(f"{SAMPLER}={name}: wanted one of {', '.join(samplers)}")
    if name is not None and name.lower().endswith("traceidratio"):
        try:
            is_share = value == "" or 0 <= float(value) <= 1
        except ValueError:
            is_share = False
        if not is_share:
            raise click.UsageError(f"{SAMPLER_ARG}={value}: wanted a share from 0 to 1")
