"""Runs the server on Hypercorn until a signal, then drains.

The server reports its state to a supervisor such as systemd with the sd_notify protocol.

While the server drains, it refuses new requests and answers those already admitted. Then it closes
its connections. If draining and closing take too long, a timer in the server ends the process.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from jaxembed import memory
from jaxembed.config import PoolLimits, ServerConfig
from jaxembed.errors import BackendError
from jaxembed.observability.tracing import Tracer
from jaxembed.platform.signals import STOP_SIGNALS, leave
from jaxembed.runtime.diagnostics.examine import SAMPLE_S
from jaxembed.runtime.model import LoadedModel
from jaxembed.server.app import create_admin_app, create_app, create_metrics_app
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.auth.keyring import Keyring
from jaxembed.server.front.supervisor import FrontEnds
from jaxembed.server.http.listening import CLOSE_S, collect_rarely, listen, share, start_server, url
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import Describe, Load, ModelPool
from jaxembed.server.routes import playground
from jaxembed.server.server import Server
from jaxembed.server.service import Service

logger = logging.getLogger(__name__)

FLUSH_S = 3.0  # for sending the last spans
WATCHDOG_S = 4 * CLOSE_S  # from the timeout of the drain until the timer ends the process
LOOPBACK = "127.0.0.1"
READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"  # states of sd_notify


def run(
    models: Models,
    config: ServerConfig,
    listener: socket.socket | None = None,
    load: Load | None = None,
    limits: PoolLimits | None = None,
    *,
    describe: Describe | None = None,
    keyring: Keyring | None = None,
    audit: AuditLog | None = None,
    tracer: Tracer | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain, close the models and return.

    `listener` is a bound socket, which reserves the port while the models load; None means that the
    address in `config` is bound now. `load`, `limits` and `describe` are arguments of ModelPool. On
    SIGHUP the `keyring` reads its file again and `audit` opens its log again. `tracer` traces the
    requests, and is closed at the end. Raises BackendError if a model cannot be compiled,
    ConfigError if a port cannot be bound, and the error of a server that fails.
    """
    pool = ModelPool(models, load, limits, describe)
    listeners = [listener or listen(config.host, config.port)]
    if config.front_ends:
        listeners = share(listeners[0], config.front_ends)
    app = create_app(models, config, pool, keyring=keyring, audit=audit, tracer=tracer)
    loop_factory = None  # asyncio's own
    if sys.platform != "win32":
        import uvloop  # not installable on Windows

        loop_factory = uvloop.new_event_loop
    collect_rarely()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        failures = runner.run(_serve_until_stopped(app, listeners))
    if keyring is not None or audit is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the event loop that handled it has ended
    models.close(timeout_s=CLOSE_S)
    if keyring is not None:
        keyring.close()
    if audit is not None:
        audit.close()
    if tracer is not None:
        tracer.close(FLUSH_S)
    if failures:
        raise failures[0]
    logger.info("stopped")


async def serve(
    app: Server, shutdown: asyncio.Event, listeners: Sequence[socket.socket] = ()
) -> None:
    """Serve the app until `shutdown` is set, then drain and close. If the config has ports for
    metrics and for the admin routes, these are served on their ports meanwhile.

    Draining ends when all admitted requests are answered, or after the drain timeout. `listeners`
    are bound sockets, one for each front end; none means that the address in the app's config is
    bound now. Raises ConfigError if a port cannot be bound, and the error of a server that fails.
    """
    models, config = app.service.models, app.service.config
    closing, fronts = asyncio.Event(), app.service.fronts
    if fronts is not None:
        servers = [asyncio.create_task(fronts.run())]
    else:
        listeners = listeners or [listen(config.host, config.port)]
        servers = [start_server(app, listeners[0], closing)]
    sampling = asyncio.create_task(_sample(app.service))
    feeding = asyncio.create_task(
        feed_watchdog(config.notify_socket, config.watchdog_s, lambda: not models.stuck)
    )
    try:
        if config.prometheus_port is not None:
            bound = listen(config.host, config.prometheus_port, flag="--prometheus-port")
            servers.append(
                start_server(create_metrics_app(app.service), bound, closing, "/metrics")
            )
        if config.admin_port is not None:
            bound = listen(LOOPBACK, config.admin_port, flag="--admin-port")
            admin = create_admin_app(app.service)
            servers.append(start_server(admin, bound, closing, "/v2/repository/index"))
        stopping = asyncio.create_task(shutdown.wait())
        ended, _ = await asyncio.wait({stopping, *servers}, return_when=asyncio.FIRST_COMPLETED)
        if stopping not in ended:
            stopping.cancel()
            for server in ended:
                server.result()  # raises the error of a server that failed
        models.drain()
        left = len(app.unanswered) + (0 if fronts is None else fronts.open_requests)
        logger.info("draining (requests left: %d)", left)
        if fronts is not None:
            await fronts.drain(config.drain_timeout_s)
        if unanswered := await app.answered(config.drain_timeout_s):
            logger.warning(
                "requests that were not answered within %g s: %d; raise --drain-timeout",
                config.drain_timeout_s,
                unanswered,
            )
            await app.expire(CLOSE_S)
    finally:
        sampling.cancel()
        closing.set()
        if fronts is not None:
            await fronts.close()
            servers[0].cancel()
        # From Python 3.12 on, Hypercorn 0.18 waits forever for a connection that stays busy.
        await asyncio.wait(servers, timeout=CLOSE_S)
        for server in servers:
            server.cancel()
        for result in await asyncio.gather(*servers, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("a server did not close cleanly", exc_info=result)
        feeding.cancel()


async def _sample(service: Service) -> None:
    """Every SAMPLE_S seconds, record the counters of the models and the delay of the event loop,
    evict models that are due, and return freed memory to the system if there are no requests.

    Runs until it is cancelled. Errors are logged.
    """
    delay_s = 0.0
    trimmer = memory.Trimmer()
    while True:
        try:
            assert service.history is not None
            service.history.note(service.models.by_name(), delay_s)
            service.pool.sweep()
            if not service.models.capacity.bytes:
                await asyncio.to_thread(trimmer.run)
        except Exception:
            logger.exception(
                "statistics, eviction or the freeing of memory failed. This is a bug in jaxembed"
            )
        due_at = time.monotonic() + SAMPLE_S
        await asyncio.sleep(SAMPLE_S)
        delay_s = max(time.monotonic() - due_at, 0.0)


async def _serve_until_stopped(
    app: Server, listeners: Sequence[socket.socket]
) -> list[BackendError]:
    """Serve until SIGTERM or SIGINT, or until a model fails to compile. Returns an error for each
    model that failed to compile; the list is empty after a signal."""
    models, config = app.service.models, app.service.config
    keyring, audit = app.service.keyring, app.service.audit
    shutdown = asyncio.Event()
    loop = asyncio.get_running_loop()
    old_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    lines = _ready_lines(models, config, url(listeners[0]))

    fronts = None

    def tell_if_ready() -> None:
        is_serving = fronts is None or fronts.serving == len(listeners)
        if models.ready and is_serving and not shutdown.is_set():
            tell(config.notify_socket, READY)
            for line in lines:  # once, even if two models became ready at the same time
                logger.info("%s", line)

    def stop() -> None:
        shutdown.set()
        tell(config.notify_socket, STOPPING)
        # a thread in native code cannot be stopped or joined, so a timer ends the process
        seconds = config.drain_timeout_s + WATCHDOG_S
        reason = f"the server is still running {seconds:g} s after the signal; exiting"
        watchdog = threading.Timer(seconds, leave, (0, logging.ERROR, reason))  # exit status 0
        watchdog.daemon = True
        watchdog.start()
        for number, handler in old_handlers.items():  # a second signal ends the process at once
            loop.remove_signal_handler(number)
            signal.signal(number, handler or signal.SIG_DFL)

    def read_again() -> None:
        if keyring is not None:
            keyring.wake()
        if audit is not None:
            audit.reopen()
        if fronts is not None:
            fronts.reopen()

    if config.front_ends:
        fronts = app.service.fronts = FrontEnds(app, listeners, tell_if_ready)
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    if keyring is not None:
        keyring.watch()  # it also notices changes made before SIGHUP was handled
    if audit is not None:
        audit.reopen()  # the log may have been moved before SIGHUP was handled
    if keyring is not None or audit is not None:
        loop.add_signal_handler(signal.SIGHUP, read_again)
    failures = _watch_readiness(
        models,
        lambda: loop.call_soon_threadsafe(tell_if_ready),
        lambda: loop.call_soon_threadsafe(shutdown.set),
    )
    if not len(models) and fronts is None:
        loop.call_soon(tell_if_ready)
    await serve(app, shutdown, listeners)
    return failures


def _ready_lines(models: Models, config: ServerConfig, address: str) -> Iterator[str]:
    """Yield the log lines for the moment when the server is ready: the models, and the URLs of the
    documentation and the playground. `address` is the URL of the server; a wildcard host in it
    becomes the loopback address."""
    for model in models:
        yield f"ready: {model.name} on {model.device} in {model.dtype}"
    for wildcard, local in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        address = address.replace(wildcard, local)
    yield f"API documentation: {address}/docs"
    if playground.is_on(config):
        yield f"try it in a browser: {address}/playground"


def _watch_readiness(
    models: Models, ready: Callable[[], object], stop: Callable[[], object]
) -> list[BackendError]:
    """Call `ready` each time a model becomes ready, and `stop` if a model fails to compile.

    The function starts a thread for each model and returns at once an empty list. For each model
    that fails later, its thread adds an error to the list.
    """
    failures: list[BackendError] = []

    def watch(loaded: LoadedModel) -> None:
        try:
            loaded.wait_ready()
            gc.freeze()  # a garbage collection of the model would block the event loop for 50 ms
            ready()
        except Exception as error:
            if not loaded.draining:  # a draining model was stopped before it was ready
                reason = str(error).splitlines()[0]
                failures.append(BackendError(f"{loaded.name} could not be compiled: {reason}"))
                failures[-1].__cause__ = error
                stop()

    for loaded in models:
        threading.Thread(target=watch, args=(loaded,), name="wait-ready", daemon=True).start()
    return failures


def tell(address: str | None, state: str) -> None:
    """Send a state of sd_notify to the supervisor's socket, and log errors. `address` is a path or
    an abstract name that begins with "@"; None means no supervisor."""
    if address is None:
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), name)
    except OSError as error:
        logger.warning("%s could not be sent to the supervisor at %s: %s", state, address, error)


async def feed_watchdog(
    address: str | None, interval_s: float | None, is_alive: Callable[[], bool]
) -> None:
    """Send ALIVE to the supervisor twice in each `interval_s` seconds while `is_alive` returns
    True. If the supervisor gets no message for `interval_s` seconds, it ends the process.

    Runs until it is cancelled. Without an address or an interval it returns at once.
    """
    while address is not None and interval_s is not None:
        if is_alive():
            tell(address, ALIVE)
        await asyncio.sleep(interval_s / 2)
