"""Where spans are sent to, from the flags and OpenTelemetry's environment variables."""

import os
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import click

from jaxembed.observability.tracing import Tracer
from jaxembed.platform.extras import require

SPANS_PATH = "/v1/traces"  # of a receiver that takes http/protobuf
PROTOCOLS = ("grpc", "http/protobuf")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_BARE_SAMPLERS = ("always_on", "always_off", "traceidratio")
SAMPLERS = (*_BARE_SAMPLERS, *(f"parentbased_{name}" for name in _BARE_SAMPLERS))
SAMPLER, SAMPLER_ARG = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"


def tracer_of(flags: dict[str, Any]) -> Tracer | None:
    """What sends the spans of `serve`; None without --otlp-endpoint.

    Raises UsageError for an endpoint that is no URL and for variables whose values have no meaning,
    and ConfigError if the extra is not installed.
    """
    endpoint = flags["otlp_endpoint"]
    if endpoint is None:
        return None
    protocol = "grpc"
    for name in PROTOCOL_VARIABLES:
        if given := os.environ.get(name):
            if given not in PROTOCOLS:
                raise click.UsageError(f"{name}={given}: wanted one of {', '.join(PROTOCOLS)}")
            protocol = cast(Literal["grpc", "http/protobuf"], given)
            break
    url = spans_url(endpoint, protocol)
    # the library would replace these by their defaults with a warning
    sampler, share = os.environ.get(SAMPLER), os.environ.get(SAMPLER_ARG, "")
    if sampler is not None and sampler.lower() not in SAMPLERS:
        raise click.UsageError(f"{SAMPLER}={sampler}: wanted one of {', '.join(SAMPLERS)}")
    if sampler is not None and sampler.lower().endswith("traceidratio"):
        try:
            is_share = share == "" or 0 <= float(share) <= 1
        except ValueError:
            is_share = False
        if not is_share:
            raise click.UsageError(f"{SAMPLER_ARG}={share}: wanted a share from 0 to 1")
    require("otel", "--otlp-endpoint")
    from jaxembed.server.otlp import OtlpTracer

    return OtlpTracer(url, flags["otlp_service_name"], protocol)


def spans_url(endpoint: str, protocol: str) -> str:
    """The endpoint, over http/protobuf with the usual path if it has none. Raises UsageError if it
    is no URL."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port
        is_url = False
    if not is_url:
        raise click.UsageError(
            f"--otlp-endpoint {endpoint}: wanted a URL such as http://localhost:4317, with https "
            "for TLS"
        )
    if protocol == "grpc" or urlsplit(endpoint).path not in ("", "/"):
        return endpoint
    return endpoint.rstrip("/") + SPANS_PATH
