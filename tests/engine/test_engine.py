"""The queue and its threads, with runners that are plain Python."""

import gc
import logging
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from fakes import (
    SMALL_GRID,
    WAIT_S,
    EngineUnderTest,
    SumRunner,
    count_of,
    encoding,
    entered,
    future_of,
    sums,
    timed_costs,
    until,
)

from jaxembed.data.work import Work, work_from_encodings
from jaxembed.engine.batch import place
from jaxembed.engine.engine import FAILURES_TO_SICK, Engine
from jaxembed.engine.future import Answers
from jaxembed.engine.queue import MAX_WINDOW_SEQUENCES, PriorityQueue
from jaxembed.engine.scheduler import DeviceScheduler, VirtualTime
from jaxembed.errors import BackendError, Cancelled, EmptyInput, InputTooLong

GRID = SMALL_GRID
SHORT, WIDE, LONG = GRID.buckets


def compiled(engine: Engine) -> Engine:
    """Wait until nothing of the warm-up is left to do."""
    for thread in engine.warmup.threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return engine


def blocked(engine: Engine, runner: SumRunner):
    """Occupy the device: what is submitted after it waits in the queue."""
    runner.gate.clear()
    first = engine.ask([encoding(10)])
    entered(runner)
    return first


def test_answers_come_back_in_the_order_of_their_inputs(start, runner):
    engine = start(runner)
    lengths = [3, 60, 1, 16, 17, 2, 64, 5] * 10
    future = engine.ask([encoding(*[7 + k] * n) for k, n in enumerate(lengths)])
    assert sums(future) == [(7 + k) * n for k, n in enumerate(lengths)]
    assert engine.waiting == (0, 0)
    assert (future.inference_s > 0).all()
    assert (future.queue_s >= 0).all()


def test_many_threads_get_their_own_answers(start):
    engine, barrier = start(SumRunner(), SumRunner()), threading.Barrier(8)

    def work(k: int) -> None:
        draw = np.random.default_rng(k)
        barrier.wait()
        for n in range(30):
            lengths = draw.integers(1, 64, size=draw.integers(1, 6))
            future = engine.ask([encoding(*[100 * k + n + 2] * size) for size in lengths])
            assert sums(future) == [(100 * k + n + 2) * size for size in lengths]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert engine.waiting == (0, 0)
    assert engine.tokens_per_s > 0


def work_of(*lengths: int) -> Work:
    return work_from_encodings([encoding(*[5] * length) for length in lengths])


def test_a_lone_short_text_is_computed_in_the_calling_thread(start, runner):
    engine, names = compiled(start(runner)), []
    runner.on_run = lambda bucket, planes: names.append(threading.current_thread().name)
    future = engine.compute_here(work_of(3))
    assert future is not None
    assert sums(future) == [15.0]
    assert future.queue_s.tolist() == [0.0]
    assert names == [threading.current_thread().name]
    assert engine.snapshot().ran[SHORT].useful_tokens == 3


@pytest.mark.parametrize("lengths", [(3, 4), (20,), (65,), (0,)])
def test_other_requests_are_queued(start, runner, lengths):
    engine = compiled(start(runner))
    assert engine.compute_here(work_of(*lengths)) is None
    assert engine.compute_here(work_of(3), "bulk") is None
    assert engine.compute_here(work_of(3), "urgent") is None  # which `submit` refuses
    assert runner.ran == []


def test_a_text_is_queued_while_another_one_runs_and_after_a_failure(start, runner):
    engine = compiled(start(runner))
    first = blocked(engine, runner)
    assert engine.compute_here(work_of(3)) is None
    runner.gate.set()
    assert sums(first) == [10.0]
    until(lambda: engine.workers[0].scheduler.idle_s > 0)
    runner.on_run = lambda bucket, planes: engine.compute_here(work_of(4)) and pytest.fail("two")
    assert engine.compute_here(work_of(3)) is not None
    runner.error = RuntimeError("broken")
    assert engine.compute_here(work_of(3)) is None
    runner.error = None
    assert engine.compute_here(work_from_encodings([encoding(SumRunner.BAD)])) is None
    assert engine.healthy


def test_a_text_is_not_computed_here_if_answers_are_cached_or_the_device_is_remote(start, runner):
    assert compiled(start(runner, cache_bytes=10**6)).compute_here(work_of(3)) is None
    runner.is_remote = True
    assert compiled(start(runner)).compute_here(work_of(3)) is None


def test_an_interrupted_text_leaves_nothing_behind(start, runner):
    engine = compiled(start(runner))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.compute_here(work_of(3))
    assert engine.compute_here(work_of(3)) is not None
    assert engine.waiting == (0, 0)


@pytest.mark.parametrize("in_time", [True, False])
def test_close_waits_for_a_text_that_is_computed_here(start, runner, in_time):
    engine = compiled(start(runner))
    runner.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(engine.compute_here, work_of(3))
        entered(runner)
        if in_time:
            closing = threading.Thread(target=engine.close)
            closing.start()
            until(lambda: engine.snapshot().closing)
            runner.gate.set()
            closing.join(WAIT_S)
        else:
            engine.close(timeout_s=0.0)
            engine.free()
            assert not hasattr(runner, "freed")
            runner.gate.set()
        answered = future.result(WAIT_S)
    assert answered is not None
    assert sums(answered) == [15.0]
    assert engine.compute_here(work_of(3)) is None


def test_no_batch_holds_more_than_max_batch_requests(start, runner):
    engine = start(runner, max_batch_requests=2)
    first = blocked(engine, runner)
    future = engine.ask([encoding(30 + k) for k in range(7)])
    runner.gate.set()
    assert sums(future) == [30.0 + k for k in range(7)]
    assert sums(first) == [10.0]
    assert len(runner.ran) == 5  # the first one and four of at most two


def test_cancelled_work_leaves_the_queue_and_never_runs(start, runner):
    engine = start(runner)
    first = blocked(engine, runner)
    future = engine.ask([encoding(50)] * 20)
    kept = engine.ask([encoding(60, 60)])
    assert engine.waiting == (21, 22)
    engine.cancel(future)
    assert engine.waiting == (1, 2)
    engine.cancel(future)  # a second time changes nothing
    assert engine.waiting == (1, 2)
    runner.gate.set()
    assert sums(kept) == [120.0]
    assert sums(first) == [10.0]
    assert 50 not in runner.seen
    assert engine.waiting == (0, 0)
    with pytest.raises(Cancelled):
        future.result(0.0)
    engine.cancel(kept)  # which is answered
    assert sums(kept) == [120.0]
    assert count_of(engine.telemetry.cancelled_requests) == 1


def test_a_request_behind_very_many_cancelled_ones_still_runs(start, runner):
    engine = start(runner)
    first = blocked(engine, runner)
    gone = engine.ask([encoding(50, k) for k in range(MAX_WINDOW_SEQUENCES + 10)])
    kept = engine.ask([encoding(60)])
    engine.cancel(gone)
    runner.gate.set()
    assert sums(first) == [10.0]
    assert sums(kept) == [60.0]
    assert 50 not in runner.seen


def test_all_who_asked_for_what_fails_are_told_and_each_by_its_own_place(start, runner):
    engine = start(runner)
    first = blocked(engine, runner)
    one = engine.ask([encoding(30), encoding(20)])
    two = engine.ask([encoding(20), encoding(31)])
    usual = runner.run

    def run(*batch, **options):
        answer = usual(*batch, **options)
        return {"dense": np.where(answer["dense"] == 20, np.nan, answer["dense"])}

    runner.run = run
    runner.gate.set()
    for future, index in ((one, 1), (two, 0)):
        with pytest.raises(BackendError, match=f"input {index}: the result is not finite"):
            future.result(WAIT_S)
    assert sums(first) == [10.0]


def test_short_requests_run_behind_very_many_that_wait_for_a_bucket(start, runner):
    runner.slow_to_compile[LONG] = threading.Event()
    engine = start(runner, ready=False)
    long = engine.ask([encoding(*[9] * 16, k) for k in range(MAX_WINDOW_SEQUENCES + 1)])
    assert sums(engine.ask([encoding(5)])) == [5.0]
    engine.cancel(long)
    runner.slow_to_compile[LONG].set()


def test_a_needed_bucket_that_does_not_compile_fails_those_who_wait_and_who_come(start, runner):
    runner.cannot_compile.add(LONG)
    runner.slow_to_compile[LONG] = threading.Event()
    engine = start(runner, ready=False)
    waiting = engine.ask([encoding(*[9] * 40)])
    runner.slow_to_compile[LONG].set()
    with pytest.raises(BackendError, match="could not be compiled"):
        waiting.result(WAIT_S)
    with pytest.raises(RuntimeError, match="XLA cannot compile 1x64"):
        engine.warmup.wait(WAIT_S)
    with pytest.raises(BackendError):
        engine.ask([encoding(5)])
    assert engine.compute_here(work_of(3)) is None
    assert not engine.ready
    assert engine.waiting == (0, 0)


def test_three_failures_in_a_row_make_it_unhealthy_until_a_probe_succeeds(start, runner):
    engine = start(runner, probe_every_s=0.001)
    for broken, failures in ((True, 1), (True, 2), (False, 0), (True, 1), (True, 2), (True, 3)):
        assert engine.healthy
        runner.broken = broken
        future = engine.ask([encoding(5)])
        if not broken:
            assert sums(future) == [5.0]
            continue
        with pytest.raises(BackendError, match="reference"):
            sums(future)
        if failures < 3:  # an answer reaches its waiter after it is counted, so this can't be early
            assert engine.snapshot().failures == (failures,)
    assert not engine.healthy
    assert not engine.ready
    runner.broken = False
    until(lambda: engine.healthy)  # nobody asks anything: it probes by itself
    assert engine.ready
    assert sums(engine.ask([encoding(6)])) == [6.0]


@pytest.mark.parametrize("full", [False, True])
def test_other_devices_join_when_their_buckets_are_compiled(start, runner, full, caplog):
    other = SumRunner()
    other.lower = raising(AssertionError("each bucket is lowered once"))
    other.slow_to_compile[LONG] = threading.Event()
    with caplog.at_level(logging.INFO):
        engine = start(runner, other, ready=False, full_warmup=full)
        assert other.compiling.acquire(timeout=WAIT_S)
        if not full:
            engine.wait_ready(WAIT_S)
        assert engine.ready is not full
        for k in range(5, 15):
            assert sums(engine.ask([encoding(k)])) == [float(k)]
        assert (engine.snapshot().joined, other.ran) == (1, [])
        assert count_of(engine.telemetry.joined_workers) == 1
        other.slow_to_compile[LONG].set()
        assert engine.warmup.joined.wait(WAIT_S)
        engine.wait_ready(WAIT_S)
        first = blocked(engine, runner)
        until(lambda: engine.ask([encoding(5)]) and other.ran)
    runner.gate.set()
    assert sums(first) == [10.0]
    assert (engine.snapshot().joined, set(other.compiled)) == (2, set(GRID.buckets))
    assert engine._lowered == {}
    assert f"ready: 3 of 3 buckets on {1 + full} of 2 devices" in caplog.text
    assert "in use: 2 of 2 devices" in caplog.text


@pytest.mark.parametrize("full", [False, True])
def test_a_device_whose_programs_do_not_compile_is_left_out(start, runner, full, caplog):
    broken = SumRunner()
    broken.cannot_compile.add(LONG)
    engine = start(runner, broken, SumRunner(), full_warmup=full)
    assert "replica 1 do not compile: it is left out" in caplog.text
    assert engine.ready
    assert engine.snapshot().joined == 2
    assert engine._lowered == {}
    for k in range(5, 15):
        assert sums(engine.ask([encoding(k)])) == [float(k)]
    assert broken.ran == []
    for worker in (engine.workers[0], engine.workers[2]):
        worker.failures = FAILURES_TO_SICK
    assert not engine.healthy
    with ExitStack() as devices:
        for worker in (engine.workers[0], engine.workers[2]):
            devices.enter_context(worker.scheduler.hold(lambda: 1e9)).overdue = True
        assert engine.stuck


def test_a_bucket_that_is_compiled_while_a_device_joins_is_compiled_for_it_too():
    first, other = SumRunner(), SumRunner()
    other.slow_to_compile[SHORT] = first.slow_to_compile[WIDE] = threading.Event()
    engine = EngineUnderTest([first, other], GRID)
    engine._compile(SHORT)
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(engine._compile, WIDE), pool.submit(engine._join, engine.workers[1])]
        assert other.compiling.acquire(timeout=WAIT_S)
        engine._compile(LONG)
        assert other.compiled == []
        first.slow_to_compile[WIDE].set()
        for task in tasks:
            task.result(WAIT_S)
    assert sorted(other.compiled) == sorted(engine.snapshot().costs) == sorted(GRID.buckets)


@pytest.mark.parametrize("full", [False, True])
def test_close_while_a_device_joins_answers_what_waits(start, runner, full):
    other, third = SumRunner(), SumRunner()
    other.slow_to_compile[LONG] = threading.Event()
    engine = start(runner, other, third, ready=False, full_warmup=full)
    assert other.compiling.acquire(timeout=WAIT_S)
    first = blocked(engine, runner)
    waiting = engine.ask([encoding(7)])
    closer = threading.Thread(target=engine.close, args=(WAIT_S,))
    closer.start()
    until(lambda: engine.snapshot().closing)
    runner.gate.set()
    assert [sums(future) for future in (first, waiting)] == [[10.0], [7.0]]
    other.slow_to_compile[LONG].set()
    closer.join(WAIT_S)
    assert engine.snapshot().threads == 0
    assert third.compiled == []
    if full:
        with pytest.raises(BackendError, match="closed before"):
            engine.wait_ready(0.0)


def test_close_finishes_the_queue_and_stops_the_threads(start, runner):
    engine = start(runner)
    first = blocked(engine, runner)
    futures = [engine.ask([encoding(40 + k)] * 9) for k in range(4)]
    closer = threading.Thread(target=engine.close, args=(WAIT_S,))
    closer.start()
    runner.gate.set()
    closer.join(WAIT_S)
    assert sums(first) == [10.0]
    assert [sums(future) for future in futures] == [[40.0 + k] * 9 for k in range(4)]
    assert engine.snapshot().threads == 0
    with pytest.raises(BackendError, match="closed"):
        engine.ask([encoding(5)])


def test_close_fails_what_waits_for_a_bucket_that_is_not_compiled(start, runner):
    runner.slow_to_compile[LONG] = threading.Event()
    engine = start(runner, ready=False)
    future = engine.ask([encoding(*[9] * 40)])
    closing = threading.Thread(target=engine.close, args=(WAIT_S,))
    closing.start()
    with pytest.raises(BackendError, match="closed"):
        future.result(WAIT_S)
    runner.slow_to_compile[LONG].set()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def noting(order: list[int]) -> SumRunner:
    runner = SumRunner()
    runner.on_run = lambda bucket, planes: order.append(int(planes[0].max()))
    return runner


def test_a_query_waits_for_one_batch_also_where_its_model_has_bulk_and_another_one_too(start):
    scheduler = DeviceScheduler()
    order: list[int] = []
    runners = [noting(order), noting(order)]
    costs = {SHORT: 1.6, WIDE: 12.8, LONG: 100.0}
    mine, other = (
        compiled(start(runner, turns=[scheduler], costs=timed_costs(costs))) for runner in runners
    )
    for runner in runners:
        runner.gate.clear()
    futures = [mine.ask([encoding(*[11] * n) for n in range(17, 60)])]
    entered(runners[0])
    futures.append(other.ask([encoding(*[12] * n) for n in range(17, 60)]))
    futures.append(mine.ask([encoding(*[13] * 40)], priority="interactive"))
    until(lambda: len(scheduler._waiting) == 3)  # a thread of the busy engine and two of the other
    for runner in runners:
        runner.gate.set()
    for future in futures:
        future.result(WAIT_S)
    assert order[:3] == [11, 13, 12]


def test_models_share_the_time_of_their_device_and_rest_earns_no_credit(start):
    scheduler = DeviceScheduler()
    order: list[int] = []
    greedy, modest = VirtualTime(end=500.0), VirtualTime(end=100.0)  # seconds they have had
    engines = [
        compiled(start(noting(order), turns=[scheduler], shares=[one])) for one in (greedy, modest)
    ]
    with scheduler.hold(lambda: 0.0):
        futures = [engine.ask([encoding(k + 11)]) for k, engine in enumerate(engines)]
        until(lambda: len(scheduler._waiting) == 4)  # both threads of each
    for future in futures:
        future.result(WAIT_S)
    assert order == [12, 11]
    assert 100 < modest.end < 500 < greedy.end
    assert scheduler.clock == 500
    engines[1].ask([encoding(12)]).result(WAIT_S)
    assert scheduler.clock == 500  # the modest one went on from here, not from its 100
    assert modest.end > 500


@contextmanager
def rival(scheduler: DeviceScheduler, urgency: float):
    """A program of another model: it is in line, and keeps the device until the block ends."""
    done, in_line = threading.Event(), len(scheduler._waiting)

    def work() -> None:
        with scheduler.hold(lambda: urgency):
            assert done.wait(WAIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: len(scheduler._waiting) > in_line)
    try:
        yield
    finally:
        done.set()
        thread.join(WAIT_S)


def sickened(engine: EngineUnderTest, runner: SumRunner) -> EngineUnderTest:
    runner.broken = True
    while engine.healthy:
        with pytest.raises(BackendError):
            sums(engine.ask([encoding(5)]))
    return engine


def test_a_sick_model_probes_in_its_turn_beside_a_busy_one(start, runner):
    scheduler = DeviceScheduler()
    engine = sickened(compiled(start(runner, turns=[scheduler], probe_every_s=0.001)), runner)
    with ExitStack() as device:
        device.enter_context(scheduler.hold(lambda: math.inf))
        runner.broken = False
        until(lambda: len(scheduler._waiting))
        with rival(scheduler, urgency=-1e6):  # it has had far more time
            device.close()
            until(lambda: engine.healthy)


def test_an_engine_that_has_nothing_to_do_closes_beside_a_busy_one(start, runner):
    scheduler = DeviceScheduler()
    engine = compiled(start(runner, turns=[scheduler]))
    closer = threading.Thread(target=engine.close, args=(WAIT_S,))
    with ExitStack() as device:
        device.enter_context(scheduler.hold(lambda: math.inf))
        future = engine.ask([encoding(5)])
        until(lambda: len(scheduler._waiting))
        engine.cancel(future)  # its thread is in line for nothing
        closer.start()
        until(lambda: engine.snapshot().closing)
        with rival(scheduler, urgency=1e6):
            device.close()
            closer.join(WAIT_S)
            assert engine.snapshot().threads == 0
    assert runner.seen == []


def test_a_sick_engine_closes_without_another_probe(start, runner):
    scheduler = DeviceScheduler()
    engine = sickened(compiled(start(runner, turns=[scheduler], probe_every_s=3600.0)), runner)
    before = len(runner.timed)
    with scheduler.hold(lambda: math.inf):
        future = engine.ask([encoding(5)])
        until(lambda: len(scheduler._waiting))
        engine.cancel(future)
        closer = threading.Thread(target=engine.close, args=(WAIT_S,))
        closer.start()
        until(lambda: engine.snapshot().closing)
    closer.join(WAIT_S)
    assert engine.snapshot().threads == 0
    assert len(runner.timed) == before


def test_a_seat_that_fails_leaves_the_work_to_one_that_is_well(start):
    well, sick = SumRunner(), SumRunner()
    engine = start(well, sick, probe_every_s=3600.0, max_batch_requests=1)
    well.gate.clear()  # it keeps what it gets
    sick.broken = True
    futures = {n: engine.ask([encoding(n)]) for n in range(5, 30)}
    until(lambda: engine.snapshot().failures[1] >= FAILURES_TO_SICK)
    well.gate.set()
    for n, future in futures.items():  # what failed ran again
        assert sums(future) == [float(n)]
    assert engine.healthy


def test_what_fails_on_two_devices_is_told_and_makes_one_of_them_fail(start):
    engine = start(*(runners := [SumRunner(), SumRunner()]), probe_every_s=3600.0)
    for runner in runners:
        runner.broken = True
    with pytest.raises(BackendError, match="the device failed on this batch"):
        sums(engine.ask([encoding(5)]))
    assert sorted(engine.snapshot().failures) == [0, 1]
    for runner in runners:
        runner.broken = False
    with pytest.raises(BackendError, match="not finite"):
        sums(engine.ask([encoding(SumRunner.BAD)]))
    assert sums(engine.ask([encoding(5)])) == [5.0]


def test_a_failed_probe_is_not_run_elsewhere_nor_anything_once_the_engine_closes(start):
    sick, well = SumRunner(), SumRunner()
    engine = compiled(start(sick, well, probe_every_s=0.001))
    sick.broken, engine.workers[0].failures = True, FAILURES_TO_SICK - 1
    until(lambda: engine.ask([encoding(5)]) and sick.ran)
    before = len(sick.timed)
    until(lambda: len(sick.timed) >= before + 5)
    assert not well.timed
    sequences = future_of([encoding(5)]).sequences
    failed = [Answers(sequences, error=BackendError("broken"))]
    batch = place(SHORT, sequences)
    assert engine._leave_failed(engine.workers[0], batch, failed) == []
    engine._failed.clear()
    engine._closing = True
    assert engine._leave_failed(engine.workers[0], batch, failed) == failed


def test_what_failed_runs_where_it_failed_if_every_other_device_is_lost(start):
    lost, well = SumRunner(), SumRunner()
    engine = start(lost, well, probe_every_s=3600.0)
    lost.gate.clear()
    until(lambda: engine.ask([encoding(5)]) and lost.ran)  # it keeps this batch
    well.broken = True
    future = engine.ask([encoding(6)])
    until(lambda: engine._failed)
    engine.workers[0].failures = FAILURES_TO_SICK
    well.broken = False
    assert sums(future) == [6.0]
    lost.gate.set()


def test_a_device_that_answers_only_nan_is_sick(start, runner, monkeypatch):
    engine = start(runner, probe_every_s=3600.0)
    usual = runner.run
    monkeypatch.setattr(runner, "run", lambda *a, **k: {"dense": usual(*a, **k)["dense"] * np.nan})
    for _ in range(FAILURES_TO_SICK):
        with pytest.raises(BackendError, match="not finite"):
            sums(engine.ask([encoding(5)]))
    assert not engine.healthy


def raising(error: BaseException):
    def call(*arguments, **options):
        raise error

    return call


def of_another_width(*arguments, **options):
    return {"dense": np.ones((8, 4, 3), np.float32)}


@pytest.mark.parametrize(
    ("part", "call"),
    [
        (lambda engine: (PriorityQueue, "requeue"), raising(MemoryError())),
        (lambda engine: (engine.workers[0].scheduler, "charge"), raising(KeyError("1x16"))),
        (lambda engine: (engine.workers[0].runner, "run"), raising(SystemExit())),
        (lambda engine: (engine.workers[0].runner, "run"), of_another_width),
        (lambda engine: (engine, "_note"), raising(RuntimeError())),
    ],
)
def test_a_batch_that_is_taken_is_settled_whatever_happens(start, runner, monkeypatch, part, call):
    engine = compiled(start(runner))
    threads = engine.snapshot().threads
    first = blocked(engine, runner)
    futures = [engine.ask([encoding(5), encoding(6)]), engine.ask([encoding(*[7] * 40)])]
    with monkeypatch.context() as patch:
        patch.setattr(*part(engine), call)
        runner.gate.set()
        for future in futures:
            with pytest.raises(BackendError, match="internal error"):
                future.result(WAIT_S)
    with suppress(BackendError):
        first.result(WAIT_S)
    assert sums(engine.ask([encoding(6)])) == [6.0]
    assert engine.snapshot().threads == threads


def test_a_waiter_that_cannot_be_woken_holds_up_no_other_of_its_batch(start, runner):
    engine = start(runner)
    first = blocked(engine, runner)
    one = engine.ask([encoding(5)], wake=raising(RuntimeError("the loop is closed")))
    two = engine.ask([encoding(6)])
    runner.gate.set()
    assert [sums(future) for future in (first, one, two)] == [[10.0], [5.0], [6.0]]


def test_a_sequence_of_no_tokens_or_too_many_is_refused_where_it_comes_in(start, runner):
    engine = start(runner)
    with pytest.raises(EmptyInput):
        engine.ask([encoding(5), encoding()])
    with pytest.raises(InputTooLong, match="65 tokens, the limit is 64"):
        engine.ask([encoding(1), encoding(*[1] * 65)])
    assert engine.waiting == (0, 0)


def test_an_answered_ticket_is_freed_without_a_collection(start, runner):
    engine = start(runner)
    gc.disable()
    try:
        future = engine.ask([encoding(5), encoding(6)])
        assert sums(future) == [5.0, 6.0]
        gone = weakref.finalize(future, lambda: None)
        del future
        assert sums(engine.ask([encoding(7)])) == [7.0]  # the thread has let go of the batch
        assert not gone.alive
    finally:
        gc.enable()


def test_a_snapshot_has_what_ran_and_what_waits(start, runner):
    engine = compiled(start(runner))
    blocked(engine, runner)
    waiting = engine.ask([encoding(1, 2), encoding(3)], priority="bulk")
    queues = engine.snapshot().queues
    assert (queues["bulk"].inputs, queues["bulk"].tokens, queues["interactive"].inputs) == (2, 3, 0)
    assert queues["bulk"].oldest_s > 0
    text = engine.telemetry.exposition().decode()
    assert 'jaxembed_lane_size{lane="interactive"} 0.0' in text
    assert 'jaxembed_lane_size{lane="bulk"} 2.0' in text
    runner.gate.set()
    sums(waiting)
    until(lambda: sum(use.runs for use in engine.snapshot().ran.values()) == 2)
    state = engine.snapshot()
    assert sum(use.useful_tokens for use in state.ran.values()) == 4
    assert min(use.device_s for use in state.ran.values()) > 0
    assert set(state.cost_sources.values()) == {"kept"}
    assert state.lost_share == 0.0
    engine.close(WAIT_S)  # after it every batch is counted
    text = engine.telemetry.exposition().decode()
    for figure in ("te_batch_next_size_count 2", "te_batch_next_tokens_sum 4", "te_queue_size 0"):
        assert f"\n{figure}.0\n" in text
    assert "\njaxembed_batch_fill_ratio_sum 0.25\n" in text
