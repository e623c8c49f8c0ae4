"""The engine as a front-end process sees it: admits requests, computes their work, lends memory."""

import asyncio
from functools import partial
from itertools import count
from typing import Any

from jaxembed.data.work import Work
from jaxembed.engine.admission import RESERVE_DIVISOR, Capacity, Cost, Permit, Reservation
from jaxembed.errors import Overloaded, RequestTooLarge, ShuttingDown
from jaxembed.memory import KIB
from jaxembed.observability.tracing import FutureTrace
from jaxembed.server.front import frames
from jaxembed.server.front.frames import Frame
from jaxembed.server.front.link import Link

# A request of one input with at most so many tokens is tokenized before it is admitted, because
# that takes less time than to ask the engine twice.
BRIEF_TOKENS = 256
BLOCK = 256 * KIB  # bytes that the engine lends at once, if it has them
GONE = "the engine's process has ended; try again"


class EngineClient:
    """Calls the engine's process. Only the thread of the event loop may use it."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def number(self) -> int:
        """Return a new number for a request or a call."""
        return next(self._numbers)

    def send(self, frame: Frame) -> None:
        """Send a frame to the engine's process."""
        if self.link is not None:
            self.link.send(frame)

    def start(self, frame: Any) -> asyncio.Future[Any]:
        """Send a frame that is a call, and return the future of its answer. It raises the error of
        the call, or ShuttingDown if the engine's process has ended."""
        if self.link is None or not self.link.is_open:
            raise ShuttingDown(GONE)
        self._calls[frame.call] = future = asyncio.get_running_loop().create_future()
        self.send(frame)
        return future

    async def call(self, frame: Any) -> Any:
        """Send a frame that is a call, and return its answer. Raises the errors of `start`."""
        future = self.start(frame)
        try:
            return await future
        except asyncio.CancelledError:
            self.forget(frame.call)
            raise

    def forget(self, call: int) -> None:
        """Ignore the answer to a call."""
        self._calls.pop(call, None)

    def finish(self, frame: Any) -> None:
        """Give a call its answer, or its error."""
        future = self._calls.pop(frame.call, None)
        if future is None or future.done():
            return
        if isinstance(frame, frames.Refused):
            future.set_exception(frame.failure.error)
        else:
            future.set_result(frame)

    def end(self) -> None:
        """Fail all calls, because the connection has ended."""
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(ShuttingDown(GONE))


class LentCapacity(Capacity):
    """The memory that the engine has lent this process for bodies and answers.

    The engine's process counts inputs and tokens, and admits them."""

    def __init__(self, client: EngineClient, max_bytes: int):
        super().__init__(0, None, max_bytes)
        self.client = client
        self.free = 0  # lent bytes that no request holds
        self._block = max(min(BLOCK, max_bytes // 256), 1)

    def request(self) -> "LentReservation":
        return LentReservation(self)

    async def borrow(self, reservation: "LentReservation", count: int) -> None:
        """Borrow `count` bytes for a request, and some more. Raises Overloaded if the engine's
        process has no memory left."""
        call, wanted = self.client.number(), reservation.bytes + count
        future = self.client.start(frames.Lend(call, count, count + self._block, wanted))
        # it takes what was lent, also if the request is cancelled meanwhile
        future.add_done_callback(partial(self._take, reservation, count))
        await asyncio.shield(future)

    def _take(
        self, reservation: "LentReservation", count: int, lent: "asyncio.Future[frames.Granted]"
    ) -> None:
        if lent.cancelled() or lent.exception() is not None:
            return
        self.free += lent.result().count
        if not reservation.is_closed:
            self.free -= count
            reservation.aside += count

    def give_back(self) -> None:
        """Give lent memory back if much is free."""
        if self.free > 4 * self._block:
            self._return(self._block)

    def give_all_back(self) -> None:
        """Give all free memory back."""
        if self.free:
            self._return(0)

    def _return(self, kept: int) -> None:
        self.client.send(frames.GiveBack(self.free - kept))
        self.free = kept


class LentReservation(Reservation):
    """The memory of one request, out of what the engine's process has lent this process. `number`
    is that of the request, if the engine's process knows it."""

    def __init__(self, capacity: LentCapacity):
        super().__init__(capacity)
        self._lent = capacity
        self.aside = 0  # bytes that `make_room` has set aside
        self.is_closed = False
        self.number: int | None = None
        self.charges: dict[int, int] = {}  # tokens of the answer by the number of its part
        self.has_quota = False  # whether the engine's process charges the tokens to a key

    def known(self) -> int:
        """Return the number of the request, which the engine's process will know."""
        if self.number is None:
            self.number = self._lent.client.number()
        return self.number

    async def make_room(self, count: int) -> None:
        """Set `count` bytes aside for the next `charge`, and borrow them if needed. Raises the
        errors of `charge`."""
        self._check(count)
        if count > self._lent.free:
            await self._lent.borrow(self, count)
        elif count > 0:
            self._lent.free -= count
            self.aside += count

    def charge(self, count: int) -> None:
        self._check(count)
        from_aside = min(max(count, 0), self.aside)
        if count - from_aside > self._lent.free:
            raise Overloaded("Server is overloaded: there is no memory for this request")
        self.aside -= from_aside
        self._lent.free -= count - from_aside
        self.bytes += count
        self._lent.bytes += count

    def _check(self, count: int) -> None:
        limit = self._lent.max_bytes - self._lent.max_bytes // RESERVE_DIVISOR
        if count > 0 and self.bytes + count > limit:
            raise RequestTooLarge(
                f"the request and its answer need {self.bytes + count} bytes of memory, and the "
                f"limit of a request is {limit}; send less at a time or raise --max-queue-bytes"
            )

    def close(self) -> None:
        self._lent.free += self.bytes + self.aside
        self._lent.bytes -= self.bytes
        self.bytes = self.aside = 0
        self.is_closed = True
        self._lent.give_back()
        if self.number is not None:
            self._lent.client.send(frames.End(self.number, self.charges))


class RemotePermit(Permit):
    """A part of a request that the engine's process admits: at once, or when its work is sent."""

    def __init__(self, client: EngineClient, model: int, cost: Cost, reservation: LentReservation):
        self.reservation: LentReservation = reservation
        self.call = client.number()
        self._client, self._model, self._cost = client, model, cost
        self._is_reserved = self._is_sent = False

    async def reserve(self, *, is_run: bool) -> None:
        """Have the part admitted now. Raises the errors of `Admission.admit`."""
        request = self.reservation.known()
        frame = frames.Reserve(self.call, request, self._model, self._cost, is_run)
        await self._client.call(frame)
        self._is_reserved = True
        self._count_inputs()

    def _count_inputs(self) -> None:
        """Count the inputs for the audit log, once they are admitted."""
        if self.reservation.account is not None:
            self.reservation.account.inputs += self._cost.inputs

    async def compute(
        self, work: Work, route: str, priority: Any, trace: FutureTrace | None
    ) -> frames.Answered:
        """Have work of the request computed, and admitted unless it is already."""
        self._is_sent = True
        context = None if trace is None else trace.trace.tracer.context_of(trace.trace)
        frame = frames.Submit(
            self.call,
            self.reservation.known(),
            self._model,
            route,
            priority,
            self._cost,
            trace=context,
            **frames.fields_of(work),
        )
        future = self._client.start(frame)
        is_admitted = True
        try:
            return await future
        except asyncio.CancelledError:
            self._client.forget(self.call)
            self._client.send(frames.Cancel(self.call))
            raise
        except (Overloaded, RequestTooLarge):
            is_admitted = self._is_reserved
            raise
        finally:
            if is_admitted and not self._is_reserved:
                self._count_inputs()

    def correct(self, cost: Cost) -> None:
        """Replace the estimated cost, which the engine's process corrects when it gets the work."""
        self._cost = cost

    def charge_answer(self, tokens: int) -> None:
        if self.reservation.account is not None:
            self.reservation.account.use(answered=tokens)
        if self.reservation.has_quota:
            self.reservation.charges[self.call] = tokens

    def release(self) -> None:
        """Give back what was reserved for work that was not sent. After the work, the engine's
        process releases it."""
        if self._is_reserved and not self._is_sent:
            self._client.send(frames.Release(self.call, self.reservation.known()))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and self._is_sent and self.reservation.has_quota:
            self.reservation.charges[self.call] = 0
        self.release()
