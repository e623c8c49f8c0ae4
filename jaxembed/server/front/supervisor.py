"""Starts the front-end processes, keeps them running, and tells them of models and keys."""

import asyncio
import logging
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from jaxembed.config import ServerConfig
from jaxembed.errors import BackendError, counted
from jaxembed.observability.log import is_json
from jaxembed.server.front import frames
from jaxembed.server.front.backend import Backend
from jaxembed.server.http.listening import CLOSE_S
from jaxembed.server.registry.models import KnownModel, LoadedInstance
from jaxembed.server.server import Server

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the models, and two signs of life
SILENCE_S = 15.0  # a front end that is silent for so long is killed
UPDATE_S = 5.0  # that a front end may take to use a new table
COLLECT_S = 1.0  # that a scrape of the metrics waits for a front end
START_S = 60.0  # that a front end may take to load its tokenizers
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # before a front end is started again
MAX_DEATHS, DEATHS_S = 5, 60.0  # of front ends, after which the server ends


@dataclass(eq=False)
class FrontEndProcess:
    """One front end: its socket for clients, and its process while it runs."""

    index: int
    listener: socket.socket
    process: subprocess.Popen[bytes] | None = None
    backend: Backend | None = None
    is_serving: bool = False
    started_at: float = 0.0


class FrontEnds:
    """The front-end processes of a server.

    `app` is the ASGI app of this process, and `listeners` are the bound sockets of the front ends,
    one for each. `on_serving` is called whenever a front end begins to serve.
    """

    def __init__(
        self,
        app: Server,
        listeners: Sequence[socket.socket],
        on_serving: Callable[[], object] = lambda: None,
    ):
        self._app, self._service = app, app.service
        self._on_serving = on_serving
        self._fronts = [FrontEndProcess(k, listener) for k, listener in enumerate(listeners)]
        self._numbers: dict[LoadedInstance, int] = {}
        self._next_number = 1
        self._epoch = 1
        self._table: frames.Table | None = None
        self._changed = asyncio.Event()  # set and replaced when a front end has applied a table
        self._deaths: deque[float] = deque()
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def serving(self) -> int:
        """The number of front ends that serve."""
        return sum(front.is_serving for front in self._fronts)

    @property
    def open_requests(self) -> int:
        """The number of requests that the front ends have sent and that are not answered."""
        return sum(one.backend.open_requests for one in self._fronts if one.backend is not None)

    async def run(self) -> None:
        """Start the front ends, and keep them running until this is cancelled. Raises BackendError
        if they end too often."""
        keeping = [asyncio.create_task(self._keep(front)) for front in self._fronts]
        looking = asyncio.create_task(self._look())
        self._tasks = [*keeping, looking]
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in self._tasks:
                if task.done():
                    task.result()  # raises its error
        finally:
            self._is_stopping = True
            for task in self._tasks:
                task.cancel()
            for front in self._fronts:
                self._kill(front)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def drain(self, timeout_s: float) -> None:
        """Have the front ends refuse new requests and answer those that were admitted. Waits until
        that is done."""
        self._is_stopping = True
        self._send_all(frames.Drain(timeout_s))
        await self._wait_until(lambda one: one.is_drained, timeout_s + 2 * CLOSE_S)

    async def close(self) -> None:
        """Have the front ends close the connections of clients, and end. Waits until that is
        done."""
        self._is_stopping = True
        self._send_all(frames.Close())
        await self._wait_until(lambda one: False, 2 * CLOSE_S)
        for front in self._fronts:
            front.listener.close()

    def _send_all(self, frame: frames.Frame) -> None:
        for front in self._fronts:
            if front.backend is not None:
                front.backend.send(frame)

    async def _wait_until(self, is_done: Callable[[Backend], bool], timeout_s: float) -> None:
        """Wait until each front end has ended or `is_done`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(one.backend and not is_done(one.backend) for one in self._fronts):
                    await self._changed.wait()

    async def update(self) -> None:
        """Tell the front ends of changed models and names, and wait until all that serve use them.
        A front end that takes longer than UPDATE_S is killed."""
        epoch = self._publish()
        with suppress(TimeoutError):
            async with asyncio.timeout(UPDATE_S):
                while self._behind(epoch):
                    await self._changed.wait()
        for front in self._behind(epoch):
            logger.error("front end %d does not take new models: it is killed", front.index)
            self._kill(front)

    async def collect(self) -> None:
        """Add the growth of all front ends' metrics, within COLLECT_S."""
        backends = [front.backend for front in self._fronts if front.backend is not None]
        await asyncio.gather(*(backend.collect(COLLECT_S) for backend in backends))

    def reopen(self) -> None:
        """Have the front ends open the audit log again."""
        self._send_all(frames.Reopen())

    def _behind(self, epoch: int) -> list[FrontEndProcess]:
        return [
            front
            for front in self._fronts
            if front.is_serving and front.backend is not None and front.backend.epoch < epoch
        ]

    async def _load(self, frame: frames.Load) -> int:
        """Load the models that a request may mean. Returns the epoch of the table with them."""
        pool = self._service.pool
        if frame.specs_only:
            await pool.specs_of(frame.name, frame.permitted)
        else:
            instance = await pool.lease(frame.name, frame.task, frame.permitted, frame.outputs)
            try:
                return self._publish()
            finally:
                instance.give_back()
        return self._publish()

    async def _look(self) -> None:
        """Publish changed models, and look for front ends that hang."""
        loop = asyncio.get_running_loop()
        while True:
            looked_at = loop.time()
            await asyncio.sleep(LOOK_S)
            self._publish()
            # if this process was stopped, it has not read yet what came meanwhile
            was_stopped = loop.time() - looked_at > 2 * LOOK_S
            for front in self._fronts:
                backend, process = front.backend, front.process
                if backend is None or process is None:
                    continue
                backend.send(frames.Alive())
                limit_s = SILENCE_S if front.is_serving else START_S
                since = backend.heard_at if front.is_serving else front.started_at
                if loop.time() - since > limit_s and not was_stopped:
                    logger.error("front end %d is silent: it is killed", front.index)
                    self._kill(front)

    def _kill(self, front: FrontEndProcess) -> None:
        front.is_serving = False
        if front.process is not None:
            front.process.kill()  # does nothing if the process has ended

    async def _keep(self, front: FrontEndProcess) -> None:
        """Run a front end, and start it again whenever it ends."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            front.started_at = loop.time()
            status = await self._run_once(front)
            if self._is_stopping:
                return
            now = loop.time()
            self._deaths.append(now)
            while now - self._deaths[0] > DEATHS_S:
                self._deaths.popleft()
            if len(self._deaths) >= MAX_DEATHS * len(self._fronts):
                raise BackendError(
                    f"front-end processes ended {counted(len(self._deaths), 'time')} within "
                    f"{DEATHS_S:g} s; the log has the reasons"
                )
            logger.error(
                "front end %d has ended with status %s; it is started again", front.index, status
            )
            lived_s = now - front.started_at
            pause_s = FIRST_PAUSE_S if lived_s > DEATHS_S else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _run_once(self, front: FrontEndProcess) -> int | None:
        """Run a front end until its process ends, and return the exit status."""
        ours, theirs = socket.socketpair()
        descriptors = theirs.fileno(), front.listener.fileno()
        command = [sys.executable, "-m", "jaxembed.server.front", *map(str, descriptors)]
        with theirs:
            # Not by asyncio, whose hooks between fork and exec JAX forbids; and in a process group
            # of its own, which signals from a terminal do not reach.
            process = subprocess.Popen(
                command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0
            )
        front.process = process
        ended = asyncio.Event()
        backend = Backend(self._app, self._load, lambda: self._applied(front), ended.set)
        await asyncio.get_running_loop().create_connection(lambda: backend.link, sock=ours)
        front.backend = backend
        try:
            self._greet(backend)
            await ended.wait()
            with suppress(subprocess.TimeoutExpired):  # it ends when its connection has ended
                return await asyncio.to_thread(process.wait, CLOSE_S)
            self._kill(front)
            return await asyncio.to_thread(process.wait)
        finally:
            self._kill(front)
            backend.link.close()
            front.backend, front.is_serving = None, False
            self._note_change()

    def _greet(self, backend: Backend) -> None:
        """Send a front end the settings, and all models."""
        service = self._service
        backend.send(
            frames.Start(
                config_of(service.config),
                service.models.capacity.max_bytes,
                service.has_keys,
                None if service.audit is None else str(service.audit.path),
                None if service.tracer is None else service.tracer.settings,
                is_json(),
            )
        )
        self._publish()
        assert self._table is not None
        self._send_table(backend, self._table)

    def _applied(self, front: FrontEndProcess) -> None:
        if not front.is_serving and front.backend is not None and front.backend.epoch:
            front.is_serving = True
            self._on_serving()
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _publish(self) -> int:
        """Tell the front ends of the models and names if they have changed. Returns the epoch of
        the last table."""
        table = self._make_table()
        if table != self._table:
            self._epoch += 1
            self._table = table
            for front in self._fronts:
                if front.backend is not None:
                    self._send_table(front.backend, table)
        return self._epoch

    def _send_table(self, backend: Backend, table: frames.Table) -> None:
        for instance, number in self._numbers.items():
            if number not in backend.models:
                backend.give(number, instance)
        epoch = self._epoch
        backend.send(frames.Table(epoch, table.models, table.names, table.can_load))

    def _make_table(self) -> frames.Table:
        """Return the table of the models and names, with the epoch 0."""
        models = self._service.models
        known = models.known
        instances = {one.instance for one in known if one.instance is not None}
        for instance in [one for one in self._numbers if one not in instances]:
            del self._numbers[instance]
        for one in known:
            if one.instance is not None and one.instance not in self._numbers:
                self._numbers[one.instance] = self._next_number
                self._next_number += 1
        places = {one: k for k, one in enumerate(known)}
        names = {name: places[one] for name, one in models.names.items()}
        startup = set(models.startup_models)
        rows = [self._row(one, one in startup) for one in known]
        return frames.Table(0, rows, names, models.can_load)

    def _row(self, known: KnownModel, is_startup: bool) -> frames.Known:
        number = None if known.instance is None else self._numbers[known.instance]
        spec = known.spec if number is None else None
        return frames.Known(known.id, number, spec, known.takes_images, known.described, is_startup)


def config_of(config: ServerConfig) -> dict[str, Any]:
    """Return the fields of the settings that a front end needs, without secrets of other routes."""
    fields = asdict(config)
    fields["media_networks"] = [str(network) for network in config.media_networks]
    for name in ("admin_key", "admin_port", "prometheus_port", "notify_socket", "watchdog_s"):
        del fields[name]
    return fields
