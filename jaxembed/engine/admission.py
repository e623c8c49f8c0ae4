"""What may enter: whole requests, by inputs and by tokens, refused at once when full."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxembed.errors import Overloaded, ShuttingDown

LONGEST_RETRY_S = 60

_whole: ContextVar["Whole | None"] = ContextVar("whole", default=None)


class Whole:
    """A request of several parts, each admitted by itself; `entered` once one of them was."""

    def __init__(self) -> None:
        self.entered = False


@contextmanager
def as_one() -> Iterator[None]:
    """What is admitted in here, in tasks started here too, is one request: after its first part has
    entered none is refused for want of room."""
    before = _whole.set(Whole())
    try:
        yield
    finally:
        _whole.reset(before)


class Capacity:
    """The limits of one process, over all its models, because these share its devices.

    Without `max_tokens` the limit is the sum of what the models bring. A model may go past the
    limits up to its own share of them: its turn of the device comes however long the others' work
    is, so their flood must not keep it out.
    """

    def __init__(self, max_inputs: int, max_tokens: int | None = None):
        self.max_inputs = max_inputs
        self.doors: list[Admission] = []
        self.lock = threading.Lock()
        self._max_tokens = max_tokens

    @property
    def max_tokens(self) -> int:
        return self._max_tokens or sum(door.share for door in self.doors)

    def is_full_for(self, door: "Admission") -> bool:
        """Whether a count has reached its limit, and the model its share of that limit: what it
        brings, or an equal part of `max_tokens` and of `max_inputs`."""
        models = len(self.doors)
        tokens_share = self._max_tokens / models if self._max_tokens else door.share
        return (self.inputs >= self.max_inputs and door.inputs >= self.max_inputs / models) or (
            self.tokens >= self.max_tokens and door.tokens >= tokens_share
        )

    @property
    def inputs(self) -> int:
        return sum(door.inputs for door in self.doors)

    @property
    def tokens(self) -> int:
        return sum(door.tokens for door in self.doors)

    @property
    def wait_s(self) -> float:
        """Seconds of work of all models; those whose rate nobody has measured count nothing."""
        rates = [(door.tokens, door.tokens_per_s()) for door in self.doors]
        return sum((tokens / rate for tokens, rate in rates if rate > 0), 0.0)


class Admission:
    """Counts what is admitted to one model and not yet answered.

    A request enters while each count is below the capacity's limit or below the model's share of
    it, even if it alone overshoots them, so that no size starves. So all models together hold at
    most the limit, the shares of all but one, and one request each: less than twice the limit and
    the requests that overshoot. Before tokenizing a request's tokens are a guess; `Permit.correct`
    mends it. `share` is what the model adds to a capacity without `max_tokens`.
    """

    def __init__(self, capacity: Capacity, share: int, tokens_per_s: Callable[[], float]):
        self.capacity = capacity
        self.share = share
        self.tokens_per_s = tokens_per_s
        self.inputs = 0
        self.tokens = 0
        self.draining = False
        self._closed = False
        with capacity.lock:
            capacity.doors.append(self)

    def admit(self, inputs: int, tokens: int) -> "Permit":
        """Let a request in. Raises Overloaded or ShuttingDown and keeps nothing of it."""
        capacity = self.capacity
        with capacity.lock:
            if self.draining:
                raise ShuttingDown("the server is shutting down", retry_after_s=5)
            whole = _whole.get()
            if capacity.is_full_for(self) and not (whole and whole.entered):
                raise Overloaded(_reason(capacity), _retry_after_s(capacity))
            if whole:
                whole.entered = True
            self.inputs += inputs
            self.tokens += tokens
        return Permit(self, inputs, tokens)

    def drain(self) -> None:
        """Admit nothing more to this model."""
        with self.capacity.lock:
            self.draining = True

    def close(self) -> None:
        """Admit nothing more, and take the model's share away once all it admitted is released."""
        with self.capacity.lock:
            self.draining = self._closed = True
            self._leave_if_done()

    def _count(self, inputs: int, tokens: int) -> None:
        with self.capacity.lock:
            self.inputs += inputs
            self.tokens += tokens
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._closed and not self.inputs and not self.tokens and self in self.capacity.doors:
            self.capacity.doors.remove(self)


class Permit:
    """The place one request holds until it is released."""

    def __init__(self, admission: Admission, inputs: int, tokens: int):
        self._admission = admission
        self._inputs = inputs
        self._tokens = tokens

    def correct(self, tokens: int) -> None:
        """The request turned out to hold this many tokens."""
        self._admission._count(0, tokens - self._tokens)
        self._tokens = tokens

    def release(self) -> None:
        """The request is answered, or nobody waits for it."""
        self._admission._count(-self._inputs, -self._tokens)
        self._inputs = self._tokens = 0

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _reason(capacity: Capacity) -> str:
    return (
        f"Model is overloaded: {capacity.inputs} inputs and about {capacity.tokens} tokens wait, "
        f"the limits are {capacity.max_inputs} (--max-concurrent-requests) and "
        f"{capacity.max_tokens} (--max-queue-tokens)"
    )


def _retry_after_s(capacity: Capacity) -> int:
    """Seconds until half of what waits is done, at the rates of late."""
    return min(max(math.ceil(capacity.wait_s / 2), 1), LONGEST_RETRY_S)
