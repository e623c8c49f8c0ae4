"""Compiles in threads that give way to those that serve, and counts what is compiled."""

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

logger = logging.getLogger(__name__)

WORKERS = 2
NICENESS = 10  # a ninth of the weight of a thread that serves, where both want a core
STACK_BYTES = 64 * 1024 * 1024  # XLA overflows the 8 MiB a thread gets on large models
UNREADABLE_PROGRAM = "Error reading persistent compilation cache entry"  # begins JAX's warning

_starting = threading.Lock()


def compile_lowered(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compile it, or find it in the persistent cache. Raises what XLA raises.

    On Linux it runs in a thread of low priority. XLA:CPU makes its own threads for compiling at the
    first compilation, and they inherit the priority of the thread that asked for it.
    """
    with _starting:
        queue = _queue()
    compiled: Future[jax.stages.Compiled] = Future()
    queue.put((compiled, lowered, options))
    return compiled.result()


@cache
def _queue() -> SimpleQueue:
    """What waits for the threads. They are no executor's, which takes nothing more once the
    interpreter ends: an engine's threads may still compile then."""
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
    _give_way()
    while True:
        compiled, lowered, options = queue.get()
        try:
            compiled.set_result(lowered.compile(compiler_options=options))
        except BaseException as error:  # whatever it is goes to the one who waits
            compiled.set_exception(error)
        del compiled, lowered  # else a program would stay until the next one is compiled


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        thread = threading.get_native_id()
        niceness = max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS)
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def replace_unreadable_programs(folder: Path) -> None:
    """Have compiled programs that cannot be read removed from JAX's persistent cache.

    A process that is killed while JAX writes one leaves half of it. JAX never overwrites a program:
    it would compile this one, and warn of it, at every start. Changes how the whole process shows
    warnings.
    """
    show = warnings.showwarning
    first = threading.Lock()

    def show_or_replace(message, category, filename, lineno, file=None, line=None) -> None:
        if not str(message).startswith(UNREADABLE_PROGRAM):
            show(message, category, filename, lineno, file, line)
        elif first.acquire(blocking=False):  # and never released: one line says it
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
    """Whether zlib unpacks it. JAX prefers zstandard where that is installed: then none is."""
    try:
        zlib.decompress(program.read_bytes())
    except (OSError, zlib.error):
        return False
    return True


class CompileEvents:
    """Programs compiled, programs found in the persistent cache, and the seconds of both.

    In jax 0.10 the duration event fires on cache hits too, so compiles are the difference.
    """

    def __init__(self) -> None:
        self.durations = 0
        self.cache_hits = 0
        self.seconds = 0.0
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    @property
    def compiles(self) -> int:
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
    """The one listener of the process: JAX keeps listeners for good."""
    return CompileEvents()
