"""Configures JAX and the process, then starts the devices."""

import os
import sys
from pathlib import Path

from jaxembed import memory
from jaxembed.errors import BackendError, ConfigError


def configure_jax(cache_dir: Path, memory_fraction: float | None) -> None:
    """Set everything that jaxembed sets for the whole process, then start the devices.

    `memory_fraction` is the share of a GPU's memory that may be taken. Raises ConfigError if
    `cache_dir` cannot be made, if others can write to it, or if JAX_PLATFORMS names no kind of
    device; BackendError if a device cannot be started.
    """
    if "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):  # the user's choice stays
        memory.keep()
    if memory_fraction is not None:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(memory_fraction)
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # its old name; both are an error
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from jaxembed.engine.programs import keep_programs

    try:
        keep_programs(cache_dir)
    except OSError as error:
        raise ConfigError(
            f"--cache-dir {cache_dir} (JAXEMBED_CACHE) cannot be used: {error.strerror}"
        ) from error
    # a seat's thread waits for its batch anyway; asynchronous dispatch would oversubscribe cores
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    sys.setswitchinterval(0.0005)  # keeps the event loop responsive beside the engine's threads
    try:
        jax.local_devices()
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS") or "not set"
        # a device that is there may be taken or not be up yet; one of no such kind will not come
        kind = ConfigError if "known backends" in str(error) else BackendError
        raise kind(f"JAX cannot start a device (JAX_PLATFORMS is {platforms}): {error}") from error
