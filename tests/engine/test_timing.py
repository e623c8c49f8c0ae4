"""Buckets are timed while nothing waits, one run at a time, and what a timing is."""

import itertools
import math
import threading
import time

import numpy as np
import pytest
from fakes import WAIT_S, SumRunner, encoding, sums, timed_costs, until

from jaxembed.engine import compiles
from jaxembed.engine.autotune import costs as costs_module
from jaxembed.engine.autotune import timing as timing_module
from jaxembed.engine.autotune.costs import BucketCosts
from jaxembed.engine.autotune.timing import BucketTimer, full_planes, milliseconds
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import NullReplica
from jaxembed.engine.scheduler import DeviceScheduler, VirtualTime
from jaxembed.observability.metrics import Telemetry
from jaxembed.platform.cores import CpuTimes

BUCKET = Bucket(2, 16)
NULL = {"dense": 3, "tokens": 5}  # widths
SMALL, LARGE = Bucket(1, 16), Bucket(8, 16)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Two timings of a bucket, of two runs each, and looks all the time."""
    monkeypatch.setattr(costs_module, "TIMINGS", 2)
    monkeypatch.setattr(timing_module, "TIMING_S", 60.0)
    monkeypatch.setattr(timing_module, "MAX_RUNS", 2)
    monkeypatch.setattr(timing_module, "SHORTEST_LULL_S", 0.0)
    monkeypatch.setattr(timing_module, "LOOK_S", 0.0005)


class Bench:
    def __init__(self, runner, permits: int = 1, is_bulk_alone=lambda: False):
        self.scheduler = DeviceScheduler(permits)
        self.costs = BucketCosts(1e-6)
        self.costs.add(SMALL)
        self.costs.add(LARGE)
        self.telemetry = Telemetry()
        self.done: list[int] = []
        self.timer = BucketTimer(
            runner,
            self.scheduler,
            self.costs,
            threading.RLock(),
            self.telemetry,
            name="m",
            is_bulk_alone=is_bulk_alone,
            on_timed=lambda: self.done.append(1),
        )

    def __enter__(self) -> "Bench":
        self.timer.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.stop()
        self.timer.thread.join(WAIT_S)
        assert not self.timer.thread.is_alive()


@pytest.mark.parametrize("permits", [1, 2])
def test_every_bucket_is_timed_as_often_as_wanted_and_then_no_more(permits):
    runner = SumRunner()
    with Bench(runner, permits) as bench:
        assert bench.timer.timed.wait(WAIT_S)
        assert {b: len(ms) for b, ms in bench.costs.timings.items()} == {SMALL: 2, LARGE: 2}
        assert bench.done == [1]
        assert all(0 < ms < 1000 for ms in bench.costs.usable.values())
        assert "jaxembed_bucket_timings 4.0" in bench.telemetry.exposition().decode()
        # two timings of two runs, by as many threads as there are permits; small ones first
        assert runner.timed.count(SMALL) == runner.timed.count(LARGE) == 2 * 2 * permits
        assert runner.timed[: 2 * permits] == [SMALL] * 2 * permits
        assert runner.max_inside <= permits


@pytest.mark.parametrize(("waited_s", "kept"), [(0.1, {SMALL, LARGE}), (1.5, set())])
def test_timings_of_a_time_when_others_had_the_cores_are_not_kept(monkeypatch, waited_s, kept):
    def timed(run):
        return run(), CpuTimes(wall=1.0, cpu=0.5, waited=waited_s)

    monkeypatch.setattr(costs_module, "MAX_WAITED", 1 / 3)
    monkeypatch.setattr(timing_module, "core_count", lambda: 2.0)
    monkeypatch.setattr(timing_module, "timed", timed)
    with Bench(SumRunner()) as bench:
        assert bench.timer.timed.wait(WAIT_S)
        assert set(bench.costs.timings) == kept
        assert [bench.costs.source_of(bucket) for bucket in (SMALL, LARGE)] == ["timed"] * 2
        assert bench.costs.lost_share == pytest.approx(waited_s / max(waited_s + 0.5, 1.0))


def test_a_bucket_that_was_timed_is_timed_again_now_and_then(monkeypatch):
    monkeypatch.setattr(timing_module, "AGAIN_S", 0.001)
    runner = SumRunner()
    with Bench(runner) as bench:
        assert bench.timer.timed.wait(WAIT_S)
        before = len(runner.timed)
        until(lambda: {SMALL, LARGE} <= set(runner.timed[before:]))
        assert bench.done == [1]


def test_no_bucket_is_timed_while_a_program_is_compiled(monkeypatch):
    looked, idle_s = threading.Semaphore(0), [0.0]

    def looking() -> float:
        looked.release()
        return idle_s[0]

    monkeypatch.setattr(timing_module.compiles, "idle_s", looking)
    runner = SumRunner()
    with Bench(runner) as bench:
        for _ in range(3):
            assert looked.acquire(timeout=WAIT_S)
        assert not runner.timed
        idle_s[0] = 60.0
        assert bench.timer.timed.wait(WAIT_S)


def test_a_program_is_compiled_from_its_start_to_its_end():
    begun, go_on = threading.Event(), threading.Event()

    class Lowered:
        def compile(self, **_):
            begun.set()
            assert go_on.wait(WAIT_S)

    compiled = compiles.start_compiling(Lowered(), {})
    assert compiles.idle_s() == 0.0
    assert begun.wait(WAIT_S)
    assert compiles.idle_s() == 0.0
    go_on.set()
    compiled.result()
    until(lambda: compiles.idle_s() > 0.0)


def test_what_comes_waits_for_one_run_at_most():
    """A run that is under way cannot be stopped; the next one is not begun."""
    runner, inside, go_on = SumRunner(), threading.Semaphore(0), threading.Semaphore(0)

    def hold(bucket, planes):
        inside.release()
        assert go_on.acquire(timeout=WAIT_S)

    runner.on_run = hold
    with Bench(runner) as bench:
        assert inside.acquire(timeout=WAIT_S)
        order: list[str] = []

        def work() -> None:
            with bench.scheduler.hold(lambda: 0.0, VirtualTime()) as waiter:
                bench.scheduler.charge(waiter, 1.0)
                order.append("work")
                runner.on_run = lambda bucket, planes: order.append("timing")

        worker = threading.Thread(target=work)
        worker.start()
        until(lambda: len(bench.scheduler._waiting) == 1)
        go_on.release()
        worker.join(WAIT_S)
        assert bench.timer.timed.wait(WAIT_S)
    assert order[0] == "work"


def test_nothing_is_timed_while_something_runs_or_has_just_run(monkeypatch):
    monkeypatch.setattr(timing_module, "SHORTEST_LULL_S", math.inf)
    runner, looks = SumRunner(), threading.Semaphore(0)
    with Bench(runner, is_bulk_alone=looks.release) as bench:  # asked at each look, and never so
        with bench.scheduler.hold(lambda: 0.0, VirtualTime()) as waiter:
            bench.scheduler.charge(waiter, 1.0)
            assert bench.scheduler.idle_s == 0.0
            assert looks.acquire(timeout=WAIT_S)
        for _ in range(12):
            assert looks.acquire(timeout=WAIT_S)
        assert runner.timed == []
        monkeypatch.setattr(timing_module, "SHORTEST_LULL_S", 0.0)
        assert bench.timer.timed.wait(WAIT_S)


def test_bulk_work_that_never_ends_shares_a_little_of_the_time(monkeypatch):
    monkeypatch.setattr(timing_module, "SHORTEST_LULL_S", 3600.0)  # nor is anything timed before it
    monkeypatch.setattr(timing_module, "BULK_SHARE", 0.1)
    runner, bulk = SumRunner(), threading.Event()
    bulk.set()
    with Bench(runner, is_bulk_alone=bulk.is_set) as bench:

        def work() -> None:
            share = VirtualTime()
            while bulk.is_set():
                with bench.scheduler.hold(lambda: 0.0, share) as waiter:
                    bench.scheduler.charge(waiter, 1e-4)

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        until(lambda: bench.scheduler._waiting)
        before = len(runner.timed)
        until(lambda: len(runner.timed) > before)
        bulk.clear()
        for worker in workers:
            worker.join(WAIT_S)


def test_a_bucket_that_fails_is_told_of_and_the_others_are_timed_later(monkeypatch, caplog):
    monkeypatch.setattr(timing_module, "AGAIN_S", 0.001)
    runner = SumRunner(error=RuntimeError("INTERNAL: broken"))
    with Bench(runner) as bench:
        until(lambda: "m: bucket 1x16 could not be timed" in caplog.text)
        runner.error = None
        assert bench.timer.timed.wait(WAIT_S)
    assert "INTERNAL: broken" in caplog.text


def test_costs_are_kept_when_all_are_timed_and_when_the_engine_closes(start):
    kept = []
    engine = start(
        SumRunner(),
        costs=BucketCosts(1e-6),
        keep_costs=lambda costs: kept.append({b: len(ms) for b, ms in costs.timings.items()}),
    )
    engine.wait_timed(WAIT_S)
    engine.close(WAIT_S)
    engine.close(WAIT_S)
    assert kept == [dict.fromkeys(engine.grid.buckets, 2)] * 2


def test_waiting_for_timings_that_do_not_come_ends(start):
    runner = SumRunner()
    compiles = runner.slow_to_compile[SMALL] = threading.Event()
    engine = start(runner, costs=BucketCosts(1e-6), ready=False)
    with pytest.raises(TimeoutError, match="not every bucket was timed"):
        engine.wait_timed(0.0)
    compiles.set()


def test_batches_longer_than_expected_make_every_bucket_dearer(start):
    costs = timed_costs({SMALL: 1e-4, LARGE: 2e-4, Bucket(1, 64): 2e-4})  # less than Python takes
    engine = start(SumRunner(), costs=costs)
    before = engine.snapshot().costs
    for k in range(30):
        sums(engine.ask([encoding(5 + k)]))
    after = engine.snapshot().costs
    factors = {after[bucket] / before[bucket] for bucket in before}
    assert min(factors) > 1.5
    assert max(factors) == pytest.approx(min(factors))
    assert costs.host_ms not in (0.0, costs_module.HOST_MS)  # it is measured


def test_two_runs_at_once_are_timed_as_two(monkeypatch):
    both = threading.Barrier(2, timeout=60)

    class Meeting(NullReplica):
        def run(self, bucket, planes, outputs):
            both.wait()  # passes only while the other one runs
            return super().run(bucket, planes, outputs)

    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)  # a second a look
    # both look when they begin and when they end, and have two seconds each, or one and three
    assert milliseconds(Meeting("dense", NULL), BUCKET, together=2) in (1000.0, 750.0)


def test_what_fails_beside_another_is_raised():
    class Failing(NullReplica):
        def run(self, bucket, planes, outputs):
            raise MemoryError

    with pytest.raises(MemoryError):
        milliseconds(Failing("dense", NULL), BUCKET, together=2)


def test_a_bucket_is_timed_full_of_tokens():
    runner, runs = SumRunner(), []
    runner.on_run = lambda bucket, planes: runs.append(planes)
    assert 0 < milliseconds(runner, BUCKET) < float("inf")
    assert len(runs) > 1  # quick as it is
    assert (runs[0][2] == 1).all()  # one segment in each row, no padding
    np.testing.assert_array_equal(runs[0][1], np.tile(np.arange(16), (2, 1)))


def test_a_full_bucket_holds_short_sequences_and_no_padding():
    ids, positions, segments, types, bounds = full_planes(Bucket(2, 80), 32)
    assert (ids == 1).all()
    assert not types.any()
    np.testing.assert_array_equal(segments, np.repeat([[1, 2, 3]], [32, 32, 16], 1).repeat(2, 0))
    slots = Bucket(2, 80).slots
    starts, ends = bounds[:, :slots], bounds[:, slots : 2 * slots]
    assert starts.tolist() == [[0, 32, 64] + [0] * (slots - 3)] * 2
    assert ends.tolist() == [[32, 64, 80] + [0] * (slots - 3)] * 2
    np.testing.assert_array_equal(positions[0], [*range(32), *range(32), *range(16)])
    many = Bucket(1, 8192)
    assert full_planes(many, 32)[2].max() <= many.slots
