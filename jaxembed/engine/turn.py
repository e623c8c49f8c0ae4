"""Decides which thread may run a program on a device, and shares device time fairly among models.

Knows nothing of the programs.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller

from jaxembed.platform.cores import usable_cores


@dataclass(eq=False)
class Share:
    """The device time of one model. Only DeviceTurn writes it, under its lock."""

    end: float = 0.0  # seconds on the turn's clock up to which the model has had its time


@dataclass(eq=False)
class Claim:
    """The claim of one thread that waits for the device or holds it."""

    urgency: Callable[[], float]  # the highest goes first
    share: Share | None  # the model that is charged for the program; None: nobody is
    permits: int = 1  # number of permits that it needs
    granted: threading.Event = field(default_factory=threading.Event)
    mixed: bool = False  # whether a program of another model ran on the device at the same time
    overdue: bool = False  # whether its program should have ended long ago; set by a watchdog
    expected_s: float | None = None  # expected device time; None until it is charged
    took_s: float = 0.0  # device time, once the turn is given back

    @property
    def idle(self) -> bool:
        """Whether the thread has nothing to run, and takes the turn only if no other wants it."""
        return self.urgency() == -math.inf


class DeviceTurn:
    """A lock on a device that goes to the waiting thread with the highest urgency.

    With `permits=2` an accelerator already has the next program queued while one runs. On a CPU two
    programs run at once: much of a program is too small to be divided among the cores, and the
    other one uses those that are idle. Two of XLA's programs of 1x256 made 26,150 tokens a second
    on two cores at once, and 13,990 one after the other. With the native kernels both ways are
    equally fast, but for the host's work between two programs, in which one at a time leaves the
    cores idle (benchmarks/README.md). Engines of several models share the turn of a device, so that
    together they have no more programs in flight.

    Models get equal time by start-time fair queueing (Goyal, Vin and Cheng, 1996). On a clock of
    device seconds, a model's program begins where its last one ended, or now if the model was idle,
    so that idle time earns no credit. Of the waiting programs the one with the earliest begin is
    next. An urgent program may borrow from its model's future by a higher urgency, as in borrowed
    virtual time (Duda and Cheriton, 1999); the model pays back before it can borrow more.
    """

    def __init__(self, permits: int = 1, now: Callable[[], float] = time.monotonic):
        self.permits = permits  # largest number of programs in flight
        self.clock = 0.0  # virtual time: the earliest begin among waiting and starting programs
        self._now = now
        self._shared_s = 0.0  # total device time of each program if all in flight share equally
        self._changed_at = self._served_at = now()
        self._waiting: list[Claim] = []
        self._holding: list[Claim] = []
        self._lock = threading.Lock()

    @classmethod
    def for_platform(cls, platform: str) -> "DeviceTurn":
        """A turn with two permits, or with one on a CPU with a single usable core."""
        return cls(permits=1 if platform == "cpu" and len(usable_cores()) == 1 else 2)

    @contextmanager
    def hold(
        self, urgency: Callable[[], float], share: Share | None = None, *, whole: bool = False
    ) -> Iterator[Claim]:
        """Wait for the turn and hold it for the block.

        Of the waiting threads the one with the highest `urgency()` goes first, and among equals the
        first to come. `urgency` is called under the turn's lock. A thread with a share must call
        `charge` or leave soon, because no other gets the turn meanwhile. With `whole` it gets all
        permits at once: two threads that each hold one and wait for another would deadlock.
        """
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
                    # its seconds would include programs of other models, or time in which it hung
                    if claim.mixed or claim.overdue:
                        claim.took_s = min(now - granted_at, claim.expected_s)
                    claim.share.end += claim.took_s - claim.expected_s
                self._grant()

    @property
    def stuck(self) -> bool:
        """Whether a program on the device is overdue. Then nothing should start until it ends."""
        # of a copy, because this takes no lock
        return any(claim.overdue for claim in tuple(self._holding))

    @property
    def idle_s(self) -> float:
        """Seconds since the last program of any model ended; 0 while one runs or waits."""
        with self._lock:
            busy = any(c.share is not None for c in self._holding)
            busy = busy or any(not c.idle for c in self._waiting)
            return 0.0 if busy else self._now() - self._served_at

    def begin(self, share: Share) -> float:
        """The time on the clock at which the next program of a share begins."""
        return max(self.clock, share.end)

    def charge(self, claim: Claim, expected_s: float) -> None:
        """Charge a program that starts to its share, with its expected device time in seconds.

        It is charged before it ends, because the model's next program may begin before that.
        """
        assert claim.share is not None
        with self._lock:
            begin = self.begin(claim.share)
            # the clock does not pass the waiting programs, so they lose none of their time
            ends = [c.share.end for c in self._waiting if c.share and not c.idle]
            self.clock = max(self.clock, min([begin, *ends]))
            claim.share.end = begin + expected_s
            claim.expected_s = expected_s
            self._grant()

    def _grant(self) -> None:
        """Give free permits to the most urgent waiting claims, if every granted one is charged.

        One place decides, because urgencies change with time: if each waiting thread looked for
        itself, all could see another one in front and go on waiting. A claim for more permits than
        are free is not overtaken, or it might never get them, unless it is idle.
        """
        while self._waiting and (free := self._free):
            if any(c.share is not None and c.expected_s is None for c in self._holding):
                return
            ready = [c for c in self._waiting if c.permits <= free or not c.idle]
            if not ready:
                return
            claim = ready[0] if len(ready) == 1 else max(ready, key=methodcaller("urgency"))
            if claim.permits > free:
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
        """Add the time since the last change, in equal parts for the programs that run at once.

        Returns the current time.
        """
        now = self._now()
        if self._holding:
            self._shared_s += (now - self._changed_at) / len(self._holding)
        self._changed_at = now
        return now

    @property
    def _free(self) -> int:
        """The number of permits that no claim holds."""
        return self.permits - sum(claim.permits for claim in self._holding)
