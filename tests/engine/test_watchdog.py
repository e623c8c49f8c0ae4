"""A device call that does not return strands nobody, and its device is in use again if it does."""

import logging
import threading
from contextlib import suppress

import pytest
from fakes import SMALL_GRID, WAIT_S, SumRunner, count_of, encoding, entered, future_of, sums, until

from jaxembed.engine import watchdog as watchdog_module
from jaxembed.engine.autotune.costs import BucketCosts
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import WorkFuture
from jaxembed.engine.scheduler import DeviceScheduler, Waiter
from jaxembed.engine.watchdog import OVERDUE_FACTOR, OVERDUE_S, Watchdog, WatchedCall
from jaxembed.errors import BackendError, DeviceStuck

OVERDUE = 0.3  # seconds, in place of a minute
SHORT, WIDE, LONG = SMALL_GRID.buckets


@pytest.fixture(name="runner")
def _runner():
    """Its gate is opened at the end, or its thread would stay."""
    runner = SumRunner()
    yield runner
    runner.gate.set()


def hung(engine, runner) -> WorkFuture:
    runner.gate.clear()
    future = engine.ask([encoding(10), encoding(*[11] * 9)])
    entered(runner)
    until(lambda: engine.stuck)
    return future


def test_a_batch_that_does_not_return_fails_with_a_reference_in_the_log(start, runner, caplog):
    engine = start(runner, overdue_s=OVERDUE)
    with caplog.at_level(logging.ERROR), pytest.raises(BackendError) as failure:
        hung(engine, runner).result(WAIT_S)
    reference = str(failure.value).split("reference ")[1].rstrip(")")
    (line,) = [r.getMessage() for r in caplog.records if "overdue" in r.getMessage()]
    assert reference in line
    assert count_of(engine.telemetry.failed_batches) == 1


def test_while_its_only_device_is_stuck_an_engine_refuses_and_fails_what_waits(start, runner):
    engine = start(runner, overdue_s=OVERDUE)
    runner.gate.clear()
    first = engine.ask([encoding(10)])
    entered(runner)
    waiting = [engine.ask([encoding(20 + k)]) for k in range(3)]
    for future in (first, *waiting):
        with pytest.raises(BackendError):
            future.result(WAIT_S)
    with pytest.raises(DeviceStuck):
        waiting[0].result(0.0)
    with pytest.raises(DeviceStuck):
        engine.ask([encoding(5)])
    assert engine.waiting == (0, 0)
    assert not engine.healthy
    assert not engine.ready
    assert count_of(engine.telemetry.stuck_workers) == 1


def test_a_call_that_returns_late_makes_its_seat_well_and_its_answers_are_dropped(start, runner):
    engine = start(runner, overdue_s=OVERDUE)
    share = engine.workers[0].share
    before = share.end
    late = hung(engine, runner)
    costs = engine.snapshot().costs
    runner.gate.set()
    until(lambda: not engine.stuck)
    with pytest.raises(BackendError, match="did not return in time"):
        late.result(WAIT_S)
    assert engine.snapshot().costs == costs  # a call that hung says nothing of the bucket
    assert sums(engine.ask([encoding(6)])) == [6.0]
    assert engine.ready
    assert count_of(engine.telemetry.stuck_workers) == 0
    assert share.end - before < OVERDUE  # nor has the model had the device


def test_work_that_waited_while_the_device_was_stuck_for_a_moment_runs(start, runner):
    """A thread that looked for work just then went to sleep again."""
    engine = start(runner, overdue_s=OVERDUE)
    scheduler = engine.workers[0].scheduler
    with scheduler.hold(lambda: 1e9) as waiter:
        waiter.overdue = True
        until(lambda: engine.stuck)
        waiter.overdue = False
    with engine._lock:
        engine._queue.add(future := future_of([encoding(7)]), None)  # and nobody is notified
    assert sums(future) == [7.0]


def test_one_stuck_seat_of_two_leaves_the_work_to_the_other(start, runner):
    well = SumRunner()
    engine = start(runner, well, overdue_s=OVERDUE)
    runner.gate.clear()
    until(lambda: engine.ask([encoding(5)]) and runner.ran)
    until(lambda: engine.workers[0].scheduler.stuck)
    for k in range(6, 30):
        assert sums(engine.ask([encoding(k)])) == [float(k)]
    assert engine.healthy
    assert not engine.stuck
    assert count_of(engine.telemetry.stuck_workers) == 1


@pytest.mark.parametrize("permits", [1, 2])
def test_a_model_that_shares_a_stuck_device_strands_nobody_either(start, runner, permits):
    scheduler = DeviceScheduler(permits)
    other_runner = SumRunner()
    both = runner, other_runner
    engine, other = (start(one, turns=[scheduler], overdue_s=OVERDUE) for one in both)
    runner.gate.clear()
    engine.ask([encoding(10)])
    entered(runner)
    other_runner.gate.clear()
    waiting = [other.ask([encoding(20 + k)]) for k in range(4)]
    until(lambda: engine.stuck)
    other_runner.gate.set()
    for future in waiting:
        with suppress(BackendError):  # with a second permit it may have run before
            future.result(WAIT_S)
    with pytest.raises(DeviceStuck):
        other.ask([encoding(5)])
    assert not other.healthy
    runner.gate.set()
    until(lambda: other.healthy)
    assert sums(other.ask([encoding(5)])) == [5.0]


def test_a_hang_while_a_bucket_is_timed_is_noticed_too(start, runner, caplog):
    released = threading.Event()

    def hang(bucket, planes):
        if (planes[0] <= 1).all():
            assert released.wait(WAIT_S)

    runner.on_run = hang
    engine = start(runner, overdue_s=OVERDUE, costs=BucketCosts(1e-3), ready=False)
    until(lambda: engine.stuck)
    with pytest.raises(DeviceStuck):
        engine.ask([encoding(5)])
    released.set()
    until(lambda: not engine.stuck)
    assert sums(engine.ask([encoding(5)])) == [5.0]
    assert "the timing of bucket" in caplog.text
    until(lambda: "could not be timed" in caplog.text)
    assert max(engine.snapshot().costs.values()) < 1000 * OVERDUE  # it counts for nothing


def test_close_waits_no_longer_than_it_may_and_fails_what_is_still_inside(start, runner):
    engine = start(runner)  # with the usual patience: the call is not overdue yet
    runner.gate.clear()
    future = engine.ask([encoding(10)])
    entered(runner)
    closer = threading.Thread(target=engine.close, args=(0.1,))
    closer.start()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    with pytest.raises(BackendError, match="closed"):
        future.result(0.0)


class Look(Watchdog):
    """A watchdog that looks when it is told to."""

    def __init__(self, cost_s: float):
        self.overdue: list[WatchedCall] = []
        super().__init__(lambda bucket: cost_s, self.overdue.append, lambda: None)

    def look(self, seconds: float) -> int:
        for call in self.calls:
            self._check(call, seconds)
        return len(self.overdue)


@pytest.mark.parametrize("cost_s", [0.0, 0.001, 10.0])
def test_overdue_is_over_a_minute_and_over_twenty_times_the_expected_cost(cost_s):
    dog, allowed_s = Look(cost_s), max(60.0, 20 * cost_s)
    assert (OVERDUE_S, OVERDUE_FACTOR) == (60.0, 20.0)
    with dog.watch(Waiter(lambda: 0.0, None), Bucket(1, 16)) as call:
        assert dog.look(allowed_s) == 0
        assert dog.look(1.0) == 1
        assert dog.look(100.0) == 1  # said once
        assert call.waiter.overdue
        call.begin(Bucket(8, 16))  # each run of a batch starts anew
        assert dog.look(allowed_s) == 1
    assert dog.calls == []


def test_a_process_that_was_stopped_has_not_waited_meanwhile(monkeypatch):
    """After SIGSTOP, or a suspended machine, the clock jumps."""
    clock = [0.0]
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: clock[0])
    looks = threading.Semaphore(0)
    overdue: list[WatchedCall] = []
    dog = Watchdog(lambda bucket: 0.0, overdue.append, looks.release, overdue_s=0.5)
    with dog.watch(Waiter(lambda: 0.0, None), Bucket(1, 16)) as call:
        dog.thread.start()
        looks.acquire()
        clock[0] += 3600.0
        while call.age_s == 0:
            looks.acquire()
        assert call.age_s < 0.5
        assert overdue == []
    dog.stop()
    dog.thread.join()
