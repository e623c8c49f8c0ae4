"""Compiles programs in threads of low priority, and counts them."""

import logging
import os
import sys
import threading
import warnings
import zlib
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.monitoring
import numpy as np

logger = logging.getLogger(__name__)

WORKERS = 2  # number of compiling threads
NICENESS = 10  # a ninth of the CPU share of a serving thread, if both want the same core
STACK_BYTES = 64 * 1024 * 1024  # with large models XLA overflows the usual 8 MiB of a thread
UNREADABLE_PROGRAM = "Error reading persistent compilation cache entry"  # start of JAX's warning

# XLA:CPU of jaxlib 0.10.2 gives wrong sums where it fuses a product and a reduction
# (github.com/jax-ml/jax/issues/39103). With single products as the only fusions it does not.
SAFE_FUSION: dict[str, str | bool] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}

_starting = threading.Lock()


def compile_lowered(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compile a program, or take it from the persistent cache, and wait for it.

    `options` are XLA's compiler options. On Linux it compiles in a thread of low priority; XLA:CPU
    starts threads for compiling at its first compilation, and they inherit the priority. Raises
    what XLA raises.
    """
    with _starting:
        queue = _queue()
    compiled: Future[jax.stages.Compiled] = Future()
    queue.put((compiled, lowered, options))
    return compiled.result()


@cache
def _queue() -> SimpleQueue:
    """The queue of the compiling threads, which are started at the first call.

    It is not an executor, because an executor takes no work once the interpreter ends, when an
    engine's threads may still compile.
    """
    queue: SimpleQueue = SimpleQueue()
    usual = threading.stack_size(STACK_BYTES)
    try:
        for k in range(WORKERS):
            name = f"compile-xla-{k}"
            threading.Thread(target=_work, args=(queue,), name=name, daemon=True).start()
    finally:
        threading.stack_size(usual)
    return queue


def _work(queue: SimpleQueue) -> None:
    """Compile the programs of the queue, in a thread that never ends."""
    _give_way()
    while True:
        compiled, lowered, options = queue.get()
        try:
            compiled.set_result(lowered.compile(compiler_options=options))
        except BaseException as error:  # any error goes to the thread that waits
            compiled.set_exception(error)
        del compiled, lowered  # or the program would stay in memory until the next one


def _give_way() -> None:
    """Lower the priority of this thread."""
    if sys.platform == "linux":  # on other systems a thread has no priority of its own
        thread = threading.get_native_id()
        niceness = max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS)
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def replace_unreadable_programs(folder: Path) -> None:
    """Remove unreadable programs from JAX's persistent cache `folder` when JAX warns of one.

    A process that is killed while JAX writes a program leaves a part of it. JAX never overwrites a
    program, so it would compile it and warn at every start. This replaces warnings.showwarning of
    the whole process.
    """
    show = warnings.showwarning
    first = threading.Lock()

    def show_or_replace(message, category, filename, lineno, file=None, line=None) -> None:
        if not str(message).startswith(UNREADABLE_PROGRAM):
            show(message, category, filename, lineno, file, line)
        elif first.acquire(blocking=False):  # never released, so that it is done and logged once
            unreadable = [path for path in folder.glob("*-cache") if not _is_readable(path)]
            for path in unreadable:
                path.unlink(missing_ok=True)
            logger.warning(
                "compiled programs in %s cannot be read; %d removed, what is missing is compiled "
                "anew: %s",
                folder,
                len(unreadable),
                str(message).splitlines()[0],
            )

    warnings.showwarning = show_or_replace


def _is_readable(program: Path) -> bool:
    """Whether zlib can unpack a program. None is readable if JAX uses zstandard, if installed."""
    try:
        zlib.decompress(program.read_bytes())
    except (OSError, zlib.error):
        return False
    return True


class CompileEvents:
    """Counts compiled programs, hits of the persistent cache, and the seconds of both.

    In jax 0.10 the duration event also fires on cache hits, so compiles are the difference.
    """

    def __init__(self) -> None:
        self.durations = 0
        self.cache_hits = 0
        self.seconds = 0.0
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    @property
    def compiles(self) -> int:
        """The number of programs that were compiled, without cache hits."""
        return self.durations - self.cache_hits

    def _on_event(self, event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.cache_hits += 1

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.durations += 1
            self.seconds += duration_secs


@cache
def compile_events() -> CompileEvents:
    """The counts of the process. There is one listener, because JAX never removes listeners."""
    return CompileEvents()


@cache
def compiler_options(platform: str) -> dict[str, str | bool]:
    """XLA's compiler options for a platform: on a CPU SAFE_FUSION, if this XLA has the option.

    The first call compiles a small program to find that out. Raises what XLA raises.
    """
    if platform != "cpu":
        return {}
    try:
        compile_lowered(jax.jit(lambda x: x + 1).lower(np.float32(0)), SAFE_FUSION)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        logger.info("this XLA has no YNNPACK fusions to restrict: %s", error)
        return {}
    return SAFE_FUSION
