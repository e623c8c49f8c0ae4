"""Whose turn it is on a device, and what each has had of it. Knows nothing of what runs there."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Share:
    """What one model has had of a device. Its turn writes it, under its lock."""

    end: float = 0.0  # seconds on the turn's clock: it has had its time until then


@dataclass(eq=False)
class Claim:
    """One thread that waits for the device or holds it; two of one engine are not the same."""

    urgency: Callable[[], float]
    share: Share | None  # who pays for the program
    permits: int = 1  # programs it runs at a time
    granted: threading.Event = field(default_factory=threading.Event)
    mixed: bool = False  # a program of another model has held the device meanwhile
    overdue: bool = False  # its program should have ended long ago: a watchdog says so
    expected_s: float | None = None  # None until it is charged
    took_s: float = 0.0  # of the device, once the turn is given back

    @property
    def idle(self) -> bool:
        """Whether the thread has nothing to run, and takes the turn only if nobody else does."""
        return self.urgency() == -math.inf


class DeviceTurn:
    """A lock on a device that is handed to whoever needs it most.

    With `permits=2` an accelerator has the next program on its way while one runs. On a CPU two run
    at once: much of a program is too small to be shared out over the cores, and the other one takes
    those that idle. Two of XLA's programs of 1x256 made 26,150 tokens a second on two cores, one
    after the other 13,990; with the native kernels both are as fast, but for the host's part
    between two, in which one at a time leaves the cores idle (benchmarks/README.md).
    Engines of several models share the turn of a device, so that together they have no more
    programs in flight.

    Their equal time is start-time fair queueing (Goyal, Vin and Cheng, 1996): on a clock of device
    seconds a model's program begins where its last one ended, or now if it rested, so that rest
    earns no credit; of those that wait the one that begins first is next. Who is in a hurry may
    borrow from its own future by a higher urgency, as in borrowed virtual time (Duda and Cheriton,
    1999): it pays back before it can borrow more.
    """

    def __init__(self, permits: int = 1, now: Callable[[], float] = time.monotonic):
        self.permits = permits  # programs in flight at most
        self.clock = 0.0  # where the program begins that began first of all that wait or start
        self._now = now
        self._shared_s = 0.0  # seconds that each program has had of the device if all shared it
        self._changed_at = self._served_at = now()
        self._waiting: list[Claim] = []
        self._holding: list[Claim] = []
        self._lock = threading.Lock()

    @classmethod
    def for_platform(cls, platform: str) -> "DeviceTurn":
        return cls(permits=1 if platform == "cpu" and os.cpu_count() == 1 else 2)

    @contextmanager
    def hold(
        self, urgency: Callable[[], float], share: Share | None = None, *, whole: bool = False
    ) -> Iterator[Claim]:
        """Wait for the turn; of those that wait the highest `urgency()` goes first, ties in order
        of arrival. It is asked under the turn's lock. Who has a share calls `charge` or leaves
        soon: meanwhile nobody else gets the turn. With `whole` it is for all the permits, at once:
        two that each had one and waited for another would wait for ever."""
        claim = Claim(urgency, share, self.permits if whole else 1)
        with self._lock:
            self._waiting.append(claim)
            self._grant()
        claim.granted.wait()
        granted_at = self._now()
        try:
            yield claim
        finally:
            with self._lock:
                now = self._advance()
                claim.took_s += self._shared_s
                self._holding.remove(claim)
                if claim.share is not None and claim.expected_s is not None:
                    self._served_at = now
                    # its seconds hold the wait for other models' programs, or nobody's work
                    if claim.mixed or claim.overdue:
                        claim.took_s = min(now - granted_at, claim.expected_s)
                    claim.share.end += claim.took_s - claim.expected_s
                self._grant()

    @property
    def waiting(self) -> int:
        """The number of threads in line."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """The number of permits in use."""
        return self.permits - self._free

    @property
    def stuck(self) -> bool:
        """Whether a program that has the turn is overdue. Nothing should start on the device until
        it ends."""
        holding = tuple(self._holding)  # asked without the lock, while others come and go
        return any(claim.overdue for claim in holding)

    @property
    def idle_s(self) -> float:
        """Seconds since a program last ran, of any model; 0 while one runs or waits."""
        with self._lock:
            busy = any(c.share is not None for c in self._holding)
            busy = busy or any(not c.idle for c in self._waiting)
            return 0.0 if busy else self._now() - self._served_at

    def begin(self, share: Share) -> float:
        """Where the next program of a share begins on the clock."""
        return max(self.clock, share.end)

    def charge(self, claim: Claim, expected_s: float) -> None:
        """A program starts that should take so long. It is counted before it ends, because the next
        one of its model may begin before that."""
        assert claim.share is not None
        with self._lock:
            begin = self.begin(claim.share)
            # those it went ahead of lose nothing of what is theirs
            passed = [self.begin(c.share) for c in self._waiting if c.share and not c.idle]
            self.clock = max(self.clock, min([begin, *passed]))
            claim.share.end = begin + expected_s
            claim.expected_s = expected_s
            self._grant()

    def _grant(self) -> None:
        """Hand out what is free. Decided here, once: urgencies move with time, and waiters who each
        looked for themselves could all see another one first, and all wait on. Who waits for more
        permits than are free is not passed, or it would never see them all free; but who is idle
        is."""
        while (free := self._free) and not self._choosing:
            ready = [c for c in self._waiting if c.permits <= free or not c.idle]
            claim = max(ready, key=lambda claim: claim.urgency(), default=None)
            if claim is None or claim.permits > free:
                return
            self._advance()
            self._waiting.remove(claim)
            self._holding.append(claim)
            claim.took_s = -self._shared_s
            if any(holder.share is not claim.share for holder in self._holding):
                for holder in self._holding:
                    holder.mixed = True
            claim.granted.set()

    def _advance(self) -> float:
        """Programs that run at once get equal parts of the device. Returns what time it is."""
        now = self._now()
        if self._holding:
            self._shared_s += (now - self._changed_at) / len(self._holding)
        self._changed_at = now
        return now

    @property
    def _free(self) -> int:
        return self.permits - sum(claim.permits for claim in self._holding)

    @property
    def _choosing(self) -> bool:
        """Whether somebody has the turn and no program yet: until it is charged nobody can tell
        who is next."""
        return any(c.share is not None and c.expected_s is None for c in self._holding)
