"""What may enter: whole requests, by inputs and by tokens, refused at once when full."""

import math
import threading
from collections.abc import Callable

from jaxembed.errors import Overloaded, ShuttingDown

LONGEST_RETRY_S = 60


class Capacity:
    """The limits of one process, over all its models, because these share its devices.

    Without `max_tokens` the limit is the sum of what the models bring.
    """

    def __init__(self, max_inputs: int, max_tokens: int | None = None):
        self.max_inputs = max_inputs
        self.doors: list[Admission] = []
        self.lock = threading.Lock()
        self._max_tokens = max_tokens

    @property
    def max_tokens(self) -> int:
        return self._max_tokens or sum(door.share for door in self.doors)

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

    A request enters while both counts of the capacity are below its limits, even if it alone
    overshoots them, so that no size starves. Before tokenizing its tokens are a guess;
    `Permit.correct` mends it. `share` is what the model adds to a capacity without `max_tokens`.
    """

    def __init__(self, capacity: Capacity, share: int, tokens_per_s: Callable[[], float]):
        self.capacity = capacity
        self.share = share
        self.tokens_per_s = tokens_per_s
        self.inputs = 0
        self.tokens = 0
        self.draining = False
        with capacity.lock:
            capacity.doors.append(self)

    def admit(self, inputs: int, tokens: int) -> "Permit":
        """Let a request in. Raises Overloaded or ShuttingDown and keeps nothing of it."""
        capacity = self.capacity
        with capacity.lock:
            if self.draining:
                raise ShuttingDown("the server is shutting down", retry_after_s=5)
            if capacity.inputs >= capacity.max_inputs or capacity.tokens >= capacity.max_tokens:
                raise Overloaded(_reason(capacity), _retry_after_s(capacity))
            self.inputs += inputs
            self.tokens += tokens
        return Permit(self, inputs, tokens)

    def drain(self) -> None:
        """Admit nothing more to this model."""
        with self.capacity.lock:
            self.draining = True

    def _count(self, inputs: int, tokens: int) -> None:
        with self.capacity.lock:
            self.inputs += inputs
            self.tokens += tokens


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
