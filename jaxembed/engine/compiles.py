"""Compiles in threads that give way to those that serve, and counts what is compiled."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import jax.monitoring

WORKERS = 2
NICENESS = 10  # a ninth of the weight of a thread that serves, where both want a core
STACK_BYTES = 64 * 1024 * 1024  # XLA overflows the 8 MiB a thread gets on large models


def compile_lowered(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compile it, or find it in the persistent cache. Raises what XLA raises.

    On Linux it runs in a thread of low priority. XLA:CPU makes its own threads for compiling at the
    first compilation, and they inherit the priority of the thread that asked for it.
    """
    return _threads().submit(lowered.compile, compiler_options=options).result()


@cache
def _threads() -> ThreadPoolExecutor:
    usual = threading.stack_size(STACK_BYTES)
    try:
        threads = ThreadPoolExecutor(WORKERS, "compile-xla", initializer=_give_way)
        for started in [threads.submit(_meet.wait) for _ in range(WORKERS)]:
            started.result()  # now, for the stack's size holds for every thread that starts
    finally:
        threading.stack_size(usual)
    return threads


_meet = threading.Barrier(WORKERS)


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


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
