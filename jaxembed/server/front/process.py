"""The front-end process: answers HTTP on one socket, with the engine in another process.

It has handlers for the routes that compute, and forwards all other requests. It imports no JAX. It
ends when the engine's process ends.
"""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any, cast

import msgspec

from jaxembed import __version__, memory
from jaxembed.config import ServerConfig
from jaxembed.engine.quota import Account, RateState, Refusal
from jaxembed.errors import JaxembedError, ShuttingDown
from jaxembed.observability.log import configure_logging
from jaxembed.observability.tracing import Tracer
from jaxembed.server import access
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.front import frames
from jaxembed.server.front.client import EngineClient, LentCapacity, LentReservation
from jaxembed.server.front.forward import Forwarder
from jaxembed.server.front.link import Link
from jaxembed.server.front.served import RemoteModels, RemotePool
from jaxembed.server.http.exchange import Exchange
from jaxembed.server.http.listening import CLOSE_S, collect_rarely, start_server
from jaxembed.server.pipeline.body import image_fetcher
from jaxembed.server.server import DIRECT, Server
from jaxembed.server.service import Service

logger = logging.getLogger(__name__)

GROWTH_S = 1.0  # seconds between two reports of the growth of the metrics
FLUSH_S = 3.0  # for sending the last spans
SILENCE_S = 3.0  # without news of the engine's process for so long, the front end is not ready


class RemoteKey(msgspec.Struct):
    """The API key of a request: its name, and the models that it may use; None: all."""

    name: str
    models: list[str] | None


class RemoteQuota:
    """The quota of a request's key, which the engine's process counts."""

    def __init__(self, client: EngineClient, request: int):
        self._client, self._request = client, request

    def refuse(self, reason: Refusal) -> None:
        """Count a request of this key that was refused for `reason`."""
        self._client.send(frames.Refusal(self._request, reason))


class RemoteAccess(access.Access):
    """The steps around each handler, with the keys of the key file in the engine's process."""

    def __init__(self, service: Service, client: EngineClient):
        super().__init__(service, is_public=True)
        self._client = client

    async def _check_key(self, exchange: Exchange) -> None:
        if not self._service.has_keys:
            await super()._check_key(exchange)
            return
        reservation = cast(LentReservation, exchange.body.reservation)
        call, request = self._client.number(), reservation.known()
        sent_key = access.sent_key(exchange)
        frame = frames.Begin(call, request, sent_key, exchange.method, exchange.path)
        try:
            begun: frames.Begun = await self._client.call(frame)
        except JaxembedError as error:
            exchange.key_name = vars(error).pop("key_name", exchange.key_name)
            if vars(error).pop("has_quota", False):
                exchange.quota = RemoteQuota(self._client, request)
            raise
        exchange.key_name = begun.name
        if begun.models is not None or begun.has_quota:
            exchange.key = RemoteKey(begun.name, begun.models)
        if begun.has_quota:
            exchange.quota = RemoteQuota(self._client, request)
            reservation.has_quota = True
            if reservation.account is None:
                reservation.account = Account()

    async def _rate_states(self, exchange: Exchange) -> Sequence[RateState]:
        if exchange.quota is None:
            return ()
        call = self._client.number()
        request = cast(LentReservation, exchange.body.reservation).known()
        try:
            answer: frames.RateStates = await self._client.call(frames.Rates(call, request))
        except ShuttingDown:  # the engine's process has ended
            return ()
        return answer.states


class FrontServer(Server):
    """The ASGI app of a front-end process."""

    def __init__(self, service: Service, guard: access.Access, client: EngineClient):
        super().__init__(service, guard, *DIRECT)
        self.forwarder = Forwarder(client)
        self.heard_at = time.monotonic()  # when the engine's process last sent a frame

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_http = scope["type"] == "http"
        if not is_http or (scope["method"], scope["path"]) in self._direct:
            await super().__call__(scope, receive, send)
            return
        task = cast(asyncio.Task, asyncio.current_task())
        self.unanswered.add(task)
        try:
            is_silent = time.monotonic() - self.heard_at > SILENCE_S
            await self.forwarder(
                scope, receive, send, is_cut=is_silent, is_expired=lambda: self.expired
            )
        finally:
            self.unanswered.discard(task)


class FrontEnd:
    """A front-end process: the connection to the engine's process, and the server."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._client = EngineClient()
        self._control: asyncio.Queue[Any] = asyncio.Queue()
        self._stopping, self._closing = asyncio.Event(), asyncio.Event()
        self._serving: asyncio.Task | None = None
        self._draining: asyncio.Task[None] | None = None
        self._app: FrontServer | None = None
        self._models: RemoteModels | None = None
        self._audit: AuditLog | None = None
        self._tracer: Tracer | None = None

    async def run(self, channel: socket.socket) -> None:
        """Serve until the engine's process ends or says that the server stops. `channel` is the
        socket of the connection to it."""
        loop = asyncio.get_running_loop()
        link = Link(frames.FromEngine, 2**32 - 1, self._take, self._end)
        await loop.create_connection(lambda: link, sock=channel)
        self._client.link = link
        link.send(frames.Hello(__version__))
        working = asyncio.create_task(self._work())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()  # raises its error
        working.cancel()
        if self._serving is not None:
            self._closing.set()
            await asyncio.wait({self._serving}, timeout=CLOSE_S)
        self._send_growth(0)
        await asyncio.sleep(0)  # sends it
        if self._audit is not None:
            self._audit.close()
        if self._tracer is not None:
            self._tracer.close(FLUSH_S)

    async def _drain(self, timeout_s: float) -> None:
        """Refuse new requests, and answer those that were admitted."""
        if self._models is not None:
            self._models.draining = True
        if self._app is not None and (unanswered := await self._app.answered(timeout_s)):
            logger.warning(
                "requests that were not answered within %g s: %d; raise --drain-timeout",
                timeout_s,
                unanswered,
            )
            await self._app.expire(CLOSE_S)
        self._client.send(frames.Drained())

    def _end(self) -> None:
        self._client.end()
        if self._app is not None:
            self._app.forwarder.end()
        self._stopping.set()

    def _take(self, frame: Any) -> None:
        """Handle a frame of the engine's process."""
        if self._app is not None:
            self._app.heard_at = time.monotonic()
        match frame:
            case frames.Answered():  # most frames
                self._client.finish(frame)
            case frames.Wanted() | frames.Head() | frames.Part() | frames.Ended():
                if self._app is not None:
                    self._app.forwarder.take(frame)
            case frames.Start() | frames.ModelFacts() | frames.Table():
                self._control.put_nowait(frame)
            case frames.Alive():
                pass
            case frames.Collect():
                self._send_growth(frame.call)
            case frames.Reopen():
                if self._audit is not None:
                    self._audit.reopen()
            case frames.Drain():
                self._draining = asyncio.create_task(self._drain(frame.timeout_s))
            case frames.Close():
                self._stopping.set()
            case _:
                self._client.finish(frame)

    async def _work(self) -> None:
        """Apply the frames that change the state, one after the other."""
        start: frames.Start = await self._control.get()
        models, has_begun = self._set_up(start), False
        reporting = asyncio.create_task(self._report())
        try:
            while True:
                frame = await self._control.get()
                if isinstance(frame, frames.ModelFacts):
                    try:
                        await models.add(frame)
                    except Exception:  # its requests are refused until a table offers it again
                        logger.exception("the tokenizer of %s cannot be loaded", frame.name)
                        self._client.send(frames.Returned(frame.number))
                    continue
                models.apply(frame)
                if not has_begun:
                    has_begun = True
                    gc.freeze()
                    assert self._app is not None
                    self._serving = start_server(self._app, self._listener, self._closing)
                self._client.send(frames.Applied(frame.epoch))
        finally:
            reporting.cancel()

    def _set_up(self, start: frames.Start) -> RemoteModels:
        """Make the app."""
        configure_logging(start.json_output)
        networks = tuple(map(ip_network, start.config.pop("media_networks")))
        config = replace(ServerConfig(**start.config), media_networks=networks)
        capacity = LentCapacity(self._client, start.max_bytes)
        self._models = models = RemoteModels(self._client, capacity)
        self._audit = None if start.audit_log is None else AuditLog(Path(start.audit_log))
        pool = cast(Any, RemotePool(self._client, models))
        fetcher = image_fetcher(config)
        self._tracer = _tracer(start.tracing)
        service = Service(
            models,
            config,
            pool,
            audit=self._audit,
            tracer=self._tracer,
            fetcher=fetcher,
            has_keys=start.has_keys,
        )
        guard = RemoteAccess(service, self._client)
        self._app = FrontServer(service, guard, self._client)
        if fetcher is not None:
            self._app.after_serving(fetcher.aclose)
        return models

    async def _report(self) -> None:
        """Each second, send the growth of the metrics, give unused memory back to the engine's
        process, and freed memory to the system if there are no requests."""
        assert self._models is not None
        assert self._app is not None
        capacity, trimmer = cast(LentCapacity, self._models.capacity), memory.Trimmer()
        while True:
            await asyncio.sleep(GROWTH_S)
            self._send_growth(0)
            capacity.give_all_back()
            if not self._app.unanswered:
                await asyncio.to_thread(trimmer.run)

    def _send_growth(self, call: int) -> None:
        growth = {} if self._models is None else self._models.growth()
        if self._audit is not None:
            growth["audit"] = self._audit.growth()
        self._client.send(frames.Metrics(call, growth))


def _tracer(tracing: tuple[str, str, str] | None) -> Tracer | None:
    if tracing is None:
        return None
    from jaxembed.server.otlp import OtlpTracer  # the extra is installed: the engine uses it too

    endpoint, name, protocol = tracing
    return OtlpTracer(endpoint, name, cast(Any, protocol))


def main(channel: int, listener: int) -> None:
    """Run a front-end process. The arguments are the descriptors of the socket to the engine's
    process, and of the socket on which clients connect."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine's process tells what to do
    import uvloop

    collect_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        front_end = FrontEnd(socket.socket(fileno=listener))
        runner.run(front_end.run(socket.socket(fileno=channel)))
