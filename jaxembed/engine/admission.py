"""What may enter: whole requests, by inputs and by tokens, refused at once when full."""

import math
import threading
from collections.abc import Callable

from jaxembed.errors import Overloaded, ShuttingDown

LONGEST_RETRY_S = 60


class Admission:
    """Counts what is admitted and not yet answered.

    A request enters while both counts are below their limits, even if it alone overshoots them, so
    that no size starves. Before tokenizing its tokens are a guess; `Permit.correct` mends it.
    """

    def __init__(self, max_inputs: int, max_tokens: int, tokens_per_s: Callable[[], float]):
        self.max_inputs = max_inputs
        self.max_tokens = max_tokens
        self.inputs = 0
        self.tokens = 0
        self.draining = False
        self._tokens_per_s = tokens_per_s
        self._lock = threading.Lock()

    def admit(self, inputs: int, tokens: int) -> "Permit":
        """Let a request in. Raises Overloaded or ShuttingDown and keeps nothing of it."""
        with self._lock:
            if self.draining:
                raise ShuttingDown("the server is shutting down", retry_after_s=5)
            if self.inputs >= self.max_inputs or self.tokens >= self.max_tokens:
                raise Overloaded(self._reason(), self._retry_after_s())
            self.inputs += inputs
            self.tokens += tokens
        return Permit(self, inputs, tokens)

    def drain(self) -> None:
        """Admit nothing more."""
        with self._lock:
            self.draining = True

    def _count(self, inputs: int, tokens: int) -> None:
        with self._lock:
            self.inputs += inputs
            self.tokens += tokens

    def _reason(self) -> str:
        return (
            f"Model is overloaded: {self.inputs} inputs and about {self.tokens} tokens wait, the "
            f"limits are {self.max_inputs} (--max-concurrent-requests) and {self.max_tokens} "
            "(--max-queue-tokens)"
        )

    def _retry_after_s(self) -> int:
        """Seconds until half of what waits is done, at the rate of late."""
        rate = self._tokens_per_s()
        wait_s = self.tokens / 2 / rate if rate > 0 else 1
        return min(max(math.ceil(wait_s), 1), LONGEST_RETRY_S)


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
