"""Options of the HTTP server, and its settings from them."""

import ipaddress
import os
from pathlib import Path
from typing import Any

import click

from jaxembed.cli.options import FiniteRange, tei_option, together
from jaxembed.config import EngineConfig, PoolLimits, ServerConfig
from jaxembed.errors import ConfigError
from jaxembed.memory import MIB


def _ip_address(text: str) -> str | None:
    """The text if it is an IP address, else None: containers set HOSTNAME to their own name."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


SERVER_OPTIONS = together(
    tei_option("--model-id", multiple=True, help="The same as MODEL; repeat for several."),
    tei_option(
        "--served-model-name",
        multiple=True,
        metavar="NAME[=MODEL]",
        help="Name in requests and answers, in place of MODEL; repeat for aliases. Of several "
        "models, say which.",
    ),
    click.option(
        "--host",
        "--hostname",
        "host",
        default=lambda: _ip_address(os.environ.get("HOSTNAME", "")) or "127.0.0.1",
        show_default="127.0.0.1",
        help="Address to listen on.  [env var: HOSTNAME, if an IP address]",
    ),
    click.option(
        "-p",
        "--port",
        envvar="PORT",
        show_envvar=True,
        type=click.IntRange(0, 65535),
        default=8080,
        show_default=True,
        help="0 is any free port.",
    ),
    tei_option("--api-key", multiple=True, help="Key that clients must send; repeat for several."),
    click.option(
        "--api-key-file",
        envvar="API_KEY_FILE",
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="TOML file of digests of keys, with the models, routes and quota of each; read again "
        "when it changes and at SIGHUP.",
    ),
    click.option(
        "--audit-log",
        envvar="AUDIT_LOG",
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="Append a line of JSON about each request to this file, never its texts; - is "
        "standard output. Opened again at SIGHUP.",
    ),
    tei_option(
        "--cors-allow-origin",
        multiple=True,
        help="Repeat for several. Default: any (*) where requests need a key, else none.",
    ),
    tei_option(
        "--max-concurrent-requests",
        type=click.IntRange(1),
        default=EngineConfig.max_concurrent_requests,
        show_default=True,
        help="Inputs admitted and not yet answered.",
    ),
    click.option(
        "--max-queue-bytes",
        type=click.IntRange(MIB),
        default=EngineConfig.max_queue_bytes,
        show_default=True,
        help="Memory that requests hold until they are answered.",
    ),
    click.option(
        "--max-queue-tokens", type=click.IntRange(1), help="Tokens admitted and not yet answered."
    ),
    click.option(
        "--cache-bytes",
        type=click.IntRange(0),
        default=EngineConfig.cache_bytes,
        show_default=True,
        help="Memory in which each model keeps the answers to interactive requests; 0: none.",
    ),
    tei_option(
        "--max-client-batch-size",
        type=click.IntRange(0),
        default=ServerConfig.max_client_batch_size,
        show_default=True,
        help="Inputs in one request; 0 is unlimited.",
    ),
    tei_option(
        "--payload-limit",
        type=click.IntRange(1),
        default=32 * MIB,
        show_default=True,
        help="Bytes in one request.",
    ),
    click.option(
        "--accept-bare-token-ids",
        is_flag=True,
        help="Run token ids on /v1/embeddings that lack the tokenizer's special tokens.",
    ),
    click.option(
        "--drain-timeout",
        type=FiniteRange(0),
        default=ServerConfig.drain_timeout_s,
        show_default=True,
        help="Seconds to finish admitted requests after SIGTERM.",
    ),
    tei_option(
        "--prometheus-port",
        type=click.IntRange(0, 65535),
        help="Serve /metrics on a second port too.",
    ),
    click.option(
        "--allow-media-urls",
        "media_hosts",
        metavar="HOST",
        multiple=True,
        envvar="ALLOW_MEDIA_URLS",
        show_envvar=True,
        help="Fetch images at URLs of this host; repeatable. `*.example.org` means all hosts under "
        "it, `host:8443` a port. Default: no URL is fetched.",
    ),
    click.option(
        "--allow-media-network",
        "media_networks",
        metavar="CIDR",
        multiple=True,
        envvar="ALLOW_MEDIA_NETWORK",
        show_envvar=True,
        help="Let the hosts of --allow-media-urls have addresses in this private network, such as "
        "10.1.0.0/16; repeatable. Default: public addresses alone.",
    ),
    click.option(
        "--playground/--no-playground",
        default=None,
        help="Whether to serve a page at /playground to try the models. Default: if --host is this "
        "machine's own address.",
    ),
    tei_option("--json-output", is_flag=True, help="Log lines as JSON."),
    tei_option(
        "--otlp-endpoint",
        metavar="URL",
        help="Send traces to this OpenTelemetry receiver; needs the extra otel.",
    ),
    click.option(
        "--otlp-service-name",
        envvar=["OTLP_SERVICE_NAME", "OTEL_SERVICE_NAME"],
        show_envvar=True,
        default="jaxembed",
        show_default=True,
        help="The name of this server in traces.",
    ),
    # flags of TEI that have no effect here: there is no backend process, and log lines have no
    # spans
    tei_option("--uds-path", hidden=True),
    tei_option("--disable-spans", is_flag=True, hidden=True),
)


REPOSITORY_OPTIONS = together(
    click.option(
        "--model-repository",
        type=click.Path(path_type=Path),
        help="Each model in this directory may be loaded by the name of its folder.",
    ),
    click.option(
        "--loadable",
        multiple=True,
        metavar="[NAME=]MODEL",
        help="This directory, hub id or URL in an object store may be loaded when a request asks "
        "for it, by NAME if there is one. Repeatable.",
    ),
    click.option(
        "--model-memory",
        type=click.IntRange(MIB),
        help="Bytes that models may take, of a device or on a CPU of the host. Default: nine "
        "tenths of what there is.",
    ),
    click.option(
        "--model-keep-alive",
        type=FiniteRange(0),
        help="Seconds after which an unused model leaves memory. Default: when room is needed.",
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
        help="Key for /v2/repository, which loads models and moves aliases.",
    ),
    click.option(
        "--admin-port",
        type=click.IntRange(0, 65535),
        help="Serve /v2/repository on this port of 127.0.0.1.",
    ),
)


def server_config(flags: dict[str, Any]) -> ServerConfig:
    """The server's settings, from the flags of `serve`."""
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
        media_networks=_media_networks(flags),
        playground=flags["playground"],
        admin_key=flags["admin_key"],
        admin_port=flags["admin_port"],
        notify_socket=os.environ.get("NOTIFY_SOCKET"),
        watchdog_s=watchdog_s(),
    )


def _media_networks(flags: dict[str, Any]) -> tuple[Any, ...]:
    """The networks of --allow-media-network. Raises ConfigError for what is no such network, and
    for a network without a host to fetch from."""
    from jaxembed.images.media_urls import FLAG, NETWORK_FLAG, parse_media_network

    networks = tuple(map(parse_media_network, flags["media_networks"]))
    if networks and not flags["media_hosts"]:
        raise ConfigError(
            f"{NETWORK_FLAG} {networks[0]} changes nothing without {FLAG}, which names the hosts "
            "whose URLs are fetched; add it, or leave the network out"
        )
    return networks


def watchdog_s() -> float | None:
    """The seconds of WATCHDOG_USEC, None if it is unset or meant for another process."""
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
