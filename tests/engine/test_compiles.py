"""Programs are compiled in threads that give way, and every compile is counted."""

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from queue import PriorityQueue

import jax
import numpy as np
import pytest
from fakes import WAIT_S, until

from jaxembed.engine.compiles import (
    NICENESS,
    WORKERS,
    _queue,
    _work,
    compile_lowered,
    start_compiling,
)


class Lowered:
    def compile(self, compiler_options):
        self.options = compiler_options
        self.thread = threading.current_thread()
        if sys.platform == "linux":
            self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return self


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority")
def test_a_compile_runs_in_a_thread_that_gives_way():
    unchecked = getattr(compile_lowered, "__wrapped__", compile_lowered)  # no jax.stages.Lowered
    lowered = unchecked(Lowered(), {"a": "b"})
    assert lowered.options == {"a": "b"}
    assert lowered.thread is not threading.current_thread()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert lowered.niceness == min(own + NICENESS, 19) or lowered.niceness == NICENESS


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority")
def test_in_a_process_of_lower_priority_threads_keep_that():
    """Only root may raise it: for others no program was compiled."""
    queue: PriorityQueue = PriorityQueue()
    compiled: Future = Future()
    queue.put((False, 0, compiled, Lowered, {"compiler_options": {}}))

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        _work(queue)  # which never ends

    threading.Thread(target=work, daemon=True).start()
    assert compiled.result(WAIT_S).niceness == 19


IN_A_PROCESS = """
import atexit, threading
from jaxembed.engine.compiles import compile_lowered

class Lowered:
    def compile(self, compiler_options):
        return threading.current_thread().name

names = set()
def ask(): names.add(compile_lowered(Lowered(), {}))
asking = [threading.Thread(target=ask) for _ in range(8)]
for thread in asking: thread.start()
for thread in asking: thread.join()
threads = sum(thread.name.startswith("compile-xla") for thread in threading.enumerate())
print(threads, threading.stack_size())
atexit.register(lambda: print("at the end", bool(compile_lowered(Lowered(), {}))))
"""


def test_threads_are_started_once_and_compile_until_the_interpreter_has_ended():
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["2 0", "at the end True"]


LATER = """
import threading
from jaxembed.engine.compiles import WORKERS, start_compiling

ends = threading.Event()
class Lowered:
    def compile(self, compiler_options):
        begun.release()
        ends.wait()
        print("compiled")
def end(future):
    print("cancelled", future.cancelled())
    ends.set()
begun = threading.Semaphore(0)
running = [start_compiling(Lowered, {}, is_later=True) for _ in range(WORKERS)]
waiting = start_compiling(Lowered, {}, is_later=True)
waiting.add_done_callback(end)
for _ in running: begun.acquire()
"""


def test_programs_for_later_are_cancelled_at_the_end_and_begun_ones_awaited():
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["cancelled True", "compiled", "compiled"]


def test_programs_for_later_come_after_the_others():
    order, begun = [], threading.Semaphore(0)

    class Named:
        def __init__(self, name: str, end: threading.Event | None = None):
            self.name, self.end = name, end

        def compile(self, compiler_options):
            order.append(self.name)
            begun.release()
            if self.end is not None:
                self.end.wait(WAIT_S)

    unchecked = getattr(compile_lowered, "__wrapped__", compile_lowered)  # no jax.stages.Lowered
    ends = [threading.Event() for _ in range(WORKERS)]
    lowered = [Named("busy", end) for end in ends] + [Named("needed"), Named("needed")]
    asking = [threading.Thread(target=unchecked, args=(one, {})) for one in lowered]
    for thread in asking[:WORKERS]:
        thread.start()
    for _ in range(WORKERS):
        assert begun.acquire(timeout=WAIT_S)
    later = start_compiling(lambda: Named("later"), {}, is_later=True)
    for thread in asking[WORKERS:]:
        thread.start()
    until(lambda: _queue().qsize() == 3)
    ends[0].set()  # one thread compiles all that waits
    later.result(WAIT_S)
    for end in ends:
        end.set()
    for thread in asking:
        thread.join(WAIT_S)
    assert order[WORKERS:] == ["needed", "needed", "later"]


def test_what_the_compiler_raises_is_raised():
    lowered = jax.jit(lambda x: x + 1).lower(np.float32(0))
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_lowered(lowered, {"xla_no_such_option": "1"})
