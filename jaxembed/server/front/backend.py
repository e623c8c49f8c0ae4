"""The engine's side of the connection to one front-end process.

It admits the requests of the front end, has their work computed, and lends memory. All that the
front end holds falls with the connection.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import Any

from jaxembed import __version__
from jaxembed.data.spec import TEXT_ROUTE
from jaxembed.engine.admission import (
    RESERVE_DIVISOR,
    SMALL_DIVISOR,
    Capacity,
    Permit,
    Reservation,
)
from jaxembed.engine.future import WorkFuture
from jaxembed.engine.host import HostEngine
from jaxembed.engine.quota import REFUSAL_REASONS, Account, Quota
from jaxembed.errors import JaxembedError, Overloaded
from jaxembed.observability.tracing import FutureTrace
from jaxembed.preprocessing.images.parts import words_of
from jaxembed.runtime.model import LoadedModel
from jaxembed.server.access import identify
from jaxembed.server.auth.keyring import ApiKey
from jaxembed.server.front import frames
from jaxembed.server.front.forward import Handler
from jaxembed.server.front.frames import Failure, Frame, ProtocolError
from jaxembed.server.front.link import Link
from jaxembed.server.registry.models import LoadedInstance
from jaxembed.server.server import Server

logger = logging.getLogger(__name__)

MAX_OPEN = 100_000  # requests of a front end that are open at the same time


@dataclass(eq=False)
class OpenRequest:
    """A request of a front end: its memory and quota here, and the permits of its parts."""

    reservation: Reservation
    permits: dict[int, Permit] = field(default_factory=dict)
    quota: Quota | None = None
    instances: list[LoadedInstance] = field(default_factory=list)  # that it has leases on

    def lease(self, instance: LoadedInstance) -> None:
        """Take a lease on a model, once."""
        if instance not in self.instances:
            instance.leases += 1
            self.instances.append(instance)


@dataclass(eq=False)
class Running:
    """Work that is computed: the request and the permit that it belongs to."""

    call: int
    request: OpenRequest
    permit: Permit
    inputs: int
    future: Any  # WorkFuture, or the asyncio.Future of a HostEngine
    trace: FutureTrace | None
    stop: Callable[[], object]
    started_at: float = field(default_factory=time.monotonic)


class Backend:
    """The front end at the other end of `link`, as the engine's process sees it.

    `app` has the models and keys, and handles forwarded requests. `load` loads the model of a
    request and returns the epoch of the table that has it. `on_change` is called when the front end
    has applied a table or is drained, and `on_end` when the connection has ended.
    """

    def __init__(
        self,
        app: Server,
        load: Callable[[frames.Load], Awaitable[int]],
        on_change: Callable[[], object],
        on_end: Callable[[], object],
    ):
        self._app, self._service = app, app.service
        self._loop = asyncio.get_running_loop()
        self._load, self._on_change, self._on_end = load, on_change, on_end
        capacity = app.service.models.capacity
        self._capacity: Capacity = capacity
        self.link = Link(frames.FromFront, capacity.max_bytes, self._take, self._end)
        self._handler = Handler(app, self.link)
        self._requests: dict[int, OpenRequest] = {}
        self._running: dict[int, Running] = {}
        self._completed: deque[int] = deque()
        self._is_woken = False  # whether `_answer_completed` will be called
        self._lent = 0  # bytes
        self._greeted = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting: dict[int, asyncio.Future[None]] = {}
        self._calls = count(1)
        self._handlers: dict[type, Callable[[Any], None]] = {
            frames.Applied: self._applied,
            frames.Drained: self._drained,
            frames.Returned: self._returned,
            frames.Metrics: self._metrics,
            frames.Begin: self._begin,
            frames.Refusal: self._refusal,
            frames.Reserve: self._reserve,
            frames.Release: self._release,
            frames.Submit: self._submit,
            frames.Cancel: self._cancel,
            frames.End: self._finish,
            frames.Lend: self._lend,
            frames.GiveBack: self._take_back,
            frames.Load: self._load_model,
            frames.Rates: self._rates,
            frames.Forward: self._forward,
            frames.Piece: self._hand_on,
            frames.Gone: self._hand_on,
            frames.Sent: self._hand_on,
        }
        self.models: dict[int, LoadedInstance] = {}  # that the front end may use, by number
        self.is_drained = False
        self.epoch = 0  # of the table that the front end uses; 0: none yet
        self.heard_at = self._loop.time()

    @property
    def open_requests(self) -> int:
        """The number of requests of the front end that are not answered."""
        return len(self._requests)

    def send(self, frame: Frame) -> None:
        """Send a frame to the front end."""
        self.link.send(frame)

    def give(self, number: int, instance: LoadedInstance) -> None:
        """Let the front end use a model, which is held until the front end returns it."""
        if not self.link.is_open:
            return
        instance.holds += 1
        self.models[number] = instance
        self.send(facts_of(number, instance.loaded))

    async def collect(self, timeout_s: float) -> None:
        """Have the front end send the growth of its metrics, and wait until that is added."""
        if not self.link.is_open:
            return
        call = next(self._calls)
        self._collecting[call] = self._loop.create_future()
        self.send(frames.Collect(call))
        try:
            await asyncio.wait({self._collecting[call]}, timeout=timeout_s)
        finally:
            del self._collecting[call]

    def _take(self, frame: Any) -> None:
        """Handle a frame of the front end. Raises ProtocolError for one that is not allowed."""
        self.heard_at = self._loop.time()
        if not self._greeted:
            if not isinstance(frame, frames.Hello) or frame.version != __version__:
                raise ProtocolError("the front end has another version of jaxembed")
            self._greeted = True
            return
        try:
            self._handlers[type(frame)](frame)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"{type(frame).__name__}: {error!r}") from error

    def _end(self) -> None:
        """Free all that the front end holds."""
        self._handler.end()
        for running in list(self._running.values()):
            self._cancel(frames.Cancel(running.call))
        for number in list(self._requests):
            self._finish(frames.End(number, {}))
        with self._capacity.lock:
            self._capacity.bytes -= self._lent
            self._lent = 0
        for instance in self.models.values():
            instance.let_go()
        self.models.clear()
        for waiting in self._collecting.values():
            if not waiting.done():
                waiting.set_result(None)
        self._on_end()

    def _request(self, number: int) -> OpenRequest:
        """Return a request of the front end, which this opens if it is new."""
        request = self._requests.get(number)
        if request is None:
            if len(self._requests) >= MAX_OPEN:
                raise ProtocolError(f"more than {MAX_OPEN} open requests")
            request = self._requests[number] = OpenRequest(Reservation(self._capacity))
        return request

    def _refuse(self, call: int, error: BaseException, **attributes: Any) -> None:
        failure = Failure.of(error)
        failure.attributes.update(attributes)
        self.send(frames.Refused(call, failure))

    # ---- state

    def _applied(self, frame: frames.Applied) -> None:
        self.epoch = frame.epoch
        self._on_change()

    def _drained(self, frame: frames.Drained) -> None:
        self.is_drained = True
        self._on_change()

    def _returned(self, frame: frames.Returned) -> None:
        self.models.pop(frame.model).let_go()

    def _metrics(self, frame: frames.Metrics) -> None:
        for name, growth in frame.growth.items():
            if name == "audit":
                if self._service.audit is not None:
                    self._service.audit.grow(growth)
            elif not name:
                self._service.models.telemetry.grow(growth)
            elif (instance := self.models.get(int(name))) is not None:
                instance.loaded.telemetry.grow(growth)
        waiting = self._collecting.get(frame.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _load_model(self, frame: frames.Load) -> None:
        async def run() -> None:
            try:
                epoch = await self._load(frame)
            except Exception as error:
                self._refuse(frame.call, error)
            else:
                self.send(frames.Loaded(frame.call, epoch))

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- keys

    def _begin(self, frame: frames.Begin) -> None:
        request = self._request(frame.request)
        name: str = ""
        used: ApiKey | None = None

        def note(key_name: str, key: ApiKey | None, quota: Quota | None) -> None:
            nonlocal name, used
            name, used, request.quota = key_name, key, quota
            if quota is not None:
                request.reservation.account = Account(quota)

        try:
            identify(self._service, frame.key, frame.method, frame.path, note)
        except JaxembedError as error:
            has_quota = request.quota is not None
            self._refuse(frame.call, error, key_name=name or None, has_quota=has_quota)
            return
        models = None if used is None or used.models is None else list(used.models)
        self.send(frames.Begun(frame.call, name, models, request.quota is not None))

    def _refusal(self, frame: frames.Refusal) -> None:
        quota = self._requests[frame.request].quota
        if quota is not None:
            quota.refuse(REFUSAL_REASONS[REFUSAL_REASONS.index(frame.reason)])  # pyright: ignore

    def _rates(self, frame: frames.Rates) -> None:
        quota = self._requests[frame.request].quota
        states = [] if quota is None else quota.states()
        self.send(frames.RateStates(frame.call, states))

    # ---- admission and memory

    def _reserve(self, frame: frames.Reserve) -> None:
        request = self._request(frame.request)
        if frame.call in request.permits:
            raise ProtocolError("a number was used twice")
        _check(*frame.cost)
        instance = self.models[frame.model]
        request.lease(instance)
        loaded = instance.loaded
        try:
            permit = loaded.admission.admit(frame.cost, request.reservation, is_run=frame.is_run)
        except JaxembedError as error:
            self._refuse(frame.call, error)
            return
        request.permits[frame.call] = permit
        self.send(frames.Granted(frame.call, 0))

    def _release(self, frame: frames.Release) -> None:
        self._requests[frame.request].permits.pop(frame.call).release()

    def _finish(self, frame: frames.End) -> None:
        """Release all that a request holds, and charge the tokens of its answer."""
        _check(*frame.charges.values(), 0)
        request = self._requests.pop(frame.request, None)
        if request is None:
            return
        for call, permit in request.permits.items():
            if call in frame.charges:
                permit.charge_answer(frame.charges[call])
            permit.release()
        request.reservation.close()
        for instance in request.instances:
            instance.give_back()

    def _lend(self, frame: frames.Lend) -> None:
        """Lend memory, within the limits that `Reservation.charge` has for one request."""
        capacity = self._capacity
        if not 0 < frame.least <= frame.most:
            raise ProtocolError("the front end wants less than nothing")
        with capacity.lock:
            open_to_all = capacity.max_bytes - capacity.max_bytes // RESERVE_DIVISOR
            is_small = frame.wanted <= capacity.max_bytes // SMALL_DIVISOR
            limit = capacity.max_bytes if is_small else open_to_all
            count = frame.most if capacity.bytes + frame.most <= open_to_all else frame.least
            is_refused = capacity.bytes + count > limit
            if is_refused:
                capacity.refused["bytes"] += 1
            else:
                capacity.bytes += count
                self._lent += count
        if is_refused:
            error = Overloaded(
                f"Server is overloaded: requests hold {capacity.bytes} bytes of memory, and the "
                f"limit is {capacity.max_bytes} (--max-queue-bytes)",
                capacity.retry_after_s,
            )
            self._refuse(frame.call, error)
            return
        self.send(frames.Granted(frame.call, count))

    def _take_back(self, frame: frames.GiveBack) -> None:
        if not 0 <= frame.count <= self._lent:
            raise ProtocolError("the front end gives back more than it has")
        with self._capacity.lock:
            self._capacity.bytes -= frame.count
            self._lent -= frame.count

    # ---- work

    def _submit(self, frame: frames.Submit) -> None:
        _check(*frame.cost)
        request, instance = self._request(frame.request), self.models[frame.model]
        request.lease(instance)
        loaded = instance.loaded
        route = loaded.routes[frame.route]
        if frame.call in self._running:
            raise ProtocolError("a number was used twice")
        vocabulary = int(route.spec.config.get("vocab_size", 2**31))
        words, engine = 0, route.engine
        if not route.takes_texts and not isinstance(engine, HostEngine):
            assert route.spec.image is not None
            words = words_of(route.spec.image)
        work = frames.work_of(frame, vocabulary, words)
        if not frame.outputs or set(frame.outputs) - route.spec.widths.keys():
            raise ProtocolError("unknown outputs")
        if not 0 <= frame.adapter <= len(route.spec.adapter_names):
            raise ProtocolError("unknown adapter")
        permit = request.permits.get(frame.call)
        try:
            if permit is None:
                permit = loaded.admission.admit(frame.cost, request.reservation)
                request.permits[frame.call] = permit
            else:
                permit.correct(frame.cost)
            trace, tracer = None, self._service.tracer
            if frame.trace is not None and tracer is not None:
                trace = FutureTrace(tracer.read_trace(frame.trace))
            wake = partial(self._wake, frame.call)
            if isinstance(route.engine, HostEngine):
                future = route.runner.off_loop(route.engine.compute, work)
                stop: Callable[[], object] = future.cancel
            else:
                future = route.engine.submit(
                    work, wake, frame.priority, trace, self._loop.call_soon
                )
                stop = partial(route.engine.cancel, future)
        except Exception as error:
            if not isinstance(error, JaxembedError):
                logger.exception("work could not be queued. This is a bug in jaxembed")
            self._fail(request, frame.call, permit, error)
            return
        self._running[frame.call] = Running(
            frame.call, request, permit, len(work), future, trace, stop
        )
        if not isinstance(future, WorkFuture):
            future.add_done_callback(lambda _: wake())

    def _fail(
        self, request: OpenRequest, call: int, permit: Permit | None, error: BaseException
    ) -> None:
        """Refuse a call, and take back what was charged for it."""
        if permit is not None:
            permit.__exit__(type(error), error, None)
            request.permits.pop(call, None)
        self._refuse(call, error)

    def _wake(self, call: int) -> None:
        """Note that work is computed. Any thread may call this."""
        self._completed.append(call)
        if not self._is_woken:  # if two threads see that, `_answer_completed` is called twice
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # if the loop is closed, nobody waits
                self._loop.call_soon_threadsafe(self._answer_completed)

    def _answer_completed(self) -> None:
        """Send the answers to all work that is computed."""
        self._is_woken = False  # before the first answer: what comes from now on wakes again
        while self._completed:
            running = self._running.pop(self._completed.popleft(), None)
            if running is None:  # it was cancelled
                continue
            try:
                self._answer(running)
            except Exception as error:
                logger.exception("an answer could not be sent. This is a bug in jaxembed")
                self._fail(running.request, running.call, running.permit, error)

    def _answer(self, running: Running) -> None:
        future, trace = running.future, running.trace
        try:
            if isinstance(future, WorkFuture):
                values = future.result(timeout_s=0.0)
                times = future.queue_s.tolist(), future.inference_s.tolist()
                cached = future.cached_inputs
            else:
                values, cached = future.result(), 0
                seconds = time.monotonic() - running.started_at
                times = [0.0] * running.inputs, [seconds] * running.inputs
        except Exception as error:
            self._fail(running.request, running.call, running.permit, error)
            return
        runs, queued_at = [], None
        if trace is not None:
            write, queued_at = trace.trace.tracer.write_context, trace.queued_at
            runs = [(run.started_at, run.ended_at, write(context)) for run, context in trace.runs]
        result = frames.encoded_result(values)
        self.send(frames.Answered(running.call, *times, cached, result, queued_at, runs))
        running.permit.release()

    def _cancel(self, frame: frames.Cancel) -> None:
        running = self._running.pop(frame.call, None)
        if running is not None:
            running.stop()
            running.permit.release()

    def _forward(self, frame: frames.Forward) -> None:
        self._handler.begin(frame)

    def _hand_on(self, frame: frames.Piece | frames.Gone | frames.Sent) -> None:
        self._handler.take(frame)


def _check(*counts: int) -> None:
    """Raise ProtocolError for a negative number."""
    if min(counts) < 0:
        raise ProtocolError("a number is negative")


def facts_of(number: int, loaded: LoadedModel) -> frames.ModelFacts:
    """Describe a model to a front end."""
    routes: dict[str, frames.RouteFacts] = {}
    for name, route in loaded.routes.items():
        stored_as = name
        if name not in loaded.specs.specs:  # the texts of a model with an encoder of images, or
            stored_as = TEXT_ROUTE if loaded.specs.is_dual else ""  # images beside texts
        limit = route.plan.max_input_tokens
        routes[name] = frames.RouteFacts(
            stored_as, route.takes_texts, limit, route.device_name, route.dtype
        )
    text = asdict(loaded.text)
    return frames.ModelFacts(number, loaded.name, str(loaded.path), loaded.specs, text, routes)
