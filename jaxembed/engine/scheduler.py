"""Schedules a device: decides which thread may run a program, and shares time among models.

A thread that wants to run a program waits with an urgency. The virtual time of a model grows with
the device time of its programs.
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
class VirtualTime:
    """The virtual time of one model on a device. Only DeviceScheduler writes it, under its lock."""

    end: float = 0.0  # virtual time in seconds at which the model's last program ends


@dataclass(eq=False)
class Waiter:
    """A thread that waits for the device or holds it."""

    urgency: Callable[[], float]  # the thread with the highest urgency goes first
    share: VirtualTime | None  # virtual time of the model to charge; None: no model is charged
    permits: int = 1  # number of permits that the thread needs
    # held until the thread gets the device; to make an Event takes longer
    turn: threading.Lock = field(default_factory=threading.Lock)
    mixed: bool = False  # whether a program of another model ran on the device at the same time
    overdue: bool = False  # whether the program should have ended long ago; set by a watchdog
    expected_s: float | None = None  # expected device time of the program; None until `charge`
    took_s: float = 0.0  # device time of the program, once the device is released

    @property
    def idle(self) -> bool:
        """Whether the thread has nothing to run, so that all other threads go first."""
        return self.urgency() == -math.inf


class DeviceScheduler:
    """A lock on a device that goes to the waiting thread with the highest urgency.

    `permits` is the number of programs that may be in flight. With two, an accelerator has the next
    program queued while one runs. On a CPU two programs run at once: much of a program is too small
    to be divided among the cores, and the other program uses the idle cores. XLA's programs for
    bucket 1x256 computed 26,150 tokens a second on two cores if two ran at once, and 13,990 one by
    one. With native kernels, one by one loses less: the cores are idle only during the host's work
    between two programs (benchmarks/README.md). Engines of several models share the scheduler.

    Models get equal time by start-time fair queueing (Goyal, Vin and Cheng, 1996). The program of a
    model begins at the virtual time at which its last program ends, or at the current virtual time
    if the model was idle, so that idle time earns no credit. Callers give the program that begins
    first the highest urgency. A program with a still higher urgency borrows from the future of its
    model, as in borrowed virtual time (Duda and Cheriton, 1999); the model pays back before it can
    borrow more.
    """

    def __init__(self, permits: int = 1, now: Callable[[], float] = time.monotonic):
        self.permits = permits  # largest number of programs in flight
        # the virtual time; it grows to the earliest begin of the waiting and starting programs
        self.clock = 0.0
        self._now = now
        # the device time that a program would have had so far if it had always been in flight; how
        # much it grows during a program is the device time of this program
        self._shared_s = 0.0
        # when `_shared_s` was brought up to date, and when the last charged program ended
        self._changed_at = self._served_at = now()
        self._waiting: list[Waiter] = []
        self._holding: list[Waiter] = []
        self._lock = threading.Lock()

    @classmethod
    def for_platform(cls, platform: str) -> "DeviceScheduler":
        """Make a scheduler with two permits, or one permit on a CPU with a single usable core."""
        return cls(permits=1 if platform == "cpu" and len(usable_cores()) == 1 else 2)

    @contextmanager
    def hold(
        self, urgency: Callable[[], float], share: VirtualTime | None = None, *, whole: bool = False
    ) -> Iterator[Waiter]:
        """Wait for the device and hold it during the block. Yields the waiter of this thread.

        The thread with the highest `urgency()` goes first; among equals, the thread that came
        first. `urgency` is called under the lock of the scheduler. `share` is the virtual time of
        the model to charge. A thread with a `share` must call `charge` or leave the block soon,
        because no other thread gets the device before that. With `whole` the thread gets all
        permits at once: two threads that each hold a permit and wait for another would deadlock.
        """
        waiter = Waiter(urgency, share, permits=self.permits if whole else 1)
        waiter.turn.acquire()
        with self._lock:
            self._waiting.append(waiter)
            self._grant()
        waiter.turn.acquire()
        granted_at = self._now()
        try:
            yield waiter
        finally:
            with self._lock:
                now = self._advance()
                waiter.took_s += self._shared_s
                self._holding.remove(waiter)
                if waiter.share is not None and waiter.expected_s is not None:
                    self._served_at = now
                    # the measured time includes programs of other models, or a hang
                    if waiter.mixed or waiter.overdue:
                        waiter.took_s = min(now - granted_at, waiter.expected_s)
                    waiter.share.end += waiter.took_s - waiter.expected_s
                self._grant()

    @property
    def stuck(self) -> bool:
        """Whether a program on the device is overdue. No other should start until it ends."""
        # a copy of the list, because this takes no lock
        return any(waiter.overdue for waiter in tuple(self._holding))

    @property
    def idle_s(self) -> float:
        """Seconds since the last charged program ended; 0 while a program runs or waits."""
        with self._lock:
            runs = any(c.share is not None for c in self._holding)
            is_busy = runs or any(not c.idle for c in self._waiting)
            return 0.0 if is_busy else self._now() - self._served_at

    def note_use(self) -> None:
        """Restart `idle_s` at 0, for a program that ran without holding the device."""
        self._served_at = self._now()

    def begin(self, share: VirtualTime) -> float:
        """Return the virtual time at which the next program of the model with `share` begins."""
        return max(self.clock, share.end)

    def charge(self, waiter: Waiter, expected_s: float) -> None:
        """Charge the expected device time of a program that starts, in seconds, to its model.

        A program is charged before it ends, because the model's next program may begin before that;
        `hold` corrects the charge at the end. `waiter.share` must not be None.
        """
        assert waiter.share is not None
        with self._lock:
            begin = self.begin(waiter.share)
            # the clock does not pass the waiting programs, so that they lose no device time
            begins = [c.share.end for c in self._waiting if c.share and not c.idle]
            self.clock = max(self.clock, min([begin, *begins]))
            waiter.share.end = begin + expected_s
            waiter.expected_s = expected_s
            self._grant()

    def _grant(self) -> None:
        """Give free permits to the most urgent waiters, once every holder has been charged.

        This method decides for all threads, because urgencies change with time: if each thread
        decided for itself, each could see another one in front and go on waiting. If the most
        urgent waiter needs more permits than are free, all waiters wait; but such a waiter is
        skipped if it is idle.
        """
        while self._waiting:
            free = self.permits - sum(waiter.permits for waiter in self._holding)
            if not free:
                return
            # until a holder is charged, the other threads of its model seem too urgent
            if any(c.share is not None and c.expected_s is None for c in self._holding):
                return
            ready = [c for c in self._waiting if c.permits <= free or not c.idle]
            if not ready:
                return
            waiter = ready[0] if len(ready) == 1 else max(ready, key=methodcaller("urgency"))
            if waiter.permits > free:
                return
            self._advance()
            self._waiting.remove(waiter)
            self._holding.append(waiter)
            waiter.took_s = -self._shared_s  # `hold` adds `_shared_s` at the end of the program
            if any(holder.share is not waiter.share for holder in self._holding):
                for holder in self._holding:
                    holder.mixed = True
            waiter.turn.release()

    def _advance(self) -> float:
        """Divide the time since the last change equally among the programs in flight.

        Adds the time of one of these programs to `_shared_s`. Returns the current time in seconds.
        """
        now = self._now()
        if self._holding:
            self._shared_s += (now - self._changed_at) / len(self._holding)
        self._changed_at = now
        return now
