"""Which bucket compiles when, and what becomes of one that does not."""

import logging
import threading
from functools import partial

import pytest
from fakes import until

from jaxembed.engine.autotune import warmup as warmup_module
from jaxembed.engine.autotune.warmup import Warmup
from jaxembed.engine.bucket import Bucket, BucketGrid
from jaxembed.errors import BackendError

GRID = BucketGrid(
    (Bucket(1, 16), Bucket(4, 16), Bucket(16, 16), Bucket(1, 64), Bucket(2, 64), Bucket(8, 64))
)
COVERING = [Bucket(1, 16), Bucket(1, 64), Bucket(8, 64)]
REST = [Bucket(16, 16), Bucket(2, 64), Bucket(4, 16)]


class Compiler:
    """Notes what it compiles; waits before a bucket in `gates`, fails on one in `broken`."""

    def __init__(self, broken=(), gates=()):
        self.order: list[Bucket] = []
        self.broken = set(broken)
        self.gates = {bucket: threading.Event() for bucket in gates}
        self.reached = {bucket: threading.Event() for bucket in GRID.buckets}

    def __call__(self, bucket: Bucket) -> None:
        self.reached[bucket].set()
        if bucket in self.gates:
            assert self.gates[bucket].wait(60)
        self.order.append(bucket)
        if bucket in self.broken:
            raise RuntimeError(f"no {bucket}")


def warmup_of(compiler, *, full=False, workers=1, needed=lambda: None, **options):
    return Warmup(GRID, compiler, needed, full=full, workers=workers, **options)


def ended(warmup: Warmup) -> None:
    """Wait until its threads have nothing left to do."""
    for thread in warmup.threads:
        thread.join(60)
        assert not thread.is_alive()


def progress_to(count: int):
    """A callback that notes the steps, and an event set at step `count`."""
    steps: list[tuple[int, int]] = []
    reached = threading.Event()

    def on_progress(done: int, total: int) -> None:
        steps.append((done, total))
        if done == count:
            reached.set()

    return steps, reached, on_progress


def test_a_needed_length_jumps_the_queue_with_its_smallest_bucket():
    needs = iter([17, None, 17, 65, None, None, None])  # nothing holds 65: the usual order
    compiler = Compiler()
    warmup = warmup_of(compiler, needed=lambda: next(needs))
    warmup.start()
    ended(warmup)
    assert compiler.order[:4] == [Bucket(1, 64), Bucket(1, 16), Bucket(2, 64), Bucket(8, 64)]


def test_one_thread_compiles_in_the_order_of_the_plan_and_tells_each_step():
    compiler = Compiler()
    steps, reached, on_progress = progress_to(6)
    warmup = warmup_of(compiler, on_progress=on_progress)
    assert not warmup.ready
    warmup.start()
    assert reached.wait(60)
    assert compiler.order == COVERING + REST
    assert warmup.compiled == compiler.order
    assert steps == [(k, 6) for k in range(1, 7)]


def test_a_needed_bucket_that_does_not_compile_is_raised_and_told(caplog):
    compiler = Compiler(broken=[COVERING[1]])
    told = threading.Event()
    warmup = warmup_of(compiler, on_failure=lambda error: told.set())
    with caplog.at_level(logging.ERROR):
        warmup.start()
        with pytest.raises(RuntimeError, match="no 1x64"):
            warmup.wait(60.0)
        assert told.wait(60)
    assert not warmup.ready
    assert "bucket 1x64 does not compile" in caplog.text
    assert compiler.order == COVERING[:2]  # no further one is tried


def test_an_optional_bucket_that_does_not_compile_is_left_out_with_a_warning(caplog):
    compiler = Compiler(broken=[REST[0]])
    finished = threading.Event()

    def on_progress(done: int, total: int) -> None:
        raise OSError("the terminal has gone")  # which stops nothing

    warmup = warmup_of(compiler, on_progress=on_progress, on_finish=finished.set)
    with caplog.at_level(logging.WARNING):
        warmup.start()
        assert finished.wait(60)
    assert warmup.ready
    warmup.wait(0.0)
    assert sorted(warmup.compiled) == sorted(set(GRID.buckets) - {REST[0]})
    assert "bucket 16x16 does not compile and is left out" in caplog.text
    assert "progress could not be shown" in caplog.text


def test_once_ready_and_in_use_one_thread_goes_on_with_pauses(monkeypatch):
    monkeypatch.setattr(warmup_module, "LONGEST_WAIT_S", 0.02)
    monkeypatch.setattr(warmup_module, "IDLE_CHECK_S", 0.001)
    compiler, asked = Compiler(), []
    names: list[str] = []

    def compile_bucket(bucket):
        names.append(threading.current_thread().name)
        compiler(bucket)

    def idle_s() -> float:
        asked.append(1)
        return 0.0

    warmup = warmup_of(compile_bucket, workers=2, idle_s=idle_s)
    warmup.start()
    warmup.wait(60.0)
    ended(warmup)
    assert set(warmup.compiled) == set(GRID.buckets)
    late = names[-(len(GRID.buckets) - len(COVERING) - 1) :]  # one may be begun before it is ready
    assert set(late) == {"compile-0"}
    assert len(asked) > 3


def test_a_pause_ends_when_the_warm_up_stops(monkeypatch):
    monkeypatch.setattr(warmup_module, "LONGEST_WAIT_S", 3600.0)
    warmup = warmup_of(Compiler(), workers=2, idle_s=lambda: 0.0)
    warmup.start()
    warmup.wait(60.0)
    warmup.stop()
    ended(warmup)


@pytest.mark.parametrize("full", [False, True])
def test_it_is_ready_when_the_covering_buckets_are_compiled_or_all(full):
    last = REST[-1] if full else COVERING[-1]
    compiler = Compiler(gates=[last, REST[0]])
    if full:
        compiler.gates[REST[0]].set()
    warmup = warmup_of(compiler, full=full)
    warmup.start()
    assert compiler.reached[last].wait(60)
    assert not warmup.ready
    with pytest.raises(TimeoutError):
        warmup.wait(0.0)
    compiler.gates[last].set()
    warmup.wait(60.0)
    assert warmup.ready
    assert warmup.compiled == COVERING + (REST if full else [])
    compiler.gates[REST[0]].set()


@pytest.mark.parametrize("full", [False, True])
def test_other_workers_join_after_the_required_buckets_and_before_the_rest(full):
    compiler, gate = Compiler(), threading.Event()

    def join(worker: str) -> bool:
        compiler.order.append(worker)
        assert gate.wait(60)
        return worker == "good"

    joins = [partial(join, worker) for worker in ("good", "bad")]
    warmup = warmup_of(compiler, full=full, workers=2, joins=joins)
    warmup.start()
    until(lambda: "good" in compiler.order)
    if not full:
        warmup.wait(60.0)
    assert warmup.ready is not full
    gate.set()
    ended(warmup)
    assert warmup.ready
    assert warmup.joined.is_set()
    required = len(GRID.buckets if full else COVERING)
    assert compiler.order[required : required + 2] == ["good", "bad"]
    assert len(compiler.order) == len(GRID.buckets) + 2


def test_no_worker_joins_after_stop_nor_if_a_required_bucket_does_not_compile():
    joined, stopped = (
        [],
        warmup_of(Compiler(), joins=[lambda: bool(stopped.stop()), lambda: joined.append(1)]),
    )
    stopped.start()
    ended(stopped)
    compiler = Compiler(broken=[COVERING[0]], gates=[COVERING[1]])
    broken = warmup_of(compiler, workers=2, joins=[lambda: joined.append(1)])
    broken.start()
    with pytest.raises(RuntimeError, match="no 1x16"):
        broken.wait(60.0)
    compiler.gates[COVERING[1]].set()
    ended(broken)
    assert joined == []


def test_stop_compiles_no_further_bucket_and_tells_those_who_wait():
    compiler = Compiler(gates=[COVERING[1]])
    warmup = warmup_of(compiler)
    warmup.start()
    assert compiler.reached[COVERING[1]].wait(60)
    warmup.stop()
    with pytest.raises(BackendError, match="closed before"):
        warmup.wait(60.0)
    compiler.gates[COVERING[1]].set()
    ended(warmup)
    assert compiler.order == COVERING[:2]


def test_workers_compile_side_by_side_also_once_ready_and_not_in_use():
    pairs = [threading.Barrier(2, timeout=60) for _ in range(2)]
    meets = dict.fromkeys(COVERING[:2], pairs[0]) | dict.fromkeys(REST[:2], pairs[1])
    compiler = Compiler()

    def compile_bucket(bucket):
        if bucket in meets:
            meets[bucket].wait()  # passes only if both are compiled at once
        compiler(bucket)

    warmup = warmup_of(compile_bucket, workers=2, idle_s=lambda: 1e9)
    warmup.start()
    ended(warmup)
    assert sorted(compiler.order) == sorted(GRID.buckets)  # each once
