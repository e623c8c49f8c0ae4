"""Compiles XLA programs in threads of low priority, counts them, and sets up a compile cache."""

import atexit
import logging
import math
import os
import re
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import jax
import jax.monitoring
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jaxembed.platform.cache_folder import make_private, refuse_shared
from jaxembed.platform.cores import core_count, host_id

logger = logging.getLogger(__name__)

# The number of compiling threads: XLA uses several cores for a program. With several devices, many
# programs are compiled at once.
WORKERS = max(2, int(core_count()) // 4)
NICENESS = 10  # a ninth of the CPU share of a serving thread, if both want the same core
STACK_BYTES = 64 * 1024 * 1024  # with large models XLA overflows the usual 8 MiB of a thread
UNREADABLE_PROGRAM = "Error reading persistent compilation cache entry"  # start of JAX's warning

# XLA:CPU of jaxlib 0.10.2 gives wrong sums where it fuses a product and a reduction
# (github.com/jax-ml/jax/issues/39103). Its sums are right if it may fuse only single products.
SAFE_FUSION: dict[str, str | bool] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}

_starting = threading.Lock()  # held to start the threads, which is done once, and for `_compiling`
_compiling: WeakSet[Future] = WeakSet()  # all programs that were not freed yet
_ended_at = -math.inf  # time.monotonic() when the last program was compiled


def compile_lowered(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compile a program, or read it from JAX's persistent compile cache, and wait for the result.

    `options` are XLA's compiler options. A background thread compiles, on Linux with a low
    priority; the threads that XLA:CPU starts at its first compilation inherit this priority. Raises
    the errors of XLA.
    """
    return start_compiling(lowered, options).result()


def start_compiling(
    lowered: jax.stages.Lowered, options: dict[str, Any], devices: Sequence[Any] = ()
) -> "Future[jax.stages.Compiled]":
    """Compile a program as `compile_lowered` does, without waiting for the result.

    `devices` are those that run the program, if it was lowered without devices. The future gets the
    program, or the errors of XLA.
    """
    with _starting:
        queue = _queue()
        compiled: Future[jax.stages.Compiled] = Future()
        _compiling.add(compiled)
    arguments: dict[str, Any] = {"compiler_options": options}
    if devices:
        arguments["device_assignment"] = tuple(devices)
    queue.put((compiled, lowered, arguments))
    return compiled


def idle_s() -> float:
    """Return for how many seconds nothing has been compiled; 0 while a program is compiled or waits
    for it."""
    with _starting:
        if any(not compiled.done() for compiled in _compiling):
            return 0.0
    return time.monotonic() - _ended_at


@cache
def _queue() -> SimpleQueue:
    """Return the queue of the compiling threads; the first call starts the threads.

    An item of the queue is a tuple of a future, a lowered program and the arguments of
    `Lowered.compile`. This is not an executor, because an executor refuses work while the
    interpreter ends, when the threads of an engine may still compile.
    """
    queue: SimpleQueue = SimpleQueue()
    usual = threading.stack_size(STACK_BYTES)
    try:
        for k in range(WORKERS):
            threading.Thread(
                target=_work, args=(queue,), name=f"compile-xla-{k}", daemon=True
            ).start()
    finally:
        threading.stack_size(usual)
    atexit.register(_wait_for_all)
    return queue


def _wait_for_all() -> None:
    """Cancel the programs that wait for a thread, and wait for the others.

    The interpreter aborts if it ends while a thread is inside XLA."""
    with _starting:
        programs = list(_compiling)
    wait([compiled for compiled in programs if not compiled.cancel()])


def _work(queue: SimpleQueue) -> None:
    """Compile the programs of the queue forever, at a low priority; runs in a thread."""
    if sys.platform == "linux":  # on other systems all threads have the priority of the process
        thread = threading.get_native_id()
        niceness = max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS)
        with suppress(OSError):  # a sandbox may forbid another priority
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    global _ended_at
    while True:
        compiled, lowered, arguments = queue.get()
        if compiled.set_running_or_notify_cancel():
            try:
                compiled.set_result(lowered.compile(**arguments))
            except BaseException as error:  # any error is raised in the thread that waits
                compiled.set_exception(error)
            _ended_at = time.monotonic()
        del compiled, lowered  # or the program would stay in memory until the next one


def keep_programs(cache_dir: Path) -> None:
    """Turn on JAX's persistent compile cache, in a folder of `cache_dir` for this kind of host.

    The setting applies to the whole process. If the process has set the cache before, for example
    by JAX_COMPILATION_CACHE_DIR, nothing changes. Raises OSError if the folder cannot be made, and
    ConfigError if it belongs to another user or other users can write to it.
    """
    config: Any = jax.config  # Any, because JAX makes the attributes at run time
    if config.jax_compilation_cache_dir is not None:
        return
    _keep_in(cache_dir / "programs" / host_id())
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # otherwise the key of a program depends on the path of the cache, and no other directory could
    # use the program
    config.update("jax_persistent_cache_enable_xla_caches", "none")


def keep_programs_of(device: Any) -> None:
    """Keep the programs of an accelerator apart from those of the host's CPU.

    Hosts with different CPUs then share programs, if they share the cache directory or
    `jaxembed cache` copies it. Nothing changes for a CPU, or if `keep_programs` was not called.
    Raises OSError and ConfigError as `keep_programs` does.
    """
    config: Any = jax.config
    folder = Path(config.jax_compilation_cache_dir or "")
    if device.platform != "cpu" and folder.name == host_id():
        _keep_in(folder.with_name(re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower())))


def _keep_in(programs: Path) -> None:
    """Let JAX keep compiled programs in this folder of the cache directory."""
    for folder in (programs.parent.parent, programs.parent, programs):
        make_private(folder)
        refuse_shared(folder)
    config: Any = jax.config
    config.update("jax_compilation_cache_dir", str(programs))
    compilation_cache.reset_cache()  # or JAX would use no cache if it has compiled a program before
    replace_unreadable_programs(programs)


def replace_unreadable_programs(folder: Path) -> None:
    """Remove unreadable programs from JAX's persistent cache `folder` when JAX warns of one.

    A process that is killed while JAX writes a program leaves an incomplete file. JAX never
    overwrites a file, so at every start it would warn and compile the program again. This function
    replaces warnings.showwarning of the whole process by one that removes unreadable files.
    """
    show_warning = warnings.showwarning
    once = threading.Lock()

    def show_or_replace(message, category, filename, lineno, file=None, line=None) -> None:
        if not str(message).startswith(UNREADABLE_PROGRAM):
            show_warning(message, category, filename, lineno, file, line)
        elif once.acquire(blocking=False):  # never released, so only the first warning removes
            removed = 0
            for path in list(folder.glob("*-cache")):
                # zlib cannot read zstandard: if JAX compresses with it, all programs are removed
                try:
                    zlib.decompress(path.read_bytes())
                except (OSError, zlib.error):
                    path.unlink(missing_ok=True)
                    removed += 1
            logger.warning(
                "some compiled programs in %s cannot be read; %d were removed and are compiled "
                "again: %s",
                folder,
                removed,
                str(message).splitlines()[0],
            )

    warnings.showwarning = show_or_replace


class CompileEvents:
    """Counts compiled programs and hits of the persistent cache, and adds up the seconds of both.

    In jax 0.10, JAX also sends the duration event for a cache hit, so the number of compiled
    programs is the difference of both counts.
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


compile_events = cache(CompileEvents)
"""Returns the CompileEvents of the process, always the same object: JAX keeps every listener, so
each further object would stay registered."""


@cache
def compiler_options(platform: str) -> dict[str, str | bool]:
    """Return XLA's compiler options for a platform: SAFE_FUSION on a CPU, otherwise none.

    The first call for a CPU compiles a small program, to find out whether this XLA has the option
    of SAFE_FUSION. If XLA lacks it, no option is returned. Raises the errors of XLA.
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
