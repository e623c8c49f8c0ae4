"""Programs are compiled in threads that give way, and every compile is counted."""

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from queue import SimpleQueue

import jax
import numpy as np
import pytest
from fakes import WAIT_S

from jaxembed.engine.compiles import NICENESS, WORKERS, _work, compile_lowered


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
    queue: SimpleQueue = SimpleQueue()
    compiled: Future = Future()
    queue.put((compiled, Lowered(), {"compiler_options": {}}))

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
    assert done.stdout.splitlines() == [f"{WORKERS} 0", "at the end True"]


AT_THE_END = """
import os, threading
from jaxembed.engine.compiles import WORKERS, start_compiling

ends = threading.Event()
class Lowered:
    def compile(self, compiler_options):
        begun.release()
        ends.wait()
        os.write(1, b"compiled\\n")  # several threads print
def end(future):
    os.write(1, b"cancelled\\n" if future.cancelled() else b"not cancelled\\n")
    ends.set()
begun = threading.Semaphore(0)
running = [start_compiling(Lowered(), {}) for _ in range(WORKERS)]
waiting = start_compiling(Lowered(), {})
waiting.add_done_callback(end)
for _ in running: begun.acquire()
"""


def test_at_the_end_programs_that_wait_are_cancelled_and_begun_ones_awaited():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["cancelled", *["compiled"] * WORKERS]


def test_what_the_compiler_raises_is_raised():
    lowered = jax.jit(lambda x: x + 1).lower(np.float32(0))
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_lowered(lowered, {"xla_no_such_option": "1"})
