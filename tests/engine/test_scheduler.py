"""A device's turn: never more holders than permits, and the most urgent first."""

import math
import threading

import pytest
from fakes import Clock, until

from jaxembed.engine.scheduler import DeviceScheduler, VirtualTime, Waiter


def start_in_turn(threads: list[threading.Thread], scheduler: DeviceScheduler) -> None:
    """Each when those before it are in line."""
    for k, thread in enumerate(threads):
        thread.start()
        until(lambda k=k: len(scheduler._waiting) == k + 1)


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


class Waiters:
    """Threads that wait for a turn and note the order in which they get it."""

    def __init__(self, scheduler: DeviceScheduler):
        self.scheduler = scheduler
        self.order: list[str] = []
        self.threads: list[threading.Thread] = []

    def add(self, name: str, urgency, whole: bool = False) -> None:
        """Start one and return when it is in line."""
        asked = len(self.scheduler._waiting) + 1

        def work() -> None:
            with self.scheduler.hold(urgency, whole=whole):
                self.order.append(name)

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        until(lambda: len(self.scheduler._waiting) == asked)

    def join(self) -> list[str]:
        join(self.threads)
        return self.order


def test_two_programs_are_in_flight_but_on_a_single_core(monkeypatch):
    monkeypatch.setattr("jaxembed.engine.scheduler.usable_cores", lambda: {0, 1})
    assert DeviceScheduler.for_platform("cpu").permits == 2
    monkeypatch.setattr("jaxembed.engine.scheduler.usable_cores", lambda: {1})  # of two, perhaps
    assert DeviceScheduler.for_platform("cpu").permits == 1
    assert DeviceScheduler.for_platform("gpu").permits == 2
    assert DeviceScheduler.for_platform("tpu").permits == 2


def test_the_most_urgent_goes_first_and_ties_go_by_arrival():
    """Urgency is asked when the turn is free, not at arrival."""
    scheduler, now = DeviceScheduler(), {"a": 9.0, "b": 5.0, "c": 5.0, "d": 1.0, "e": 0.0}
    waiters = Waiters(scheduler)
    with scheduler.hold(lambda: 0.0):
        for name in now:
            waiters.add(name, lambda name=name: now[name])
        now |= {"a": 1.0, "d": 9.0}
    assert waiters.join() == ["d", "b", "c", "a", "e"]


def test_urgencies_that_move_at_every_look_hold_nobody_up():
    """Each look finds another one first: waiters that looked for themselves would all wait on."""
    scheduler, looks = DeviceScheduler(), iter(range(10**6))
    waiters = Waiters(scheduler)
    with scheduler.hold(lambda: 0.0):
        for name in "abcd":
            waiters.add(name, lambda: float(next(looks) * 7 % 5))
    assert sorted(waiters.join()) == ["a", "b", "c", "d"]


def test_a_device_stays_stuck_while_another_program_on_it_ends():
    scheduler = DeviceScheduler(2)

    class Ending:
        """Gives the turn back just when it is looked at."""

        @property
        def overdue(self) -> bool:
            holding.remove(self)
            return False

    holding: list = scheduler._holding
    holding += [Ending(), Waiter(lambda: 0.0, None, overdue=True)]
    assert scheduler.stuck


@pytest.mark.parametrize("permits", [1, 2, 3])
def test_never_more_holders_than_permits_and_everyone_gets_through(permits):
    scheduler, lock = DeviceScheduler(permits), threading.Lock()
    inside, most, passed = 0, 0, 0
    barrier = threading.Barrier(8)

    def work(k: int) -> None:
        nonlocal inside, most, passed
        barrier.wait()
        for n in range(50):
            whole = n % 5 == 0
            programs = permits if whole else 1
            with scheduler.hold(lambda n=n: float((n * k) % 7), whole=whole):
                with lock:
                    inside += programs
                    most = max(most, inside)
                with lock:
                    inside -= programs
                    passed += 1

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    join(threads)
    assert passed == 8 * 50
    assert most <= permits


def test_who_takes_the_whole_turn_waits_for_all_and_nobody_passes_it():
    scheduler = DeviceScheduler(2)
    waiters = Waiters(scheduler)
    with scheduler.hold(lambda: 0.0):
        waiters.add("whole", lambda: 9.0, whole=True)
        waiters.add("other", lambda: 1.0)  # one permit is free
        assert waiters.order == []
    assert waiters.join() == ["whole", "other"]


def test_who_is_idle_and_waits_for_the_whole_turn_holds_nobody_up():
    """Not even who is idle as well: what it waits for may come while it is in line."""
    scheduler = DeviceScheduler(2)
    waiters = Waiters(scheduler)
    with scheduler.hold(lambda: 0.0):
        waiters.add("whole", lambda: -math.inf, whole=True)
        for urgency in (1.0, -math.inf):
            with scheduler.hold(lambda urgency=urgency: urgency):
                assert waiters.order == []
    assert waiters.join() == ["whole"]


def test_a_program_is_counted_from_its_start_and_corrected_when_it_ends():
    clock, share = Clock(), VirtualTime()
    scheduler = DeviceScheduler(1, now=clock)
    with scheduler.hold(lambda: 0.0, share) as waiter:
        scheduler.charge(waiter, 5.0)
        assert scheduler.begin(share) == 5.0  # where the next one of this model would begin
        clock.now += 7.0
    assert waiter.took_s == 7.0
    assert (scheduler.clock, scheduler.begin(share)) == (0.0, 7.0)


def test_beside_a_program_of_another_model_the_wait_for_it_is_not_counted():
    clock, long, short, quick = Clock(), VirtualTime(), VirtualTime(), VirtualTime()
    scheduler = DeviceScheduler(2, now=clock)
    with scheduler.hold(lambda: 0.0, long) as first:
        scheduler.charge(first, 100.0)
        with scheduler.hold(lambda: 0.0, short) as second:
            scheduler.charge(second, 4.0)
            clock.now += 104.0
        with scheduler.hold(lambda: 0.0, quick) as third:
            scheduler.charge(third, 4.0)
            clock.now += 1.0  # it may fail at once
        clock.now += 3.0
    assert first.mixed
    assert second.mixed
    assert (long.end, short.end, quick.end) == (100.0, 4.0, 1.0)
    with scheduler.hold(lambda: 0.0, long) as alone:
        scheduler.charge(alone, 100.0)
        clock.now += 108.0
    assert not alone.mixed
    assert long.end == 208.0


def test_programs_of_one_model_that_run_at_once_share_the_device_equally():
    clock, share = Clock(), VirtualTime()
    scheduler = DeviceScheduler(2, now=clock)
    with scheduler.hold(lambda: 0.0, share) as first:
        scheduler.charge(first, 5.0)
        clock.now += 1.0
        with scheduler.hold(lambda: 0.0, share) as second:
            scheduler.charge(second, 5.0)
            clock.now += 6.0
        clock.now += 2.0
    assert (first.took_s, second.took_s) == (1.0 + 3.0 + 2.0, 3.0)
    assert not first.mixed
    assert share.end == 9.0  # all the seconds in which something ran


def test_a_device_is_idle_from_the_end_of_its_last_program_on():
    clock, share = Clock(), VirtualTime()
    scheduler = DeviceScheduler(2, now=clock)
    clock.now += 3.0
    assert scheduler.idle_s == 3.0
    with scheduler.hold(lambda: 0.0, share) as waiter:
        scheduler.charge(waiter, 1.0)
        clock.now += 5.0
        assert scheduler.idle_s == 0.0
    assert scheduler.idle_s == 0.0
    clock.now += 2.0
    assert scheduler.idle_s == 2.0
    with scheduler.hold(lambda: -math.inf, whole=True):  # a bucket is timed
        clock.now += 1.0
    assert scheduler.idle_s == 3.0


def test_the_clock_never_steps_back_and_who_rested_begins_now():
    clock, ahead, rested = Clock(), VirtualTime(end=50.0), VirtualTime()
    scheduler = DeviceScheduler(2, now=clock)
    for share, end in ((ahead, 60.0), (rested, 60.0), (rested, 70.0), (ahead, 70.0)):
        before = scheduler.clock
        with scheduler.hold(lambda: 0.0, share) as waiter:
            scheduler.charge(waiter, 10.0)
            clock.now += 10.0
        assert share.end == end
        assert scheduler.clock >= before >= 0
    assert scheduler.clock == 60.0


def test_the_next_is_chosen_when_the_program_of_the_last_is_charged():
    """Chosen before, it would be the same model again: what it just took was not counted yet."""
    scheduler, shares = DeviceScheduler(2), {"long": VirtualTime(), "short": VirtualTime()}
    order: list[str] = []
    charged = threading.Barrier(2)

    def work(model: str) -> None:
        share = shares[model]
        with scheduler.hold(lambda: -scheduler.begin(share), share) as waiter:
            order.append(model)
            scheduler.charge(waiter, 100.0 if model == "long" else 4.0)
            if len(order) <= 2:
                charged.wait(60)  # the first two hold the device together

    threads = [threading.Thread(target=work, args=(m,)) for m in ("long", "long", "short")]
    with scheduler.hold(lambda: 0.0), scheduler.hold(lambda: 0.0):
        start_in_turn(threads, scheduler)
    join(threads)
    assert order == ["long", "short", "long"]


@pytest.mark.parametrize(
    ("ahead_s", "takes_s", "permits"),
    [((25.0, 0.0), (10.0, 10.0), 1), ((0.0, 0.0), (0.004, 0.1), 1), ((0.0, 0.0), (0.004, 0.1), 2)],
    ids=["who borrows goes ahead", "short and long", "with two permits"],
)
def test_models_get_equal_time_in_the_long_run(ahead_s, takes_s, permits):
    clock, stop, lock = Clock(), threading.Event(), threading.Lock()
    scheduler, had = DeviceScheduler(permits, now=clock), []
    shares, count = [VirtualTime(), VirtualTime()], 2 * (permits + 1)

    def work(model: int) -> None:
        share, ahead = shares[model], ahead_s[model]
        while not stop.is_set():
            with scheduler.hold(lambda: ahead - scheduler.begin(share), share) as waiter:
                had.append(model)
                if len(had) >= 300:
                    stop.set()
                scheduler.charge(waiter, takes_s[model])
                until(lambda: stop.is_set() or len(scheduler._waiting) == count - permits)
                with lock:
                    clock.now += takes_s[model]

    threads = [threading.Thread(target=work, args=(k % 2,)) for k in range(count)]
    with scheduler.hold(lambda: 0.0, whole=True):
        start_in_turn(threads, scheduler)
    join(threads)
    assert had[:3] == [0] * 3 or not any(ahead_s)
    first, second = (had[:300].count(model) * takes_s[model] for model in (0, 1))
    assert first == pytest.approx(second, rel=0.03 if any(ahead_s) else 0.5)
