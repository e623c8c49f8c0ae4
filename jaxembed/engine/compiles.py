"""Counts what this process compiles, told by JAX itself."""

from functools import cache

import jax.monitoring


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
