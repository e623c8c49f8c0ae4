"""Compiles programs in threads of low priority, counts them, and has JAX keep them."""

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
from jax.experimental.compilation_cache import compilation_cache

from jaxembed.platform.cache_folder import make_private, refuse_shared
from jaxembed.platform.cores import host_id

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
            threading.Thread(
                target=_work, args=(queue,), name=f"compile-xla-{k}", daemon=True
            ).start()
    finally:
        threading.stack_size(usual)
    return queue


def _work(queue: SimpleQueue) -> None:
    """Compile the programs of the queue, in a thread of low priority that never ends."""
    if sys.platform == "linux":  # on other systems a thread has no priority of its own
        thread = threading.get_native_id()
        niceness = max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS)
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    while True:
        compiled, lowered, options = queue.get()
        try:
            compiled.set_result(lowered.compile(compiler_options=options))
        except BaseException as error:  # any error goes to the thread that waits
            compiled.set_exception(error)
        del compiled, lowered  # or the program would stay in memory until the next one


def keep_programs(cache_dir: Path) -> None:
    """Keep the programs that this process compiles in `cache_dir`, in a folder for this host.

    It sets JAX's persistent compilation cache, which holds for the whole process. Where the process
    has set it already, for example by JAX_COMPILATION_CACHE_DIR, nothing is changed. Raises OSError
    if the folder cannot be made, and ConfigError if others can write to it.
    """
    config: Any = jax.config  # its attributes are made at run time
    if config.jax_compilation_cache_dir is not None:
        return
    programs = cache_dir / "programs" / host_id()
    for folder in (cache_dir, programs.parent, programs):
        make_private(folder)
        refuse_shared(folder)
    config.update("jax_compilation_cache_dir", str(programs))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX has chosen to use none if it has compiled before
    replace_unreadable_programs(programs)


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
            removed = 0
            for path in list(folder.glob("*-cache")):
                try:  # of those that JAX writes with zstandard, where it is installed, none is kept
                    zlib.decompress(path.read_bytes())
                except (OSError, zlib.error):
                    path.unlink(missing_ok=True)
                    removed += 1
            logger.warning(
                "compiled programs in %s cannot be read; %d removed, what is missing is compiled "
                "anew: %s",
                folder,
                removed,
                str(message).splitlines()[0],
            )

    warnings.showwarning = show_or_replace


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
