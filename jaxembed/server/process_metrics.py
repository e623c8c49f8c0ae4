"""The metrics of the process: CPU time, memory, open files, and what it runs."""

from functools import cache
from importlib import metadata
from platform import python_version

from prometheus_client import CollectorRegistry, Info, ProcessCollector, generate_latest

from jaxembed import __version__


@cache
def process_registry() -> CollectorRegistry:
    """The metrics of this process, under the names that every Prometheus client gives them, and
    `jaxembed_build_info`. `process_` series are there on Linux only."""
    import jax

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    (device, *_) = jax.local_devices()
    facts = {
        "version": __version__,
        "jax": metadata.version("jax"),
        "python": python_version(),
        "platform": device.platform,
        "device_kind": device.device_kind,
    }
    Info("jaxembed_build", "What the server runs, as labels", registry=registry).info(facts)
    return registry


def process_exposition() -> bytes:
    """The metrics of the process in Prometheus' text format, version 0.0.4."""
    return generate_latest(process_registry())
