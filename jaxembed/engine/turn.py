"""Whose turn it is on a device. Knows nothing of what runs there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Claim:
    """One thread that waits; two of one engine have equal urgency and are not the same."""

    urgency: Callable[[], float]
    granted: threading.Event = field(default_factory=threading.Event)


class DeviceTurn:
    """A lock on a device that is handed to whoever needs it most.

    On CPU one program runs at a time: two would share the cores and both be late, and what waits
    can still be composed anew. An accelerator takes `permits=2`: one runs, the next is on its way.
    Engines of several models share the turn of a device, so their programs never overlap on it.
    """

    def __init__(self, permits: int = 1):
        self.permits = permits  # programs in flight at most
        self.clock = 0.0  # device seconds: where the share of the last to run began, see Engine
        self._free = permits
        self._waiting: list[Claim] = []
        self._lock = threading.Lock()

    @classmethod
    def for_platform(cls, platform: str) -> "DeviceTurn":
        return cls(permits=1 if platform == "cpu" else 2)

    @contextmanager
    def hold(self, urgency: Callable[[], float]) -> Iterator[None]:
        """Wait for the turn; of those that wait the highest `urgency()` goes first, ties in order
        of arrival."""
        claim = Claim(urgency)
        with self._lock:
            self._waiting.append(claim)
            self._grant()
        claim.granted.wait()
        try:
            yield
        finally:
            with self._lock:
                self._free += 1
                self._grant()

    def _grant(self) -> None:
        """Hand out what is free. Decided here, once: urgencies move with time, and waiters who each
        looked for themselves could all see another one first, and all wait on."""
        while self._free and self._waiting:
            claim = max(self._waiting, key=lambda claim: claim.urgency())
            self._waiting.remove(claim)
            self._free -= 1
            claim.granted.set()
