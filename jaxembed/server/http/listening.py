"""Binds the sockets of a server, and starts Hypercorn on them."""

import asyncio
import gc
import logging
import socket
import sys
from typing import Any

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from jaxembed.errors import ConfigError
from jaxembed.server.http.connection import use_connections

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0  # longer than the 60 s of common load balancers, which should close first
CLOSE_S = 5.0  # for connections to close after the drain
BACKLOG = 2048
MAX_HEADER_BYTES = 64 * 1024


def listen(host: str, port: int, flag: str = "--port", *, shared: bool = False) -> socket.socket:
    """Return a socket that is bound to the address; port 0 means any free port.

    With `shared`, several sockets may be bound to the address, and share its connections. Clients
    cannot connect until a server listens on the socket. Raises ConfigError if the address
    cannot be bound; the message names `flag` if the port is the reason.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}; set --host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; set {flag} to a free port"
        ) from error
    return listener


def share(listener: socket.socket, count: int) -> list[socket.socket]:
    """Return `count` sockets bound to the address of `listener`, which is closed. The kernel
    distributes connections among those of them that listen. Raises ConfigError."""
    host, port = listener.getsockname()[:2]
    listener.close()
    return [listen(host, port, shared=True) for _ in range(count)]


def url(listener: socket.socket) -> str:
    """Return the URL of the address to which the socket is bound."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def collect_rarely() -> None:
    """Have the garbage collector look for cycles less often, because requests make few."""
    gc.set_threshold(10_000, 20, 50)


def start_server(
    app: Any, listener: socket.socket, closing: asyncio.Event, path: str = ""
) -> asyncio.Task:
    """Start a server for the ASGI app on a bound socket, and return its task. The task ends after
    `closing` is set. The log shows `path` after the URL."""
    use_connections()
    listener.listen(BACKLOG)
    logger.info("listening on %s%s", url(listener), path)
    log = logging.getLogger("hypercorn.error")
    log.setLevel(logging.WARNING)  # Hypercorn's INFO lines name file descriptors, not addresses
    settings = Config.from_mapping(
        bind=[f"fd://{listener.detach()}"],  # Hypercorn owns the descriptor from now on
        backlog=BACKLOG,
        keep_alive_timeout=KEEP_ALIVE_S,
        keep_alive_max_requests=sys.maxsize,
        graceful_timeout=CLOSE_S / 2,  # `serve` waits for requests before it ends this server
        max_app_queue_size=2,  # pieces of a body that wait for `Body`
        h11_max_incomplete_size=MAX_HEADER_BYTES,
        accesslog=None,
        errorlog=log,
    )
    return asyncio.create_task(
        hypercorn_serve(app, settings, shutdown_trigger=closing.wait, mode="asgi")
    )
