"""Defines the options of `jaxembed serve`, and makes the settings and the tracer of the server from
the values of the options."""

import ipaddress
import os
import sys
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import click

from jaxembed.cli.options import FiniteRange, section, tei_option
from jaxembed.config import EngineConfig, PoolLimits, ServerConfig
from jaxembed.errors import ConfigError
from jaxembed.memory import MIB
from jaxembed.observability.tracing import Tracer
from jaxembed.platform.extras import require

SPANS_PATH = "/v1/traces"  # the path at which receivers take spans by http/protobuf
PROTOCOLS = ("grpc", "http/protobuf")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_BARE_SAMPLERS = ("always_on", "always_off", "traceidratio")
SAMPLERS = (*_BARE_SAMPLERS, *(f"parentbased_{name}" for name in _BARE_SAMPLERS))
SAMPLER, SAMPLER_ARG = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"


def _ip_address(text: str) -> str | None:
    """Return the text if it is an IP address, else None. Containers set HOSTNAME to their name,
    which is not an address to listen on."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


SERVER_OPTIONS = section(
    "Server",
    tei_option(
        "--model-id",
        multiple=True,
        help="Model to serve, like MODEL. Repeat for several (default: all-MiniLM-L6-v2).",
    ),
    tei_option(
        "--served-model-name",
        multiple=True,
        metavar="NAME[=MODEL]",
        help="Name of the model in requests and responses (default: MODEL). Repeat for aliases. A "
        "server of several models needs NAME=MODEL.",
    ),
    click.option(
        "--host",
        "--hostname",
        "host",
        default=lambda: _ip_address(os.environ.get("HOSTNAME", "")) or "127.0.0.1",
        show_default="127.0.0.1",
        help="Address to listen on; 0.0.0.0 is every address of this machine.  [env var: HOSTNAME, "
        "if an IP address]",
    ),
    click.option(
        "-p",
        "--port",
        envvar="PORT",
        show_envvar=True,
        type=click.IntRange(0, 65535),
        default=8080,
        show_default=True,
        help="Port to listen on; 0 is any free port.",
    ),
    tei_option(
        "--api-key",
        multiple=True,
        help="Key that clients must send (default: none is required). Repeat for several.",
    ),
    click.option(
        "--api-key-file",
        envvar="API_KEY_FILE",
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="TOML file with the digest, the models, the routes and the quota of each API key. It "
        "is read again when it changes and on SIGHUP.",
    ),
    click.option(
        "--audit-log",
        envvar="AUDIT_LOG",
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="File to append one line of JSON per request to, without its texts; - is standard "
        "output. It is opened again on SIGHUP.",
    ),
    tei_option(
        "--cors-allow-origin",
        multiple=True,
        help="Origin of web pages that may use the server; * is any (default: any if requests "
        "need a key, else none). Repeat for several.",
    ),
    tei_option(
        "--max-concurrent-requests",
        type=click.IntRange(1),
        default=EngineConfig.max_concurrent_requests,
        show_default=True,
        help="Maximum inputs that are admitted and not yet answered; more are refused with 429.",
    ),
    click.option(
        "--max-queue-bytes",
        type=click.IntRange(MIB),
        default=EngineConfig.max_queue_bytes,
        show_default=True,
        help="Maximum memory, in bytes, that unanswered requests may hold.",
    ),
    click.option(
        "--max-queue-tokens",
        type=click.IntRange(1),
        help="Maximum tokens that are admitted and not yet answered (default: 64 full batches for "
        "each device and model).",
    ),
    click.option(
        "--cache-bytes",
        type=click.IntRange(0),
        default=EngineConfig.cache_bytes,
        show_default=True,
        help="Memory, in bytes, in which each model keeps its answers to interactive requests; 0 "
        "keeps none.",
    ),
    tei_option(
        "--max-client-batch-size",
        type=click.IntRange(0),
        default=ServerConfig.max_client_batch_size,
        show_default=True,
        help="Maximum inputs in one request; 0 is no limit.",
    ),
    tei_option(
        "--max-instruction-tokens",
        type=click.IntRange(1),
        default=512,
        show_default=True,
        help="Maximum tokens of the `instruction` or `prompt` of a request for embeddings.",
    ),
    tei_option(
        "--payload-limit",
        type=click.IntRange(1),
        default=32 * MIB,
        show_default=True,
        help="Maximum size of a request body, in bytes.",
    ),
    click.option(
        "--accept-bare-token-ids",
        is_flag=True,
        help="Accept token ids without the tokenizer's special tokens on /v1/embeddings.",
    ),
    click.option(
        "--drain-timeout",
        type=FiniteRange(0),
        default=ServerConfig.drain_timeout_s,
        show_default=True,
        help="Seconds that admitted requests have to finish after SIGTERM.",
    ),
    click.option(
        "--front-ends",
        type=click.IntRange(0, 64),
        default=ServerConfig.front_ends,
        show_default=True,
        help="Processes that read and answer HTTP for the engine's process, for accelerators that "
        "one process cannot feed; 0 reads HTTP in the engine's process. Linux only.",
    ),
    tei_option(
        "--prometheus-port",
        type=click.IntRange(0, 65535),
        help="Second port on which to serve /metrics (default: none).",
    ),
    click.option(
        "--allow-media-urls",
        "media_hosts",
        metavar="HOST",
        multiple=True,
        envvar="ALLOW_MEDIA_URLS",
        show_envvar=True,
        help="Host from which images are fetched when a request names their URLs; *.example.org "
        "is every host below it, host:8443 a port (default: no URL is fetched). Repeat for "
        "several.",
    ),
    click.option(
        "--allow-media-network",
        "media_networks",
        metavar="CIDR",
        multiple=True,
        envvar="ALLOW_MEDIA_NETWORK",
        show_envvar=True,
        help="Private network, such as 10.1.0.0/16, in which the hosts of --allow-media-urls may "
        "have their addresses (default: public addresses only). Repeat for several.",
    ),
    click.option(
        "--playground/--no-playground",
        default=None,
        help="Whether to serve a web page at /playground that tries the models (default: only if "
        "--host is this machine's own address).",
    ),
    tei_option("--json-output", is_flag=True, help="Write each log line as a JSON object."),
    tei_option(
        "--otlp-endpoint",
        metavar="URL",
        help="OpenTelemetry receiver to send traces to (default: none). It needs the extra otel.",
    ),
    click.option(
        "--otlp-service-name",
        envvar=["OTLP_SERVICE_NAME", "OTEL_SERVICE_NAME"],
        show_envvar=True,
        default="jaxembed",
        show_default=True,
        help="Name of this server in traces.",
    ),
    # flags of TEI that have no effect here: there is no backend process, and log lines have no
    # spans
    tei_option("--uds-path", hidden=True),
    tei_option("--disable-spans", is_flag=True, hidden=True),
)


REPOSITORY_OPTIONS = section(
    "Models that come and go",
    click.option(
        "--model-repository",
        type=click.Path(path_type=Path),
        help="Directory of models that may be loaded while the server runs, each by the name of "
        "its folder.",
    ),
    click.option(
        "--loadable",
        multiple=True,
        metavar="[NAME=]MODEL",
        help="Directory, hub id or object store URL of a model that is loaded when a request asks "
        "for it by this value, or by NAME if one is given. Repeat for several.",
    ),
    click.option(
        "--model-memory",
        type=click.IntRange(MIB),
        help="Maximum memory for models, in bytes: memory of each device, or of the host if the "
        "models run on a CPU (default: nine tenths of the memory).",
    ),
    click.option(
        "--model-keep-alive",
        type=FiniteRange(0),
        help="Seconds after which an unused model is evicted (default: only when its memory is "
        "needed).",
    ),
    click.option(
        "--load-timeout",
        type=FiniteRange(0, min_open=True),
        default=PoolLimits.load_timeout_s,
        show_default=True,
        help="Seconds that a request waits for its model to be loaded.",
    ),
    click.option(
        "--admin-key",
        envvar="ADMIN_KEY",
        show_envvar=True,
        help="Key for the routes at /v2/repository, which load models and move aliases (default: "
        "these routes are closed).",
    ),
    click.option(
        "--admin-port",
        type=click.IntRange(0, 65535),
        help="Port of 127.0.0.1 on which to serve /v2/repository without a key (default: none).",
    ),
)


def server_config(flags: dict[str, Any]) -> ServerConfig:
    """Return the settings of the server. Raises ConfigError if --allow-media-network is invalid or
    is given without --allow-media-urls, and if WATCHDOG_USEC is not an integer."""
    from jaxembed.preprocessing.images.media_urls import (
        NETWORK_FLAG,
        URLS_FLAG,
        parse_media_network,
    )

    if flags["front_ends"] and sys.platform != "linux":
        raise ConfigError(
            "--front-ends needs Linux, which distributes connections among processes; leave it out"
        )
    networks = tuple(map(parse_media_network, flags["media_networks"]))
    if networks and not flags["media_hosts"]:
        raise ConfigError(
            f"{NETWORK_FLAG} {networks[0]} has no effect without {URLS_FLAG}, which names the "
            "hosts whose URLs are fetched; add it, or leave the network out"
        )
    return ServerConfig(
        host=flags["host"],
        port=flags["port"],
        api_keys=flags["api_key"],
        cors_allow_origins=flags["cors_allow_origin"],
        max_client_batch_size=flags["max_client_batch_size"],
        payload_limit=flags["payload_limit"],
        accept_bare_token_ids=flags["accept_bare_token_ids"],
        drain_timeout_s=flags["drain_timeout"],
        prometheus_port=flags["prometheus_port"],
        media_hosts=tuple(flags["media_hosts"]),
        media_networks=networks,
        playground=flags["playground"],
        admin_key=flags["admin_key"],
        admin_port=flags["admin_port"],
        front_ends=flags["front_ends"],
        notify_socket=os.environ.get("NOTIFY_SOCKET"),
        watchdog_s=watchdog_s(),
    )


def watchdog_s() -> float | None:
    """Return systemd's watchdog interval in seconds; None if the variable WATCHDOG_USEC is unset,
    or WATCHDOG_PID names another process. Raises ConfigError if WATCHDOG_USEC is not an integer."""
    microseconds, process = os.environ.get("WATCHDOG_USEC"), os.environ.get("WATCHDOG_PID")
    if not microseconds or (process and process != str(os.getpid())):
        return None
    try:
        return int(microseconds) / 1e6
    except ValueError as error:
        raise ConfigError(
            f"WATCHDOG_USEC is {microseconds!r}; expected a whole number of microseconds, as "
            "systemd sets it"
        ) from error


def tracer_of(flags: dict[str, Any]) -> Tracer | None:
    """Return the tracer that sends spans to --otlp-endpoint; None without this flag.

    Raises UsageError if the endpoint is not a URL or an environment variable of OpenTelemetry has
    an unknown value, and ConfigError if the extra `otel` is not installed.
    """
    endpoint = flags["otlp_endpoint"]
    if endpoint is None:
        return None
    variable = next((name for name in PROTOCOL_VARIABLES if os.environ.get(name)), None)
    protocol = os.environ[variable] if variable else "grpc"
    if protocol not in PROTOCOLS:
        raise click.UsageError(
            f"{variable} is {protocol!r}; expected one of {', '.join(PROTOCOLS)}"
        )
    url = spans_url(endpoint, protocol)
    # for an unknown value, OpenTelemetry would only warn and take the default
    sampler = os.environ.get(SAMPLER, "parentbased_always_on")
    if sampler.lower() not in SAMPLERS:
        raise click.UsageError(f"{SAMPLER} is {sampler!r}; expected one of {', '.join(SAMPLERS)}")
    share = os.environ.get(SAMPLER_ARG) or "1"
    if sampler.lower().endswith("traceidratio") and not _is_share(share):
        raise click.UsageError(f"{SAMPLER_ARG} is {share!r}; expected a number from 0 to 1")
    require("otel", "--otlp-endpoint")
    from jaxembed.server.otlp import OtlpTracer

    checked = cast(Literal["grpc", "http/protobuf"], protocol)
    return OtlpTracer(url, flags["otlp_service_name"], checked)


def _is_share(text: str) -> bool:
    """Return whether a text is a number from 0 to 1."""
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def spans_url(endpoint: str, protocol: str) -> str:
    """Return the URL to which to send spans. It is `endpoint`, or with http/protobuf and an
    endpoint without a path, the endpoint followed by SPANS_PATH. Raises UsageError if the endpoint
    is not a URL."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        is_url = False
    if not is_url:
        raise click.UsageError(
            f"--otlp-endpoint {endpoint}: wanted a URL such as http://localhost:4317, with https "
            "for TLS"
        )
    if protocol == "grpc" or urlsplit(endpoint).path not in ("", "/"):
        return endpoint
    return endpoint.rstrip("/") + SPANS_PATH
